"""`make soak`: mixed traffic for so many seconds, and behind it nothing is left over.

Whole answers, streams, several sequences, conversations that share prefixes, prompts longer than HBM holds, slow readers, clients
that leave at any moment, bad requests and broken framing, against a daemon whose two tiers are too small for all of it. In between
and at the end, when nobody asks, every block is free or cached, and descriptors, threads and memory are what they were.

usage: soak.py [SECONDS]        SOAK_DEVICE: mock (the preset), or cpu with the default model; SOAK_SEED"""
import collections
import json
import os
import random
import re
import socket
import struct
import sys
import threading
import time

from _server import done, eventually, ok, request
from _spind import COMPLETION, CHAT, JSON, get, mock, real

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60
DEVICE = os.environ.get("SOAK_DEVICE", "mock")
SEED = int(os.environ.get("SOAK_SEED", "1"))
WORKERS = 24
RSS_KIB = 16384  # what malloc may keep of what it had
CONTEXT = 3072 if DEVICE == "mock" else 2048
FLAGS = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "12", "--max-num-queued-reqs", "16", "--max-num-batched-tokens", "1024",
         "--sparse", "wave", "--sparse-budget", "0.1", "--sparse-offer", "quest", "--block-size", "8", "--header-timeout", "3",
         "--stream-buffer", "128K"]
# Every status that is an answer to what is asked here; 500 is none.
EXPECTED = {"200", "400", "401", "404", "405", "408", "413", "414", "415", "431", "503", "cut", "silent", "gone"}


def start():
    if DEVICE == "cpu":
        return real(*FLAGS, "--kv-hbm", "120M", "--kv-dram", "200M")
    return mock(*FLAGS, "--mock-step-us", "1500", "--kv-hbm", "100M", "--kv-dram", "240M")


# ---- one of everything ----


def ids(r, n):
    return [r.randrange(1, 250) for _ in range(n)]


