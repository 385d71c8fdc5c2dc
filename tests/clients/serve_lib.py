"""What the end-to-end tests share: a real `dunlin serve` process, clients for it, and its metrics and log.

The binary comes from DN_DUNLIN, the real model (optional) from DN_MODEL; run_clients.py sets them and starts pytest. The
tiny model is written by the binary itself. Everything lives in one temporary folder, the certificate too.
"""
import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time

import h2.connection
import h2.events
import httpx
import openai
import pytest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BINARY = os.environ.get("DN_DUNLIN", os.path.join(SOURCE, "build/release/dunlin"))
REAL_MODEL = os.environ.get("DN_MODEL", "")
SHARED_DATA = os.environ.get("DN_SHARED_DATA", os.path.join(SOURCE, "../shared/data"))

WORK = tempfile.mkdtemp(prefix="dunlin-clients-")
atexit.register(shutil.rmtree, WORK, ignore_errors=True)
ENV = dict(os.environ, XDG_DATA_HOME=os.path.join(WORK, "data"), HOME=WORK)
ENV.pop("DN_CONF", None)
CERT = os.path.join(WORK, "data/dunlin/tls/cert.pem")


def command(*args, timeout=60, **kw):
    """Runs `dunlin ARGS` to its end."""
    kw.setdefault("stdin", subprocess.DEVNULL)
    if "input" in kw:
        del kw["stdin"]
    kw = {"cwd": WORK, "env": ENV, "text": True, **kw}
    return subprocess.run([BINARY, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, **kw)


@functools.cache
def tiny_model():
    path = os.path.join(WORK, "tiny.gguf")
    done = command("tiny", path)
    assert done.returncode == 0, done.stderr
    return path


@functools.cache
def mini_model(name):
    """The folder of a trained miniature (DN_SHARED_DATA/mini); skips where it is not.

    The first shard of "mini-kimi-int4" is a link to mini-kimi's, which not every copy keeps (some leave its text
    instead): a folder of links stands in for it.
    """
    mini = os.path.abspath(os.path.join(SHARED_DATA, "mini"))
    if not os.path.exists(os.path.join(mini, name, "config.json")):
        pytest.skip(f"no {mini}/{name}")
    path, shared = os.path.join(WORK, name), "model-00001-of-00002.safetensors"
    os.mkdir(path)
    for file in os.listdir(os.path.join(mini, name)):
        os.symlink(os.path.join(mini, "mini-kimi" if file == shared else name, file), os.path.join(path, file))
    return path


def write(name, text):
    """A file in the work folder; returns its path."""
    path = os.path.join(WORK, name)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    return path


def make_key(name, tenant=None):
    """(key, entry for the keys file), made by `dunlin key add`."""
    done = command("key", "add", name, *(["--tenant", tenant] if tenant else []))
    assert done.returncode == 0, done.stderr
    key, entry = done.stdout.split("\n", 1)
    return key, entry.strip()


class H2:
    """One HTTP/2 connection under the test's own control, for what httpx does not do (it never resets a stream)."""

    def __init__(self, node):
        context = ssl.create_default_context(cafile=CERT)
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", node.port), 30)
        self.sock = context.wrap_socket(plain, server_hostname="127.0.0.1")
        assert self.sock.selected_alpn_protocol() == "h2"
        self.h2 = h2.connection.H2Connection()
        self.h2.initiate_connection()
        self.events = []
        self.flush()

    def flush(self):
        self.sock.sendall(self.h2.data_to_send())

    def post(self, path, body, key=None):
        """Sends a request; its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":path", path), (":scheme", "https"), (":authority", "127.0.0.1"),
                ("content-type", "application/json")]
        self.h2.send_headers(stream_id, head + ([("authorization", f"Bearer {key}")] if key else []))
        data = json.dumps(body).encode()
        while data:
            n = min(len(data), self.h2.local_flow_control_window(stream_id), 16384)
            if n == 0:
                self.receive()
                continue
            self.h2.send_data(stream_id, data[:n], end_stream=n == len(data))
            self.flush()
            data = data[n:]
        return stream_id

    def receive(self):
        data = self.sock.recv(65536)
        assert data, "the connection was closed"
        for e in self.h2.receive_data(data):
            if isinstance(e, h2.events.DataReceived):
                self.h2.acknowledge_received_data(e.flow_controlled_length, e.stream_id)
            self.events.append(e)
        self.flush()

    def wait(self, kind, stream_id=None):
        """The next event of a kind, of a stream if given."""
        while True:
            for i, e in enumerate(self.events):
                if isinstance(e, kind) and stream_id in (None, getattr(e, "stream_id", None)):
                    return self.events.pop(i)
            self.receive()

    def body(self, stream_id):
        """All of an answer's body."""
        data = b""
        while True:
            e = self.wait((h2.events.DataReceived, h2.events.StreamEnded), stream_id)
            if isinstance(e, h2.events.StreamEnded):
                return data
            data += e.data

    def reset(self, stream_id):
        self.h2.reset_stream(stream_id, 8) # CANCEL
        self.flush()

    def close(self):
        self.sock.close()


class Node:
    """One `dunlin serve`; a context manager. conf is the inside of the configuration's table."""

    count = 0

    def __init__(self, *flags, conf="", model=None, name=None, key=None, timeout=120):
        Node.count += 1
        self.key, self.model = key, name or ("tiny" if model is None else "real")
        self.dir = os.path.join(WORK, f"node{Node.count}")
        os.mkdir(self.dir)
        self.conf = os.path.join(self.dir, "node.lua")
        if "engine" not in conf and model is None:
            conf += "\n  engine = { threads = 1 }," # tiny matrices: more threads only wait for one another
        with open(self.conf, "w", encoding="utf-8") as f:
            f.write("return {\n" + conf + "\n}\n")
        self.log_path = os.path.join(self.dir, "log")
        args = [BINARY, "serve", model or tiny_model(), "--listen", "127.0.0.1:0", "--conf", self.conf, "--name",
                self.model, *flags]
        with open(self.log_path, "w", encoding="utf-8") as log:
            self.proc = subprocess.Popen(args, cwd=self.dir, env=ENV, stdin=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL, stderr=log)
        end = time.monotonic() + timeout
        while not re.search(r"^ready in", self.log(), re.M):
            assert self.proc.poll() is None and time.monotonic() < end, "the node did not start:\n" + self.log()
            time.sleep(0.02)
        self.url = re.search(r"(https://\S+:\d+) ", self.log()).group(1)
        self.port = int(self.url.rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if exc[0] is not None:
            print("\n".join(self.log().splitlines()[-40:]))
        self.stop()

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            return f.read()

    def wait_log(self, pattern, count=1, timeout=10):
        end = time.monotonic() + timeout
        while len(re.findall(pattern, self.log())) < count:
            assert time.monotonic() < end, f"not {count} times in the log: {pattern}\n" + self.log()[-3000:]
            time.sleep(0.02)

    def signal(self, number):
        self.proc.send_signal(number)

    def stop(self, timeout=60):
        """Ends the node as an operator does; it must end well."""
        self._monitor.close()
        if self.proc.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            code = self.proc.wait(timeout)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
            raise AssertionError("the node did not end:\n" + self.log()[-3000:]) from None
        log = self.log()
        at = log.find("Sanitizer: ") # the first report says more than the last lines
        assert code == 0, f"the node ended with {code}:\n" + (log[at - 30:at + 6000] if at >= 0 else log[-5000:])

    def headers(self, key=None):
        key = key or self.key
        return {"authorization": f"Bearer {key}"} if key else {}

    def _http_args(self, http2, key, timeout):
        context = ssl.create_default_context(cafile=CERT)
        return dict(base_url=self.url, verify=context, http1=not http2, http2=http2, timeout=timeout,
                    headers=self.headers(key), trust_env=False, limits=httpx.Limits(max_connections=64))

    def http(self, http2=True, key=None, timeout=60):
        """A client for one thread: httpx 0.28 numbers streams of one connection wrongly when threads share it."""
        return httpx.Client(**self._http_args(http2, key, timeout))

    def http_async(self, http2=True, key=None, timeout=60):
        return httpx.AsyncClient(**self._http_args(http2, key, timeout))

    def openai(self, key=None, timeout=60):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key or self.key or "none", max_retries=0,
                             timeout=timeout, http_client=self.http(key=key, timeout=timeout))

    def socket(self, timeout=30):
        """A raw HTTP/1.1 connection over TLS."""
        context = ssl.create_default_context(cafile=CERT)
        context.set_alpn_protocols(["http/1.1"])
        plain = socket.create_connection(("127.0.0.1", self.port), timeout)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    @functools.cached_property
    def _monitor(self):
        return self.http()

    def metrics(self):
        """{'name{labels}': value, 'name': sum over its series}."""
        values = {}
        for line in self._monitor.get("/metrics").text.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            series, value = line.rsplit(" ", 1)
            values[series] = float(value)
            name = series.split("{", 1)[0]
            if name != series:
                values[name] = values.get(name, 0) + float(value)
        return values

    def page_tokens(self):
        """Tokens in a page of the KV cache: 16 on a CPU, 64 on a GPU."""
        return next(int(re.search(r'page_tokens="(\d+)"', name).group(1)) for name in self.metrics()
                    if name.startswith("dunlin_cache_config_info{"))

    def wait_metric(self, name, value, timeout=2.0):
        begin = time.monotonic()
        while True:
            now = self.metrics()[name]
            if now == value:
                return time.monotonic() - begin
            assert time.monotonic() - begin < timeout, f"{name} is {now}, expected {value}"
            time.sleep(0.01)

    def post(self, path, body, **kw):
        """One request on a connection that is kept; the response."""
        return self._monitor.post(path, json=body, **kw)

    def complete(self, prompt="the sea", client=None, headers=None, **params):
        """The JSON of /v1/completions, which must succeed."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 32, **params}
        r = (client or self._monitor).post("/v1/completions", json=body, headers=headers)
        assert r.status_code == 200, (r.status_code, r.text)
        return r.json()

    def text(self, prompt="the sea", **params):
        return self.complete(prompt, **params)["choices"][0]["text"]

    def chat(self, content="Hello", client=None, headers=None, **params):
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": 32, **params}
        r = (client or self._monitor).post("/v1/chat/completions", json=body, headers=headers)
        assert r.status_code == 200, (r.status_code, r.text)
        return r.json()

    def tokens(self, **body):
        r = self.post("/tokenize", {"model": self.model, **body})
        assert r.status_code == 200, r.text
        return r.json()["tokens"]


def start_h1(node, body):
    """Sends a request on a raw connection of its own."""
    s = node.socket()
    text = json.dumps(body)
    s.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
              f"content-length: {len(text)}\r\n\r\n{text}".encode())
    return s


def read_sse(response):
    """The events of a stream as parsed JSON; checks that it ends with [DONE] and holds nothing else but comments."""
    events, done = [], False
    for line in response.iter_lines():
        if line == "" or line.startswith(":"):
            continue
        assert line.startswith("data: "), line
        assert not done, "something behind [DONE]: " + line
        if line == "data: [DONE]":
            done = True
        else:
            events.append(json.loads(line[6:]))
    assert done, "the stream has no [DONE]"
    return events


def stream(client, path, body, **kw):
    """Streams a request to its end; its events."""
    with client.stream("POST", path, json={**body, "stream": True}, **kw) as r:
        if r.status_code != 200:
            raise AssertionError((r.status_code, r.read()))
        assert r.headers["content-type"].startswith("text/event-stream")
        return read_sse(r)


def stream_text(events):
    return "".join(e["choices"][0].get("text") or e["choices"][0].get("delta", {}).get("content") or ""
                   for e in events if e["choices"])


def is_error(response, status, code=None, param=None, words=()):
    """Checks an error of OpenAI's form; returns its message."""
    assert response.status_code == status, (response.status_code, response.text)
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str), error
    assert code is None or error["code"] == code, error
    assert param is None or error["param"] == param, error
    for word in words:
        assert str(word) in error["message"], (word, error)
    return error["message"]


def together(calls):
    """Runs functions at once; their results, in order. The first exception is raised."""
    results, errors = [None] * len(calls), []

    def run(i, call):
        try:
            results[i] = call()
        except BaseException as e: # pylint: disable=broad-except
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i, call)) for i, call in enumerate(calls)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


@contextlib.contextmanager
def takes_less_than(seconds):
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < seconds, f"took {took:.1f} s, expected less than {seconds} s"
