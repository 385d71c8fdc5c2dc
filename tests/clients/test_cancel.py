"""A client that goes away frees what it had, and nobody else notices."""
import asyncio
import json
import socket
import struct
import threading

import h2.events
import httpx
import openai
import pytest
from serve_lib import H2, Node, start_h1

LONG = {"model": "tiny", "prompt": "the sea", "max_tokens": 4000, "ignore_eos": True, "temperature": 1, "seed": 1}


@pytest.fixture(scope="module", name="node")
def _node():
    with Node() as node:
        yield node


@pytest.fixture(autouse=True, name="nothing_is_left")
def _nothing_is_left(node):
    """Before and after each test no request runs and no KV memory is held."""
    node.wait_metric("dunlin_requests_running", 0)
    before = node.metrics()
    yield
    node.wait_metric("dunlin_requests_running", 0)
    node.wait_metric("dunlin_requests_waiting", 0)
    assert node.metrics()["dunlin_kv_usage_ratio"] == before["dunlin_kv_usage_ratio"] == 0
    assert node.metrics()["dunlin_kv_quarantined_pages"] == 0
    assert node.text(temperature=0, max_tokens=4)


CANCELLED = 'dunlin_requests_finished_total{model="tiny",reason="cancelled"}'


def cancelled(node):
    return node.metrics()[CANCELLED]


def reset(sock):
    """Closes with a TCP reset, not a FIN, and without TLS's farewell."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    socket.socket(fileno=sock.detach()).close()


def test_a_reset_stream_frees_its_pages_and_leaves_its_neighbours_alone(node):
    before = cancelled(node)
    expected = node.text(temperature=0, max_tokens=300, ignore_eos=True)
    connection = H2(node)
    good = connection.post("/v1/completions", {"model": "tiny", "prompt": "the sea", "temperature": 0, "max_tokens": 300,
                                               "ignore_eos": True})
    early = connection.post("/v1/completions", LONG)
    streams = [connection.post("/v1/completions", {**LONG, "stream": True, "seed": i}) for i in range(3)]
    for s in streams:
        for _ in range(4):
            connection.wait(h2.events.DataReceived, s)
    assert node.metrics()["dunlin_kv_usage_ratio"] > 0
    for s in [early, *streams]:
        connection.reset(s)
    body = connection.body(good)
    assert json.loads(body)["choices"][0]["text"] == expected
    node.wait_metric("dunlin_requests_running", 0)
    node.wait_metric(CANCELLED, before + 4)
    node.wait_log(r"request\.done .*status=499 .*finish=abort", 4)
    again = connection.post("/v1/completions", {**LONG, "max_tokens": 2})
    connection.wait(h2.events.StreamEnded, again)
    connection.close()


def test_a_reset_before_the_first_byte_frees_its_pages(node):
    connection = H2(node)
    for i in range(10):
        connection.reset(connection.post("/v1/completions", {**LONG, "stream": i % 2 == 0}))
    connection.wait(h2.events.StreamEnded, connection.post("/v1/completions", {**LONG, "max_tokens": 2}))
    node.wait_metric("dunlin_requests_running", 0)
    connection.close()


def test_the_openai_clients_way_of_leaving_frees_its_pages(node):
    """It closes its connection."""
    before = cancelled(node)
    for http2 in (True, False):
        with node.http(http2=http2) as http:
            client = openai.OpenAI(base_url=node.url + "/v1", api_key="none", http_client=http)
            stream = client.completions.create(**{k: v for k, v in LONG.items() if k != "ignore_eos"}, stream=True,
                                               extra_body={"ignore_eos": True})
            for _ in range(5):
                next(stream)
            assert node.metrics()["dunlin_requests_running"] == 1
            stream.close()
        node.wait_metric("dunlin_requests_running", 0)
    node.wait_metric(CANCELLED, before + 2)


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_closing_a_socket_before_the_first_byte_frees_its_pages(node, stream, how):
    before = cancelled(node)
    s = start_h1(node, {**LONG, "stream": stream})
    if not stream: # nothing comes back: wait until it runs
        node.wait_metric("dunlin_requests_running", 1)
    reset(s) if how == "reset" else s.close()
    node.wait_metric("dunlin_requests_running", 0)
    if not stream:
        node.wait_metric(CANCELLED, before + 1)


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_closing_a_socket_after_the_first_byte_frees_its_pages(node, how):
    before = cancelled(node)
    s = start_h1(node, {**LONG, "stream": True})
    assert s.recv(1000).startswith(b"HTTP/1.1 200")
    reset(s) if how == "reset" else s.close()
    node.wait_metric("dunlin_requests_running", 0)
    node.wait_metric(CANCELLED, before + 1)


def test_a_client_that_leaves_while_it_waits_in_the_queue_is_forgotten():
    with Node(conf="  engine = { max_sequences = 1, threads = 1 },") as node:
        first = start_h1(node, {**LONG, "stream": True})
        assert first.recv(1000).startswith(b"HTTP/1.1 200")
        waiting = [start_h1(node, LONG) for _ in range(5)]
        node.wait_metric("dunlin_requests_waiting", 5)
        for s in waiting:
            s.close()
        node.wait_metric("dunlin_requests_waiting", 0)
        assert node.metrics()["dunlin_requests_running"] == 1
        first.close()
        node.wait_metric("dunlin_requests_running", 0)
        assert node.text(temperature=0, max_tokens=4)


def test_a_client_that_does_not_read_costs_only_itself(node):
    """Its stream fills the sockets' buffers and is paused; the others go on meanwhile."""
    s = start_h1(node, {**LONG, "stream": True, "logprobs": 5})
    assert s.recv(100)
    for _ in range(20):
        assert node.text(temperature=0, max_tokens=20)
    s.close()


