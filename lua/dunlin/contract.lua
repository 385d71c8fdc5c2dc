--- What a policy file may look like, what its hooks may see and what they may return: version 1.
--
-- The same file runs in the node, in `dunlin policy check` and in the test bench, so that what passes a test is
-- accepted by the node. The order of `fields` is that of enum dn_decision_field in runtime/policy/decision.h; a unit
-- test compares the two, and the names of formats with those of kernels/kernels.h.
--
-- Checks return nil, or a kind ("type", "field", "range": labels of a metric) and a message.

local readonly = require("dunlin.policy.readonly")

local contract = { API = 1, HOOKS = { "init", "admit", "route", "finish" } }

local WEIGHTS = { "bf16", "fp8", "int8", "int4" }
local KV = { "bf16", "fp8_e4m3" }

--- One row a field of a decision. `later`: words of the API that this build refuses by name.
contract.fields = {
  { name = "model", type = "string", hooks = { admit = true }, max_bytes = 127,
    doc = "serve another configured model" },
  { name = "priority", type = "integer", min = 0, max = 100, doc = "0-100, higher first; not given: 50" },
  { name = "max_tokens", type = "integer", min = 1, max = 2147483647, combine = "min",
    doc = "most tokens to answer with" },
  { name = "queue_timeout_ms", type = "integer", min = 0, max = 600000, combine = "min",
    doc = "longest wait in the queue" },
  { name = "prefill_pool", type = "string", max_bytes = 31, doc = "pool that reads the prompt" },
  { name = "decode_pool", type = "string", max_bytes = 31, doc = "pool that writes the answer" },
  { name = "prefill_weights", values = WEIGHTS, doc = "weight format in prefill; the model must have it" },
  { name = "decode_weights", values = WEIGHTS, doc = "weight format in decode; the model must have it" },
  { name = "kv_dtype", values = KV, later = { fp16 = true, int8 = true }, doc = "format in which K and V are kept" },
  { name = "integrity", values = { "off", "tag" }, later = { full = true }, combine = "strongest",
    doc = "checks of cache pages; only rises from policy to policy" },
  { name = "cache_salt", type = "string", min_bytes = 1, max_bytes = 127,
    doc = "prefixes are shared within a salt only" },
  { name = "cache_write", type = "boolean", doc = "false: leave no prefix behind" },
  { name = "headers", type = "headers", doc = "x-... headers of the response" },
  { name = "reason", type = "string", max_bytes = 159, doc = "why, for log and operators" },
}

contract.WEIGHTS, contract.KV = WEIGHTS, KV
contract.HEADERS_MAX = 8

local by_name = {}
for i, field in ipairs(contract.fields) do
  by_name[field.name] = field
  field.bit = 2 ^ (i - 1)
  if field.values then
    field.type = "enum"
    field.rank = {}
    for rank, value in ipairs(field.values) do
      field.rank[value] = rank
    end
  end
end
contract.field = by_name

local function set(words)
  local s = {}
  for _, word in ipairs(words) do
    s[word] = true
  end
  return s
end

--- Names that exist in what hooks get to see; reading another one is an error.
contract.request = set({
  "id", "endpoint", "stream", "n", "model", "requested_model", "tenant", "key_id", "labels", "client_ip", "headers",
  "user", "metadata", "prompt_cache_key", "max_tokens", "temperature", "tools", "response_format", "prompt_bytes",
  "prompt_tokens", "cached", "wish",
})
contract.wish = set({ "kv", "integrity" })
contract.node = set({ "time", "kv", "queue", "running", "pools", "models" })
contract.time = set({ "hour", "minute", "wday" })
contract.kv = set({ "pages_total", "pages_free", "free_ratio" })
contract.queue = set({ "waiting", "oldest_ms" })
contract.pool = set({ "role", "running", "waiting", "kv_free_ratio", "healthy", "weights" })
contract.model = set({ "weights", "kv_dtypes", "context" })
contract.result = set({
  "status", "code", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms", "ttft_ms",
  "total_ms", "model", "pool", "weights", "kv_dtype", "integrity",
})
contract.decision = set((function()
  local names = {}
  for i, field in ipairs(contract.fields) do
    names[i] = field.name
  end
  return names
end)())

