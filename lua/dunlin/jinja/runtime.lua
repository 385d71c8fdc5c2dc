--- What the generated code of a template calls: attributes, items, calls, macros, loops, scopes.
local text = require("dunlin.jinja.text")
local V = require("dunlin.jinja.value")
local methods = require("dunlin.jinja.methods")
local limits = require("dunlin.jinja.limits")

local type, bytes, fail, is_text = type, text.bytes, text.fail, text.is_text
local None = V.None

local R = {
  --- Of the rendering that is going on: mutable (lists and dicts may be changed), strftime (function of a format), depth of calls.
  state = { mutable = false, depth = 0 },
  no_args = { n = 0 },
}
local state = R.state

-- Attributes and items

local LOOP = {
  index = function(l)
    return l.i
  end,
  index0 = function(l)
    return l.i - 1
  end,
  first = function(l)
    return l.i == 1
  end,
  last = function(l)
    return l.i == l.n
  end,
  length = function(l)
    return l.n
  end,
  revindex = function(l)
    return l.n - l.i + 1
  end,
  revindex0 = function(l)
    return l.n - l.i
  end,
  previtem = function(l)
    return l.i > 1 and l.items[l.i - 1] or l.i == 1 and V.undefined("there is no previous item") or false
  end,
  nextitem = function(l)
    return l.i < l.n and l.items[l.i + 1] or l.i == l.n and V.undefined("there is no next item") or false
  end,
  -- Only recursive loops, which are not supported, are deeper.
  depth = function()
    return 1
  end,
  depth0 = function()
    return 0
  end,
}

methods.loop = {
  cycle = function(l, args)
    if args.n == 0 then
      fail("TypeError", "no items for cycling given")
    end
    return args[(l.i - 1) % args.n + 1]
  end,
  changed = function(l, args)
    local now = V.tuple(args, args.n)
    if l.seen and V.eq(l.seen, now) then
      return false
    end
    l.seen = now
    return true
  end,
}

--- The method of obj, or nil; an undefined value that refuses if the sandbox does.
local function find_method(obj, name)
  local kind = type(obj) == "table" and obj.k or is_text(obj) and "str"
  local of_kind = methods[kind]
  local f = of_kind and of_kind[name]
  local mutators = methods.mutators[kind]
  if mutators and mutators[name] and not state.mutable then
    local refused = V.undefined("access to attribute '" .. name .. "' of '" .. kind .. "' object is unsafe.")
    refused.unsafe = true
    return refused
  end
  return f
end

local function attr(obj, name)
  local t = type(obj)
  if t == "table" then
    local k = obj.k
    if k == "dict" then
      if not methods.dict[name] and not methods.mutators.dict[name] then
        local v = obj.map[name]
        if v ~= nil then
          return v
        end
        return V.no_attribute(obj, name)
      end
    elseif k == "namespace" then
      local v = obj.map[name]
      if v ~= nil then
        return v
      end
      return V.no_attribute(obj, name)
    elseif k == "loop" and LOOP[name] then
      return LOOP[name](obj)
    elseif k == "undefined" then
      V.check_defined(obj)
    elseif k == "macro" and name == "name" then
      return obj.name
    end
  end
  local f = find_method(obj, name)
  if not f then
    return V.no_attribute(obj, name)
  elseif type(f) == "table" then
    return f
  end
  return { k = "method", fn = f, obj = obj }
end
R.attr = attr

function R.item(obj, key)
  local k = type(obj) == "table" and obj.k
  if k == "dict" then
    local kind = type(key) == "table" and key.k
    local v
    if kind ~= "list" and kind ~= "dict" then
      v = obj.map[V.hash_key(key)]
    end
    if v ~= nil then
      return v
    end
  elseif k == "list" or k == "tuple" then
    local i, is_float = V.number(key)
    if i and not is_float then
      local v = obj[(i < 0 and i + obj.n or i) + 1]
      if v ~= nil and (i >= 0 or i + obj.n >= 0) then
        return v
      end
      return V.no_element(obj, V.int_text(i))
    end
  elseif k == "str" or type(obj) == "string" then
    local i, is_float = V.number(key)
    if i and not is_float then
      return text.index(obj, i) or V.no_element(obj, V.int_text(i))
    end
  end
  V.check_defined(obj)
  if is_text(key) then
    return attr(obj, bytes(key))
  end
  return V.no_element(obj, bytes(V.repr(key)))
end

function R.slice(obj, from, to, step)
  from, to, step = methods.need_int(from, "slice"), methods.need_int(to, "slice"), methods.need_int(step, "slice")
  if step == 0 then
    fail("ValueError", "slice step cannot be zero")
  elseif is_text(obj) then
    return text.slice(obj, from, to, step)
  elseif type(obj) == "table" and (obj.k == "list" or obj.k == "tuple") then
    local lo, hi, by = text.slice_bounds(obj.n, from, to, step)
    local out, n = { k = obj.k }, 0
    for i = lo, hi, by do
      n = n + 1
      out[n] = obj[i]
    end
    out.n = n
    return out
  end
  V.check_defined(obj)
  -- As in Jinja, what has no slices has no such element.
  return V.no_element(obj, "slice(...)")
end

--- {% set name.attr = value %}
function R.set_attr(namespace, name, value)
  if type(namespace) ~= "table" or namespace.k ~= "namespace" then
    fail("TemplateRuntimeError", "cannot assign attribute on non-namespace object")
  end
  V.dict_set(namespace, name, value)
end

-- Calls

