#!/usr/bin/env python3
"""Writes cases.jsonl: small templates and what Jinja2 makes of them, in the environment that transformers sets up for chat
templates. Run it after adding a template below: python3 tests/templates/make_cases.py > tests/templates/cases.jsonl
(made with Jinja2 3.1.6)."""
import json
import sys

import jinja2
import jinja2.sandbox
from jinja2.ext import Extension


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


ENV = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
ENV.filters["tojson"] = tojson
ENV.globals["raise_exception"] = raise_exception

CONTEXT = {
    "s": "Hello, World", "u": "Größe Ωμέγα Ж 🙂", "empty": "", "lines": "a\n b\n\nc\r\nd", "spaces": " \t\u00a0x y \n",
    "n": 7, "neg": -7, "zero": 0, "f": 1.5, "big": 12345678901234567, "yes": True, "no": False, "nothing": None,
    "l": [3, 1, 2], "names": ["bob", "Alice", "carol", "alice"], "el": [],
    "d": {"b": 1, "a": [1.0, None, True, "x\"y"], "c": {}, "items": "shadow"},
    "users": [{"name": "Zoe", "age": 30, "on": True}, {"name": "adam", "age": 25, "on": False}, {"name": "Bo", "age": 30}],
    "quotes": "it's", "both": "it's \"x\"", "html": "<a href='x'>&</a>", "ctrl": "a\tb\\c\u0007\u00a0\u200b",
}

