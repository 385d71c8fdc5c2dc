--- Quality tiers. A key's label "tier" (free, pro or gold) chooses the KV format, the priority, the longest answer and
--- the token budget. A key labelled "regulated" has its pages checked and shares cached prefixes with nobody.

local dunlin = require("dunlin")

local params = {
  default_tier = { default = "free", values = { "free", "pro", "gold" }, doc = "tier of keys without the label" },
  free_tokens_per_s = { default = 50, min = 1, max = 1e9, doc = "budget of each tenant of this tier" },
  pro_tokens_per_s = { default = 500, min = 1, max = 1e9, doc = "budget of each tenant of this tier" },
  gold_tokens_per_s = { default = 2000, min = 1, max = 1e9, doc = "budget of each tenant of this tier" },
  burst_s = { default = 160, min = 1, max = 86400, doc = "seconds of the budget that may be used at once" },
}

local TIERS = {
  free = { kv_dtype = "fp8_e4m3", priority = 10, max_tokens = 1024 },
  pro = { kv_dtype = "bf16", priority = 50, max_tokens = 8192 },
  gold = { kv_dtype = "bf16", priority = 90, max_tokens = 32768 },
}

local buckets = {}

-- In init and not above, since the parameters are known from here on.
local function init()
  for name in pairs(TIERS) do
    local rate = dunlin.params[name .. "_tokens_per_s"]
    buckets[name] = dunlin.bucket("tokens." .. name, { rate = rate, burst = rate * dunlin.params.burst_s })
  end
end

-- A label that names no tier gets the least, not the default: a typo must not give more than was meant.
local function tier_of(req)
  local name = req.labels.tier or dunlin.params.default_tier
  if not TIERS[name] then
    name = "free"
  end
  return name, TIERS[name]
end

local function payer(req)
  return req.tenant or "-"
end

-- Before tokenization the size is only known in bytes; four bytes a token is close enough to hold a place in the
-- budget. finish() settles the difference.
local function estimate(req, tier)
  return math.ceil(req.prompt_bytes / 4) + math.min(req.max_tokens or tier.max_tokens, tier.max_tokens)
end

local function admit(req)
  local name, tier = tier_of(req)
  local ok, wait_ms = buckets[name]:take(payer(req), estimate(req, tier))
  if not ok then
    return dunlin.reject(429, "rate_limit_exceeded", "the token budget of tier " .. name .. " is spent", {
      retry_after = math.min(86400, math.ceil(wait_ms / 1000)),
    })
  end
  return { max_tokens = tier.max_tokens, priority = tier.priority, headers = { ["x-tier"] = name } }
end

local function route(req, node)
  local name, tier = tier_of(req)
  local model = node.models[req.model]
  local regulated = req.labels.regulated
  return {
    kv_dtype = model and model.kv_dtypes[tier.kv_dtype] and tier.kv_dtype or nil,
    integrity = regulated and "tag" or nil,
    cache_salt = regulated and "regulated/" .. payer(req) or nil,
    reason = "tier " .. name,
  }
end

local function finish(req, result)
  local name, tier = tier_of(req)
  local spent = result.prompt_tokens - result.cached_tokens + result.completion_tokens
  buckets[name]:give(payer(req), math.max(0, estimate(req, tier) - spent))
end

return { api = 1, name = "tiers", params = params, init = init, admit = admit, route = route, finish = finish }
