--- Python's json.dumps with the defaults that chat templates get (ensure_ascii=False), key order kept.
local text = require("dunlin.jinja.text")
local V = require("dunlin.jinja.value")
local limits = require("dunlin.jinja.limits")

local fail = text.fail

local ESCAPES = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\b"] = "\\b", ["\f"] = "\\f" }
for c = 0, 31 do
  ESCAPES[string.char(c)] = ESCAPES[string.char(c)] or string.format("\\u%04x", c)
end

local function ascii_only(s)
  local out, i = {}, 1
  while i <= #s do
    local c, w = text.codepoint(s, i)
    if c < 0x80 then
      out[#out + 1] = s:sub(i, i)
    elseif c < 0x10000 then
      out[#out + 1] = string.format("\\u%04x", c)
    else
      c = c - 0x10000
      out[#out + 1] = string.format("\\u%04x\\u%04x", 0xD800 + math.floor(c / 1024), 0xDC00 + c % 1024)
    end
    i = i + w
  end
  return table.concat(out)
end

local function quoted(e, s)
  if string.find(s, '[%z\1-\31"\\]') then
    s = string.gsub(s, '[%z\1-\31"\\]', ESCAPES)
  end
  if e.ensure_ascii and not text.is_ascii(s) then
    s = ascii_only(s)
  end
  return '"' .. s .. '"'
end

--- Appends to the array e; e.len bounds the result.
local function put(e, s)
  e.n = e.n + 1
  e[e.n] = s
  e.len = e.len + #s
  if e.len > limits.output_bytes then
    fail("OverflowError", "JSON of more than " .. limits.output_bytes .. " bytes")
  end
end

local function float_text(x)
  if x ~= x then
    return "NaN"
  elseif x == math.huge or x == -math.huge then
    return x > 0 and "Infinity" or "-Infinity"
  end
  return text.float_repr(x)
end

local function key_text(key)
  if type(key) == "string" then
    return key
  elseif type(key) == "number" then
    return V.int_text(key)
  elseif type(key) == "boolean" then
    return key and "true" or "false"
  elseif key == V.None then
    return "null"
  elseif key.k == "str" then
    return key.s
  elseif key.k == "float" then
    return float_text(key.x)
  elseif key.k == "big" then
    return key.s
  end
  fail("TypeError", "keys must be str, int, float, bool or None, not " .. V.type_name(key))
end

local put_value

local function break_line(e, depth)
  if e.indent then
    put(e, "\n" .. string.rep(e.indent, depth))
  end
end

local function put_list(e, v, depth)
  if v.n == 0 then
    put(e, "[]")
    return
  end
  put(e, "[")
  for i = 1, v.n do
    if i > 1 then
      put(e, e.comma)
    end
    break_line(e, depth)
    put_value(e, v[i], depth)
  end
  break_line(e, depth - 1)
  put(e, "]")
end

local function put_dict(e, d, depth)
  if d.n == 0 then
    put(e, "{}")
    return
  end
  local keys = d.keys
  if e.sort_keys then
    keys = {}
    for i = 1, d.n do
      keys[i] = d.keys[i]
    end
    keys = V.sort(keys, d.n, V.lt)
  end
  put(e, "{")
  for i = 1, d.n do
    local key = keys[i]
    if i > 1 then
      put(e, e.comma)
    end
    break_line(e, depth)
    e.tainted = e.tainted or (type(key) == "table" and key.k == "str")
    put(e, quoted(e, key_text(key)))
    put(e, e.colon)
    put_value(e, d.map[V.hash_key(key)], depth)
  end
  break_line(e, depth - 1)
  put(e, "}")
end

put_value = function(e, v, depth)
  local t = type(v)
  if t == "string" then
    put(e, quoted(e, v))
  elseif t == "number" then
    put(e, V.int_text(v))
  elseif t == "boolean" then
    put(e, v and "true" or "false")
  elseif v.k == "str" then
    e.tainted = true
    put(e, quoted(e, v.s))
  elseif v.k == "none" then
    put(e, "null")
  elseif v.k == "float" then
    put(e, float_text(v.x))
  elseif v.k == "big" then
    put(e, v.s)
  else
    depth = depth + 1
    if depth > limits.calls then
      fail("RecursionError", "a value nested deeper than " .. limits.calls .. " levels can't be written as JSON")
    elseif v.k == "list" or v.k == "tuple" then
      put_list(e, v, depth)
    elseif v.k == "dict" then
      put_dict(e, v, depth)
    else
      fail("TypeError", "Object of type " .. V.type_name(v) .. " is not JSON serializable")
    end
  end
end

--- options: ensure_ascii, indent (text or nil), comma, colon, sort_keys. Text from a request in it makes all of it untrusted.
return function(v, options)
  local e = {
    n = 0,
    len = 0,
    tainted = false,
    ensure_ascii = options.ensure_ascii,
    indent = options.indent,
    sort_keys = options.sort_keys,
    comma = options.comma or (options.indent and "," or ", "),
    colon = options.colon or ": ",
  }
  put_value(e, v, 0)
  local s = table.concat(e, "", 1, e.n)
  return e.tainted and text.untrusted(s) or s
end
