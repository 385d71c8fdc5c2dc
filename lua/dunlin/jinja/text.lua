--- Text with a memory of where it came from.
--
-- A plain Lua string is trusted: template text and literals of the template. A value of kind "str" is text that came from a
-- request: {k = "str", s = bytes, g = segments}. Without g all of it is untrusted; g is {length, trusted, length, trusted, ...}
-- in bytes for a mixture. Cutting and joining keep the marks byte by byte; whatever else makes text out of untrusted text marks
-- all of it untrusted. Offsets of this module are bytes (first, last; from 1); Python's code point indexes come from at().
local limits = require("dunlin.jinja.limits")

local byte, char, sub, find = string.byte, string.char, string.sub, string.find
local type, concat, tonumber = type, table.concat, tonumber

local T = {}

--- Raises a template error: kind is Python's or Jinja's class name.
function T.fail(kind, message)
  error({ kind = kind, message = message }, 0)
end
local fail = T.fail

function T.untrusted(s)
  return { k = "str", s = s }
end

--- Is v text (of either kind)?
local function is_text(v)
  return type(v) == "string" or (type(v) == "table" and v.k == "str")
end
T.is_text = is_text

--- The bytes of text v.
local function bytes(v)
  return type(v) == "string" and v or v.s
end
T.bytes = bytes

