"""Who leaves, in every state, and what is left of it: nothing. Queues that are full or too slow, a KV
cache too small for everyone, and the drain. Vectors 55, 59 and 61 of reference/api.md."""
import concurrent.futures
import json
import signal
import socket
import struct

from _server import Answers, done, equal, eventually, ok, read_all, request
from _spind import (CHAT, COMPLETION, JSON, PATIENCE, Reply, Stream, complete, descriptors, metrics, mock, now, quiescent, real, settles,
                    until)

POOL = concurrent.futures.ThreadPoolExecutor(32)
LETTERS = ("--mock-first-token", "97", "--mock-n-tokens", "26")
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
GENERATED, ABORTED = "vllm:generation_tokens_total", 'vllm:request_success_total{finished_reason="abort"}'
COMPUTED = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'


def letters(n):
    return "".join(chr(97 + i % 26) for i in range(n))


def begin(server, prompt="hi", stream=True, rcvbuf=0, path=COMPLETION, **fields):
    """A connection on which the request is sent; nothing is read."""
    s = server.connect(PATIENCE, rcvbuf)
    body = {"prompt": prompt, "ignore_eos": True, "stream": stream, **fields}
    s.sendall(request("POST", path, JSON + "Connection: close\r\n", json.dumps(body).encode(), key=None))
    return s


def leave(s, how):
    if how == "reset":
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        s.shutdown(socket.SHUT_WR)
    else:
        s.close()


def rest_of(s, first=b""):
    out, closed = read_all(s)
    s.close()
    return Answers(first + out, closed)


def blocks_are_complete(server, name):
    m = metrics(server)
    kv = {state: m[f'spind_kv_blocks{{state="{state}",tier="hbm"}}'] for state in ("free", "cached", "used")}
    total = next(float(k.split('num_gpu_blocks="')[1].split('"')[0]) for k in m if k.startswith("vllm:cache_config_info"))
    return ok(kv["used"] == 0 and kv["free"] + kv["cached"] == total > 0, name, kv, total)


# ---- leaving ----

def many_streams(server):
    base = descriptors(server)
    streams = [begin(server, f"Story number {i}:", max_tokens=8000) for i in range(200)]
    until(lambda: metrics(server)[GENERATED] > 300)
    for s in streams:
        s.close()
    start = now()
    got = complete(server, "hi", max_tokens=4)
    ok(got.status == 200 and now() - start < 5, "55: after 200 cancelled streams a request is answered within 5 s", got, now() - start)
    settles(server, "55: nothing of them runs, waits or holds KV blocks")
    blocks_are_complete(server, "55: each block is free or in the prefix cache")
    ok(eventually(lambda: descriptors(server) == base, 5), "55: as many descriptors are open as before", descriptors(server), base)
    m = metrics(server)
    equal(m[ABORTED], 200, "55: each counts once, as aborted")


def leave_prefill(server):
    """64 tokens a step, 20 ms a step: a prompt of 6,000 tokens takes 2 s."""
    i = 0
    for how in "close", "reset", "half":
        for stream in True, False:
            i += 1
            before = metrics(server)
            s = begin(server, [i] * 6000, stream=stream, max_tokens=50)
            until(lambda: metrics(server)[RUNNING] == 1)
            leave(s, how)
            gone = eventually(lambda: quiescent(server), 1.5)
            m = metrics(server)
            ok(gone and m[GENERATED] == before[GENERATED] and 0 < m[COMPUTED] - before[COMPUTED] < 6000 and m[ABORTED] == before[ABORTED] + 1,
               f"a {'streaming' if stream else 'waiting'} client that leaves during prefill ({how}) ends it there",
               m[COMPUTED] - before[COMPUTED], m[GENERATED], before[GENERATED])
            s.close()


def leave_queue(server):
    """One sequence runs at a time."""
    first = begin(server, max_tokens=8000)
    until(lambda: metrics(server)[RUNNING] == 1)
    for how in "close", "reset", "half":
        for stream in True, False:
            before = metrics(server)
            s = begin(server, "queued", stream=stream, n=3, max_tokens=50)
            until(lambda: metrics(server)[WAITING] == 3)
            leave(s, how)
            ok(eventually(lambda: metrics(server)[WAITING] == 0, 1) and metrics(server)[RUNNING] == 1,
               f"a {'streaming' if stream else 'waiting'} client that leaves the queue ({how}) takes its three choices with it")
            until(lambda: metrics(server)[ABORTED] == before[ABORTED] + 3, 5)
            s.close()
    first.close()
    settles(server, "then the one that ran leaves too")