def test_one_in_ten_aborted_and_all_others_right(node):
    bodies = [{"model": "tiny", "prompt": f"bird {i} and the wind " * (1 + i % 9), "max_tokens": 60, "temperature": 1,
               "seed": i, "ignore_eos": True} for i in range(100)]
    expected = [node.complete(**{k: v for k, v in b.items() if k != "model"})["choices"][0]["text"] for b in bodies]
    before = cancelled(node)

    async def one(http, i):
        if i % 10:
            r = await http.post("/v1/completions", json=bodies[i])
            return r.json()["choices"][0]["text"]
        body = {**bodies[i], "stream": True, "max_tokens": 3000}
        async with http.stream("POST", "/v1/completions", json=body) as r:
            async for _ in r.aiter_lines():
                break
        return expected[i]

    async def load():
        async with node.http_async() as a, node.http_async(http2=False) as b:
            return await asyncio.gather(*[one(a if i % 2 else b, i) for i in range(100)])

    assert asyncio.run(load()) == expected
    node.wait_metric("dunlin_requests_running", 0)
    node.wait_metric(CANCELLED, before + 10)


def test_aborts_at_any_moment_leave_nothing_behind(node):
    """Connections cut after a few bytes of handshake, of the request, or a little later."""
    def cut(n, delay):
        text = json.dumps({**LONG, "stream": True})
        data = (f"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
                f"content-length: {len(text)}\r\n\r\n{text}").encode()
        s = node.socket()
        s.sendall(data[:n])
        threading.Event().wait(delay)
        reset(s)

    threads = [threading.Thread(target=cut, args=(n, d)) for n in (1, 50, 120, 400) for d in (0, 0.002, 0.01, 0.05)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    with pytest.raises(httpx.ReadTimeout):
        with node.http(timeout=0.2) as http:
            http.post("/v1/completions", json=LONG)


def test_leaving_while_a_worker_reads_the_request_is_survived(node):
    """Bodies above 64 KiB are parsed, and all are tokenized, away from the event loop."""
    body = {"model": "tiny", "prompt": "the sea " * 40000, "max_tokens": 1}
    for delay in (0, 0, 0.001, 0.002, 0.005, 0.01) * 3:
        s = start_h1(node, body)
        threading.Event().wait(delay)
        reset(s)
    connection = H2(node)
    for i in range(12):
        connection.reset(connection.post("/tokenize" if i % 2 else "/v1/chat/completions", {
            "model": "tiny", "prompt": "the sea " * 20000} if i % 2 else {
            "model": "tiny", "messages": [{"role": "user", "content": "the sea " * 20000}]}))
    connection.close()
