--- What the specs of the template compiler share: JSON text -> values of the compiler, and the unpacked test material.
local jinja = require("dunlin.jinja")
local V, text = jinja.value, jinja.text

local M = {}

local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }

local function decode_string(s, i)
  local out, from = {}, i + 1
  i = from
  while true do
    local at = s:find('["\\]', i)
    out[#out + 1] = s:sub(from, at - 1)
    if s:sub(at, at) == '"' then
      return table.concat(out), at + 1
    end
    local e = s:sub(at + 1, at + 1)
    i = at + 2
    if e == "u" then
      local c = tonumber(s:sub(i, i + 3), 16)
      i = i + 4
      if c >= 0xD800 and c < 0xDC00 then
        c = 0x10000 + (c - 0xD800) * 1024 + tonumber(s:sub(i + 2, i + 5), 16) - 0xDC00
        i = i + 6
      end
      out[#out + 1] = text.utf8(c)
    else
      out[#out + 1] = ESCAPES[e] or e
    end
    from = i
  end
end

local WORDS = { ["true"] = true, ["false"] = false, null = V.None }

--- Value at byte i of JSON text s; strings become wrap(bytes). Returns it and the byte behind it.
local function decode(s, i, wrap)
  i = s:find("%S", i)
  local c = s:sub(i, i)
  if c == '"' then
    local v, behind = decode_string(s, i)
    return wrap(v), behind
  elseif c == "{" or c == "[" then
    local v = c == "{" and V.dict() or V.list({}, 0)
    local close = c == "{" and "}" or "]"
    i = s:find("%S", i + 1)
    while s:sub(i, i) ~= close do
      if s:sub(i, i) == "," then
        i = i + 1
      end
      local item
      item, i = decode(s, i, wrap)
      if c == "{" then
        i = s:find(":", i, true) + 1
        local value
        value, i = decode(s, i, wrap)
        V.dict_set(v, item, value)
      else
        v.n = v.n + 1
        v[v.n] = item
      end
      i = s:find("%S", i)
    end
    return v, i + 1
  end
  local word = s:match("^%a+", i)
  if word then
    return WORDS[word], i + #word
  end
  local number = s:match("^[%d.eE+-]+", i)
  if number:find("[.eE]") then
    return V.float(tonumber(number)), i + #number
  end
  local x = tonumber(number)
  return math.abs(x) > 2 ^ 53 and { k = "big", s = number } or x, i + #number
end

--- JSON text as a value; its strings are untrusted unless `trusted`.
function M.decode(s, trusted)
  return (decode(s, 1, trusted and function(v)
    return v
  end or text.untrusted))
end

--- JSON text as plain Lua (objects as tables, arrays as {n = , ...}); for lists of cases.
function M.plain(s)
  local function plain(v)
    if type(v) ~= "table" then
      return v
    elseif v.k == "dict" then
      local t = {}
      for i = 1, v.n do
        t[v.keys[i]] = plain(v.map[v.keys[i]])
      end
      return t
    elseif v.k == "list" then
      local t = { n = v.n }
      for i = 1, v.n do
        t[i] = plain(v[i])
      end
      return t
    end
    return v.x or v.s or nil
  end
  return plain(M.decode(s, true))
end

function M.read(path)
  local f = assert(io.open(path, "rb"))
  local s = f:read("*a")
  f:close()
  return s
end

--- The folder of the unpacked chat_templates.tar.gz, or nil and the reason.
function M.material()
  local shared = os.getenv("DN_SHARED_DATA") or "../shared/data"
  local build = os.getenv("DN_BUILD_DIR") or "build"
  local archive = shared .. "/chat_templates.tar.gz"
  local f = io.open(archive, "rb")
  if not f then
    return nil, archive .. " is absent"
  end
  f:close()
  os.execute("mkdir -p '" .. build .. "' && tar -xzf '" .. archive .. "' -C '" .. build .. "'")
  return build .. "/chat_templates"
end

--- 2025-07-15 12:00:00, the time at which the goldens were made.
function M.strftime(format)
  return os.date("!" .. format, 1752580800)
end

return M
