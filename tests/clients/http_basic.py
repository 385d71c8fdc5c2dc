"""What works: both protocols, with and without TLS, whole and streamed; certificates; start-up errors."""
import os
import select
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
import time

import http_lib
from http_lib import *

WAYS = [(True, True), (True, False), (False, True), (False, False)]  # (h2, tls)


def fetch(server, h2, tls, path, method="GET", body=None):
    if h2:
        c = server.h2(tls)
        return c.get(path, method, body=body)
    headers = "" if body is None else f"content-length: {len(body)}\r\n"
    return h1_get(server.h1(tls), path, method, headers, body or b"")


def test_every_way_answers():
    with Server() as s:
        for h2, tls in WAYS:
            r = fetch(s, h2, tls, "/")
            assert r.status == 200 and len(r.body) == 74, (h2, tls, r.status, r.body)
            assert fetch(s, h2, tls, "/none").status == 404


def test_bodies_come_back_whole():
    with Server() as s:
        for n in (0, 1, 16383, 16384, 16385, 3000000):
            body = os.urandom(n)
            for h2, tls in WAYS:
                assert fetch(s, h2, tls, "/echo", "POST", body).body == body, (n, h2, tls)


def test_chunked_bodies_come_back_whole():
    with Server() as s:
        body = b"".join(b"%x\r\n%s\r\n" % (n, b"z" * n) for n in (1, 1000, 70000)) + b"0\r\n\r\n"
        r = h1_get(s.h1(), "/echo", "POST", "transfer-encoding: chunked\r\n", body)
        assert r.body == b"z" * 71001


def test_big_answers_arrive():
    with Server() as s:
        for h2, tls in WAYS:
            body = fetch(s, h2, tls, "/flood?n=20000000").body
            assert len(body) == 20000000 and body[:16] == b"0123456789abcdef", (h2, tls, len(body))


def test_event_streams_in_order():
    with Server(loops=2) as s:
        for h2, tls in WAYS:
            lines = fetch(s, h2, tls, "/sse?n=40&ms=3&size=4").body.decode().split("\n\n")
            assert lines[0] == ": ok" and lines[1:41] == [f"data: {i:04}" for i in range(40, 0, -1)], (h2, tls, lines)


def test_first_bytes_do_not_wait_for_the_first_event():
    with Server() as s:
        for tls in (True, False):
            begin = time.monotonic()
            c = s.h1(tls)
            c.sendall(b"GET /sse?n=1&ms=3000 HTTP/1.1\r\nhost: t\r\n\r\n")
            while b": ok" not in c.recv(4096):
                pass
            c2 = s.h2(tls)
            c2.wait_body(c2.request("/sse?n=1&ms=3000"), 6)
            assert time.monotonic() - begin < 1.5


def test_many_streams_at_once():
    with Server(loops=2) as s:
        c = s.h2()
        ids = [c.request(f"/sse?n={5 + i}&ms=5&size=8") for i in range(90)]
        for i, stream in enumerate(ids):
            assert c.wait(stream)["body"].count(b"data: ") == 5 + i


def test_keep_alive_and_pipelining():
    with Server() as s:
        c = s.h1()
        for _ in range(200):
            assert h1_get(c, "/").status == 200
        one = b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\n\r\nabc"
        c.sendall(one * 50)
        data = b""
        while data.count(b"abc") < 50:
            data += c.recv(65536)
        # requests that wait behind a running answer are kept and answered after it
        c.sendall(b"GET /sse?n=3&ms=20 HTTP/1.1\r\nhost: t\r\n\r\n" + one)
        data = b""
        while not data.endswith(b"abc"):
            data += c.recv(65536)
        assert data.index(b"data: ") < data.index(b"abc") and s.stats()["requests"] >= 252


def test_the_handler_sees_the_request():
    with Server() as s:
        r = h1_get(s.h1(), "/info?a=b&c", headers="X-Test: v w\r\n")
        assert r.body == b"GET|/info|a=b&c|v w|test|127.0.0.1|1|11\n", r.body
        assert r.headers["x-request-id"] == "r  evil: 1" and "evil" not in r.headers
        assert r.headers["server"] == "echo" and r.headers["content-length"] == str(len(r.body))
        r = s.h2().get("/info", "PUT", [("x-test", "5")])
        assert r.body == b"PUT|/info||5|test|127.0.0.1|1|20\n", r.body
        c = s.h1(False)
        c.sendall(b"GET /info HTTP/1.0\r\n\r\n")
        assert read_all(c).endswith(b"|127.0.0.1|1|10\n")


def test_head_has_no_body():
    with Server() as s:
        c = s.h1()
        c.sendall(b"HEAD / HTTP/1.1\r\nhost: t\r\n\r\nGET / HTTP/1.1\r\nhost: t\r\n\r\n")
        r = h1_read(c, head=True)
        assert r.headers["content-length"] == "74" and not r.body.startswith(b"{")


def test_an_aborted_answer_has_no_end():
    with Server() as s:
        for tls in (True, False):
            c = s.h1(tls)
            c.sendall(b"GET /abort?n=5 HTTP/1.1\r\nhost: t\r\n\r\n")
            assert not read_all(c).endswith(b"0\r\n\r\n")
            c = s.h2(tls)
            assert c.wait(c.request("/abort?n=5"))["reset"] is not None
            assert c.get("/").status == 200  # only the stream ended


