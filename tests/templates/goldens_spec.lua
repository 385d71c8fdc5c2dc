-- 68 real templates x up to 24 conversations against Jinja2 3.1.6 (shared/data/chat_templates.tar.gz, not part of the project).
-- Every rendering must match byte for byte and every error in kind and message, but for those that are listed here with their reason.
local jinja = require("dunlin.jinja")
local support = require("support")
local V, text = jinja.value, jinja.text

--- "template|context" -> why it does not match. Empty: all match. An entry that matches after all fails the spec too.
local KNOWN = {}

local folder, missing = support.material()

local function load_contexts()
  local contexts = {}
  local own = support.decode(support.read(folder .. "/contexts/own_contexts.json"))
  for i = 1, own.n do
    contexts[own.keys[i].s] = own.map[own.keys[i].s]
  end
  for _, name in ipairs({ "simple", "system", "tool_use" }) do
    contexts["minja_" .. name] = support.decode(support.read(folder .. "/contexts/minja_" .. name .. ".json"))
  end
  local defaults = { { "tools", V.None }, { "add_generation_prompt", true }, { "bos_token", "<s>" }, { "eos_token", "</s>" } }
  for _, context in pairs(contexts) do
    for _, pair in ipairs(defaults) do
      if context.map[pair[1]] == nil then
        V.dict_set(context, pair[1], pair[2])
      end
    end
  end
  return contexts
end

local function load_goldens()
  local list = {}
  for line in io.lines(folder .. "/goldens.jsonl") do
    list[#list + 1] = support.plain(line)
  end
  return list
end

describe("the real chat templates", function()
  if not folder then
    it("are not here", function()
      print("SKIPPED: " .. missing)
    end)
    return
  end
  local contexts, goldens, compiled = load_contexts(), load_goldens(), {}

  local function outcome(golden)
    local template = compiled[golden.template]
    if not template then
      template = assert(jinja.compile(support.read(folder .. "/templates/" .. golden.template)))
      compiled[golden.template] = template
    end
    local options = { strftime = support.strftime, mutable = golden.env == "mutable" }
    local output, err = jinja.render(template, contexts[golden.context], options)
    return output, output and err, not output and err.kind .. ": " .. err.message
  end

  it("render as Jinja2 renders them", function()
    local matched, total, surprises = {}, {}, {}
    for _, golden in ipairs(goldens) do
      local class = golden.error and "error" or golden.env or "output"
      local output, _, why = outcome(golden)
      local good = output == golden.output and (why or nil) == golden.error
      local key = golden.template .. "|" .. golden.context
      total[class] = (total[class] or 0) + 1
      matched[class] = (matched[class] or 0) + (good and 1 or 0)
      if good ~= (KNOWN[key] == nil) then
        surprises[#surprises + 1] = key .. ": " .. (good and "matches, but is listed" or why or "different text")
      end
    end
    for class, n in pairs(total) do
      print(("%d of %d match (%s)"):format(matched[class], n, class))
    end
    for key, reason in pairs(KNOWN) do
      print("does not match: " .. key .. ": " .. reason)
    end
    assert.equal(1428, #goldens)
    assert.equal("", table.concat(surprises, "\n"))
  end)

  it("never vouch for what a user wrote", function()
    local typed = text.bytes(contexts.special_token_in_user.map.messages[1].map.content)
    assert.is_truthy(typed:find("<|im_end|>", 1, true))
    local seen = 0
    for _, golden in ipairs(goldens) do
      if golden.context == "special_token_in_user" and golden.output then
        local output, segments = outcome(golden)
        local first, last = output:find(typed, 1, true)
        local at = 1
        for i = 1, first and #segments or 0, 2 do
          local next_at = at + segments[i]
          if segments[i + 1] then
            assert.is_true(next_at <= first or at > last, golden.template .. " vouches for bytes of the user")
          end
          at = next_at
        end
        seen = seen + (first and 1 or 0)
      end
    end
    assert.is_true(seen >= 50, seen .. " templates print the text as it is")
  end)
end)

describe("the renderings of Kimi, GLM and Qwen", function()
  local shared = os.getenv("DN_SHARED_DATA") or "../shared/data"
  local file = io.open(shared .. "/chat_golden.json", "rb")
  if not folder or not file then
    it("are not here", function()
      print("SKIPPED: " .. (missing or shared .. "/chat_golden.json is absent"))
    end)
    return
  end
  local all = support.decode(file:read("*a"), true)
  file:close()
  it("match", function()
    local n = 0
    local rendered = all.map.rendered
    for i = 1, rendered.n do
      local model, talk, mode = rendered.keys[i]:match("^([^|]*)|([^|]*)|([^|]*)$")
      local conversation, context = all.map.conversations.map[talk], V.dict()
      for j = 1, conversation.n do
        V.dict_set(context, conversation.keys[j], conversation.map[conversation.keys[j]])
      end
      V.dict_set(context, "add_generation_prompt", true)
      if mode == "nothink" then
        V.dict_set(context, "enable_thinking", false)
        V.dict_set(context, "thinking", false)
      end
      local source = support.read(folder .. "/templates/" .. (model == "Kimi-K2.5" and "Kimi-K2.5.derived" or model) .. ".jinja")
      local output, err = jinja.render(assert(jinja.compile(source)), context)
      assert.equal(rendered.map[rendered.keys[i]], output or err.message, rendered.keys[i])
      n = n + 1
    end
    assert.is_true(n >= 36, n .. " compared")
  end)
end)
