-- Checks what a compiler does not: which layer may include which, where third-party headers may appear, how long files and
-- functions are, which functions of C are banned. Prints every finding as file:line: text and fails if there is one.
--
--   luajit tests/lint/layers.lua [ROOT]

local root = arg[1] or "."

-- What each folder of runtime/ may include. The folders are the path of a request; no arrow points back.
local may_include = {
  base = {},
  script = { "base" },
  http = { "base" },
  cache = { "base", "kernels" },
  engine = { "base", "script", "kernels" },
  policy = { "base", "script" },
  pool = { "base", "cache", "engine", "kernels" },
  sched = { "base", "cache", "engine", "policy", "pool", "kernels" },
  api = { "base", "script", "http", "cache", "engine", "policy", "pool", "sched" },
  cli = { "base", "script", "http", "cache", "engine", "policy", "pool", "sched", "api", "kernels" },
  main = { "base", "cli" },
  kernels = { "base" },
}

-- Third-party headers and the files that may see them (Lua patterns on both sides).
local third_party = {
  { "^lua%.h$", "^lauxlib%.h$", "^lualib%.h$", "^luajit%.h$",
    only = { "^runtime/script/", "^runtime/policy/", "^runtime/engine/template[%w_]*%.c$" } },
  { "^h2o%.h$", "^h2o/", only = { "^runtime/http/h2o_port", "^runtime/http/http[%w_]*%.c$" } },
  { "^mbedtls/", "^psa/", only = { "^runtime/http/tls[%w_]*%.[ch]$" } },
  { "^openssl/", only = {} },
  { "^jansson%.h$", only = { "^runtime/base/json%.h$" } },
  { "^pcre2%.h$", "^utf8proc%.h$", only = { "^runtime/engine/" } },
  { "^cuda", "^nccl%.h$", only = { "^kernels/cuda/" } },
  { "^immintrin%.h$", "^x86intrin%.h$", "^arm_neon%.h$", only = { "^kernels/cpu/" } },
}

local banned = {
  strcpy = "snprintf or dn_buf", strcat = "dn_buf", strncat = "dn_buf", sprintf = "snprintf", vsprintf = "vsnprintf",
  strtok = "strcspn", gets = "fgets", alloca = "the arena",
}
local banned_outside_tests = {
  atoi = "strtol with a check", atol = "strtol with a check", atof = "strtod with a check", rand = "a seeded generator",
  srand = "a seeded generator", gmtime = "gmtime_r", localtime = "localtime_r", asctime = "strftime", ctime = "strftime",
  setlocale = "nothing", system = "nothing", popen = "nothing", tmpnam = "mkstemp",
}

local LIMIT = { header = 150, private = 250, source = 1000, func = 100 }
-- The boundary to every backend is one header on purpose.
local long_header = { ["kernels/kernels.h"] = 350 }

local findings = 0
local function finding(file, line, format, ...)
  findings = findings + 1
  io.write(file, ":", line, ": ", format:format(...), "\n")
end

local function matches(text, patterns)
  for _, p in ipairs(patterns) do
    if text:find(p) then return true end
  end
  return false
end

