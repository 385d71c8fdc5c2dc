-- A node: data in Lua's syntax, nothing is computed. Every key, its default and range: conf/README.md or
-- `dunlin help conf`. Try it: dunlin serve --conf conf/node.lua
return {
  listen = "127.0.0.1:8443", -- other than loopback needs keys
  -- keys = "conf/keys.lua",

  models = {
    -- The name is what clients ask for. `./dev model` fetches this file.
    -- ["smollm2"] = { path = "/root/.cache/dunlin/SmolLM2-135M-Instruct.Q4_1.gguf" },
  },

  engine = {
    device = "auto", -- a GPU if there is one, else the CPU; or "cpu", "cuda", "cuda:1"
    threads = "auto",
    kv_memory = "auto", -- or a size, e.g. "2 GiB"
    max_sequences = 32,
  },

  -- Who may reuse a cached prefix, and whether every page is checked before it is read.
  cache = { share = "tenant" },
  integrity = "tag",

  queue = { limit = 256, timeout_ms = 30000 },

  policy = {
    expose = false, -- true: x-dunlin-... headers say what a request got and why
    list = {
      { file = "policies/tiers.lua" },
      { file = "policies/pressure.lua" },
    },
  },

  log = { level = "info", format = "auto" },
}
