"""Kimi's graph, template and tokenizer end to end: real clients against nodes that serve the trained miniatures beside the
repository (DN_SHARED_DATA/mini), on whatever device `auto` finds. Answers are compared with those of transformers
(reference.json), with what the conversations ask for, and with one another."""
import asyncio
import json
import math
import os
import re
import threading

import h2.events
import httpx
import pytest
from serve_lib import (BINARY, ENV, H2, SHARED_DATA, SOURCE, Node, command, is_error, make_key, mini_model, stream, stream_text,
                       together, write)

FAULT = os.path.join(os.path.dirname(BINARY), "tests", "libbackend_fault.so")
EVAL = os.path.join(SHARED_DATA, "mini", "chat_eval.jsonl")
PLAIN = {"chat_template_kwargs": {"thinking": False}, "temperature": 0, "max_tokens": 40}
QUESTIONS = ["What is a library?", "Count from 1 to 5.", "What is a river?", "Repeat: stone lamp paper.", "What is a horse?",
             "Count from 3 to 9."]
CONF = '  engine = { kv_memory = "96MiB", max_sequences = 32 },'
TIERS = ('  policy = { expose = true, list = { { file = "' + os.path.join(SOURCE, "policies", "tiers.lua") +
         '", params = { free_tokens_per_s = 1000000, gold_tokens_per_s = 1000000 } }, { file = "FILE" } } },')
WISHES = '  policy = { expose = true, list = { { file = "' + os.path.join(SOURCE, "policies", "wishes.lua") + '" } } },'
WEIGHTS = """
local formats = { bf16 = true, fp8 = true, int8 = true, int4 = true }
local function route(req)
  if req.user and formats[req.user] then
    return { prefill_weights = req.user, decode_weights = req.user, integrity = "tag" }
  end
end
return { api = 1, name = "weights", route = route }
"""


def reference(model, name):
    with open(os.path.join(SHARED_DATA, "mini", model, "reference.json"), encoding="utf-8") as f:
        return next(p for p in json.load(f)["prompts"] if p["name"] == name)


def needles(*numbers):
    if not os.path.exists(EVAL):
        pytest.skip(f"no {EVAL}")
    wanted = {f"needle-{n:03}" for n in numbers}
    with open(EVAL, encoding="utf-8") as f:
        return [d for d in map(json.loads, f) if d["id"] in wanted]


