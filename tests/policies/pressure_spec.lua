local bench = require("dunlin.testing")

local function free(ratio)
  return { kv = { free_ratio = ratio } }
end

describe("pressure", function()
  local p

  before_each(function()
    p = bench.load("policies/pressure.lua")
  end)

  it("changes nothing while memory is plentiful", function()
    assert.are.same({}, p:route({}, free(0.5)))
    assert.are.same({}, p:route({}, free(0.30)))
  end)

  it("moves every new sequence to FP8 under all_below", function()
    for i = 1, 200 do
      assert.are.equal("fp8_e4m3", p:route({ id = "r" .. i }, free(0.10)).kv_dtype)
    end
    assert.are.equal("kv free 10%", p:route({}, free(0.10)).reason)
  end)

  it("moves a share that grows as pages run out, the same requests first", function()
    local function moved(ratio)
      local set, n = {}, 0
      for i = 1, 2000 do
        if p:route({ id = "r" .. i }, free(ratio)).kv_dtype then
          set[i], n = true, n + 1
        end
      end
      return set, n / 2000
    end
    local few, a = moved(0.27)
    local more, b = moved(0.20)
    assert.is_true(math.abs(a - 0.20) < 0.04, a)
    assert.is_true(math.abs(b - 2 / 3) < 0.04, b)
    for i in pairs(few) do
      assert.is_true(more[i])
    end
  end)

  it("keeps the format of a long cached prefix", function()
    local d = p:route({ cached = { bf16 = 30000 } }, free(0.10), { kv_dtype = "bf16" })
    assert.are.equal("bf16", d.kv_dtype)
    assert.are.equal("kept bf16: cached prefix", d.reason)
    assert.are.equal("fp8_e4m3", p:route({ cached = { bf16 = 100 } }, free(0.10)).kv_dtype)
  end)

  it("leaves a model without FP8 KV alone", function()
    local node = free(0.1)
    node.models = { ["qwen3-8b"] = { kv_dtypes = { fp8_e4m3 = false } } }
    assert.is_nil(p:route({}, node).kv_dtype)
  end)

  it("sheds low priority first", function()
    local _, low = p:admit({}, free(0.01), { priority = 10 })
    local _, high = p:admit({}, free(0.01), { priority = 90 })
    local _, plain = p:admit({}, free(0.01))
    local _, quiet = p:admit({}, free(0.06), { priority = 10 })
    assert.are.equal(503, low.status)
    assert.are.equal(2, low.retry_after)
    assert.is_nil(high)
    assert.is_nil(plain)
    assert.is_nil(quiet)
  end)

  it("refuses to load with thresholds that contradict each other", function()
    assert.has_error(function()
      bench.load("policies/pressure.lua", { params = { shed_below = 0.5 } })
    end, "policies/pressure.lua: init refused: expected shed_below < all_below < degrade_below")
  end)

  it("comes after tiers in the list and sees its choice", function()
    local tiers = bench.load("policies/tiers.lua")
    local gold = { labels = { tier = "gold" } }
    local d = bench.chain({ tiers, p }, "route", gold, free(0.10))
    assert.are.equal("fp8_e4m3", d.kv_dtype)
    assert.are.equal("kv free 10%", d.reason)
    assert.are.equal("bf16", bench.chain({ tiers, p }, "route", gold, free(0.80)).kv_dtype)
  end)
end)
