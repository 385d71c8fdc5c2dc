local contract = require("dunlin.contract")
local readme = require("dunlin.policy.readme")

local function read(path)
  local file = assert(io.open(path))
  local text = file:read("*a")
  file:close()
  return text
end

describe("policies/README.md", function()
  local text = read("policies/README.md")

  it("has the table of decisions that the contract makes", function()
    assert.is_truthy(text:find(readme.decisions(), 1, true), "put this there:\n" .. readme.decisions())
  end)

  it("names every field that hooks see", function()
    for _, set in ipairs({ contract.request, contract.node, contract.kv, contract.pool, contract.model,
      contract.result }) do
      for name in pairs(set) do
        assert.is_truthy(text:find("`" .. name .. "`", 1, true), name)
      end
    end
  end)

  it("has an example that loads and works", function()
    local bench = require("dunlin.testing")
    local source = text:match("```lua\n(.-)```")
    local p = bench.load("example.lua", { source = source, params = { tokens = 50 } })
    local node = { pools = { long = { role = "both", healthy = true } } }
    assert.are.equal("long", p:route({ prompt_tokens = 60 }, node).decode_pool)
    assert.are.same({}, p:route({ prompt_tokens = 40 }, node))
    assert.are.same({}, p:route({ prompt_tokens = 60 }))
  end)
end)

describe("lua/meta/dunlin.lua", function()
  local text = read("lua/meta/dunlin.lua")

  it("annotates every field of the contract", function()
    for name in pairs(contract.decision) do
      assert.is_truthy(text:find("---@field " .. name .. "? ", 1, true), name)
    end
    for _, set in ipairs({ contract.request, contract.node, contract.time, contract.kv, contract.queue, contract.pool,
      contract.model, contract.result, contract.wish }) do
      for name in pairs(set) do
        assert.is_truthy(text:find("---@field " .. name .. " ", 1, true) or text:find("---@field " .. name .. "? ", 1,
          true), name)
      end
    end
  end)
end)
