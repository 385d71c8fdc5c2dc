"""Clients that do everything wrong, at random but with a printed seed. The server must survive, forget them all, and keep
serving the one well-behaved client. DN_CHAOS_SECONDS (default 6) and DN_CHAOS_SEED choose budget and seed."""
import os
import random
import socket
import ssl
import struct
import threading
import time

from http_lib import *

SECONDS = float(os.environ.get("DN_CHAOS_SECONDS", "6"))
SEED = int(os.environ.get("DN_CHAOS_SEED", str(int(time.time()))))
PATHS = ["/", "/echo", "/sse?n=20&ms=2", "/hold", "/flood?n=300000", "/flood?n=3000000&heed=0", "/abort?n=100", "/stats", "/none"]


def random_bytes(rng, n):
    return rng.getrandbits(8 * n).to_bytes(n, "big") if n else b""


def some_frames(rng, streams):
    """A burst of valid, odd and broken frames."""
    out = b""
    for _ in range(rng.randint(1, 30)):
        stream = rng.choice(streams + [0, 1, 3, rng.randrange(1, 1 << 31)])
        kind = rng.randrange(12)
        if kind == 0:
            out += frame(DATA, rng.randrange(2), stream, random_bytes(rng, rng.choice([0, 1, 500, 16384])))
        elif kind in (1, 2):
            new = (streams[-1] if streams else -1) + 2
            streams.append(new)
            out += frame(HEADERS, rng.choice([4, 5, 5, 5, 1, 0, 0x25]), new, header_block(rng.choice(PATHS), rng.choice(["GET", "POST"])))
        elif kind == 3:
            out += frame(PRIORITY, 0, stream, random_bytes(rng, rng.choice([5, 5, 4])))
        elif kind == 4:
            out += frame(RST, 0, stream, struct.pack(">I", rng.randrange(16)))
        elif kind == 5:
            out += frame(SETTINGS, 0, 0, struct.pack(">HI", rng.randrange(8), rng.choice([0, 1, 16384, 65535, 0x7fffffff, 0xffffffff])))
        elif kind == 6:
            out += frame(PING, rng.randrange(2), 0, random_bytes(rng, 8))
        elif kind == 7:
            out += frame(WINDOW, 0, stream, struct.pack(">I", rng.choice([0, 1, 1000, 0x7fffffff])))
        elif kind == 8:
            out += frame(CONTINUATION, rng.choice([0, 4]), stream, header_block())
        elif kind == 9:
            out += frame(GOAWAY, 0, 0, struct.pack(">II", 0, rng.randrange(14)))
        elif kind == 10 and rng.random() < 0.2:
            out += frame(rng.randrange(256), rng.randrange(256), stream, random_bytes(rng, rng.randrange(100)))
    if rng.random() < 0.3 and out:  # damage
        at = rng.randrange(len(out))
        out = out[:at] + bytes([rng.randrange(256)]) + out[at + 1:]
    return out


def leave(rng, sock):
    how = rng.randrange(4)
    if how == 0:
        reset(sock)
    elif how == 1:
        try:
            socket.socket(fileno=os.dup(sock.fileno())).shutdown(socket.SHUT_WR)
            sock.settimeout(0.05)
            sock.recv(100)
        except OSError:
            pass
        sock.close()
    else:
        sock.close()


def fuzz_h2(rng, server):
    tls = rng.random() < 0.5
    c = server.h2(tls, timeout=0.2)
    streams = []
    for _ in range(rng.randint(1, 12)):
        c.send(some_frames(rng, streams))
        if rng.random() < 0.3:
            c.sock.recv(rng.choice([1, 1000, 100000]))
    leave(rng, c.sock)


