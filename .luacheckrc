-- Lua of three kinds: host modules (lua/), policies in a sandbox (policies/), data (conf/), and the tools of tests/.
std = "luajit"
max_line_length = 140
self = false
ignore = { "311" } -- a first value that every branch replaces
exclude_files = { "build/**" }
-- What runtime/script/vm.h gives to host modules; io, os, debug, ffi are not there.
stds.dunlin_host = {
  read_globals = {
    "assert", "error", "getmetatable", "ipairs", "load", "next", "pairs", "pcall", "rawequal", "rawget", "rawset", "require",
    "select", "setmetatable", "tonumber", "tostring", "type", "unpack", "xpcall", "_VERSION", "_G",
    string = { fields = { "byte", "char", "find", "format", "gmatch", "gsub", "len", "lower", "match", "rep", "reverse", "sub", "upper" } },
    table = { fields = { "concat", "insert", "maxn", "remove", "sort", "move", "new" } },
    math = { other_fields = true },
  },
}
-- What a policy finds (policies/README.md): require("dunlin") alone; no patterns, pcall, coroutines, clock.
stds.dunlin_policy = {
  read_globals = {
    "assert", "error", "ipairs", "next", "pairs", "require", "select", "tonumber", "tostring", "type",
    string = { fields = { "byte", "char", "format", "len", "lower", "rep", "reverse", "sub", "upper" } },
    table = { fields = { "concat", "insert", "remove", "sort" } },
    math = { other_fields = true },
  },
}
files["lua/dunlin"] = { std = "dunlin_host" }
files["lua/dunlin/testing.lua"] = { std = "luajit+busted" } -- runs outside the node
files["policies"] = { std = "dunlin_policy" }
files["conf"] = { std = "none" }
files["tests"] = { std = "luajit+busted" }