def leave_beside_others(server):
    """What stays is as if nobody had left. Four sequences run at a time."""
    kept = [begin(server, f"stay {i}", max_tokens=150) for i in range(3)]
    for i in range(30):
        s = begin(server, f"leave {i}", max_tokens=8000, n=2)
        if i % 3 == 0:
            s.recv(1)
        leave(s, ("close", "reset", "half")[i % 3])
        if i % 3 == 2:
            s.close()
    got = [Stream(rest_of(s)) for s in kept]
    ok(all(g.good() and g.text() == letters(150) for g in got), "streams that stay while 30 others leave are whole", [g for g in got if g.text() != letters(150)][:1])
    settles(server, "and nothing is left of the others")


# ---- full ----

def full(server):
    """One runs, two wait."""
    first = begin(server, max_tokens=8000)
    until(lambda: metrics(server)[RUNNING] == 1)
    waiting = [begin(server, "w", stream=False, max_tokens=3) for _ in range(2)]
    until(lambda: metrics(server)[WAITING] == 2)
    before = metrics(server)
    for stream in False, True:
        start = now()
        got = Reply(rest_of(begin(server, "one too many", stream=stream, max_tokens=3)))
        ok(got.status == 503 and got.error["code"] == "server_overloaded" and got.error["type"] == "unavailable_error" and 1 <= int(got.header("Retry-After")) <= 120
           and got.header("Content-Type") == "application/json" and now() - start < 2, f"61: a full server says so at once, and when to come back (stream: {stream})", got)
    m = metrics(server)
    equal(m['vllm:admission_rejections_total{reason="server_overloaded"}'], 2, "61: both are counted")
    equal((m[WAITING], m[COMPUTED] - before[COMPUTED]), (2, 0), "61: and nothing is computed for them")
    first.close()
    got = [Reply(rest_of(s)) for s in waiting]
    ok(all(g.status == 200 and g.text == "abc" for g in got), "61: those who waited are served", got)
    settles(server, "61: and all is well")


def too_many_tokens(server):
    """One runs; 100 prompt tokens may wait."""
    first = begin(server, max_tokens=8000)
    until(lambda: metrics(server)[RUNNING] == 1)
    heavy = begin(server, "x" * 300, stream=False, max_tokens=1)
    until(lambda: metrics(server)[WAITING] == 1)
    got = complete(server, "x", max_tokens=1)
    ok(got.status == 503 and got.error["code"] == "server_overloaded", "61: a queue may be full of tokens too", got)
    first.close()
    equal(Reply(rest_of(heavy)).status, 200, "61: but a single prompt of any size may wait")


def too_slow(server):
    """--queue-timeout 1"""
    first = begin(server, max_tokens=8000)
    until(lambda: metrics(server)[RUNNING] == 1)
    start = now()
    both = [begin(server, "w", stream=stream, max_tokens=3) for stream in (True, False)]
    got = [Reply(rest_of(s)) for s in both]
    ok(all(g.status == 503 and g.error["code"] == "queue_timeout" and 1 <= int(g.header("Retry-After")) <= 120 for g in got) and now() - start >= 0.99,
       "who waits longer than --queue-timeout gets 503, in streams as well", got, now() - start)
    ok(eventually(lambda: metrics(server)[WAITING] == 0) and metrics(server)[RUNNING] == 1, "and leaves the queue", metrics(server)[WAITING])
    equal(metrics(server)['vllm:admission_rejections_total{reason="queue_timeout"}'], 2, "and is counted")
    first.close()
    settles(server, "and all is well")


def preempted(server):
    """36 blocks of 16 positions for two sequences that are let in for 17 each and grow to 22."""
    prompts = [f"A letter from city {i}:\n" for i in range(2)]
    fields = {"max_tokens": 336, "temperature": 0, "ignore_eos": True}
    alone = [complete(server, p, **fields).text for p in prompts]
    got = list(POOL.map(lambda p: complete(server, p, **fields), prompts))
    ok([g.text for g in got] == alone, "sequences that are preempted go on with the same text", got, alone)
    ok(metrics(server)["vllm:num_preemptions_total"] > 0, "and one was preempted", metrics(server))
    settles(server, "none keeps a block")
    blocks_are_complete(server, "each block is free or in the prefix cache")


# ---- the drain ----

def drain(seconds, n_tokens, body):
    server = mock("--mock-step-us", "20000", "--max-num-seqs", "3", "--drain-timeout", str(seconds), *LETTERS)
    streams = [begin(server, f"d{i}", max_tokens=n_tokens, stream_options={"include_usage": True}) for i in range(3)]
    firsts = [s.recv(1) for s in streams]
    waiting = begin(server, "queued", stream=False, max_tokens=5)
    until(lambda: metrics(server)[WAITING] == 1)
    idle = server.connect(PATIENCE)
    start = now()
    server.process.send_signal(signal.SIGTERM)
    rests = [POOL.submit(rest_of, s, f) for s, f in zip(streams, firsts)]
    body(server, [Stream(r.result()) for r in rests], lambda: Reply(rest_of(waiting)), start)
    idle.close()


