"""Framing vectors (reliability.md, Appendix B), each cut into pieces of 0, 1 and 7 bytes: one 4xx,
then the connection is closed, and no request reaches the API. Then the limits, both sides."""
import asyncio

from _server import Server, done, equal, ok
from _vectors import LIMITS, REFUSED, SERVED, STATUS, every_split, fewer_splits, run_all


def refused(server):
    before = server.calls()["heads"]
    for name, split, got in asyncio.run(run_all(server, REFUSED, every_split)):
        want = STATUS.get(name, 400)
        ok(got.statuses == [want] and got.closed == "fin" and got.is_error()
           and got.header("X-Request-Id") is not None and got.header("Connection") == "close",
           f"{name}, cut at {split}: one {want} and the end", got)
    late = [n for n in REFUSED if n.startswith(("chunk", "negative chunk", "trailer", "65 trailers"))]
    by_api = 2  # Content-Length 2^63 and 2^64-1
    equal(server.calls()["heads"] - before - 1, 3 * (len(late) + by_api),
          "a request with a bad head does not reach the API")
    equal(server.calls()["bodies"], 0, "a request with a bad body is not served")


def limits(server):
    over = {n: data for n, (data, status) in LIMITS.items() if status != 200}
    for name, split, got in asyncio.run(run_all(server, over, fewer_splits)):
        # Who sends megabytes on regardless is reset in the end, but had its answer.
        ends = ("fin", "reset") if len(over[name]) > 65536 else ("fin",)
        ok(got.statuses == [LIMITS[name][1]] and got.closed in ends and got.is_error(),
           f"{name}, cut at {split}: {LIMITS[name][1]}", got)
    for name, (data, status) in LIMITS.items():
        if status == 200:
            got = server.talk(data, timeout=0.3)
            ok(got.statuses == [200] and got.closed == "open",
               f"{name}: 200, and the connection stays", got)
    cpu = server.cpu_s()
    server.talk(LIMITS["500,000 chunks of 1 byte"][0])
    ok(server.cpu_s() - cpu < 0.1, "500,000 chunks cost less than 0.1 s of CPU", server.cpu_s() - cpu)


def served(server):
    vectors = {name: data for name, (data, _) in SERVED.items()}
    for name, split, got in asyncio.run(run_all(server, vectors, every_split)):
        ok(got.statuses == SERVED[name][1] and got.closed == "fin",
           f"{name}, cut at {split}: {SERVED[name][1]}", got)


def main():
    server = Server("--max-body-bytes", "100000", "--header-timeout", "20")
    refused(server)
    limits(server)
    served(server)
    equal(server.calls()["active"], 0, "nothing is left behind")
    equal(server.stop(), 0, "the server ends well")
    done()


main()
