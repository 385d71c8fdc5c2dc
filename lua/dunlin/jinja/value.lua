--- Python's values in Lua.
--
--   bool            Lua boolean                 int    Lua number (whole, within 2**53)
--   str             Lua string, or {k = "str"}  float  {k = "float", x = number}
--   None            value.None                  big    {k = "big", s = digits}: an int beyond 2**53, can only be printed
--   list, tuple     {k = , n = , [1..n]}        dict   {k = "dict", n = , keys = {...}, map = {hash key -> value}}
--   Undefined       {k = "undefined", why = message or a function that makes it}
--   generator       {k = "generator", n = , [1..n]}: can be walked once    namespace  {k = "namespace", map = }
--   macro, function, method, loop: see runtime.lua
local text = require("dunlin.jinja.text")
local limits = require("dunlin.jinja.limits")

local type, tostring, floor = type, tostring, math.floor
local fail, is_text, bytes, cat = text.fail, text.is_text, text.bytes, text.cat

local V = {}

local None = { k = "none" }
V.None = None

local NAMES = { none = "NoneType", undefined = "Undefined", big = "int", namespace = "Namespace", macro = "Macro", loop = "LoopContext",
  view = "dict_items", ["function"] = "function", method = "builtin_function_or_method" }

--- Python's name of the type of v.
local function type_name(v)
  local t = type(v)
  if t == "table" then
    return NAMES[v.k] or v.k
  end
  return t == "string" and "str" or t == "number" and "int" or t == "boolean" and "bool" or t
end
V.type_name = type_name

local MODULES = { namespace = "jinja2.utils.", macro = "jinja2.runtime.", loop = "jinja2.runtime." }

--- As Jinja's object_type_repr: "None" or "str object".
local function described(v)
  if v == None then
    return "None"
  end
  return (type(v) == "table" and MODULES[v.k] or "") .. type_name(v) .. " object"
end

function V.undefined(why)
  return { k = "undefined", why = why }
end

function V.no_attribute(v, name)
  return { k = "undefined", why = "'" .. described(v) .. "' has no attribute '" .. bytes(name) .. "'" }
end

function V.no_element(v, shown)
  return { k = "undefined", why = described(v) .. " has no element " .. shown }
end

--- Raises what using v as something else raises if v is undefined.
local function check_defined(v)
  if type(v) == "table" and v.k == "undefined" then
    fail(v.unsafe and "SecurityError" or "UndefinedError", v.why)
  end
end
V.check_defined = check_defined

local function is_undefined(v)
  return type(v) == "table" and v.k == "undefined"
end
V.is_undefined = is_undefined

local function float(x)
  return { k = "float", x = x }
end
V.float = float

--- An int from a number that is whole; beyond 2**53 it would not be exact.
local function int(x)
  if x > 2 ^ 53 or x < -2 ^ 53 or x ~= x then
    fail("OverflowError", "an integer beyond 2**53")
  end
  return x
end

--- The number that v stands for in arithmetic, and whether it is a float; nil if it is none.
local function number(v)
  local t = type(v)
  if t == "number" then
    return v, false
  elseif t == "boolean" then
    return v and 1 or 0, false
  elseif t == "table" then
    if v.k == "float" then
      return v.x, true
    elseif v.k == "big" then
      return tonumber(v.s), false
    end
  end
end
V.number = number

function V.list(items, n)
  items.k, items.n = "list", n or #items
  return items
end

function V.tuple(items, n)
  items.k, items.n = "tuple", n or #items
  return items
end

function V.generator(items, n)
  items.k, items.n = "generator", n or #items
  return items
end

function V.dict()
  return { k = "dict", n = 0, keys = {}, map = {} }
end

--- What a dict finds v by: text by its bytes, numbers by their value. Text and numbers differ by type in Lua as well.
local function hash_key(v)
  local t = type(v)
  if t == "string" then
    return v
  elseif t == "table" then
    if v.k == "str" then
      return v.s
    elseif v.k == "list" or v.k == "dict" then
      fail("TypeError", "unhashable type: '" .. v.k .. "'")
    elseif v.k == "tuple" then
      local parts = {}
      for i = 1, v.n do
        local h = hash_key(v[i])
        parts[i] = type(h) .. ":" .. tostring(h)
      end
      return "\0tuple\0" .. table.concat(parts, "\0")
    elseif v.k == "float" then
      return v.x
    end
    return v
  end
  return t == "boolean" and (v and 1 or 0) or v
