--- Text functions that are safe to offer to policies.
--
-- Lua's patterns run in C, where no instruction budget can stop them (60 bytes against five lazy repeats took 1.1 s),
-- so policies have none: find is always plain, match, gmatch and gsub do not exist, rep is bounded. glob() is what
-- block lists and prefixes need, written in Lua so that the budget covers it; its time is at most
-- #text * #glob steps. The node takes find and rep from C (runtime/script/vm.c); the functions here are their
-- stand-ins outside the node, and a unit test compares the two.

local patterns = { REP_MAX = 65536, GLOB_MAX = 256 }

--- Whether all of `text` matches `glob`: * is any bytes, ? is one byte, everything else itself. Case matters.
function patterns.glob(text, glob)
  if type(text) ~= "string" or type(glob) ~= "string" then
    error("glob: expected two strings", 2)
  end
  if #glob > patterns.GLOB_MAX then
    error(("glob: longer than %d bytes"):format(patterns.GLOB_MAX), 2)
  end
  local n, m = #text, #glob
  local i, j = 1, 1
  local star, mark -- the last * seen and where in text it stands
  while i <= n do
    local g = glob:byte(j)
    if g == 42 then
      star, mark = j, i
      j = j + 1
    elseif g == 63 or g == text:byte(i) then
      i, j = i + 1, j + 1
    elseif star then
      mark = mark + 1
      i, j = mark, star + 1
    else
      return false
    end
  end
  while j <= m and glob:byte(j) == 42 do
    j = j + 1
  end
  return j > m
end

--- string.find without patterns, whatever the fourth argument says.
function patterns.find(s, what, init)
  if init and init > #s + 1 then
    return nil
  end
  return string.find(s, what, init, true)
end

--- string.rep up to 64 KiB.
function patterns.rep(s, n)
  s = tostring(s)
  if #s > 0 and n >= 1 and (n > patterns.REP_MAX or #s * n > patterns.REP_MAX) then
    error(("string.rep: more than %d bytes"):format(patterns.REP_MAX), 2)
  end
  return #s > 0 and string.rep(s, n) or ""
end

--- The guarded string library, for environments outside the node.
function patterns.library()
  local s = string
  return {
    byte = s.byte, char = s.char, find = patterns.find, format = s.format, len = s.len, lower = s.lower,
    rep = patterns.rep, reverse = s.reverse, sub = s.sub, upper = s.upper,
  }
end

return patterns
