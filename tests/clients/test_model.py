"""What only a trained model can show: that the answers make sense. Few and short; skipped without DN_MODEL."""
import signal
import socket
import ssl
import subprocess
import time

import httpx
import pytest
from serve_lib import BINARY, CERT, ENV, REAL_MODEL, Node, command, is_error, stream, stream_text, together

pytestmark = pytest.mark.skipif(not REAL_MODEL, reason="DN_MODEL is not set (./dev test sets it)")
QUESTION = "What is gravity?"


@pytest.fixture(scope="module", name="node")
def _node():
    with Node(model=REAL_MODEL, conf='  engine = { kv_memory = "256 MiB" },\n  policy = { expose = true, list = { { file = "'
              + __file__.replace("tests/clients/test_model.py", "policies/wishes.lua") + '" } } },', timeout=200) as node:
        yield node


def test_a_chat_answers_the_question(node):
    with node.openai(timeout=120) as client:
        r = client.chat.completions.create(model="real", messages=[{"role": "user", "content": QUESTION}], max_tokens=24,
                                           temperature=0)
        assert "gravity is" in r.choices[0].message.content.lower(), r.choices[0].message.content
        chunks = client.chat.completions.create(model="real", messages=[{"role": "user", "content": QUESTION}],
                                                max_tokens=24, temperature=0, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == r.choices[0].message.content


def test_a_text_is_continued_and_its_likely_word_is_likely(node):
    r = node.complete("The capital of France is", temperature=0, max_tokens=4, logprobs=3)["choices"][0]
    assert r["text"].startswith(" Paris") and r["logprobs"]["token_logprobs"][0] > -1.5
    scored = {}
    for word in ("Paris", "purple"):
        lp = node.complete("The capital of France is " + word, max_tokens=0, echo=True, logprobs=0)["choices"][0]
        scored[word] = lp["logprobs"]["token_logprobs"][5]
    assert scored["Paris"] > scored["purple"] + 3, scored


def test_a_stop_string_cuts_real_text(node):
    body = dict(prompt="Once upon a time", temperature=0, max_tokens=24)
    full = node.text(**body)
    stop = full[20:29]
    assert node.text(**body, stop=stop) == full[:full.index(stop)]


def test_characters_of_several_bytes_arrive_whole(node):
    body = {"model": "real", "prompt": ("один два три четыре, " * 6), "max_tokens": 24, "temperature": 0}
    with node.http(timeout=120) as http:
        text = stream_text(stream(http, "/v1/completions", body))
    assert any(ord(c) > 127 for c in text) and "\ufffd" not in text, text


def test_both_kv_formats_make_sense_in_one_batch(node):
    def ask(kv):
        with node.http(timeout=120) as http:
            r = http.post("/v1/chat/completions", json={"model": "real", "max_tokens": 16, "temperature": 0,
                          "messages": [{"role": "user", "content": QUESTION}], "dunlin": {"kv": kv}})
            assert r.headers["x-dunlin-kv"] == kv
            return r.json()["choices"][0]["message"]["content"]

    alone = [ask("bf16"), ask("fp8_e4m3")]
    assert together([lambda: ask("bf16"), lambda: ask("fp8_e4m3"), lambda: ask("bf16")]) == [*alone, alone[0]]
    assert all("gravity" in text.lower() for text in alone), alone


def test_chat_on_the_command_line_says_the_same(node):
    done = command("chat", REAL_MODEL, "-p", QUESTION, "--temperature", "0", "--max-tokens", "16", "--ctx", "1024",
                   "--quiet", timeout=200)
    expected = node.chat(QUESTION, temperature=0, max_tokens=16)["choices"][0]["message"]["content"]
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr


def test_a_node_that_loads_says_so_and_serves_its_metrics(node):
    assert node.proc.poll() is None # its certificate is the other's
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = ssl.create_default_context(cafile=CERT)
    seen, ready = [], []

    def watch():
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, trust_env=False, timeout=30) as http:
            while not ready:
                try:
                    r = http.get("/readyz")
                    if r.status_code == 503:
                        seen.append(r.json())
                        assert http.get("/livez").status_code == http.get("/metrics").status_code == 200
                        refused = http.post("/v1/completions", json={"model": "real", "prompt": "a", "max_tokens": 1})
                        if refused.status_code != 200:
                            is_error(refused, 503, "not_ready")
                except httpx.TransportError:
                    time.sleep(0.002)

    def begin():
        try:
            return Node("--listen", f"127.0.0.1:{port}", "--ctx", "512", model=REAL_MODEL, timeout=200)
        finally:
            ready.append(True)

    with together([begin, watch])[0] as other:
        assert seen and all(s["status"] == "loading" and 0 <= s["progress"] <= 1 for s in seen), seen
        assert other.post("/v1/completions", {"model": "real", "prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_loads_ends_at_once_when_told(node, number):
    assert node.proc.poll() is None # its certificate is the other's
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = [BINARY, "serve", REAL_MODEL, "--listen", f"127.0.0.1:{port}", "--weights", "fp8", "--ctx", "512"]
    with subprocess.Popen(args, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as loading:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert loading.poll() is None and time.monotonic() < end
                time.sleep(0.001)
        loading.send_signal(number)
        log = loading.communicate(timeout=30)[1]
    assert loading.returncode == 0, log
    assert "node.stopped_loading" in log and "ready in" not in log, log
