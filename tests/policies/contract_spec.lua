local bench = require("dunlin.testing")
local contract = require("dunlin.contract")
local patterns = require("dunlin.patterns")
local readonly = require("dunlin.policy.readonly")

local function policy(body, rest)
  return bench.load("p.lua", {
    source = "local dunlin = require('dunlin') local function f(req, node, so_far) " .. body .. " end "
      .. "return { api = 1, name = 'p', admit = f, route = f" .. (rest or "") .. " }",
  })
end

local function message_of(f, ...)
  local ok, message = pcall(f, ...)
  assert.is_false(ok)
  return message
end

describe("the contract", function()
  it("names the nearest field of a typo", function()
    local p = policy("return { kv_dtpye = 'bf16' }")
    assert.are.equal('p.lua:1: route: returned an unknown field "kv_dtpye", did you mean "kv_dtype"?',
      message_of(p.route, p))
  end)

  it("refuses a field of admit in route", function()
    local p = policy("return { model = 'qwen3-8b' }")
    assert.are.equal("qwen3-8b", (p:admit()).model)
    assert.is_truthy(message_of(p.route, p):find("can't be decided in route", 1, true))
  end)

  it("merges caps downwards, integrity upwards and the rest by order", function()
    local p = policy("return { max_tokens = 10, integrity = 'off', priority = 1, headers = { ['x-a'] = '1' } }")
    local d = p:route({}, nil, { max_tokens = 5, integrity = "tag", priority = 9, headers = { ["x-b"] = "2" } })
    assert.are.same({ max_tokens = 5, integrity = "tag", priority = 1, headers = { ["x-a"] = "1", ["x-b"] = "2" } }, d)
  end)

  it("bounds headers together with those of policies before", function()
    local p = policy("return { headers = { ['x-9'] = '1' } }")
    local before = {}
    for i = 1, 8 do
      before["x-" .. i] = "v"
    end
    assert.is_truthy(message_of(p.route, p, {}, nil, { headers = before }):find("at most 8", 1, true))
  end)

  it("has one bit a field, in order", function()
    for i, field in ipairs(contract.fields) do
      assert.are.equal(2 ^ (i - 1), field.bit)
    end
  end)
end)

describe("views", function()
  it("can't be written, by assignment or by table functions", function()
    for _, body in ipairs({ "req.user = 1", "req.labels.x = 1", "node.kv.free_ratio = 1", "so_far.priority = 1",
      "node.models[req.model].weights.int4 = true" }) do
      local p = policy(body)
      assert.is_truthy(message_of(p.route, p):find("read-only", 1, true), body)
    end
    local p = policy("table.insert(req.labels, 'x') return { reason = tostring(next(req.labels)) }")
    assert.are.equal("nil", (p:route()).reason)
  end)

  it("can be walked", function()
    local p = policy("local n = 0 for name, pool in pairs(node.pools) do n = n + 1 assert(pool.healthy) end "
      .. "return { reason = n .. tostring(next(req.metadata)) }")
    assert.are.equal("1k", (p:route({ metadata = { k = "v" } })).reason)
  end)

  it("suggest near names only", function()
    local known = { tenant = true, labels = true }
    assert.are.equal(', did you mean "tenant"?', readonly.suggest("tennant", known))
    assert.are.equal(', did you mean "labels"?', readonly.suggest("lables", known))
    assert.are.equal("", readonly.suggest("temperature", known))
  end)
end)

describe("the bench", function()
  it("guards string methods while a policy runs, and only then", function()
    local p = policy("return { reason = req.id:match('r') }")
    assert.is_truthy(message_of(p.route, p):find("match", 1, true))
    assert.are.equal("r", ("r"):match("r"))
  end)

  it("stops endless loops", function()
    local p = policy("while true do end")
    assert.is_truthy(message_of(p.route, p):find("200000 instructions", 1, true))
    assert.are.equal(1, (policy("return { priority = 1 }"):route()).priority)
  end)

  it("refuses names that do not exist in a spec's request", function()
    local p = policy("return nil")
    assert.is_truthy(message_of(p.route, p, { tennant = "x" }):find("tennant", 1, true))
  end)

  it("records counters and logs", function()
    local p = policy("dunlin.counter('c'):add(2, 'l') dunlin.log('info', 'hello', { b = 2, a = 1 })")
    bench.counters, bench.logs = {}, {}
    p:route()
    assert.are.same({ ["p.c{l}"] = 2 }, bench.counters)
    assert.are.same({ "info p: hello a=1 b=2" }, bench.logs)
  end)
end)

describe("glob", function()
  it("matches as expected", function()
    for _, row in ipairs({
      { "curl/8.1", "curl/*", true }, { "curl", "curl/*", false }, { "", "", true }, { "", "*", true },
      { "abc", "a?c", true }, { "abc", "a?", false }, { "abcbc", "a*bc", true }, { "abcbd", "a*bc", false },
      { "a.b", "a.b", true }, { "axb", "a.b", false }, { "xyz", "*y*", true }, { "xyz", "***z", true },
      { "a*b", "a*b", true }, { "aXb", "a**b", true }, { "%d", "%d", true },
    }) do
      assert.are.equal(row[3], patterns.glob(row[1], row[2]), row[1] .. " ~ " .. row[2])
    end
  end)
end)

describe("between", function()
  it("goes over midnight", function()
    local p = policy("return { cache_write = dunlin.between(node, '22:00', '06:00') }")
    for _, row in ipairs({ { 21, 59, false }, { 22, 0, true }, { 0, 0, true }, { 5, 59, true }, { 6, 0, false } }) do
      assert.are.equal(row[3], (p:route({}, { time = { hour = row[1], minute = row[2] } })).cache_write)
    end
    local bad = policy("return dunlin.between(node, '9', '10:00')")
    assert.is_truthy(message_of(bad.route, bad):find('"22:00"', 1, true))
  end)
end)
