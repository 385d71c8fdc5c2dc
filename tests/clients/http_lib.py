"""What the HTTP tests share: starting http_echo, raw HTTP/1 and HTTP/2 over TLS or cleartext, a tiny test runner.

The HTTP/2 client is frames by hand on purpose: the tests send what a library would refuse to send. Only the standard
library is used.
"""
import json
import os
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
import traceback

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Server:
    """One http_echo process; limits as keyword arguments."""

    def __init__(self, binary=None, loops=1, tls=True, cleartext=True, extra=(), listen="127.0.0.1:0", **limits):
        self.dir = tempfile.TemporaryDirectory()
        self.cert, self.key = self.dir.name + "/cert.pem", self.dir.name + "/key.pem"
        args = [binary or BINARY, "--loops", str(loops), "--cert", self.cert, "--key", self.key]
        if tls:
            args += ["--listen", listen]
        if cleartext:
            args += ["--cleartext", "127.0.0.1:0"]
        for name, value in limits.items():
            args += ["--limit", f"{name}={value}"]
        self.proc = subprocess.Popen(args + list(extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.proc.stdout.readline().split()
        self.ready = line[:1] == ["ready"]
        self.port, self.clear_port = (int(line[1]), int(line[2])) if self.ready else (0, 0)
        self.h2o = line[3] if self.ready else None

    def __enter__(self):
        assert self.ready, "the server did not start: " + self.proc.stderr.read()
        return self

    def __exit__(self, *exc):
        if exc[0] is None:
            self.check_end()
        elif self.proc.poll() is None:
            self.proc.kill()
            print(self.proc.stderr.read()[-4000:])
        else:
            print(f"server ended with {self.proc.returncode}:", self.proc.stderr.read()[-4000:])
        self.dir.cleanup()

    def check_end(self, timeout=20):
        """Every request that reached the handler is gone, nothing crashed or leaked."""
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            self.proc.send_signal(signal.SIGTERM)
        out, err = self.proc.communicate(timeout=timeout)
        assert self.proc.returncode == 0, f"server ended with {self.proc.returncode}: {out[-500:]} {err[-4000:]}"
        return out

    def stats(self):
        s = socket.create_connection(("127.0.0.1", self.clear_port), 5)
        s.sendall(b"GET /stats HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        data = read_all(s)
        s.close()
        return json.loads(data.split(b"\r\n\r\n", 1)[1])

    def wait_stat(self, name, value, timeout=3.0):
        """Seconds until stats[name] == value."""
        begin = time.monotonic()
        while True:
            now = self.stats()[name]
            if now == value:
                return time.monotonic() - begin
            assert time.monotonic() - begin < timeout, f"{name} is {now}, expected {value}"
            time.sleep(0.02)

    def connect(self, tls=True, alpn=None, timeout=10, session=None, rcvbuf=None, context=None, host="127.0.0.1"):
        sock = socket.socket()
        if rcvbuf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        sock.settimeout(timeout)
        sock.connect((host, self.port if tls else self.clear_port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not tls:
            return sock
        if context is None:
            context = ssl.create_default_context(cafile=self.cert)
            if alpn:
                context.set_alpn_protocols([alpn])
        return context.wrap_socket(sock, server_hostname="localhost", session=session)

    def h1(self, tls=True, **kw):
        return self.connect(tls, "http/1.1" if tls else None, **kw)

    def h2(self, tls=True, **kw):
        window = kw.pop("window", None)
        return H2(self.connect(tls, "h2" if tls else None, **kw), window)


def read_all(sock):
    parts = []
    try:
        while True:
            piece = sock.recv(65536)
            if not piece:
                break
            parts.append(piece)
    except (ConnectionError, ssl.SSLError):
        pass
    return b"".join(parts)


def reset(sock):
    """Closes with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if isinstance(sock, ssl.SSLSocket):
        socket.socket(fileno=sock.detach()).close()
    else:
        sock.close()


def is_closed(sock, timeout):
    """Waits for the end of the connection; returns seconds or None."""
    begin = time.monotonic()
    while True:
        left = timeout - (time.monotonic() - begin)
        if left <= 0:
            return None
        sock.settimeout(left)
        try:
            if not sock.recv(65536):
                return time.monotonic() - begin
        except socket.timeout:
            return None
        except OSError:
            return time.monotonic() - begin


def drip(sock, n, seconds):
    """Sends single bytes until the server answers; (what it said, seconds it took). Not by select(): a TLS 1.3 ticket is
    readable but no answer."""
    begin, data = time.monotonic(), b""
    try:
        for _ in range(n):
            sock.sendall(b"x")
            sock.settimeout(seconds)
            try:
                data = sock.recv(65536)
                break
            except socket.timeout:
                pass
    except OSError:
        pass
    return data, time.monotonic() - begin


class Response:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def error(self):
        """The OpenAI error object; fails when the body is anything else."""
        e = json.loads(self.body)["error"]
        assert set(e) == {"message", "type", "param", "code"}, e
        return e


def h1_read(sock, head=False):
    """One HTTP/1 response."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        assert piece, f"closed in the headers: {data!r}"
        data += piece
    top, body = data.split(b"\r\n\r\n", 1)
    body = bytearray(body)
    lines = top.decode("latin1").split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
    status = int(lines[0].split()[1])
    if head:
        return Response(status, headers, body)
    if "content-length" in headers:
        while len(body) < int(headers["content-length"]):
            piece = sock.recv(65536)
            assert piece, "closed in the body"
            body += piece
    elif headers.get("transfer-encoding") == "chunked":
        raw, body = body, bytearray()
        while True:
            while b"\r\n" not in raw:
                raw += sock.recv(65536)
            at = raw.index(b"\r\n")
            n = int(raw[:at], 16)
            del raw[:at + 2]
            while len(raw) < n + 2:
                piece = sock.recv(65536)
                assert piece, "closed in a chunk"
                raw += piece
            body += raw[:n]
            del raw[:n + 2]
            if n == 0:
                break
    else:
        body += read_all(sock)
    return Response(status, headers, body)


def h1_get(sock, path, method="GET", headers="", body=b""):
    sock.sendall(f"{method} {path} HTTP/1.1\r\nhost: test\r\n{headers}\r\n".encode() + body)
    return h1_read(sock)


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def integer(value, prefix, first=0):
    if value < (1 << prefix) - 1:
        return bytes([first | value])
    out, value = [first | ((1 << prefix) - 1)], value - ((1 << prefix) - 1)
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + [value])


def literal(name, value):
    """Literal field without indexing, no Huffman."""
    return b"\x00" + integer(len(name), 7) + name + integer(len(value), 7) + value


def header_block(path="/", method="GET", headers=()):
    block = b"\x82" if method == "GET" else b"\x83" if method == "POST" else literal(b":method", method.encode())
    block += b"\x87" + literal(b":path", path.encode()) + literal(b":authority", b"test")
    return block + b"".join(literal(k.encode(), v.encode()) for k, v in headers)


class H2:
    """A raw HTTP/2 connection. recv_frame() answers nothing by itself; run() does what a client has to do."""

    def __init__(self, sock, window=None):
        self.sock, self.buf, self.next_id = sock, bytearray(), 1
        self.streams, self.goaway = {}, None
        settings = b"" if window is None else struct.pack(">HI", 4, window)
        self.sock.sendall(PREFACE + frame(SETTINGS, payload=settings))

    def send(self, data):
        self.sock.sendall(data)

    def request(self, path="/", method="GET", headers=(), body=None, end=True):
        stream, self.next_id = self.next_id, self.next_id + 2
        flags = END_HEADERS | (END_STREAM if body is None and end else 0)
        self.streams[stream] = dict(status=None, body=bytearray(), done=False, reset=None)
        self.send(frame(HEADERS, flags, stream, header_block(path, method, headers)))
        if body is not None:
            pieces = [body[i:i + 16384] for i in range(0, len(body), 16384)] or [b""]
            for i, piece in enumerate(pieces):
                last = end and i == len(pieces) - 1
                self.send(frame(DATA, END_STREAM if last else 0, stream, piece))
        return stream

    def recv_frame(self):
        """(type, flags, stream, payload), or None at the end of the connection."""
        while len(self.buf) < 9 or len(self.buf) < 9 + int.from_bytes(self.buf[:3], "big"):
            try:
                piece = self.sock.recv(65536)
            except (ConnectionError, ssl.SSLError):
                return None
            if not piece:
                return None
            self.buf += piece
        n = int.from_bytes(self.buf[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", self.buf[3:9])
        payload = bytes(self.buf[9:9 + n])
        del self.buf[:9 + n]
        return kind, flags, stream & 0x7fffffff, payload

    def step(self, open_window=True):
        f = self.recv_frame()
        if f is None:
            return False
        kind, flags, stream, payload = f
        s = self.streams.get(stream)
        if kind == SETTINGS and not flags & 1:
            self.send(frame(SETTINGS, 1))
        elif kind == PING and not flags & 1:
            self.send(frame(PING, 1, payload=payload))
        elif kind == GOAWAY:
            self.goaway = struct.unpack(">II", payload[:8])
        elif kind == HEADERS and s is not None:
            s["status"] = s["status"] or status_of(payload)
            s["done"] = s["done"] or bool(flags & END_STREAM)
        elif kind == DATA and s is not None:
            s["body"] += payload
            s["done"] = bool(flags & END_STREAM)
            if payload and open_window:
                n = struct.pack(">I", len(payload))
                self.send(frame(WINDOW, 0, 0, n) + (b"" if s["done"] else frame(WINDOW, 0, stream, n)))
        elif kind == RST and s is not None:
            s["reset"] = struct.unpack(">I", payload)[0]
        return True

    def wait(self, stream):
        """Until the stream is answered or reset; the stream's dict."""
        s = self.streams[stream]
        while not s["done"] and s["reset"] is None:
            assert self.step(), "connection closed"
        return s

    def get(self, path="/", method="GET", headers=(), body=None):
        stream = self.request(path, method, headers, body)
        s = self.wait(stream)
        assert s["reset"] is None, f"stream reset with {s['reset']}"
        return Response(s["status"], {}, s["body"])

    def wait_body(self, stream, n):
        while len(self.streams[stream]["body"]) < n:
            assert self.step(), "connection closed"


def status_of(block):
    """h2o puts the status first: indexed, or a plain literal."""
    static = {8: 200, 9: 204, 10: 206, 11: 304, 12: 400, 13: 404, 14: 500}
    if block[0] & 0x80:
        return static[block[0] & 0x7f]
    assert block[0] in (0x08, 0x48) and block[1] == 3, block[:5]
    return int(block[2:5])


def run(tests, argv=sys.argv):
    """Runs test_* functions; arguments: the http_echo binary, then names of tests (all if none)."""
    global BINARY
    BINARY = argv[1]
    names, failed = argv[2:], 0
    for name, test in list(tests.items()):
        if not name.startswith("test_") or (names and name not in names):
            continue
        begin = time.monotonic()
        try:
            test()
            print(f"ok    {name} ({time.monotonic() - begin:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
    print(f"{failed} failed" if failed else "all passed")
    sys.exit(1 if failed else 0)
