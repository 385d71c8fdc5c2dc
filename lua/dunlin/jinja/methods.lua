--- Methods of Python's str, list, tuple and dict: methods[kind][name](self, args, kwargs).
-- args is {n = , [1..n]}; kwargs is a dict value or nil.
local text = require("dunlin.jinja.text")
local V = require("dunlin.jinja.value")

local fail, is_text, bytes = text.fail, text.is_text, text.bytes
local None = V.None

local M = { str = {}, list = {}, tuple = {}, dict = {} }

--- Argument i, or the keyword `name`, or default.
local function arg(args, kwargs, i, name, default)
  if i <= args.n then
    return args[i]
  end
  local v = kwargs and kwargs.map[name]
  if v == nil then
    return default
  end
  return v
end
M.arg = arg

local function need_text(v, what)
  if v == nil or not is_text(v) then
    if v ~= nil then
      V.check_defined(v)
    end
    fail("TypeError", what .. " must be str, not " .. (v == nil and "missing" or V.type_name(v)))
  end
  return v
end
M.need_text = need_text

local function optional_text(v, what)
  if v == nil or v == None then
    return nil
  end
  return need_text(v, what)
end

local function need_int(v, what, default)
  if v == nil or v == None then
    return default
  end
  local x, is_float = V.number(v)
  if not x or is_float then
    V.check_defined(v)
    fail("TypeError", what .. ": '" .. V.type_name(v) .. "' object cannot be interpreted as an integer")
  end
  return x
end
M.need_int = need_int

-- str

local S = M.str

local function strip(name, left, right)
  S[name] = function(v, args)
    return text.strip(v, optional_text(args[1], name .. " arg"), left, right)
  end
end
strip("strip", true, true)
strip("lstrip", true, false)
strip("rstrip", false, true)

local function split(name, f)
  S[name] = function(v, args, kwargs)
    local sep = optional_text(arg(args, kwargs, 1, "sep"), name .. " separator")
    return V.list(f(v, sep, need_int(arg(args, kwargs, 2, "maxsplit"), name)))
  end
end
split("split", text.split)
split("rsplit", text.rsplit)

function S.splitlines(v, args, kwargs)
  return V.list(text.splitlines(v, V.truthy(arg(args, kwargs, 1, "keepends", false))))
end

function S.replace(v, args, kwargs)
  local old, new = need_text(args[1], "replace() argument 1"), need_text(args[2], "replace() argument 2")
  return text.replace(v, old, new, need_int(arg(args, kwargs, 3, "count"), "replace"))
end

local function affix(name, matches)
  S[name] = function(v, args)
    local list = args[1]
    if type(list) ~= "table" or list.k ~= "tuple" then
      list = { n = 1, list }
    end
    for i = 1, list.n do
      if matches(bytes(v), bytes(need_text(list[i], name .. " first arg"))) then
        return true
      end
    end
    return false
  end