TEMPLATES = r'''
{{ s }}|{{ u }}|{{ n }}|{{ f }}|{{ big }}|{{ yes }}|{{ nothing }}|{{ missing }}|
{{ l }}{{ d }}{{ names }}{{ el }}{{ (1, 'a') }}{{ (1,) }}{{ () }}{{ {} }}{{ {'a': {1: none}} }}
{{ [quotes, both, ctrl, u, html] }}
{{ 1 + 2 * 3 - 4 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 6 / 2 }} {{ 2 ** 10 }} {{ 2 * 1.5 }} {{ 1.0 }} {{ 1e20 }} {{ 1.5e-7 }} {{ 0.1 + 0.2 }}
{{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ -n }} {{ +n }} {{ - 3 + 5 }} {{ 10 - 2 - 3 }}
{{ 'a' + 'b' ~ 1 ~ none ~ true ~ 1.5 ~ [1] }}
{{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ [1, 2] * 2 }} {{ [1] + [2] }} {{ (1,) + (2,) }} {{ 'x' * 0 }}{{ 'x' * -1 }}
{{ 1 == 1.0 }} {{ true == 1 }} {{ '1' == 1 }} {{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1.0} }} {{ none == none }} {{ missing == missing2 }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 >= 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 != 2 }} {{ 1 <= 1 }}
{{ 'ell' in s }} {{ 'x' not in s }} {{ 3 in l }} {{ 'b' in d }} {{ 9 in l }} {{ 'a' in missing }} {{ '' in s }} {{ 1 in (1, 2) }}
{{ not yes }} {{ not empty }} {{ yes and n }} {{ no or 'x' }} {{ 0 or none }} {{ 1 and '' }} {{ not 1 == 2 }} {{ no and missing.x }}
{{ 'a' if yes else 'b' }}{{ 'a' if no else 'b' }}{{ 'a' if no }}{{ 'a' if no else 'b' if no else 'c' }}
{{ s[0] }}{{ s[-1] }}{{ u[2] }}{{ u[-1] }}{{ s[1:4] }}{{ s[:-7] }}{{ s[7:] }}{{ s[::-1] }}{{ u[::-1] }}{{ u[3:8] }}{{ s[::2] }}{{ s[10:1:-3] }}{{ s[100:] }}
{{ l[0] }}{{ l[-1] }}{{ l[1:] }}{{ l[::-1] }}{{ l[:1] }}{{ l[-2:] }}{{ l[5:] }}{{ l[5] }}{{ l.0 }}
{{ d.b }}{{ d['b'] }}{{ d.nope }}{{ d['nope'] }}{{ d['items'] }}{{ users[0].name }}{{ users.0.name }}{{ d.get('b') }}{{ d.get('z') }}{{ d.get('z', 4) }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{% for k in d %}{{ k }} {% endfor %}{{ d.keys() | list }}{{ d.values() | list }}{{ d.items() | list | length }}{{ d | length }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }} {% endfor %}
{% for x in l %}{% for y in names %}{{ loop.index }}{{ loop.depth }}{% endfor %}{{ loop.index }};{% endfor %}
{% for x in el %}x{% else %}none{% endfor %}{% for x in l %}{{ x }}{% else %}none{% endfor %}
{% for x in l if x > 1 %}{{ x }}{{ loop.index }}{{ loop.length }} {% endfor %}
{% for c in u %}{{ c }}.{% endfor %}
{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for x in l %}{% for y in l %}{% if y == 1 %}{% break %}{% endif %}{{ y }}{% endfor %}{{ x }}{% endfor %}
{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }},{% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a + b + c }}{% endfor %}
{% set x = 1 %}{% for i in l %}{{ x }}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}
{% set ns = namespace(x=1, y=[]) %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.z }}
{% if yes %}{% set inner = 5 %}{% endif %}{{ inner }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t = 1, 2 %}{{ t }}
{% set body %}x{{ n }}y{% endset %}{{ body }}{{ body | upper }}{% set body | trim | upper %}  z {% endset %}[{{ body }}]
{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c='y') }}{{ m(b=5, a=4) }}{{ m() }}
{% macro fact(n) %}{% if n <= 1 %}1{% else %}{{ n * fact(n - 1) | int }}{% endif %}{% endmacro %}{{ fact(5) }}
{% macro outer() %}{{ late }}{% endmacro %}{% set late = 'seen' %}{{ outer() }}
{% macro v() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ v(1, 2, x=3) }}
{% macro wrap(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call wrap('b') %}in{{ n }}{% endcall %}
{% macro each() %}{% for x in l %}{{ caller(x) }}{% endfor %}{% endmacro %}{% call(i) each() %}[{{ i }}]{% endcall %}
{% filter upper %}abc {{ s }}{% endfilter %}
{% with a = 1, b = n %}{{ a + b }}{% endwith %}{{ a }}
{% generation %}text {{ n }}{% endgeneration %}
{% raw %}{{ not }} {% code %}{% endraw %} {%- raw -%} a {%- endraw %} b
{# comment #}x{#- comment -#} y {# multi
line #}z
  {% if yes %}
    a
  {% endif %}
b
  {%- if yes -%}
    a
  {%- endif -%}
b
a {{- ' b ' -}} c
a {%+ if yes %} b {%+ endif %} c
{{ "a\nb\t\x41\u00e9\\ \' \" \q" }}{{ 'a' 'b' }}
{{ 1_000 }}{{ 0x1F }}
{{ s | upper }}{{ s | lower }}{{ 'aB cD' | capitalize }}{{ 'aB cD-eF' | title }}{{ u | upper }}{{ u | lower }}{{ 'ß' | upper }}
{{ spaces | trim }}|{{ 'xxaxx' | trim('x') }}|{{ spaces.strip() }}|{{ spaces.lstrip() }}|{{ spaces.rstrip() }}|{{ 'abcba'.strip('ab') }}|{{ 'abc'.lstrip('a') }}|{{ 'éaé'.strip('é') }}
{{ s | length }}{{ u | length }}{{ l | count }}{{ empty | length }}{{ missing | length }}
{{ s | replace('l', 'L') }}{{ s | replace('l', 'L', 1) }}{{ 'aaa' | replace('', '-') }}{{ s.replace('o', '0') }}{{ s.replace('o', '', 1) }}
{{ names | join(', ') }}{{ l | join }}{{ l | join('-') }}{{ users | join('/', attribute='name') }}{{ ', '.join(names) }}
{{ l | first }}{{ l | last }}{{ el | first }}{{ s | first }}{{ l | sort }}{{ l | sort(reverse=true) }}{{ names | sort }}{{ names | sort(case_sensitive=true) }}{{ users | sort(attribute='age') | map(attribute='name') | list }}
{{ l | min }}{{ l | max }}{{ l | sum }}{{ users | sum(attribute='age') }}{{ names | unique | list }}{{ l | reverse | list }}{{ s | reverse }}
{{ users | map(attribute='name') | list }}{{ names | map('upper') | list }}{{ users | map(attribute='on', default='?') | list }}
{{ users | selectattr('on') | map(attribute='name') | list }}{{ users | rejectattr('on') | list | length }}{{ users | selectattr('age', 'equalto', 30) | list | length }}{{ users | selectattr('on', 'defined') | list | length }}
{{ l | select('odd') | list }}{{ l | reject('gt', 1) | list }}{{ [0, 1, '', 'a'] | select | list }}{{ nothing | select | list }}
{{ d | dictsort }}{{ {'b': 1, 'A': 2} | dictsort }}{{ {'b': 1, 'A': 2} | dictsort(by='value', reverse=true) }}
{{ d | items | list | length }}{{ missing | items | list }}
{{ missing | default('x') }}{{ nothing | default('x') }}{{ nothing | default('x', true) }}{{ empty | d('x', true) }}{{ missing.a | default('y') if no else 'z' }}
{{ '42' | int }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ 3.9 | int }}{{ '3.9' | int }}{{ -3.9 | int }}{{ '1.5' | float }}{{ 'x' | float }}{{ n | float }}{{ true | int }}
{{ -5 | abs }}{{ 2.567 | round(2) }}{{ 2.5 | round }}{{ 2.1 | round(0, 'ceil') }}{{ 42 | round }}
{{ n | string + 'x' }}{{ none | string }}{{ l | string }}{{ 1.0 | string }}{{ 'abc' | list }}{{ d | list }}
{{ d | tojson }}{{ u | tojson }}{{ u | tojson(ensure_ascii=true) }}{{ ctrl | tojson }}{{ big | tojson }}{{ (1, 2) | tojson }}
{{ d | tojson(indent=2) }}{{ [] | tojson(indent=2) }}{{ {'a': []} | tojson(indent=1) }}
{{ d | tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}{{ {1: 2, none: 3, true: 4, 1.5: 5} | tojson }}
{{ lines | indent }}|{{ lines | indent(2, true) }}|{{ lines | indent(1, blank=true) }}|{{ lines | indent('> ') }}
{{ '%s is %d' | format('x', 3) }}{{ '%s-%s' % ('a', 1) }}{{ '{} {1} {n}'.format('a', 'b', n=3) if no else '{0}{n}{{}}'.format('a', n=1) }}
{{ html | e }}{{ (html | safe) + '<' }}{{ '<' + (html | safe) }}{{ '<' ~ (html | safe) }}{{ html | safe | upper }}
{{ 'a b  c'.split() }}{{ 'a,b,,c'.split(',') }}{{ 'a,b,c'.split(',', 1) }}{{ ' a b '.split(' ') }}{{ 'a b c'.split(none, 1) }}{{ 'a,b,c'.rsplit(',', 1) }}{{ lines.splitlines() }}{{ ''.split() }}{{ ''.split(',') }}
{{ s.startswith('Hell') }}{{ s.endswith('ld') }}{{ s.startswith(('x', 'H')) }}{{ s.endswith('') }}{{ s.find('o') }}{{ u.find('Ж') }}{{ s.find('zz') }}{{ s.count('l') }}{{ s.index('W') }}
{{ s.upper() }}{{ s.lower() }}{{ s.title() }}{{ s.capitalize() }}{{ '12'.isdigit() }}{{ 'ab'.isalpha() }}{{ 'a1'.isalnum() }}{{ ' '.isspace() }}{{ 'A'.isupper() }}{{ 'a'.islower() }}{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}
{{ l.index(2) }}{{ l.count(1) }}
{{ s is string }}{{ n is string }}{{ d is mapping }}{{ l is mapping }}{{ l is sequence }}{{ s is sequence }}{{ d is iterable }}{{ n is iterable }}{{ s is iterable }}{{ missing is iterable }}{{ n is number }}{{ yes is number }}{{ f is float }}{{ n is integer }}{{ yes is integer }}{{ yes is boolean }}{{ n is boolean }}
{{ missing is defined }}{{ s is defined }}{{ missing is undefined }}{{ nothing is none }}{{ s is not none }}{{ yes is true }}{{ n is true }}{{ no is false }}{{ zero is false }}{{ d.nope is defined }}{{ not s is defined }}{{ nothing is not defined }}
{{ 4 is even }}{{ 3 is odd }}{{ 9 is divisibleby 3 }}{{ 9 is divisibleby(2) }}{{ 1 is in l }}{{ 1 is eq 1 }}{{ 2 is gt(1) }}{{ 'a' is lower }}{{ 'A' is upper }}{{ m is callable }}{{ range is callable }}
{{ range(3) | list }}{{ range(1, 4) | list }}{{ range(5, 0, -2) | list }}{{ range(0) | list }}{{ dict(a=1, b=2) }}
{% if n > 5 and (l | length == 3 or missing) %}yes{% elif no %}elif{% else %}no{% endif %}
{% if no %}a{% elif zero %}b{% elif l %}c{% else %}d{% endif %}
{% if missing %}a{% endif %}{% if nothing %}b{% endif %}{% if el %}c{% endif %}{% if d %}d{% endif %}{% if 0.0 %}e{% endif %}
{% for x in l %}{{ loop.cycle('a', 'b') }}{% if loop.changed(x > 1) %}!{% endif %}{% endfor %}
{% for i in range(3) %}{% set y = i %}{% for j in range(2) %}{{ y }}{{ j }} {% endfor %}{% endfor %}{{ y }}
{{ users | selectattr('name', 'in', ['Zoe', 'Bo']) | map(attribute='age') | join('+') }}
{{ missing.x }}
{{ missing + 1 }}
{{ missing() }}
{{ missing | tojson }}
{{ s + 1 }}
{{ 1 + s }}
{{ l + s }}
{{ none + 1 }}
{{ s < 1 }}
{{ none in none }}
{{ 1 in s }}
{{ l.append(1) }}
{{ d.update({}) }}
{{ d.pop('b') }}
{{ s() }}
{{ s.nope() }}
{{ none.x }}
{{ none.x.y }}
{{ none[0] }}
{{ n | length }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{% for x in none %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% for a, b in [(1,)] %}{% endfor %}
{% set n.x = 1 %}
{{ raise_exception('no ' ~ n) }}
{{ s | items | list }}
{{ range(1000000) | list }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
{{ l | map('nope') | list }}
{% if no %}{{ s | nope }}{% endif %}ok
{% if yes %}{{ s | nope }}{% endif %}
{{ {'a': [1]}[[1]] }}
{{ s[0.5] }}{{ l['x'] }}{{ s['upper']() }}
{{ s.split('') }}
{{ s.index('zz') }}
{{ users | map(attribute='name') | tojson }}
'''