local function sorted(t)
  local names = {}
  for name in readonly.pairs(t) do
    names[#names + 1] = tostring(name)
  end
  table.sort(names)
  return names
end

--- A value as it is shown in messages: never longer than 60 bytes.
local function show(value)
  if type(value) ~= "string" then
    return type(value) == "table" and "a table" or type(value) == "function" and "a function" or tostring(value)
  end
  local text = #value > 48 and value:sub(1, 48) .. "..." or value
  return ("%q"):format(text)
end
contract.show = show

local function integer(v)
  return type(v) == "number" and v == math.floor(v) and v > -2 ^ 53 and v < 2 ^ 53
end

-- Header names and values go out as they are: nothing that could end a line or a header.
local function check_headers(headers, before)
  if type(headers) ~= "table" then
    return "type", ("headers = %s: expected a table of names and values"):format(show(headers))
  end
  local count = 0
  for name, value in readonly.pairs(headers) do
    if type(name) ~= "string" or #name > 47 or name:sub(1, 2) ~= "x-" or #name < 3 then
      return "range", ("headers: %s: expected a name that begins with x-"):format(show(name))
    end
    for i = 1, #name do
      local c = name:byte(i)
      if not (c == 45 or c >= 97 and c <= 122 or c >= 48 and c <= 57) then
        return "range", ("headers: %s: expected only a-z, 0-9 and -"):format(show(name))
      end
    end
    if name == "x-request-id" or name:sub(1, 9) == "x-dunlin-" then
      return "range", ("headers: %s: belongs to the node"):format(show(name))
    end
    if type(value) ~= "string" or #value > 127 then
      return "type", ("headers: %s = %s: expected a string of up to 127 bytes"):format(name, show(value))
    end
    for i = 1, #value do
      local c = value:byte(i)
      if c < 32 or c > 126 then
        return "range", ("headers: %s: expected printable ASCII"):format(name)
      end
    end
    count = count + 1
  end
  for name in readonly.pairs(before or {}) do
    count = count + (headers[name] == nil and 1 or 0)
  end
  if count > contract.HEADERS_MAX then
    return "range", ("headers: %d with those of the policies before: expected at most %d"):format(count, contract.HEADERS_MAX)
  end
end

local function check_enum(field, value)
  if field.rank[value] then
    return nil
  end
  local words = table.concat(field.values, ", ")
  if type(value) ~= "string" then
    return "type", ("%s = %s: expected one of %s"):format(field.name, show(value), words)
  end
  if field.later and field.later[value] then
    return "range", ("%s = %q: not supported by this build: expected one of %s"):format(field.name, value, words)
  end
  return "range", ("%s = %s: expected one of %s%s"):format(field.name, show(value), words,
    readonly.suggest(value, field.rank))
end

local function check_field(field, value, before)
  local kind = field.type
  if kind == "enum" then
    return check_enum(field, value)
  elseif kind == "headers" then
    return check_headers(value, before)
  elseif kind == "integer" then
    if not integer(value) then
      return "type", ("%s = %s: expected an integer"):format(field.name, show(value))
    elseif value < field.min or value > field.max then
      return "range", ("%s = %s: expected %d to %d"):format(field.name, show(value), field.min, field.max)
    end
  elseif type(value) ~= kind then
    return "type", ("%s = %s: expected a %s"):format(field.name, show(value), kind)
  elseif kind == "string" then
    if #value > field.max_bytes or #value < (field.min_bytes or 0) then
      return "range", ("%s: %d bytes: expected %d to %d"):format(field.name, #value, field.min_bytes or 0,
        field.max_bytes)
    elseif value:find("\0", 1, true) then
      return "range", ("%s: contains a zero byte"):format(field.name)
    end
  end
end

-- What a decision names must be there: models, pools and the formats of the model.
local function check_names(value, req, node, so_far)
  local models, pools = node.models, node.pools
  if value.model and not models[value.model] then
    return "range", ("model = %s: no such model: expected one of %s"):format(show(value.model),
      table.concat(sorted(models), ", "))
  end
  for _, name in ipairs({ "prefill_pool", "decode_pool" }) do
    if value[name] and not pools[value[name]] then
      return "range", ("%s = %s: no such pool: expected one of %s"):format(name, show(value[name]),
        table.concat(sorted(pools), ", "))
    end
  end
  local name = value.model or so_far.model or req.model
  local model = name and models[name]
  if not model then
    return nil
  end
  for _, field in ipairs({ "prefill_weights", "decode_weights" }) do
    if value[field] and not model.weights[value[field]] then
      return "range", ("%s = %q: model %s has no such weights: expected one of %s"):format(field, value[field],
        show(name), table.concat(sorted(model.weights), ", "))
    end
  end
  if value.kv_dtype and not model.kv_dtypes[value.kv_dtype] then
    return "range", ("kv_dtype = %q: model %s can't keep it: expected one of %s"):format(value.kv_dtype, show(name),
      table.concat(sorted(model.kv_dtypes), ", "))
  end
end

local NAMES_THINGS = set({ "model", "prefill_pool", "decode_pool", "prefill_weights", "decode_weights", "kv_dtype" })

--- Checks what a hook returned. Anything wrong refuses the whole of it.
function contract.check(hook, value, req, node, so_far)
  if type(value) ~= "table" then
    return "type", ("returned %s: expected nil or a table"):format(show(value))
  end
  local names_things = false
  for name, v in readonly.pairs(value) do
    local field = by_name[name]
    if not field then
      return "field", ("returned an unknown field %s%s"):format(show(name), readonly.suggest(name, by_name))
    end
    if field.hooks and not field.hooks[hook] then
      return "field", ("%s: can't be decided in %s any more, only in admit"):format(name, hook)
    end
    local kind, message = check_field(field, v, so_far[name])
    if kind then
      return kind, message
    end
    names_things = names_things or NAMES_THINGS[name] ~= nil
  end
  if names_things then
    return check_names(value, req, node, so_far)
  end
end

local function copy(t)
  local c = {}
  for k, v in readonly.pairs(t) do
    c[k] = v
  end
  return c
end

--- Merges a checked decision into so_far. Returns the sum of the bits of the fields that it changed.
function contract.merge(so_far, value)
  local changed = 0
  for name, v in readonly.pairs(value) do
    local field = by_name[name]
    local old = rawget(so_far, name)
    if name == "headers" then
      local headers = old and copy(old) or {}
      for header, text in readonly.pairs(v) do
        headers[header] = text
      end
      v = headers
    elseif old ~= nil and (field.combine == "min" and old <= v
        or field.combine == "strongest" and field.rank[old] >= field.rank[v]) then
      v = old
    end
    if v ~= old then
      rawset(so_far, name, v)
      changed = changed + field.bit
    end
  end
  return changed
end

--- The fields that a decision gives, as bits.
function contract.bits(value)
  local bits = 0
  for name in readonly.pairs(value) do
    bits = bits + by_name[name].bit
  end
  return bits
end

local REJECT = {} -- key of the mark of a rejection
local STATUS = { [400] = true, [403] = true, [404] = true, [413] = true, [422] = true, [429] = true, [503] = true }
local EXTRA = set({ "retry_after", "param" })

--- dunlin.reject(status, code, message, extra): what admit returns to refuse a request.
function contract.reject(status, code, message, extra)
  if not STATUS[status] then
    error(("reject: status %s: expected one of 400, 403, 404, 413, 422, 429, 503"):format(show(status)), 2)
  end
  if type(code) ~= "string" or #code < 1 or #code > 63 then
    error(("reject: code %s: expected a word of up to 63 bytes"):format(show(code)), 2)
  end
  for i = 1, #code do
    local c = code:byte(i)
    if not (c == 95 or c >= 97 and c <= 122 or c >= 48 and c <= 57) then
      error(("reject: code %s: expected only a-z, 0-9 and _"):format(show(code)), 2)
    end
  end
  if type(message) ~= "string" or #message > 255 then
    error("reject: message: expected a string of up to 255 bytes", 2)
  end
  local r = { [REJECT] = true, status = status, code = code, message = message }
  if extra ~= nil and type(extra) ~= "table" then
    error(("reject: extra %s: expected a table"):format(show(extra)), 2)
  end
  for name, value in pairs(extra or {}) do
    if not EXTRA[name] then
      error(("reject: unknown field %s%s"):format(show(name), readonly.suggest(name, EXTRA)), 2)
    end
    if name == "retry_after" and not (type(value) == "number" and value >= 0 and value <= 86400) then
      error(("reject: retry_after %s: expected 0 to 86400 seconds"):format(show(value)), 2)
    end
    if name == "param" and not (type(value) == "string" and #value <= 63) then
      error(("reject: param %s: expected a string of up to 63 bytes"):format(show(value)), 2)
    end
    r[name] = name == "retry_after" and math.ceil(value) or value
  end
  return r
end

function contract.is_reject(value)
  return type(value) == "table" and rawget(value, REJECT) == true
end

local PARAM = set({ "default", "min", "max", "values", "doc" })

local function check_param_value(name, spec, value)
  if type(value) ~= type(spec.default) then
    return ("params.%s = %s: expected a %s"):format(name, show(value), type(spec.default))
  end
  if value ~= value or spec.min and value < spec.min or spec.max and value > spec.max then
    return ("params.%s = %s: expected %s to %s"):format(name, show(value), tostring(spec.min or "any"),
      tostring(spec.max or "any"))
  end
  if spec.values then
    for _, allowed in ipairs(spec.values) do
      if allowed == value then
        return nil
      end
    end
    return ("params.%s = %s: expected one of %s"):format(name, show(value), table.concat(spec.values, ", "))
  end
end

local function check_param(name, spec)
  if type(name) ~= "string" or type(spec) ~= "table" then
    return ("params.%s: expected a table with a default"):format(tostring(name))
  end
  for key, value in pairs(spec) do
    if not PARAM[key] then
      return ("params.%s: unknown key %s%s"):format(name, show(key), readonly.suggest(key, PARAM))
    end
    if (key == "min" or key == "max") and type(value) ~= "number" then
      return ("params.%s.%s = %s: expected a number"):format(name, key, show(value))
    end
    if key == "values" and (type(value) ~= "table" or #value == 0) then
      return ("params.%s.values: expected a list"):format(name)
    end
  end
  local kind = type(spec.default)
  if kind ~= "number" and kind ~= "boolean" and kind ~= "string" then
    return ("params.%s: default %s: expected a number, a string or a boolean"):format(name, show(spec.default))
  end
  if (spec.min or spec.max) and kind ~= "number" then
    return ("params.%s: min and max need a number as default"):format(name)
  end
  return check_param_value(name, spec, spec.default)
end

--- The values of a policy's params under the configuration's `given`, or nil and a message.
function contract.params(specs, given)
  local values = {}
  for name, spec in pairs(specs or {}) do
    local message = check_param(name, spec)
    if message then
      return nil, message
    end
    values[name] = spec.default
  end
  for name, value in pairs(given or {}) do
    local spec = specs and specs[name]
    if not spec then
      return nil, ("params.%s: the policy has no such parameter%s"):format(name, readonly.suggest(name, specs or {}))
    end
    local message = check_param_value(name, spec, value)
    if message then
      return nil, message
    end
    values[name] = value
  end
  return values
end

local FILE = { api = "number", name = "string", params = "table", doc = "string", init = "function",
  admit = "function", route = "function", finish = "function" }
local NOT_YET = { tune = true }

--- Checks what a policy file returned. nil or a message.
function contract.file(p)
  if type(p) ~= "table" then
    return ("the file returned %s: expected a table { api = 1, name = ..., admit = ..., route = ... }"):format(show(p))
  end
  for key, value in pairs(p) do
    if NOT_YET[key] then
      return ("the hook %s is not supported by this build"):format(show(key))
    end
    if not FILE[key] then
      return ("unknown key %s%s"):format(show(key), readonly.suggest(key, FILE))
    end
    if type(value) ~= FILE[key] then
      return ("%s = %s: expected a %s"):format(key, show(value), FILE[key])
    end
  end
  if p.api ~= contract.API then
    return ("api = %s: this node speaks version %d"):format(show(p.api), contract.API)
  end
  if not p.name or #p.name < 1 or #p.name > 31 then
    return ("name = %s: expected a word of up to 31 bytes"):format(show(p.name))
  end
  for i = 1, #p.name do
    local c = p.name:byte(i)
    if not (c == 95 or c == 45 or c >= 97 and c <= 122 or c >= 48 and c <= 57) then
      return ("name = %s: expected only a-z, 0-9, _ and -"):format(show(p.name))
    end
  end
  if not (p.admit or p.route or p.finish) then
    return "no hook: expected at least one of admit, route, finish"
  end
end

return contract
