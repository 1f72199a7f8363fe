"""Limits of the whole daemon, each from both sides: bodies, the queue, connections, streams nobody
reads, n; and models that are none. On the mock device, so that what is counted is exact.

The binary: SPIND, else spind of the build (SPIND_BUILD)."""
import json
import os
import re
import resource
import socket
import subprocess
import tempfile
import time

import _server
from _spind import COMPLETION, JSON, MODEL, Reply, ask, complete, get, metrics, mock, settles
from _server import Answers, clean_env, done, equal, eventually, ok, read_all, request, skip

MIB = 1 << 20
CHUNK = 1 << 16


# ---- bodies ----

def body_of(size):
    text = b'{"prompt":"hi","max_tokens":1}'
    return text + b" " * (size - len(text))


def chunked(body):
    parts = [body[i:i + CHUNK] for i in range(0, len(body), CHUNK)]
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


def bodies(server, most, name):
    got = ask(server, COMPLETION, body_of(most))
    ok(got.status == 200, f"a body of {name} is read and answered", got)
    got = server.talk(request("POST", COMPLETION, JSON + f"Content-Length: {most + 1}\r\n", key=None))
    ok(got.statuses == [413] and got.closed == "fin" and got.is_error() and str(most) in got.body.decode(),
       "one byte more is refused from its head, with the limit", got)
    head = JSON + "Connection: close\r\nTransfer-Encoding: chunked\r\n"
    got = server.talk(request("POST", COMPLETION, head, key=None) + chunked(body_of(most)), 20)
    equal(got.statuses, [200], "in chunks it is answered, too", got)
    got = server.talk(request("POST", COMPLETION, head, key=None) + chunked(body_of(most + 1)), 20)
    ok(got.statuses == [413] and got.is_error(), "and one byte more is refused", got)


def all_bodies():
    server = mock()
    bodies(server, 4 * MIB, "4 MiB")
    server.stop()
    length = 210000
    server = mock("--max-model-len", str(length), "--kv-hbm", "6G")
    bodies(server, 20 * length, f"20 bytes for each of {length} tokens")
    ids = b'{"max_tokens":2,"prompt":[' + b",".join(b"%18d" % 97 for _ in range(length - 1)) + b"]}"
    got = ask(server, COMPLETION, ids)
    ok(got.status == 200 and got.json["usage"] == {"prompt_tokens": length - 1, "completion_tokens": 1, "total_tokens": length},
       "so the longest prompt can be sent as ids, well spaced", got)
    got = ask(server, COMPLETION, ids.replace(b"[", b"[97,"))
    ok(got.status == 400 and got.error["code"] == "context_length_exceeded", "one more token does not fit the context", got)
    server.stop()


# ---- the queue ----

def post(server, n_tokens, **fields):
    """A request of n_tokens, whose answer nobody has read yet."""
    body = json.dumps({"prompt": [97] * n_tokens, "max_tokens": 1, **fields}).encode()
    s = server.connect(30)
    s.sendall(request("POST", COMPLETION, JSON + "Connection: close\r\n", body, key=None))
    return s


def waiting(server):
    return metrics(server)["vllm:num_requests_waiting"]


def waits(server, s, total, name):
    return ok(eventually(lambda: waiting(server) == total, 10), name, waiting(server))


def is_full(s, name):
    with s:
        got = Reply(Answers(*read_all(s)))
    return ok(got.status == 503 and got.error["code"] == "server_overloaded" and 1 <= int(got.header("Retry-After")) <= 120, name, got)


def occupied(*args):
    """A server that runs one sequence for as long as its client stays."""
    server = mock("--max-num-seqs", "1", "--mock-step-us", "5000", *args)
    s = post(server, 1, max_tokens=4000, stream=True, ignore_eos=True)
    s.recv(1)
    eventually(lambda: waiting(server) == 0, 5)
    return server, s


def released(server, running, queued, name):
    running.close()
    got = []
    for s in queued:
        with s:
            got.append(Reply(Answers(*read_all(s))).status)
    equal(set(got), {200}, name)
    settles(server, "and nothing is left behind")
    equal(server.stop(), 0, "the server ends well")


def queue_of_tokens():
    server, running = occupied("--max-num-queued-tokens", "100")
    queued = [post(server, 60)]
    waits(server, queued[0], 1, "60 of 100 tokens wait")
    is_full(post(server, 41), "41 more get 503 and when to come back")
    queued.append(post(server, 40))
    waits(server, queued[1], 2, "40 more wait: 100 of 100")
    is_full(post(server, 1), "one more gets 503")
    released(server, running, queued, "those who waited are answered")
    server, running = occupied("--max-num-queued-tokens", "100")
    queued = [post(server, 101)]
    waits(server, queued[0], 1, "a prompt over the bound may wait alone, or it could never be served")
    is_full(post(server, 1), "nothing may wait beside it")
    released(server, running, queued, "and is answered")


