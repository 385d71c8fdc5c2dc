--- Jinja's filters and tests: filters[name](value, args, kwargs), tests[name](value, args) -> boolean.
local text = require("dunlin.jinja.text")
local V = require("dunlin.jinja.value")
local R = require("dunlin.jinja.runtime")
local methods = require("dunlin.jinja.methods")
local dumps = require("dunlin.jinja.json")

local fail, is_text, bytes = text.fail, text.is_text, text.bytes
local arg, need_int = methods.arg, methods.need_int
local None = V.None

local F, T = {}, {}

--- Items of v as a fresh array.
local function array(v)
  local items, n = V.items(v)
  local out = {}
  for i = 1, n do
    out[i] = items[i]
  end
  return out, n
end

-- Text

function F.string(v)
  return V.str(v)
end

function F.upper(v)
  return text.upper(V.str(v))
end
function F.lower(v)
  return text.lower(V.str(v))
end
function F.capitalize(v)
  return text.capitalize(V.str(v))
end
function F.title(v)
  return text.title(V.str(v))
end

function F.trim(v, args, kwargs)
  local chars = arg(args, kwargs, 1, "chars", None)
  return text.strip(V.str(v), chars ~= None and methods.need_text(chars, "trim arg") or nil, true, true)
end

function F.replace(v, args, kwargs)
  local old, new = arg(args, kwargs, 1, "old", None), arg(args, kwargs, 2, "new", None)
  return text.replace(V.str(v), V.str(old), V.str(new), need_int(arg(args, kwargs, 3, "count"), "replace"))
end

function F.indent(v, args, kwargs)
  local width = arg(args, kwargs, 1, "width", 4)
  local first, blank = V.truthy(arg(args, kwargs, 2, "first", false)), V.truthy(arg(args, kwargs, 3, "blank", false))
  local margin = is_text(width) and width or V.mul(" ", need_int(width, "indent"))
  local lines, n = text.splitlines(text.cat(V.str(v), "\n"))
  local b = text.new_buffer()
  for i = 1, n do
    if i > 1 then
      text.put(b, "\n")
    end
    if i == 1 and first or i > 1 and (blank or bytes(lines[i]) ~= "") then
      text.put(b, margin)
    end
    text.put(b, lines[i])
  end
  return text.finish(b)
end

function F.join(v, args, kwargs)
  local d, by = V.str(arg(args, kwargs, 1, "d", "")), arg(args, kwargs, 2, "attribute", None)
  local items, n = V.items(v)
  local b = text.new_buffer()
  for i = 1, n do
    if i > 1 then
      text.put(b, d)
    end
    text.put(b, V.str(by ~= None and R.item(items[i], by) or items[i]))
  end
  return text.finish(b)
end

function F.format(v, args, kwargs)
  return V.percent(V.str(v), kwargs or V.tuple(args, args.n))
end

function F.wordcount(v)
  local _, n = text.split(V.str(v))
  return n
end

function F.safe(v)
  return V.markup(V.str(v))
end

function F.escape(v)
  return V.markup(V.escape(V.str(v)))
end
F.e = F.escape

function F.tojson(v, args, kwargs)
  local indent = arg(args, kwargs, 2, "indent", None)
  if indent ~= None and not is_text(indent) then
    indent = need_int(indent, "indent")
    if indent > 64 then
      fail("OverflowError", "indent of more than 64")
    end
    indent = string.rep(" ", math.max(indent, 0))
  end
  local separators = arg(args, kwargs, 3, "separators", None)
  local comma, colon
  if separators ~= None then
    local pair = R.unpack(separators, 2)
    comma, colon = bytes(methods.need_text(pair[1], "separator")), bytes(methods.need_text(pair[2], "separator"))
  end
  return dumps(v, {
    ensure_ascii = V.truthy(arg(args, kwargs, 1, "ensure_ascii", false)),
    indent = indent ~= None and bytes(indent) or nil,
    comma = comma,
    colon = colon,
    sort_keys = V.truthy(arg(args, kwargs, 4, "sort_keys", false)),
  })
