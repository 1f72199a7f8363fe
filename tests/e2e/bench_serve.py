"""`spind bench serve` against our own server on the mock device, whose step time is known, and against a
small server that misbehaves in every way that a server can."""
import json
import os
import random
import socket
import subprocess
import tempfile
import threading
import time


from _server import done, ok
from _spind import _server, mock

STEP_MS = 20
KEY = "s3cret"


def bench(url, *args, timeout=60):
    """(exit status, the JSON it wrote, stdout, stderr)"""
    with tempfile.TemporaryDirectory() as folder:
        path, svg = os.path.join(folder, "b.json"), os.path.join(folder, "b.svg")
        p = subprocess.run([_server.BINARY, "bench", "serve", "--url", url, "--json", path, "--svg", svg, *args],
                           capture_output=True, text=True, timeout=timeout)
        sheet = None
        if os.path.exists(path):
            with open(path) as f:
                sheet = json.load(f)
            sheet["svg"] = open(svg).read() if os.path.exists(svg) else ""
        return p.returncode, sheet, p.stdout, p.stderr


def row(sheet, turn="all"):
    return next(r for r in sheet["rows"] if r["turn"] == turn)


# ---- our own server ----


def numbers_are_the_mocks():
    server = mock("--mock-step-us", str(STEP_MS * 1000), "--mock-first-token", "97", "--mock-n-tokens", "26",
                  "--max-model-len", "8192", "--max-num-batched-tokens", "8192", key=KEY)
    url = f"http://127.0.0.1:{server.port}"
    ids = ("--id-range", "1,250", "--api-key", KEY)
    rc, s, out, _ = bench(url, "--workload", "stream", "--users", "4", "--turns", "2", "--in", "40", "--out", "30",
                          "--slo", f"ttft={5 * STEP_MS}ms,tpot={STEP_MS / 2}ms", *ids)
    r = row(s)
    ok(rc == 0 and (r["good"], r["failed"]) == (8, 0) and s["output_tokens"] == 240 and s["errors"] == [],
       "streams: all is answered, at full length", out)
    ok(STEP_MS <= r["tpot_p50_ms"] < 1.25 * STEP_MS and 0.9 * STEP_MS < r["itl_p50_ms"] < 1.25 * STEP_MS,
       "a token takes a step", r)
    ok(0.9 * STEP_MS < r["ttft_p50_ms"] < 3 * STEP_MS, "the first one takes a step or two", r)
    ok(r["prompt_tokens"] == 40 and r["tokens_per_event"] == 1, "prompts have the length that was asked for", r)
    rate = 4 * 1000 / STEP_MS
    ok(0.7 * rate < s["output_tokens_per_s"] < rate, "four streams have four tokens per step", s["output_tokens_per_s"])
    ok(s["in_time"] == 0 and s["goodput_per_s"] == 0, "a TPOT of half a step is kept by none", s["in_time"])
    ok(s["svg"].startswith("<svg") and "TTFT" in s["svg"] and s["svg"].rstrip().endswith("</svg>"), "and there is a picture")

    rc, s, out, _ = bench(url, "--workload", "sessions", "--users", "3", "--turns", "3", "--document", "1500", "--in", "20",
                          "--out", "10", "--pause", "0.1", "--stagger", "0.05", "--slo", "ttft=10s", *ids)
    ok(rc == 0 and [row(s, t)["good"] for t in "123"] == [3, 3, 3], "sessions: three turns of three users", out)
    ok([row(s, t)["prompt_tokens"] for t in "123"] == [1520, 1550, 1580], "a prompt holds what was said before",
       [row(s, t)["prompt_tokens"] for t in "123"])
    ok(row(s, "1")["cached"] < 0.1 and row(s, "2")["cached"] > 0.9 and row(s, "3")["cached"] > 0.9,
       "so the prefix cache has it, the answers' tokens too", s["rows"])
    ok(s["in_time"] == 9 and "token_ids" not in out, "all are in time, and the server gave the ids", out)

    rc, s, out, _ = bench(url, "--workload", "sessions", "--users", "2", "--turns", "2", "--document", "30", "--in", "5", "--out",
                          "8", "--pause", "0", "--prompt-kind", "chat", "--api-key", KEY)
    ok(rc == 0 and row(s)["good"] == 4 and row(s, "2")["prompt_tokens"] > row(s, "1")["prompt_tokens"] + 8,
       "a chat, with the answer as a message of its own", out)
    rc, s, out, _ = bench(url, "--workload", "poisson", "--requests", "12", "--rate", "100", "--in", "10", "--out", "5",
                          "--prompt-kind", "text", "--api-key", KEY)
    ok(rc == 0 and row(s)["good"] == 12, "prompts as text", out)

    rc, s, out, _ = bench(url, "--workload", "poisson", "--requests", "6", "--rate", "20", "--in", "40", "--out", "5", *ids,
                          "--flood-users", "30", "--flood-in", "400", "--flood-out", "20", "--flood-lead", "2")
    flood = s["flood"]
    ok(rc == 0 and (row(s)["good"], row(s, "alone")["good"]) == (6, 6) and flood["users"] == 30 and row(s)["cached"] == 0,
       "the same load alone and beside a flood, with prompts that nobody knows", out)
    ok(row(s, "flood")["good"] > 30 and row(s, "flood")["prompt_tokens"] == 400 and flood["tokens_seen"] > 20 * row(s, "flood")["good"],
       "which asks again as soon as it is answered, and stops when the load is done", s["rows"])
    ratio = row(s)["ttft_p99_ms"] / row(s, "alone")["ttft_p99_ms"]
    ok(abs(flood["ttft_p99_ratio"] - ratio) < 1e-6 and f"{ratio:.2f}x at p99" in out, "and how much slower that was is told", out)
    rc, s, out, _ = bench(url, "--workload", "poisson", "--requests", "3", "--rate", "20", "--in", "40", "--out", "5", *ids,
                          "--flood-users", "4", "--flood-key", "wrong", "--flood-lead", "1.2")
    ok(rc == 0 and row(s, "flood")["good"] == 0 and row(s, "flood")["failed"] >= 8 and "HTTP 401" in out,
       "whom the server refuses asks again after a second, and spoils nothing", out)
    rc, s, out, errors = bench(url, "--flood-key", "x")
    ok(rc == 2 and s is None and "--flood-users" in errors, "a key of nobody is an error", errors)

    rc, s, out, _ = bench(url, "--workload", "poisson", "--requests", "8", "--rate", "200", "--in", "10", "--out", "5", *ids,
                          "--extra", '{"top_k": -5}')
    ok(rc == 1 and row(s)["failed"] == 8 and [e["n"] for e in s["errors"]] == [8] and "HTTP 400" in s["errors"][0]["text"]
       and "FAILED: 8 of 8" in out, "what the server refuses is counted, and why", out)
    rc, s, out, _ = bench(url, "--workload", "stream", "--users", "1", "--turns", "1", *ids[:2])
    ok(rc == 1 and "HTTP 401" in s["errors"][0]["text"], "without the key too", out)
    began = time.monotonic()
    rc, s, _, _ = bench(url, "--workload", "poisson", "--requests", "10", "--rate", "20", "--seed", "3", "--in", "4", "--out", "1",
                        *ids)
    r = random.Random(3)
    arrivals = [r.expovariate(20) for _ in range(9)]
    ok(sum(arrivals) <= s["seconds"] < sum(arrivals) + 1 and time.monotonic() - began < 10,
       "arrivals are those of Python's generator", s["seconds"], sum(arrivals))
    server.stop()