def queue_as_shipped():
    server, running = occupied()
    queued = [post(server, 2) for _ in range(255)]
    waits(server, None, 255, "255 requests wait")
    is_full(post(server, 2, n=2, temperature=1), "two choices more get 503")
    queued.append(post(server, 2))
    waits(server, None, 256, "the 256th waits")
    is_full(post(server, 2), "the 257th gets 503")
    released(server, running, queued, "the 256 are answered")
    server, running = occupied()
    queued = [post(server, 4096, n=8, temperature=1) for _ in range(31)]
    queued.append(post(server, 4096, n=7, temperature=1))
    waits(server, None, 255, "255 choices with 1 Mi less 4,096 tokens wait")
    is_full(post(server, 4097), "4,097 tokens more get 503")
    queued.append(post(server, 4096))
    waits(server, None, 256, "4,096 more wait")
    running.close()
    for s in queued:
        s.close()
    settles(server, "and all can leave")
    server.stop()


def queue_time():
    server, running = occupied("--queue-timeout", "1")
    start = time.monotonic()
    with post(server, 1) as s:
        got = Reply(Answers(*read_all(s)))
    took = time.monotonic() - start
    ok(got.status == 503 and got.error["code"] == "queue_timeout" and 0.95 < took < 2, f"who has waited for 1 s gets 503 ({took:.2f} s)", got)
    s = post(server, 1)
    time.sleep(0.6)
    running.close()
    with s:
        equal(Reply(Answers(*read_all(s))).status, 200, "whose turn comes before that is answered")
    server.stop()


# ---- connections ----

def own_address():
    """An address of this machine that is not loopback. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))
            return s.getsockname()[0]
        except OSError:
            return None


def busy(address, port):
    """Inside a body: neither idle nor silent, so nobody is closed to make room."""
    s = socket.create_connection((address, port), 10)
    s.sendall(request("POST", COMPLETION, JSON + "Expect: 100-continue\r\nContent-Length: 9\r\n"))
    return s


def busy_for_sure(address, port):
    """busy(), once the server has let it in: the last caller's place is free only when its FIN was read."""
    def let_in():
        s = busy(address, port)
        if s.recv(12) == b"HTTP/1.1 100":
            return s
        s.close()
        return None
    return eventually(let_in, 5)


def turned_away(address, port):
    with socket.create_connection((address, port), 10) as s:
        s.sendall(request("GET", "/health", "Connection: close\r\n"))
        return Answers(*read_all(s))


def connections():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        skip("1,024 connections are served", f"ulimit -Hn is {hard}")
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    server = mock(key=_server.KEY)
    held = [busy("127.0.0.1", server.port) for _ in range(1023)]
    ok(eventually(lambda: turned_away("127.0.0.1", server.port).statuses == [200], 5), "beside 1,023 connections one is served")
    held.append(busy_for_sure("127.0.0.1", server.port))
    got = turned_away("127.0.0.1", server.port)
    ok(got.statuses == [503] and got.header("Retry-After") and got.is_error(), "beside 1,024 it gets 503", got)
    held.pop().close()
    ok(eventually(lambda: turned_away("127.0.0.1", server.port).statuses == [200], 5), "until one leaves")
    for s in held:
        s.close()
    server.stop()
    address = own_address()
    if address is None or address.startswith("127."):
        skip("128 connections of one address are served", "this machine has no other address")
        return
    server = mock("--host", "0.0.0.0", key=_server.KEY)
    held = [busy(address, server.port) for _ in range(127)]
    ok(eventually(lambda: turned_away(address, server.port).statuses == [200], 5), "beside 127 of an address one is served")
    held.append(busy_for_sure(address, server.port))
    equal(turned_away(address, server.port).statuses, [503], "beside 128 it gets 503")
    equal(turned_away("127.0.0.1", server.port).statuses, [200], "others do not")
    for s in held:
        s.close()
    server.stop()


# ---- streams nobody reads ----

def stalled_readers():
    """--stall-timeout 2; 50 MB are far more than the kernel's buffers take."""
    server = mock("--max-model-len", "100000", "--kv-hbm", "4G", "--stall-timeout", "2")

    def start(tokens):
        s = server.connect(20, rcvbuf=4096)
        body = json.dumps({"prompt": "hi", "max_tokens": tokens, "stream": True, "ignore_eos": True, "logprobs": 5}).encode()
        s.sendall(request("POST", COMPLETION, JSON + "Connection: close\r\n", body, key=None))
        return s

    def is_whole(page):
        return page.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    readers = start(300), start(90000), start(90000)
    time.sleep(1)
    page, how = read_all(readers[1])
    ok(how == "fin" and is_whole(page), "a reader that stalls for 1 s of 2 gets its stream whole", page[-80:])
    time.sleep(4)
    page, how = read_all(readers[0])
    ok(how == "fin" and is_whole(page), "so does one that stalls longer, if the socket takes all", page[-80:])
    page, how = read_all(readers[2])
    ok(how == "reset" or not is_whole(page), "another is cut, and cannot take its stream for a whole one", page[-80:])
    for s in readers:
        s.close()
    settles(server, "nothing is left of it")
    server.stop()


