--- Runs policies: their library `dunlin`, the views that hooks get, loading, one hook of one policy at a time.
--
-- new(host) is called once a VM. The host (C in the node, the bench in tests) gives the primitives:
--   bucket_open(name, rate, burst) -> id; bucket_take(id, key, n) -> ok, wait_ms; bucket_give(id, key, n);
--   bucket_level(id, key) -> n; counter_add(policy, name, label, n); hash(key, n) -> integer;
--   log(policy, level, text); line_of(f) -> line where a function begins, or 0
-- and fills the tables in `data` before it calls run(). Every call of run() is one protected call of the host, with a
-- budget of its own: a policy that fails takes nothing of the others with it.

local contract = require("dunlin.contract")
local globals = require("dunlin.policy.globals")
local patterns = require("dunlin.patterns")
local readonly = require("dunlin.policy.readonly")

local dispatch = {}

local LEVELS = { error = true, warn = true, info = true, debug = true }
local LIBRARY = { "reject", "bucket", "counter", "hash", "between", "glob", "params", "log" }

local function check_name(what, name)
  if type(name) ~= "string" or #name < 1 or #name > 63 then
    error(("%s: name %s: expected a word of up to 63 bytes"):format(what, contract.show(name)), 4)
  end
  for i = 1, #name do
    local c = name:byte(i)
    if not (c == 95 or c == 45 or c == 46 or c >= 97 and c <= 122 or c >= 48 and c <= 57) then
      error(("%s: name %q: expected only a-z, 0-9, _ - and ."):format(what, name), 4)
    end
  end
end

local function is_number(v, min, max)
  return type(v) == "number" and v >= min and v <= max
end

local function bucket_methods(host)
  local bucket = {}
  local function check(self, method, key, n)
    if type(self) ~= "table" or not self.id then
      error(("bucket: call it as bucket:%s(...)"):format(method), 3)
    end
    if type(key) ~= "string" then
      error(("bucket:%s: key %s: expected a string"):format(method, contract.show(key)), 3)
    end
    if not is_number(n, 0, 1e15) then
      error(("bucket:%s: %s: expected a number from 0 to 1e15"):format(method, contract.show(n)), 3)
    end
  end
  function bucket.take(self, key, n)
    n = n == nil and 1 or n
    check(self, "take", key, n)
    return host.bucket_take(self.id, key, n)
  end
  function bucket.give(self, key, n)
    check(self, "give", key, n)
    host.bucket_give(self.id, key, n)
  end
  function bucket.level(self, key)
    check(self, "level", key, 0)
    return host.bucket_level(self.id, key)
  end
  return bucket
end

local function open_bucket(host, methods, policy, name, options)
  check_name("bucket", name)
  if type(options) ~= "table" then
    error(("bucket %q: expected { rate = , burst = }"):format(name), 3)
  end
  for key in pairs(options) do
    if key ~= "rate" and key ~= "burst" then
      error(("bucket %q: unknown field %s%s"):format(name, contract.show(key),
        readonly.suggest(key, { rate = true, burst = true })), 3)
    end
  end
  if not is_number(options.rate, 1e-9, 1e12) or not is_number(options.burst, 1e-9, 1e15) then
    error(("bucket %q: expected a positive rate (units a second) and burst"):format(name), 3)
  end
  local id = host.bucket_open(policy.space .. "/" .. name, options.rate, options.burst)
  return readonly.wrap({ id = id, take = methods.take, give = methods.give, level = methods.level }, "bucket",
    { id = true, take = true, give = true, level = true })
end

