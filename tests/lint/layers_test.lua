-- Proves that layers.lua fails where it must: each case is a small tree with one fault, written into a scratch folder.
--
--   luajit tests/lint/layers_test.lua LINT SCRATCH

local lint, scratch = arg[1], arg[2]

local clean = {
  ["runtime/base/a.h"] = "int dn_a(void);\n",
  ["runtime/http/http_a.c"] = '#include "base/a.h"\n#include "http/b.h"\n#include <h2o.h>\n#include <h2o/http2.h>\n',
  ["runtime/http/b.h"] = "/* sprintf(x) and #include in prose, \"quotes */\nint dn_b(void);\n",
  ["runtime/http/tls.c"] = "#include <mbedtls/ssl.h>\n",
  ["runtime/policy/p.c"] = '#include <lua.h>\n#include "script/vm.h"\nconst char *s = "strcpy(a) \\" atoi(b)"; // gets(c)\n',
  ["runtime/script/vm.h"] = "int dn_v(void);\n",
  ["runtime/engine/template_lua.c"] = "#include <lua.h>\n#include \"kernels/kernels.h\"\n",
  ["runtime/api/x.c"] = '#include "sched/s.h"\n#include "http/b.h"\n',
  ["runtime/sched/s.h"] = "int dn_s(void);\n",
  ["kernels/kernels.h"] = "int dn_k(void);\n",
  ["tests/unit/base/t.c"] = "x = atoi(s);\n",
  ["kernels/cpu/k.c"] = '#include "kernels/cpu/k.h"\n#include <immintrin.h>\n',
}

local long_function = "int dn_long(int x)\n{\n" .. ("    x++;\n"):rep(101) .. "    return x;\n}\n"

-- { name, file, text, what must be said }; nil text = no fault, the tree must pass.
local cases = {
  { "the clean tree passes" },
  { "base includes http", "runtime/base/a.c", '#include "http/b.h"\n', "runtime/base/a.c:1: layer base may not include" },
  { "cache includes sched", "runtime/cache/c.c", '\n#include "sched/s.h"\n', "runtime/cache/c.c:2: layer cache may not include" },
  { "http includes policy", "runtime/http/c.c", '#include "policy/p.h"\n', "layer http may not include" },
  { "sched includes api", "runtime/sched/c.c", '#  include "api/x.h"\n', "layer sched may not include" },
  { "kernels include engine", "kernels/cpu/c.c", '#include "engine/e.h"\n', "layer kernels may not include" },
  { "engine includes a kernel's inside", "runtime/engine/c.c", '#include "kernels/cpu/k.h"\n', "only kernels/kernels.h is visible" },
  { "http includes kernels", "runtime/http/c.c", '#include "kernels/kernels.h"\n', "layer http may not include" },
  { "an include without folder", "runtime/http/c.c", '#include "b.h"\n', "the include line shows the layer" },
  { "h2o outside its files", "runtime/http/stream.c", "#include <h2o.h>\n", "<h2o.h> may be included only by" },
  { "h2o in api", "runtime/api/c.c", "#include <h2o/http2.h>\n", "may be included only by" },
  { "mbedtls in http_x.c", "runtime/http/http_x.c", "#include <mbedtls/ssl.h>\n", "may be included only by" },
  { "lua in sched", "runtime/sched/c.c", "#include <lua.h>\n", "may be included only by" },
  { "lua in the engine outside templates", "runtime/engine/model.c", "#include <lua.h>\n", "may be included only by" },
  { "openssl", "runtime/http/tls.c", "#include <openssl/ssl.h>\n", "may be included only by nobody" },
  { "jansson past base/json.h", "runtime/api/c.c", "#include <jansson.h>\n", "may be included only by" },
  { "cuda in the pool", "runtime/pool/c.c", "#include <cuda_runtime.h>\n", "may be included only by" },
  { "strcpy", "runtime/base/a.c", "void dn_f(char *a)\n{\n    strcpy (a, \"b\");\n}\n", "runtime/base/a.c:3: strcpy() is banned" },
  { "alloca", "kernels/cpu/c.c", "x = alloca(n);\n", "alloca() is banned" },
  { "atoi in the program", "runtime/base/a.c", "x = atoi(s);\n", "atoi() is banned" },
  { "sprintf in a test", "tests/unit/base/a.c", "sprintf(s, x);\n", "sprintf() is banned" },
  { "a call behind a comment", "runtime/base/a.c", "/* a\n*/ gets(x);\n", "runtime/base/a.c:2: gets() is banned" },
  { "a long header", "runtime/base/a.h", ("int a;\n"):rep(151), "151 lines, at most 150" },
  { "a long source", "runtime/base/a.c", ("int a;\n"):rep(1001), "1001 lines, at most 1000" },
  { "a long function", "runtime/base/a.c", long_function, "dn_long has 102 lines" },
  { "an unfinished thought", "runtime/base/a.c", "/* TODO: later */\n", "file an issue instead" },
}

local function shell(command)
  local ok = os.execute(command)
  assert(ok == true or ok == 0, command)
end

local function write(root, file, text)
  shell(("mkdir -p '%s'"):format((root .. "/" .. file):match("^(.*)/")))
  local f = assert(io.open(root .. "/" .. file, "w"))
  f:write(text)
  f:close()
end

local function run(root)
  local p = assert(io.popen(("luajit '%s' '%s'; echo \"exit $?\""):format(lint, root)))
  local out = p:read("*a")
  p:close()
  return out, tonumber(out:match("exit (%d+)%s*$"))
end

local failed = 0
for i, case in ipairs(cases) do
  local root = scratch .. "/" .. i
  shell(("rm -rf '%s'"):format(root))
  for file, text in pairs(clean) do write(root, file, text) end
  if case[2] then write(root, case[2], case[3]) end
  local out, code = run(root)
  local ok
  if case[2] then
    ok = code == 1 and out:find(case[4], 1, true) and out:find(" 1 findings", 1, true)
  else
    ok = code == 0 and out:find(" 0 findings", 1, true)
  end
  if not ok then
    failed = failed + 1
    io.write("FAILED: ", case[1], "\n", out)
  end
end
shell(("rm -rf '%s'"):format(scratch))
io.write(("%d passed, %d failed\n"):format(#cases - failed, failed))
os.exit(failed == 0 and 0 or 1)
