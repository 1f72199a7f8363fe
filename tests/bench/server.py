"""What the server costs: tokens through SSE and added latency, with the mock backend.

usage: server.py BUILD JSON      BUILD holds spind and tests/bench/http; JSON gets the key "server" added

Two loads. "flat out": the mock makes tokens as fast as the engine can hand them over; the rate is
that of everything on the way: engine thread, mailbox, text, JSON, HTTP, sockets, and a client that
shares the cores. "paced": a step every 10 ms, as a model would; the latency is from the end of a
step to the arrival of the bytes at the client, so it holds waking the loop, all the writes before
one's own, the kernel's loopback, and waking the client.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading

ROUNDS = 5
FLAT = [(1, 15000), (64, 15000), (256, 4000)]
PACED = [1, 8, 64]


def serve(build, *flags):
    daemon = subprocess.Popen(
        [f"{build}/spind", "serve", "--device", "mock", "--port", "0", *flags], stderr=subprocess.PIPE, text=True)
    for line in daemon.stderr:
        found = re.search(r"listening on http://[^:]+:(\d+)", line)
        if found:
            threading.Thread(target=daemon.stderr.read, daemon=True).start()  # nobody else reads its log
            return daemon, found.group(1)
    sys.exit("server.py: the daemon did not start")


def client(build, *args):
    out = subprocess.run([f"{build}/tests/bench/http", *map(str, args)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(out.stdout)


def stop(daemon):
    daemon.terminate()
    daemon.wait()


def flat_out(build):
    rows = {}
    for streams, tokens in FLAT:
        daemon, port = serve(build, "--max-num-seqs", "256", "--max-model-len", "16384")
        runs = [client(build, port, streams, tokens) for _ in range(ROUNDS)]
        stop(daemon)
        rows[f"flat_{streams}"] = {
            "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in runs)),
            "tokens_per_event": round(statistics.median(r["tokens_per_event"] for r in runs), 2)}
    return rows


def paced(build):
    rows = {}
    for streams in PACED:
        with tempfile.TemporaryDirectory() as folder:
            trace = os.path.join(folder, "trace")
            daemon, port = serve(build, "--mock-step-us", "10000", "--mock-trace", trace)
            run = client(build, port, streams, 300, trace)
            stop(daemon)
        rows[f"paced_{streams}"] = run["latency_ms"]
    return rows


def main():
    build, path = sys.argv[1], pathlib.Path(sys.argv[2])
    rows = flat_out(build) | paced(build)
    print(f"\nserver with the mock backend (medians of {ROUNDS} runs; client on the same cores)")
    for name, row in rows.items():
        kind, streams = name.split("_")
        if kind == "flat":
            print(f"  flat out, {streams:>3} streams  {row['tokens_per_s']:>9,} tokens/s   {row['tokens_per_event']} tokens per event")
        else:
            print(f"  10 ms step, {streams:>2} streams  added latency ms: p50 {row['p50']:.3f}  p90 {row['p90']:.3f}  p99 {row['p99']:.3f}")
    result = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(result | {"server": rows}, indent=2) + "\n")


main()
