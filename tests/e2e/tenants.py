"""Tenants on the wire: whose key it is, every limit's 429 while others are served, reloads under load, and
what of it logs, metrics and the prefix cache may know."""
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading

import _server
from _server import clean_env, done, equal, eventually, ok, request
from _spind import CHAT, COMPLETION, JSON, ask, get, metrics, mock, until
from _spind import stream as stream_of

FOLDER = tempfile.mkdtemp(prefix="spind-tenants-")
CANARY = "canary7Q"
LIMIT_HEADERS = ("limit", "remaining", "reset")


def key(name):
    """Its text is planted in nothing but requests: the file has the digest."""
    return f"sk-{name}-{CANARY}" + hashlib.sha256(name.encode()).hexdigest()[:43]


def entry(name, **more):
    return {"id": name, "sha256": hashlib.sha256(key(name).encode()).hexdigest(), **more}


def tenant(name, **limits):
    return {"name": name, "keys": [entry(name + "-1")], **limits}


def key_of(name):
    return key(name + "-1")


class File:
    def __init__(self, name):
        self.path = os.path.join(FOLDER, name)

    def write(self, content, mode=0o600):
        with open(self.path + ".new", "w") as f:
            f.write(content if isinstance(content, str) else json.dumps({"tenants": content}))
        os.chmod(self.path + ".new", mode)
        os.rename(self.path + ".new", self.path)
        return self


def complete(server, who, prompt="hello", path=COMPLETION, **fields):
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return ask(server, path, body, key=key_of(who))


def reload(server, file, content):
    file.write(content)
    before = server.log.count("tenants: ")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.log.count("tenants: ") > before)


def begin(server, who, **fields):
    """A stream that has begun to come."""
    s = server.connect(60)
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, **fields}
    s.sendall(request("POST", COMPLETION, JSON, json.dumps(body).encode(), key=key_of(who)))
    return s


