"""What a stranger sends to take the daemon down: rows of docs/reliability.md that no other program here tells.
The real daemon on its mock device; raw sockets, and strace where it is allowed. Rows stand in front of the cases.

The binary: SPIND, else spind of the build (SPIND_BUILD)."""
import concurrent.futures
import fcntl
import json
import os
import random
import re
import select
import shutil
import socket
import subprocess
import tempfile
import time

import _server
from _server import Answers, clean_env, done, equal, eventually, ok, read_all, request, skip
from _spind import CHAT, COMPLETION, JSON, PATIENCE, Stream, ask, complete, cstream, get, metrics, mock, quiescent, settles

POOL = concurrent.futures.ThreadPoolExecutor(32)
LETTERS = ("--mock-first-token", "97", "--mock-n-tokens", "26")
KEY = _server.KEY
CALLS = "connect,execve,open,openat,unlink,rename,stat,newfstatat,access,readlink"  # what system_calls looks at
F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ is new in Python 3.10


def served(server):
    return complete(server, "hi", max_tokens=2).status == 200


# ---- A: many at once, each of them slow ----

def trickled(server, sockets, byte, within):
    """A byte to each socket every 0.2 s until all have ended: whether others were served meanwhile, and who is left."""
    fine, end, data = True, time.monotonic() + within, {s: b"" for s in sockets}
    left = list(sockets)
    while left and time.monotonic() < end:
        fine = served(server) and fine
        for s in select.select([], left, [], 0)[1]:
            try:
                s.send(byte)
            except OSError:
                pass
        for s in select.select(left, [], [], 0.2)[0]:
            try:
                got = s.recv(4096)
            except OSError:
                got = b""
            data[s] += got
            if not got:
                left.remove(s)
    for s in sockets:
        s.close()
    return fine, len(left), [int(d[9:12]) for d in data.values() if d.startswith(b"HTTP/1.1 ")]


