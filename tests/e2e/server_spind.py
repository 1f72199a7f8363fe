"""The real daemon with its mock device: framing, disconnects and the drain reach the engine.

The binary: SPIND, else spind of the build (SPIND_BUILD)."""
import asyncio
import json
import os
import re
import signal
import socket
import struct
import time

import _server
from _server import BUILD, Server, done, equal, eventually, ok, read_all, request
from _vectors import REFUSED, STATUS, run_all

JSON = "Content-Type: application/json\r\n"


def completion(max_tokens, extra="", **fields):
    body = json.dumps({"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, **fields}).encode()
    return request("POST", "/v1/completions", JSON + extra, body)


def gauge(server, name):
    text = server.get("/metrics").body.decode()
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M)
    return float(found.group(1)) if found else None


def quiet(server):
    return gauge(server, "vllm:num_requests_running") == 0 and gauge(server, "vllm:num_requests_waiting") == 0


def blocks_used(server):
    return gauge(server, "vllm:kv_cache_usage_perc")


def framing(server):
    def real(data):
        return data.replace(b"POST /echo", b"POST /v1/completions").replace(
            b"Host: localhost\r\n", b"Host: localhost\r\n" + JSON.encode(), 1)

    vectors = {name: real(data) for name, data in REFUSED.items()}
    for name, split, got in asyncio.run(run_all(server, vectors, lambda _: (0, 1, 7))):
        want = STATUS.get(name, 400)
        ok(got.statuses == [want] and got.closed == "fin" and got.is_error() and got.header("X-Request-Id") is not None,
           f"{name}, cut at {split}: one {want} and the end", got)


def leaving(server):
    for how in "close", "reset", "half":
        for stream in True, False:
            s = server.connect()
            s.sendall(completion(8000, stream=stream))
            running = eventually(lambda: gauge(server, "vllm:num_requests_running") == 1, 3)
            if how == "reset":
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how == "half":
                s.shutdown(socket.SHUT_WR)
            else:
                s.close()
            ok(running and eventually(lambda: quiet(server), 1),
               f"a {'streaming' if stream else 'waiting'} client that leaves ({how}) ends its sequence")
            s.close()
    many = []
    for _ in range(200):
        s = server.connect()
        s.sendall(completion(8000, stream=True))
        many.append(s)
    time.sleep(0.3)
    for s in many:
        s.close()
    start = time.monotonic()
    got = server.talk(completion(4, "Connection: close\r\n"))
    ok(got.status == 200 and time.monotonic() - start < 5, "after 200 cancelled streams one request is answered within 5 s", got)
    ok(eventually(lambda: quiet(server), 10), "and nothing of them runs or waits")
    ok(eventually(lambda: (blocks_used(server) or 0) < 0.01, 5), "nor holds blocks", blocks_used(server))


def slow_reader(server):
    s = server.connect(rcvbuf=4096)
    s.sendall(completion(8000, stream=True, logprobs=5))
    ok(eventually(lambda: quiet(server), 10), "a stream nobody reads does not run for ever")
    s.close()


def drained(server):
    streams = []
    for _ in range(8):
        s = server.connect(20)
        s.sendall(completion(300, stream=True))
        streams.append(s)
    for s in streams:
        s.recv(1)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "draining" in server.log, 2)
    got = server.talk(completion(4))
    ok(got.statuses == [503] and got.closed == "fin" and got.header("Retry-After"), "while draining, new requests get 503", got)
    ends = [read_all(s)[0] for s in streams]
    ok(all(e.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for e in ends), "8 running streams end whole", [e[-50:] for e in ends])
    equal(server.wait(5), 0, "then the process ends, with 0")


def main():
    _server.BINARY = os.environ.get("SPIND", os.path.join(BUILD, "spind"))
    server = Server("--mock-step-us", "2000", "--stall-timeout", "2", "--max-num-queued-reqs", "1000")
    equal(server.get("/health").status, 200, "it is healthy")
    framing(server)
    ok(quiet(server), "no refused request reached the engine")
    leaving(server)
    slow_reader(server)
    got = server.talk(completion(4, "Connection: close\r\n"))
    ok(got.status == 200 and json.loads(got.body)["usage"]["completion_tokens"] == 4, "it still answers", got)
    drained(server)
    done()


main()
