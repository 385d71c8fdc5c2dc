"""Policies in a node that serves: who gets what, changes without a restart, and what a broken policy does."""
import os
import signal

import pytest
from serve_lib import SOURCE, Node, is_error, make_key, takes_less_than, together, write

BODY = {"model": "tiny", "prompt": "the sea", "max_tokens": 4, "temperature": 0}
FP8 = '"fp8_e4m3"'
GREEDY = dict(temperature=0, max_tokens=40, ignore_eos=True)


def shipped(name):
    return os.path.join(SOURCE, "policies", name)


def policies(*files, expose=True, more=""):
    listed = ", ".join(f if f.startswith("{") else f'{{ file = "{f}" }}' for f in files)
    return f'  policy = {{ expose = {"true" if expose else "false"}, {more} list = {{ {listed} }} }},'


def ask(node, key=None, status=200, **params):
    """The response to a small request."""
    with node.http(key=key) as http:
        r = http.post("/v1/completions", json={**BODY, **params})
        assert r.status_code == status, (r.status_code, r.text)
        return r


# ---- Shipped policies


@pytest.fixture(scope="module", name="tiers")
def _tiers():
    """(node, keys by name) with tiers.lua and wishes.lua."""
    keys, entries = {}, []
    for name, labels in (("free", ""), ("pro", 'tier = "pro"'), ("gold", 'tier = "gold"'), ("typo", 'tier = "glod"'),
                         ("bank", 'tier = "gold", regulated = true')):
        keys[name], entry = make_key(name)
        at = entry.index("tenant")
        entries.append(entry[:at] + f"labels = {{ {labels} }}, " + entry[at:] if "labels" not in entry else
                       entry.replace("labels = {}", f"labels = {{ {labels} }}"))
    path = write("tier-keys.lua", "return {\n" + "\n".join(entries).replace("regulated = true", 'regulated = "yes"') +
                 "\n}\n")
    conf = policies(shipped("wishes.lua"), shipped("tiers.lua")) + '\n  integrity = "off",'
    with Node("--keys", path, conf=conf, key=keys["gold"]) as node:
        yield node, keys


def test_the_label_of_a_key_decides_format_and_integrity(tiers):
    node, keys = tiers
    for name, kv, integrity, tier in (("free", "fp8_e4m3", "off", "free"), ("pro", "bf16", "off", "pro"),
                                      ("gold", "bf16", "off", "gold"), ("typo", "fp8_e4m3", "off", "free"),
                                      ("bank", "bf16", "tag", "gold")):
        r = ask(node, keys[name])
        assert (r.headers["x-dunlin-kv"], r.headers["x-dunlin-integrity"], r.headers["x-tier"]) == (kv, integrity, tier)
        assert "tiers" in r.headers["x-dunlin-policy"] and r.headers["x-dunlin-weights"]
        node.wait_log(rf"request\.done id={r.headers['x-request-id']} .*kv={kv} .*integrity={integrity} .*tier {tier}")


def test_the_tier_bounds_the_length_of_an_answer(tiers):
    node, keys = tiers
    r = ask(node, keys["free"], max_tokens=2000, ignore_eos=True)
    assert r.json()["usage"]["completion_tokens"] == 1024 and r.json()["choices"][0]["finish_reason"] == "length"
    assert ask(node, keys["gold"], max_tokens=1100, ignore_eos=True).json()["usage"]["completion_tokens"] == 1100


def test_the_budget_of_a_tier_ends_and_other_tenants_go_on(tiers):
    node, keys = tiers
    with node.http(key=keys["typo"]) as http: # tier free: a burst of 8000 tokens, 50 a second
        results = [http.post("/v1/completions", json={**BODY, "prompt": f"{i} " + "x " * 1900, "max_tokens": 100})
                   for i in range(12)]
    refused = [r for r in results if r.status_code == 429]
    assert refused and results[0].status_code == 200, [r.status_code for r in results]
    for r in refused:
        is_error(r, 429, "rate_limit_exceeded", words=["free"])
        assert int(r.headers["retry-after"]) >= 1
    ask(node, keys["free"], status=200)
    ask(node, keys["gold"], status=200)