def slow_heads():
    server = mock("--header-timeout", "2")
    sockets = []
    for _ in range(400):
        sockets.append(server.connect())
        sockets[-1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: ")
    fine, left, statuses = trickled(server, sockets, b"a", PATIENCE)
    ok(left == 0 and 408 in statuses and set(statuses) <= {408, 503}, "A1: 400 clients whose heads trickle are all turned away", left,
       len(statuses), set(statuses))
    ok(fine, "A1: and others are served all the while")
    settles(server, "A1: nothing is left of them")
    equal(server.stop(), 0, "the server ends well")


def slow_bodies():
    server = mock("--body-timeout", "2", "--body-min-rate", "0")
    sockets = []
    for _ in range(200):
        sockets.append(server.connect())
        sockets[-1].sendall(request("POST", CHAT, JSON + "Content-Length: 65536\r\n", key=None) + b'{"messages":"')
    ok(quiescent(server), "A2: a body that is not whole takes no place in the queue and no KV block")
    fine, left, statuses = trickled(server, sockets, b"x", PATIENCE)
    equal((left, statuses), (0, [408] * 200), "A2: 200 clients whose bodies trickle get 408")
    ok(fine, "A2: and others are served all the while")
    settles(server, "A2: nothing is left of them")
    equal(server.stop(), 0, "the server ends well")


def head_bombs(server):
    bombs = [b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 200000 + b"\r\n",
             b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * (7 << 20) + b"\r\n\r\n"]
    served(server)
    before = server.rss_kib()
    got = list(POOL.map(lambda i: server.talk(bombs[i % 2], 20), range(100)))
    equal({tuple(g.statuses) for g in got}, {(431,)}, "A4: 100 heads of 200,000 fields or 7 MiB get 431, and their clients read it")
    rise = server.rss_kib() - before
    ok(rise < 100 * 64, "A4: for less than 64 KiB each", rise)


def pipelined_streams():
    server = mock("--mock-step-us", "5000", *LETTERS)
    body = json.dumps({"prompt": "hi", "max_tokens": 5000, "ignore_eos": True, "stream": True}).encode()
    s = server.connect(PATIENCE)
    s.sendall(request("POST", COMPLETION, JSON, body, key=None) * 50)
    s.recv(1)
    most = max(metrics(server)["spind_calls_active"] for _ in range(20))
    equal(most, 1, "A8: of 50 pipelined streams one runs at a time")
    s.close()
    settles(server, "A8: when the client leaves it ends")
    n = metrics(server)['vllm:request_success_total{finished_reason="abort"}']
    equal(n, 1, "A8: and the 49 behind it never began")
    equal(server.stop(), 0, "the server ends well")


def routes(server):
    """A server with a key; nothing but four empty pages and the chat page is open, and no spelling of a path leads around that."""
    real = (COMPLETION, CHAT, "/v1/models", "/v1/models/m", "/metrics", "/version", "/tokenize", "/detokenize", "/tokenizer_info", "/load",
            "/calls",
            "/admin", "/admin/v1/tenants", "/invocations", "/pause", "/docs", "/uix", "/ui/")
    spelled = [p for r in real for p in (r, "/" + r, r + "/", r.upper(), "/x/.." + r, "/health/.." + r, "/%2e%2e" + r, "/." + r,
                                         r + "?x=/health", "/health;" + r)]
    wrong = [(method, p, got) for p in spelled for method in ("GET", "POST")
             for got in [server.talk(request(method, p, "Connection: close\r\nContent-Length: 0\r\n", key=None)).statuses] if got != [401]]
    equal(wrong[:5], [], f"A13: without a key every path is 401, in {len(spelled)} spellings")


# ---- B: bodies ----

def many_values(server):
    body = b'{"messages":[' + b"1," * 2000000 + b"1]}"

    def peak():
        with open(f"/proc/{server.process.pid}/status") as f:
            return int(re.search(r"VmHWM:\s+(\d+)", f.read()).group(1))

    served(server)
    before = peak()
    got = list(POOL.map(lambda _: ask(server, CHAT, body).status, range(16)))
    equal(set(got), {400}, "B2: 16 bodies of two million values each are refused")
    rise = (peak() - before) * 1024 / (16 * len(body))
    ok(rise < 4, f"B2: for {rise:.1f} times their bytes at most, which is less than 4")


BROKEN = [b'{"prompt":"a\\u0000b"}', b'{"prompt":"a\0b"}', b'{"prompt":"a"}\0', b'{"prompt":"\xff\xfe"}', b'{"prompt":"\xc0\xaf"}',
          b'{"prompt":"\xed\xa0\x80"}',
          b'{"prompt":"\\ud800"}', b'{"prompt":"\xf4\x90\x80\x80"}', b'{"prompt":"a\nb"}', b'{"prompt":"a\x07b"}',
          b'{"\xff":1,"prompt":"a"}', b'{"prompt":"\xe2\x82"}']


def strings(server):
    for body in BROKEN:
        got = ask(server, COMPLETION, body)
        try:
            text = got.body.decode("utf-8", "strict")
        except UnicodeDecodeError:
            text = None
        ok(got.status == 400 and got.error and text, f"B4: {body!r} is refused, in whole characters", got)


NUMBERS = ["max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
           "seed", "logprobs",
           "min_tokens", "prompt_logprobs"]


def numbers(server):
    for field in NUMBERS:
        bodies = {v: f'{{"prompt":"a","{field}":{v}}}'.encode() for v in ("1e308", "-1e308", '"8"', "true", "[]", "{}", "[1]")}
        wrong = [(v, got) for v, b in bodies.items() for got in [ask(server, COMPLETION, b)] if got.status != 400
                 or got.error["param"] != field]
        equal(wrong[:1], [], f"B5: {field} that is no number, or beyond all, is refused by name")
        broken = [v for v in ("1e999", "01", "1.", ".5", "+1", "NaN", "Infinity", "-", "0x10", "1e", "1" * 400)
                  if ask(server, COMPLETION, f'{{"prompt":"a","{field}":{v}}}'.encode()).status != 400]
        equal(broken, [], f"B5: so is {field} that is no JSON, or infinite")


def keys(server):
    got = ask(server, COMPLETION, b'{"prompt":"a","n":1,"N":3,"max_tokens":1}')
    equal((got.status, len(got.choices)), (200, 1), "B6: a key in other letters is another key")
    for body in b'{"prompt":"a","n":1,"n":1}', b'{"prompt":"a","n":1,"\\u006e":3}', b'{"prompt":"a","user":"x","user":"x"}':
        got = ask(server, COMPLETION, body)
        ok(got.status == 400 and "twice" in got.body.decode(), f"B6: {body!r} is refused: a key is there twice", got)


# ---- C: fields ----

def ids(server):
    """The mock's letters run beside; what is refused must not touch them."""
    width = get(server, "/v1/models").json["data"][0]["meta"]["n_vocab"]
    beside = [POOL.submit(cstream, server, f"stay {i}", max_tokens=400, ignore_eos=True) for i in range(3)]
    bad = [-1, width, width + 1, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 32) - 1, 1 << 63, 5279552648203111001]
    fields = {"prompt": lambda i: {"prompt": [97, i]}, "stop_token_ids": lambda i: {"prompt": "a", "stop_token_ids": [i]},
              "logit_bias": lambda i: {"prompt": "a", "logit_bias": {str(i): 1}}}
    for field, body in fields.items():
        wrong = [(i, got) for i in bad for got in [ask(server, COMPLETION, {**body(i), "max_tokens": 1})] if got.status != 400
                 or got.error["param"] != field]
        equal(wrong[:1], [], f"C4: {field} takes no id that the logits do not have")
        equal(ask(server, COMPLETION, {**body(width - 1), "max_tokens": 1}).status, 200, f"C4: and {field} takes the last one they have")
    got = [b.result() for b in beside]
    ok(all(g.good() and g.text() == "".join(chr(97 + i % 26) for i in range(400)) for g in got), "C4: streams that run beside are whole",
       got[:1])