def fuzz_h1(rng, server):
    c = server.h1(rng.random() < 0.5, timeout=0.2)
    for _ in range(rng.randint(1, 6)):
        path = rng.choice(PATHS)
        body = random_bytes(rng, rng.choice([0, 10, 5000, 200000]))
        text = rng.choice([
            f"GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode(),
            f"POST {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body,
            f"POST {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body) + 5}\r\n\r\n".encode() + body,
            f"POST {path} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n{rng.choice(['0', 'zz', 'ffffffffffff'])}\r\n\r\n".encode(),
            b"\r\n\r\n" + random_bytes(rng, 50),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + some_frames(rng, []),
            f"GET {path} HTTP/1.0\r\n\r\n".encode(),
        ])
        if rng.random() < 0.2:
            text = text[:rng.randrange(len(text))]
        c.sendall(text)
        if rng.random() < 0.5:
            c.recv(rng.choice([1, 100, 100000]))
    leave(rng, c)


def half_handshake(rng, server):
    s = socket.create_connection(("127.0.0.1", server.port), 1)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl._create_unverified_context()
    obj = context.wrap_bio(incoming, outgoing)
    for _ in range(2):
        try:
            obj.do_handshake()
        except ssl.SSLWantReadError:
            pass
        data = outgoing.read()
        if rng.random() < 0.3:
            data = data[:rng.randrange(len(data) + 1)]
        if rng.random() < 0.3 and data:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1:]
        s.sendall(data)
        if rng.random() < 0.4:
            break
        s.settimeout(0.2)
        incoming.write(s.recv(65536))
    leave(rng, s)


def garbage(rng, server):
    s = socket.create_connection(("127.0.0.1", rng.choice([server.port, server.clear_port])), 1)
    s.sendall(random_bytes(rng, rng.randrange(1, 3000)))
    leave(rng, s)


def broken_record(rng, server):
    c = server.h1(timeout=0.2)
    c.sendall(b"GET /sse?n=1000&ms=1 HTTP/1.1\r\nhost: t\r\n\r\n")
    socket.socket(fileno=os.dup(c.fileno())).sendall(b"\x17\x03\x03\x00\x30" + random_bytes(rng, 48))
    c.recv(10)
    leave(rng, c)


def slow_reader(rng, server):
    c = server.h2(rng.random() < 0.5, rcvbuf=4096, timeout=0.3)
    c.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 30)))
    for _ in range(rng.randint(1, 20)):
        c.request(rng.choice(PATHS))
    for _ in range(rng.randrange(10)):
        c.step(open_window=rng.random() < 0.5)
        time.sleep(0.01)
    leave(rng, c.sock)


BEHAVIOURS = [fuzz_h2, fuzz_h2, fuzz_h2, fuzz_h1, fuzz_h1, half_handshake, garbage, broken_record, slow_reader]


def test_chaos():
    print(f"      seed {SEED}, {SECONDS} s")
    with Server(loops=2, stall_timeout_ms=1500, header_timeout_ms=1500, body_timeout_ms=2500, handshake_timeout_ms=1500,
                idle_timeout_ms=1500, body_bytes_inflight=400000, body_bytes=150000) as s:
        end, count, stop = time.monotonic() + SECONDS, [0] * 4, []

        def worker(i):
            rng = random.Random(SEED * 100 + i)
            while time.monotonic() < end and not stop:
                try:
                    rng.choice(BEHAVIOURS)(rng, s)
                except (OSError, AssertionError, ValueError):
                    pass
                count[i] += 1
                if s.proc.poll() is not None:
                    stop.append(1)
        threads = [threading.Thread(target=worker, args=(i,)) for i in range(len(count))]
        for t in threads:
            t.start()
        slowest, served = 0, 0
        while any(t.is_alive() for t in threads) and s.proc.poll() is None:
            begin = time.monotonic()
            r = h1_get(s.h1(timeout=20), "/") if served % 2 else s.h2(timeout=20).get("/")
            assert r.status == 200
            served += 1
            slowest = max(slowest, time.monotonic() - begin)
            time.sleep(0.05)
        for t in threads:
            t.join()
        assert s.proc.poll() is None, "the server died"
        print(f"      {sum(count)} hostile connections, {served} good ones, slowest {slowest * 1000:.0f} ms")
        begin = time.monotonic()
        while s.stats()["connections"] > 1:  # all are forgotten when their timers are over
            assert time.monotonic() - begin < 12, s.stats()
            time.sleep(0.1)
        stats = s.stats()
        assert stats["holding"] == 0 and stats["streaming"] == 0, stats


if __name__ == "__main__":
    run(globals())
