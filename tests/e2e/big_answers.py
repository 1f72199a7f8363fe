"""Answers of megabytes: events are bounded, what is joined is the whole, and nobody else waits."""
import http.client
import json
import os
import threading
import time

os.environ["SPIND_TEST_SERVER"] = os.environ.get(
    "SPIND_TEST_SERVER", os.path.join(os.environ.get("SPIND_BUILD", "build"), "spind"))

from _server import KEY, Server, done, equal, ok, read_all, request  # noqa: E402  (after the choice of the binary)

LISTS = "text_offset", "token_logprobs", "tokens", "top_logprobs"


def post(server, body, path="/v1/completions"):
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    c.request("POST", path, json.dumps(body),
              {"Content-Type": "application/json", "Authorization": "Bearer " + KEY})
    return c.getresponse()


def events(response):
    """The events of a stream, to its [DONE]."""
    for line in response:
        if line.startswith(b"data: {"):
            yield len(line), json.loads(line[6:])
        elif line.startswith(b"data: [DONE]"):
            return
    raise EOFError("no [DONE]")


def joined(response, n):
    """Text, lists and reason per choice, and the bytes of the longest event."""
    got = [{"text": "", "reason": None, **{k: [] for k in LISTS}} for _ in range(n)]
    longest = count = 0
    for size, event in events(response):
        longest = max(longest, size)
        count += 1
        for c in event["choices"]:
            to = got[c["index"]]
            to["text"] += c["text"]
            to["reason"] = c["finish_reason"] or to["reason"]
            for k in LISTS if c["logprobs"] else ():
                to[k] += c["logprobs"][k]
    return got, longest, count


def parts_equal_the_whole(server, body, n, name, least):
    raw = post(server, body).read()
    whole = json.loads(raw)["choices"]
    try:
        got, longest, count = joined(post(server, {**body, "stream": True}), n)
    except (OSError, EOFError, http.client.HTTPException) as e:
        ok(False, name + ": a client that reads is not cut", e)
        return
    ok(len(raw) > least, f"{name}: an answer of {len(raw) >> 10} KiB")
    ok(longest < 40000 and count > len(raw) // 40000,
       f"{name}: {count} events, the longest {longest} bytes")
    for i in range(n):
        if not all([got[i]["text"] == whole[i]["text"],
                    got[i]["reason"] == whole[i]["finish_reason"],
                    whole[i]["logprobs"] is None
                    or all(got[i][k] == whole[i]["logprobs"][k] for k in LISTS)]):
            return ok(False, f"{name}: choice {i} is equal")
    ok(True, f"{name}: joined events equal the whole answer")


def a_slow_client_gets_it_all(server):
    body = {"prompt": [5] * 3000, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    r = post(server, body)
    time.sleep(1)
    got, _, _ = joined(r, 1)
    equal(len(got[0]["tokens"]), 3001, "a client that reads late gets every token")


def one_long_event_is_no_slow_client():
    """A prompt's ids come back in one event, here of 240 KB where 128 may be unsent, and the end right behind it."""
    server = Server("--max-model-len", "65536", "--stream-buffer", "128K")
    body = {"prompt": [200] * 60000, "max_tokens": 1, "ignore_eos": True, "return_token_ids": True, "stream": True}
    with server.connect(30, rcvbuf=4096) as s:
        s.sendall(request("POST", "/v1/completions", "Content-Type: application/json\r\nConnection: close\r\n", json.dumps(body).encode()))
        time.sleep(1)
        raw, how = read_all(s)
    ok(how == "fin" and len(raw) > 240000 and b"data: [DONE]" in raw[-40:], "an answer behind the ids of a long prompt is whole", how,
       len(raw), raw[-60:])
    server.stop()


def others_do_not_wait(server):
    stop, worst = threading.Event(), [0.0]

    def probe():
        while not stop.is_set():
            start = time.monotonic()
            server.get("/health")
            worst[0] = max(worst[0], time.monotonic() - start)

    t = threading.Thread(target=probe)
    t.start()
    body = {"prompt": [[7] * 1500] * 8, "echo": True, "logprobs": 20, "max_tokens": 1}
    raw = post(server, body).read()
    stop.set()
    t.join()
    answer = json.loads(raw)
    equal([len(c["logprobs"]["tokens"]) for c in answer["choices"]], [1501] * 8,
          f"{len(raw) >> 20} MiB in one whole answer")
    ok(worst[0] < 0.25, f"meanwhile /health took {worst[0] * 1000:.0f} ms at most")


def what_no_memory_could_hold_is_refused(server):
    r = post(server, {"prompt": [[1]] * 250, "n": 1, "logprobs": 20, "max_tokens": 40000})
    e = json.loads(r.read())["error"]
    equal((r.status, e["param"]), (400, "logprobs"), "an answer beyond the budget is a 400", e)
    held = [post_later(server) for _ in range(40)]
    codes = [r.status for r in held if r is not None]
    ok(503 in codes and set(codes) <= {200, 503}, "what others hold is not given twice: 503",
       codes)
    r = post(server, {"prompt": "a", "max_tokens": 2})
    equal(r.status, 200, "a plain request is served meanwhile")
    r.read()


def post_later(server):
    """A stream of 40,000 tokens with alternatives that nobody reads to the end."""
    r = post(server, {"prompt": "ab", "n": 8, "temperature": 1, "logprobs": 20,
                      "max_tokens": 40000, "stream": True})
    return r


def main():
    server = Server("--max-model-len", "65536", "--mock-step-us", "2000")
    echo = {"prompt": [5] * 1000, "echo": True, "logprobs": 20, "max_tokens": 1}
    parts_equal_the_whole(server, echo, 1, "echo with 20 alternatives", 300 << 10)
    parts_equal_the_whole(server, {**echo, "prompt": [5] * 4000}, 1, "4,000 of them", 1 << 20)
    parts_equal_the_whole(server, {"prompt": "na\u00efve \u65e5\u672c " * 2500, "echo": True,
                                   "max_tokens": 1}, 1, "echo of text", 32 << 10)
    parts_equal_the_whole(server, {**echo, "prompt": [[9] * 500] * 16}, 16, "16 choices at once",
                          1 << 20)
    a_slow_client_gets_it_all(server)
    others_do_not_wait(server)
    what_no_memory_could_hold_is_refused(server)
    equal(server.stop(), 0, "and it stops cleanly")
    one_long_event_is_no_slow_client()
    done()


main()