def salts(server):
    for salt in "a/b", "../x", "", "a b", "\u00e9", "\U0001F600", "x" * 65, "x" * 10240, "a\\u0000b", 5, ["a"]:
        got = complete(server, "hi", max_tokens=1, cache_salt=salt)
        ok(got.status == 400 and got.error["param"] == "cache_salt", f"C12: cache_salt {json.dumps(salt)[:24]} is refused", got)
    for salt in "a", "A-z_09", "x" * 64:
        equal(complete(server, "hi", max_tokens=1, cache_salt=salt).status, 200, f"C12: cache_salt {salt[:12]} is one")


EDGES = {"max_tokens": [0, 1, 8, 31, -1, 1 << 31], "min_tokens": [0, 1, 8, 9, -1, 1 << 31], "n": [0, 1, 8, 9],
         "temperature": [-0.1, 0, 1e-9, 2, 2.1],
         "top_p": [0, 1e-9, 1, 1.1], "top_k": [-2, -1, 0, 1, 1 << 40], "min_p": [-0.1, 0, 1, 1.1], "presence_penalty": [-2, 2, 3],
         "repetition_penalty": [0, 1e-9, 1e9],
         "seed": [-1, 0, (1 << 63) - 1, 1 << 63], "logprobs": [-1, 0, 20, 21], "prompt_logprobs": [-1, 0, 20], "echo": [True],
         "stream": [True, False], "best_of": [0, 1, 8, 9],
         "ignore_eos": [True], "stop": ["", "a", ["a"] * 17], "logit_bias": [{}, {"0": 100}, {"0": 1e9}], "stop_token_ids": [[], [97]],
         "cache_salt": ["a"]}


def contradictions(server):
    r = random.Random(6)
    statuses, before = [], metrics(server)["spind_steps_total"]
    bodies = [{"prompt": r.choice(["a", "ab", [97] * 40]), **{f: r.choice(EDGES[f]) for f in r.sample(sorted(EDGES), r.randrange(2, 6))}}
              for _ in range(600)]
    statuses = list(POOL.map(lambda b: ask(server, COMPLETION, b).status, bodies))
    ok(set(statuses) == {200, 400}, "C6: 600 bodies whose fields contradict each other are answered or refused", set(statuses),
       bodies[[s not in (200, 400) for s in statuses].index(True)] if set(statuses) - {200, 400} else None)
    ok(metrics(server)["spind_steps_total"] > before and served(server), "C6: and the engine steps on")
    settles(server, "C6: nothing is left of them")