-- Blanks comments and the inside of strings, keeps every newline: what is left has the same lines and no words in prose.
-- LuaJIT's patterns have no alternation, so that the next interesting place is found by hand.
local function code_only(text)
  local out, at = {}, 1
  while true do
    local from = text:find("[/\"']", at)
    if not from then break end
    out[#out + 1] = text:sub(at, from - 1)
    local two, stop = text:sub(from, from + 1)
    if two == "/*" then
      stop = select(2, text:find("*/", from + 2, true)) or #text
    elseif two == "//" then
      stop = (text:find("\n", from, true) or #text + 1) - 1
    elseif two:sub(1, 1) == "/" then
      out[#out + 1] = "/"
      at = from + 1
    else
      local quote, i = text:sub(from, from), from + 1
      while i <= #text and text:sub(i, i) ~= quote and text:sub(i, i) ~= "\n" do
        i = i + (text:sub(i, i) == "\\" and 2 or 1)
      end
      stop = i
    end
    if stop then
      out[#out + 1] = text:sub(from, stop):gsub("[^\n]", " ")
      at = stop + 1
    end
  end
  out[#out + 1] = text:sub(at)
  return table.concat(out)
end

local function layer_of(file)
  if file == "runtime/main.c" then return "main" end
  return file:match("^runtime/([^/]+)/") or file:match("^(kernels)/") or (file:match("^(tests)/"))
end

local function check_include(file, line, kind, name)
  for _, rule in ipairs(third_party) do
    if matches(name, rule) and not matches(file, rule.only) and not file:find("^tests/") then
      finding(file, line, "<%s> may be included only by %s", name,
        rule.only[1] and table.concat(rule.only, ", "):gsub("[%^%$%%]", "") or "nobody")
    end
  end
  local from, to = layer_of(file), name:match("^([^/]+)/")
  if kind ~= '"' or from == "tests" then return end
  if not to then
    finding(file, line, 'write "folder/%s": the include line shows the layer', name)
    return
  end
  if to == from then return end
  for _, allowed in ipairs(may_include[from] or {}) do
    if allowed == to then
      if to == "kernels" and name ~= "kernels/kernels.h" then
        finding(file, line, '"%s": only kernels/kernels.h is visible outside kernels/', name)
      end
      return
    end
  end
  finding(file, line, 'layer %s may not include "%s" (allowed: %s)', from, name,
    table.concat(may_include[from] or {}, " "))
end

local function check_file(file)
  local f = assert(io.open(root .. "/" .. file, "rb"))
  local text = f:read("*a")
  f:close()
  local code = code_only(text)
  local raw = {}
  for l in (text .. "\n"):gmatch("(.-)\n") do raw[#raw + 1] = l end
  if raw[#raw] == "" then raw[#raw] = nil end

  local is_test = file:find("^tests/")
  local is_private = file:find("internal%.h$") or file:find("_impl%.h$")
  local is_header = not is_test and file:find("%.h$") and not file:find("%.inc%.h$")
  local limit = long_header[file] or (is_private and LIMIT.private or is_header and LIMIT.header or LIMIT.source)
  if #raw > limit then finding(file, #raw, "%d lines, at most %d", #raw, limit) end

  local n, open, name = 0, nil, nil
  for l in (code .. "\n"):gmatch("(.-)\n") do
    n = n + 1
    if l:find("^%s*#%s*include") then
      local kind, target = raw[n]:match('#%s*include%s*([<"])([^>"]+)[>"]')
      if target then check_include(file, n, kind, target) end
    elseif not l:find("^%s*#") then
      for word, next_char in l:gmatch("([%a_][%w_]*)%s*(%(?)") do
        local instead = next_char == "(" and (banned[word] or (not is_test and banned_outside_tests[word]))
        if instead then finding(file, n, "%s() is banned: use %s", word, instead) end
      end
    end
    for _, mark in ipairs({ "TODO", "FIXME", "XXX" }) do
      if raw[n] and raw[n]:find("%f[%w]" .. mark .. "%f[%W]") then finding(file, n, "%s: file an issue instead", mark) end
    end
    -- The format puts a function's braces into the first column.
    if l:find("^[%a_].*%(") then name = l:match("([%w_]+)%s*%(") end
    if l == "{" then open = n end
    if l == "}" and open then
      if n - open - 1 > LIMIT.func then finding(file, open, "%s has %d lines, at most %d", name or "function", n - open - 1, LIMIT.func) end
      open = nil
    end
  end
end

local list = assert(io.popen("cd '" .. root:gsub("'", "'\\''") ..
  "' && find runtime kernels tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | LC_ALL=C sort"))
local n_files = 0
for file in list:lines() do
  n_files = n_files + 1
  check_file(file)
end
list:close()
if n_files == 0 then finding(root, 0, "no source file found") end
io.write(("%d files, %d findings\n"):format(n_files, findings))
os.exit(findings == 0 and 0 or 1)