def test_a_regulated_tenant_shares_its_prefixes_with_nobody_but_itself(tiers):
    node, keys = tiers
    prompt = "many birds over the grey sea by night " * 8
    used = [ask(node, keys[k], prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for k in ("bank", "gold", "bank")]
    assert used[0] == 0 and used[1] == 0 and used[2] > 0, used


def test_wishes_are_granted_by_policy_alone():
    with Node(conf=policies()) as plain:
        r = ask(plain, dunlin={"kv": "fp8_e4m3"})
        assert r.headers["x-dunlin-kv"] == "bf16", "without a policy a wish has no effect"
    with Node(conf=policies(shipped("wishes.lua"))) as node:
        assert ask(node, dunlin={"kv": "fp8_e4m3"}).headers["x-dunlin-kv"] == "fp8_e4m3"
        assert ask(node).headers["x-dunlin-kv"] == "bf16"
        assert ask(node, dunlin={"integrity": "off"}).headers["x-dunlin-integrity"] == "tag", "it only rises"
        is_error(ask(node, status=400, dunlin={"kv": "fp4"}), 400, param="dunlin.kv")


def test_formats_share_a_batch_and_each_answer_is_as_if_alone():
    with Node(conf=policies(shipped("wishes.lua"))) as node:
        prompts = [f"the bird number {i} turns along the shore" for i in range(6)]
        cases = [(p, kv) for p in prompts for kv in ("bf16", "fp8_e4m3")]

        def one(prompt, kv):
            with node.http() as http:
                body = {"model": "tiny", "prompt": prompt, **GREEDY, "max_tokens": 120, "dunlin": {"kv": kv}}
                r = http.post("/v1/completions", json=body)
                assert r.headers["x-dunlin-kv"] == kv
                return r.json()["choices"][0]["text"]

        alone = [one(*c) for c in cases]
        assert together([lambda c=c: one(*c) for c in cases]) == alone
        served = node.metrics()
        assert served['dunlin_requests_served_total{kv="fp8_e4m3",integrity="tag"}'] == \
            served['dunlin_requests_served_total{kv="bf16",integrity="tag"}'] == 12
        assert served["dunlin_integrity_violations_total"] == 0


def test_integrity_off_runs_no_check():
    with Node(conf='  integrity = "off",') as node:
        node.text(**GREEDY)
        assert node.metrics()["dunlin_integrity_checks_total"] == 0


def test_under_pressure_new_sequences_keep_their_kv_in_fp8():
    conf = policies("{ file = \"" + shipped("pressure.lua") + '", params = { degrade_below = 0.999, all_below = 0.998, '
                    'shed_below = 0 } }')
    with Node("--kv-memory", "1MiB", conf=conf) as node:
        assert ask(node).headers["x-dunlin-kv"] == "bf16", "all is free"
        with node.http() as http, http.stream("POST", "/v1/completions",
                                              json={**BODY, "stream": True, "max_tokens": 2000, "ignore_eos": True}) as r:
            next(r.iter_lines())
            under = ask(node)
            assert under.headers["x-dunlin-kv"] == "fp8_e4m3" and "pressure" in under.headers["x-dunlin-policy"]
            node.wait_log(r"request\.done .*kv free \d+%")


# ---- Reload


def reloaded(node, what="policy.reloaded"):
    count = node.log().count(what)
    node.signal(signal.SIGHUP)
    node.wait_log(what.replace(".", r"\."), count + 1)


def test_a_changed_file_counts_from_the_next_request_on_without_a_restart():
    path = write("changing.lua", 'return { api = 1, name = "changing", route = function() '
                 'return { kv_dtype = "bf16", headers = { ["x-version"] = "one" } } end }')
    with Node(conf=policies(path)) as node, node.http() as http:
        first = http.post("/v1/completions", json=BODY)
        assert (first.headers["x-version"], first.headers["x-dunlin-kv"]) == ("one", "bf16")
        with http.stream("POST", "/v1/completions",
                         json={**BODY, "stream": True, "max_tokens": 3000, "ignore_eos": True}) as running:
            lines = running.iter_lines()
            next(lines)
            write("changing.lua", 'return { api = 1, name = "changing", route = function(req, node) '
                  f'return {{ kv_dtype = {FP8}, headers = {{ ["x-version"] = "two" }} }} end }}')
            assert ask(node).headers["x-version"] == "one", "not before the signal"
            reloaded(node)
            second = ask(node)
            assert (second.headers["x-version"], second.headers["x-dunlin-kv"]) == ("two", "fp8_e4m3")
            *_, last = (line for line in lines if line)
            assert last == "data: [DONE]", "what ran goes on"
        assert node.metrics()["dunlin_policy_last_reload_success"] == 1


@pytest.mark.parametrize("text,word", [
    ('return { api = 1, name = "stable", route = function(\n', ":2:"),
    ('\n\nerror("no")\n', ":3:"),
    ('return { api = 1, name = "stable", route = function() return { kv_dtpye = "bf16" } end }', "kv_dtype"),
    ('return { api = 1, name = "stable", init = function() while true do end end, finish = function() end }', "ran longer"),
    ("", "stable.lua"), ("return 5", "stable.lua"), ("os.exit(1)", ":1:"), ("\x1bLJ\x02", "stable.lua"),
], ids=["syntax", "error", "field", "loop", "empty", "number", "os", "bytecode"])
def test_a_broken_file_keeps_the_old_policy_and_the_log_says_where(text, word):
    good = 'return { api = 1, name = "stable", route = function() return { headers = { ["x-version"] = "good" } } end }'
    path = write("stable.lua", good)
    with Node(conf=policies(path)) as node:
        write("stable.lua", text)
        reloaded(node, "policy.reload_failed")
        line = [line for line in node.log().splitlines() if "policy.reload_failed" in line][0]
        assert "stable.lua" in line and word in line, line
        assert ask(node).headers["x-version"] == "good"
        assert node.metrics()["dunlin_policy_last_reload_success"] == 0
        write("stable.lua", good.replace('"good"', '"better"'))
        reloaded(node)
        assert ask(node).headers["x-version"] == "better"
        assert node.metrics()["dunlin_policy_last_reload_success"] == 1


def test_a_node_does_not_start_with_a_broken_policy():
    path = write("broken-start.lua", 'return {\n api = 1, name = "x", route = 5 }')
    with pytest.raises(AssertionError, match="broken-start.lua"):
        Node(conf=policies(path))


# ---- Policies that misbehave when they run


BOMBS = {
    "loop": "while true do end",
    "memory": 'local t = {} for i = 1, 1e9 do t[i] = ("x"):rep(1000) .. i end',
    "error": 'error("on purpose")',
    "field": "return { nonsense = 1 }",
    "value": 'return { max_tokens = -5 }',
    "recursion": "local function f() return 1 + f() end return f()",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_policy_that_misbehaves_refuses_its_requests_and_the_node_goes_on(bomb):
    path = write(f"bomb-{bomb}.lua", 'return { api = 1, name = "bomb", admit = function(req)\n'
                 f'  if req.user == "bad" then {BOMBS[bomb]} end\nend }}')
    with Node(conf=policies(path)) as node:
        good = node.text(**GREEDY)
        for _ in range(3):
            with takes_less_than(1.5):
                r = ask(node, status=503, user="bad")
            message = is_error(r, 503, "policy_error")
            assert path not in message and "on purpose" not in message, "the reason is for the log"
            assert node.text(**GREEDY) == good
        node.wait_log(rf"bomb-{bomb}\.lua:\d")
        assert node.proc.poll() is None


def test_twenty_failures_open_the_breaker_and_a_reload_closes_it():
    path = write("flaky.lua", 'return { api = 1, name = "flaky", admit = function(req)\n'
                 '  if req.user == "bad" then error("x") end\nend }')
    with Node(conf=policies(path)) as node:
        for _ in range(25):
            ask(node, status=503, user="bad")
        ask(node, status=503) # its rule, without running it: fails closed
        reloaded(node)
        ask(node, status=200)


def test_the_configuration_may_let_a_failing_hook_pass():
    good = write("lenient.lua", 'return { api = 1, name = "lenient", admit = function(req) '
                 'if req.user == "bad" then error("x") end end }')
    with Node(conf=policies(f'{{ file = "{good}", on_admit_error = "ignore" }}')) as node:
        ask(node, status=200, user="bad")


def test_a_policy_in_the_shadow_changes_nothing():
    path = write("shadow.lua", 'return { api = 1, name = "shadow", admit = function() '
                 'return require("dunlin").reject(403, "no", "never") end, '
                 f'route = function(req, node) return {{ kv_dtype = {FP8} }} end }}')
    with Node(conf=policies(f'{{ file = "{path}", mode = "shadow" }}')) as node:
        assert ask(node).headers["x-dunlin-kv"] == "bf16"
    with Node(conf=policies(path)) as node:
        is_error(ask(node, status=403), 403, "no", words=["never"])


def test_what_a_request_got_is_not_told_unless_configured():
    with Node(conf=policies(shipped("wishes.lua"), expose=False)) as node:
        r = ask(node, dunlin={"kv": "fp8_e4m3"})
        assert not [h for h in r.headers if h.startswith("x-dunlin-")]
        node.wait_log(r"request\.done .*kv=fp8_e4m3")


def test_a_policy_sees_the_headers_that_the_configuration_names_and_no_others():
    path = write("headers.lua", 'return { api = 1, name = "headers", route = function(req)\n'
                 '  return { headers = { ["x-seen"] = (req.headers["x-app"] or "-") .. "/" .. '
                 '(req.headers["x-other"] or "-") } }\nend }\n')
    with Node(conf=policies(path, more='headers = "User-Agent, X-App",')) as node:
        with node.http() as http:
            r = http.post("/v1/completions", json=BODY, headers={"x-app": "shop", "x-other": "no"})
            assert r.status_code == 200 and r.headers["x-seen"] == "shop/-"
            assert http.post("/v1/completions", json=BODY).headers["x-seen"] == "-/-"
