"""The device of a node: which one the receipt names, and what clients see when it is lost."""
import os
import re
import time

import pytest
import serve_lib
from serve_lib import BINARY, ENV, Node, command, tiny_model

LOST = os.path.join(os.path.dirname(BINARY), "tests", "libbackend_lost.so")


def test_the_receipt_says_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setitem(ENV, "DN_CUDA_LIBRARY", "/nonexistent/libdunlin-cuda.so")
    with Node() as node:
        line = re.search(r"^device .*$", node.log(), re.M).group(0)
        assert "no GPU: " in line and "/nonexistent/libdunlin-cuda.so" in line
    with Node("--device", "cpu") as node:
        assert "no GPU" not in node.log()


def test_a_device_that_is_asked_for_must_be_there(monkeypatch):
    monkeypatch.setitem(ENV, "DN_CUDA_LIBRARY", "/nonexistent/libdunlin-cuda.so")
    for args in (("serve", "--listen", "127.0.0.1:0"), ("generate",), ("bench",)):
        done = command(args[0], tiny_model(), *args[1:], "--device", "cuda")
        assert done.returncode != 0 and "/nonexistent/libdunlin-cuda.so" in done.stderr
        done = command(args[0], tiny_model(), *args[1:], "--device", "tpu")
        assert done.returncode == 2 and "expected auto, cpu, cuda or cuda:N" in done.stderr


def test_doctor_goes_on_without_a_gpu(monkeypatch):
    monkeypatch.setitem(ENV, "DN_CUDA_LIBRARY", "/nonexistent/libdunlin-cuda.so")
    done = command("doctor")
    assert re.search(r"^(ok  |warn)  gpu ", done.stdout, re.M), done.stdout


@pytest.mark.skipif(not os.path.exists(LOST), reason="no library that loses its device beside the program")
def test_a_lost_device_makes_the_node_not_ready(monkeypatch):
    """Requests that run end with an error, readiness is 503, liveness and metrics go on, SIGTERM still ends well."""
    monkeypatch.setitem(serve_lib.ENV, "DN_TEST_LOST_AT", "5")
    monkeypatch.setitem(ENV, "ASAN_OPTIONS", ENV.get("ASAN_OPTIONS", "") + ":detect_odr_violation=0") # it links kernels, too
    with Node("--device", LOST) as node:
        client = node.http()
        assert client.get("/readyz").status_code == 200
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "the sea", "max_tokens": 100,
                                                      "ignore_eos": True})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready", answer.text
        node.wait_log(r"pool\.lost.*illegal memory access")
        end = time.monotonic() + 5
        while client.get("/readyz").status_code != 503:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert client.get("/readyz").json()["status"] == "device_lost"
        assert client.get("/livez").status_code == 200
        assert re.search(r"^dunlin_pool_healthy\S* 0$", client.get("/metrics").text, re.M)
        for _ in range(3): # and none hangs
            again = client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 5}, timeout=10)
            assert again.status_code == 503, again.text
