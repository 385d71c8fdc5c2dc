"""Keys, tenants, and what the log does and does not hold."""
import json
import re

import pytest
from serve_lib import Node, command, is_error, make_key, stream, tiny_model, write

CANARY = "zebra-canary-7731"
LONG = "one bird runs along the shore and " * 12
BODY = {"model": "tiny", "prompt": "the sea", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module", name="keys")
def _keys():
    """{name: key}; one file with all of them."""
    made = {name: make_key(name, tenant) for name, tenant in (("a1", "acme"), ("a2", "acme"), ("b1", "bolt"))}
    path = write("keys.lua", "return {\n" + "\n".join(entry for _, entry in made.values()) + "\n}\n")
    for key, _ in made.values():
        with open(path, encoding="utf-8") as f:
            assert key not in f.read(), "the file must hold hashes alone"
    return {"path": path, **{name: key for name, (key, _) in made.items()}}


@pytest.fixture(scope="module", name="node")
def _node(keys):
    with Node("--keys", keys["path"], "--log", "debug", key=keys["a1"]) as node:
        yield node


def test_made_keys_are_long_and_listed_without_themselves(keys):
    assert all(re.fullmatch(r"dn-[A-Za-z0-9]{43}", keys[n]) for n in ("a1", "a2", "b1"))
    done = command("key", "list", keys["path"])
    assert done.returncode == 0 and "acme" in done.stdout and "bolt" in done.stdout
    assert not any(keys[n] in done.stdout for n in ("a1", "a2", "b1"))


def test_the_list_of_keys_is_also_one_json_document(keys):
    table = command("key", "list", keys["path"]).stdout.splitlines()[1:]
    listed = json.loads(command("key", "list", keys["path"], "--json").stdout)
    assert [k["id"] for k in listed] == [line.split()[0] for line in table]
    assert all(set(k) == {"id", "tenant", "labels"} for k in listed)


def test_without_a_key_or_with_a_wrong_one_everything_is_401(node, keys):
    with node.http() as http:
        http.headers.pop("authorization")
        for headers in ({}, {"authorization": "Bearer dn-wrong"}, {"authorization": keys["a1"]},
                        {"authorization": "Basic " + keys["a1"]}, {"authorization": "Bearer " + keys["a1"] + "x"},
                        {"authorization": "Bearer " + keys["a1"][:-1]}, {"authorization": "Bearer "}):
            for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/completions"),
                                 ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize")):
                r = http.request(method, path, headers=headers, json=BODY if method == "POST" else None)
                is_error(r, 401, "invalid_api_key")
                assert r.headers["www-authenticate"] == "Bearer"
        for path in ("/livez", "/readyz", "/health", "/version", "/metrics"):
            assert http.get(path).status_code == 200, path
        for name in ("a1", "a2", "b1"):
            assert http.get("/v1/models", headers={"authorization": "bearer " + keys[name]}).status_code == 200
    assert node.openai(key=keys["b1"]).models.list().data[0].id == "tiny"


def test_an_unknown_path_without_a_key_tells_nothing_of_the_node(node):
    with node.http() as http:
        http.headers.pop("authorization")
        assert "tiny" not in http.get("/v1/nothing").text
        assert "tiny" not in http.post("/v1/completions", json={**BODY, "model": "x"}).text


def cached(node, key, prompt):
    with node.http(key=key) as http:
        return node.complete(prompt, client=http, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_do_not_share_cached_prefixes(node, keys):
    assert cached(node, keys["a1"], LONG) == 0
    assert cached(node, keys["b1"], LONG) == 0, "another tenant's prefix"
    assert cached(node, keys["a2"], LONG) > 0, "another key of the same tenant"
    assert cached(node, keys["b1"], LONG) > 0, "its own by now"


@pytest.mark.parametrize("share,shared", [("all", True), ("none", False)])
def test_the_configuration_says_who_shares(keys, share, shared):
    with Node("--keys", keys["path"], conf=f'  cache = {{ share = "{share}" }},', key=keys["a1"]) as node:
        assert cached(node, keys["a1"], LONG) == 0
        assert (cached(node, keys["b1"], LONG) > 0) == shared
        assert (cached(node, keys["a1"], LONG) > 0) == shared


def test_metrics_may_be_closed_to_the_public(keys):
    with Node("--keys", keys["path"], conf="  metrics = { public = false },", key=keys["a1"]) as node:
        with node.http() as http:
            http.headers.pop("authorization")
            assert http.get("/metrics").status_code == 200, "loopback may always read them"


def test_listening_elsewhere_without_keys_is_refused(keys):
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:8443"):
        done = command("serve", tiny_model(), "--listen", address, timeout=20)
        assert done.returncode == 2 and "keys" in done.stderr and "https://" not in done.stderr, done.stderr
    empty = write("empty-keys.lua", "return {}")
    done = command("serve", tiny_model(), "--listen", "0.0.0.0:0", "--keys", empty, timeout=20)
    assert done.returncode == 2 and "dunlin key add" in done.stderr, done.stderr
    assert command("serve", tiny_model(), "--listen", "0.0.0.0:0", "--keys", keys["path"], "--check").returncode == 0


def test_a_wrong_keys_file_is_refused_with_file_and_line():
    for text, words in (('return { { hash = "sha256:12", tenant = "t" } }', ["hash"]),
                        ('return {\n { hash = "sha256:' + "0" * 64 + '" } }', [":2:", "tenant"]),
                        ('return { { hash = "sha256:' + "0" * 64 + '", tenant = "t", lables = {} } }', ["labels"]),
                        ('return { { hash = "sha256:' + "0" * 64 + '", tenant = "t" },\n{ hash = "sha256:' + "0" * 64 +
                         '", tenant = "u" } }', [":2:"]), ("return { { key = 'x' } }", ["key"])):
        path = write("bad-keys.lua", text)
        done = command("serve", tiny_model(), "--keys", path, "--check")
        assert done.returncode == 2 and path in done.stderr, done.stderr
        assert all(w in done.stderr for w in words), (words, done.stderr)


# ---- The log


def test_nothing_that_a_client_sends_in_confidence_is_in_the_log(node):
    """At the most talkative level: prompts, answers, keys, whatever becomes of the request."""
    def refused(**params):
        return node.post("/v1/completions", {**BODY, **params})

    with node.http() as http:
        for key in (CANARY, "dn-" + CANARY):
            is_error(http.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"}), 401)
        http.get("/" + CANARY)
        http.post("/v1/completions", content=b'{"' + CANARY.encode(), headers={"content-type": "application/json"})
        answer = node.complete(f"{CANARY} the sea " * 3, client=http, temperature=0)["choices"][0]["text"]
        stream(http, "/v1/completions", {**BODY, "prompt": CANARY})
    node.chat(CANARY)
    for params in ({"stop": [CANARY] * 100}, {"n": 2, "prompt": CANARY}, {"prompt": CANARY * 2000}, {"user": CANARY},
                   {"metadata": {CANARY: CANARY}}, {"logit_bias": {CANARY: 1}}, {"seed": CANARY}):
        refused(**params)
    node.post("/tokenize", {"prompt": CANARY})
    node.post("/detokenize", {"tokens": [CANARY]})
    log = node.log()
    assert CANARY not in log and node.key not in log
    assert answer.strip() not in log
    assert CANARY not in "\n".join(node.metrics())


def test_each_request_has_one_line_that_tells_what_became_of_it(node, keys):
    for i, (params, words) in enumerate((
            ({}, ["status=200", "finish=length", "prompt=4", "out=4", "kv=bf16", "integrity=tag", "tenant=acme",
                  "ttft_ms=", "total_ms=", "queue_ms="]),
            ({"stream": True}, ["status=200", "finish=length"]), ({"n": 2}, ["status=400", "code=unsupported_parameter"]),
            ({"model": "x"}, ["status=404", "code=model_not_found"]),
            ({"prompt": "x" * 20000}, ["status=400", "code=context_length_exceeded"]))):
        with node.http(key=keys["a2"]) as http:
            http.post("/v1/completions", json={**BODY, **params}, headers={"x-request-id": f"line-{i}"})
        node.wait_log(rf"request\.done id=line-{i} ")
        lines = [line for line in node.log().splitlines() if f"id=line-{i} " in line]
        assert len(lines) == 1 and all(w in lines[0] for w in words), lines
        assert re.match(r"20\d\d-\d\d-\d\dT[\d:.]+Z info request\.done ", lines[0])


def test_a_log_line_in_json_is_json(keys):
    with Node("--keys", keys["path"], conf='  log = { format = "json" },', key=keys["a1"]) as node:
        node.complete()
        node.wait_log("request.done")
        lines = [json.loads(line) for line in node.log().splitlines() if line.startswith("{")]
    done = [line for line in lines if "request.done" in line.values()]
    assert len(done) == 1 and done[0]["status"] == 200 and done[0]["tenant"] == "acme"
