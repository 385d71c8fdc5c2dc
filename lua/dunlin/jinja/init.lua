--- Chat templates: Jinja as transformers sets it up, compiled to Lua.
--
--   local template, err = jinja.compile(source)
--   local text, segments = jinja.render(template, context, options)   -- or nil, err
--
-- M.strftime, set by the host, is what strftime_now() calls unless the options have their own.
-- context is a dict value of dunlin.jinja.value; text that came with a request must be of kind "str" in it (see text.lua).
-- segments is {length, trusted, length, trusted, ...} over the bytes of text. err is {kind, message, line}.
local parse = require("dunlin.jinja.parser")
local generate = require("dunlin.jinja.codegen")
local R = require("dunlin.jinja.runtime")
local V = require("dunlin.jinja.value")
local text = require("dunlin.jinja.text")

R.put = text.put

local M = { value = V, text = text }

--- What went wrong as {kind, message, line}; v is what error() raised.
local function describe(v, line)
  if type(v) == "table" and v.message then
    v.line = v.line or line
    return v
  end
  return { kind = "InternalError", message = tostring(v), line = line }
end

--- A template that can be rendered any number of times, or nil and an error.
function M.compile(source)
  local ok, tree = pcall(parse, source)
  if not ok then
    return nil, describe(tree, 1)
  end
  local generated, code, constants = pcall(generate, tree)
  if not generated then
    return nil, describe(code, 1)
  end
  local chunk, why = load(code, "=template", "t", {})
  if not chunk then
    return nil, { kind = "TemplateSyntaxError", message = "template too complex (" .. why .. ")", line = 1 }
  end
  local main, line = chunk(constants, R, V)
  return { main = main, line = line, code = code }
end

local globals = setmetatable({}, {
  __index = function(_, name)
    return V.undefined("'" .. name:sub(3) .. "' is undefined")
  end,
})
for name, v in pairs(R.globals) do
  globals["v_" .. name] = v
end
globals.__index = globals

--- Renders with the variables of the dict `context`. options: strftime = function(format), mutable = lists may be changed.
function M.render(template, context, options)
  local scope = setmetatable({}, globals)
  for i = 1, context.n do
    local name = text.bytes(context.keys[i])
    scope["v_" .. name] = context.map[name]
  end
  local state = R.state
  state.depth, state.mutable, state.strftime = 0, options and options.mutable or false, options and options.strftime or M.strftime
  local out = text.new_buffer()
  local ok, why = pcall(template.main, scope, out)
  if not ok then
    return nil, describe(why, template.line())
  end
  local result = text.finish(out)
  if out.n == 0 then
    return "", {}
  end
  return text.bytes(result), text.segments(result)
end

return M
