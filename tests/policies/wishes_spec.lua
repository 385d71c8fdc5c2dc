local bench = require("dunlin.testing")

describe("wishes", function()
  local p

  before_each(function()
    p = bench.load("policies/wishes.lua")
  end)

  it("has no opinion without a wish", function()
    assert.are.same({}, p:route({}))
  end)

  it("honours the wish for a KV format", function()
    local d = p:route({ wish = { kv = "fp8_e4m3" } })
    assert.are.same({ kv_dtype = "fp8_e4m3", reason = "client's wish" }, d)
  end)

  it("ignores formats that the model can't keep or nobody knows", function()
    assert.are.same({}, p:route({ wish = { kv = "fp4" } }))
    local node = { models = { ["qwen3-8b"] = { kv_dtypes = { fp8_e4m3 = false } } } }
    assert.are.same({}, p:route({ wish = { kv = "fp8_e4m3" } }, node))
  end)

  it("lets integrity rise and never fall", function()
    assert.are.equal("tag", p:route({ wish = { integrity = "tag" } }).integrity)
    assert.are.same({}, p:route({ wish = { integrity = "off" } }))
    local d = p:route({ wish = { integrity = "off", kv = "bf16" } }, nil, { integrity = "tag" })
    assert.are.equal("tag", d.integrity)
  end)

  it("can be told to honour one of them only", function()
    p = bench.load("policies/wishes.lua", { params = { kv = false } })
    local d = p:route({ wish = { kv = "fp8_e4m3", integrity = "tag" } })
    assert.is_nil(d.kv_dtype)
    assert.are.equal("tag", d.integrity)
  end)

  it("is overruled by policies behind it", function()
    local tiers = bench.load("policies/tiers.lua")
    local d = bench.chain({ p, tiers }, "route", { labels = { tier = "free" }, wish = { kv = "bf16" } })
    assert.are.equal("fp8_e4m3", d.kv_dtype)
  end)
end)
