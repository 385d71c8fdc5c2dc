"""The device of a node: which one the receipt names, and what clients see when it is lost."""
import json
import os
import re
import subprocess
import time

import pytest
import serve_lib
from serve_lib import BINARY, ENV, SOURCE, Node, command, tiny_model, write

LOST = os.path.join(os.path.dirname(BINARY), "tests", "libbackend_lost.so")
GPU = os.path.join(os.path.dirname(BINARY), "tests", "libbackend_gpu.so")


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


# ---- show: the device that serve would take


def shown(*flags):
    """{format: line} of `dunlin show`, with the lines of the device under "device"."""
    done = command("show", tiny_model(), *flags)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("weights")}
    lines["device"] = re.search(r"^device .*(\n  .*)?$", done.stdout, re.M).group(0)
    data = json.loads(command("show", tiny_model(), "--json", *flags).stdout)
    return lines, data


def meminfo(name):
    with open("/proc/meminfo", encoding="ascii") as f:
        return int(re.search(rf"^{name}:\s+(\d+) kB", f.read(), re.M).group(1)) * 1024


def test_show_answers_for_the_cpu_with_what_is_free():
    lines, data = shown("--device", "cpu")
    assert "free on cpu" in lines["auto"] and "no GPU" not in lines["device"], lines
    device, auto = data["device"], data["memory_bytes"]["auto"]
    assert device["name"] == "cpu" and device["no_gpu"] is None
    assert device["free_bytes"] <= meminfo("MemAvailable") + (2 << 30) and device["total_bytes"] <= meminfo("MemTotal")
    assert 0 < auto["left"] <= device["free_bytes"] + (1 << 30) - auto["weights"] and auto["missing"] == 0


@pytest.mark.skipif(not os.path.exists(GPU), reason="no library that passes for a GPU's beside the program")
def test_show_answers_for_the_gpu(monkeypatch):
    monkeypatch.setitem(ENV, "ASAN_OPTIONS", ENV.get("ASAN_OPTIONS", "") + ":detect_odr_violation=0")
    monkeypatch.setitem(ENV, "DN_CUDA_LIBRARY", GPU)
    monkeypatch.setitem(ENV, "DN_TEST_MEMORY", f"{70 << 30} {80 << 30}")
    for flags, index in (((), 0), (("--device", "cuda"), 0), (("--device", "cuda:3"), 3)):
        lines, data = shown(*flags)
        assert f"cuda:{index}" in lines["device"] and "70.0 GiB free of 80.0 GiB" in lines["device"], lines
        assert f"free on cuda:{index}" in lines["auto"] and f"not on cuda:{index}" in lines["int8"], lines
        assert data["device"]["name"] == f"cuda:{index}" and data["device"]["free_bytes"] == 70 << 30
        assert data["memory_bytes"]["int8"] is None
        left = data["memory_bytes"]["bf16"]["left"]
        assert 61 << 30 < left < (69 << 30) * 9 // 10, left # a tenth and a GiB are kept for the backend's workspace
    monkeypatch.setitem(ENV, "DN_TEST_MEMORY", f"{1 << 20} {80 << 30}")
    lines, data = shown()
    assert re.search(r"too much for cuda:0: .* more than the 1\.0 MiB that are free", lines["bf16"]), lines
    assert data["memory_bytes"]["bf16"]["left"] == 0 < data["memory_bytes"]["bf16"]["missing"]
    lines, data = shown("--device", "cpu")
    assert data["device"]["name"] == "cpu" and data["memory_bytes"]["int8"]["weights"] > 0


@pytest.mark.skipif(not os.path.exists(GPU), reason="no library that passes for a GPU's beside the program")
def test_show_says_that_there_is_no_gpu_and_answers_for_the_cpu(monkeypatch):
    monkeypatch.setitem(ENV, "ASAN_OPTIONS", ENV.get("ASAN_OPTIONS", "") + ":detect_odr_violation=0")
    monkeypatch.setitem(ENV, "DN_CUDA_LIBRARY", GPU)
    monkeypatch.setitem(ENV, "DN_TEST_NO_GPU", "1")
    lines, data = shown()
    assert "no GPU: CUDA: no device is there" in lines["device"] and "free on cpu" in lines["auto"], lines
    assert data["device"]["name"] == "cpu" and data["device"]["no_gpu"] == "CUDA: no device is there"
    done = command("show", tiny_model(), "--device", "cuda")
    assert done.returncode == 1 and "no device is there" in done.stderr and done.stdout == "", done
    assert command("show", tiny_model(), "--device", "tpu").returncode == 2


def test_a_context_that_the_model_does_not_have_is_refused():
    for args in (("serve", tiny_model(), "--check"), ("serve", tiny_model(), "--listen", "127.0.0.1:0"),
                 ("generate", tiny_model(), "x"), ("chat", tiny_model(), "-p", "x")):
        done = command(*args, "--ctx", "4097", timeout=20)
        assert done.returncode == 2 and "--ctx 4097: the model has a context of 4096 tokens" in done.stderr, done
    path = write("long.lua", f'return {{ models = {{ a = {{ path = "{tiny_model()}", context = 9999 }} }} }}')
    done = command("serve", "--conf", path, "--check")
    assert done.returncode == 2 and "9999: the model has a context of 4096 tokens" in done.stderr, done
    assert command("serve", tiny_model(), "--check", "--ctx", "4096").returncode == 0


@pytest.mark.skipif(not os.path.exists(os.path.join(SOURCE, "CMakeLists.txt")), reason="the program was built elsewhere")
def test_doctor_knows_the_commit():
    line = re.search(r"^ok    version +dunlin \d+\.\d+\.\d+, commit (\S+)$", command("doctor").stdout, re.M)
    head = subprocess.run(["git", "ls-files", "--error-unmatch", "CMakeLists.txt"], cwd=SOURCE, capture_output=True, check=False)
    assert line and (line.group(1) == "unknown") == (head.returncode != 0), line # a tag's name where one is


@pytest.mark.skipif(not os.path.exists(GPU), reason="no library that passes for a GPU's beside the program")
def test_a_library_of_another_commit_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(ENV, "ASAN_OPTIONS", ENV.get("ASAN_OPTIONS", "") + ":detect_odr_violation=0")
    monkeypatch.setitem(ENV, "DN_CUDA_LIBRARY", GPU)
    stale = r"the backend's library is of commit 0123456789ab, the program of \S+: build both together"
    doctor = command("doctor").stdout
    assert f"{GPU}, commit 0123456789ab" in doctor and len(re.findall(stale, doctor)) == 1, doctor
    assert len(re.findall(stale, command("show", tiny_model()).stdout)) == 1
    done = command("generate", tiny_model(), "x", "--max-tokens", "2")
    assert done.returncode == 0 and len(re.findall(stale, done.stderr)) == 1, done.stderr
    assert "build both together" not in command("generate", tiny_model(), "x", "--device", "cpu").stderr
    with Node() as node:
        assert len(re.findall(stale, node.log())) == 1
