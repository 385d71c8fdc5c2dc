--- Finds uses of unknown global names in the text of a policy, also in branches that no test run enters.
--
-- A scan of tokens, not a compiler: a name counts as local if the file declares it anywhere, so it never complains
-- about correct code and may miss a name that is local elsewhere; the environment itself catches those when they run.

local globals = {}

local KEYWORDS = {}
local WORDS = "and break do else elseif end false for function goto if in local nil not or repeat return then true "
  .. "until while"
for word in string.gmatch(WORDS, "%a+") do
  KEYWORDS[word] = true
end

-- The position behind a string, comment or long bracket that begins at i, or nil if none does.
local function skip(s, i)
  local level = string.match(s, "^%-%-%[(=*)%[", i) or string.match(s, "^%[(=*)%[", i)
  if level then
    local _, stop = string.find(s, "]" .. level .. "]", i, true)
    return (stop or #s) + 1
  end
  if string.find(s, "^%-%-", i) then
    return (string.find(s, "\n", i, true) or #s + 1)
  end
  local quote = string.match(s, "^[\"']", i)
  if not quote then
    return nil
  end
  i = i + 1
  while i <= #s do
    local c = string.sub(s, i, i)
    if c == "\\" then
      i = i + 1
    elseif c == quote or c == "\n" then
      return i + 1
    end
    i = i + 1
  end
  return i
end

-- Names and marks of the text in order: { text, line, is_name }.
local function tokens(s)
  local out, i, line = {}, 1, 1
  while i <= #s do
    local stop = skip(s, i)
    if not stop then
      local name = string.match(s, "^[%a_][%w_]*", i)
      local number = not name and string.match(s, "^%.?%d[%w%.]*", i)
      local mark = not name and not number and (string.match(s, "^%.%.%.?", i) or string.match(s, "^::", i)
        or string.match(s, "^[=~<>]=", i) or string.match(s, "^%S", i))
      if name or mark then
        out[#out + 1] = { name or mark, line, name ~= nil and not KEYWORDS[name] }
      end
      stop = i + #(name or number or mark or " ")
    end
    for _ in string.gmatch(string.sub(s, i, stop - 1), "\n") do
      line = line + 1
    end
    i = stop
  end
  return out
end

local function names_until(list, i, stop, declared)
  while list[i] and not stop[list[i][1]] do
    if list[i][3] then
      declared[list[i][1]] = true
    elseif list[i][1] ~= "," and list[i][1] ~= "..." then
      break
    end
    i = i + 1
  end
end

local function declarations(list)
  local declared = { self = true }
  for i, token in ipairs(list) do
    local after = list[i + 1]
    if token[1] == "local" and after then
      if after[1] == "function" and list[i + 2] then
        declared[list[i + 2][1]] = true
      else
        names_until(list, i + 1, { ["="] = true }, declared)
      end
    elseif token[1] == "for" then
      names_until(list, i + 1, { ["="] = true, ["in"] = true }, declared)
    elseif token[1] == "function" then
      local j = i + 1
      while list[j] and list[j][1] ~= "(" do
        j = j + 1
      end
      names_until(list, j + 1, { [")"] = true }, declared)
    end
  end
  return declared
end

--- All uses of names that are neither declared in `source` nor in the set `known`: a list of { name = , line = }.
function globals.scan(source, known)
  local list = tokens(source)
  local declared, found, open = declarations(list), {}, {}
  for i, token in ipairs(list) do
    local text, before, after = token[1], list[i - 1] and list[i - 1][1], list[i + 1] and list[i + 1][1]
    if text == "{" or text == "(" or text == "[" or text == "function" or text == "do" or text == "then"
      or text == "repeat" then
      open[#open + 1] = text
    elseif text == "}" or text == ")" or text == "]" or text == "end" or text == "until" or text == "elseif" then
      open[#open] = nil
    end
    local is_key = open[#open] == "{" and after == "=" and (before == "{" or before == "," or before == ";")
    local is_field = before == "." or before == ":" or before == "::" or before == "goto"
    if token[3] and not is_key and not is_field and not declared[text] and not known[text] then
      found[#found + 1] = { name = text, line = token[2] }
    end
  end
  return found
end

return globals
