--- The bench for specs of policies: loads a policy file as the node does and calls its hooks.
--
--   local bench = require("dunlin.testing")
--   local p = bench.load("policies/tiers.lua", { params = { default_tier = "pro" } })
--   local decision, reject = p:admit({ tenant = "acme" }, node, so_far)   -- all optional; only what matters
--   local decision = p:route(request, node, so_far)
--   p:finish(request, result)
--   bench.chain({ a, b }, "route", request, node)       -- as the list in the configuration
--   bench.advance(1000)                                 -- milliseconds, for buckets
--
-- Contract, dispatch and patterns are those of the node; stand-ins are only the buckets, the hash, counters and the
-- clock (a unit test compares them with the C versions). While a policy runs, string methods are the guarded ones, the
-- JIT is off and instructions are counted, as in the node. An error of the policy or against the contract is raised,
-- so that the spec sees it.

local contract = require("dunlin.contract")
local dispatch = require("dunlin.dispatch")
local patterns = require("dunlin.patterns")

local bench = { clock_ms = 0, instructions = 200000, counters = {}, logs = {} }

local LOAD = 20000000 -- instructions for loading and init

local ffi = require("ffi")
local bit = require("bit")

--- Same as dn_policy_hash() in C: FNV-1a over the bytes, then MurmurHash3's 64-bit finalizer.
function bench.hash(key, n)
  local h = 0xcbf29ce484222325ULL
  for i = 1, #key do
    h = bit.bxor(h, ffi.new("uint64_t", key:byte(i))) * 0x100000001b3ULL
  end
  h = bit.bxor(h, bit.rshift(h, 33)) * 0xff51afd7ed558ccdULL
  h = bit.bxor(h, bit.rshift(h, 33)) * 0xc4ceb9fe1a85ec53ULL
  h = bit.bxor(h, bit.rshift(h, 33))
  return tonumber(h % n)
end

--- Same as runtime/policy/bucket.c.
function bench.buckets(clock_ms)
  local b, list, ids = {}, {}, {}
  function b.open(name, rate, burst)
    local id = ids[name] or #list + 1
    ids[name] = id
    list[id] = list[id] or { levels = {} }
    list[id].rate, list[id].burst = rate, burst
    return id
  end
  local function refill(def, key)
    local now = clock_ms()
    local e = def.levels[key]
    if not e then
      e = { level = def.burst, at = now }
      def.levels[key] = e
    end
    e.level = math.min(def.burst, e.level + math.max(0, now - e.at) / 1000 * def.rate)
    e.at = now
    return e
  end
  -- More than the burst waits for a full bucket and leaves a debt, so that a large request is late and not impossible.
  function b.take(id, key, n)
    local def = list[id]
    local e = refill(def, key)
    local need = math.min(n, def.burst)
    if e.level >= need then
      e.level = e.level - n
      return true, 0
    end
    return false, math.ceil((need - e.level) / def.rate * 1000)
  end
  function b.give(id, key, n)
    local def = list[id]
    local e = refill(def, key)
    e.level = math.min(def.burst, e.level + n)
  end
  function b.level(id, key)
    return refill(list[id], key).level
  end
  return b
end