def ask(node, messages, key=None, http=None, **params):
    """The response to a chat; messages may be one user's text."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"model": node.model, "messages": messages, **PLAIN, **params}
    if http:
        return http.post("/v1/chat/completions", json=body, headers=node.headers(key))
    with node.http(key=key) as own:
        return own.post("/v1/chat/completions", json=body)


def at_once(node, cases):
    """The responses to chats [(text, key, parameters)] sent in one go on one connection: a GPU answers a short one before
    another connection is open."""
    async def go():
        async with node.http_async() as http:
            await http.get("/livez")
            return await asyncio.gather(*[http.post("/v1/chat/completions", headers=node.headers(key), json={
                "model": node.model, "messages": [{"role": "user", "content": text}], **PLAIN, "logprobs": True,
                "ignore_eos": True, **params}) for text, key, params in cases])
    return asyncio.run(go())


def choices(responses):
    """Texts and log-probabilities, to be compared bit for bit; all must have succeeded."""
    assert [r.status_code for r in responses] == [200] * len(responses), [r.text for r in responses]
    return [r.json()["choices"] for r in responses]


def alone_and_at_once(node, cases):
    """Asks one after the other, then all at once in two orders; the same must come, out of steps that mix formats."""
    mixed = "dunlin_mixed_kv_steps_total"
    before = node.metrics()[mixed]
    alone = [choices(at_once(node, [c]))[0] for c in cases]
    assert node.metrics()[mixed] == before, "one at a time"
    for step in (1, -1):
        assert choices(at_once(node, cases[::step])) == alone[::step]
    assert node.metrics()[mixed] - before >= 20, "they did not share steps"
    return alone


@pytest.fixture(scope="module", name="keys")
def _keys():
    """{tier: key} and the path of their file."""
    keys, entries = {}, []
    for tier in ("free", "gold"):
        keys[tier], entry = make_key("kimi-" + tier)
        at = entry.index("tenant")
        entries.append(entry[:at] + f'labels = {{ tier = "{tier}" }}, ' + entry[at:] if "labels" not in entry else
                       entry.replace("labels = {}", f'labels = {{ tier = "{tier}" }}'))
    return keys, write("kimi-keys.lua", "return {\n" + "\n".join(entries) + "\n}\n")


@pytest.fixture(scope="module", name="node")
def _node(keys):
    policy = write("kimi-weights.lua", WEIGHTS)
    conf = CONF + TIERS.replace('"FILE"', f'"{policy}", on_route_error = "reject"')
    with Node("--keys", keys[1], conf=conf, model=mini_model("mini-kimi"), name="kimi", key=keys[0]["gold"]) as node:
        yield node


@pytest.fixture(scope="module", name="int4")
def _int4():
    with Node(conf=CONF + WISHES, model=mini_model("mini-kimi-int4"), name="kimi-int4") as node:
        yield node


# ---- What transformers says


def test_the_template_and_the_tokenizer_are_kimis(node):
    for name in ("chat", "long"):
        p = reference("mini-kimi", name)
        ids = node.tokens(messages=p["messages"], chat_template_kwargs={"thinking": p["thinking"]})
        assert ids == p["token_ids"], name
    assert node.tokens(prompt=reference("mini-kimi", "text")["text"]) == reference("mini-kimi", "text")["token_ids"]


def continues_as_transformers(node, model):
    """Greedy texts are transformers' as far as its choices are clear (a margin beyond what 16-bit arithmetic moves)."""
    seen = 0
    for name in ("text", "chat", "long"):
        p = reference(model, name)
        greedy, margin = p["greedy"]["token_ids"], p["greedy"]["margin_to_second"]
        n = next((i for i, m in enumerate(margin) if m < 0.6), len(greedy))
        shown = [i for i in greedy[:n] if i != 8130] # <|im_end|> is not shown
        want = node.post("/detokenize", {"model": node.model, "tokens": shown}, headers=node.headers()).json()["prompt"]
        r = node.complete(p["token_ids"], temperature=0, max_tokens=n, headers=node.headers())
        assert r["choices"][0]["text"] == want and want, name
        seen += n
    assert seen > 15


def test_greedy_texts_are_those_of_transformers(node):
    continues_as_transformers(node, "mini-kimi")


def test_log_probabilities_are_those_of_transformers(node):
    p = reference("mini-kimi", "text")
    r = node.complete(p["token_ids"], echo=True, logprobs=20, max_tokens=1, temperature=0, headers=node.headers())
    r = r["choices"][0]["logprobs"]
    differences = []
    for position, at in p["positions"].items():
        top = r["top_logprobs"][int(position) + 1]
        best = node.post("/detokenize", {"model": "kimi", "tokens": [at["ids"][0]]}, headers=node.headers()).json()["prompt"]
        ours, theirs = sorted(top.values(), reverse=True), at["logits"]
        assert theirs[0] - theirs[1] < 0.6 or top[best] == ours[0]
        assert sum(map(math.exp, ours)) <= 1.0001
        differences += [abs((ours[i] - ours[0]) - (theirs[i] - theirs[0])) for i in range(len(ours))]
    assert len(differences) > 40 and sum(differences) / len(differences) < 0.15, differences


# ---- Chats with the openai package and httpx, over HTTP/2


