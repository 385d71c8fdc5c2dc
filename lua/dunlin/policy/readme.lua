--- The table of decisions in policies/README.md, made from the contract: a spec demands that the two agree.

local contract = require("dunlin.contract")

local readme = {}

local COMBINE = { min = "the smallest", strongest = "the strongest" }

local function values(field)
  if field.values then
    return "`" .. table.concat(field.values, "` `") .. "`"
  elseif field.type == "integer" then
    return ("%d to %d"):format(field.min, field.max)
  elseif field.type == "string" then
    return ("text, up to %d bytes"):format(field.max_bytes)
  elseif field.type == "headers" then
    return ('up to %d of `["x-name"] = "value"`'):format(contract.HEADERS_MAX)
  end
  return "`true` `false`"
end

function readme.decisions()
  local lines = { "| Field | Values | Hooks | Of several policies | Meaning |", "|---|---|---|---|---|" }
  for _, field in ipairs(contract.fields) do
    lines[#lines + 1] = ("| `%s` | %s | %s | %s | %s |"):format(field.name, values(field),
      field.hooks and "admit" or "admit, route", field.name == "headers" and "all, by name"
      or COMBINE[field.combine] or "the last", field.doc)
  end
  return table.concat(lines, "\n")
end

return readme