def body(r, **more):
    n = r.choice([3, 20, 60, 200]) if r.random() < 0.7 else r.randrange(CONTEXT // 3, CONTEXT - 300)
    prompt = ids(r, n)
    if r.random() < 0.3:  # a beginning that others have, too
        prompt[:n // 2] = ids(random.Random(n), n // 2)
    b = {"prompt": prompt, "max_tokens": r.choice([1, 8, 30, 250]), "temperature": r.choice([0, 1]), "ignore_eos": True, **more}
    if r.random() < 0.2:
        b.update(r.choice([{"n": 3, "temperature": 1}, {"logprobs": 3}, {"echo": True, "logprobs": 1}, {"stop": ["zq", "q"]},
                           {"sparse": {"plugin": "quest", "budget": 0.2}}, {"sparse": {"plugin": "dense"}}, {"seed": 7}]))
    return b


def send(server, data, rcvbuf=0, timeout=180):
    s = server.connect(timeout, rcvbuf)
    s.sendall(data)
    return s


def post(server, b, path=COMPLETION, **more):
    raw = b if isinstance(b, bytes) else json.dumps(b).encode()
    return send(server, request("POST", path, JSON + "Connection: close\r\n", raw, key=None), **more)


def status_of(raw):
    found = re.match(rb"HTTP/1\.1 (\d{3})", raw)
    return found.group(1).decode() if found else "silent"


def all_of(s):
    """What a patient client hears: the status, and whether a stream came to its end."""
    raw = b""
    with s:
        while True:
            part = s.recv(65536)
            if not part:
                break
            raw += part
    status = status_of(raw)
    return "cut" if status == "200" and b"text/event-stream" in raw and b"data: [DONE]" not in raw else status


def reset(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()
    return "gone"


def whole(server, r):
    return all_of(post(server, body(r)))


def stream(server, r):
    return all_of(post(server, body(r, stream=True, stream_options={"include_usage": True})))


def chat(server, r):
    said = [{"role": "user", "content": "tell me more " * r.randrange(1, 20)} for _ in range(r.randrange(1, 3))]
    return all_of(post(server, {"messages": said, "max_tokens": 20, "stream": r.random() < 0.5}, CHAT))


def leaves(server, r):
    """In the middle of a stream, or before anything came."""
    s = post(server, body(r, stream=True, max_tokens=400))
    if r.random() < 0.7:
        s.recv(r.choice([1, 300, 4000]))
    time.sleep(r.random() * 0.05)
    if r.random() < 0.5:
        return reset(s)
    s.close()
    return "gone"


def half(server, r):
    """Says that it will not say more, and reads on; or never says all."""
    raw = json.dumps(body(r)).encode()
    head = request("POST", COMPLETION, JSON, raw, key=None)
    s = send(server, head[:r.randrange(1, len(head))])
    if r.random() < 0.5:
        s.shutdown(socket.SHUT_WR)
    s.settimeout(0.3)
    try:
        return status_of(s.recv(100)) if r.random() < 0.5 else reset(s)
    except OSError:
        return "silent"
    finally:
        s.close()


def slow(server, r):
    """Reads less than is written, and loses patience."""
    s = post(server, body(r, stream=True, max_tokens=1500, logprobs=4), rcvbuf=4096)
    end = time.monotonic() + 2 * r.random()
    while time.monotonic() < end and s.recv(200):
        time.sleep(0.03)
    s.close()
    return "gone"


def bad(server, r):
    b = r.choice([b"{", b"[]", b"\xff\xfe", {"prompt": ids(r, CONTEXT + 1)}, {"prompt": [-1]}, {"prompt": "x", "n": 10**6},
                  {"prompt": "x", "max_tokens": -1}, {"prompt": "x", "logit_bias": {"99999999": 1}}, {"prompt": "x", "model": "nobody"},
                  {"prompt": "x", "sparse": {"plugin": "nobody"}}, {"prompt": "x", "max_tokens": 10**9}, {"prompt": []},
                  b'{"prompt":' + b"[" * 500, b'{"prompt":"x","n":1,"n":2}'])
    return all_of(post(server, b, r.choice([COMPLETION, CHAT, COMPLETION, "/v1/nothing"])))


def broken(server, r):
    data = r.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                     b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                     b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"x: y\r\n" * 200 + b"\r\n",
                     b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    return all_of(send(server, data))


def asks_around(server, r):
    many = request("GET", "/v1/models", key=None) * 5 + request("GET", "/metrics", "Connection: close\r\n", key=None)
    return all_of(send(server, many)) if r.random() < 0.3 else str(get(server, r.choice(["/health", "/metrics", "/v1/models", "/version"])).status)


KINDS = [(whole, 20), (stream, 20), (chat, 8), (leaves, 14), (half, 6), (slow, 5), (bad, 14), (broken, 8), (asks_around, 5)]


# ---- the traffic ----


class Traffic:
    def __init__(self, server, seconds, seed):
        self.server, self.end, self.seen, self.lock = server, time.monotonic() + seconds, collections.Counter(), threading.Lock()
        self.most = 0  # that the gauges saw held
        self.threads = [threading.Thread(target=self.work, args=(random.Random(seed * 1000 + i),)) for i in range(WORKERS)]
        for t in self.threads:
            t.start()

    def work(self, r):
        kinds, weights = zip(*KINDS)
        while time.monotonic() < self.end and self.server.process.poll() is None:
            kind = r.choices(kinds, weights)[0]
            try:
                what = kind(self.server, r)
            except OSError as e:  # closed on us while we were writing: we said too much
                what = "gone" if kind in (bad, broken, half, slow, leaves) else repr(e)
            with self.lock:
                self.seen[kind.__name__, what] += 1
            if what == "503":
                time.sleep(0.02 * r.random())

    def wait(self):
        told = time.monotonic()
        for t in self.threads:
            while t.is_alive():
                t.join(1)
                self.most = max(self.most, held(self.server))
                if time.monotonic() - told >= 10:
                    told = time.monotonic()
                    print(f"# {sum(self.seen.values())} requests, {self.server.rss_kib()} KiB", flush=True)


def gauges(server):
    found = re.findall(r"^(\S+) (\S+)$", get(server, "/metrics").body.decode(), re.M)
    return {k: float(v) for k, v in found}


def held(server):
    """Of what should be nothing when nobody asks."""
    g = gauges(server)
    used = sum(v for k, v in g.items() if k.startswith("spind_kv_blocks{") and 'state="used"' in k)
    busy = sum(v for k, v in g.items() if k.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")))
    return used + busy


class Left:
    """What the daemon has when nobody asks."""

    def __init__(self, server):
        self.idle = eventually(lambda: held(server) == 0, 20)
        pid = server.process.pid
        self.blocks = int(held(server))
        eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= Left.least_fds, 5)
        self.fds, self.threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
        eventually(lambda: server.rss_kib() <= Left.least_rss, 12)  # malloc gives back what is unused for 10 s
        self.rss = server.rss_kib()

    least_fds = least_rss = 0


def main():
    server = start()
    Traffic(server, max(5, SECONDS / 4), SEED).wait()  # pools and caches reach their size
    before = Left(server)
    Left.least_fds, Left.least_rss = before.fds, before.rss
    traffic = Traffic(server, 3 * SECONDS / 4, SEED + 1)
    traffic.wait()
    after = Left(server)
    for (kind, what), n in sorted(traffic.seen.items()):
        print(f"# {kind}: {what} {n}")
    strange = {k: n for k, n in traffic.seen.items() if k[1] not in EXPECTED or (k[1] == "cut" and k[0] in ("stream", "chat"))}
    ok(strange == {} and server.process.poll() is None, "every request has an answer of those that there are", strange, server.log[-3000:])
    served = sum(n for (kind, what), n in traffic.seen.items() if kind in ("whole", "stream", "chat") and what == "200")
    kinds = {k for k, _ in traffic.seen}
    ok(served > 20 and len(kinds) == len(KINDS), f"{served} answers came whole, and every kind of trouble was made", traffic.seen)
    g = gauges(server)
    moved = sum(v for k, v in g.items() if k.startswith(("spind_kv_changes_total{", "vllm:num_preemptions_total{")))
    ok(moved > 0, f"HBM was too small {moved:.0f} times", {k: v for k, v in g.items() if "kv_" in k})
    print(f"leaked: blocks {after.blocks}, fds {after.fds - before.fds}, threads {after.threads - before.threads}, "
          f"rss {after.rss - before.rss} KiB", flush=True)
    ok(before.idle and after.idle and after.blocks == 0 and traffic.most > 100,
       "every block is free or cached, and nobody runs or waits, where hundreds were held", after.__dict__, traffic.most)
    ok(after.fds <= before.fds and after.threads == before.threads, "no descriptor and no thread is left over", before.__dict__, after.__dict__)
    ok(after.rss - before.rss <= RSS_KIB, "memory is what it was", before.__dict__, after.__dict__)
    ok(server.stop() == 0 and " E " not in server.log, "it ends well, and never said an error", server.log[-3000:])
    done()


main()