end

-- Numbers

function F.abs(v)
  local x = V.number(v)
  if not x then
    V.check_defined(v)
    fail("TypeError", "bad operand type for abs(): '" .. V.type_name(v) .. "'")
  end
  return x < 0 and V.neg(v) or V.pos(v)
end

--- The number in a text as Python's int() or float() reads it, or nil.
local function parse_number(v, pattern)
  local s = bytes(text.strip(v, nil, true, true))
  return #s <= 64 and string.find(s, pattern) and tonumber(s) or nil
end

F["int"] = function(v, args, kwargs)
  local x
  if is_text(v) then
    x = parse_number(v, "^[+-]?%d+$") or parse_number(v, "^[+-]?%d*%.?%d*[eE]?[+-]?%d*$")
  elseif type(v) == "table" and v.k == "big" then
    return v
  else
    x = V.number(v)
  end
  if not x or x ~= x or x == math.huge or x == -math.huge then
    return arg(args, kwargs, 1, "default", 0)
  end
  return V.add(x < 0 and math.ceil(x) or math.floor(x), 0)
end

F["float"] = function(v, args, kwargs)
  local x = V.number(v)
  if is_text(v) then
    x = parse_number(v, "^[+-]?%d*%.?%d*[eE]?[+-]?%d*$")
  end
  return x and V.float(x) or arg(args, kwargs, 1, "default", V.float(0))
end

function F.round(v, args, kwargs)
  local x, is_float = V.number(v)
  local precision = need_int(arg(args, kwargs, 1, "precision"), "round", 0)
  local method = bytes(V.str(arg(args, kwargs, 2, "method", "common")))
  if not x or precision < -15 or precision > 15 then
    V.check_defined(v)
    fail("TypeError", "round needs a number and a precision within 15")
  end
  local scale = 10 ^ precision
  if method == "ceil" then
    return V.float(math.ceil(x * scale) / scale)
  elseif method == "floor" then
    return V.float(math.floor(x * scale) / scale)
  elseif not is_float and precision >= 0 then
    return x
  end
  -- A tie goes to the even neighbour, which string.format does not do.
  local scaled, down = x * scale, math.floor(x * scale)
  if scaled - down == 0.5 and scaled / scale == x then
    return V.float((down % 2 == 0 and down or down + 1) / scale)
  elseif precision < 0 then
    return V.float(math.floor(scaled + 0.5) / scale)
  end
  return V.float(tonumber(string.format("%." .. precision .. "f", x)))
end

-- Values

function F.default(v, args, kwargs)
  if V.is_undefined(v) or (V.truthy(arg(args, kwargs, 2, "boolean", false)) and not V.truthy(v)) then
    return arg(args, kwargs, 1, "default_value", "")
  end
  return v
end
F.d = F.default

function F.attr(v, args)
  return R.attr(v, bytes(V.str(args[1])))
end

function F.length(v)
  return V.length(v)
end
F.count = F.length

function F.first(v)
  local items, n = V.items(v)
  if n == 0 then
    return V.undefined("No first item, sequence was empty.")
  end
  return items[1]
end

function F.last(v)
  if type(v) == "table" and v.k == "generator" then
    fail("TypeError", "'generator' object is not reversible")
  end
  local items, n = V.items(v)
  if n == 0 then
    return V.undefined("No last item, sequence was empty.")
  end
  return items[n]
end

function F.list(v)
  local items, n = array(v)
  return V.list(items, n)
end

function F.reverse(v)
  if is_text(v) then
    return text.slice(v, nil, nil, -1)
  end
  local items, n = V.items(v)
  local out = {}
  for i = 1, n do
    out[i] = items[n + 1 - i]
  end
  return V.generator(out, n)
end

function F.items(v)
  if V.is_undefined(v) then
    return V.generator({}, 0)
  elseif type(v) ~= "table" or v.k ~= "dict" then
    fail("TypeError", "Can only get item pairs from a mapping.")
  end
  local view = methods.dict.items(v)
  return V.generator(view, view.n)
