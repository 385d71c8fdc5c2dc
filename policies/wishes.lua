--- Honours what the client asks for in the body, `dunlin: {kv, integrity}`. Without this policy a wish is recorded and
--- has no effect. Put it first in the list: what later policies decide counts more. A wish for integrity can only raise
--- it.

local dunlin = require("dunlin")

local params = {
  kv = { default = true, doc = "honour the wish for a KV format" },
  integrity = { default = true, doc = "honour the wish for page checks" },
}

local function route(req, node)
  local kv, integrity = req.wish.kv, req.wish.integrity
  local model = node.models[req.model]
  local d = {}
  if dunlin.params.kv and kv and model and model.kv_dtypes[kv] then
    d.kv_dtype = kv
  end
  if dunlin.params.integrity and integrity == "tag" then
    d.integrity = "tag"
  end
  if next(d) == nil then
    return nil
  end
  d.reason = "client's wish"
  return d
end

return { api = 1, name = "wishes", params = params, route = route }