def cases():
    for line in TEMPLATES.strip("\n").split("\n"):
        yield line
    yield "  {% if yes %}\n    a\n  {% endif %}\nb\n"
    yield "x\n  {#- c #}\n  {# c #}\ny\n\n"
    yield "a\r\nb\r{{ 'x\r\ny' }}\n"
    yield "{% for x in l %}\n  {{ x }}\n{% endfor %}\nend"
    yield "{% for x in l -%}\n  {{ x }}\n{%- endfor %}\nend"
    yield "  {% raw %}\n  {{ x }}\n  {% endraw %}\n  y"
    yield "{%- if yes %}\n\n  {{- s }}\n{%- endif +%}\nz"
    yield "{{ s }}\n{{ s }}\n\n"
    yield "  {%+ if yes %}a{% endif %}\n  {{+ s }}"
    yield "{{ [\n 1,\n 2\n] }}\n{{ missing.x }}"
    yield "{{ 'a\\\nb' }}"


for source in cases():
    row = {"template": source}
    try:
        row["output"] = ENV.from_string(source).render(**CONTEXT)
    except Exception as e:  # every error is an expectation
        row["error"] = type(e).__name__ + ": " + str(e)
    json.dump(row, sys.stdout, ensure_ascii=False)
    print()
print(json.dumps({"context": CONTEXT}, ensure_ascii=False))
