"""Clients that are slow, many, early, late or gone: deadlines, caps, pipelining, keep-alive,
back-pressure, disconnects, HTTP/1.0, Host and Origin."""
import concurrent.futures
import re
import shutil
import socket
import struct
import subprocess
import time

from _server import Answers, Server, done, equal, eventually, ok, read_all, request, skip

POOL = concurrent.futures.ThreadPoolExecutor(32)


def timed(f, *args, **more):
    start = time.monotonic()
    return f(*args, **more), time.monotonic() - start


def trickle(server, data, every, limit=10, first=b""):
    """A byte every `every` seconds until the server closes; what it answered, and after how long."""
    start = time.monotonic()
    out = b""
    with server.connect(every) as s:
        s.sendall(first)
        for i in range(len(data)):
            try:
                s.sendall(data[i:i + 1])
                out += s.recv(4096)
                break  # an answer, or the end
            except socket.timeout:
                if time.monotonic() - start > limit:
                    break
            except OSError:
                break
        s.settimeout(2)
        more, closed = read_all(s)
    return Answers(out + more, closed), time.monotonic() - start


def stream_post(n, size, every, extra="", version="1.1"):
    return request("POST", f"/stream?{n},{size},{every}", extra, b"{}", version=version)


# ---- time ----

def deadlines(server):
    """header 0.5 s, body 1.2 s, idle 0.7 s, stall 1 s"""
    jobs = {
        "slow head": POOL.submit(trickle, server, request("GET", "/v1/models", "X-A: " + "b" * 999 + "\r\n"), 0.02),
        "silent": POOL.submit(timed, server.talk, b"", 5),
        "half a head": POOL.submit(timed, server.talk, b"GET / HT", 5),
        "slow body": POOL.submit(trickle, server, b"x" * 5000, 0.02, first=request("POST", "/echo", "Content-Length: 5000\r\n")),
        "no body": POOL.submit(timed, server.talk, request("POST", "/echo", "Content-Length: 50\r\n"), 5),
        "no key": POOL.submit(timed, server.talk, request("POST", "/echo", "Content-Length: 99999\r\n", key=None), 5),
        "idle": POOL.submit(timed, server.talk, request("GET", "/v1/models"), 5),
        "idle after half": POOL.submit(timed, server.talk, request("GET", "/v1/models") + b"GE", 5),
        "lone CRLF": POOL.submit(timed, server.talk, b"\r\n", 5),
    }
    got = {name: job.result() for name, job in jobs.items()}

    def check(name, statuses, least, most, what):
        answers, s = got[name]
        ok(answers.statuses == statuses and answers.closed == "fin" and least <= s <= most,
           f"{what} ({s:.2f} s)", answers, s)

    check("slow head", [408], 0.4, 0.9, "bytes of a head do not extend its deadline")
    check("silent", [], 0.4, 0.9, "a connection that says nothing is closed without a word")
    check("half a head", [408], 0.4, 0.9, "half a head gets 408")
    check("slow body", [408], 1.1, 1.8, "a body that trickles gets 408")
    check("no body", [408], 1.1, 1.6, "a body that never comes gets 408")
    check("no key", [401], 0, 0.3, "without a key the answer does not wait for the body")
    check("idle", [200], 0.6, 1.1, "an idle connection is closed")
    check("idle after half", [200, 408], 0.4, 0.9, "the second request has a head deadline of its own")
    check("lone CRLF", [], 0.4, 0.9, "a lone CRLF does not hold a connection")


def body_rate(server):
    """A body may be slow for 5 s, not longer; one that keeps the least rate is fine."""
    def drip(pieces, size):
        s = server.connect(10)
        s.sendall(request("POST", "/echo", f"Connection: close\r\nContent-Length: {pieces * size}\r\n"))
        start = time.monotonic()
        s.settimeout(0.25)
        for _ in range(pieces):
            try:
                s.sendall(b"x" * size)
                if s.recv(1, socket.MSG_PEEK) is not None:
                    break
            except socket.timeout:
                pass
            except OSError:
                break
        s.settimeout(5)
        with s:
            return Answers(*read_all(s)), time.monotonic() - start

    slow, fine = POOL.submit(drip, 200, 100), POOL.submit(drip, 26, 2500)
    got, s = slow.result()
    ok(got.statuses == [408] and 4.9 < s < 7, f"400 B/s gets 408 after the grace ({s:.1f} s)", got)
    got, s = fine.result()
    ok(got.statuses == [200] and len(got.body) == 65000, f"10 KB/s over {s:.1f} s is served", got)