end

local function folded(v)
  return is_text(v) and text.lower(v) or v
end

--- Jinja's attribute getter: "a.b", "0" and numbers; kwargs or args position 1.. decide the details.
local function getter(path, fold, default)
  local parts = {}
  if path == None or path == nil then
    parts = {}
  elseif is_text(path) then
    for i, part in ipairs((text.split(bytes(path), "."))) do
      parts[i] = string.find(part, "^%d+$") and tonumber(part) or part
    end
  else
    parts[1] = path
  end
  return function(v)
    for i = 1, #parts do
      v = R.item(v, parts[i])
      if default ~= nil and V.is_undefined(v) then
        v = default
      end
    end
    return fold and folded(v) or v
  end
end

local function sorted(items, n, key, reverse)
  local pairs_of = {}
  for i = 1, n do
    pairs_of[i] = { key(items[i]), items[i] }
  end
  pairs_of = V.sort(pairs_of, n, reverse and function(a, b)
    return V.lt(b[1], a[1])
  end or function(a, b)
    return V.lt(a[1], b[1])
  end)
  local out = {}
  for i = 1, n do
    out[i] = pairs_of[i][2]
  end
  return V.list(out, n)
end

function F.sort(v, args, kwargs)
  local items, n = V.items(v)
  local fold = not V.truthy(arg(args, kwargs, 2, "case_sensitive", false))
  return sorted(items, n, getter(arg(args, kwargs, 3, "attribute", None), fold), V.truthy(arg(args, kwargs, 1, "reverse", false)))
end

function F.dictsort(v, args, kwargs)
  if type(v) ~= "table" or v.k ~= "dict" then
    V.check_defined(v)
    fail("AttributeError", "'" .. V.type_name(v) .. "' object has no attribute 'items'")
  end
  local by = bytes(V.str(arg(args, kwargs, 2, "by", "key")))
  if by ~= "key" and by ~= "value" then
    fail("FilterArgumentError", 'You can only sort by either "key" or "value"')
  end
  local view = methods.dict.items(v)
  local fold = not V.truthy(arg(args, kwargs, 1, "case_sensitive", false))
  return sorted(view, view.n, getter(by == "key" and 0 or 1, fold), V.truthy(arg(args, kwargs, 3, "reverse", false)))
end

