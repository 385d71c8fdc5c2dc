--- Read-only views of tables: what policies get of requests, nodes and their own library.
--
-- A view is an empty table that reads through to its data. Writing raises. A view made with a set of known names is a
-- record: reading a name outside the set raises with a suggestion, so that a typo shows at the first call and not as a
-- silent nil. Host code keeps the data and changes it; a view follows. pairs, ipairs and next of this module see
-- through views; the sandbox offers them instead of the originals.

local readonly = {}

local data_of = setmetatable({}, { __mode = "k" })

-- Optimal string alignment distance, or nil if it is over `most`. It runs within the budget of the hook that met the
-- wrong name, so it gives up early.
local function distance(a, b, most)
  if math.abs(#a - #b) > most then
    return nil
  end
  local prev, before = {}, nil
  for j = 0, #b do
    prev[j] = j
  end
  for i = 1, #a do
    local row, least = { [0] = i }, i
    for j = 1, #b do
      local same = a:byte(i) == b:byte(j)
      local best = math.min(prev[j] + 1, row[j - 1] + 1, prev[j - 1] + (same and 0 or 1))
      if before and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        best = math.min(best, before[j - 2] + 1)
      end
      row[j] = best
      least = math.min(least, best)
    end
    if least > most then
      return nil
    end
    before, prev = prev, row
  end
  return prev[#b] <= most and prev[#b] or nil
end

--- The known name nearest to `name`, as `, did you mean "x"?`, or "" if none is near.
function readonly.suggest(name, known)
  if type(name) ~= "string" or #name > 40 then
    return ""
  end
  local best, at = math.max(1, math.floor(#name / 3)), nil
  for candidate in pairs(known) do
    local d = type(candidate) == "string" and distance(name, candidate, best)
    if d and (d < best or not at or candidate < at) then
      best, at = d, candidate
    end
  end
  return at and (', did you mean "%s"?'):format(at) or ""
end

--- A view of `data`, called `what` in messages. `known`: set of the names that exist (nil: any).
function readonly.wrap(data, what, known)
  local view = {}
  if known then
    setmetatable(data, {
      __index = function(_, name)
        if known[name] == nil then
          error(("%s.%s: no such field%s"):format(what, tostring(name), readonly.suggest(name, known)), 2)
        end
      end,
    })
  end
  data_of[view] = data
  return setmetatable(view, {
    __index = data,
    __newindex = function(_, name)
      error(("%s.%s: read-only: return a decision instead"):format(what, tostring(name)), 2)
    end,
    __metatable = false,
  })
end

--- The data behind a view, or nil. For host code; never handed to policies.
function readonly.data(view)
  return data_of[view]
end

function readonly.next(t, key)
  return next(data_of[t] or t, key)
end

function readonly.pairs(t)
  local data = data_of[t]
  if not data then
    return pairs(t)
  end
  return function(_, key)
    return next(data, key)
  end, t, nil
end

function readonly.ipairs(t)
  local data = data_of[t]
  if not data then
    return ipairs(t)
  end
  return function(_, i)
    local value = data[i + 1]
    if value ~= nil then
      return i + 1, value
    end
  end, t, 0
end

return readonly