def slow_readers(server):
    before = server.calls()
    rss = server.rss_kib()
    readers = []
    for _ in range(50):
        s = server.connect(rcvbuf=4096)
        s.sendall(stream_post(1000000, 1024, 0))
        readers.append(s)
    time.sleep(0.6)
    equal(server.calls()["active"], 50, "50 streams run")
    ok(eventually(lambda: server.calls()["active"] == 0, 6), "50 readers that stall are cut")
    ok(server.rss_kib() - rss < 50 * 512, "for less than 512 KiB each", server.rss_kib() - rss)
    equal(server.calls()["gone"] - before["gone"], 50, "and the API hears of each, once")
    for s in readers:
        s.close()


# ---- who leaves ----

def disconnects(server):
    def leave(data, how, read=1):
        before = server.calls()
        s = server.connect()
        s.sendall(data)
        if read:
            s.recv(read)
        if not eventually(lambda: server.calls()["active"] == 1, 2):
            return False
        if how == "reset":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half":
            s.shutdown(socket.SHUT_WR)
        else:
            s.close()
        start = time.monotonic()
        good = eventually(lambda: server.calls()["active"] == 0, 1, 0.01)
        s.close()
        return good and time.monotonic() - start < 0.3 and server.calls()["gone"] == before["gone"] + 1

    for how in "close", "reset", "half":
        ok(leave(stream_post(100000, 20, 10), how), f"a streaming client that leaves ({how}) is noticed within 0.3 s")
        ok(leave(request("POST", "/wait", "", b"{}"), how, 0), f"a waiting client that leaves ({how}) is noticed within 0.3 s")
    many = request("POST", "/wait", "", b"{}") + request("POST", "/wait", "", b"x" * 9000) * 3
    before = server.calls()
    ok(leave(many, "close", 0), "a client that leaves behind 27 KB of further requests is noticed")
    equal(server.calls()["bodies"] - before["bodies"], 1, "and those requests are dropped")
    s = server.connect()
    s.sendall(request("POST", "/echo", "Content-Length: 50\r\n") + b"half")
    time.sleep(0.1)
    before = server.calls()["gone"]
    s.close()
    ok(eventually(lambda: server.calls()["gone"] == before + 1, 1), "leaving inside a body is told to the API")
    got = server.talk(request("GET", "/v1/models"), 1, half_close=True)
    equal((got.statuses, got.closed), ([200], "fin"), "a client that half-closes after its GET gets its answer")


# ---- order ----

def pipelining(server):
    n = 60
    data = b"".join(request("GET", f"/v1/models/m{i}") for i in range(n - 1)) + \
        request("GET", f"/v1/models/m{n - 1}", "Connection: close\r\n")
    got = server.talk(data)
    equal(re.findall(r"/v1/models/m(\d+)", got.raw.decode()), [str(i) for i in range(n)],
          "60 pipelined requests are answered in order", got)
    mixed = request("POST", "/echo", "", b"one") + stream_post(2, 20, 50) + request("POST", "/work", "", b"") + \
        request("POST", "/echo", "Connection: close\r\n", b"two")
    got = server.talk(mixed)
    equal(got.statuses, [200] * 4, "requests behind a stream and behind a helper thread wait", got)
    ok(got.raw.index(b"one") < got.raw.index(b"[DONE]") < got.raw.index(b"worked") < got.raw.index(b"two"), "and come in order")

    s = server.connect(0.5)
    s.sendall(request("POST", "/wait", "", b"{}"))
    sent = 0
    try:
        while sent < 64 << 20:
            sent += s.send(b"GET /v1/models HTTP/1.1\r\n" * 2000)
    except socket.timeout:
        pass
    ok(sent < 16 << 20, f"behind a waiting request reading stops ({sent >> 10} KiB left in the kernel's buffers)")
    equal(server.calls()["active"], 1, "one request at a time")
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()
    ok(eventually(lambda: server.calls()["active"] == 0, 2), "and its end is still seen")