def ends_with_error(got):
    return (got.status == 200 and not got.done and b'data: {"error":{"message":"The server is shutting down' in got.raw and b'"code":"shutting_down"' in got.raw
            and not got.raw.endswith(b"\r\n0\r\n\r\n"))


def drain_at_once():
    def check(server, streams, waiting, start):
        ok(all(ends_with_error(s) for s in streams), "59: --drain-timeout 0 ends streams with an error event and no [DONE]", streams[:1])
        got = waiting()
        ok(got.status == 503 and got.error["code"] == "shutting_down" and got.header("Retry-After"), "59: and those who wait with 503", got)
        equal(server.wait(20), 0, "59: the status is 0")
        ok(now() - start < 4, "59: in less than 4 s", now() - start)
    drain(0, 5000, check)


def drain_three():
    def check(server, streams, waiting, start):
        took = now() - start
        ok(all(ends_with_error(s) for s in streams) and 2.9 < took < 10, "59: after 3 s streams that go on are cut, with an error event", took, streams[:1])
        ok(all(len(s.raw) > 5000 for s in streams), "59: until then they flowed")
        equal(waiting().status, 503, "59: those who wait get 503")
        equal(server.wait(20), 0, "59: the status is 0")
        ok(now() - start < 13, "59: in less than 13 s", now() - start)
    drain(3, 5000, check)


def drain_whole():
    def check(server, streams, waiting, start):
        ok(all(s.good() and s.text() == letters(100) and s.usage["completion_tokens"] == 100 for s in streams), "59: with 30 s running streams end whole", streams[:1])
        got = waiting()
        ok(got.status == 200 and got.text == "abcde", "59: and what was accepted into the queue is served", got)
        equal(server.wait(20), 0, "59: the status is 0")
        ok(now() - start < 25, "59: as soon as they are done", now() - start)
    drain(30, 100, check)


def newcomers():
    server = mock("--mock-step-us", "20000", *LETTERS)
    s = begin(server, max_tokens=50)
    first = s.recv(1)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: "draining" in server.log)
    for path, body in ((COMPLETION, {"prompt": "hi"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        got = Reply(server.talk(request("POST", path, JSON, json.dumps(body).encode(), key=None), PATIENCE))
        ok(got.status == 503 and got.error["code"] == "shutting_down" and int(got.header("Retry-After")) >= 1 and got.header("Connection") == "close",
           f"59: a newcomer to {path} gets 503 and is sent elsewhere", got)
    equal(Reply(server.talk(request("GET", "/health", key=None), PATIENCE)).status, 503, "58: a draining server is not ready")
    ok(Stream(rest_of(s, first)).text() == letters(50), "59: and its streams flow on")
    equal(server.wait(20), 0, "59: to the end")


def main():
    drains = [POOL.submit(f) for f in (drain_at_once, drain_three, drain_whole, newcomers)]
    slow = mock("--mock-step-us", "20000", "--max-num-seqs", "1", "--max-num-batched-tokens", "64", *LETTERS)
    four = mock("--mock-step-us", "2000", "--max-num-seqs", "4", *LETTERS)
    two_wait = mock("--mock-step-us", "5000", "--max-num-seqs", "1", "--max-num-queued-reqs", "2", *LETTERS)
    hundred = mock("--mock-step-us", "5000", "--max-num-seqs", "1", "--max-num-queued-tokens", "100", *LETTERS)
    brief = mock("--mock-step-us", "5000", "--max-num-seqs", "1", "--queue-timeout", "1", *LETTERS)
    mocks = [slow, four, two_wait, hundred, brief]
    bases = [descriptors(s) for s in mocks]
    slow_waits = POOL.submit(too_slow, brief)
    leave_prefill(slow)
    leave_queue(slow)
    leave_beside_others(four)
    full(two_wait)
    too_many_tokens(hundred)
    slow_waits.result()
    for d in drains:
        d.result()
    for s, base in zip(mocks, bases):
        blocks_are_complete(s, "each block is free or in the prefix cache")
        ok(eventually(lambda: descriptors(s) == base, 5), "as many descriptors are open as at first", descriptors(s), base)
        equal(s.stop(), 0, "the server ends well")
    server = real("--max-num-queued-reqs", "1000")
    many_streams(server)
    equal(server.stop(), 0, "the server ends well")
    small = real("--kv-hbm", str(36 * 368640), "--max-model-len", "512")
    preempted(small)
    equal(small.stop(), 0, "the server ends well")
    done()


main()