local function counter(host, policy, name)
  check_name("counter", name)
  return readonly.wrap({
    add = function(_, n, label)
      if not is_number(n, 0, 1e15) then
        error(("counter:add: %s: expected a number from 0 to 1e15"):format(contract.show(n)), 2)
      end
      if label ~= nil and (type(label) ~= "string" or #label > 63) then
        error(("counter:add: label %s: expected a string of up to 63 bytes"):format(contract.show(label)), 2)
      end
      host.counter_add(policy.name, name, label or "", n)
    end,
  }, "counter", { add = true })
end

local function minutes(text)
  local h, m = nil, nil
  if type(text) == "string" and #text == 5 and text:sub(3, 3) == ":" then
    h, m = tonumber(text:sub(1, 2)), tonumber(text:sub(4, 5))
  end
  if not h or not m or h < 0 or h > 24 or m < 0 or m > 59 or h * 60 + m > 1440 then
    error(('between: %s: expected a time as "22:00"'):format(contract.show(text)), 3)
  end
  return h * 60 + m
end

--- Whether the node's time lies in [from, to), over midnight if to is the earlier one.
local function between(node, from, to)
  local now = node.time.hour * 60 + node.time.minute
  local a, b = minutes(from), minutes(to)
  if a <= b then
    return now >= a and now < b
  end
  return now >= a or now < b
end

local function log_text(message, fields)
  local parts, names = { message }, {}
  for name in readonly.pairs(fields or {}) do
    names[#names + 1] = tostring(name)
  end
  table.sort(names)
  for _, name in ipairs(names) do
    parts[#parts + 1] = ("%s=%s"):format(name, tostring(fields[name]))
  end
  return table.concat(parts, " ")
end

local function library(host, methods, policy)
  local lib = { reject = contract.reject, between = between, glob = patterns.glob }
  -- No tail calls here: errors name the caller's line by counting levels.
  function lib.bucket(name, options)
    local b = open_bucket(host, methods, policy, name, options)
    return b
  end
  function lib.counter(name)
    local c = counter(host, policy, name)
    return c
  end
  function lib.hash(key, n)
    if type(key) ~= "string" or not is_number(n, 1, 2 ^ 32) or n ~= math.floor(n) then
      error("hash: expected a string and an integer from 1 to 2^32", 2)
    end
    return host.hash(key, n)
  end
  function lib.log(level, message, fields)
    if not LEVELS[level] or type(message) ~= "string" or fields ~= nil and type(fields) ~= "table" then
      error('log: expected "error", "warn", "info" or "debug", a text and a table of fields', 2)
    end
    host.log(policy.name, level, log_text(message, fields))
  end
  policy.params = {}
  lib.params = readonly.wrap(policy.params, "params", policy.param_names)
  local known = {}
  for _, name in ipairs(LIBRARY) do
    known[name] = true
  end
  return readonly.wrap(lib, "dunlin", known)
end

-- The environment of a policy: the sandbox, require("dunlin"), and an error for every other global.
local function seal_env(env, lib)
  env.pairs, env.ipairs, env.next = readonly.pairs, readonly.ipairs, readonly.next
  env.math.random, env.math.randomseed = nil, nil
  env.require = function(name)
    if name ~= "dunlin" then
      error(('require(%s): expected "dunlin", the only module there is'):format(contract.show(name)), 2)
    end
    return lib
  end
  local known = {}
  for name in pairs(env) do
    known[name] = true
  end
  setmetatable(env, {
    __index = function(_, name)
      error(("unknown global %s%s"):format(contract.show(name), readonly.suggest(name, known)), 2)
    end,
    __newindex = function(_, name)
      error(("global %s is set: expected a local"):format(contract.show(name)), 2)
    end,
    __metatable = false,
  })
  return known
end

-- The line of the last "return" that begins a line: what a complaint about the returned table points at.
local function return_line(source)
  local line, at = 1, nil
  local from = 1
  while true do
    if source:sub(from, from + 5) == "return" then
      at = line
    end
    local stop = source:find("\n", from, true)
    if not stop then
      return at or 1
    end
    from, line = stop + 1, line + 1
  end
end

local function views(data)
  local v = {}
  data.labels, data.headers, data.metadata, data.cached, data.wish = {}, {}, {}, {}, {}
  data.req = {
    labels = readonly.wrap(data.labels, "req.labels"),
    headers = readonly.wrap(data.headers, "req.headers"),
    metadata = readonly.wrap(data.metadata, "req.metadata"),
    cached = readonly.wrap(data.cached, "req.cached"),
    wish = readonly.wrap(data.wish, "req.wish", contract.wish),
  }
  data.so_far, data.result = {}, {}
  v.rows = {
    time = {}, kv = {}, queue = {},
    pools = { data = {}, rows = {}, known = contract.pool },
    models = { data = {}, rows = {}, known = contract.model },
  }
  data.node = {
    time = readonly.wrap(v.rows.time, "node.time", contract.time),
    kv = readonly.wrap(v.rows.kv, "node.kv", contract.kv),
    queue = readonly.wrap(v.rows.queue, "node.queue", contract.queue),
    pools = readonly.wrap(v.rows.pools.data, "node.pools"),
    models = readonly.wrap(v.rows.models.data, "node.models"),
  }
  data.rows = v.rows
  v.req = readonly.wrap(data.req, "req", contract.request)
  v.node = readonly.wrap(data.node, "node", contract.node)
  v.so_far = readonly.wrap(data.so_far, "so_far", contract.decision)
  v.result = readonly.wrap(data.result, "result", contract.result)
  return v
end

local function refill(t, from)
  for name in pairs(t) do
    if from[name] == nil then
      t[name] = nil
    end
  end
  for name, value in pairs(from) do
    t[name] = value
  end
end

-- The row `name` of a map of the node (a pool, a model), whose own maps (weights, kv_dtypes) are views in it.
local function set_row(row, what, name, known, from)
  local label = ("%s[%q]"):format(what, name)
  row = row or { data = {}, maps = {} }
  row.view = row.view or readonly.wrap(row.data, label, known)
  for key in pairs(row.data) do
    if from[key] == nil then
      row.data[key] = nil
    end
  end
  for key, value in pairs(from) do
    if type(value) == "table" then
      local map = row.maps[key] or { data = {} }
      row.maps[key] = map
      map.view = map.view or readonly.wrap(map.data, label .. "." .. key)
      refill(map.data, value)
      value = map.view
    end
    row.data[key] = value
  end
  return row
end

-- Puts a plain snapshot behind the node's view. The views stay the same from snapshot to snapshot: a node that made new
-- ones for each would fill the memory faster than the collector gets through the levels of its weak table.
local function set_node(data, rows, plain)
  local n = data.node
  refill(rows.time, plain.time)
  refill(rows.kv, plain.kv)
  refill(rows.queue, plain.queue)
  n.running = plain.running
  for _, what in ipairs({ "pools", "models" }) do
    local map, seen = rows[what], plain[what] or {}
    for name in pairs(map.data) do
      if not seen[name] then
        map.data[name], map.rows[name] = nil, nil
      end
    end
    for name, from in pairs(seen) do
      map.rows[name] = set_row(map.rows[name], "node." .. what, name, map.known, from)
      map.data[name] = map.rows[name].view
    end
  end
end

local function unknown_globals(policy, source)
  local messages = {}
  for i, use in ipairs(globals.scan(source, policy.globals)) do
    messages[i] = ("%s:%d: unknown global %q%s"):format(policy.file, use.line, use.name,
      readonly.suggest(use.name, policy.globals))
  end
  return messages
end

-- The file's first comment, without its marks.
local function first_comment(source)
  local lines = {}
  for line in string.gmatch(source .. "\n", "(.-)\r?\n") do
    local text = string.match(line, "^%-%-+%s?(.*)$")
    if not text then
      if #lines > 0 or string.find(line, "%S") then
        break
      end
    else
      lines[#lines + 1] = text
    end
  end
  return table.concat(lines, " ")
end

local function param_range(spec)
  if spec.values then
    local words = {}
    for i, value in ipairs(spec.values) do
      words[i] = tostring(value)
    end
    return table.concat(words, " | ")
  end
  if spec.min or spec.max then
    return ("%s to %s"):format(tostring(spec.min or "any"), tostring(spec.max or "any"))
  end
  return type(spec.default)
end

-- Runs the chunk and takes what it returned. Errors are raised as "file:line: reason".
local function load_policy(host, policy, chunk, source, given, is_known)
  if not is_known then
    local unknown = unknown_globals(policy, source)
    if unknown[1] then
      error(unknown[1], 0)
    end
  end
  local p = chunk()
  local function refuse(message)
    error(("%s:%d: %s"):format(policy.file, return_line(source), message), 0)
  end
  local message = contract.file(p)
  if message then
    refuse(message)
  end
  local values
  values, message = contract.params(p.params, given)
  if not values then
    refuse(message)
  end
  for name, value in pairs(values) do
    policy.param_names[name] = true
    policy.params[name] = value
  end
  -- The library reads the policy's name for counters and logs when they are used, so the file's own name counts.
  policy.name, policy.doc, policy.specs = p.name, p.doc, p.params or {}
  policy.hook, policy.line = {}, {}
  for _, hook in ipairs(contract.HOOKS) do
    policy.hook[hook] = p[hook]
    policy.line[hook] = p[hook] and host.line_of(p[hook]) or 0
  end
end

local function run_init(policy)
  if not policy.hook.init then
    return
  end
  local ok, message = policy.hook.init()
  if ok == false then
    error(("%s: init refused: %s"):format(policy.file, tostring(message or "no reason given")), 0)
  elseif ok ~= nil and ok ~= true then
    error(("%s:%d: init returned %s: expected nil, true, or false and a message"):format(policy.file,
      policy.line.init, contract.show(ok)), 0)
  end
end

--- What one hook of one policy answers:
--   bits of the fields it changed (0: no opinion)
--   a rejection (a table; admit only)
--   "bad", kind, message: against the contract, nothing of it was applied
local function run_hook(policy, view, data, hook)
  if hook == "finish" then
    policy.hook.finish(view.req, view.result)
    return 0
  end
  local value = policy.hook[hook](view.req, view.node, view.so_far)
  if value == nil then
    return 0
  end
  local kind, message
  if contract.is_reject(value) then
    if hook == "admit" then
      -- Made anew: the policy could change the table since dunlin.reject() checked what is in it.
      return contract.reject(value.status, value.code, value.message,
        { retry_after = value.retry_after, param = value.param })
    end
    kind, message = "type", "returned a rejection: expected it from admit, before the prompt is read"
  else
    kind, message = contract.check(hook, value, data.req, data.node, data.so_far)
  end
  if kind then
    return "bad", kind, ("%s:%d: %s: %s"):format(policy.file, policy.line[hook], hook, message)
  end
  if policy.shadow then
    return contract.bits(value)
  end
  return contract.merge(data.so_far, value)
end

--- A runner for one VM. See the head of this file for host.
function dispatch.new(host)
  local policies, data = {}, {}
  local view = views(data)
  local methods = bucket_methods(host)
  local r = { data = data, policies = policies }

  --- Prepares the environment of policy i. A shadow policy has buckets of its own. Returns the library.
  function r.env(i, file, shadow, env)
    local name = file:sub(-4) == ".lua" and file:sub(1, -5) or file
    local policy = { file = file, name = name, space = (shadow and "shadow:" or "") .. name, shadow = shadow,
      param_names = {} }
    policies[i] = policy
    local lib = library(host, methods, policy)
    policy.globals = seal_env(env, lib)
    return lib
  end

  --- Runs the chunk of policy i (made with that environment). Returns its name and where its hooks are.
  -- is_known: the source was loaded before, so that the scan for unknown globals can be left out.
  function r.load(i, chunk, source, given, is_known)
    load_policy(host, policies[i], chunk, source, given, is_known)
    local p = policies[i]
    for j, other in pairs(policies) do
      if j ~= i and other.hook and other.name == p.name and other.shadow == p.shadow then
        error(("%s:%d: name = %q: %s has it already"):format(p.file, return_line(source), p.name, other.file), 0)
      end
    end
    -- The line where each hook begins, nil where there is none.
    return p.name, p.hook.admit and p.line.admit, p.hook.route and p.line.route, p.hook.finish and p.line.finish
  end

  function r.init(i)
    run_init(policies[i])
  end

  function r.run(i, hook)
    return run_hook(policies[i], view, data, hook)
  end

  --- All unknown globals of a source as lines of text.
  function r.unknown(i, source)
    return table.concat(unknown_globals(policies[i], source), "\n")
  end

  --- What `dunlin policy show` tells: the first comment, then five strings a parameter (name, value, default, range,
  --- explanation), by name.
  function r.describe(i, source)
    local p, names, out = policies[i], {}, {}
    for name in pairs(p.specs) do
      names[#names + 1] = name
    end
    table.sort(names)
    for _, name in ipairs(names) do
      local spec = p.specs[name]
      for _, text in ipairs({ name, tostring(p.params[name]), tostring(spec.default), param_range(spec),
        tostring(spec.doc or "") }) do
        out[#out + 1] = text
      end
    end
    return p.doc or first_comment(source), out
  end

  function r.set_node(plain)
    set_node(data, view.rows, plain)
  end

  return r
end

return dispatch