def test_a_chat_ends_where_the_model_ends_its_turn(node):
    with node.openai() as client:
        body = dict(model="kimi", messages=[{"role": "user", "content": "Count from 1 to 5."}], temperature=0, max_tokens=60,
                    extra_body={"chat_template_kwargs": {"thinking": False}})
        r = client.chat.completions.create(**body)
        assert r.choices[0].message.content == "1, 2, 3, 4, 5." and r.choices[0].finish_reason == "stop"
        counted = node.tokens(messages=body["messages"], chat_template_kwargs={"thinking": False})
        assert r.usage.prompt_tokens == len(counted) and r.usage.total_tokens == len(counted) + r.usage.completion_tokens
        shown = node.tokens(prompt=r.choices[0].message.content, add_special_tokens=False)
        assert r.usage.completion_tokens == len(shown) + 1, "the stop token counts and is not shown"
        chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == r.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == r.usage.completion_tokens
        assert chunks[-2].choices[0].finish_reason == "stop"
        cut = client.chat.completions.create(**{**body, "max_tokens": 4})
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 4
        stopped = client.chat.completions.create(**body, stop=", 4")
        assert stopped.choices[0].message.content == "1, 2, 3" and stopped.choices[0].finish_reason == "stop"


def test_thoughts_are_asked_for_by_the_template(node):
    thought = ask(node, "Count from 1 to 5.", chat_template_kwargs={"thinking": True}, max_tokens=60).json()
    text = thought["choices"][0]["message"]["content"]
    assert "</think>" in text and text.endswith("1, 2, 3, 4, 5."), text


def test_a_seed_gives_the_same_answer_and_the_stream_says_it_too(node):
    body = dict(temperature=1, seed=5, max_tokens=48, ignore_eos=True)
    texts = [node.text("In the morning", headers=node.headers(), **body) for _ in range(2)]
    assert texts[0] == texts[1] != node.text("In the morning", headers=node.headers(), **{**body, "seed": 6})
    with node.http() as http:
        assert http.get("/livez").http_version == "HTTP/2"
        events = stream(http, "/v1/completions", {"model": "kimi", "prompt": "In the morning", **body})
        assert stream_text(events) == texts[0]
        events = stream(http, "/v1/chat/completions", {"model": "kimi", "messages": [{"role": "user", "content": "Hello"}],
                                                       **PLAIN, "logprobs": True, "top_logprobs": 3})
        tokens = [t for e in events if e["choices"] and e["choices"][0].get("logprobs")
                  for t in e["choices"][0]["logprobs"]["content"]]
        assert tokens and all(t["logprob"] == max(a["logprob"] for a in t["top_logprobs"]) <= 0 for t in tokens)


def test_needles_in_long_prompts_are_found_and_found_again_in_the_cache(node):
    page = node.page_tokens()
    for d in needles(2, 5, 16, 31, 38, 53): # 334 to 2,593 tokens
        expect, used = d["expect"]["content"], []
        for _ in range(2):
            r = ask(node, d["messages"]).json()
            assert r["choices"][0]["message"]["content"] == expect and r["choices"][0]["finish_reason"] == "stop", d["id"]
            used.append(r["usage"])
        n, cached = used[1]["prompt_tokens"], [u["prompt_tokens_details"]["cached_tokens"] for u in used]
        assert n > 300 and n - page <= cached[1] < n and cached[1] % page == 0, (n, cached)
        assert cached[0] < cached[1], "the first time only what all conversations begin with is there"


