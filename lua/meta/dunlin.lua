---@meta
-- luacheck: ignore
-- Types of the policy API, for editors (LuaCATS). Not loaded by the node; a spec compares it with the contract.

---@alias dunlin.kv "bf16"|"fp8_e4m3"
---@alias dunlin.weights "bf16"|"fp8"|"int8"|"int4"
---@alias dunlin.integrity "off"|"tag"

---@class dunlin.wish
---@field kv? string
---@field integrity? string

---@class dunlin.request
---@field id string
---@field endpoint string "chat.completions", "completions"
---@field stream boolean
---@field n integer
---@field model string
---@field requested_model string
---@field tenant? string
---@field key_id? string
---@field labels table<string, string|true>
---@field client_ip? string
---@field headers table<string, string>
---@field user? string
---@field metadata table<string, string>
---@field prompt_cache_key? string
---@field max_tokens? integer
---@field temperature? number
---@field tools integer
---@field response_format? string
---@field prompt_bytes integer
---@field prompt_tokens? integer in route and finish
---@field cached table<dunlin.kv, integer>
---@field wish dunlin.wish

---@class dunlin.time
---@field hour integer
---@field minute integer
---@field wday integer 1 is Sunday

---@class dunlin.node_kv
---@field pages_total integer
---@field pages_free integer
---@field free_ratio number

---@class dunlin.queue
---@field waiting integer
---@field oldest_ms integer

---@class dunlin.pool
---@field role "prefill"|"decode"|"both"
---@field running integer
---@field waiting integer
---@field kv_free_ratio number
---@field healthy boolean
---@field weights table<dunlin.weights, true>

---@class dunlin.model
---@field weights table<dunlin.weights, true>
---@field kv_dtypes table<dunlin.kv, true>
---@field context integer

---@class dunlin.node
---@field time dunlin.time
---@field kv dunlin.node_kv
---@field queue dunlin.queue
---@field running integer
---@field pools table<string, dunlin.pool>
---@field models table<string, dunlin.model>

---@class dunlin.result
---@field status integer
---@field code? string
---@field finish_reason? string
---@field prompt_tokens integer
---@field cached_tokens integer
---@field completion_tokens integer
---@field queue_ms number
---@field ttft_ms number
---@field total_ms number
---@field model? string
---@field pool? string
---@field weights? dunlin.weights
---@field kv_dtype? dunlin.kv
---@field integrity? dunlin.integrity

---@class dunlin.decision
---@field model? string
---@field priority? integer
---@field max_tokens? integer
---@field queue_timeout_ms? integer
---@field prefill_pool? string
---@field decode_pool? string
---@field prefill_weights? dunlin.weights
---@field decode_weights? dunlin.weights
---@field kv_dtype? dunlin.kv
---@field integrity? dunlin.integrity
---@field cache_salt? string
---@field cache_write? boolean
---@field headers? table<string, string>
---@field reason? string

---@class dunlin.bucket
local bucket = {}
---@param key string
---@param n? number
---@return boolean ok
---@return number wait_ms
function bucket:take(key, n) end
---@param key string
---@param n number
function bucket:give(key, n) end
---@param key string
---@return number
function bucket:level(key) end

---@class dunlin.counter
local counter = {}
---@param n number
---@param label? string
function counter:add(n, label) end

---@class dunlin.param
---@field default number|string|boolean
---@field min? number
---@field max? number
---@field values? (number|string)[]
---@field doc? string

---@class dunlin.policy
---@field api 1
---@field name string
---@field doc? string
---@field params? table<string, dunlin.param>
---@field init? fun(): boolean?, string?
---@field admit? fun(req: dunlin.request, node: dunlin.node, so_far: dunlin.decision): dunlin.decision?
---@field route? fun(req: dunlin.request, node: dunlin.node, so_far: dunlin.decision): dunlin.decision?
---@field finish? fun(req: dunlin.request, result: dunlin.result)

---@class dunlin
---@field params table<string, number|string|boolean>
local dunlin = {}

---@param status 400|403|404|413|422|429|503
---@param code string
---@param message string
---@param extra? { retry_after?: number, param?: string }
---@return dunlin.decision
function dunlin.reject(status, code, message, extra) end
---@param name string
---@param options { rate: number, burst: number }
---@return dunlin.bucket
function dunlin.bucket(name, options) end
---@param name string
---@return dunlin.counter
function dunlin.counter(name) end
---@param key string
---@param n integer
---@return integer
function dunlin.hash(key, n) end
---@param node dunlin.node
---@param from string "22:00"
---@param to string "06:00"
---@return boolean
function dunlin.between(node, from, to) end
---@param text string
---@param glob string
---@return boolean
function dunlin.glob(text, glob) end
---@param level "error"|"warn"|"info"|"debug"
---@param message string
---@param fields? table<string, any>
function dunlin.log(level, message, fields) end

return dunlin