--- s marked as v is: trusted only if v is.
function T.like(v, s)
  if type(v) == "string" then
    return s
  end
  return { k = "str", s = s, g = #s == #v.s and v.g or nil }
end

--- A buffer of pieces of text.
local function new_buffer()
  return { n = 0, len = 0, tainted = false }
end
T.new_buffer = new_buffer

local function put(b, v)
  local len
  if type(v) == "string" then
    len = #v
  else
    len = #v.s
    b.tainted = b.tainted or len > 0
  end
  if len == 0 then
    return
  end
  local n = b.n + 1
  b.n = n
  b[n] = v
  b.len = b.len + len
  if b.len > limits.output_bytes then
    fail("OverflowError", "text of more than " .. limits.output_bytes .. " bytes")
  end
end
T.put = put

local function add_segment(g, n, len, trusted)
  if len == 0 then
    return n
  end
  if n > 0 and g[n] == trusted then
    g[n - 1] = g[n - 1] + len
    return n
  end
  g[n + 1], g[n + 2] = len, trusted
  return n + 2
end

local function add_text_segments(g, n, v)
  if type(v) == "string" then
    return add_segment(g, n, #v, true)
  elseif not v.g then
    return add_segment(g, n, #v.s, false)
  end
  local from = v.g
  for i = 1, #from, 2 do
    n = add_segment(g, n, from[i], from[i + 1])
  end
  return n
end

local function with_segments(s, g, n)
  if n == 0 or (n == 2 and g[2]) then
    return s
  end
  return { k = "str", s = s, g = n > 2 and g or nil }
end

--- The text of a buffer.
function T.finish(b)
  if b.n == 1 then
    return b[1]
  elseif not b.tainted then
    return concat(b, "", 1, b.n)
  end
  local g, n, plain = {}, 0, {}
  for i = 1, b.n do
    local v = b[i]
    plain[i] = type(v) == "string" and v or v.s
    n = add_text_segments(g, n, v)
  end
  return with_segments(concat(plain), g, n)
end

--- The segments of text v as {length, trusted, ...}.
function T.segments(v)
  local g = {}
  add_text_segments(g, 0, v)
  return g
end

--- a followed by b.
function T.cat(a, b)
  local sa, sb = bytes(a), bytes(b)
  if #sa + #sb > limits.output_bytes then
    fail("OverflowError", "text of more than " .. limits.output_bytes .. " bytes")
  end
  if sa == a and sb == b then
    return a .. b
  elseif sa == "" then
    return b
  elseif sb == "" then
    return a
  end
  local g = {}
  local n = add_text_segments(g, 0, a)
  return with_segments(sa .. sb, g, add_text_segments(g, n, b))
end

--- Bytes first to last of v.
local function cut(v, first, last)
  if type(v) == "string" then
    return sub(v, first, last)
  end
  local s = sub(v.s, first, last)
  if not v.g then
    return s == "" and "" or { k = "str", s = s }
  end
  local from, g, n, at = v.g, {}, 0, 1
  for i = 1, #from, 2 do
    local next_at = at + from[i]
    local lo, hi = at > first and at or first, next_at - 1 < last and next_at - 1 or last
    if hi >= lo then
      n = add_segment(g, n, hi - lo + 1, from[i + 1])
    end
    at = next_at
  end
  return with_segments(s, g, n)
end
T.cut = cut

--- Python's slicing of the sequence 1..n: from, to, step (nil for none) -> first, last, step, counted from 1; empty if first > last.
function T.slice_bounds(n, from, to, step)
  step = step or 1
  local lo, hi
  if step > 0 then
    lo, hi = from or 0, to or n
    lo = lo < 0 and math.max(lo + n, 0) or math.min(lo, n)
    hi = hi < 0 and math.max(hi + n, 0) or math.min(hi, n)
    return lo + 1, hi, step
  end
  lo, hi = from or n - 1, to
  lo = lo < 0 and math.max(lo + n, -1) or math.min(lo, n - 1)
  if hi then
    hi = hi < 0 and math.max(hi + n, -1) or math.min(hi, n - 1)
  else
    hi = -1
  end
  return lo + 1, hi + 2, step
end

local function is_ascii(s)
  return not find(s, "[\128-\255]")
end
T.is_ascii = is_ascii

--- Bytes that the character at byte i takes.
local function width(s, i)
  local c = byte(s, i)
  local n = c < 0xC0 and 1 or c < 0xE0 and 2 or c < 0xF0 and 3 or 4
  return n
end

--- Byte offsets of the characters of s, and one past the end: {1, 2, 4, ..., #s + 1}.
local function starts(s)
  local t, n, i, len = {}, 0, 1, #s
  while i <= len do
    n = n + 1
    t[n] = i
    i = i + width(s, i)
  end
  t[n + 1] = len + 1
  return t, n
end

--- Number of code points.
function T.length(v)
  local s = bytes(v)
  if is_ascii(s) then
    return #s
  end
  local _, n = starts(s)
  return n
end

--- The characters of v as an array of texts, and their number.
function T.characters(v)
  local s = bytes(v)
  local at, n = starts(s)
  local out = {}
  for i = 1, n do
    out[i] = cut(v, at[i], at[i + 1] - 1)
  end
  return out, n
end

--- Character i (from 0, negative from the end), or nil.
function T.index(v, i)
  local s = bytes(v)
  if is_ascii(s) then
    if i < 0 then
      i = i + #s
    end
    if i < 0 or i >= #s then
      return nil
    end
    return cut(v, i + 1, i + 1)
  end
  local at, n = starts(s)
  if i < 0 then
    i = i + n
  end
  if i < 0 or i >= n then
    return nil
  end
  return cut(v, at[i + 1], at[i + 2] - 1)
end

--- v[from:to:step] in code points.
function T.slice(v, from, to, step)
  local s = bytes(v)
  local ascii = is_ascii(s)
  local at, n
  if ascii then
    n = #s
  else
    at, n = starts(s)
  end
  local lo, hi
  lo, hi, step = T.slice_bounds(n, from, to, step)
  if step == 1 then
    if lo > hi then
      return ""
    end
    return ascii and cut(v, lo, hi) or cut(v, at[lo], at[hi + 1] - 1)
  end
  local b = new_buffer()
  for i = lo, hi, step do
    put(b, ascii and cut(v, i, i) or cut(v, at[i], at[i + 1] - 1))
  end
  return T.finish(b)
end

--- Bytes of white space (as Python's str.isspace) at byte i, or 0.
local function space_at(s, i)
  local c = byte(s, i)
  if not c then
    return 0
  elseif c < 0x80 then
    return (c == 32 or (c >= 9 and c <= 13) or (c >= 28 and c <= 31)) and 1 or 0
  elseif c == 0xC2 then
    local d = byte(s, i + 1)
    return (d == 0x85 or d == 0xA0) and 2 or 0
  elseif c == 0xE1 then
    return sub(s, i, i + 2) == "\225\154\128" and 3 or 0
  elseif c == 0xE2 then
    local d, e = byte(s, i + 1, i + 2)
    if d == 0x80 and e and ((e >= 0x80 and e <= 0x8A) or e == 0xA8 or e == 0xA9 or e == 0xAF) then
      return 3
    end
    return (d == 0x81 and e == 0x9F) and 3 or 0
  elseif c == 0xE3 then
    return sub(s, i, i + 2) == "\227\128\128" and 3 or 0
  end
  return 0
end
T.space_at = space_at

--- First byte of the character that ends at byte i.
local function char_start(s, i)
  local n = 0
  while i > 1 and n < 3 and byte(s, i) >= 0x80 and byte(s, i) < 0xC0 do
    i, n = i - 1, n + 1
  end
  return i
end

--- Offsets of what is left of s after stripping white space, or the characters of the set `chars`.
function T.strip_bounds(s, chars, left, right)
  local first, last = 1, #s
  local set
  if chars then
    set = {}
    for _, c in ipairs((T.characters(chars))) do
      set[c] = true
    end
  end
  while left and first <= last do
    local n
    if set then
      n = width(s, first)
      n = set[sub(s, first, first + n - 1)] and n or 0
    else
      n = space_at(s, first)
    end
    if n == 0 then
      break
    end
    first = first + n
  end
  while right and last >= first do
    local i = char_start(s, last)
    local gone
    if set then
      gone = set[sub(s, i, last)]
    else
      gone = space_at(s, i) == last - i + 1
    end
    if not gone then
      break
    end
    last = i - 1
  end
  return first, last
end

function T.strip(v, chars, left, right)
  local first, last = T.strip_bounds(bytes(v), chars and bytes(chars), left, right)
  return cut(v, first, last)
end

--- v with `old` replaced by `new`, at most `count` times.
function T.replace(v, old, new, count)
  local s, what = bytes(v), bytes(old)
  local b, pos, left = new_buffer(), 1, count or math.huge
  if left < 0 then
    left = math.huge
  end
  if what == "" then
    local list, n = T.characters(v)
    for i = 1, n + 1 do
      if left > 0 then
        put(b, new)
        left = left - 1
      end
      if i <= n then
        put(b, list[i])
      end
    end
    return T.finish(b)
  end
  while left > 0 do
    local i = s:find(what, pos, true)
    if not i then
      break
    end
    put(b, cut(v, pos, i - 1))
    put(b, new)
    pos = i + #what
    left = left - 1
  end
  if pos == 1 then
    return v
  end
  put(b, cut(v, pos, #s))
  return T.finish(b)
end

--- Python's split: array of texts and their number. sep nil: runs of white space.
function T.split(v, sep, limit)
  local s, out, n = bytes(v), {}, 0
  limit = (limit and limit >= 0) and limit or math.huge
  if sep then
    local what, pos = bytes(sep), 1
    if what == "" then
      fail("ValueError", "empty separator")
    end
    while n < limit do
      local i = s:find(what, pos, true)
      if not i then
        break
      end
      n = n + 1
      out[n] = cut(v, pos, i - 1)
      pos = i + #what
    end
    out[n + 1] = cut(v, pos, #s)
    return out, n + 1
  end
  local pos, len = 1, #s
  while true do
    local w = space_at(s, pos)
    while w > 0 do
      pos = pos + w
      w = space_at(s, pos)
    end
    if pos > len then
      return out, n
    end
    local first = pos
    if n >= limit then
      local _, last = T.strip_bounds(s, nil, false, true)
      out[n + 1] = cut(v, first, last)
      return out, n + 1
    end
    while pos <= len and space_at(s, pos) == 0 do
      pos = pos + 1
    end
    n = n + 1
    out[n] = cut(v, first, pos - 1)
  end
end

--- Python's rsplit with a separator.
function T.rsplit(v, sep, limit)
  local all, n = T.split(v, sep)
  if not limit or limit < 0 or n <= limit + 1 then
    return all, n
  end
  if not sep then
    fail("NotImplementedError", "rsplit with a limit needs a separator")
  end
  local b, out = new_buffer(), {}
  for i = 1, n - limit do
    if i > 1 then
      put(b, sep)
    end
    put(b, all[i])
  end
  out[1] = T.finish(b)
  for i = n - limit + 1, n do
    out[#out + 1] = all[i]
  end
  return out, #out
end

--- Lines without their ends (\n, \r, \r\n, \v, \f, \x1c-\x1e, U+0085, U+2028, U+2029).
function T.splitlines(v, keep_ends)
  local s, out, n, pos, i = bytes(v), {}, 0, 1, 1
  local len = #s
  while i <= len do
    local c, w = byte(s, i), 0
    if c == 13 then
      w = byte(s, i + 1) == 10 and 2 or 1
    elseif (c >= 10 and c <= 12) or (c >= 28 and c <= 30) then
      w = 1
    elseif c == 0xC2 and byte(s, i + 1) == 0x85 then
      w = 2
    elseif c == 0xE2 and byte(s, i + 1) == 0x80 and (byte(s, i + 2) == 0xA8 or byte(s, i + 2) == 0xA9) then
      w = 3
    end
    if w > 0 then
      n = n + 1
      out[n] = cut(v, pos, keep_ends and i + w - 1 or i - 1)
      pos = i + w
      i = pos
    else
      i = i + 1
    end
  end
  if pos <= len then
    n = n + 1
    out[n] = cut(v, pos, len)
  end
  return out, n
end

function T.utf8(c)
  if c < 0x80 then
    return char(c)
  elseif c < 0x800 then
    return char(0xC0 + (c - c % 64) / 64, 0x80 + c % 64)
  elseif c < 0x10000 then
    local hi = (c - c % 4096) / 4096
    return char(0xE0 + hi, 0x80 + (c % 4096 - c % 64) / 64, 0x80 + c % 64)
  end
  local hi, mid = (c - c % 262144) / 262144, c % 262144
  return char(0xF0 + hi, 0x80 + (mid - mid % 4096) / 4096, 0x80 + (c % 4096 - c % 64) / 64, 0x80 + c % 64)
end

--- Code point and width of the character at byte i.
function T.codepoint(s, i)
  local a, b, c, d = byte(s, i, i + 3)
  if a < 0xC0 or not b then
    return a, 1
  elseif a < 0xE0 then
    return (a % 32) * 64 + b % 64, 2
  elseif a < 0xF0 then
    return (a % 16) * 4096 + (b % 64) * 64 + (c or 0) % 64, 3
  end
  return (a % 8) * 262144 + (b % 64) * 4096 + (c or 0) % 64 * 64 + (d or 0) % 64, 4
end

-- Case beyond ASCII: Latin-1, Latin Extended-A, Greek and Cyrillic letters; every other character stays as it is.
local GREEK_UPPER = { [0x3AC] = 0x386, [0x3AD] = 0x388, [0x3AE] = 0x389, [0x3AF] = 0x38A, [0x3CC] = 0x38C, [0x3CD] = 0x38E,
  [0x3CE] = 0x38F }
local GREEK_LOWER = {}
for low, up in pairs(GREEK_UPPER) do
  GREEK_LOWER[up] = low
end

local function upper_of(c)
  if GREEK_UPPER[c] then
    return GREEK_UPPER[c]
  elseif (c >= 0xE0 and c <= 0xFE and c ~= 0xF7) or (c >= 0x3B1 and c <= 0x3CB and c ~= 0x3C2) or (c >= 0x430 and c <= 0x44F) then
    return c - 32
  elseif c == 0xFF then
    return 0x178
  elseif c == 0x3C2 then
    return 0x3A3
  elseif c == 0x131 then
    return 0x49
  elseif c >= 0x450 and c <= 0x45F then
    return c - 80
  elseif (c >= 0x100 and c <= 0x137) or (c >= 0x14A and c <= 0x177) then
    return c % 2 == 1 and c - 1 or c
  elseif (c >= 0x139 and c <= 0x148) or (c >= 0x179 and c <= 0x17E) then
    return c % 2 == 0 and c - 1 or c
  end
  return c
end

local function lower_of(c)
  if GREEK_LOWER[c] then
    return GREEK_LOWER[c]
  elseif (c >= 0xC0 and c <= 0xDE and c ~= 0xD7) or (c >= 0x391 and c <= 0x3AB) or (c >= 0x410 and c <= 0x42F) then
    return c + 32
  elseif c == 0x178 then
    return 0xFF
  elseif c >= 0x400 and c <= 0x40F then
    return c + 80
  elseif (c >= 0x100 and c <= 0x137 and c ~= 0x130) or (c >= 0x14A and c <= 0x177) then
    return c % 2 == 0 and c + 1 or c
  elseif (c >= 0x139 and c <= 0x148) or (c >= 0x179 and c <= 0x17E) then
    return c % 2 == 1 and c + 1 or c
  end
  return c
end

local function map_case(s, ascii_map, map)
  if is_ascii(s) then
    return ascii_map(s)
  end
  local out, i = {}, 1
  while i <= #s do
    local c, w = T.codepoint(s, i)
    if c < 0x80 then
      out[#out + 1] = ascii_map(sub(s, i, i))
    elseif c == 0xDF and map == upper_of then
      out[#out + 1] = "SS"
    else
      out[#out + 1] = w > 1 and T.utf8(map(c)) or sub(s, i, i)
    end
    i = i + w
  end
  return concat(out)
end

function T.upper(v)
  return T.like(v, map_case(bytes(v), string.upper, upper_of))
end

function T.lower(v)
  return T.like(v, map_case(bytes(v), string.lower, lower_of))
end

function T.capitalize(v)
  local s = bytes(v)
  if s == "" then
    return v
  end
  local w = width(s, 1)
  return T.like(v, map_case(sub(s, 1, w), string.upper, upper_of) .. map_case(sub(s, w + 1), string.lower, lower_of))
end

--- Python's str.title: a letter behind a letter is lower case, every other one upper case.
function T.title(v)
  local s, out, inside, i = bytes(v), {}, false, 1
  while i <= #s do
    local w = width(s, i)
    local c = sub(s, i, i + w - 1)
    local up, low = map_case(c, string.upper, upper_of), map_case(c, string.lower, lower_of)
    out[#out + 1] = inside and low or up
    inside = up ~= low
    i = i + w
  end
  return T.like(v, concat(out))
end

--- Shortest digits that read back as x, as Python's repr of a float.
function T.float_repr(x)
  if x ~= x then
    return "nan"
  elseif x == math.huge then
    return "inf"
  elseif x == -math.huge then
    return "-inf"
  end
  local e
  for precision = 0, 16 do
    e = string.format("%." .. precision .. "e", x)
    if tonumber(e) == x then
      break
    end
  end
  local at = e:find("e", 1, true)
  local exponent = tonumber(sub(e, at + 1))
  if exponent < -4 or exponent >= 16 then
    local sign, digits = exponent < 0 and "-" or "+", tostring(math.abs(exponent))
    return sub(e, 1, at - 1) .. "e" .. sign .. (#digits < 2 and "0" or "") .. digits
  end
  local point = e:find(".", 1, true)
  local decimals = (point and at - point - 1 or 0) - exponent
  local s = string.format("%." .. math.max(decimals, 0) .. "f", x)
  return s:find(".", 1, true) and s or s .. ".0"
end

return T