# ---- a server that misbehaves ----


class Fake:
    """One behaviour per path: /NAME/v1/completions."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.bodies, self.connections = [], 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                s, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.serve, args=(s,), daemon=True).start()

    def serve(self, s):
        data = b""
        n = 0
        try:
            while True:
                while b"\r\n\r\n" not in data:
                    got = s.recv(65536)
                    if not got:
                        return
                    data += got
                head, _, data = data.partition(b"\r\n\r\n")
                length = int(next(x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")).split(b":")[1])
                while len(data) < length:
                    data += s.recv(65536)
                body, data = json.loads(data[:length]), data[length:]
                self.bodies.append(body)
                n += 1
                if not getattr(self, head.split(b"/")[1].decode())(s, body, n):
                    return
        except OSError:
            pass
        finally:
            s.close()

    HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

    @staticmethod
    def chunk(data):
        return b"%x\r\n%s\r\n" % (len(data), data)

    @classmethod
    def event(cls, **fields):
        return cls.chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")

    def tokens(self, s, n, first=0):
        for i in range(n):
            s.sendall(self.event(choices=[{"index": 0, "text": f" t{first + i}", "finish_reason": None}]))

    def last(self, s, n, reason="length"):
        s.sendall(self.event(choices=[{"index": 0, "text": "", "finish_reason": reason}]))
        s.sendall(self.event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n}))
        s.sendall(self.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def good(self, s, body, n):
        s.sendall(self.HEAD)
        self.tokens(s, body["max_tokens"])
        self.last(s, body["max_tokens"])
        return True

    def bytewise(self, s, body, n):
        """Every byte in a segment of its own, CRLF line ends, comments, a field that nobody knows."""
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        page = self.HEAD + self.chunk(b": ping\r\n\r\nevent: x\r\nid: 5\r\n")
        for i in range(body["max_tokens"]):
            page += self.chunk(b'data:{"choices":[{"text":"t"}]}\r\n\r\n')
        page += self.chunk(b'data: {"choices":[{"text":"","finish_reason":"length"}]}\r\n\r\ndata: [DO') + self.chunk(b"NE]\r\n\r\n")
        for b in page + b"0\r\n\r\n":
            s.sendall(bytes([b]))
        return True

    def until_close(self, s, body, n):
        """No length and no chunks: the body ends with the connection."""
        s.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for i in range(body["max_tokens"]):
            s.sendall(b'data: {"choices":[{"text":"t"}]}\n\n')
        s.sendall(b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n')
        return False

    def pairs(self, s, body, n):
        """Two tokens in an event."""
        s.sendall(self.HEAD)
        for i in range(body["max_tokens"] // 2):
            s.sendall(self.event(choices=[{"text": "ab", "token_ids": [5, 6]}]))
        self.last(s, body["max_tokens"])
        return True

    def cut(self, s, body, n):
        s.sendall(self.HEAD)
        self.tokens(s, 2)
        return False

    def no_done(self, s, body, n):
        s.sendall(self.HEAD)
        self.tokens(s, body["max_tokens"])
        s.sendall(b"0\r\n\r\n")
        return True

    def no_reason(self, s, body, n):
        s.sendall(self.HEAD)
        self.tokens(s, body["max_tokens"])
        s.sendall(self.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    def broken(self, s, body, n):
        s.sendall(self.HEAD)
        self.tokens(s, 1)
        s.sendall(self.event(error={"message": "the device failed", "type": "server_error", "code": 500}) + b"0\r\n\r\n")
        return True

    def short(self, s, body, n):
        s.sendall(self.HEAD)
        self.tokens(s, body["max_tokens"] - 1)
        self.last(s, body["max_tokens"] - 1, "stop")
        return True

    def stall(self, s, body, n):
        s.sendall(self.HEAD)
        self.tokens(s, 1)
        time.sleep(3)
        return False

    def silent(self, s, body, n):
        time.sleep(3)
        return False

    def garbage(self, s, body, n):
        s.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
        return False

    def no_json(self, s, body, n):
        s.sendall(self.HEAD + self.chunk(b"data: {oops\n\n") + self.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    def plain(self, s, body, n):
        page = b'{"choices":[{"text":"hello"}]}'
        s.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
        return True

    def busy(self, s, body, n):
        page = b'{"error":{"message":"Too many requests","type":"x"}}'
        s.sendall(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
        return True

    def gone(self, s, body, n):
        return False

    def half(self, s, body, n):
        """The second request of a connection is never answered: the connection was closed while idle."""
        if n > 1:
            return False
        return self.good(s, body, n)


def faults_are_counted():
    fake = Fake()
    url = f"http://127.0.0.1:{fake.port}"
    cases = [
        ("cut", "cut short: the connection ended early"),
        ("no_done", "cut short: the stream ended without [DONE]"),
        ("no_reason", "cut short: [DONE] without a finish_reason"),
        ("broken", "error event: the device failed"),
        ("short", "9 tokens instead of 10"),
        ("stall", "timeout: nothing came for 1 s"),
        ("silent", "timeout: nothing came for 1 s"),
        ("garbage", "malformed: what came is no HTTP answer"),
        ("no_json", "malformed: an event is no JSON object"),
        ("plain", "malformed: the answer is no event stream"),
        ("busy", "HTTP 429: Too many requests"),
        ("gone", "cut short: the connection ended early"),
    ]
    for name, text in cases:
        rc, s, out, err = bench(f"{url}/{name}/v1", "--workload", "stream", "--users", "2", "--turns", "1", "--in", "3", "--out", "10",
                                "--timeout", "1")
        ok(rc == 1 and (row(s)["good"], row(s)["failed"]) == (0, 2) and len(s["errors"]) == 1 and s["errors"][0]["n"] == 2
           and s["errors"][0]["text"].startswith(text) and text in out and s["output_tokens"] == 0,
           f"{name}: {text}", s["errors"] if s else err)
    rc, s, out, _ = bench(f"{url}/short/v1", "--workload", "stream", "--users", "1", "--turns", "1", "--in", "3", "--out", "10", "--any-length")
    ok(rc == 0 and s["output_tokens"] == 9, "shorter answers may be allowed", out)
    rc, s, out, _ = bench(f"{url}/broken/v1", "--workload", "sessions", "--users", "2", "--turns", "3", "--document", "5", "--in", "3",
                          "--out", "4", "--stagger", "0", "--pause", "0")
    ok(rc == 1 and row(s)["failed"] == 2 and s["not_asked"] == 4 and "NOT ASKED: 4" in out, "a conversation ends where an answer failed", out)


def all_kinds_of_streams_are_read():
    fake = Fake()
    url = f"http://127.0.0.1:{fake.port}"
    few = ("--workload", "stream", "--users", "2", "--turns", "2", "--in", "3", "--out", "10")
    rc, s, out, _ = bench(f"{url}/good/v1/", *few)
    ok(rc == 0 and row(s)["good"] == 4 and row(s)["prompt_tokens"] == 7 and "no usage" not in out, "a plain one", out)
    ok(fake.connections == 2 + 1, "a connection serves a user's next request, beside the one that looked for the server",
       fake.connections)
    b = fake.bodies[0]
    ok(len(b["prompt"]) == 3 and b["max_tokens"] == 10 and b["ignore_eos"] is True and b["stream"] is True
       and b["temperature"] == 0 and b["stream_options"] == {"include_usage": True} and "model" not in b, "what is asked", b)
    for name in ("bytewise", "until_close"):
        rc, s, out, _ = bench(f"{url}/{name}/v1", *few)
        ok(rc == 0 and s["output_tokens"] == 40 and "no usage: tokens are counted by events" in out, f"{name}: counted by events", out)
    rc, s, out, _ = bench(f"{url}/pairs/v1", *few)
    ok(rc == 0 and s["output_tokens"] == 40 and row(s)["tokens_per_event"] == 2 and "2.00 tokens per event" in out,
       "two tokens in an event are two tokens", out)
    rc, s, out, _ = bench(f"{url}/half/v1", *few)
    ok(rc == 0 and row(s)["good"] == 4, "a connection that was closed while idle is opened again", out)
    rc, s, out, _ = bench(f"{url}/good/v1", "--workload", "sessions", "--users", "1", "--turns", "2", "--document", "5", "--in", "3", "--out",
                          "4", "--pause", "0", "--model", 'a "name"', "--extra", '{"user":"me"}')
    b = fake.bodies[-1]
    ok(rc == 0 and len(b["prompt"]) == 5 + 3 + 4 + 3 and b["model"] == 'a "name"' and b["user"] == "me"
       and b["return_token_ids"] is True and "without token_ids" in out, "who gives no ids gets others instead, and it is said", out)


def the_vllm_presets_draw_what_vllm_longctx_draws():
    fake = Fake()
    url = f"http://127.0.0.1:{fake.port}/good/v1"
    rc, s, out, _ = bench(url, "--workload", "vllm-poisson", "--rate", "1000", "--out", "2")
    r = random.Random(3)
    for _ in range(24):
        r.expovariate(1000)
    want = [r.randrange(1000, 120000) for _ in range(64000)]
    ok(rc == 0 and row(s)["good"] == 24 and len(fake.bodies) == 24 and want in [b["prompt"] for b in fake.bodies],
       "poisson: 24 prompts of 64,000 ids, the first one the same", out)
    fake.bodies.clear()
    rc, s, out, _ = bench(url, "--workload", "vllm-sessions", "--turns", "1", "--out", "2", "--stagger", "0", "--pause", "0")
    r = random.Random(2)
    documents = [[r.randrange(1000, 120000) for _ in range(64000)] for _ in range(20)]
    got = sorted(b["prompt"][:64000] for b in fake.bodies)
    ok(rc == 0 and got == sorted(documents) and all(len(b["prompt"]) == 64256 for b in fake.bodies),
       "sessions: 20 documents of 64,000 ids, all the same, and 256 more", out)
    rc, s, out, _ = bench(url, "--workload", "vllm-sessions", "--users", "1", "--turns", "1", "--out", "2", "--pause", "0")
    ok(s["workload"]["in"] == 256 and s["workload"]["document"] == 64000 and s["workload"]["stagger_s"] == 0.5, "with its numbers",
       s["workload"])


def words_are_checked():
    for words, text in (
        (["--url", "https://x"], "wanted is http://HOST[:PORT][/v1] (no TLS here)"),
        (["--workload", "posson"], "--workload posson: there are poisson, sessions"),
        (["--slo", "ttft"], "--slo ttft: wanted is"),
        (["--slo", "ttft=2h"], "--slo ttft=2h: wanted is"),
        (["--prompt-kind", "pictures"], "--prompt-kind pictures: there are ids, text and chat"),
        (["--id-range", "5"], "--id-range: wanted are two numbers"),
        (["--id-range", "9,5"], "--id-range: wanted are two numbers"),
        (["--extra", "5"], "--extra: wanted is a JSON object"),
        (["--users", "0"], "--users 0: wanted is a whole number from 1"),
        (["--in", "0"], "a prompt of no token"),
        (["--nonsense", "1"], "unknown option --nonsense"),
    ):
        rc, _, _, err = bench("http://127.0.0.1:1", *words)
        ok(rc == 2 and text in err, " ".join(words), err)
    rc, _, _, err = bench("http://127.0.0.1:1")
    ok(rc == 1 and "127.0.0.1:1: Connection refused" in err, "nobody answers", err)


numbers_are_the_mocks()
all_kinds_of_streams_are_read()
faults_are_counted()
the_vllm_presets_draw_what_vllm_longctx_draws()
words_are_checked()
done()
