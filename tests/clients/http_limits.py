"""Every limit of struct dn_http_limits is reached and held: sizes, counts, timers, slow readers."""
import os
import socket
import ssl
import struct
import threading
import time

from http_lib import *


def near(seconds, low, high):
    assert seconds is not None and low <= seconds <= high, f"{seconds} s, expected {low}..{high}"


def test_connections():
    with Server(connections=8) as s:
        held = [s.connect(False) for _ in range(8)]
        time.sleep(0.2)
        assert is_closed(s.connect(False), 2) is not None
        held.pop().close()
        time.sleep(0.2)
        assert h1_get(s.connect(False), "/stats").status == 200


def own_address():
    """An address of this machine that is not loopback."""
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        s.connect(("192.0.2.1", 9))
        return s.getsockname()[0]
    except OSError:
        return None


def test_connections_per_address():
    address = own_address()
    if not address or address.startswith("127."):
        print("      skipped: this machine has no address besides loopback")
        return
    with Server(connections_per_ip=3, listen="0.0.0.0:0") as s:
        context = ssl._create_unverified_context()
        held = [s.connect(host=address, context=context) for _ in range(3)]
        assert b"|%s|0|11" % address.encode() in h1_get(held[0], "/info").body
        try:
            s.connect(host=address, context=context)
            raise AssertionError("a fourth connection was accepted")
        except (ConnectionError, ssl.SSLError, OSError):
            pass
        for _ in range(6):  # loopback is exempt
            held.append(s.connect(context=context))
        held.pop(0).close()
        time.sleep(0.3)
        held.append(s.connect(host=address, context=context))
        assert s.stats()["refused"] == 1


def test_path():
    with Server(path_bytes=100) as s:
        ok, long = "/" + "a" * 99, "/" + "a" * 100
        for r in (h1_get(s.h1(), long), s.h2().get(long)):
            assert r.status == 414 and r.error()["code"] == "uri_too_long" and "101" in r.error()["message"]
        assert h1_get(s.h1(), ok).status == 404 and s.h2().get(ok).status == 404


def test_header_fields():
    with Server(header_fields=20) as s:
        def h1(n):
            return h1_get(s.h1(), "/", headers="".join(f"x{i}: 1\r\n" for i in range(n)))

        def h2(n):
            return s.h2().get("/", headers=[(f"x{i}", "1") for i in range(n)])
        for get in (h1, h2):
            assert get(20).status == 200
            r = get(21)
            assert r.status == 431 and r.error()["code"] == "headers_too_large", (r.status, r.body)
        c = s.h1()  # above h2o's own limit of 100
        c.sendall(b"GET / HTTP/1.1\r\nhost: t\r\n" + b"".join(b"x%d: 1\r\n" % i for i in range(150)) + b"\r\n")
        assert h1_read(c).error()["code"] == "invalid_request"


def test_header_bytes():
    with Server(header_bytes=4096) as s:
        def h1(n):
            return h1_get(s.h1(), "/", headers="x: " + "a" * n + "\r\n")

        def h2(n):
            return s.h2().get("/", headers=[("x", "a" * n)])
        for get in (h1, h2):
            assert get(3900).status == 200
            r = get(4200)
            assert r.status == 431 and r.error()["code"] == "headers_too_large", (r.status, r.body)
        c = s.h1()  # no end of the headers in sight: not even h2o's own 400 KB are read
        c.sendall(b"GET / HTTP/1.1\r\n" + (b"x: " + b"a" * 995 + b"\r\n") * 5)
        r = h1_read(c)
        assert r.status == 431 and r.error()["code"] == "headers_too_large", (r.status, r.body)
        assert is_closed(c, 1) is not None
        c = s.h2()  # a header block of many frames
        c.send(frame(HEADERS, 0, 1, header_block()))
        try:
            for _ in range(100):
                c.send(frame(CONTINUATION, 0, 1, literal(b"x", b"a" * 1000)))
                time.sleep(0.001)
        except OSError:
            pass
        assert is_closed(c.sock, 2) is not None