def test_a_cached_prefix_changes_no_probability_and_formats_do_not_share_one(node, keys):
    text = " ".join(f"The bird number {i} sits on the grey stone by the sea." for i in range(30)) + " What sits there?"
    first = ask(node, text, logprobs=True, top_logprobs=5).json()
    again = ask(node, text, logprobs=True, top_logprobs=5).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert again["choices"] == first["choices"]
    other = ask(node, text, key=keys[0]["free"])
    assert other.headers["x-dunlin-kv"] == "fp8_e4m3"
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a page of BF16 is no page of FP8"
    follow = [{"role": "user", "content": text}, {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
              {"role": "user", "content": "Count from 1 to 5."}]
    r = ask(node, follow).json()
    assert r["usage"]["prompt_tokens_details"]["cached_tokens"] > 300, "the next turn of a conversation"


# ---- Tiers in one batch


def test_tiers_with_kv_of_their_own_share_steps_and_answer_as_if_alone(node, keys):
    cases = [(q, keys[0][tier], {"max_tokens": 160}) for q in QUESTIONS for tier in ("free", "gold")]
    before = node.metrics()
    alone = alone_and_at_once(node, cases)
    assert all(a != b for a, b in zip(alone[::2], alone[1::2])), "FP8 and BF16 give the same probabilities"
    after = node.metrics()
    for kv in ("fp8_e4m3", "bf16"):
        served = f'dunlin_requests_served_total{{kv="{kv}",integrity="tag"}}'
        assert after[served] - before.get(served, 0) == 3 * len(QUESTIONS), kv
    assert after["dunlin_integrity_violations_total"] == 0


def test_a_policy_decides_weights_among_those_that_are_there(node):
    plain = ask(node, "Hello", max_tokens=4)
    held = plain.headers["x-dunlin-weights"]
    assert held == "bf16", "auto takes the file's own"
    r = ask(node, "Hello", max_tokens=4, user=held)
    assert r.status_code == 200 and (r.headers["x-dunlin-weights"], r.headers["x-dunlin-integrity"]) == (held, "tag")
    assert r.json()["choices"] == plain.json()["choices"]
    refused = ask(node, "Hello", max_tokens=4, user="int8")
    assert refused.status_code == 503, refused.text
    node.wait_log(r"kimi-weights\.lua.*int8")


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_weights_in_fewer_bits_answer_as_well(keys, weights):
    with Node("--weights", weights, "--keys", keys[1], conf=CONF + TIERS.replace(', { file = "FILE" }', ""),
              model=mini_model("mini-kimi"), name="kimi", key=keys[0]["gold"]) as node:
        r = ask(node, "Count from 1 to 5.")
        assert r.headers["x-dunlin-weights"] == weights
        assert r.json()["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5."
        d = needles(53)[0]
        assert ask(node, d["messages"]).json()["choices"][0]["message"]["content"] == d["expect"]["content"]


# ---- INT4 experts


def test_int4_experts_answer_as_transformers_and_in_both_formats(int4):
    continues_as_transformers(int4, "mini-kimi-int4")
    for d in needles(31, 53):
        for kv in ("bf16", "fp8_e4m3"):
            r = ask(int4, d["messages"], dunlin={"kv": kv})
            assert r.headers["x-dunlin-kv"] == kv
            assert r.json()["choices"][0]["message"]["content"] == d["expect"]["content"], (d["id"], kv)
    alone_and_at_once(int4, [(q, None, {"max_tokens": 120, "dunlin": {"kv": kv}}) for q in QUESTIONS[:3]
                             for kv in ("bf16", "fp8_e4m3")])


def test_the_command_line_says_what_the_node_says(int4):
    done = command("chat", mini_model("mini-kimi-int4"), "-p", "Count from 1 to 5.", "--temperature", "0", "--max-tokens", "24",
                   "--ctx", "1024", "--quiet")
    expected = int4.chat("Count from 1 to 5.", temperature=0, max_tokens=24)["choices"][0]["message"]["content"]
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr


# ---- Many at once, and those that leave


def test_thirty_two_clients_at_once_get_what_each_gets_alone(node, keys):
    """Half of them stream; formats, lengths, seeds and temperatures are mixed."""
    start = threading.Barrier(32)

    def one(i, together_with=None):
        body = {"model": "kimi", "prompt": f"The number {i} is " * (1 + i % 7), "max_tokens": 64 + i % 9, "seed": i,
                "temperature": i % 3 / 2, "ignore_eos": True}
        with node.http(key=keys[0][("free", "gold")[i % 2]]) as http:
            http.get("/livez")
            if together_with:
                together_with.wait()
            if i % 4 < 2:
                return stream_text(stream(http, "/v1/completions", body))
            return node.complete(client=http, **{k: v for k, v in body.items() if k != "model"})["choices"][0]["text"]

    steps = [node.metrics()["dunlin_steps_total"]]
    alone = [one(i) for i in range(32)]
    steps.append(node.metrics()["dunlin_steps_total"])
    assert together([lambda i=i: one(i, start) for i in range(32)]) == alone
    after = node.metrics()
    assert after["dunlin_steps_total"] - steps[1] < (steps[1] - steps[0]) * 0.8, "hardly a step was shared"
    assert after["dunlin_preemptions_total"] == after["dunlin_integrity_violations_total"] == 0


def test_clients_that_leave_free_their_pages_and_the_others_stay_right(node, keys):
    node.wait_metric("dunlin_requests_running", 0)
    body = {"model": "kimi", "prompt": "The sea", "temperature": 0, "max_tokens": 120, "ignore_eos": True}
    expected = node.text("The sea", headers=node.headers(), **{k: v for k, v in body.items() if k not in ("model", "prompt")})
    connection = H2(node)
    good = connection.post("/v1/completions", body, key=keys[0]["gold"])
    gone = [connection.post("/v1/completions", {**body, "max_tokens": 3000, "stream": True, "prompt": f"Bird {i}"},
                            key=keys[0][("free", "gold")[i % 2]]) for i in range(6)]
    for s in gone:
        connection.wait(h2.events.DataReceived, s)
    assert node.metrics()["dunlin_kv_usage_ratio"] > 0
    for s in gone:
        connection.reset(s)
    assert json.loads(connection.body(good))["choices"][0]["text"] == expected
    connection.close()
    node.wait_metric("dunlin_requests_running", 0, timeout=5)
    assert node.metrics()["dunlin_kv_usage_ratio"] == 0
    node.wait_log(r"request\.done .*status=499 .*finish=abort", 6)
    with node.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={**body, "max_tokens": 3000}, timeout=0.1)
    node.wait_metric("dunlin_requests_running", 0, timeout=5)


@pytest.mark.skipif(not os.path.exists(FAULT), reason="no library with the fault beside the program")
def test_a_page_of_someone_else_ends_one_request_and_no_other(monkeypatch):
    """In a batch of both formats one page table goes wrong: on the GPU, where the node serves on one (device auto)."""
    cases = [(q, None, {"max_tokens": 160, "dunlin": {"kv": ("bf16", "fp8_e4m3")[i % 2]}}) for i, q in enumerate(QUESTIONS)]
    conf, model = CONF + WISHES, mini_model("mini-kimi")
    with Node(conf=conf, model=model, name="kimi") as plain:
        alone = [choices(at_once(plain, [c]))[0] for c in cases]
        on_gpu = not re.search(r"^device .*\bthreads?\b", plain.log(), re.M)
    if on_gpu:
        monkeypatch.setitem(ENV, "DN_TEST_FAULT_IN", ENV.get("DN_CUDA_LIBRARY") or
                            os.path.join(os.path.dirname(BINARY), "libdunlin-cuda.so"))
    monkeypatch.setitem(ENV, "ASAN_OPTIONS", ENV.get("ASAN_OPTIONS", "") + ":detect_odr_violation=0") # it links kernels, too
    with Node("--device", FAULT, conf=conf, model=model, name="kimi") as node:
        got = at_once(node, cases)
        bad = [i for i, r in enumerate(got) if r.status_code != 200]
        assert len(bad) == 1, [r.status_code for r in got]
        is_error(got[bad[0]], 500, "kv_integrity")
        others = [i for i in range(len(cases)) if i not in bad]
        assert choices([got[i] for i in others]) == [alone[i] for i in others], "the others are as if alone"
        node.wait_log(r"integrity\.violation .*kind=tag")
        metrics = node.metrics()
        assert metrics["dunlin_integrity_violations_total"] == metrics["dunlin_kv_quarantined_pages"] == 1
        assert metrics["dunlin_requests_running"] == metrics["dunlin_kv_usage_ratio"] == 0
        assert metrics["dunlin_mixed_kv_steps_total"] > 0
        assert choices(at_once(node, cases)) == alone, "and all go on"
