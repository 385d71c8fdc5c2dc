--- Memory pressure. As free KV pages run out, a growing share of new sequences keeps K and V in FP8, which takes half
--- the memory; when almost none are left, requests of low priority are turned away. A sequence whose long prefix is
--- cached already keeps that prefix's format: reading it again in another one would cost more pages than it saves.

local dunlin = require("dunlin")

local params = {
  degrade_below = { default = 0.30, min = 0, max = 1, doc = "free-page ratio under which some new KV is FP8" },
  all_below = { default = 0.15, min = 0, max = 1, doc = "free-page ratio under which all new KV is FP8" },
  shed_below = { default = 0.05, min = 0, max = 1, doc = "free-page ratio under which low priority is refused" },
  shed_priority = { default = 50, min = 0, max = 100, doc = "requests under this priority are refused first" },
  keep_cached_tokens = { default = 2048, min = 0, max = 1e6, doc = "a cached prefix this long decides the format" },
}

local function init()
  local p = dunlin.params
  if not (p.shed_below < p.all_below and p.all_below < p.degrade_below) then
    return false, "expected shed_below < all_below < degrade_below"
  end
end

local function admit(_, node, so_far)
  if node.kv.free_ratio < dunlin.params.shed_below and (so_far.priority or 50) < dunlin.params.shed_priority then
    return dunlin.reject(503, "overloaded", "the node is short of memory", { retry_after = 2 })
  end
end

-- A ramp instead of a threshold: with one threshold all requests would change format together whenever the ratio
-- crosses it, to and fro; the share of FP8 moves with the ratio instead, and needs no memory of what was before.
local function share(free_ratio)
  local p = dunlin.params
  return (p.degrade_below - free_ratio) / (p.degrade_below - p.all_below)
end

local function route(req, node, so_far)
  local free = node.kv.free_ratio
  if free >= dunlin.params.degrade_below or so_far.kv_dtype == "fp8_e4m3" then
    return nil
  end
  local model = node.models[so_far.model or req.model]
  if not model or not model.kv_dtypes.fp8_e4m3 then
    return nil
  end
  if dunlin.hash(req.id, 10000) >= share(free) * 10000 then
    return nil
  end
  if (req.cached[so_far.kv_dtype or "bf16"] or 0) >= dunlin.params.keep_cached_tokens then
    return { reason = "kept bf16: cached prefix" }
  end
  return { kv_dtype = "fp8_e4m3", reason = ("kv free %.0f%%"):format(free * 100) }
end

return { api = 1, name = "pressure", params = params, init = init, admit = admit, route = route }