def lifetime(server):
    """--max-requests-per-connection 20"""
    got = server.talk(b"".join(request("GET", "/v1/models") for _ in range(30)))
    equal(len(got.statuses), 20, "after --max-requests-per-connection the connection ends")
    equal(got.raw.count(b"Connection: close"), 1, "and the last answer says so")


def keep_alive(server):
    with server.connect() as s:
        for data in request("POST", "/echo", "", b"a"), request("GET", "/nope"), stream_post(3, 20, 0), \
                request("POST", "/echo", "", b"") , request("HEAD", "/v1/models"), request("GET", "/v1/models", "Connection: close\r\n"):
            s.sendall(data)
            time.sleep(0.25)
        got = Answers(*read_all(s))
    equal(got.statuses, [200, 404, 200, 200, 200, 200], "one connection serves all kinds of answers", got)
    equal(got.closed, "fin", "until it is told to close")
    refused = request("POST", "/nope", "", b"x" * 3000) + request("POST", "/echo", "Connection: close\r\n", b"next")
    ok(server.talk(refused).raw.endswith(b"next"), "a small body nobody wants is skipped, the connection goes on")
    with server.connect() as s:
        s.sendall(request("POST", "/echo", "Expect: 100-continue\r\nContent-Length: 3\r\nConnection: close\r\n"))
        first = s.recv(4096)
        s.sendall(b"abc")
        rest, _ = read_all(s)
    ok(first == b"HTTP/1.1 100 Continue\r\n\r\n" and rest.endswith(b"abc"), "100-continue comes before the body is sent", first)


def old_http(server):
    got = server.talk(request("GET", "/v1/models", version="1.0"))
    equal((got.statuses, got.closed), ([200], "fin"), "HTTP/1.0 is answered and closed")
    got = server.talk(request("GET", "/v1/models", "Connection: keep-alive\r\n", version="1.0") * 2, 0.3)
    equal((got.statuses, got.closed), ([200, 200], "open"), "unless it asks for keep-alive")
    got = server.talk(stream_post(3, 20, 0, "Connection: keep-alive\r\n", "1.0"))
    ok(got.closed == "fin" and got.header("Transfer-Encoding") is None and got.body.endswith(b"\n\ndata: [DONE]\n\n")
       and got.body.startswith(b"data: x"), "an HTTP/1.0 stream is raw and ends with the connection", got)


def streams(server):
    got = server.talk(stream_post(5, 30, 0, "Connection: close\r\n"))
    chunks, rest = [], got.body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[:int(size, 16)])
        rest = rest[int(size, 16) + 2:]
    equal(len(chunks), 2, "events written in one turn of the loop are one chunk, then the last", got)
    equal(b"".join(chunks).count(b"data: "), 6, "with every event in it")
    equal(got.header("Content-Type"), "text/event-stream; charset=utf-8", "streams are typed")
    big = server.post("/big?5000000")
    equal(len(big.body), 5000000, "5 MB arrive whole")
    reader = server.connect(rcvbuf=4096)
    reader.sendall(request("POST", "/big?3000000", "Connection: close\r\n", b""))
    n = 0
    while True:
        b = reader.recv(200000)
        if not b:
            break
        n += len(b)
        time.sleep(0.001)
    ok(n > 3000000, "and 3 MB at the pace of a slow reader", n)


# ---- who may ----

