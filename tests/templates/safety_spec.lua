-- Hostile templates end in an error of ours, soon; and text of a request is never taken for text of the template.
local jinja = require("dunlin.jinja")
local V, text = jinja.value, jinja.text

local function context(fields)
  local d = V.dict()
  for name, v in pairs(fields) do
    V.dict_set(d, name, v)
  end
  return d
end

local function outcome(source, fields)
  local template, err = jinja.compile(source)
  if not template then
    return nil, err
  end
  return jinja.render(template, context(fields or {}), { strftime = tostring })
end

--- Text with what is not trusted in brackets.
local function marked(source, fields)
  local output, segments = outcome(source, fields)
  assert(output, output or segments.message)
  local out, at = {}, 1
  for i = 1, #segments, 2 do
    local piece = output:sub(at, at + segments[i] - 1)
    out[#out + 1] = segments[i + 1] and piece or "[" .. piece .. "]"
    at = at + segments[i]
  end
  return table.concat(out)
end

describe("a hostile template", function()
  local function nested(open, inner, close, n)
    return open:rep(n) .. inner .. close:rep(n)
  end
  local cases = {
    { "nested parentheses", "{{ " .. nested("(", "1", ")", 5000) .. " }}", "nested deeper" },
    { "nested lists", "{{ " .. nested("[", "1", "]", 5000) .. " }}", "nested deeper" },
    { "nested dicts", "{{ " .. nested("{'a':", "1", "}", 5000) .. " }}", "nested deeper" },
    { "many not", "{{ " .. ("not "):rep(5000) .. "1 }}", "nested deeper" },
    { "many minus", "{{ " .. ("- "):rep(5000) .. "1 }}", "nested deeper" },
    { "nested if", nested("{% if 1 %}", "x", "{% endif %}", 5000), "nested deeper" },
    { "nested for", nested("{% for a in b %}", "x", "{% endfor %}", 30), "loops in each other" },
    { "nested macros", nested("{% macro f() %}", "x", "{% endmacro %}", 500), "nested deeper" },
    { "nested tuple targets", "{% for " .. nested("(", "a", ")", 500) .. " in b %}{% endfor %}", "nested deeper" },
    { "nested else", "{{ " .. ("1 if 0 else "):rep(5000) .. "2 }}", "nested deeper" },
    { "a long sum", "{{ 1" .. (" + 1"):rep(20000) .. " }}", "in a row" },
    { "a long path", "{{ a" .. (".b"):rep(20000) .. " }}", "in a row" },
    { "many filters", "{{ a" .. (" | trim"):rep(20000) .. " }}", "in a row" },
    { "many and", "{{ 1" .. (" and 1"):rep(20000) .. " }}", "in a row" },
    { "a long comparison", "{{ 1" .. (" < 1"):rep(20000) .. " }}", "in a row" },
    { "many if", "{{ 1" .. (" if 1"):rep(20000) .. " }}", "in a row" },
    { "nested calls", "{{ " .. nested("f(", "", ")", 5000) .. " }}", "nested deeper" },
    { "huge range", "{% for i in range(10**9) %}{% endfor %}", "Range too big" },
    { "huge multiplication of text", "{{ 'x' * 10**12 }}", "more than" },
    { "huge multiplication of lists", "{{ [0] * 10**9 }}", "more than" },
    { "doubling text",
      "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "more than" },
    { "doubling lists", "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "more than" },
    { "replace as amplifier", "{% set a = 'x' * 100000 %}{{ a | replace('x', a) }}", "more than" },
    { "join as amplifier", "{% set a = 'x' * 100000 %}{{ range(100000) | join(a) }}", "more than" },
    { "indent as amplifier", "{{ ('\n' * 100000) | indent(1000, blank=true) }}", "more than" },
    { "JSON indent", "{{ [1] | tojson(indent=10**9) }}", "indent of more than 64" },
    { "much output", "{% set a = 'x' * 1000000 %}{% for i in range(100) %}{{ a }}{% endfor %}", "more than" },
    { "endless macro", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "deeper than 100" },
    { "two macros that call each other",
      "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}", "deeper than 100" },
    { "a namespace in itself", "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", "nested deeper" },
    { "a namespace in itself, compared", "{% set a = namespace() %}{% set a.x = [a] %}{{ a.x == [a.x] }}{{ [a.x] | tojson }}", "JSON" },
    { "unterminated expression", "{{ 1 + ", "unexpected end of template" },
    { "unterminated string", "{{ 'abc", "unterminated string" },
    { "unterminated comment", "{# abc", "missing end of comment" },
    { "unterminated raw", "{% raw %} {{ x }}", "missing endraw" },
    { "unterminated block", "{% if 1 %} x", "has no end" },
    { "crossed blocks", "{% if 1 %}{% for x in y %}{% endif %}{% endfor %}", "out of place" },
    { "crossed brackets", "{{ (1] }}", 'unexpected "]"' },
    { "stray end", "{% endfor %}", "out of place" },
    { "break outside of a loop", "{% break %}", "outside of a loop" },
    { "break in a macro in a loop", "{% for x in [1] %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}", "outside of a loop" },
    { "assignment to a constant", "{% set none = 1 %}", "can't assign" },
    { "a large source", ("x"):rep(2 ^ 20 + 1), "at most" },
    { "a large number", "{{ 99999999999999999999 }}", "2**53" },
    { "overflow", "{{ 2 ** 100 }}", "2**53" },
    { "a byte that is no token", "{{ $ }}", "unexpected character" },
    { "unpacking", "{{ f(*x) }}", "not supported" },
    { "include", "{% include '/etc/passwd' %}", "not supported" },
    { "recursive loop", "{% for x in y recursive %}{% endfor %}", "not supported" },
    { "many arguments", "{{ f(" .. ("1,"):rep(100) .. ") }}", "more than 32 arguments" },
    { "attributes of Python", "{{ ''.__class__.__mro__ }}", "has no attribute" },
    { "deep values", nil, "nested deeper" },
  }
  for _, case in ipairs(cases) do
    it("is refused: " .. case[1], function()
      local fields, source = {}, case[2]
      if not source then
        local v = V.list({}, 0)
        for _ = 1, 5000 do
          v = V.list({ v }, 1)
        end
        fields.deep, source = v, "{{ deep }}"
      end
      local begin = os.clock()
      local output, err = outcome(source, fields)
      assert.is_nil(output)
      assert.is_truthy(err.message:find(case[3], 1, true), err.message)
      assert.not_equal("InternalError", err.kind)
      assert.is_true(err.line >= 1)
      assert.is_true(os.clock() - begin < 5)
    end)
  end

  it("names the line", function()
    local _, err = outcome("a\n{% if x %}\n\n{{ y | nope }}\n{% endif %}", { x = true })
    assert.equal(4, err.line)
    _, err = outcome("a\n\n{{ 'x\ny' }}{# \n #}{{ }}")
    assert.equal(5, err.line)
    _, err = outcome("{% raw %}\n\n{% endraw %}\n{{ raise_exception('here') }}")
    assert.equal(4, err.line)
    assert.equal("here", err.message)
  end)

  it("can be long where it is not deep", function()
    assert.equal("1001", (outcome("{{ 1" .. (" + 1"):rep(1000) .. " }}")))
    assert.equal("a", (outcome("{{ 'a'" .. (" | trim"):rep(900) .. " }}")))
    assert.equal("True", (outcome("{{ 1" .. (" <= 1"):rep(190) .. " }}")))
    assert.equal(("ab"):rep(3000), (outcome(("{{ 'a' }}b"):rep(3000))))
    local elif = { "{% if x == 0 %}" }
    for i = 1, 2000 do
      elif[#elif + 1] = "{% elif x == " .. i .. " %}" .. i
    end
    assert.equal("1999", (outcome(table.concat(elif) .. "{% endif %}", { x = 1999 })))
    local items = {}
    for i = 1, 5000 do
      items[i] = "'" .. i .. "'"
    end
    assert.equal("5000", (outcome("{{ [" .. table.concat(items, ",") .. "] | length }}")))
    assert.equal("1", (outcome("{{ {" .. ("'k': 1, "):rep(5000) .. "} | length }}")))
    local sets = {}
    for i = 1, 3000 do
      sets[i] = "{% set v" .. i .. " = " .. i .. " %}{% set b %}x{% endset %}{% for x in [1] %}{% endfor %}"
    end
    assert.equal("3000", (outcome(table.concat(sets) .. "{{ v3000 }}")))
  end)

  it("can't get text into the generated code", function()
    local evil = { "]] os.exit(1) --[[", "' .. os.exit(1) .. '", "\\\" os.exit(1)", "\0\n\r", "end) os.exit(1)" }
    for _, s in ipairs(evil) do
      local quoted = s:gsub("\\", "\\\\"):gsub("'", "\\'")
      assert.equal((s:gsub("\r", "\n")), (outcome("{{ '" .. quoted .. "' }}")))
      assert.equal((s:gsub("\r", "\n")), (outcome(s .. "{{ '' }}")))
      local template = assert(jinja.compile("{% set x = {'" .. quoted .. "': 1} %}{{ x['" .. quoted .. "'] }}{{ x.y }}" .. s))
      assert.is_nil(template.code:find("os", 1, true))
    end
  end)

  it("finds none of Lua behind its names", function()
    for _, name in ipairs({ "_G", "os", "io", "string", "R", "V", "K", "S", "load", "pcall", "self", "__index" }) do
      assert.equal("False", (outcome("{{ " .. name .. " is defined }}")), name)
      assert.equal("False", (outcome("{{ x." .. name .. " is defined }}{{ '' if 1 }}", { x = V.dict() })), name)
    end
    assert.equal("", (outcome("{{ x.n }}{{ x.k }}{{ x.map }}{{ l.n }}{{ l['k'] }}", { x = V.dict(), l = V.list({ 1 }, 1) })))
  end)
end)

describe("text of a request", function()
  local fields = { u = text.untrusted("<x>"), s = text.untrusted("  a<x> b  "), n = 5, t = "T",
    l = V.list({ text.untrusted("p"), "q" }, 2) }
  local d = V.dict()
  V.dict_set(d, text.untrusted("key"), text.untrusted("value"))
  V.dict_set(d, "mine", 1)
  fields.d = d
  local cases = {
    { "a{{ u }}b{{ t }}{{ n }}", "a[<x>]bT5" },
    { "{{ 'a' + u + 'b' }}{{ 'a' ~ u ~ n }}", "a[<x>]ba[<x>]5" },
    { "{{ s.strip() }}|{{ s | trim }}|{{ ('a' + s).rstrip() }}", "[a<x> b]|[a<x> b]|a[  a<x> b]" },
    { "{{ u | replace('x', '<eos>') }}", "[<]<eos>[>]" },
    { "{{ 'a-b' | replace('-', u) }}", "a[<x>]b" },
    { "{{ ('<s>' + u)[1:5] }}{{ u[0] }}{{ u[::-1] }}{{ ('<s>' + u)[::2] }}", "s>[<x<>x<]<>[x]" },
    { "{{ (u + '|' + u).split('|') | join(', ') }}", "[<x>], [<x>]" },
    { "{% for c in 'a' + u %}{{ c }}.{% endfor %}", "a.[<].[x].[>]." },
    { "{{ l | join('-') }}{{ l[0] }}{{ l[1] }}", "[p]-q[p]q" },
    { "{{ '%s=%s' | format(u, t) }}{{ '{}:{}'.format(u, 1) }}", "[<x>]=T[<x>]:1" },
    { "{{ u | upper }}{{ ('a' + u) | upper }}{{ u | capitalize }}", "[<X>]A[<X><x>]" },
    { "{{ u | tojson }}{{ 'a' | tojson }}{{ [1, u] | tojson }}", '["<x>"]"a"[[1, "<x>"]]' },
    { "{{ [1, u, 'a'] }}{{ u | string }}", "[1, ['<x>'], 'a'][<x>]" },
    { "{{ d }}", "{['key']: ['value'], 'mine': 1}" },
    { "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "[key]=[value];mine=1;" },
    { "{% set x %}a{{ u }}{% endset %}{{ x }}{{ x | length }}", "a[<x>]4" },
    { "{% macro m(a) %}({{ a }}){% endmacro %}{{ m(u) }}{{ m('b') }}", "([<x>])(b)" },
    { "{% set ns = namespace(s='') %}{% for i in range(2) %}{% set ns.s = ns.s + u + 'z' %}{% endfor %}{{ ns.s }}", "[<x>]z[<x>]z" },
    { "{{ u | default('a') }}{{ (u or 'a') }}{{ u if u == '<x>' else 'b' }}", "[<x><x><x>]" },
    { "{{ u | e }}{{ u | safe }}{{ u | indent(2, true) }}", "[&lt;x&gt;<x>]  [<x>]" },
    { "{{ '' ~ u[3:] }}x", "x" },
    { "{{ u * 2 }}{{ u | title }}{{ u | first }}", "[<x><x><X><]" },
    { "{{ 'a,b'.split(',')[0] }}{{ {'<x>': 1}[u] }}{{ u == '<x>' }}{{ u in ['<x>'] }}", "a1TrueTrue" },
  }
  for _, case in ipairs(cases) do
    it("stays apart in " .. case[1], function()
      assert.equal(case[2], marked(case[1], fields))
    end)
  end
end)
