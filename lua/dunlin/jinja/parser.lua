--- Jinja's grammar: tokens -> tree of nodes {t = type, line = number, ...}. Names follow jinja2.nodes.
local lex = require("dunlin.jinja.lexer")
local limits = require("dunlin.jinja.limits")

local Parser = {}
Parser.__index = Parser

local COMPARE = { ["=="] = "eq", ["!="] = "ne", ["<"] = "lt", ["<="] = "le", [">"] = "gt", [">="] = "ge" }
local CONSTANTS = { ["true"] = "true", ["True"] = "true", ["false"] = "false", ["False"] = "false", none = "none", None = "none" }
local RESERVED = { ["and"] = true, ["or"] = true, ["not"] = true, ["if"] = true, ["else"] = true, ["elif"] = true, ["in"] = true,
  ["is"] = true, ["for"] = true }
local UNSUPPORTED = { extends = true, include = true, import = true, from = true, block = true, autoescape = true, trans = true }

function Parser:fail(message, line)
  error({ kind = "TemplateSyntaxError", message = message, line = line or self.tok.line }, 0)
end

function Parser:next()
  local tok = self.tok
  self.pos = self.pos + 1
  self.tok = self.tokens[self.pos] or tok
  return tok
end

--- Is the current token of this type (and value)?
function Parser:at(type, value)
  local tok = self.tok
  return tok.t == type and (value == nil or tok.v == value)
end

function Parser:accept(type, value)
  if self:at(type, value) then
    return self:next()
  end
end

local function describe(type, value)
  if type == "eof" then
    return "end of template"
  elseif type == "block_end" or type == "variable_end" then
    return type == "block_end" and '"%}"' or '"}}"'
  elseif type == "data" then
    return "text"
  end
  return value ~= nil and '"' .. tostring(value) .. '"' or type
end

function Parser:expect(type, value)
  if not self:at(type, value) then
    self:fail("expected " .. describe(type, value) .. ", got " .. describe(self.tok.t, self.tok.v))
  end
  return self:next()
end

--- Counts nesting of blocks and expressions around f.
function Parser:nested(f, ...)
  self.depth = self.depth + 1
  if self.depth > limits.nesting then
    self:fail("nested deeper than " .. limits.nesting .. " levels")
  end
  local node = f(self, ...)
  self.depth = self.depth - 1
  return node
end

--- n + 1, unless that is more than may follow each other in one expression.
function Parser:count(n)
  if n >= limits.chain then
    self:fail("more than " .. limits.chain .. " operations in a row")
  end
  return n + 1
end

-- Expressions

local function binary(operators, next_level)
  return function(self)
    local left, n = next_level(self), 0
    while self.tok.t == "op" and operators[self.tok.v] do
      n = self:count(n)
      local op = self:next()
      left = { t = operators[op.v], line = op.line, left = left, right = next_level(self) }
    end
    return left
  end
end

local parse_expression