# ---- what the process does and says ----

def secrets():
    server = mock("--log-level", "debug", "--served-model-name", "m", key="CANARYk3y")
    body = {"prompt": "CANARY", "echo": True, "stop": ["CANARYs"], "user": "CANARY", "max_tokens": 2, "cache_salt": "CANARY",
            "request_id": "CANARY"}
    equal(ask(server, COMPLETION, body, "X-A: CANARY\r\n", key="CANARYk3y").status, 200, "D6: a request full of canaries is served")
    for bad in {**body, "model": "CANARY"}, {**body, "n": "CANARY"}, {"CANARY": 1}, {"messages": [{"role": "CANARY"}]}:
        ask(server, COMPLETION, bad, key="CANARYk3y")
        ask(server, CHAT, bad, key="CANARYk3y")
    get(server, "/v1/models", key="CANARYwrong")
    page = get(server, "/metrics", key="CANARYk3y").body
    server.stop()
    ok("POST /v1/completions" in server.log and server.log.count("CANARY") == 0, "D6: none is in the log, at its most talkative",
       [line for line in server.log.splitlines() if "CANARY" in line][:3])
    ok(b"vllm:" in page and b"CANARY" not in page, "D6: nor in the metrics")


def leaks(server):
    """Whatever is refused: no address, no path, no other bytes than a few of the request's own."""
    r = random.Random(8)
    good = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stop": ["a"], "logit_bias": {"5": 1},
                       "stream_options": None, "n": 1}).encode()

    def damaged():
        b = bytearray(good)
        for _ in range(r.randrange(1, 4)):
            at = r.randrange(len(b))
            b[at:at + r.randrange(3)] = bytes(r.randrange(256) for _ in range(r.randrange(3)))
        return bytes(b)

    got = list(POOL.map(lambda b: ask(server, CHAT, b), [damaged() for _ in range(1500)]))
    bad = [g for g in got if g.status != 200 and (g.status not in (400, 404) or g.error is None or len(g.body) > 1024
           or re.search(rb"0x[0-9a-f]{6,}|/[a-z]+/[a-z]+/|\.[ch]:\d", g.body))]
    ok(not bad and sum(g.status != 200 for g in got) > 500,
       "B8: 1,500 damaged bodies: what refuses them is short and has no address and no path", bad[:2])


def only_listener(server):
    inodes = set()
    for fd in os.listdir(f"/proc/{server.process.pid}/fd"):
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{server.process.pid}/fd/{fd}"))
        except OSError:
            continue
        if found:
            inodes.add(found.group(1))
    listening = []
    for name in "tcp", "tcp6", "udp", "udp6":
        with open("/proc/net/" + name) as f:
            rows = [line.split() for line in f.readlines()[1:]]
        listening += [(name, row[1]) for row in rows if row[9] in inodes and (row[3] == "0A" or name.startswith("udp"))]
    equal(listening, [("tcp", f"0100007F:{server.port:04X}")], "D8: by default it listens on one port of 127.0.0.1 and on nothing else")
    with open(f"/proc/{server.process.pid}/limits") as f:
        core = re.search(r"Max core file size\s+(\S+)\s+(\S+)", f.read()).groups()
    equal(core, ("0", "0"), "H7: it leaves no core file")
    with open(f"/proc/{server.process.pid}/status") as f:
        ignored = int(re.search(r"SigIgn:\s+(\S+)", f.read()).group(1), 16)
    ok(ignored >> 12 & 1, "H9: SIGPIPE is ignored")