# ---- n ----

def choices():
    for args, most in ((), 8), (("--max-n", "128"), 128), (("--max-n", "1"), 1):
        server = mock(*args)
        got = complete(server, "hi", n=most, max_tokens=2, temperature=1)
        ok(got.status == 200 and [c["index"] for c in got.choices] == list(range(most)), f"n = {most} is answered with {' '.join(args) or 'defaults'}", got)
        got = complete(server, "hi", n=most + 1, max_tokens=2, temperature=1)
        ok(got.status == 400 and got.error["param"] == "n" and f"at most {most}" in got.error["message"], "and one more refused", got)
        server.stop()
    got = subprocess.run([_server.BINARY, "serve", "--device", "mock", "--port", "0", "--max-n", "129"],
                         stderr=subprocess.PIPE, env=clean_env(), timeout=20)
    ok(got.returncode != 0 and b"--max-n: 129: must be 1 to 128" in got.stderr, "--max-n 129 is refused", got)


# ---- models that are none ----

class Folder:
    def __init__(self, path):
        self.path = path
        with open(MODEL, "rb") as f:
            self.start = f.read(4 * MIB)
        self.size = os.path.getsize(MODEL)

    def file(self, name, data, size=0):
        """size: as long as this, with nothing behind data."""
        path = os.path.join(self.path, name)
        with open(path, "wb") as f:
            f.write(data)
            if size:
                f.truncate(size)
        return path

    def patched(self, name, at, data):
        return self.file(name, self.start[:at] + data + self.start[at + len(data):], self.size)


def is_refused(path, what, words, is_gguf):
    start = time.monotonic()
    try:
        got = subprocess.run([_server.BINARY, "serve", "--device", "cpu", "--port", "0", path], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env(), timeout=30)
    except subprocess.TimeoutExpired as e:
        ok(False, what, "it did not end", e.stderr)
        return
    log = got.stderr.decode("utf-8", "replace")
    other = [line for line in log.splitlines() if not re.match(r"\S+ \S+ I ", line)]
    good = got.returncode == 1 and got.stdout == b"" and len(other) == 1 and path in other[0] and "listening on" not in log
    if is_gguf:
        good = good and re.search(re.escape(path) + r": offset \d+: \w", other[0])
    ok(good and re.search(words, other[0]) and time.monotonic() - start < 10, what, got.returncode, got.stdout, log)


def bad_models():
    if not os.path.exists(MODEL):
        skip("a file that is no model is refused", f"there is no {MODEL}")
        return
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(path)
        text = b"# A text\n\nlonger than the header of a model.\n" * 100
        is_refused(os.path.join(path, "missing.gguf"), "a missing file is named, once", "No such file", False)
        is_refused(path, "so is a folder", "not a regular file|directory", False)
        os.mkfifo(os.path.join(path, "pipe"))
        is_refused(os.path.join(path, "pipe"), "and a pipe that nobody writes", "not a regular file", False)
        is_refused(folder.file("empty.gguf", b""), "an empty file has no offset 24", "0 bytes", True)
        is_refused(folder.file("text.md", text), "a text is told by its first bytes", "GGUF", True)
        for n in 1, 4, 23, 24, 40, 100, 5000, 200000, MIB, 4 * MIB - 1:
            is_refused(folder.file(f"cut-{n}.gguf", folder.start[:n]), f"a model cut after {n} bytes is refused with offset and rule", "", True)
        is_refused(folder.file("short.gguf", folder.start, folder.size - 1), "so is one that lacks its last byte", "", True)
        is_refused(folder.patched("version.gguf", 4, b"\x04"), "a version that is not known", "offset 4: .*version", True)
        is_refused(folder.patched("endian.gguf", 4, b"\0\0\0\x03"), "the other byte order", "offset 4: ", True)
        is_refused(folder.patched("tensors.gguf", 8, b"\xff" * 8), "2^64 - 1 tensors", "offset 8: .*tensors", True)
        is_refused(folder.patched("keys.gguf", 16, b"\xff" * 8), "2^64 - 1 keys", "offset 16: ", True)
        is_refused(folder.patched("key.gguf", 24, b"\xff" * 8), "a key of 2^64 - 1 bytes", "offset 32: ", True)
        is_refused(folder.patched("type.gguf", 52, b"\x63"), "a value of type 99", "offset 52: .*99", True)
        at = folder.start.index(b"llama")
        is_refused(folder.patched("mamba.gguf", at, b"mamba"), "another architecture, by its name", f'offset {at}: .*"mamba".*serves llama, qwen2 and qwen3', True)


def main():
    all_bodies()
    queue_of_tokens()
    queue_as_shipped()
    queue_time()
    connections()
    stalled_readers()
    choices()
    bad_models()
    done()


main()