local function parse_arguments(self)
  local args, kwargs = {}, nil
  self:expect("op", "(")
  while not self:at("op", ")") do
    if #args > 0 or kwargs then
      self:expect("op", ",")
      if self:at("op", ")") then
        break
      end
    end
    if self:at("op", "*") or self:at("op", "**") then
      self:fail("unpacking of arguments is not supported")
    end
    local following = self.tokens[self.pos + 1]
    if self.tok.t == "name" and following and following.t == "op" and following.v == "=" then
      local name = self:next().v
      self:next()
      kwargs = kwargs or {}
      kwargs[#kwargs + 1] = { name = name, value = parse_expression(self) }
    else
      if kwargs then
        self:fail("positional argument behind a keyword argument")
      end
      args[#args + 1] = parse_expression(self)
    end
    if #args > limits.arguments then
      self:fail("more than " .. limits.arguments .. " arguments")
    end
  end
  self:expect("op", ")")
  return args, kwargs
end

--- Elements up to the closing mark.
local function parse_elements(self, close, element)
  local list = {}
  while not self:at("op", close) do
    if #list > 0 then
      self:expect("op", ",")
      if self:at("op", close) then
        break
      end
    end
    list[#list + 1] = element(self)
  end
  self:expect("op", close)
  return list
end

local function starts_expression(self)
  local tok = self.tok
  if tok.t == "variable_end" or tok.t == "block_end" or tok.t == "eof" then
    return false
  elseif tok.t == "op" then
    return tok.v ~= ")" and tok.v ~= "=" and tok.v ~= "]"
  end
  return not (tok.t == "name" and (tok.v == "in" or tok.v == "if" or tok.v == "recursive"))
end

--- `a` or `a, b`; element parses one.
local function parse_tuple(self, element)
  local line = self.tok.line
  local first = element(self)
  if not self:at("op", ",") then
    return first
  end
  local items = { first }
  while self:accept("op", ",") do
    if not starts_expression(self) then
      break
    end
    items[#items + 1] = element(self)
  end
  return { t = "Tuple", line = line, items = items }
end

local function parse_primary(self)
  local tok = self.tok
  if tok.t == "name" then
    self:next()
    if CONSTANTS[tok.v] then
      return { t = "Const", line = tok.line, kind = CONSTANTS[tok.v] }
    elseif RESERVED[tok.v] then
      self:fail('unexpected "' .. tok.v .. '"', tok.line)
    end
    self.used[tok.v] = true
    return { t = "Name", line = tok.line, name = tok.v }
  elseif tok.t == "string" then
    local parts = {}
    while self:at("string") do
      parts[#parts + 1] = self:next().v
    end
    return { t = "Const", line = tok.line, kind = "string", value = table.concat(parts) }
  elseif tok.t == "int" or tok.t == "float" then
    self:next()
    return { t = "Const", line = tok.line, kind = tok.t, value = tok.v }
  elseif self:accept("op", "(") then
    if self:accept("op", ")") then
      return { t = "Tuple", line = tok.line, items = {} }
    end
    local node = parse_tuple(self, parse_expression)
    self:expect("op", ")")
    return node
  elseif self:accept("op", "[") then
    return { t = "List", line = tok.line, items = parse_elements(self, "]", parse_expression) }
  elseif self:accept("op", "{") then
    return {
      t = "Dict",
      line = tok.line,
      items = parse_elements(self, "}", function()
        local key = parse_expression(self)
        self:expect("op", ":")
        return { key = key, value = parse_expression(self) }
      end),
    }
  end
  self:fail("unexpected " .. describe(tok.t, tok.v))
end

local function parse_subscript(self, node)
  local line = self:next().line
  local parts, n, slice = {}, 1, false
  while not self:at("op", "]") do
    if self:accept("op", ":") then
      n, slice = n + 1, true
      if n > 3 then
        self:fail("a slice has at most three parts")
      end
    elseif parts[n] then
      self:fail("expected \"]\", got " .. describe(self.tok.t, self.tok.v))
    else
      parts[n] = parse_expression(self)
    end
  end
  self:expect("op", "]")
  if slice then
    return { t = "Slice", line = line, node = node, from = parts[1], to = parts[2], step = parts[3] }
  elseif not parts[1] then
    self:fail("expected an index")
  end
  return { t = "Getitem", line = line, node = node, arg = parts[1] }
end

local function parse_postfix(self, node)
  local n = 0
  while self.tok.t == "op" do
    n = self:count(n)
    local op = self.tok.v
    if op == "." then
      local line = self:next().line
      local tok = self:next()
      if tok.t == "name" then
        node = { t = "Getattr", line = line, node = node, name = tok.v }
      elseif tok.t == "int" then
        node = { t = "Getitem", line = line, node = node, arg = { t = "Const", line = line, kind = "int", value = tok.v } }
      else
        self:fail("expected a name behind \".\"", line)
      end
    elseif op == "[" then
      node = parse_subscript(self, node)
    elseif op == "(" then
      local line = self.tok.line
      local args, kwargs = parse_arguments(self)
      node = { t = "Call", line = line, node = node, args = args, kwargs = kwargs }
    else
      break
    end
  end
  return node
end

local function dotted_name(self)
  local name = self:expect("name").v
  while self:accept("op", ".") do
    name = name .. "." .. self:expect("name").v
  end
  return name
end

local function parse_filter(self, node)
  local line = self.tok.line
  local name = dotted_name(self)
  local args, kwargs = {}, nil
  if self:at("op", "(") then
    args, kwargs = parse_arguments(self)
  end
  return { t = "Filter", line = line, node = node, name = name, args = args, kwargs = kwargs }
end

local TEST_ARGUMENT = { name = true, string = true, int = true, float = true }

local function parse_test(self, node)
  local line = self:next().line
  local negated = self:accept("name", "not")
  local name = dotted_name(self)
  local args, kwargs = {}, nil
  local tok = self.tok
  if self:at("op", "(") then
    args, kwargs = parse_arguments(self)
  elseif TEST_ARGUMENT[tok.t] or (tok.t == "op" and (tok.v == "[" or tok.v == "{")) then
    local word = tok.t == "name" and tok.v
    if word == "is" then
      self:fail("tests can't be chained with \"is\"")
    elseif word ~= "else" and word ~= "or" and word ~= "and" and word ~= "if" and word ~= "not" and word ~= "in" then
      args = { parse_postfix(self, parse_primary(self)) }
    end
  end
  if kwargs then
    self:fail("tests take no keyword arguments")
  end
  local test = { t = "Test", line = line, node = node, name = name, args = args }
  return negated and { t = "Not", line = line, node = test } or test
end

local function parse_filter_expr(self, node)
  local n = 0
  while true do
    n = self:count(n)
    if self:at("op", "|") then
      self:next()
      node = parse_filter(self, node)
    elseif self:at("name", "is") then
      node = parse_test(self, node)
    elseif self:at("op", "(") then
      local line = self.tok.line
      local args, kwargs = parse_arguments(self)
      node = { t = "Call", line = line, node = node, args = args, kwargs = kwargs }
    else
      return node
    end
  end
end

local function parse_unary(self, without_filter)
  local tok, node = self.tok
  if self:at("op", "-") or self:at("op", "+") then
    self:next()
    node = { t = tok.v == "-" and "Neg" or "Pos", line = tok.line, node = self:nested(parse_unary, true) }
  else
    node = parse_primary(self)
  end
  node = parse_postfix(self, node)
  return without_filter and node or parse_filter_expr(self, node)
end

local parse_pow = binary({ ["**"] = "Pow" }, parse_unary)
local parse_math2 = binary({ ["*"] = "Mul", ["/"] = "Div", ["//"] = "FloorDiv", ["%"] = "Mod" }, parse_pow)
local parse_concat = binary({ ["~"] = "Concat" }, parse_math2)
local parse_math1 = binary({ ["+"] = "Add", ["-"] = "Sub" }, parse_concat)

local function parse_compare(self)
  local line = self.tok.line
  local first, ops = parse_math1(self), nil
  while true do
    local op
    if self.tok.t == "op" and COMPARE[self.tok.v] then
      op = COMPARE[self:next().v]
    elseif self:accept("name", "in") then
      op = "contains"
    elseif self:at("name", "not") then
      local following = self.tokens[self.pos + 1]
      if following.t == "name" and following.v == "in" then
        self:next()
        self:next()
        op = "lacks"
      end
    end
    if not op then
      return ops and { t = "Compare", line = line, first = first, ops = ops } or first
    end
    ops = ops or {}
    self:count(#ops)
    ops[#ops + 1] = { op = op, right = parse_math1(self) }
  end
end

local function parse_not(self)
  if self:at("name", "not") then
    local line = self:next().line
    return { t = "Not", line = line, node = self:nested(parse_not) }
  end
  return parse_compare(self)
end

local function chain(word, type, next_level)
  return function(self)
    local left, n = next_level(self), 0
    while self:at("name", word) do
      n = self:count(n)
      local line = self:next().line
      left = { t = type, line = line, left = left, right = next_level(self) }
    end
    return left
  end
end

local parse_or = chain("or", "Or", chain("and", "And", parse_not))

local function parse_condition(self)
  local line = self.tok.line
  local node, n = parse_or(self), 0
  while self:accept("name", "if") do
    n = self:count(n)
    local test = parse_or(self)
    local other
    if self:accept("name", "else") then
      other = self:nested(parse_condition)
    end
    node = { t = "CondExpr", line = line, test = test, yes = node, no = other }
  end
  return node
end

parse_expression = function(self)
  return self:nested(parse_condition)
end

-- Statements

local parse_body

local function parse_target(self, with_namespace)
  local function one()
    if self:accept("op", "(") then
      local inner = self:nested(parse_target)
      self:expect("op", ")")
      return inner
    end
    local tok = self:expect("name")
    if CONSTANTS[tok.v] or RESERVED[tok.v] then
      self:fail("can't assign to \"" .. tok.v .. "\"", tok.line)
    end
    if with_namespace and self:accept("op", ".") then
      return { t = "NSRef", line = tok.line, name = tok.v, attr = self:expect("name").v }
    end
    return { t = "Name", line = tok.line, name = tok.v }
  end
  return parse_tuple(self, one)
end

local statements = {}

statements["if"] = function(self, line)
  local node = { t = "If", line = line, branches = {} }
  while true do
    local test = parse_tuple(self, parse_or)
    self:expect("block_end")
    local body, stop = parse_body(self, { ["elif"] = true, ["else"] = true, ["endif"] = true }, line, "if")
    node.branches[#node.branches + 1] = { test = test, body = body }
    if stop == "else" then
      self:expect("block_end")
      node.other, stop = parse_body(self, { ["endif"] = true }, line, "if")
    end
    if stop == "endif" then
      return node
    end
  end
end

statements["for"] = function(self, line)
  local target = parse_target(self)
  self:expect("name", "in")
  local node = { t = "For", line = line, target = target, iter = parse_tuple(self, parse_or) }
  if self:accept("name", "if") then
    node.test = parse_expression(self)
  end
  if self:accept("name", "recursive") then
    self:fail("recursive loops are not supported")
  end
  self:expect("block_end")
  self.loops = self.loops + 1
  local stop
  node.body, stop = parse_body(self, { ["else"] = true, ["endfor"] = true }, line, "for")
  self.loops = self.loops - 1
  if stop == "else" then
    self:expect("block_end")
    node.other = parse_body(self, { ["endfor"] = true }, line, "for")
  end
  return node
end

statements["set"] = function(self, line)
  local target = parse_target(self, true)
  if self:accept("op", "=") then
    return { t = "Assign", line = line, target = target, value = parse_tuple(self, parse_expression) }
  end
  local filters = { t = "Body" }
  while self:accept("op", "|") do
    filters = parse_filter(self, filters)
  end
  self:expect("block_end")
  local node = { t = "AssignBlock", line = line, target = target, filters = filters }
  node.body = parse_body(self, { ["endset"] = true }, line, "set")
  return node
end

--- (a, b=1): names and default expressions by position.
local function parse_signature(self)
  local args, defaults = {}, {}
  self:expect("op", "(")
  while not self:at("op", ")") do
    if #args > 0 then
      self:expect("op", ",")
    end
    args[#args + 1] = self:expect("name").v
    if self:accept("op", "=") then
      defaults[#args] = parse_expression(self)
    elseif next(defaults) then
      self:fail("an argument without default behind one with a default")
    end
    if #args > limits.arguments then
      self:fail("more than " .. limits.arguments .. " arguments")
    end
  end
  self:expect("op", ")")
  return args, defaults
end

--- The body of a macro, with the names that it uses.
local function parse_macro_body(self, node, stop, word)
  self:expect("block_end")
  local outer_used, outer_loops = self.used, self.loops
  self.used, self.loops = setmetatable({}, { __newindex = function(t, k, v)
    rawset(t, k, v)
    outer_used[k] = v
  end }), 0
  node.body = parse_body(self, { [stop] = true }, node.line, word)
  node.used = self.used
  self.used, self.loops = outer_used, outer_loops
  return node
end

statements["macro"] = function(self, line)
  local node = { t = "Macro", line = line, name = self:expect("name").v }
  node.args, node.defaults = parse_signature(self)
  return parse_macro_body(self, node, "endmacro", "macro")
end

statements["call"] = function(self, line)
  local node = { t = "CallBlock", line = line, name = "caller", args = {}, defaults = {} }
  if self:at("op", "(") then
    node.args, node.defaults = parse_signature(self)
  end
  node.call = parse_expression(self)
  if node.call.t ~= "Call" then
    self:fail("expected a call", line)
  end
  return parse_macro_body(self, node, "endcall", "call")
end

statements["filter"] = function(self, line)
  local filters = parse_filter(self, { t = "Body" })
  while self:accept("op", "|") do
    filters = parse_filter(self, filters)
  end
  self:expect("block_end")
  return { t = "FilterBlock", line = line, filters = filters, body = parse_body(self, { endfilter = true }, line, "filter") }
end

statements["with"] = function(self, line)
  local node = { t = "With", line = line, targets = {}, values = {} }
  while not self:at("block_end") do
    if #node.targets > 0 then
      self:expect("op", ",")
    end
    node.targets[#node.targets + 1] = parse_target(self)
    self:expect("op", "=")
    node.values[#node.targets] = parse_expression(self)
  end
  self:expect("block_end")
  node.body = parse_body(self, { endwith = true }, line, "with")
  return node
end

--- {% generation %} marks the assistant's text for training; it renders as its body.
statements["generation"] = function(self, line)
  self:expect("block_end")
  return { t = "Scope", line = line, body = parse_body(self, { endgeneration = true }, line, "generation") }
end

local function loop_control(type, word)
  return function(self, line)
    if self.loops == 0 then
      self:fail('"' .. word .. '" outside of a loop', line)
    end
    return { t = type, line = line }
  end
end
statements["break"] = loop_control("Break", "break")
statements["continue"] = loop_control("Continue", "continue")

local function parse_output(self)
  local line = self:next().line
  local node = { t = "Output", line = line, value = parse_tuple(self, parse_expression) }
  self:expect("variable_end")
  return node
end

local function parse_body_here(self, stops, opened, word)
  local body = {}
  while true do
    local tok = self.tok
    if tok.t == "data" then
      self:next()
      body[#body + 1] = { t = "Data", line = tok.line, value = tok.v }
    elseif tok.t == "variable_begin" then
      body[#body + 1] = parse_output(self)
    elseif tok.t == "eof" then
      if stops then
        self:fail('"' .. word .. '" of line ' .. opened .. " has no end")
      end
      return body
    else
      local line = self:expect("block_begin").line
      local name = self:expect("name").v
      if stops and stops[name] then
        self.stopped = name
        return body
      end
      local parse = statements[name]
      if not parse then
        self:fail('tag "' .. name .. '" ' .. (UNSUPPORTED[name] and "is not supported" or "is unknown or out of place"), line)
      end
      body[#body + 1] = parse(self, line)
      self:expect("block_end")
    end
  end
end

parse_body = function(self, stops, opened, word)
  local body = self:nested(parse_body_here, stops, opened, word)
  return body, self.stopped
end

--- Tree of a template source; raises a TemplateSyntaxError {kind, message, line}.
return function(source)
  local tokens = lex(source)
  local self = setmetatable({ tokens = tokens, pos = 1, tok = tokens[1], depth = 0, loops = 0, used = {} }, Parser)
  return parse_body(self, nil, 1, nil)
end