def system_calls(server):
    """No field of a request becomes a path, an address or a program."""
    if shutil.which("strace") is None:
        skip("C10: no request makes it connect or run a program", "strace is not installed")
        return
    with tempfile.TemporaryDirectory() as d:
        log = os.path.join(d, "trace")
        trace = subprocess.Popen(["strace", "-f", "-qq", "-s", "4096", "-e",
                                  "trace=" + CALLS,
                                  "-o", log, "-p", str(server.process.pid)], stderr=subprocess.PIPE)
        time.sleep(0.5)
        if trace.poll() is not None:
            skip("C10: no request makes it connect or run a program", "strace may not attach here")
            return
        evil = "../../evil-path"
        for field in ("prompt", "model", "user", "suffix", "cache_salt", "stop", "request_id", "chat_template", "lora", "guided_grammar",
                      "sparse",
                      "plugin", "image_url"):
            ask(server, COMPLETION, {"prompt": "a", "max_tokens": 1, field: evil})
            image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/evil-path"}}
            ask(server, CHAT, {"messages": [{"role": "user", "content": [image]}], field: evil})
        ask(server, COMPLETION, {"prompt": "a", "sparse": {"plugin": evil}})
        ask(server, CHAT, {"messages": [{"role": evil, "content": evil, "name": evil}], "max_tokens": 1})
        for path in "/" + evil, "/v1/models/" + evil, "/%2e%2e/evil-path", "/v1/models/..%2fevil-path":
            get(server, path, f"X-Request-Id: {evil}\r\n")
        get(server, "/metrics")  # reads /proc: the trace is alive
        trace.terminate()
        trace.wait()
        with open(log) as f:
            lines = f.read()
    ok("/proc/self/" in lines and not re.search(r"\b(connect|execve)\(", lines), "C10: no request makes it connect or run a program",
       re.findall(r".*(?:connect|execve)\(.*", lines)[:3])
    ok("evil-path" not in lines, "G2: no path that it opens has a byte of a request",
       [x for x in lines.splitlines() if "evil-path" in x][:3])


def stuck_log():
    """Its log goes to a pipe of 4 KiB that nobody reads once it serves."""
    r, w = os.pipe()
    fcntl.fcntl(w, F_SETPIPE_SZ, 4096)
    server = _server.Server.__new__(_server.Server)
    server.process = subprocess.Popen([_server.BINARY, "serve", "--device", "mock", "--port", "0", "--log-level", "debug"],
                                      stdout=subprocess.DEVNULL, stderr=w, env=clean_env())
    os.close(w)
    try:
        log = b""
        while b"listening on" not in log:
            got = os.read(r, 4096)
            if not got:
                raise RuntimeError(f"the server did not start: {log!r}")
            log += got
        server.port = int(re.search(rb"listening on http://\S+:(\d+)", log).group(1))
        n = 0
        while n < 400 and complete(server, "hi", max_tokens=1).status == 200:
            n += 1
        equal(n, 400, "H4: 400 requests are answered while nobody reads the log")
        size = len(os.read(r, 1 << 16))
        ok(size >= 2048, "H4: which is full", size)
    finally:
        server.process.kill()
        server.process.wait()
        os.close(r)


def lost_device():
    """The 30th step fails and no later one succeeds, as after a sticky error."""
    server = mock("--mock-fail-step", "30", "--mock-fail-count", "1000000", *LETTERS)
    body = json.dumps({"prompt": "hi", "max_tokens": 5000, "ignore_eos": True, "stream": True}).encode()
    streams = [server.connect(PATIENCE) for _ in range(4)]
    for s in streams:
        s.sendall(request("POST", COMPLETION, JSON + "Connection: close\r\n", body, key=None))
    got = [Answers(*read_all(s)) for s in streams]
    ok(all(g.closed == "fin" and b"[DONE]" not in g.raw and b'"error"' in g.raw for g in got),
       "F1: streams that a broken device cuts end with an error", got[:1])
    statuses = []
    while server.process.poll() is None and len(statuses) < 1000:
        try:
            statuses.append(complete(server, "hi", max_tokens=2).status)
        except OSError:
            break
    ok(statuses and set(statuses) <= {500, 503, None}, "F1: no request is answered by it any more", statuses)
    equal(server.wait(20), 70, "F1: the process ends with 70, so that whoever supervises it starts another")