def names(server, open_server):
    for host, want in (("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1", 200), ("127.9.9.9:1", 200), ("[::1]:80", 200),
                       ("a.localhost", 200), ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("10.0.0.1", 421),
                       ("friend.example", 200), ("Friend.Example:80", 200)):
        got = open_server.talk(request("GET", "/v1/models", "Connection: close\r\n", host=host, key=None))
        equal(got.statuses, [want], f"without keys, Host: {host} gets {want}")
    got = server.talk(request("GET", "/v1/models", "Connection: close\r\n", host="evil.example"))
    equal(got.statuses, [200], "with keys, any Host is served")
    got = server.get("/v1/models", "Origin: http://evil.example\r\n")
    ok(got.status == 403 and "ccess-control" not in got.head, "a foreign Origin gets 403 and no CORS header", got)
    for origin, host, status in (("http://localhost:80", "localhost:80", 200), ("https://localhost", "localhost", 200),
                                 ("http://localhost:81", "localhost:80", 403), ("http://localhost", "localhost:80", 403),
                                 ("http:localhost", "localhost", 403), ("ftp://localhost", "localhost", 403), ("http://", "localhost", 403),
                                 ("null", "localhost", 403), ("http://localhost.evil", "localhost", 403)):
        got = server.talk(request("GET", "/v1/models", f"Origin: {origin}\r\nConnection: close\r\n", host=host))
        ok(got.status == status and "ccess-control" not in got.head, f"Origin {origin} of Host {host}: {status}, the server's own page alone", got)
    got = server.talk(request("OPTIONS", "/v1/models", "Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\nConnection: close\r\n", key=None))
    ok(got.status == 403 and "ccess-control" not in got.head, "so does its preflight", got)
    good = "Origin: https://app.example\r\nConnection: close\r\n"
    got = open_server.talk(request("OPTIONS", "/v1/models", good + "Access-Control-Request-Method: POST\r\n", key=None))
    ok(got.status == 204 and got.header("Access-Control-Allow-Origin") == "https://app.example" and got.body == b""
       and got.header("Content-Length") is None, "a configured Origin's preflight is answered", got)
    got = open_server.talk(request("GET", "/v1/models", good, key=None))
    ok(got.status == 200 and got.header("Access-Control-Allow-Origin") == "https://app.example" and got.header("Vary") == "Origin",
       "and its requests are", got)
    got = open_server.talk(request("GET", "/v1/models", "Connection: close\r\n", key=None))
    ok("ccess-control" not in got.head, "without Origin there are no CORS headers", got)