end
V.hash_key = hash_key

function V.dict_set(d, key, value)
  local h = hash_key(key)
  if d.map[h] == nil then
    d.n = d.n + 1
    d.keys[d.n] = key
  end
  d.map[h] = value
end

function V.dict_get(d, key)
  return d.map[hash_key(key)]
end

function V.truthy(v)
  if v == true or v == false then
    return v
  end
  local t = type(v)
  if t == "string" then
    return v ~= ""
  elseif t == "number" then
    return v ~= 0
  end
  local k = v.k
  if k == "str" then
    return v.s ~= ""
  elseif k == "none" or k == "undefined" then
    return false
  elseif k == "list" or k == "dict" or k == "tuple" or k == "view" then
    return v.n > 0
  elseif k == "float" then
    return v.x ~= 0
  end
  return true
end

-- Text of values

local function int_text(v)
  return v >= -2 ^ 31 and v < 2 ^ 31 and tostring(v) or string.format("%.0f", v)
end
V.int_text = int_text

local SHORT = { ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\\"] = "\\\\" }

--- Characters that Python's repr escapes beyond ASCII (the common ones of categories Zs, Zl, Zp, Cc, Cf, Co).
local function hidden(c)
  return c <= 0xA0 or c == 0xAD or c == 0x1680 or (c >= 0x2000 and c <= 0x200F) or (c >= 0x2028 and c <= 0x202F)
    or (c >= 0x205F and c <= 0x206F) or c == 0x3000 or (c >= 0xD800 and c <= 0xF8FF) or c == 0xFEFF or c >= 0xE0000
end

local function repr_string(s)
  local quote = (s:find("'", 1, true) and not s:find('"', 1, true)) and '"' or "'"
  if not string.find(s, "[%c\\'\127-\255]") then
    return quote .. s .. quote
  end
  local out, i = { quote }, 1
  while i <= #s do
    local c, w = text.codepoint(s, i)
    local piece = s:sub(i, i + w - 1)
    if SHORT[piece] or piece == quote then
      piece = SHORT[piece] or "\\" .. quote
    elseif c < 32 or c == 127 or (c > 127 and hidden(c)) then
      piece = string.format(c < 256 and "\\x%02x" or c < 65536 and "\\u%04x" or "\\U%08x", c)
    end
    out[#out + 1] = piece
    i = i + w
  end
  out[#out + 1] = quote
  return table.concat(out)
end

local put_repr

local function put_sequence(b, v, open, close, depth)
  text.put(b, open)
  for i = 1, v.n do
    if i > 1 then
      text.put(b, ", ")
    end
    put_repr(b, v[i], depth)
  end
  text.put(b, close)
end

local function put_mapping(b, d, depth)
  text.put(b, "{")
  for i = 1, d.n do
    if i > 1 then
      text.put(b, ", ")
    end
    put_repr(b, d.keys[i], depth)
    text.put(b, ": ")
    put_repr(b, d.map[hash_key(d.keys[i])], depth)
  end
  text.put(b, "}")
end

local function to_text_of_table(v, depth)
  local k = v.k
  if k == "float" then
    return text.float_repr(v.x)
  elseif k == "big" then
    return v.s
  elseif k == "none" then
    return "None"
  elseif k == "undefined" then
    if v.unsafe then
      fail("SecurityError", v.why)
    end
    return depth and "Undefined" or ""
  elseif k == "macro" then
    return "<Macro " .. repr_string(v.name) .. ">"
  elseif k == "generator" then
    return "<generator object>"
  end
end

put_repr = function(b, v, depth)
  depth = depth + 1
  if depth > limits.calls then
    fail("RecursionError", "a value nested deeper than " .. limits.calls .. " levels can't be printed")
  end
  local t = type(v)
  if t == "string" then
    text.put(b, repr_string(v))
  elseif t == "number" then
    text.put(b, int_text(v))
  elseif t == "boolean" then
    text.put(b, v and "True" or "False")
  elseif v.k == "str" then
    text.put(b, text.untrusted(repr_string(v.s)))
  elseif v.k == "list" then
    put_sequence(b, v, "[", "]", depth)
  elseif v.k == "tuple" then
    put_sequence(b, v, "(", v.n == 1 and ",)" or ")", depth)
  elseif v.k == "dict" then
    put_mapping(b, v, depth)
  elseif v.k == "view" then
    text.put(b, v.name)
    put_sequence(b, v, "([", "])", depth)
  elseif v.k == "namespace" then
    text.put(b, "<Namespace ")
    put_mapping(b, v, depth)
    text.put(b, ">")
  else
    text.put(b, to_text_of_table(v, depth) or "<" .. type_name(v) .. ">")
  end
end

function V.repr(v)
  local b = text.new_buffer()
  put_repr(b, v, 0)
  return text.finish(b)
end

--- Python's str(v).
function V.str(v)
  local t = type(v)
  if t == "string" then
    return v
  elseif t == "number" then
    return int_text(v)
  elseif t == "boolean" then
    return v and "True" or "False"
  elseif v.k == "str" then
    return v
  end
  return to_text_of_table(v) or V.repr(v)
end

-- Comparison

local eq

local function eq_sequence(a, b, depth)
  if a.n ~= b.n then
    return false
  end
  for i = 1, a.n do
    if not eq(a[i], b[i], depth) then
      return false
    end
  end
  return true
end

eq = function(a, b, depth)
  if a == b then
    return true
  end
  local ta, tb = type(a), type(b)
  if ta == "string" or tb == "string" then
    return is_text(a) and is_text(b) and bytes(a) == bytes(b)
  elseif ta == "table" and tb == "table" and a.k == b.k then
    local k = a.k
    if k == "str" then
      return a.s == b.s
    elseif k == "undefined" then
      return true
    elseif k == "list" or k == "tuple" or k == "dict" then
      depth = (depth or 0) + 1
      if depth > limits.calls then
        fail("RecursionError", "values nested deeper than " .. limits.calls .. " levels can't be compared")
      elseif k ~= "dict" then
        return eq_sequence(a, b, depth)
      elseif a.n ~= b.n then
        return false
      end
      for h, value in pairs(a.map) do
        if b.map[h] == nil or not eq(value, b.map[h], depth) then
          return false
        end
      end
      return true
    elseif k == "big" then
      return a.s == b.s
    end
  end
  local x, y = number(a), number(b)
  return x ~= nil and y ~= nil and x == y
end
V.eq = eq

local SYMBOLS = { lt = "<", le = "<=", gt = ">", ge = ">=" }

--- Three-way order of a and b: negative, 0 or positive; op names the operator in the message.
local function order(a, b, op)
  local x, y = number(a), number(b)
  if x and y then
    return x < y and -1 or x > y and 1 or 0
  elseif is_text(a) and is_text(b) then
    x, y = bytes(a), bytes(b)
    return x < y and -1 or x > y and 1 or 0
  elseif type(a) == "table" and type(b) == "table" and a.k == b.k and (a.k == "list" or a.k == "tuple") then
    for i = 1, math.min(a.n, b.n) do
      if not eq(a[i], b[i]) then
        return order(a[i], b[i], op)
      end
    end
    return a.n - b.n
  end
  check_defined(a)
  check_defined(b)
  fail("TypeError", "'" .. SYMBOLS[op] .. "' not supported between instances of '" .. type_name(a) .. "' and '" .. type_name(b) .. "'")
end
V.order = order

function V.lt(a, b)
  return order(a, b, "lt") < 0
end
function V.le(a, b)
  return order(a, b, "le") <= 0
end
function V.gt(a, b)
  return order(a, b, "gt") > 0
end
function V.ge(a, b)
  return order(a, b, "ge") >= 0
end

--- Stable sort of items[1..n] with `less`.
function V.sort(items, n, less)
  local from, to, width = items, {}, 1
  while width < n do
    for lo = 1, n, 2 * width do
      local mid, hi = math.min(lo + width, n + 1), math.min(lo + 2 * width, n + 1)
      local i, j = lo, mid
      for at = lo, hi - 1 do
        if i < mid and (j >= hi or not less(from[j], from[i])) then
          to[at], i = from[i], i + 1
        else
          to[at], j = from[j], j + 1
        end
      end
    end
    from, to, width = to, from, width * 2
  end
  return from
end

-- Walking

--- The items of anything that Python can iterate, as an array and their number. A generator is used up.
function V.items(v)
  local t = type(v)
  if t == "string" then
    return text.characters(v)
  elseif t == "table" then
    local k = v.k
    if k == "list" or k == "tuple" or k == "view" then
      return v, v.n
    elseif k == "dict" then
      return v.keys, v.n
    elseif k == "str" then
      return text.characters(v)
    elseif k == "generator" then
      local n = v.n
      v.n = 0
      return v, n
    elseif k == "undefined" then
      if v.unsafe then
        fail("SecurityError", v.why)
      end
      return {}, 0
    end
  end
  fail("TypeError", "'" .. type_name(v) .. "' object is not iterable")
end

function V.length(v)
  if is_text(v) then
    return text.length(v)
  elseif type(v) == "table" then
    local k = v.k
    if k == "list" or k == "tuple" or k == "dict" or k == "view" then
      return v.n
    elseif k == "undefined" then
      return 0
    end
  end
  fail("TypeError", "object of type '" .. type_name(v) .. "' has no len()")
end

function V.contains(container, v)
  if is_text(container) then
    if not is_text(v) then
      check_defined(v)
      fail("TypeError", "'in <string>' requires string as left operand, not " .. type_name(v))
    end
    return bytes(container):find(bytes(v), 1, true) ~= nil
  elseif type(container) == "table" and container.k == "dict" then
    return container.map[hash_key(v)] ~= nil
  elseif type(container) ~= "table" or container.k == "none" or container.k == "namespace" or container.k == "float" then
    fail("TypeError", "argument of type '" .. type_name(container) .. "' is not iterable")
  end
  local items, n = V.items(container)
  for i = 1, n do
    if eq(items[i], v) then
      return true
    end
  end
  return false
end

-- Arithmetic

local function unsupported(op, a, b)
  check_defined(a)
  check_defined(b)
  fail("TypeError", "unsupported operand type(s) for " .. op .. ": '" .. type_name(a) .. "' and '" .. type_name(b) .. "'")
end

local function joined(a, b)
  if a.n + b.n > limits.items then
    fail("OverflowError", "a list of more than " .. limits.items .. " items")
  end
  local out = { k = a.k, n = a.n + b.n }
  for i = 1, a.n do
    out[i] = a[i]
  end
  for i = 1, b.n do
    out[a.n + i] = b[i]
  end
  return out
end

local HTML = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&#34;", ["'"] = "&#39;" }

--- Text that `safe` or `escape` has marked as HTML (Jinja's Markup): other text is escaped when it is joined with it.
local function markup(v)
  return { k = "str", s = bytes(v), g = text.segments(v), markup = true }
end
V.markup = markup

local function escape(v)
  if type(v) == "table" and v.markup then
    return v
  end
  return text.like(v, (string.gsub(bytes(v), "[&<>\"']", HTML)))
end
V.escape = escape

local function join_text(a, b)
  if (type(a) == "table" and a.markup) or (type(b) == "table" and b.markup) then
    return markup(cat(escape(a), escape(b)))
  end
  return cat(a, b)
end

function V.add(a, b)
  local ta, tb = type(a), type(b)
  if ta == "string" and tb == "string" then
    return cat(a, b)
  elseif is_text(a) then
    if is_text(b) then
      return join_text(a, b)
    end
    check_defined(b)
    fail("TypeError", 'can only concatenate str (not "' .. type_name(b) .. '") to str')
  end
  local x, fx = number(a)
  local y, fy = number(b)
  if x and y then
    return (fx or fy) and float(x + y) or int(x + y)
  elseif ta == "table" and (a.k == "list" or a.k == "tuple") then
    if tb == "table" and b.k == a.k then
      return joined(a, b)
    end
    check_defined(b)
    fail("TypeError", "can only concatenate " .. a.k .. ' (not "' .. type_name(b) .. '") to ' .. a.k)
  end
  unsupported("+", a, b)
end

local function arithmetic(op, f)
  return function(a, b)
    local x, fx = number(a)
    local y, fy = number(b)
    if not x or not y then
      unsupported(op, a, b)
    end
    local z = f(x, y)
    return (fx or fy) and float(z) or int(z)
  end
end

V.sub = arithmetic("-", function(x, y)
  return x - y
end)

local function nonzero(y, what)
  if y == 0 then
    fail("ZeroDivisionError", what)
  end
  return y
end

V.floordiv = arithmetic("//", function(x, y)
  return floor(x / nonzero(y, "integer division or modulo by zero"))
end)

local modulo = arithmetic("%", function(x, y)
  return x - floor(x / nonzero(y, "integer modulo by zero")) * y
end)

V.pow = arithmetic("** or pow()", function(x, y)
  return x ^ y
end)

function V.div(a, b)
  local x, y = number(a), number(b)
  if not x or not y then
    unsupported("/", a, b)
  end
  return float(x / nonzero(y, "division by zero"))
end

local function repeated(v, n)
  local b, times = text.new_buffer(), math.max(n, 0)
  if is_text(v) then
    if #bytes(v) * times > limits.output_bytes then
      fail("OverflowError", "text of more than " .. limits.output_bytes .. " bytes")
    elseif bytes(v) == "" then
      return v
    end
    for _ = 1, times do
      text.put(b, v)
    end
    return text.finish(b)
  end
  if v.n * times > limits.items then
    fail("OverflowError", "a list of more than " .. limits.items .. " items")
  end
  local out = { k = v.k, n = v.n * times }
  for i = 0, out.n - 1 do
    out[i + 1] = v[i % v.n + 1]
  end
  return out
end

local function is_sequence(v)
  return is_text(v) or (type(v) == "table" and (v.k == "list" or v.k == "tuple"))
end

local multiply = arithmetic("*", function(x, y)
  return x * y
end)

function V.mul(a, b)
  if is_sequence(a) and type(b) == "number" then
    return repeated(a, b)
  elseif is_sequence(b) and type(a) == "number" then
    return repeated(b, a)
  elseif is_sequence(a) or is_sequence(b) then
    local other = is_sequence(a) and b or a
    check_defined(other)
    fail("TypeError", "can't multiply sequence by non-int of type '" .. type_name(other) .. "'")
  end
  return multiply(a, b)
end

function V.neg(v)
  local x, is_float = number(v)
  if not x then
    check_defined(v)
    fail("TypeError", "bad operand type for unary -: '" .. type_name(v) .. "'")
  end
  return is_float and float(-x) or int(0 - x)
end

function V.pos(v)
  local x, is_float = number(v)
  if not x then
    check_defined(v)
    fail("TypeError", "bad operand type for unary +: '" .. type_name(v) .. "'")
  end
  return is_float and v or x
end

--- printf-style formatting: %s %r %d %i %x %f %%, with width and precision left out.
local function percent(v, arg)
  local s, b, pos, used = bytes(v), text.new_buffer(), 1, 0
  local args = (type(arg) == "table" and arg.k == "tuple") and arg or V.tuple({ arg }, 1)
  while true do
    local i = s:find("%", pos, true)
    if not i then
      break
    end
    text.put(b, text.cut(v, pos, i - 1))
    local c = s:sub(i + 1, i + 1)
    if c == "%" then
      text.put(b, "%")
    else
      used = used + 1
      local a = args[used]
      if a == nil or used > args.n then
        fail("TypeError", "not enough arguments for format string")
      elseif c == "s" then
        text.put(b, V.str(a))
      elseif c == "r" then
        text.put(b, V.repr(a))
      else
        local x = number(a)
        if c ~= "d" and c ~= "i" and c ~= "x" and c ~= "f" then
          fail("ValueError", "unsupported format character '" .. c .. "'")
        elseif not x then
          fail("TypeError", "%" .. c .. " format: a real number is required, not " .. type_name(a))
        end
        local whole = x < 0 and -floor(-x) or floor(x)
        text.put(b, c == "f" and string.format("%f", x) or c == "x" and string.format("%x", whole) or int_text(whole))
      end
    end
    pos = i + 2
  end
  if used < args.n and not (args.n == 1 and type(arg) == "table" and arg.k == "dict") then
    fail("TypeError", "not all arguments converted during string formatting")
  end
  text.put(b, text.cut(v, pos, #s))
  return text.finish(b)
end
V.percent = percent

function V.mod(a, b)
  if is_text(a) then
    return percent(a, b)
  end
  return modulo(a, b)
end

function V.concat(a, b)
  return cat(V.str(a), V.str(b))
end

return V