def test_errors_of_the_library_are_json():
    with Server() as s:
        c = s.h1()
        c.sendall(b"NOT HTTP AT ALL\r\n\r\n")
        r = h1_read(c)
        assert r.status == 400 and r.error()["code"] == "invalid_request"
        r = h1_get(s.h1(), "/echo", "POST", "expect: wonders\r\ncontent-length: 3\r\n", b"abc")
        assert r.status == 417 and r.error()["type"] == "invalid_request_error"
        r = h1_get(s.h1(), "/echo", "POST", "content-length: -1\r\n", b"abc")
        assert r.status == 400 and r.error()["code"] == "invalid_request"
        r = h1_get(s.h1(), "/echo", "POST", "transfer-encoding: chunked\r\n", b"zz\r\n")
        assert r.status == 400 and r.error()


def test_continue_is_sent_before_the_body():
    with Server() as s:
        c = s.h1()
        c.sendall(b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
        assert c.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        c.sendall(b"abc")
        assert h1_read(c).body == b"abc"


def test_certificate_and_protocol_versions():
    with Server() as s:
        assert stat.S_IMODE(os.stat(s.key).st_mode) == 0o600
        strict = ssl.create_default_context(cafile=s.cert)
        for name in ("localhost", "127.0.0.1", "::1"):  # the names are in the certificate
            raw = socket.create_connection(("127.0.0.1", s.port))
            tls = strict.wrap_socket(raw, server_hostname=name)
            assert tls.cipher()[0].startswith("ECDHE-ECDSA-") or tls.version() == "TLSv1.3"
            assert tls.selected_alpn_protocol() is None and h1_get(tls, "/").status == 200
        for change in ("TLSv1.1", "CBC", "alpn"):
            context = ssl._create_unverified_context()
            if change == "TLSv1.1":
                context.set_ciphers("ALL:@SECLEVEL=0")
                context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
            elif change == "CBC":
                context.maximum_version = ssl.TLSVersion.TLSv1_2
                context.set_ciphers("ECDHE-ECDSA-AES128-SHA256:ECDHE-ECDSA-AES128-SHA:AES128-SHA")
            else:
                context.set_alpn_protocols(["spdy/3"])
            try:
                s.connect(context=context)
                raise AssertionError(f"{change} was accepted")
            except (ssl.SSLError, ConnectionError):
                pass
        assert s.stats()["handshakes_failed"] == 3


def test_sessions_resume_on_every_loop():
    with Server(loops=2) as s:
        context = ssl.create_default_context(cafile=s.cert)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        first = s.connect(context=context)
        h1_get(first, "/")
        for _ in range(10):  # they spread over both loops
            c = s.connect(context=context, session=first.session)
            assert c.session_reused and h1_get(c, "/").status == 200


def test_reload_changes_new_connections_only():
    with Server() as s:
        def fingerprint():
            return ssl.get_server_certificate(("127.0.0.1", s.port))
        old, running = fingerprint(), s.h1()
        os.rename(s.cert, s.cert + ".old")
        os.rename(s.key, s.key + ".old")
        with Server() as other:
            shutil.copy(other.cert, s.cert)
            shutil.copy(other.key, s.key)
        s.proc.send_signal(signal.SIGHUP)
        assert s.proc.stdout.readline() == "reload ok\n"
        new = fingerprint()
        assert new != old and h1_get(running, "/").status == 200
        shutil.copy(s.key + ".old", s.key)  # a key that is not the certificate's
        s.proc.send_signal(signal.SIGHUP)
        assert "does not belong" in s.proc.stdout.readline()
        assert fingerprint() == new


def refused(*args, **kw):
    s = Server(*args, **kw)
    assert not s.ready
    s.proc.wait(10)
    assert s.proc.returncode == 1
    return s.proc.stderr.read()


def test_bad_starts_are_refused():
    assert "only loopback" in refused(cleartext=False, extra=["--cleartext", "0.0.0.0:0"])
    assert "expected HOST:PORT" in refused(listen="127.0.0.1")
    assert "brackets" in refused(listen="::1:0")
    assert "expected HOST:PORT" in refused(listen="127.0.0.1:70000")
    assert "event loops" in refused(loops=65)
    with Server(loops=2) as s:
        assert "in use" in refused(listen=f"127.0.0.1:{s.port}")


def test_a_build_without_interposition_refuses_to_run():
    if not os.path.exists(http_lib.BINARY + "_nohook"):
        print("      skipped: h2o is linked statically, where the linker itself complains")
        return
    text = refused(binary=http_lib.BINARY + "_nohook")
    assert "does not write through this program" in text and "HTTP/2 broken, HTTP/1 broken" in text, text


def test_curl_and_h2load():
    with Server(loops=2) as s:
        for flag, version in (("--http1.1", "1.1"), ("--http2", "2")):
            out = subprocess.run(["curl", "-sS", flag, "--cacert", s.cert, f"https://localhost:{s.port}/", "-w", "%{http_version}"],
                                 capture_output=True, text=True, timeout=20)
            assert out.returncode == 0 and out.stdout.endswith(version) and len(out.stdout) == 74 + len(version), out
        for more in ([], ["--h1"]):
            out = subprocess.run(["h2load", "-n", "5000", "-c", "16", "-m", "10", f"https://127.0.0.1:{s.port}/"] + more,
                                 capture_output=True, text=True, timeout=60)
            assert "5000 succeeded, 0 failed" in out.stdout, out.stdout
        assert s.stats()["requests"] >= 10002


if __name__ == "__main__":
    run(globals())