def is_429(got, who, what, limit, name):
    e = got.error or {}
    seconds, ms = got.header("Retry-After"), got.header("retry-after-ms")
    words = rf"Rate limit reached for tenant '{who}' on {what}: limit {limit}( per minute)?, used \d+, requested \d+. " \
            rf"Retry in (\d+) s."
    found = re.fullmatch(words, e.get("message", ""))
    ok(got.status == 429 and found and e["type"] == "rate_limit_error" and e["code"] == "rate_limit_exceeded" and
       e["param"] is None and seconds == found.group(2) and 1 <= int(seconds) <= 120 and
       (int(ms) + 999) // 1000 == int(seconds), name, got, got.head)
    return got


# ---- the start ----


def refused_at_start():
    def run(*args, env=None):
        got = subprocess.run([_server.BINARY, "serve", "--device", "mock", "--port", "0", *args], capture_output=True,
                             text=True, timeout=60, env=env or clean_env())
        return got.returncode, got.stderr.splitlines()[-1]

    file = File("start.json").write([tenant("a")])
    want = "spind: --tenants and --api-key (or --api-key-file, or SPIND_API_KEY) exclude each other: the digests of all " \
           "keys go into the tenants file"
    equal(run("--tenants", file.path, "--api-key", "x"), (2, want), "--tenants and --api-key exclude each other")
    equal(run("--tenants", file.path, env=clean_env(SPIND_API_KEY="x")), (2, want), "so does a key of the environment")
    file.write([tenant("a", weight=0)])
    equal(run("--tenants", file.path),
          (1, f'spind: {file.path}: tenant "a": weight: must be a number over 0 and at most 1000'),
          "a bad file ends the start, and says file, tenant and field")
    file.write([tenant("a")], mode=0o644)
    equal(run("--tenants", file.path), (1, f"spind: {file.path}: others than its owner may use it (mode 0644); do: "
                                           f"chmod 600 {file.path}"), "so does one that others may read")
    file.write([tenant("a")])
    config = os.path.join(FOLDER, "config.json")
    with open(config, "w") as f:
        json.dump({"tenants": file.path, "host": "0.0.0.0"}, f)
    server = mock("--config", config)
    equal(get(server, "/v1/models").status, 401, "it is a key of --config, too, and enough to listen beyond this machine")
    equal(get(server, "/v1/models", key=key_of("a")).status, 200, "where its keys are good")
    server.stop()


def new_key():
    got = subprocess.run([_server.BINARY, "key", "fresh"], capture_output=True, text=True, timeout=60)
    text = re.search(r"^ +(sk-[a-z2-7]{8}-[A-Za-z0-9_-]{43})$", got.stdout, re.M).group(1)
    line = json.loads(re.search(r"^ +(\{.*\})$", got.stdout, re.M).group(1))
    server = mock("--tenants", File("fresh.json").write([line]).path)
    equal(get(server, "/v1/models", key=text).status, 200, "what spind key prints is a key and its line of the file")
    server.stop()
    ok("tenant fresh" in server.log and text not in server.log and text[12:] not in server.log, "the log does not have it")
    again = subprocess.run([_server.BINARY, "key"], capture_output=True, text=True, timeout=60).stdout
    ok('{"id": "' in again and text not in again, "every key is another one")
    bad = subprocess.run([_server.BINARY, "key", "No Name"], capture_output=True, text=True, timeout=60)
    ok(bad.returncode == 2 and bad.stdout == "", "a name that the file would refuse is refused here", bad)


# ---- whose key ----


def keys(server):
    def status(extra="", k=None):
        return ask(server, COMPLETION, {"prompt": "x", "max_tokens": 1}, extra=extra, key=k).status

    equal(status(), 401, "no key: 401")
    equal(status(k="sk-wrong"), 401, "a wrong key: 401")
    equal(status(k=key_of("free")[:-1]), 401, "a part of a key: 401")
    equal(status(k=hashlib.sha256(key_of("free").encode()).hexdigest()), 401, "the digest of the file: 401")
    equal(status(k=key("free-old")), 401, "a key that has expired: 401")
    equal(status(k=key("free-2")), 200, "a tenant's second key, which has not yet: 200")
    equal(status(extra=f"X-Api-Key: {key_of('requests')}\r\n", k=key_of("free")), 401, "two tenants' keys at once: 401")
    equal(status(extra=f"X-Api-Key: {key_of('free')}\r\nX-Tenant: requests\r\n"), 200, "X-Api-Key: 200")
    eventually(lambda: "tenant free, key free-1" in server.log)
    line = [x for x in server.log.splitlines() if "tenant free, key free-1" in x]
    ok(line and " 200 " in line[-1], "the access line names tenant and key id, whatever X-Tenant says", line)
    ok(not any("tenant" in x for x in server.log.splitlines() if " 401 " in x), "that of a 401 names nobody")


# ---- limits ----


def limits(server):
    for i in range(3):
        got = complete(server, "requests", path=(COMPLETION, CHAT)[i % 2])
        equal((got.status, got.header("x-ratelimit-limit-requests"), got.header("x-ratelimit-remaining-requests")),
              (200, "3", str(2 - i)), f"request {i + 1} of 3 in a minute")
        ok(re.fullmatch(r"(\dm)?[\d.]+s|\d+ms", got.header("x-ratelimit-reset-requests")), "its reset is a duration of Go's",
           got.head)
    bad = ask(server, COMPLETION, b"{", key=key_of("requests"))
    got = is_429(bad, "requests", "requests", 3, "the 4th is 429 before its body is looked at")
    equal([got.header(f"x-ratelimit-{h}-requests") is not None for h in LIMIT_HEADERS], [True] * 3, "with the same headers")
    equal(complete(server, "free").status, 200, "while another tenant gets 200 (api.md vector 60)")
    ok(complete(server, "free").header("x-ratelimit-limit-requests") is None, "who has no limit is told of none")
    equal(get(server, "/v1/models", key=key_of("requests")).status, 200, "other endpoints are not counted")
    for path in COMPLETION, CHAT:
        wrong = get(server, path, key=key_of("requests"))
        ok(wrong.status == 405 and wrong.header("x-ratelimit-limit-requests") == "3", f"a 405 of {path} has them, too", wrong.head)

    got = complete(server, "input", prompt=[1] * 60)
    equal((got.status, got.header("x-ratelimit-limit-tokens"), got.header("x-ratelimit-remaining-tokens")), (200, "100", "40"),
          "60 of 100 prompt tokens")
    is_429(complete(server, "input", prompt=[1] * 60), "input", "input tokens", 100, "60 more are too many")
    equal(complete(server, "input", prompt=[1] * 30).status, 200, "30 are not: the refused ones cost nothing")
    got = complete(server, "input", prompt=[1] * 101)
    ok(got.status == 400 and got.error["param"] == "prompt" and "so it can never pass" in got.error["message"],
       "a prompt longer than a minute's worth is 400", got)

    text = complete(server, "free", max_tokens=100, temperature=0).text
    got = complete(server, "output", max_tokens=100, temperature=0, stop=text[4])
    first = got.json["usage"]["completion_tokens"]
    ok(got.status == 200 and first < 50 and got.header("x-ratelimit-remaining-tokens") == "0", "100 of 100 are taken", got.head)

    def left():
        return int(get(server, COMPLETION, key=key_of("output")).header("x-ratelimit-remaining-tokens"))

    ok(eventually(lambda: left() > 50), "those that were never made are given back", left(), first)
    equal(complete(server, "output", max_tokens=left()).status, 200, "and can be used")
    is_429(complete(server, "output", max_tokens=20), "output", "output tokens", 100, "then it is 429")
    equal(complete(server, "free", max_tokens=100).status, 200, "for this tenant alone")

    for name in "max_tokens", "max_completion_tokens":
        got = complete(server, "capped", path=CHAT, **{name: 11})
        ok(got.status == 400 and (got.error["param"], got.error["code"]) == (name, "invalid_value"),
           f"{name} above the tenant's is 400, and names the field", got)
    got = ask(server, CHAT, {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}, key=key_of("capped"))
    equal(got.json["usage"]["completion_tokens"], 10, "who asks for nothing gets no more than the tenant may")


def priorities(server):
    equal(complete(server, "ranked", priority=-2).status, 200, "a priority inside the tenant's range")
    equal(complete(server, "ranked", priority=7).status, 200, "and at its other end")
    for n in -3, 8, 1 << 40:
        got = complete(server, "ranked", priority=n)
        ok(got.status == 400 and got.error["param"] == "priority" and
           got.error["message"] == f"priority must be from -2 to 7 for this tenant, got {n}.", f"{n} is outside: 400", got)
    ok(complete(server, "free", priority=1).error["message"].startswith("priority must be from 0 to 0"), "unless given it is 0")


def in_flight(server, who):
    m = metrics(server, key_of("free"))
    return sum(int(m[f'spind_tenant_{state}{{tenant="{who}"}}']) for state in ("running", "waiting"))


def crowd(server, who, n, **fields):
    """n streams in flight. Where n is more than run at a time, the rest waits, whatever the scheduler does."""
    streams = []
    for i in range(n):
        streams.append(begin(server, who, **fields))
        until(lambda: in_flight(server, who) == i + 1)
    return streams


def seats():
    """Four sequences run at a time; who is beyond that waits."""
    file = File("seats.json").write([tenant("free"), tenant("few", max_running=1, max_queued=1), tenant("short", max_queued_tokens=100),
                                     tenant("paid", input_tokens_per_minute=100)])
    server = mock("--tenants", file.path, "--max-num-seqs", "4", "--mock-step-us", "20000", "--queue-timeout", "60")
    two = crowd(server, "few", 2)
    is_429(complete(server, "few"), "few", "sequences in flight", 2, "one running and one waiting are all it may have")
    equal(complete(server, "free").status, 200, "another tenant is served")
    for s in two:
        s.close()
    ok(eventually(lambda: complete(server, "few").status == 200, 60), "when they have left there is room again")
    got = complete(server, "few", n=3)
    ok(got.status == 400 and got.error["param"] == "n", "more sequences than may ever be in flight: 400", got)
    streams = crowd(server, "short", 6, prompt=[1] * 5)
    is_429(complete(server, "short", prompt=[1] * 95), "short", "queued tokens", 100, "no more prompt tokens than that may wait")
    for s in streams:
        s.close()
    until(lambda: in_flight(server, "short") == 0)
    streams = crowd(server, "paid", 6, prompt=[1])
    waits = begin(server, "paid", prompt=[1] * 90)
    until(lambda: in_flight(server, "paid") == 7)
    waits.close()
    until(lambda: in_flight(server, "paid") == 6)
    for s in streams:
        s.close()
    # Its minute would need most of one to fill by itself.
    ok(eventually(lambda: complete(server, "paid", prompt=[1] * 90).status == 200, 20), "a prompt that left the queue unread is paid back")
    server.stop()


def full_server():
    """What the server refuses for its own sake is 503, and costs the tenant nothing."""
    file = File("full.json").write([tenant("free"), tenant("counted", requests_per_minute=5, input_tokens_per_minute=100)])
    server = mock("--tenants", file.path, "--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--mock-step-us", "20000")
    full = crowd(server, "free", 2)
    got = complete(server, "counted", prompt=[1] * 50)
    ok(got.status == 503 and got.error["code"] == "server_overloaded" and 1 <= int(got.header("Retry-After")) <= 120,
       "a full server is 503, not 429", got)
    equal((got.header("x-ratelimit-remaining-requests"), got.header("x-ratelimit-remaining-tokens")), ("5", "100"),
          "and what was refused for that is not charged")
    m = metrics(server, key_of("free"))
    equal(m['spind_tenant_rejected_total{reason="server",tenant="counted"}'], 1, "it is counted as the server's refusal")
    for s in full:
        s.close()
    ok(eventually(lambda: complete(server, "counted", prompt=[1] * 50).status == 200, 60), "with room it passes")
    server.stop()


# ---- reloads ----


def reloads(server, file, content):
    stop, statuses = threading.Event(), []

    def client(who, stream):
        while not stop.is_set():
            if stream:
                got = stream_of(server, COMPLETION, {"prompt": "hi", "max_tokens": 8, "ignore_eos": True}, key=key_of(who))
                statuses.append(got.status if got.good() else repr(got))
            else:
                statuses.append(complete(server, who).status)

    threads = [threading.Thread(target=client, args=(who, stream)) for who in ("free", "ranked") for stream in (False, True)]
    for t in threads:
        t.start()
    bad = json.dumps({"tenants": content})[:-3]
    numbers = metrics(server, key_of("free"))
    for i in range(100):
        if i % 2:
            reload(server, file, content + [tenant(f"visitor{i}")])
        else:
            reload(server, file, bad if i % 4 else content + [tenant("free")])
    stop.set()
    for t in threads:
        t.join()
    ok(len(statuses) >= 100 and set(statuses) == {200}, "100 reloads under load, half of them bad: no request fails",
       len(statuses), [s for s in statuses if s != 200][:3])
    refused = [x for x in server.log.splitlines() if "tenants: nothing has changed: " in x]
    equal(len(refused), 50, "the log says of every bad one why")
    ok('tenant "free" is there twice' in refused[0] and "cannot be read as JSON" in refused[1], "exactly", refused[:2])
    ok("added: visitor99; removed: visitor97; changed: none" in server.log, "and of a good one what has changed")
    after = metrics(server, key_of("free"))
    ok(all(after[n] >= v for n, v in numbers.items() if n.startswith("spind_tenant_requests_total")), "counts go on over reloads")


def removed(server, file, content):
    s = begin(server, "leaver", max_tokens=4000)
    s.recv(1)
    reload(server, file, [t for t in content if t["name"] != "leaver"])
    equal(complete(server, "leaver").status, 401, "the key of a tenant that was removed: 401")
    out = to_the_end(s)
    ok(out.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "its stream, which was running, ends well", out[-80:])
    ok(eventually(lambda: not any('"leaver"' in n for n in metrics(server, key_of("free")))), "then the metrics forget it")
    reload(server, file, content)
    equal(complete(server, "leaver").status, 200, "when the file names it again its key is good again")


def to_the_end(s):
    out = b""
    while not out.endswith(b"\r\n0\r\n\r\n"):
        b = s.recv(65536)
        if not b:
            break
        out += b
    s.close()
    return out


# ---- what others may know ----


def caches(server):
    words = " ".join(f"word{i}" for i in range(100))

    def cached(who, **fields):
        details = complete(server, who, prompt=words, **fields).json["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens", 0)

    equal(cached("free"), 0, "a prompt is new to its tenant")
    ok(cached("free") > 100, "the second time it is found")
    equal(cached("ranked"), 0, "another tenant finds nothing of it")
    equal(cached("free", cache_salt="s"), 0, "nor does the same with a cache_salt")
    ok(cached("ranked") > 100, "each finds its own")


def series(server):
    before = len([n for n in metrics(server, key_of("free")) if n.startswith("spind_tenant_")])
    for i in range(50):
        ask(server, COMPLETION, {"prompt": "x", "max_tokens": 1, "user": f"u{i}", "model": f"m{i}"}, key=key_of("free"),
            extra=f"X-Tenant: t{i}\r\n")
        ask(server, COMPLETION, {"prompt": "x"}, key=f"sk-{i}")
    m = metrics(server, key_of("free"))
    after = [n for n in m if n.startswith("spind_tenant_")]
    equal(len(after), before, "no client's word becomes a label")
    ok(max(sum(f'tenant="{t}"' in n for n in after) for t in ("free", "requests")) <= 200, "and a tenant has few series")
    ok(not any("tenant=" in n for n in m if n.startswith("vllm:")), "vLLM's names have no such label")
    ok(m['spind_tenant_rejected_total{reason="requests",tenant="requests"}'] >= 1 and
       m['spind_tenant_rejected_total{reason="input_tokens",tenant="input"}'] >= 2 and
       m['spind_tenant_rejected_total{reason="output_tokens",tenant="output"}'] >= 1, "refusals are counted by tenant and limit")
    ok(m['spind_tenant_requests_total{code="2xx",tenant="requests"}'] == 4 and
       m['spind_tenant_requests_total{code="4xx",tenant="requests"}'] == 3, "and answers by tenant and class",
       {n: v for n, v in m.items() if "requests_total" in n and '"requests"' in n})
    ok(m['spind_tenant_output_tokens_total{tenant="requests"}'] == 12 and
       m['spind_tenant_ttft_seconds_count{tenant="requests"}'] == 3, "tokens, and times to the first of them")


def secrets(server):
    complete(server, "free", prompt=CANARY, user=CANARY, stop=[CANARY], bad=CANARY)
    ask(server, COMPLETION, {"prompt": CANARY, "priority": CANARY}, key=key_of("free"), extra=f"X-Other: {CANARY}\r\n")
    ask(server, COMPLETION, {"prompt": CANARY}, key=CANARY)
    get(server, "/" + CANARY, key=CANARY)
    page = get(server, "/metrics", key=key_of("free")).body.decode()
    until(lambda: "GET none 401" in server.log)  # that was the last of them: the log may be behind
    ok("spind_tenant" in page and CANARY not in page, "no key and no prompt is in the metrics")
    ok("tenant free" in server.log and CANARY not in server.log, "nor in the log, at its most talkative")


def main():
    refused_at_start()
    new_key()
    content = [
        {"name": "free", "keys": [entry("free-1"), entry("free-2", expires="2099-01-31"), entry("free-old", expires="2020-01-01")],
         "weight": 2},
        tenant("requests", requests_per_minute=3), tenant("input", input_tokens_per_minute=100),
        tenant("output", output_tokens_per_minute=100), tenant("capped", max_tokens=10),
        tenant("ranked", priority=[-2, 7], max_kv_hbm="1GiB"), tenant("leaver"),
    ]
    file = File("tenants.json").write(content)
    server = mock("--tenants", file.path, "--mock-step-us", "500", "--enable-prompt-tokens-details", "--log-level", "debug")
    keys(server)
    limits(server)
    series(server)
    priorities(server)
    caches(server)
    reloads(server, file, content)
    removed(server, file, content)
    secrets(server)
    equal(server.stop(), 0, "it ends as it should")
    seats()
    full_server()
    done()


main()