local function new_host()
  local buckets = bench.buckets(function()
    return bench.clock_ms
  end)
  return {
    bucket_open = buckets.open, bucket_take = buckets.take, bucket_give = buckets.give, bucket_level = buckets.level,
    hash = bench.hash,
    counter_add = function(policy, name, label, n)
      local key = ("%s.%s{%s}"):format(policy, name, label)
      bench.counters[key] = (bench.counters[key] or 0) + n
    end,
    log = function(policy, level, text)
      bench.logs[#bench.logs + 1] = ("%s %s: %s"):format(level, policy, text)
    end,
    line_of = function(f)
      return debug.getinfo(f, "S").linedefined
    end,
  }
end

--- The quiet node that specs start from; a spec's overrides are laid over it.
bench.node = {
  time = { hour = 12, minute = 0, wday = 3 },
  kv = { pages_total = 10000, pages_free = 9000, free_ratio = 0.9 },
  queue = { waiting = 0, oldest_ms = 0 },
  running = 0,
  pools = { main = { role = "both", running = 0, waiting = 0, kv_free_ratio = 0.9, healthy = true } },
  models = {
    ["qwen3-8b"] = {
      weights = { bf16 = true, fp8 = true, int8 = true, int4 = true },
      kv_dtypes = { bf16 = true, fp8_e4m3 = true },
      context = 40960,
    },
  },
}

bench.request = {
  id = "req_1", endpoint = "chat.completions", stream = true, n = 1, model = "qwen3-8b", requested_model = "qwen3-8b",
  tenant = "acme", key_id = "k1", labels = {}, client_ip = "192.0.2.1", headers = {}, metadata = {}, max_tokens = 256,
  temperature = 1, tools = 0, response_format = "text", prompt_bytes = 400, prompt_tokens = 100, cached = {}, wish = {},
}

bench.result = {
  status = 200, finish_reason = "stop", prompt_tokens = 100, cached_tokens = 0, completion_tokens = 20, queue_ms = 1,
  ttft_ms = 20, total_ms = 200, model = "qwen3-8b", pool = "main", weights = "bf16", kv_dtype = "bf16",
  integrity = "tag",
}

-- A deep copy of base with over laid over it; false in over removes a key of a map.
local function lay(base, over)
  local out = {}
  for k, v in pairs(base) do
    out[k] = type(v) == "table" and lay(v, {}) or v
  end
  for k, v in pairs(over or {}) do
    if type(v) == "table" then
      out[k] = lay(type(out[k]) == "table" and out[k] or {}, v)
    elseif v == false and type(base[k]) == "boolean" and k ~= "healthy" and k ~= "stream" then
      out[k] = nil
    else
      out[k] = v
    end
  end
  return out
end

local function refill(t, from)
  for k in pairs(t) do
    t[k] = nil
  end
  for k, v in pairs(from or {}) do
    t[k] = v
  end
end

-- Calls f as the node does: guarded string methods, no JIT, an instruction budget.
local function guarded(instructions, f, ...)
  local meta = debug.getmetatable("")
  local before = meta.__index
  meta.__index = bench.strings
  local hook, mask, count = debug.gethook()
  jit.off()
  -- Policies have no pcall that could swallow this; in the node the hook would fire again.
  debug.sethook(function()
    error(("ran longer than %d instructions"):format(instructions), 0)
  end, "", instructions)
  local function done(ok, ...)
    debug.sethook(hook, mask, count)
    jit.on()
    meta.__index = before
    if not ok then
      error((...), 0)
    end
    return ...
  end
  return done(pcall(f, ...))
end

bench.strings = patterns.library()

local function sandbox()
  local env = {}
  for _, name in ipairs({ "assert", "error", "ipairs", "next", "pairs", "select", "tonumber", "tostring", "type",
    "unpack" }) do
    env[name] = _G[name]
  end
  env.table = { concat = table.concat, insert = table.insert, maxn = table.maxn, remove = table.remove,
    sort = table.sort }
  env.math, env.string = {}, {}
  for name, f in pairs(math) do
    env.math[name] = f
  end
  for name, f in pairs(bench.strings) do
    env.string[name] = f
  end
  return env
end

local policy = {}
policy.__index = policy

local function fill(p, request, node)
  local data, req = p.runner.data, lay(bench.request, request)
  for _, map in ipairs({ "labels", "headers", "metadata", "cached", "wish" }) do
    refill(data[map], req[map])
    req[map] = nil
  end
  for name in pairs(contract.request) do
    if req[name] ~= nil or type(rawget(data.req, name)) ~= "table" then
      data.req[name] = req[name]
    end
  end
  for name in pairs(request or {}) do
    if contract.request[name] == nil then
      error(("request.%s: no such field"):format(name), 4)
    end
  end
  p.runner.set_node(lay(bench.node, node))
end

local function run(p, hook, request, node, so_far)
  local data = p.runner.data
  fill(p, request, node)
  refill(data.so_far, so_far)
  if not p.hooks[hook] then
    return so_far or {}
  end
  local value, _, message = guarded(bench.instructions, p.runner.run, 1, hook)
  if value == "bad" then
    error(message, 0)
  end
  local decision = {}
  for k, v in pairs(data.so_far) do
    decision[k] = v
  end
  if type(value) == "table" then
    return decision, { status = value.status, code = value.code, message = value.message,
      retry_after = value.retry_after, param = value.param }
  end
  return decision
end

--- What the decision is after this policy (so_far included), and the rejection if there is one.
function policy:admit(request, node, so_far)
  return run(self, "admit", request, node, so_far)
end

function policy:route(request, node, so_far)
  return (run(self, "route", request, node, so_far))
end

function policy:finish(request, result)
  fill(self, request)
  refill(self.runner.data.result, lay(bench.result, result))
  if self.hooks.finish then
    guarded(bench.instructions, self.runner.run, 1, "finish")
  end
end

--- Loads a policy file. options.params as in the configuration, options.source instead of the file's text.
function bench.load(path, options)
  options = options or {}
  local source = options.source
  if not source then
    local file = assert(io.open(path, "rb"))
    source = file:read("*a")
    file:close()
  end
  local runner = dispatch.new(new_host())
  local env = sandbox()
  local lib = runner.env(1, path, false, env)
  if source:byte(1) == 27 then
    error(path .. ": bytecode: expected text", 0)
  end
  local chunk, message = loadstring(source, "@" .. path)
  if not chunk then
    error(message, 0)
  end
  setfenv(chunk, env)
  local name, admit, route, finish = guarded(LOAD, runner.load, 1, chunk, source, options.params)
  guarded(LOAD, runner.init, 1)
  return setmetatable({ name = name, runner = runner, dunlin = lib,
    hooks = { admit = admit, route = route, finish = finish } }, policy)
end

--- One hook of several policies in order, each seeing what the ones before decided. Ends at the first rejection.
function bench.chain(list, hook, request, node, so_far)
  local decision, reject = so_far or {}, nil
  for _, p in ipairs(list) do
    decision, reject = run(p, hook, request, node, decision)
    if reject then
      break
    end
  end
  return decision, reject
end

function bench.advance(ms)
  bench.clock_ms = bench.clock_ms + ms
end

return bench
