"""Framing vectors of reliability.md, Appendix B, and requests on both sides of every limit."""
import asyncio

from _server import talk_in_pieces

AUTH = "Host: localhost\r\nAuthorization: Bearer k3y\r\n"


def post(headers, body="", line="POST /echo HTTP/1.1", auth=AUTH):
    return (line + "\r\n" + auth + headers + "\r\n" + body).encode("latin-1")


def chunked(body):
    return post("Transfer-Encoding: chunked\r\n", body)


def get(headers="", line="GET /v1/models HTTP/1.1", auth=AUTH):
    return post(headers, "", line, auth)


CL5 = "Content-Length: 5\r\n"
TE = "Transfer-Encoding: chunked\r\n"
SMUGGLED = "0\r\n\r\nGET /x HTTP/1.1\r\nHost: a\r\n\r\n"
KEYED = "Authorization: Bearer k3y\r\n"

REFUSED = {
    "CL then TE": post("Content-Length: 6\r\n" + TE, SMUGGLED),
    "TE then CL": post(TE + "Content-Length: 6\r\n", SMUGGLED),
    "CL twice equal": post(CL5 + CL5, "hello"),
    "CL twice different": post(CL5 + "Content-Length: 6\r\n", "hello!"),
    "CL 1, 1": post("Content-Length: 1, 1\r\n", "h"),
    "CL +5": post("Content-Length: +5\r\n", "hello"),
    "CL -1": post("Content-Length: -1\r\n"),
    "CL 0x5": post("Content-Length: 0x5\r\n", "hello"),
    "CL 1 2": post("Content-Length: 1 2\r\n", "hello"),
    "CL empty": post("Content-Length: \r\n", "hello"),
    "CL 23 nines": post("Content-Length: " + "9" * 23 + "\r\n"),
    "CL 2^63": post(f"Content-Length: {2**63}\r\n"),
    "CL 2^64-1": post(f"Content-Length: {2**64 - 1}\r\n"),
    "TE gzip": post("Transfer-Encoding: gzip\r\n", SMUGGLED),
    "TE gzip, chunked": post("Transfer-Encoding: gzip, chunked\r\n", SMUGGLED),
    "TE chunked, gzip": post("Transfer-Encoding: chunked, gzip\r\n", SMUGGLED),
    "TE xchunked": post("Transfer-Encoding: xchunked\r\n", SMUGGLED),
    "TE chunked, chunked": post("Transfer-Encoding: chunked, chunked\r\n", SMUGGLED),
    "TE chunked twice": post(TE + TE, SMUGGLED),
    "space before the colon": post("Transfer-Encoding : chunked\r\n", SMUGGLED),
    "TE folded": post("Transfer-Encoding:\r\n chunked\r\n", SMUGGLED),
    "other header folded": post("X-A: b\r\n c\r\n" + CL5, "hello"),
    "TE on HTTP/1.0": post(TE, SMUGGLED, "POST /echo HTTP/1.0"),
    "bare LF lines": get().replace(b"\r\n", b"\n"),
    "bare LF in the headers": get("X-A: b\nX-B: c\r\n"),
    "CR inside a value": get("X-A: b\rc\r\n"),
    "LF CRLF at the end": get("X-A: b\n"),
    "NUL in a value": get("X-A: b\0c\r\n"),
    "NUL in the target": get(line="GET /v1\0models HTTP/1.1"),
    "0x07 in a value": get("X-A: b\x07c\r\n"),
    "0xFF in a value": get("X-A: b\xffc\r\n"),
    "0x80 in Authorization": get(auth="Host: localhost\r\nAuthorization: Bearer k3y\x80\r\n"),
    "empty field name": get(": b\r\n"),
    "field name with []": get("X[A]: b\r\n"),
    "no Host": get(auth=KEYED),
    "two Hosts": get("Host: localhost\r\n"),
    "empty Host": get(auth="Host: \r\n" + KEYED),
    "Host with a path": get(auth="Host: localhost/x\r\n" + KEYED),
    "Host with user": get(auth="Host: a@localhost\r\n" + KEYED),
    "two Authorizations": get(KEYED),
    "chunk size with LF only": chunked("5\nhello\r\n0\r\n\r\n"),
    "chunk extension with LF only": chunked("5;a=b\nhello\r\n0\r\n\r\n"),
    "chunk size overflow": chunked("1" + "0" * 16 + "\r\nhello"),
    "chunk size 2^64-1": chunked("f" * 16 + "\r\nhello"),
    "chunk size 0x1": chunked("0x1\r\nh\r\n0\r\n\r\n"),
    "chunk data without CRLF": chunked("5\r\nhello0\r\n\r\n"),
    "chunk size with a trailing space": chunked("5 \r\nhello\r\n0\r\n\r\n"),
    "negative chunk size": chunked("-5\r\nhello\r\n0\r\n\r\n"),
    "trailer Content-Length": chunked("5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n"),
    "trailer Authorization": chunked("5\r\nhello\r\n0\r\nAuthorization: Bearer x\r\n\r\n"),
    "65 trailers": chunked("5\r\nhello\r\n0\r\n" + "X-A: b\r\n" * 65 + "\r\n"),
    "version 9.9": get(line="GET /v1/models HTTP/9.9"),
    "version 0.9": get(line="GET /v1/models HTTP/0.9"),
    "version 2.0": get(line="GET /v1/models HTTP/2.0"),
    "no version": get(line="GET /v1/models"),
    "lower-case method": get(line="get /v1/models HTTP/1.1"),
    "unknown method": get(line="FETCH /v1/models HTTP/1.1"),
    "space in the target": get(line="GET /v1 models HTTP/1.1"),
    "absolute-form": get(line="GET http://localhost/v1/models HTTP/1.1"),
    "authority-form": get(line="GET localhost:80 HTTP/1.1"),
    "*": get(line="OPTIONS * HTTP/1.1"),
    "fragment": get(line="GET /v1/models#x HTTP/1.1"),
    "encoded NUL in the path": get(line="GET /v1/models/a%00b HTTP/1.1"),
    "encoded slash in the path": get(line="GET /v1%2fmodels HTTP/1.1"),
    "half an escape in the path": get(line="GET /v1/models/a%4 HTTP/1.1"),
    "CONNECT": get(line="CONNECT localhost:80 HTTP/1.1"),
    "Upgrade h2c": get("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"),
    "Upgrade websocket": get("Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "GET with a body": get(CL5) + b"hello",
    "GET with chunks": get(TE) + b"5\r\nhello\r\n0\r\n\r\n",
    "CRLF three times first": b"\r\n\r\n\r\n" + get(),
    "LF first": b"\n" + get(),
    "TLS hello": bytes.fromhex("1603010200010001fc0303") + b"\0" * 40,
    "only garbage": b"\x00\x01\x02\x03 nothing like HTTP\r\n\r\n",
    "Expect: x": post("Expect: x\r\n" + CL5, "hello"),
}
STATUS = {"CL 2^63": 413, "CL 2^64-1": 413, "chunk size 2^64-1": 413, "Expect: x": 417}


def head_of(total):
    """A good request whose head has exactly `total` bytes."""
    start = ("GET /v1/models HTTP/1.1\r\n" + AUTH + "X-A: ").encode()
    return start + b"a" * (total - len(start) - 4) + b"\r\n\r\n"


def fields(n):
    return get("".join(f"X-{i}: b\r\n" for i in range(n - 2)))


def target(n):
    return get(line="GET /v1/models/" + "a" * (n - 11) + " HTTP/1.1")


def extension(n):
    half = n // 2
    return chunked(f"5;{'a' * half}={'b' * (n - half)}\r\nhello\r\n0\r\n\r\n")


def pieces(count, size):
    return chunked((f"{size:x}\r\n" + "x" * size + "\r\n") * count + "0\r\n\r\n")


# name: (bytes, status)
LIMITS = {
    "a head of 16,384 bytes": (head_of(16384), 200),
    "a head of 16,385 bytes": (head_of(16385), 431),
    "a header value of 7 MiB": (head_of(7 << 20), 431),
    "64 fields": (fields(64), 200),
    "65 fields": (fields(65), 431),
    "200,000 fields": (fields(200000), 431),
    "a target of 2,048 bytes": (target(2048), 200),
    "a target of 2,049 bytes": (target(2049), 414),
    "256 bytes of chunk extensions": (extension(256), 200),
    "257 bytes of chunk extensions": (extension(257), 400),
    "a body of 100,000 bytes": (post("Content-Length: 100000\r\n", "x" * 100000), 200),
    "a declared body of 100,001 bytes": (post("Content-Length: 100001\r\n"), 413),
    "chunks of 100,000 bytes together": (pieces(10, 10000), 200),
    "chunks of 100,001 bytes together": (chunked("186a0\r\n" + "x" * 100000 + "\r\n1\r\n"), 413),
    "a chunk declared larger than the limit": (chunked("186a1\r\n"), 413),
    "256 chunks of 1 byte": (pieces(256, 1), 200),
    "258 chunks of 1 byte": (pieces(258, 1), 400),
    "1,000 chunks of 16 bytes": (pieces(1000, 16), 200),
    "500,000 chunks of 1 byte": (pieces(500000, 1), 400),
}

ONE = "Connection: close\r\n"
SERVED = {  # name: (bytes, statuses)
    "one CRLF first": (b"\r\n" + get(ONE), [200]),
    "data after Connection: close is ignored": (get(ONE) + get(), [200]),
    "Expect: 100-continue with a key": (post("Expect: 100-continue\r\n" + ONE + CL5, "hello"), [100, 200]),
    "Expect: 100-continue without a key":
        (post("Expect: 100-continue\r\n" + CL5, "hello", auth="Host: localhost\r\n"), [401]),
    "Expect and a body far too large":
        (post("Expect: 100-continue\r\nContent-Length: 99999999999\r\n"), [413]),
    "no key and a body far too large":
        (post("Content-Length: 99999999999\r\n", auth="Host: localhost\r\n"), [401]),
    "HTTP/1.0 without Host": (get(line="GET /v1/models HTTP/1.0", auth=KEYED), [200]),
    "a chunked body": (post(TE + ONE, "5\r\nhello\r\n6;a=b\r\n world\r\n0\r\n\r\n"), [200]),
    "a GET with Content-Length: 0": (get(ONE + "Content-Length: 0\r\n"), [200]),
    "an unknown but well-formed method": (get(ONE, "DELETE /v1/models HTTP/1.1"), [405]),
    "two good requests, then garbage": (get() + get() + b"garbage\r\n\r\n", [200, 200, 400]),
    "an encoded slash in a model's name": (get(ONE, "GET /v1/models/a%2Fb HTTP/1.1"), [200]),
}


async def run_all(server, vectors, splits):
    """[(name, split, answers)] for every vector at every split, 60 connections at a time."""
    gate = asyncio.Semaphore(60)

    async def one(name, data, split):
        async with gate:
            return name, split, await talk_in_pieces(server.port, data, split)

    return await asyncio.gather(*(one(name, data, split) for name, data in vectors.items()
                                  for split in splits(data)))


def every_split(_):
    return 0, 1, 7


def fewer_splits(data):
    return every_split(data) if len(data) < 20000 else (0, 1000)
