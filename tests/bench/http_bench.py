"""HTTPS requests through runtime/http against h2o's own TLS on the same handler, interleaved.

Usage: http_bench.py PATH_OF_HTTP_BENCH [ROUNDS [REQUESTS]]
Prints for each load the median over the rounds: requests/s, p99 (client side), CPU time of the server thread a request.
The last is the figure that counts on a machine with other work.
"""
import os
import re
import statistics
import subprocess
import sys
import tempfile

LOADS = {"h2 16 conns x 10 streams": ["-c", "16", "-m", "10"], "h2 64 conns x 1 stream": ["-c", "64", "-m", "1"],
         "h1 64 conns": ["-c", "64", "--h1"]}


def main():
    binary, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    requests = sys.argv[3] if len(sys.argv) > 3 else "40000"
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([binary, folder + "/c.pem", folder + "/k.pem"], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        ports = dict(zip(("mbedtls", "openssl"), server.stdout.readline().split()[1:]))

        def counters():
            server.stdin.write("\n")
            server.stdin.flush()
            w = server.stdout.readline().split()
            return {w[0]: (int(w[1]), int(w[2])), w[3]: (int(w[4]), int(w[5]))}
        for load, args in LOADS.items():
            rows = {"mbedtls": [], "openssl": []}
            for i in range(rounds):
                for stack in ("mbedtls", "openssl") if i % 2 else ("openssl", "mbedtls"):
                    log = folder + "/log"
                    if os.path.exists(log):
                        os.unlink(log)
                    before = counters()[stack]
                    out = subprocess.run(["h2load", "-n", requests, "--log-file", log] + args + [f"https://127.0.0.1:{ports[stack]}/"],
                                         capture_output=True, text=True).stdout
                    after = counters()[stack]
                    assert f"{requests} succeeded" in out, out
                    times = sorted(int(line.split("\t")[2]) for line in open(log))
                    rows[stack].append((float(re.search(r", ([\d.]+) req/s", out)[1]), times[len(times) * 99 // 100] / 1000,
                                        (after[0] - before[0]) / 1000 / (after[1] - before[1])))
            for stack, r in rows.items():
                print(f"{load:26} {stack}: {statistics.median(x[0] for x in r):9.0f} req/s   p99 {statistics.median(x[1] for x in r):6.2f} ms   "
                      f"CPU {statistics.median(x[2] for x in r):6.2f} us/request (best {min(x[2] for x in r):.2f})", flush=True)
        server.stdin.close()
        server.wait(10)


main()
