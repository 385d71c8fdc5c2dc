--- Jinja's lexer with trim_blocks and lstrip_blocks: source -> array of tokens {t = type, v = value, line = number}.
--
-- Types: data, variable_begin, variable_end, block_begin, block_end, name, string, int, float, op, eof.
-- Byte loops and plain searches only: the source is third-party input.
local text = require("dunlin.jinja.text")
local limits = require("dunlin.jinja.limits")

local byte, sub = string.byte, string.sub

local OPERATORS = {}
for op in string.gmatch("// ** == != >= <= + - / * % ~ [ ] ( ) { } > < = . : | , ;", "%S+") do
  OPERATORS[op] = true
end
local CLOSES = { [")"] = "(", ["]"] = "[", ["}"] = "{" }
local ESCAPES = { n = "\n", t = "\t", r = "\r", a = "\a", b = "\b", f = "\f", v = "\v", ["\\"] = "\\", ["'"] = "'", ['"'] = '"' }

local function syntax(line, message)
  error({ kind = "TemplateSyntaxError", message = message, line = line }, 0)
end

local function count_lines(s, first, last)
  local n, i = 0, first - 1
  while true do
    i = s:find("\n", i + 1, true)
    if not i or i > last then
      return n
    end
    n = n + 1
  end
end

local function skip_space(s, i)
  local w = text.space_at(s, i)
  while w > 0 do
    i = i + w
    w = text.space_at(s, i)
  end
  return i
end

--- \r\n and \r become \n; one newline at the end goes.
local function normalize(s)
  if s:find("\r", 1, true) then
    s = text.replace(text.replace(s, "\r\n", "\n"), "\r", "\n")
  end
  return sub(s, -1) == "\n" and sub(s, 1, -2) or s
end