local function call_macro(macro, args, kwargs)
  local names, values = macro.args, { n = 0 }
  for i = 1, args.n do
    if i <= #names then
      values[i] = args[i]
    elseif macro.varargs then
      values.n = values.n + 1
    else
      fail("TypeError", "macro '" .. macro.name .. "' takes not more than " .. #names .. " argument(s)")
    end
  end
  if macro.varargs then
    values.varargs = { k = "tuple", n = values.n }
    for i = 1, values.n do
      values.varargs[i] = args[#names + i]
    end
  end
  values.kwargs = macro.kwargs and V.dict() or nil
  for i = 1, kwargs and kwargs.n or 0 do
    local name = kwargs.keys[i]
    local at = macro.index[name]
    if at then
      if values[at] ~= nil then
        fail("TypeError", "macro '" .. macro.name .. "' got multiple values for argument '" .. name .. "'")
      end
      values[at] = kwargs.map[name]
    elseif name == "caller" and macro.caller then
      values.caller = kwargs.map[name]
    elseif values.kwargs then
      V.dict_set(values.kwargs, name, kwargs.map[name])
    else
      fail("TypeError", "macro '" .. macro.name .. "' takes no keyword argument '" .. name .. "'")
    end
  end
  state.depth = state.depth + 1
  if state.depth > limits.calls then
    fail("RecursionError", "macros call each other deeper than " .. limits.calls .. " levels")
  end
  local result = macro.fn(values)
  state.depth = state.depth - 1
  return result
end

local function call(f, args, kwargs)
  local k = type(f) == "table" and f.k
  if k == "macro" then
    return call_macro(f, args, kwargs)
  elseif k == "function" then
    return f.fn(args, kwargs)
  elseif k == "method" then
    return f.fn(f.obj, args, kwargs)
  end
  V.check_defined(f)
  fail("TypeError", "'" .. V.type_name(f) .. "' object is not callable")
end
R.call = call

--- obj.name(...)
function R.call_method(obj, name, args, kwargs)
  local f = find_method(obj, name)
  if type(f) == "function" then
    return f(obj, args, kwargs)
  end
  return call(f or attr(obj, name), args, kwargs)
end

--- A macro; index: position by argument name, uses: set of varargs, kwargs and caller that its body names.
function R.macro(name, args, varargs, kwargs, caller, fn)
  local index = {}
  for i = 1, #args do
    index[args[i]] = i
  end
  return { k = "macro", name = name, args = args, index = index, varargs = varargs, kwargs = kwargs, caller = caller, fn = fn }
end

function R.missing(name)
  return V.undefined("parameter '" .. name .. "' was not provided")
end

--- Adds caller=macro to the keyword arguments of a {% call %}.
function R.with_caller(kwargs, macro)
  kwargs = kwargs or V.dict()
  V.dict_set(kwargs, "caller", macro)
  return kwargs
end

-- Loops and scopes

function R.loop(items, n)
  return { k = "loop", i = 0, n = n, items = items }
end

local CANNOT_UNPACK = { none = true, float = true, big = true, namespace = true, macro = true, ["function"] = true, method = true }

--- The items of a value that must have exactly n.
function R.unpack(v, n)
  if type(v) == "number" or type(v) == "boolean" or (type(v) == "table" and CANNOT_UNPACK[v.k]) then
    fail("TypeError", "cannot unpack non-iterable " .. V.type_name(v) .. " object")
  end
  local items, count = V.items(v)
  if count < n then
    fail("ValueError", "not enough values to unpack (expected " .. n .. ", got " .. count .. ")")
  elseif count > n then
    fail("ValueError", "too many values to unpack (expected " .. n .. ")")
  end
  return items
end

--- A scope inside `outer`: what it does not have comes from there.
function R.push(outer)
  outer.__index = outer
  return setmetatable({}, outer)
end

-- Output

function R.write(b, v)
  local t = type(v)
  if t ~= "string" and not (t == "table" and v.k == "str") then
    v = V.str(v)
  end
  text.put(b, v)
end
R.buffer, R.finish = text.new_buffer, text.finish

--- A filter or test that does not exist, met at run time because it stood in a branch.
function R.unknown(what, name)
  return function()
    fail("TemplateRuntimeError", "No " .. what .. " named '" .. name .. "' found.")
  end
end

-- Globals

local function fn(f)
  return { k = "function", fn = f }
end

R.globals = {
  range = fn(function(args)
    local a, b, step = methods.need_int(args[1], "range"), methods.need_int(args[2], "range"), methods.need_int(args[3], "range", 1)
    if not a then
      fail("TypeError", "range expected at least 1 argument, got 0")
    elseif not b then
      a, b = 0, a
    end
    if step == 0 then
      fail("ValueError", "range() arg 3 must not be zero")
    end
    local n = math.max(math.ceil((b - a) / step), 0)
    if n > limits.range then
      fail("OverflowError", "Range too big. The sandbox blocks ranges larger than MAX_RANGE (" .. limits.range .. ").")
    end
    local out = { k = "list", n = n }
    for i = 1, n do
      out[i] = a + (i - 1) * step
    end
    return out
  end),
  namespace = fn(function(args, kwargs)
    local ns = V.dict()
    methods.dict.update(ns, { args[1] }, kwargs)
    ns.k = "namespace"
    return ns
  end),
  dict = fn(function(args, kwargs)
    local d = V.dict()
    methods.dict.update(d, { args[1] }, kwargs)
    return d
  end),
  raise_exception = fn(function(args)
    fail("TemplateError", bytes(V.str(args[1] == nil and None or args[1])))
  end),
  strftime_now = fn(function(args)
    return state.strftime(bytes(methods.need_text(args[1], "strftime_now() argument")))
  end),
}

return R