function F.unique(v, args, kwargs)
  local items, n = V.items(v)
  local key = getter(arg(args, kwargs, 2, "attribute", None), not V.truthy(arg(args, kwargs, 1, "case_sensitive", false)))
  local seen, out = V.dict(), {}
  for i = 1, n do
    local k = key(items[i])
    if V.dict_get(seen, k) == nil then
      V.dict_set(seen, k, true)
      out[#out + 1] = items[i]
    end
  end
  return V.generator(out)
end

local function extreme(better)
  return function(v, args, kwargs)
    local items, n = V.items(v)
    local key = getter(arg(args, kwargs, 2, "attribute", None), not V.truthy(arg(args, kwargs, 1, "case_sensitive", false)))
    if n == 0 then
      return V.undefined("No aggregated item, sequence was empty.")
    end
    local best = items[1]
    for i = 2, n do
      if better(key(items[i]), key(best)) then
        best = items[i]
      end
    end
    return best
  end
end
F.min, F.max = extreme(V.lt), extreme(V.gt)

function F.sum(v, args, kwargs)
  local items, n = V.items(v)
  local key, total = getter(arg(args, kwargs, 1, "attribute", None)), arg(args, kwargs, 2, "start", 0)
  for i = 1, n do
    total = V.add(total, key(items[i]))
  end
  return total
end

local function rest(args, from)
  local out = { n = math.max(args.n - from + 1, 0) }
  for i = 1, out.n do
    out[i] = args[from + i - 1]
  end
  return out
end

local function find_named(set, what, name)
  local f = set[bytes(V.str(name))]
  if not f then
    fail("TemplateRuntimeError", "No " .. what .. " named '" .. bytes(V.str(name)) .. "'.")
  end
  return f
end

function F.map(v, args, kwargs)
  if not V.truthy(v) then
    return V.generator({}, 0)
  end
  local items, n = V.items(v)
  local out = {}
  if args.n == 0 and kwargs and kwargs.map.attribute ~= nil then
    local get = getter(kwargs.map.attribute, false, kwargs.map.default)
    for i = 1, n do
      out[i] = get(items[i])
    end
    return V.generator(out, n)
  elseif args.n == 0 then
    fail("FilterArgumentError", "map requires a filter argument")
  end
  local f, more = find_named(F, "filter", args[1]), rest(args, 2)
  for i = 1, n do
    out[i] = f(items[i], more, kwargs)
  end
  return V.generator(out, n)
end

local function selection(keep, by_attribute)
  return function(v, args)
    if not V.truthy(v) then
      return V.generator({}, 0)
    end
    local items, n = V.items(v)
    local at, get = 1, getter(nil)
    if by_attribute then
      if args.n == 0 then
        fail("FilterArgumentError", "Missing parameter for attribute name")
      end
      at, get = 2, getter(args[1])
    end
    local test, more = V.truthy, nil
    if args.n >= at then
      test, more = find_named(T, "test", args[at]), rest(args, at + 1)
    end
    local out = {}
    for i = 1, n do
      if test(get(items[i]), more) == keep then
        out[#out + 1] = items[i]
      end
    end
    return V.generator(out)
  end
end
F.select, F.reject = selection(true, false), selection(false, false)
F.selectattr, F.rejectattr = selection(true, true), selection(false, true)

-- Tests

local function kind_is(...)
  local set = {}
  for _, k in ipairs({ ... }) do
    set[k] = true
  end
  return function(v)
    return type(v) == "table" and set[v.k] == true
  end
end

T.undefined = V.is_undefined
function T.defined(v)
  return not V.is_undefined(v)
end
function T.none(v)
  return v == None
end
T.string = is_text
T.mapping = kind_is("dict")
T.float = kind_is("float")
T.callable = kind_is("macro", "function", "method", "undefined")
local container = kind_is("list", "tuple", "dict", "undefined")
function T.sequence(v)
  return is_text(v) or container(v)
end
local walkable = kind_is("list", "tuple", "dict", "undefined", "generator", "view", "loop")
function T.iterable(v)
  return is_text(v) or walkable(v)
end
function T.boolean(v)
  return type(v) == "boolean"
end
T["true"] = function(v)
  return v == true
end
T["false"] = function(v)
  return v == false
end
function T.number(v)
  return V.number(v) ~= nil
end
function T.integer(v)
  return type(v) == "number" or (type(v) == "table" and v.k == "big")
end

local function remainder(v, by)
  local m = V.mod(v, by)
  return V.number(m)
end
function T.even(v)
  return remainder(v, 2) == 0
end
function T.odd(v)
  return remainder(v, 2) == 1
end
function T.divisibleby(v, args)
  return remainder(v, args[1]) == 0
end

T["in"] = function(v, args)
  return V.contains(args[1], v)
end
function T.lower(v)
  return methods.str.islower(V.str(v))
end
function T.upper(v)
  return methods.str.isupper(V.str(v))
end
function T.sameas(v, args)
  return v == args[1]
end
function T.filter(v)
  return F[bytes(V.str(v))] ~= nil
end
function T.test(v)
  return T[bytes(V.str(v))] ~= nil
end

local COMPARISONS = {
  eq = { "==", "eq", "equalto" },
  ne = { "!=", "ne" },
  lt = { "<", "lt", "lessthan" },
  le = { "<=", "le" },
  gt = { ">", "gt", "greaterthan" },
  ge = { ">=", "ge" },
}
V.ne = function(a, b)
  return not V.eq(a, b)
end
for op, names in pairs(COMPARISONS) do
  for _, name in ipairs(names) do
    T[name] = function(v, args)
      return V[op](v, args[1])
    end
  end
end

return { filters = F, tests = T }