def ids(server):
    for sent, echoed in (("abc-DEF_1.2", True), ("a" * 64, True), ("a" * 65, False), ("a b", False), ("a%0d%0aX: y", False), ("", False)):
        got = server.get("/v1/models", f"X-Request-Id: {sent}\r\n").header("X-Request-Id")
        ok(got == sent if echoed else re.fullmatch("[0-9a-f]{32}", got), f"X-Request-Id {sent[:12]!r}... is {'echoed' if echoed else 'replaced'}", got)
    made = {server.get("/nope").header("X-Request-Id") for _ in range(50)}
    equal(len(made), 50, "made ids are all different")
    got = server.get("/v1/models").header("Date")
    ok(re.fullmatch(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT", got), "Date is well formed", got)


# ---- how many ----

def caps():
    server = Server("--max-connections", "20", "--max-connections-per-address", "12", "--header-timeout", "5")
    held = [server.connect() for _ in range(12)]
    time.sleep(0.1)
    got = server.get("/v1/models")
    ok(got.statuses == [503] and got.closed == "fin" and got.header("Retry-After") and got.is_error(),
       "the 13th connection of an address gets 503", got)
    held.pop().close()
    time.sleep(0.2)
    equal(server.get("/v1/models").statuses, [200], "as soon as one leaves, another is served")
    for s in held:
        s.close()
    server.stop()

    server = Server("--max-connections", "20", "--idle-timeout", "30", "--header-timeout", "30")
    busy = [server.connect() for _ in range(20)]
    for s in busy:
        s.sendall(request("POST", "/wait", "", b"{}"))
    ok(eventually(lambda: server.get("/v1/models").statuses == [503]), "the connection over the cap gets 503")
    flood = [server.connect() for _ in range(100)]
    time.sleep(0.2)
    ends = {Answers(*read_all(s)).status for s in flood}
    ok(ends <= {503, None}, "a flood is turned away, with 503 or closed", ends)
    for s in busy + flood:
        s.close()
    ok(eventually(lambda: server.get("/v1/models").statuses == [200]), "and afterwards all is well")
    idle = []
    for _ in range(40):
        s = server.connect()
        s.sendall(request("GET", "/v1/models"))
        s.recv(1000)
        idle.append(s)
    equal(server.get("/v1/models").statuses, [200], "idle connections make room for new ones")
    for s in idle:
        s.close()
    equal(server.stop(), 0, "the server ends well")

    server = Server("--max-connections", "20", "--header-timeout", "30")
    silent = [server.connect() for _ in range(6)]
    time.sleep(1.2)
    equal(server.get("/v1/models").statuses, [200], "a connection beside many silent ones is served")
    left = sum(1 for s in silent if not closed_by_peer(s))
    ok(left <= 5, "silent ones over a quarter of the cap are shed", left)
    server.stop()


def closed_by_peer(s):
    s.settimeout(0.2)
    try:
        return s.recv(1) == b""
    except socket.timeout:
        return False
    except OSError:
        return True


def descriptors():
    server = Server("--idle-timeout", "30", "--header-timeout", "30", prefix=("prlimit", "--nofile=160:160"))
    ok("lowered from 1024 to" in server.log, "--max-connections follows ulimit -n", server.log)
    busy = []
    for _ in range(200):
        try:
            s = server.connect(1)
            s.sendall(request("POST", "/wait", "", b"{}"))
            busy.append(s)
        except OSError:
            pass
    cpu = server.cpu_s()
    time.sleep(0.5)
    ok(server.cpu_s() - cpu < 0.1, "saturated, it does not spin", server.cpu_s() - cpu)
    for s in busy:
        s.close()
    ok(eventually(lambda: server.get("/v1/models").statuses == [200], 2), "it serves again when they leave")
    server.stop()


def failing_accept():
    if shutil.which("strace") is None:
        skip("an accept that keeps failing does not spin", "strace is not installed")
        return
    server = Server()
    trace = subprocess.Popen(["strace", "-f", "-qq", "-e", "trace=accept4,accept", "-e", "inject=accept4,accept:error=ENFILE",
                              "-o", "/dev/null", "-p", str(server.process.pid)], stderr=subprocess.PIPE)
    time.sleep(0.5)
    if trace.poll() is not None:
        skip("an accept that keeps failing does not spin", "strace may not attach here")
        server.stop()
        return
    waiting = [server.connect() for _ in range(3)]
    cpu = server.cpu_s()
    time.sleep(1)
    ok(server.cpu_s() - cpu < 0.2, "an accept that keeps failing does not spin", server.cpu_s() - cpu)
    trace.terminate()
    trace.wait()
    start = time.monotonic()
    for s in waiting:
        s.sendall(request("GET", "/v1/models", "Connection: close\r\n"))
        ok(Answers(*read_all(s)).statuses == [200], "those who waited meanwhile are served afterwards")
        s.close()
    ok(time.monotonic() - start < 1, "within a second", time.monotonic() - start)
    equal(server.log.count("accept: "), 1, "and the log says it once")
    server.stop()


def main():
    server = Server("--header-timeout", "0.5", "--body-timeout", "1.2", "--idle-timeout", "0.7",
                    "--stall-timeout", "1", "--max-requests-per-connection", "20")
    plain = Server()
    keyless = Server("--cors-origin", "https://app.example,https://b.example", "--allowed-hosts",
                     "friend.example", key=None)
    dripping = POOL.submit(body_rate, plain)  # takes 6 s, beside the rest
    deadlines(server)
    slow_readers(server)
    disconnects(server)
    lifetime(server)
    pipelining(plain)
    keep_alive(plain)
    old_http(plain)
    streams(plain)
    names(plain, keyless)
    ids(plain)
    caps()
    descriptors()
    failing_accept()
    dripping.result()
    for s in server, plain:
        equal(s.calls()["active"], 0, "nothing is left behind")
    for s in server, plain, keyless:
        equal(s.stop(), 0, "the server ends well")
    done()


main()
