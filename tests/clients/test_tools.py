"""curl and h2load, as an operator uses them, and the line that the start receipt offers for pasting."""
import json
import re
import shutil
import subprocess

import pytest
from serve_lib import CERT, ENV, Node

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="no curl")
BODY = {"model": "tiny", "prompt": "the sea", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module", name="node")
def _node():
    with Node() as node:
        yield node


def curl(*args, timeout=60):
    done = subprocess.run(["curl", "-sS", "--cacert", CERT, *args], capture_output=True, text=True, timeout=timeout,
                          env=ENV, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version", ["2", "1.1"])
def test_curl_gets_whole_answers_and_streams(node, version):
    url, http = node.url + "/v1/completions", f"--http{version}"
    post = ["-H", "content-type: application/json", "-d", json.dumps(BODY)]
    out = curl(http, "-w", "\n%{http_version} %{http_code} %{ssl_verify_result}", *post, url)
    body, figures = out.rsplit("\n", 1)
    assert figures == f"{version} 200 0"
    text = json.loads(body)["choices"][0]["text"]
    assert text == node.text(**{k: v for k, v in BODY.items() if k != "model"})
    out = curl(http, "-N", *post[:-1], json.dumps({**BODY, "stream": True}), url)
    events = [line[6:] for line in out.split("\n\n") if line]
    assert events.pop() == "[DONE]" and len(events) > 5
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == text
    assert curl(http, "-o", "/dev/null", "-w", "%{http_code}", node.url + "/livez") == "200"
    assert curl(http, "-o", "/dev/null", "-w", "%{http_code}", node.url + "/nothing") == "404"
    assert curl(http, "-I", node.url + "/livez").split()[1] == "200"


def test_a_large_body_with_expect_continue_arrives(node, tmp_path):
    """curl asks before it sends so much over HTTP/1.1; the answer, too long, comes from the tokenizer."""
    data = tmp_path / "body.json"
    data.write_text(json.dumps({**BODY, "prompt": "the sea " * 200000}))
    for version in ("2", "1.1"):
        out = curl(f"--http{version}", "-H", "content-type: application/json", "--data-binary", f"@{data}", "-w",
                   "\n%{http_code}", node.url + "/v1/completions")
        assert "4096" in out and out.endswith("\n400"), out[-300:]


def test_the_line_of_the_receipt_works_when_pasted(node):
    line = re.search(r"^  (curl .*\n.*)$", node.log(), re.M).group(1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=ENV, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_receipt_says_what_runs(node):
    receipt = node.log()
    for word in ("model ", "weights ", "kv ", "policy ", "integrity ", f"https://127.0.0.1:{node.port}", CERT,
                 "keys     none", "ready in "):
        assert word in receipt, word


def test_killing_curl_in_the_middle_of_a_stream_frees_its_pages(node):
    body = {**BODY, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    for version in ("2", "1.1"):
        with subprocess.Popen(["curl", "-sSN", "--cacert", CERT, f"--http{version}", "-H",
                               "content-type: application/json", "-d", json.dumps(body),
                               node.url + "/v1/completions"], stdout=subprocess.PIPE, env=ENV) as proc:
            assert proc.stdout.readline().startswith(b"data: ")
            proc.kill()
        node.wait_metric("dunlin_requests_running", 0)
        assert node.metrics()["dunlin_kv_usage_ratio"] == 0


@pytest.mark.skipif(not shutil.which("h2load"), reason="no h2load (package nghttp2-client)")
@pytest.mark.parametrize("version", ["h2", "http/1.1"])
def test_h2load_with_64_streams_gets_nothing_but_200(node, tmp_path, version):
    before = node.metrics()
    data = tmp_path / "body.json"
    data.write_text(json.dumps({**BODY, "max_tokens": 4}))
    streams = "16" if version == "h2" else "1"
    clients = "4" if version == "h2" else "16"
    done = subprocess.run(["h2load", "-n", "256", "-c", clients, "-m", streams, "-d", str(data), f"--npn-list={version}",
                           "-H", "content-type: application/json", node.url + "/v1/completions"],
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "256 succeeded, 0 failed, 0 errored, 0 timeout" in done.stdout, done.stdout
    assert "status codes: 256 2xx, 0 3xx, 0 4xx, 0 5xx" in done.stdout, done.stdout
    after = node.metrics()
    assert after["dunlin_requests_finished_total"] - before["dunlin_requests_finished_total"] == 256