end
affix("startswith", function(s, what)
  return s:sub(1, #what) == what
end)
affix("endswith", function(s, what)
  return what == "" or (#what <= #s and s:sub(-#what) == what)
end)

S.upper, S.lower, S.capitalize, S.title = text.upper, text.lower, text.capitalize, text.title
S.casefold = text.lower

function S.removeprefix(v, args)
  local what = bytes(need_text(args[1], "removeprefix() argument"))
  return bytes(v):sub(1, #what) == what and text.cut(v, #what + 1, #bytes(v)) or v
end

function S.removesuffix(v, args)
  local s, what = bytes(v), bytes(need_text(args[1], "removesuffix() argument"))
  return what ~= "" and #what <= #s and s:sub(-#what) == what and text.cut(v, 1, #s - #what) or v
end

function S.join(v, args)
  local items, n = V.items(args[1] == nil and None or args[1])
  local b = text.new_buffer()
  for i = 1, n do
    if not is_text(items[i]) then
      V.check_defined(items[i])
      fail("TypeError", "sequence item " .. i - 1 .. ": expected str instance, " .. V.type_name(items[i]) .. " found")
    end
    if i > 1 then
      text.put(b, v)
    end
    text.put(b, items[i])
  end
  return text.finish(b)
end

--- Code point index of the first `what`, or -1.
local function find(v, args)
  local s = bytes(v)
  local at = s:find(bytes(need_text(args[1], "find() argument 1")), 1, true)
  return at and text.length(s:sub(1, at - 1)) or -1
end
S.find = find

function S.index(v, args)
  local at = find(v, args)
  if at < 0 then
    fail("ValueError", "substring not found")
  end
  return at
end

function S.count(v, args)
  local s, what = bytes(v), bytes(need_text(args[1], "count() argument 1"))
  if what == "" then
    return text.length(v) + 1
  end
  local n, pos = 0, 1
  while true do
    local at = s:find(what, pos, true)
    if not at then
      return n
    end
    n, pos = n + 1, at + #what
  end
end

local function class(name, set)
  S[name] = function(v)
    return string.find(bytes(v), "^" .. set .. "+$") ~= nil
  end
end
class("isdigit", "%d")
class("isnumeric", "%d")
class("isdecimal", "%d")
class("isalpha", "[%a\128-\255]")
class("isalnum", "[%w\128-\255]")

function S.isspace(v)
  local first, last = text.strip_bounds(bytes(v), nil, true, false)
  return bytes(v) ~= "" and first > last
end

function S.isupper(v)
  local s = bytes(v)
  return bytes(text.upper(v)) == s and bytes(text.lower(v)) ~= s
end

function S.islower(v)
  local s = bytes(v)
  return bytes(text.lower(v)) == s and bytes(text.upper(v)) ~= s
end

--- "{} {0} {name}".format(...): fields without attributes, indexes, conversions and format specifications.
function S.format(v, args, kwargs)
  local s, b, pos, auto = bytes(v), text.new_buffer(), 1, 0
  while pos <= #s do
    local c = s:sub(pos, pos)
    if c ~= "{" and c ~= "}" then
      local stop = pos
      while stop < #s and s:sub(stop + 1, stop + 1) ~= "{" and s:sub(stop + 1, stop + 1) ~= "}" do
        stop = stop + 1
      end
      text.put(b, text.cut(v, pos, stop))
      pos = stop + 1
    elseif s:sub(pos + 1, pos + 1) == c then
      text.put(b, c)
      pos = pos + 2
    else
      local stop = c == "{" and s:find("}", pos, true)
      if not stop then
        fail("ValueError", "Single '" .. c .. "' encountered in format string")
      end
      local field, value = s:sub(pos + 1, stop - 1), nil
      if field == "" then
        auto = auto + 1
        value = args[auto]
      elseif string.find(field, "^%d+$") then
        value = args[tonumber(field) + 1]
      elseif string.find(field, "^[%a_][%w_]*$") then
        value = kwargs and kwargs.map[field]
      else
        fail("ValueError", "unsupported field \"{" .. field .. "}\" in a format string")
      end
      if value == nil then
        fail(field == "" and "IndexError" or "KeyError", "no argument for the field {" .. field .. "} of a format string")
      end
      text.put(b, V.str(value))
      pos = stop + 1
    end
  end
  return text.finish(b)
end

-- list and tuple

for _, kind in ipairs({ "list", "tuple" }) do
  M[kind].index = function(v, args)
    for i = 1, v.n do
      if V.eq(v[i], args[1]) then
        return i - 1
      end
    end
    fail("ValueError", "item is not in the list")
  end
  M[kind].count = function(v, args)
    local n = 0
    for i = 1, v.n do
      n = n + (V.eq(v[i], args[1]) and 1 or 0)
    end
    return n
  end
end

local function copy(v)
  local out = { k = "list", n = v.n }
  for i = 1, v.n do
    out[i] = v[i]
  end
  return out
end
M.list.copy = copy

-- dict

local D = M.dict

function D.get(d, args, kwargs)
  local v = d.map[V.hash_key(args[1] == nil and None or args[1])]
  if v == nil then
    return arg(args, kwargs, 2, "default", None)
  end
  return v
end

local function view(name, make)
  D[name] = function(d)
    local out = { k = "view", n = d.n, name = "dict_" .. name }
    for i = 1, d.n do
      out[i] = make(d.keys[i], d.map[V.hash_key(d.keys[i])])
    end
    return out
  end
end
view("keys", function(key)
  return key
end)
view("values", function(_, value)
  return value
end)
view("items", function(key, value)
  return { k = "tuple", n = 2, key, value }
end)

local function copy_items(to, from)
  for i = 1, from.n do
    V.dict_set(to, from.keys[i], from.map[V.hash_key(from.keys[i])])
  end
end

function D.copy(d)
  local out = V.dict()
  copy_items(out, d)
  return out
end

-- What changes its object: refused by the immutable sandbox that transformers uses; M.mutators says which methods those are.

M.mutators = {
  list = { append = true, clear = true, extend = true, insert = true, pop = true, remove = true, reverse = true, sort = true },
  dict = { clear = true, pop = true, popitem = true, setdefault = true, update = true },
}

function M.list.append(v, args)
  v.n = v.n + 1
  v[v.n] = args[1]
  return None
end

function M.list.extend(v, args)
  local items, n = V.items(args[1])
  for i = 1, n do
    v[v.n + i] = items[i]
  end
  v.n = v.n + n
  return None
end

function M.list.pop(v, args)
  local i = need_int(args[1], "pop", -1)
  i = i < 0 and i + v.n or i
  if i < 0 or i >= v.n then
    fail("IndexError", v.n == 0 and "pop from empty list" or "pop index out of range")
  end
  local item = table.remove(v, i + 1)
  v.n = v.n - 1
  return item
end

function D.update(d, args, kwargs)
  local from = args[1]
  if type(from) == "table" and (from.k == "dict" or from.k == "namespace") then
    copy_items(d, from)
  elseif from ~= nil then
    V.check_defined(from)
    local pairs_of, n = V.items(from)
    for i = 1, n do
      local pair, count = V.items(pairs_of[i])
      if count ~= 2 then
        fail("ValueError", "dictionary update sequence element #" .. i - 1 .. " has length " .. count .. "; 2 is required")
      end
      V.dict_set(d, pair[1], pair[2])
    end
  end
  copy_items(d, kwargs or V.dict())
  return None
end

function D.setdefault(d, args)
  if d.map[V.hash_key(args[1])] == nil then
    V.dict_set(d, args[1], args[2] == nil and None or args[2])
  end
  return d.map[V.hash_key(args[1])]
end

return M