def test_body_is_413_in_json():
    with Server(body_bytes=100000) as s:
        body = os.urandom(100001)
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        answers = [
            h1_get(s.h1(), "/echo", "POST", f"content-length: {len(body)}\r\n", body),
            h1_get(s.h1(), "/echo", "POST", "transfer-encoding: chunked\r\n", chunked),
            s.h2().get("/echo", "POST", [("content-length", str(len(body)))], body),
            s.h2().get("/echo", "POST", body=body + b"x" * 90000),  # just under twice the limit: still no reset
        ]
        for r in answers:
            assert r.status == 413 and r.error()["code"] == "body_too_large", (r.status, r.body)
        assert h1_get(s.h1(), "/echo", "POST", "content-length: 100000\r\n", body[:-1]).body == body[:-1]
        # far above: HTTP/1 is answered at once, without the body
        c = s.h1()
        c.sendall(b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 999999999999\r\n\r\n")
        r = h1_read(c)
        assert r.status == 413 and r.error()["code"] == "body_too_large"
        # and while it is being sent, the answer still arrives
        c = s.h1()
        c.sendall(b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 1000000)
        assert h1_read(c).status == 413
        # HTTP/2 ends the stream, not the connection
        c = s.h2()
        w = c.wait(c.request("/echo", "POST", body=b"x" * 300000))
        assert w["reset"] is not None or w["status"] == 413
        assert c.get("/").status == 200


def test_bodies_in_flight():
    with Server(body_bytes_inflight=300000) as s:
        a, b = s.h1(), s.h2()
        head = b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 400000\r\n\r\n"
        a.sendall(head + b"a" * 290000)
        time.sleep(0.3)
        done = []

        def send_b():
            done.append(b.get("/echo", "POST", body=b"b" * 3000000).body)
        t = threading.Thread(target=send_b)
        t.start()
        time.sleep(1)
        assert not done  # b waits: a has the budget
        assert h1_get(s.h1(), "/").status == 200  # others don't
        a.sendall(b"a" * 110000)
        assert h1_read(a).body == b"a" * 400000
        t.join(10)
        assert not t.is_alive() and len(done) == 1 and done[0] == b"b" * 3000000


def test_a_client_that_leaves_while_it_waits_for_body_budget_is_noticed():
    with Server(body_bytes_inflight=100000) as s:
        a, b = s.h1(), s.h1()
        head = b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 900000\r\n\r\n"
        a.sendall(head + b"a" * 99000)
        time.sleep(0.2)
        b.setblocking(False)
        try:
            b.send(head + b"b" * 80000)
        except ssl.SSLWantWriteError:
            pass
        time.sleep(0.3)
        n = s.stats()["connections"]
        b.close()
        s.wait_stat("connections", n - 1)


def test_handshake_time():
    with Server(handshake_timeout_ms=600) as s:
        raw = [socket.create_connection(("127.0.0.1", s.port)), s.connect(False)]
        near(is_closed(raw[0], 3), 0.3, 1.5)
        near(is_closed(raw[1], 3), 0.0, 1.5)
        drip = socket.create_connection(("127.0.0.1", s.port))
        begin = time.monotonic()
        try:
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40):
                drip.send(bytes([byte]))
                time.sleep(0.1)
            raise AssertionError("a dripping handshake goes on")
        except OSError:
            near(time.monotonic() - begin, 0.3, 1.5)
        assert s.stats()["cut_timeout"] == 3


def test_header_time():
    with Server(header_timeout_ms=600) as s:
        for tls in (True, False):
            c = s.h1(tls)
            c.sendall(b"GET / HTTP/1.1\r\n")
            data, seconds = drip(c, 30, 0.1)
            near(seconds, 0.3, 1.5)
            assert data.startswith(b"HTTP/1.1 408 ") and b'"code":"timeout"' in data, data
        near(is_closed(s.h1(), 3), 0.3, 1.5)  # says nothing at all
        near(is_closed(s.connect(alpn="h2"), 3), 0.3, 1.5)  # no preface
        c = s.h2()
        block = frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block())
        begin = time.monotonic()
        try:
            for byte in block * 2:
                c.send(bytes([byte]))
                time.sleep(0.06)
            raise AssertionError("dripping HEADERS go on")
        except OSError:
            near(time.monotonic() - begin, 0.3, 2.0)
        c = s.h2()
        c.send(frame(HEADERS, END_STREAM, 1, header_block()))  # CONTINUATION never comes
        near(is_closed(c.sock, 3), 0.3, 1.5)


