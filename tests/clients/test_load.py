"""More than fits at once: everything is answered rightly, waits in order, or is refused as it should."""
import asyncio
import json
import socket

import httpx
import pytest
from serve_lib import Node, is_error, start_h1, stream, stream_text

BODY = {"model": "tiny", "ignore_eos": True, "temperature": 1}


def answers(node, bodies, http2=True, clients=4):
    """The texts of many requests at once, spread over a few connections (httpx opens more for HTTP/1.1)."""
    async def go():
        pools = [node.http_async(http2=http2, timeout=120) for _ in range(clients)]
        try:
            return await asyncio.gather(*[pools[i % clients].post("/v1/completions", json=b)
                                          for i, b in enumerate(bodies)])
        finally:
            for p in pools:
                await p.aclose()

    results = asyncio.run(go())
    assert [r.status_code for r in results] == [200] * len(bodies), [r.text[:200] for r in results if r.status_code != 200]
    return [r.json()["choices"][0]["text"] for r in results]


def test_more_than_memory_holds_is_answered_as_if_alone():
    """About ten of the sixty fit at once."""
    bodies = [{**BODY, "prompt": f"flock {i} over the grey sea " * (1 + i % 20), "max_tokens": 100 + 7 * i, "seed": i}
              for i in range(60)]
    with Node("--kv-memory", "2MiB", "--ctx", "2048") as node:
        alone = [answers(node, [b])[0] for b in bodies[::6]]
        got = answers(node, bodies)
        assert got[::6] == alone
        metrics = node.metrics()
        assert metrics["dunlin_requests_running"] == metrics["dunlin_kv_usage_ratio"] == 0
        assert metrics["dunlin_integrity_violations_total"] == 0
    with Node(conf="  loops = 3,\n  engine = { threads = 2, max_sequences = 64 },") as wide:
        assert answers(wide, bodies, http2=False, clients=8) == got, "another memory, more loops, HTTP/1.1: same answers"


def test_a_long_echo_with_logprobs_is_streamed_whole():
    """Its first event alone is more than what a slow reader may leave unread."""
    body = {**BODY, "prompt": [100 + i % 60 for i in range(3000)], "echo": True, "logprobs": 20, "max_tokens": 4,
            "temperature": 0}
    with Node() as node:
        whole = node.complete(**{k: v for k, v in body.items() if k != "model"})["choices"][0]
        assert len(whole["logprobs"]["tokens"]) == 3004
        for http2 in (True, False):
            with node.http(http2=http2) as client:
                events = stream(client, "/v1/completions", body)
            assert stream_text(events) == whole["text"]
            lists = [e["choices"][0]["logprobs"] for e in events if e["choices"] and e["choices"][0]["logprobs"]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [v for part in lists for v in part[name]] == whole["logprobs"][name]
        assert len(json.dumps(whole)) > 1 << 20
        metrics = node.metrics()
        assert metrics["dunlin_http_cut_slow_total"] == 0
        assert metrics["dunlin_requests_running"] == metrics["dunlin_kv_usage_ratio"] == 0


def test_large_bodies_are_answered_refused_and_dropped():
    """They are parsed, and their trees are freed, on workers."""
    good = {**BODY, "prompt": "a", "max_tokens": 8, "temperature": 0}
    head = {"content-type": "application/json"}
    bodies = [json.dumps(good).encode() + b" " * 200000,
              json.dumps({**good, "prompt": [100] * 400000}).encode(),
              json.dumps({**good, "model": "no", "prompt": [100] * 400000}).encode(),
              json.dumps({**good, "prompt": [100] * 400000 + ["x"]}).encode()]
    with Node() as node:
        text = node.text("a", max_tokens=8, temperature=0, ignore_eos=True)

        async def go():
            async with node.http_async(http2=False, timeout=120) as client:
                async def one(i):
                    if i % 8 >= 4: # gone while a worker has it, or before
                        try:
                            await asyncio.wait_for(client.post("/v1/completions", content=bodies[i % 4], headers=head),
                                                   0.02 * i)
                        except (asyncio.TimeoutError, httpx.TransportError):
                            pass
                        return None
                    return await client.post("/v1/completions", content=bodies[i % 4], headers=head)
                return await asyncio.gather(*[one(i) for i in range(32)])

        for i, r in enumerate(asyncio.run(go())):
            if r is None:
                continue
            if i % 4 == 0:
                assert r.status_code == 200 and r.json()["choices"][0]["text"] == text
            elif i % 4 == 2:
                is_error(r, 404, "model_not_found")
            else:
                assert r.status_code == 400
        assert node.text("a", max_tokens=8, temperature=0, ignore_eos=True) == text
        assert node.metrics()["dunlin_requests_running"] == 0


def test_a_full_queue_is_503_with_retry_after():
    conf = "  engine = { max_sequences = 1, threads = 1 },\n  queue = { limit = 2 },"
    with Node(conf=conf) as node:
        running = start_h1(node, {**BODY, "prompt": "a", "max_tokens": 4000, "stream": True})
        assert running.recv(100)
        waiting = [start_h1(node, {**BODY, "prompt": "a", "max_tokens": 1}) for _ in range(2)]
        node.wait_metric("dunlin_requests_waiting", 2)
        r = node.post("/v1/completions", {**BODY, "prompt": "a", "max_tokens": 1})
        is_error(r, 503, "overloaded")
        assert int(r.headers["retry-after"]) >= 1
        assert node.metrics()["dunlin_requests_served_total"] == 0, "what was refused was not served"
        running.close()
        for s in waiting:
            assert s.recv(100).startswith(b"HTTP/1.1 200")
            s.close()


def test_who_waits_too_long_is_told_so():
    conf = "  engine = { max_sequences = 1, threads = 1 },\n  queue = { timeout_ms = 300 },"
    with Node(conf=conf) as node:
        running = start_h1(node, {**BODY, "prompt": "a", "max_tokens": 4000, "stream": True, "logprobs": 5})
        assert running.recv(100) # and nothing more is read: it pauses and stays
        is_error(node.post("/v1/completions", {**BODY, "prompt": "a", "max_tokens": 1}), 503, "queue_timeout")
        running.close()
        assert node.text()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_cleartext_is_served_where_it_is_asked_for():
    port = free_port()
    with Node("--cleartext", f"127.0.0.1:{port}") as node:
        expected = node.text(temperature=0)
        for http2 in (False, True): # with HTTP/2 by prior knowledge
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", http1=not http2, http2=http2, trust_env=False) as http:
                r = http.post("/v1/completions", json={"model": "tiny", "prompt": "the sea", "max_tokens": 32,
                                                       "temperature": 0})
                assert r.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
                assert r.json()["choices"][0]["text"] == expected
        assert f"http://127.0.0.1:{port}" in node.log()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{node.port}/livez", trust_env=False) # HTTPS's port speaks nothing else


def test_many_connections_come_and_go():
    with Node() as node:
        for i in range(150):
            s = start_h1(node, {**BODY, "prompt": "a", "max_tokens": 1 + i % 3, "seed": i})
            data = b""
            while b"\r\n\r\n" not in data:
                data += s.recv(65536)
            assert data.startswith(b"HTTP/1.1 200")
            s.close()
        node.wait_metric("dunlin_http_connections", 1) # the one that asks
        assert json.loads(node.post("/tokenize", {"prompt": "a"}).text)["count"] == 1
