local globals = require("dunlin.policy.globals")

local KNOWN = { print = true, string = true, pairs = true, require = true }

local function scan(source)
  local out = {}
  for i, use in ipairs(globals.scan(source, KNOWN)) do
    out[i] = use.name .. ":" .. use.line
  end
  return table.concat(out, " ")
end

describe("the scan for unknown globals", function()
  it("finds reads, writes and calls with their lines", function()
    assert.are.equal("a:1 b:2 c:3", scan("a = 1\nprint(b)\nc()"))
  end)

  it("knows locals, parameters, loop variables and functions", function()
    assert.are.equal("", scan("local a, b = 1 local function f(x, ...) return x, a, b, f end for i = 1, 2 do f(i) end "
      .. "for k, v in pairs(a) do f(k, v) end local g = function(y) return y end g()"))
  end)

  it("leaves fields, methods and keys alone", function()
    assert.are.equal("", scan("local t = { x = 1, ['y'] = 2; z = 3 } t.q = t.w t:m() print(t.a.b.c)"))
    assert.are.equal("v:1", scan("local t = { x = v }"))
    assert.are.equal("inner:1", scan("local t = { f = function() inner = 1 end }"))
  end)

  it("leaves strings, comments and numbers alone", function()
    assert.are.equal("", scan("-- foo\n--[[ bar\nbaz ]] local s = 'qux \\' quux' .. \"a\" .. [[b]] .. [==[c]]d]==]"))
    assert.are.equal("", scan("local n = 0x1f + 1e10 + 3.5 .. 4"))
    assert.are.equal("late:4", scan("local s = [[\n\n]]\nlate()"))
  end)

  it("knows labels", function()
    assert.are.equal("", scan("::again:: goto again"))
  end)

  it("finds nothing in the shipped policies", function()
    for _, name in ipairs({ "tiers", "pressure", "wishes" }) do
      local file = assert(io.open("policies/" .. name .. ".lua"))
      local known = { require = true, math = true, pairs = true, next = true }
      assert.are.same({}, globals.scan(file:read("*a"), known))
      file:close()
    end
  end)
end)