def test_body_time():
    with Server(body_timeout_ms=700, header_timeout_ms=400) as s:
        c = s.h1()
        c.sendall(b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\n\r\n")
        data, seconds = drip(c, 40, 0.1)
        near(seconds, 0.5, 1.6)
        assert data.startswith(b"HTTP/1.1 408 "), data
        c = s.h2()
        stream = c.request("/echo", "POST", end=False)
        begin = time.monotonic()
        try:
            for _ in range(40):
                c.send(frame(DATA, 0, stream, b"x"))
                time.sleep(0.1)
            raise AssertionError("a dripping body goes on")
        except OSError:
            near(time.monotonic() - begin, 0.5, 2.0)


def test_idle_time():
    with Server(idle_timeout_ms=700) as s:
        c = s.h1()
        h1_get(c, "/")
        near(is_closed(c, 3), 0.5, 1.6)
        c = s.h2()
        c.get("/")
        begin = time.monotonic()
        while c.step():
            pass
        near(time.monotonic() - begin, 0.5, 1.6)
        assert c.goaway and c.goaway[1] == 0
        # a running answer is not idle
        assert h1_get(s.h1(), "/sse?n=2&ms=900").body.count(b"data") == 2
        assert s.h2().get("/sse?n=2&ms=900").body.count(b"data") == 2


def test_a_reader_that_takes_nothing_is_cut():
    with Server(stall_timeout_ms=1000) as s:
        for h2 in (False, True):
            for tls in (True, False):
                c = (s.h2 if h2 else s.h1)(tls, rcvbuf=4096, **(dict(window=0x7fffffff) if h2 else {}))
                if h2:
                    c.send(frame(WINDOW, 0, 0, struct.pack(">I", 0x7fff0000 - 65535)))
                    c.request("/flood?n=100000000")
                else:
                    c.sendall(b"GET /flood?n=100000000 HTTP/1.1\r\nhost: t\r\n\r\n")
                time.sleep(0.3)
                assert s.stats()["streaming"] == 1
                near(s.wait_stat("streaming", 0, 5), 0.3, 3)
        assert s.stats()["cut_slow"] == 4


def test_a_slow_reader_that_makes_progress_stays():
    with Server(stall_timeout_ms=700) as s:
        c = s.h1(False, rcvbuf=4096)
        c.sendall(b"GET /flood?n=1000000 HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        got = 0
        for _ in range(20):
            got += len(c.recv(20000))
            time.sleep(0.1)
        got += len(read_all(c))
        assert got > 1000000 and s.stats()["cut_slow"] == 0


def test_a_closed_window_ends_the_stream_alone():
    with Server(stall_timeout_ms=800) as s:
        c = s.h2()
        c.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 24)))
        stuck, other = c.request("/flood?n=1000000"), c.request("/sse?n=300&ms=10")
        begin = time.monotonic()
        while c.streams[stuck]["reset"] is None:
            f = c.recv_frame()
            assert f, "the connection went down"
            if f[0] == RST and f[2] == stuck:
                break
            if f[0] == DATA and f[2] == other:
                n = struct.pack(">I", len(f[3]))
                c.streams[other]["body"] += f[3]
                c.send(frame(WINDOW, 0, other, n) + frame(WINDOW, 0, 0, n))
        near(time.monotonic() - begin, 0.5, 2.5)
        assert c.wait(other)["body"].count(b"data") == 300
        assert s.stats()["cut_slow"] == 1


def test_refused_requests_do_not_wait_for_ever_either():
    with Server(stall_timeout_ms=700, path_bytes=100) as s:
        c = s.h2(window=0)
        stuck = [c.request("/" + "a" * 200) for _ in range(20)]
        begin = time.monotonic()
        for stream in stuck:
            assert c.wait(stream)["reset"] is not None
        near(time.monotonic() - begin, 0.4, 2.5)
        stats = s.stats()
        assert stats["streams"] == 1 and stats["gone"] == 0, stats


def test_running_out_of_descriptors_is_survived():
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    s = Server()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with s:
        held = []
        for _ in range(60):
            c = socket.create_connection(("127.0.0.1", s.clear_port))
            c.sendall(b"GET /hold HTTP/1.1\r\nhost: t\r\n\r\n")
            held.append(c)
        cpu = "/proc/%d/stat" % s.proc.pid
        before = sum(int(x) for x in open(cpu).read().split()[13:15])
        time.sleep(1)
        used = sum(int(x) for x in open(cpu).read().split()[13:15]) - before
        assert used < 50, f"{used} ticks of CPU in a second of waiting"
        for c in held:
            c.close()
        time.sleep(0.5)
        s.wait_stat("holding", 0)


def test_a_slow_reader_pauses_only_itself():
    with Server(stream_pause_bytes=65536) as s:
        c = s.h2()
        slow = c.request("/flood?n=3000000")
        time.sleep(0.3)
        stats = s.stats()
        assert stats["paused"] >= 1 and stats["streaming"] == 1
        begin = time.monotonic()
        for _ in range(50):
            assert h1_get(s.h1(False), "/").status == 200
        assert time.monotonic() - begin < 5
        c.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 24)) + frame(WINDOW, 0, slow, struct.pack(">I", 1 << 24)))
        assert len(c.wait(slow)["body"]) == 3000000
        assert s.stats()["resumed"] >= 1


def test_a_handler_that_ignores_the_pause_loses_the_client():
    with Server(stream_cut_bytes=200000) as s:
        for h2 in (True, False):
            if h2:
                c = s.h2()
                assert c.wait(c.request("/flood?n=3000000&heed=0"))["reset"] is not None
                assert c.get("/").status == 200
            else:
                c = s.h1(rcvbuf=4096)
                c.sendall(b"GET /flood?n=30000000&heed=0 HTTP/1.1\r\nhost: t\r\n\r\n")
                assert len(read_all(c)) < 3000000
            s.wait_stat("streaming", 0)
        assert s.stats()["cut_slow"] == 2


if __name__ == "__main__":
    run(globals())
