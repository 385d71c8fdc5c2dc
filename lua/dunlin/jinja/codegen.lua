--- Tree of a template -> Lua source and its constants.
--
-- No byte of the template gets into the source: texts, names of attributes and messages are entries of the table K, variables
-- are fields "v_name" whose names the lexer has limited to [A-Za-z0-9_]. Expressions are compiled to registers r1, r2, ... (locals
-- of the function), so that neither long chains nor short circuits nest the generated source.
local V = require("dunlin.jinja.value")
local R = require("dunlin.jinja.runtime")
local library = require("dunlin.jinja.filters")
local limits = require("dunlin.jinja.limits")

local format = string.format

local MAX_REGISTERS = 90

local G = {}
G.__index = G

local function fail(line, message)
  error({ kind = "TemplateSyntaxError", message = message, line = line }, 0)
end

function G:emit(s, ...)
  self.code[#self.code + 1] = select("#", ...) > 0 and format(s, ...) or s
end

--- The expression of constant v.
function G:constant(v)
  local at = self.index[v]
  if not at then
    at = #self.constants + 1
    self.constants[at] = v
    self.index[v] = at
  end
  return "K[" .. at .. "]"
end

function G:register(d, line)
  if d > self.registers then
    self.registers = d
    if d > MAX_REGISTERS then
      fail(line, "expression too complex")
    end
  end
  return "r" .. d
end

function G:label()
  self.labels = self.labels + 1
  return self.labels
end

-- Expressions. expr(node, d) emits code and returns a Lua expression: a constant, a variable or register d. Registers above d are
-- free for it, those below are in use.

local E = {}

function G:expr(node, d)
  return E[node.t](self, node, d)
end

--- As expr, but the value is in register d.
function G:expr_to(node, d)
  local r = self:register(d, node.line)
  local v = self:expr(node, d)
  if v ~= r then
    self:emit("%s = %s", r, v)
  end
  return r
end

--- The register behind those that hold v.
local function behind(v, d)
  return v == "r" .. d and d + 1 or d
end

local BOOLEAN = { Compare = true, Not = true, Test = true }

--- A Lua expression that is true or false as the node is.
function G:condition(node, d)
  local v = self:expr(node, d)
  if BOOLEAN[node.t] or v == "true" or v == "false" then
    return v
  end
  return "truthy(" .. v .. ")"
end

function E:Const(node)
  local kind, v = node.kind, node.value
  if kind == "none" then
    return "None"
  elseif kind == "true" or kind == "false" then
    return kind
  elseif kind == "string" then
    return self:constant(v)
  elseif kind == "float" then
    return self:constant(V.float(v))
  end
  return format("%.0f", v)
end

function E.Name(_, node)
  return "S.v_" .. node.name
end

function E:Body()
  return self.body
end

local function operator(name)
  return function(self, node, d)
    local a = self:expr(node.left, d)
    local b = self:expr(node.right, behind(a, d))
    local r = self:register(d, node.line)
    self:emit("%s = V.%s(%s, %s)", r, name, a, b)
    return r
  end
end
E.Sub, E.Mul, E.Div, E.FloorDiv = operator("sub"), operator("mul"), operator("div"), operator("floordiv")
E.Mod, E.Pow = operator("mod"), operator("pow")

local function fast_operator(name)
  return function(self, node, d)
    local a = self:expr(node.left, d)
    local b = self:expr(node.right, behind(a, d))
    local r = self:register(d, node.line)
    self:emit("%s = %s(%s, %s)", r, name, a, b)
    return r
  end
end
E.Add, E.Concat = fast_operator("add"), fast_operator("concat")

local function unary(name)
  return function(self, node, d)
    local v, r = self:expr(node.node, d), self:register(d, node.line)
    self:emit("%s = V.%s(%s)", r, name, v)
    return r
  end
end
E.Neg, E.Pos = unary("neg"), unary("pos")

function E:Not(node, d)
  local v, r = self:condition(node.node, d), self:register(d, node.line)
  self:emit("%s = not %s", r, v)
  return r
end

local function short_circuit(test)
  return function(self, node, d)
    local r = self:expr_to(node.left, d)
    self:emit(test, r)
    self:expr_to(node.right, d)
    self:emit("end")
    return r
  end
end
E.And, E.Or = short_circuit("if truthy(%s) then"), short_circuit("if not truthy(%s) then")

function E:CondExpr(node, d)
  local r = self:register(d, node.line)
  self.branch = self.branch + 1
  self:emit("if %s then", self:condition(node.test, d))
  self:expr_to(node.yes, d)
  self:emit("else")
  if node.no then
    self:expr_to(node.no, d)
  else
    self:emit("%s = V.undefined(%s)", r, self:constant("the inline if-expression evaluated to false and no else section was defined."))
  end
  self.branch = self.branch - 1
  self:emit("end")
  return r
end

local COMPARE = { eq = "eq(%s, %s)", ne = "not eq(%s, %s)", lt = "V.lt(%s, %s)", le = "V.le(%s, %s)", gt = "V.gt(%s, %s)",
  ge = "V.ge(%s, %s)", contains = "V.contains(%s, %s)", lacks = "not V.contains(%s, %s)" }

local function compare(op, a, b)
  if op == "contains" or op == "lacks" then
    a, b = b, a
  end
  return format(COMPARE[op], a, b)
end

function E:Compare(node, d)
  local r = self:register(d, node.line)
  if #node.ops == 1 then
    local a = self:expr(node.first, d)
    local b = self:expr(node.ops[1].right, behind(a, d))
    self:emit("%s = %s", r, compare(node.ops[1].op, a, b))
    return r
  end
  -- a < b < c: the middle values are computed once, and only as far as the chain holds.
  local left = self:expr_to(node.first, d + 1)
  for i, step in ipairs(node.ops) do
    local right = self:expr_to(step.right, d + 2)
    self:emit("%s = %s", r, compare(step.op, left, right))
    if i < #node.ops then
      self:emit("if %s then %s = %s", r, left, right)
    end
  end
  self:emit(string.rep("end ", #node.ops - 1))
  return r
end

function E:Getattr(node, d)
  local v, r = self:expr(node.node, d), self:register(d, node.line)
  self:emit("%s = attr(%s, %s)", r, v, self:constant(node.name))
  return r
end

function E:Getitem(node, d)
  local v = self:expr(node.node, d)
  local key = self:expr(node.arg, behind(v, d))
  local r = self:register(d, node.line)
  self:emit("%s = item(%s, %s)", r, v, key)
  return r
end

function E:Slice(node, d)
  local v = self:expr(node.node, d)
  local at, parts = behind(v, d), {}
  for _, name in ipairs({ "from", "to", "step" }) do
    local part = node[name] and self:expr(node[name], at) or "nil"
    at = behind(part, at)
    parts[#parts + 1] = part
  end
  local r = self:register(d, node.line)
  self:emit("%s = R.slice(%s, %s)", r, v, table.concat(parts, ", "))
  return r
end

--- Emits arguments from register d on; returns the expressions of the two tables.
function G:arguments(node, d)
  local list, kwargs = {}, "nil"
  for i, a in ipairs(node.args) do
    list[i] = self:expr(a, d)
    d = behind(list[i], d)
  end
  local args = #list == 0 and "no_args" or format("{ n = %d, %s }", #list, table.concat(list, ", "))
  if node.kwargs then
    kwargs = self:register(d, node.line)
    self:emit("%s = V.dict()", kwargs)
    for _, pair in ipairs(node.kwargs) do
      self:emit("V.dict_set(%s, %s, %s)", kwargs, self:constant(pair.name), self:expr(pair.value, d + 1))
    end
  end
  return args, kwargs
end

function E:Call(node, d, macro)
  local target, head, callee = node.node
  if target.t == "Getattr" then
    callee = self:expr(target.node, d)
    head = format("call_method(%s, %s", callee, self:constant(target.name))
  else
    callee = self:expr(target, d)
    head = "call(" .. callee
  end
  local args, kwargs = self:arguments(node, behind(callee, d))
  local r = self:register(d, node.line)
  if macro then
    kwargs = format("R.with_caller(%s, %s)", kwargs, macro)
  end
  self:emit("%s = %s, %s, %s)", r, head, args, kwargs)
  return r
end

function G:named(set, what, name, line)
  local f = set[name]
  if not f then
    if self.branch == 0 then
      fail(line, "No " .. what .. " named '" .. name .. "'.")
    end
    f = R.unknown(what, name)
  end
  return self:constant(f)
end

function E:Filter(node, d)
  local f = self:named(library.filters, "filter", node.name, node.line)
  local v = self:expr(node.node, d)
  local args, kwargs = self:arguments(node, behind(v, d))
  local r = self:register(d, node.line)
  self:emit("%s = %s(%s, %s, %s)", r, f, v, args, kwargs)
  return r
end

function E:Test(node, d)
  local f = self:named(library.tests, "test", node.name, node.line)
  local v = self:expr(node.node, d)
  local args = self:arguments(node, behind(v, d))
  local r = self:register(d, node.line)
  self:emit("%s = %s(%s, %s)", r, f, v, args)
  return r
end

local function sequence(kind)
  return function(self, node, d)
    local r = self:register(d, node.line)
    self:emit('%s = { k = "%s", n = %d }', r, kind, #node.items)
    for i, item in ipairs(node.items) do
      self:emit("%s[%d] = %s", r, i, self:expr(item, d + 1))
    end
    return r
  end
end
E.List, E.Tuple = sequence("list"), sequence("tuple")

function E:Dict(node, d)
  local r = self:register(d, node.line)
  self:emit("%s = V.dict()", r)
  for _, pair in ipairs(node.items) do
    local key = self:expr(pair.key, d + 1)
    self:emit("V.dict_set(%s, %s, %s)", r, key, self:expr(pair.value, behind(key, d + 1)))
  end
  return r
end

-- Statements

local S = {}

function G:body_of(nodes)
  for _, node in ipairs(nodes) do
    if node.t ~= "Data" then
      self:emit("ln = %d", node.line)
    end
    S[node.t](self, node)
  end
end

--- nodes as a block of its own. branch: as in Jinja, an unknown filter or test directly in a branch of an if is an error of the
-- rendering that gets there, everywhere else one of the template.
function G:block(nodes, branch)
  local outer = self.branch
  self:emit("do")
  self.branch = branch and 1 or 0
  self:body_of(nodes)
  self.branch = outer
  self:emit("end")
end

function S:Data(node)
  self:emit("put(O, %s)", self:constant(node.value))
end

function S:Output(node)
  self:emit("write(O, %s)", self:expr(node.value, 1))
end

function S:If(node)
  local done = self:label()
  for _, branch in ipairs(node.branches) do
    local skip = self:label()
    self:emit("ln = %d", branch.test.line)
    local outer = self.branch
    self.branch = 1
    self:emit("if not %s then goto l%d end", self:condition(branch.test, 1), skip)
    self.branch = outer
    self:block(branch.body, true)
    self:emit("goto l%d", done)
    self:emit("::l%d::", skip)
  end
  if node.other then
    self:block(node.other, true)
  end
  self:emit("::l%d::", done)
end

--- Assigns the Lua expression v to a target in scope S; registers from d on are free.
function G:assign(target, v, d)
  if target.t == "Name" then
    self:emit("S.v_%s = %s", target.name, v)
  elseif target.t == "NSRef" then
    self:emit("R.set_attr(S.v_%s, %s, %s)", target.name, self:constant(target.attr), v)
  else
    local r = self:register(d, target.line)
    self:emit("%s = R.unpack(%s, %d)", r, v, #target.items)
    for i, item in ipairs(target.items) do
      self:assign(item, format("%s[%d]", r, i), d + 1)
    end
  end
end

function S:Assign(node)
  local v = self:expr(node.value, 1)
  self:assign(node.target, v, 2)
end

--- Emits a body whose output goes to a buffer; v names the Lua local that gets its text.
function G:captured(nodes, v)
  self:emit("local %s", v)
  self:emit("do")
  self:emit("local O, S = buffer(), push(S)")
  self:block(nodes)
  self:emit("%s = finish(O)", v)
  self:emit("end")
end

function G:filtered(node)
  self:captured(node.body, "body")
  self.body = "body"
  return self:expr(node.filters, 1)
end

function S:AssignBlock(node)
  self:emit("do")
  local v = self:filtered(node)
  self:assign(node.target, v, 2)
  self:emit("end")
end

function S:FilterBlock(node)
  self:emit("do")
  self:emit("write(O, %s)", self:filtered(node))
  self:emit("end")
end

function S:Scope(node)
  self:emit("do")
  self:emit("local S = push(S)")
  self:body_of(node.body)
  self:emit("end")
end

function S:With(node)
  self:emit("do")
  self:emit("local inner = push(S)")
  for i, target in ipairs(node.targets) do
    local v = self:expr(node.values[i], 1)
    self:emit("do local S = inner")
    self:assign(target, v, 2)
    self:emit("end")
  end
  self:emit("local S = inner")
  self:body_of(node.body)
  self:emit("end")
end

local ASSIGNS = { Assign = true, AssignBlock = true, Macro = true, CallBlock = true }

--- Does a loop body need a scope of its own in each round? (It does if it sets a variable or keeps the scope in a macro.)
local function assigns(nodes)
  for _, node in ipairs(nodes) do
    if ASSIGNS[node.t] then
      return true
    elseif node.t == "If" then
      for _, branch in ipairs(node.branches) do
        if assigns(branch.body) then
          return true
        end
      end
      if node.other and assigns(node.other) then
        return true
      end
    end
  end
  return false
end

function S:For(node)
  self.loops = self.loops + 1
  if self.loops > limits.loops then
    fail(node.line, "more than " .. limits.loops .. " loops in each other")
  end
  self:emit("do")
  self:emit("local items, n = V.items(%s)", self:expr(node.iter, 1))
  if node.test then
    self:emit("do")
    self:emit("local S, all, count = push(S), items, n")
    self:emit("items, n = {}, 0")
    self:emit("for i = 1, count do")
    self:assign(node.target, "all[i]", 1)
    self:emit("if %s then n = n + 1 items[n] = all[i] end", self:condition(node.test, 1))
    self:emit("end end")
  end
  local id, outer = self:label(), self.loop_id
  self.loop_id = id
  local fresh = assigns(node.body)
  self:emit("local loop, outer = R.loop(items, n), S")
  if not fresh then
    self:emit("local S = push(outer)")
    self:emit("S.v_loop = loop")
  end
  self:emit("for i = 1, n do")
  self:emit("loop.i = i")
  if fresh then
    self:emit("local S = push(outer)")
    self:emit("S.v_loop = loop")
  end
  self:assign(node.target, "items[i]", 1)
  self:block(node.body)
  self:emit("::continue%d::", id)
  self:emit("end")
  self:emit("::break%d::", id)
  self.loop_id = outer
  self.loops = self.loops - 1
  if node.other then
    self:emit("if n == 0 then")
    self:block(node.other)
    self:emit("end")
  end
  self:emit("end")
end

function S:Break()
  self:emit("goto break%d", self.loop_id)
end

function S:Continue()
  self:emit("goto continue%d", self.loop_id)
end

--- Emits the code of a macro; returns the Lua expression of its value.
function G:macro(node)
  local outer = { code = self.code, registers = self.registers, loops = self.loops, loop_id = self.loop_id, branch = self.branch }
  self.code, self.registers, self.loops, self.branch = {}, 1, 0, 0
  for i, name in ipairs(node.args) do
    self:emit("r1 = args[%d]", i)
    self:emit("if r1 == nil then")
    if node.defaults[i] then
      self:expr_to(node.defaults[i], 1)
    else
      self:emit("r1 = R.missing(%s)", self:constant(name))
    end
    self:emit("end")
    self:emit("S.v_%s = r1", name)
  end
  local uses = {}
  for i, name in ipairs({ "varargs", "kwargs", "caller" }) do
    uses[i] = tostring(node.used[name] == true)
    if node.used[name] then
      self:emit(name == "caller" and 'S.v_caller = args.caller or V.undefined("No caller defined")' or "S.v_%s = args.%s", name, name)
    end
  end
  self:body_of(node.body)
  local body, registers = self.code, self.registers
  for k, v in pairs(outer) do
    self[k] = v
  end
  self.loop_id = outer.loop_id
  self:emit("do")
  self:emit("local defined_in = S")
  self:emit("macro_value = R.macro(%s, %s, %s, function(args)", self:constant(node.name), self:names(node.args), table.concat(uses, ", "))
  self:emit("local S, O, line = push(defined_in), buffer(), ln")
  self:declare(registers)
  for i = 1, #body do
    self.code[#self.code + 1] = body[i]
  end
  self:emit("ln = line")
  self:emit("return finish(O)")
  self:emit("end)")
  self:emit("end")
end

function G:names(list)
  local out = {}
  for i, name in ipairs(list) do
    out[i] = self:constant(name)
  end
  return "{" .. table.concat(out, ", ") .. "}"
end

function G:declare(n)
  local list = {}
  for i = 1, n do
    list[i] = "r" .. i
  end
  self:emit("local macro_value, " .. table.concat(list, ", "))
end

function S:Macro(node)
  self:macro(node)
  self:emit("S.v_%s = macro_value", node.name)
end

function S:CallBlock(node)
  self:macro(node)
  self:emit("do")
  self:emit("local caller = macro_value")
  self:emit("write(O, %s)", E.Call(self, node.call, 1, "caller"))
  self:emit("end")
end

local HEAD = [[
local K, R, V = ...
local None, add, concat, eq, truthy, attr, item = V.None, V.add, V.concat, V.eq, V.truthy, R.attr, R.item
local call, call_method, put, write, buffer, finish, push = R.call, R.call_method, R.put, R.write, R.buffer, R.finish, R.push
local no_args, ln = R.no_args, 0
local function main(S, O)]]

--- Lua source of a function(K, R, V) -> main(S, O), line(); and its constants.
return function(tree)
  local self = setmetatable({ code = {}, constants = {}, index = {}, registers = 1, labels = 0, loops = 0, branch = 0 }, G)
  self:body_of(tree)
  local body = self.code
  self.code = { HEAD }
  self:declare(self.registers)
  self.code[#self.code + 1] = table.concat(body, "\n")
  self.code[#self.code + 1] = "end\nreturn main, function() return ln end"
  return table.concat(self.code, "\n"), self.constants
end
