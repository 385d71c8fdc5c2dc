"""The end of a node: SIGTERM lets what runs finish and takes nothing new, a second one ends it at once."""
import json
import shutil
import signal
import subprocess
import time

import h2.events
import httpx
import pytest
from serve_lib import CERT, ENV, H2, Node, is_error, start_h1, takes_less_than

BODY = {"model": "tiny", "prompt": "the sea", "temperature": 1, "seed": 2, "ignore_eos": True}


@pytest.fixture(name="node")
def _node():
    """One that may be ended by the test; whatever it does, it must end with 0."""
    with Node() as node:
        yield node


def test_an_idle_node_ends_at_once_with_0(node):
    node.text(temperature=0)
    with takes_less_than(5):
        node.stop()
    assert "node.draining" in node.log() and "node.stopped drained=true" in node.log()


def sse_text(data):
    events = [e[6:] for e in data.decode().split("\n\n") if e.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(e)["choices"][0]["text"] for e in events)


@pytest.mark.parametrize("version", ["2", "1.1"])
@pytest.mark.skipif(not shutil.which("curl"), reason="no curl") # h2 takes GOAWAY for the end of everything
def test_a_stream_finishes_completely_while_new_requests_are_refused(node, version):
    body = {**BODY, "max_tokens": 4000, "logprobs": 3}
    expected = node.complete(**{k: v for k, v in body.items() if k != "model"})["choices"][0]["text"]
    old = node.http(http2=False) # a connection that is open before the signal
    assert old.get("/readyz").status_code == 200
    with subprocess.Popen(["curl", "-sSN", "--cacert", CERT, f"--http{version}", "-H", "content-type: application/json",
                           "-d", json.dumps({**body, "stream": True}), node.url + "/v1/completions"],
                          stdout=subprocess.PIPE, env=ENV) as running:
        begin = running.stdout.readline()
        assert begin.startswith(b"data: ")
        node.signal(signal.SIGTERM)
        node.wait_log("node.draining")
        try:
            is_error(old.post("/v1/completions", json={**body, "max_tokens": 1}), 503, "draining")
        except httpx.TransportError: # its connection may be closed already
            pass
        try:
            with node.http(timeout=5) as new:
                assert new.get("/readyz").status_code == 503
        except httpx.TransportError: # or nobody listens any more
            pass
        assert node.proc.poll() is None, "it ended before its stream"
        assert sse_text(begin + running.stdout.read()) == expected
        assert running.wait(10) == 0
    old.close()
    assert node.proc.wait(10) == 0
    assert "node.stopped drained=true" in node.log()


def test_a_second_signal_ends_it_at_once(node):
    running = H2(node)
    stream = running.post("/v1/completions", {**BODY, "max_tokens": 4000, "stream": True, "logprobs": 5})
    running.wait(h2.events.DataReceived, stream)
    node.signal(signal.SIGSTOP) # so that the answer can't be finished between the two
    node.signal(signal.SIGTERM)
    node.signal(signal.SIGCONT)
    node.wait_log("node.draining")
    node.signal(signal.SIGTERM)
    with takes_less_than(2):
        assert node.proc.wait(10) == 0
    running.close()


def test_a_stream_longer_than_the_drain_timeout_is_cut():
    with Node(conf="  limits = { drain_timeout_ms = 300 },") as node:
        running = [H2(node) for _ in range(8)]
        for i, c in enumerate(running):
            s = c.post("/v1/completions", {**BODY, "max_tokens": 4000, "seed": i, "stream": True, "logprobs": 5})
            c.wait(h2.events.DataReceived, s) # then nobody reads: the streams pause and can't end
        node.signal(signal.SIGTERM)
        begin = time.monotonic()
        assert node.proc.wait(10) == 0
        assert 0.2 < time.monotonic() - begin < 3
        # Paused streams end as cancelled; on a slow machine some may still be decoding.
        log = node.log()
        cut = [log.count(x) for x in ("status=499 code=cancelled", "status=503 code=draining finish=abort")]
        assert "node.stopped" in log and log.count("request.done") == sum(cut) == 8, cut
        for c in running:
            c.close()


def test_sigint_is_as_good_as_sigterm(node):
    node.signal(signal.SIGINT)
    assert node.proc.wait(10) == 0


def test_sighup_renews_the_certificate_and_serves_on(node):
    text = node.text(temperature=0)
    node.signal(signal.SIGHUP)
    node.wait_log("tls.reloaded")
    with node.http() as http:
        assert node.text(client=http, temperature=0) == text


def test_ending_while_workers_are_busy_ends_well(node):
    """Requests that are being parsed and tokenized when their loop ends; under ASan this also tells leaks."""
    big = {"model": "tiny", "prompt": "the sea " * 100000, "max_tokens": 1}
    running = [start_h1(node, big) for _ in range(6)]
    node.signal(signal.SIGTERM)
    node.wait_log("node.draining")
    node.signal(signal.SIGTERM)
    assert node.proc.wait(10) == 0
    for s in running:
        s.close()