--- Reads the string literal at i; returns its value and the byte behind it.
local function read_string(s, i, line)
  local quote, out, from = byte(s, i), {}, i + 1
  i = i + 1
  while true do
    local c = byte(s, i)
    if not c then
      syntax(line, "unterminated string")
    elseif c == quote then
      out[#out + 1] = sub(s, from, i - 1)
      return table.concat(out), i + 1
    elseif c == 92 then
      out[#out + 1] = sub(s, from, i - 1)
      local e = sub(s, i + 1, i + 1)
      local digits = e == "x" and 2 or e == "u" and 4 or e == "U" and 8
      if digits then
        local hex = sub(s, i + 2, i + 1 + digits)
        local value = #hex == digits and string.find(hex, "^%x+$") and tonumber(hex, 16)
        if not value or value > 0x10FFFF or (value >= 0xD800 and value <= 0xDFFF) then
          syntax(line, "a \\" .. e .. " escape needs " .. digits .. " hexadecimal digits of a character")
        end
        out[#out + 1] = text.utf8(value)
        i = i + 2 + digits
      elseif e == "\n" then
        i = i + 2
      elseif string.find(e, "^[0-7]$") then
        local _, last = string.find(sub(s, i + 1, i + 3), "^[0-7]+")
        out[#out + 1] = text.utf8(tonumber(sub(s, i + 1, i + last), 8))
        i = i + 1 + last
      else
        out[#out + 1] = ESCAPES[e] or "\\" .. e
        i = i + 1 + #e
      end
      from = i
    else
      i = i + 1
    end
  end
end

local function read_number(s, i, line)
  local _, last = string.find(sub(s, i, i + 63), "^0[xX][%x_]+")
  if not last then
    _, last = string.find(sub(s, i, i + 63), "^[%d_]+")
    local digits = sub(s, i, i + last - 1)
    local rest = sub(s, i + last, i + last + 63)
    local _, fraction = string.find(rest, "^%.%d[%d_]*")
    local _, exponent = string.find(sub(rest, (fraction or 0) + 1), "^[eE][+-]?%d+")
    if fraction or exponent then
      local all = digits .. sub(rest, 1, (fraction or 0) + (exponent or 0))
      return "float", tonumber((string.gsub(all, "_", ""))), i + #all
    end
  end
  local digits = string.gsub(sub(s, i, i + last - 1), "_", "")
  local value = tonumber(digits)
  if not value or value > 2 ^ 53 or last > 40 then
    syntax(line, "number beyond 2**53")
  end
  return "int", value, i + last
end

local Lexer = {}
Lexer.__index = Lexer

function Lexer:push(type, value)
  self.n = self.n + 1
  self.tokens[self.n] = { t = type, v = value, line = self.line }
end

--- Reads tokens until the end mark ("%}" or "}}"); returns the byte behind it and what white space control applies.
function Lexer:inside(i, mark, opened)
  local s, stack = self.s, {}
  while true do
    local from = i
    i = skip_space(s, i)
    self.line = self.line + count_lines(s, from, i - 1)
    if #stack == 0 then
      local two, three = sub(s, i, i + 1), sub(s, i, i + 2)
      if two == mark then
        return i + 2, ""
      elseif three == "-" .. mark then
        return i + 3, "-"
      elseif three == "+" .. mark and mark == "%}" then
        return i + 3, "+"
      end
    end
    local c = byte(s, i)
    if not c then
      syntax(opened, "unexpected end of template: expected \"" .. mark .. "\"")
    elseif c == 39 or c == 34 then
      local value, behind = read_string(s, i, self.line)
      self:push("string", value)
      self.line = self.line + count_lines(s, i, behind - 1)
      i = behind
    elseif c >= 48 and c <= 57 then
      local kind, value, behind = read_number(s, i, self.line)
      self:push(kind, value)
      i = behind
    elseif c == 95 or (c >= 65 and c <= 90) or (c >= 97 and c <= 122) then
      local last = i
      repeat
        last = last + 1
        c = byte(s, last)
      until not c or not (c == 95 or (c >= 48 and c <= 57) or (c >= 65 and c <= 90) or (c >= 97 and c <= 122))
      self:push("name", sub(s, i, last - 1))
      i = last
    else
      local op = sub(s, i, i + 1)
      op = OPERATORS[op] and op or sub(s, i, i)
      if not OPERATORS[op] then
        syntax(self.line, "unexpected character at " .. string.format("%q", sub(s, i, i + 7)))
      end
      if op == "(" or op == "[" or op == "{" then
        stack[#stack + 1] = op
      elseif CLOSES[op] then
        if stack[#stack] ~= CLOSES[op] then
          syntax(self.line, "unexpected \"" .. op .. "\"")
        end
        stack[#stack] = nil
      end
      self:push("op", op)
      i = i + #op
    end
  end
end

--- Emits the text from i up to the tag at `tag`, with the white space in front of it treated as its sign says.
function Lexer:data(i, tag, sign, strip_line)
  local s = self.s
  local piece = sub(s, i, tag - 1)
  if sign == "-" then
    piece = text.strip(piece, nil, false, true)
  elseif sign ~= "+" and strip_line then
    local start = #piece
    while start > 0 and byte(piece, start) ~= 10 do
      start = start - 1
    end
    if (start > 0 or self.line_starting) and skip_space(piece, start + 1) > #piece then
      piece = sub(piece, 1, start)
    end
  end
  if piece ~= "" then
    self:push("data", piece)
  end
  self.line = self.line + count_lines(s, i, tag - 1)
end

--- The byte where the template goes on behind a tag's end: "-" eats white space, trim eats one newline.
function Lexer:behind(i, sign, trim)
  local from = i
  if sign == "-" then
    i = skip_space(self.s, i)
  elseif trim and sign ~= "+" and byte(self.s, i) == 10 then
    i = i + 1
  end
  self.line = self.line + count_lines(self.s, from, i - 1)
  self.line_starting = i > 1 and byte(self.s, i - 1) == 10
  return i
end

--- Matches `raw %}` or `endraw %}` behind "{%"; returns the byte behind the end mark and its sign.
local function match_word_tag(s, i, word)
  i = skip_space(s, i)
  if sub(s, i, i + #word - 1) ~= word then
    return nil
  end
  i = skip_space(s, i + #word)
  local three = sub(s, i, i + 2)
  if sub(three, 1, 2) == "%}" then
    return i + 2, ""
  elseif three == "-%}" or three == "+%}" then
    return i + 3, sub(three, 1, 1)
  end
end

--- Reads a raw section whose text starts at i; returns the byte behind it.
function Lexer:raw(i)
  local s, from, opened = self.s, i, self.line
  while true do
    local tag = s:find("{%", from, true)
    if not tag then
      syntax(opened, "unexpected end of template: missing endraw")
    end
    local sign = sub(s, tag + 2, tag + 2)
    sign = (sign == "-" or sign == "+") and sign or ""
    local stop, end_sign = match_word_tag(s, tag + 2 + #sign, "endraw")
    if stop then
      self:data(i, tag, sign, true)
      self.line = self.line + count_lines(s, tag, stop - 1)
      return self:behind(stop, end_sign, true)
    end
    from = tag + 2
  end
end

function Lexer:run()
  local s, i = self.s, 1
  local brace = 1
  while true do
    -- The nearest of the three tags.
    local tag = s:find("{", brace, true)
    if not tag then
      if i <= #s then
        self:push("data", sub(s, i))
      end
      self:push("eof")
      return self.tokens
    end
    local kind = sub(s, tag + 1, tag + 1)
    if kind ~= "{" and kind ~= "%" and kind ~= "#" then
      brace = tag + 1
    else
      local sign = sub(s, tag + 2, tag + 2)
      sign = (sign == "-" or sign == "+") and sign or ""
      self:data(i, tag, sign, kind ~= "{")
      local start, opened = tag + 2 + #sign, self.line
      local stop, end_sign
      if kind == "#" then
        stop = s:find("#}", start, true)
        if not stop then
          syntax(opened, "missing end of comment")
        end
        end_sign = sub(s, stop - 1, stop - 1)
        end_sign = stop > start and (end_sign == "-" or end_sign == "+") and end_sign or ""
        self.line = self.line + count_lines(s, start, stop - 1)
        i = self:behind(stop + 2, end_sign, true)
      elseif kind == "%" then
        stop, end_sign = match_word_tag(s, start, "raw")
        if stop then
          self.line = self.line + count_lines(s, start, stop - 1)
          i = self:raw(self:behind(stop, end_sign, false))
        else
          self:push("block_begin")
          stop, end_sign = self:inside(start, "%}", opened)
          self:push("block_end")
          i = self:behind(stop, end_sign, true)
        end
      else
        self:push("variable_begin")
        stop, end_sign = self:inside(start, "}}", opened)
        self:push("variable_end")
        i = self:behind(stop, end_sign, false)
      end
      brace = i
    end
  end
end

--- tokens of a template source; raises a TemplateSyntaxError.
return function(source)
  if #source > limits.source_bytes then
    syntax(1, "template of " .. #source .. " bytes; at most " .. limits.source_bytes .. " are read")
  end
  local lexer = setmetatable({ s = normalize(source), tokens = {}, n = 0, line = 1, line_starting = true }, Lexer)
  return lexer:run()
end
