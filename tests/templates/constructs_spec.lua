-- Every construct against what Jinja2 3.1.6 makes of it: cases.jsonl is written by make_cases.py. Runs without shared data.
local jinja = require("dunlin.jinja")
local support = require("support")

local here = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")

local cases, context = {}, nil
for line in io.lines(here .. "/cases.jsonl") do
  if line:sub(1, 11) == '{"context":' then
    context = support.decode(line).map.context
  else
    cases[#cases + 1] = support.plain(line)
  end
end

local function render(source)
  local template, err = jinja.compile(source)
  if template then
    local output, segments = jinja.render(template, context, { strftime = support.strftime })
    if output then
      local n = 0
      for i = 1, #segments, 2 do
        n = n + segments[i]
        assert(segments[i] > 0 and (i == 1 or segments[i + 1] ~= segments[i - 1]), "segments of " .. source)
      end
      assert(n == #output, "segments cover the text of " .. source)
      return output
    end
    err = segments
  end
  assert(err.line >= 1)
  return nil, err.kind, err.message
end

describe("the template compiler", function()
  assert(#cases > 120)
  for i, case in ipairs(cases) do
    it("agrees with Jinja2 on case " .. i .. ": " .. case.template:sub(1, 60), function()
      local output, kind, message = render(case.template)
      if case.output then
        assert.equal(case.output, output or kind .. ": " .. message)
      elseif case.error:find("^TemplateSyntaxError") then
        assert.equal("TemplateSyntaxError", kind) -- our messages differ and have the line
      else
        assert.equal(case.error, kind and kind .. ": " .. message or output)
      end
    end)
  end
end)