def no_memory():
    """Address space for a part of what the start takes, so that one after the other of its allocations fails. Nothing
    behind them is asked: a thread that jemalloc has no room to begin with ends in jemalloc."""
    words = [_server.BINARY, "serve", "--device", "mock", "--port", "0", "--kv-hbm", "256M", "--max-model-len", "1024", "--max-num-seqs",
             "8"]
    server = mock(*words[6:])
    with open(f"/proc/{server.process.pid}/status") as f:
        size = int(re.search(r"VmSize:\s+(\d+)", f.read()).group(1)) * 1024
    server.stop()
    ends = []
    for percent in range(40, 96, 2):
        process = subprocess.Popen(["prlimit", f"--as={size * percent // 100}", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   env=clean_env(), text=True)
        log = []
        for line in process.stderr:
            log.append(line)
            if "listening on" in line:
                process.terminate()
        ends.append((process.wait(), log[-1] if log else None))
    told = {1: r" E cannot serve: \w", -6: r"^spind: out of memory \(\d+ bytes asked\)"}  # the latter: a small one
    bad = [(code, last) for code, last in ends if code != 0 and not re.search(told.get(code, "never"), last or "")]
    equal(bad[:3], [], "F4: a start that is refused memory ends and says what for, wherever it was")
    ok(len({re.sub(r"^.* E |[0-9]+", "", last) for code, last in ends if code}) > 1, "F4: which was not always the same", ends[:5])


def any_moment():
    """SIGTERM, and sometimes a second one, while it starts, loads, serves or drains; clients ask all the while."""
    r = random.Random(10)
    ends = []
    for i in range(40):
        process = subprocess.Popen([_server.BINARY, "serve", "--device", "mock", "--port", "0", "--mock-step-us", "2000",
                                    "--drain-timeout", "0.2"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=clean_env())
        server = _server.Server.__new__(_server.Server)
        after = r.choice([b"", b"non-default", b"bound to", b"listening on", b"listening on", b"listening on"])
        log = b"" if after else b"nothing yet"
        while after and after not in log:
            log += os.read(process.stderr.fileno(), 65536) or after
        found = re.search(rb"http://\S+:(\d+)", log)
        clients = []
        if found:
            server.port = int(found.group(1))
            body = json.dumps({"prompt": "hi", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
            for _ in range(r.randrange(4)):
                clients.append(server.connect())
                clients[-1].sendall(request("POST", COMPLETION, JSON, body, key=None))
        time.sleep(r.random() * 0.05)
        n_signals = r.choice([1, 1, 2])
        for _ in range(n_signals):
            process.terminate()  # which polls first
            time.sleep(r.random() * 0.02)
        log += process.stderr.read()
        code = process.wait(20)
        early = code == -15 and b"bound to" not in log  # before it heard signals at all
        twice = n_signals == 2 and code in (-15, 128 + 15)  # -15: it was drained, and on its way out
        ends.append((i, code, after, log[-300:]) if not (code == 0 or early or twice) else None)
        for s in clients:
            s.close()
    equal([e for e in ends if e], [], "G10: a signal at any of 40 moments ends it with 0, or at once if it is the second")


def main():
    slow = [POOL.submit(f) for f in (slow_heads, slow_bodies)]
    for s in slow:
        s.result()
    server = mock("--served-model-name", "m", *LETTERS)
    paced = mock("--mock-step-us", "2000", *LETTERS)
    keyed = mock(key=KEY)
    routes(keyed)
    only_listener(server)
    head_bombs(server)
    many_values(server)
    strings(server)
    numbers(server)
    keys(server)
    ids(paced)
    salts(server)
    contradictions(server)
    leaks(server)
    system_calls(server)
    pipelined_streams()
    secrets()
    stuck_log()
    lost_device()
    no_memory()
    any_moment()
    for s in server, paced:
        settles(s, "nothing is left behind")
    for s in server, paced, keyed:
        equal(s.stop(), 0, "the server ends well")
    done()


main()
