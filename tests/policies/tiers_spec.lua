local bench = require("dunlin.testing")

describe("tiers", function()
  local p

  before_each(function()
    bench.clock_ms = 0
    p = bench.load("policies/tiers.lua")
  end)

  it("gives a key without a label the default tier", function()
    local d, reject = p:admit({})
    assert.is_nil(reject)
    assert.are.equal(1024, d.max_tokens)
    assert.are.equal(10, d.priority)
    assert.are.equal("free", d.headers["x-tier"])
    local pro = bench.load("policies/tiers.lua", { params = { default_tier = "pro" } })
    assert.are.equal("pro", (pro:admit({})).headers["x-tier"])
  end)

  it("gives a label that names no tier the least", function()
    local pro = bench.load("policies/tiers.lua", { params = { default_tier = "gold" } })
    assert.are.equal("free", (pro:admit({ labels = { tier = "goldd" } })).headers["x-tier"])
  end)

  it("keeps KV in fp8 for free and in bf16 for gold", function()
    assert.are.equal("fp8_e4m3", p:route({ labels = { tier = "free" } }).kv_dtype)
    assert.are.equal("bf16", p:route({ labels = { tier = "gold" } }).kv_dtype)
  end)

  it("leaves the format alone where the model can't keep it", function()
    local node = { models = { ["qwen3-8b"] = { kv_dtypes = { fp8_e4m3 = false } } } }
    local d = p:route({ labels = { tier = "free" } }, node)
    assert.is_nil(d.kv_dtype)
    assert.are.equal("tier free", d.reason)
  end)

  it("checks pages and isolates the cache for regulated keys only", function()
    local d = p:route({ tenant = "acme", labels = { tier = "gold", regulated = true } })
    assert.are.equal("tag", d.integrity)
    assert.are.equal("regulated/acme", d.cache_salt)
    d = p:route({ tenant = "acme", labels = { tier = "gold" } })
    assert.is_nil(d.integrity)
    assert.is_nil(d.cache_salt)
  end)

  it("refuses with 429 and a wait once the budget is spent, and recovers", function()
    local request = { tenant = "nobody", prompt_bytes = 24000, max_tokens = 1024 }
    local _, first = p:admit(request)
    assert.is_nil(first)
    local _, second = p:admit(request)
    assert.are.equal(429, second.status)
    assert.are.equal("rate_limit_exceeded", second.code)
    assert.is_true(second.retry_after > 0)
    local _, other = p:admit({ tenant = "somebody", prompt_bytes = 24000 })
    assert.is_nil(other)
    bench.advance(second.retry_after * 1000)
    local _, third = p:admit(request)
    assert.is_nil(third)
  end)

  it("gives back what a short answer did not use, and no more", function()
    local request = { tenant = "nobody", prompt_bytes = 4000, max_tokens = 1024 }
    local bucket = p.dunlin.bucket("tokens.free", { rate = 50, burst = 8000 })
    local full = bucket:level("nobody")
    p:admit(request)
    assert.are.equal(full - 2024, bucket:level("nobody"))
    p:finish(request, { prompt_tokens = 900, cached_tokens = 800, completion_tokens = 10 })
    assert.are.equal(full - 110, bucket:level("nobody"))
    p:admit(request)
    p:finish(request, { prompt_tokens = 5000, cached_tokens = 0, completion_tokens = 10 })
    assert.are.equal(full - 110 - 2024, bucket:level("nobody"))
  end)

  it("works for requests without a tenant and without max_tokens", function()
    local _, reject = p:admit({ tenant = false })
    assert.is_nil(reject)
  end)
end)
