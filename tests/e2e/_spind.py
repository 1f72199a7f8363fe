"""The real daemon for tests of the API: on the model (SPIND_MODEL, else the one in the cache) or on
the mock device, asked with as little between the test and the wire as possible.

The binary: SPIND, else spind of the build (SPIND_BUILD)."""
import atexit
import json
import os
import re
import time

import _server
from _server import BUILD, Server, clean_env, eventually, ok, request

_server.BINARY = os.environ.get("SPIND", os.path.join(BUILD, "spind"))
CACHE = os.environ.get("SPIND_CACHE") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "spind")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = os.environ.get("SPIND_MODEL") or os.path.join(CACHE, "models", FILE)
JSON = "Content-Type: application/json\r\n"
PATIENCE = 60  # seconds: the machine may be busy; nothing here waits that long in vain
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def kept(server):
    """Whatever becomes of the test, the server does not outlive it."""
    atexit.register(server.process.kill)
    return server


def mock(*args, key=None, **more):
    """The made-up model: 256 tokens that are bytes, 256 = <|endoftext|>, 257 = <|im_start|>,
    258 = <|im_end|>. Token number i of a text is first + i % n (--mock-first-token, -n-tokens)."""
    return kept(Server(*args, key=key, **more))


def real(*args, key=None, **more):
    server = kept(Server("--device", "cpu", MODEL, *args, key=key, wait=False, **more))
    if not server._ready.wait(PATIENCE) or "listening on" not in server.log:
        raise RuntimeError("the server did not get ready: " + server.log)
    return server


class Reply:
    def __init__(self, answers):
        self.status, self.head, self.body = answers.status, answers.head, answers.body
        self.header, self.raw = answers.header, answers.raw
        try:
            self.json = json.loads(self.body)
        except ValueError:
            self.json = None

    @property
    def error(self):
        return self.json["error"] if isinstance(self.json, dict) and "error" in self.json else None

    @property
    def choices(self):
        return self.json["choices"]

    @property
    def text(self):
        return text_of(self.json["choices"][0])

    def __repr__(self):
        return f"{self.status} {self.body[:500]!r}"


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def ask(server, path, body, extra="", key=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(server.talk(request("POST", path, JSON + "Connection: close\r\n" + extra, data, key=key), PATIENCE))


def get(server, path, extra="", method="GET", key=None):
    return Reply(server.talk(request(method, path, "Connection: close\r\n" + extra, key=key), PATIENCE))


def complete(server, prompt="The capital of France is", **fields):
    return ask(server, COMPLETION, {"prompt": prompt, **fields})


def chat(server, content="What is a page table?", **fields):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return ask(server, CHAT, {"messages": messages, **fields})


def tokens_of(server, text, **fields):
    return ask(server, "/tokenize", {"prompt": text, **fields}).json["tokens"]


def dechunk(body):
    """The data of each chunk; raises unless the coding is exact and ends with the last chunk."""
    chunks = []
    while True:
        size, _, rest = body.partition(b"\r\n")
        if not re.fullmatch(rb"[0-9a-fA-F]+", size):
            raise ValueError(f"chunk size {size[:40]!r}")
        n = int(size, 16)
        if rest[n:n + 2] != b"\r\n":
            raise ValueError("a chunk without its end")
        body = rest[n + 2:]
        if n == 0:
            if body:
                raise ValueError(f"bytes after the last chunk: {body[:40]!r}")
            return chunks
        chunks.append(rest[:n])


class Stream:
    """A whole event stream, read strictly: the head, chunked coding, frames as reference/api.md 2.10."""

    def __init__(self, answers):
        self.status, self.head, self.header, self.raw = answers.status, answers.head, answers.header, answers.raw
        self.events, self.done, self.fault = [], False, None
        try:
            self.chunks = dechunk(answers.body)
            self.read(b"".join(self.chunks))
        except (ValueError, IndexError) as e:
            self.fault = repr(e)

    def read(self, page):
        if not page.endswith(b"\n\n"):
            raise ValueError("the last frame has no end")
        frames = page[:-2].split(b"\n\n")
        for i, frame in enumerate(frames):
            if frame == b": ping":
                continue
            if not frame.startswith(b"data: ") or b"\n" in frame or b"\r" in frame:
                raise ValueError(f"frame {frame[:60]!r}")
            if frame == b"data: [DONE]":
                self.done = i == len(frames) - 1
                continue
            self.events.append(json.loads(frame[6:].decode("utf-8", "strict")))

    def of(self, index=0):
        return [e["choices"][0] for e in self.events if e.get("choices") and e["choices"][0]["index"] == index]

    def text(self, index=0):
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in self.of(index))

    @property
    def usage(self):
        return self.events[-1].get("usage")

    def reason(self, index=0):
        found = [c["finish_reason"] for c in self.of(index) if c["finish_reason"] is not None]
        return found[0] if len(found) == 1 and self.of(index)[-1]["finish_reason"] else found

    def good(self):
        return self.status == 200 and self.fault is None and self.done and self.head.count("\n") > 4

    def __repr__(self):
        return f"{self.status} {self.fault} {self.raw[-700:]!r}"


def stream(server, path, body, extra="", key=None):
    data = json.dumps({**body, "stream": True}).encode()
    return Stream(server.talk(request("POST", path, JSON + "Connection: close\r\n" + extra, data, key=key), PATIENCE))


def cstream(server, prompt="The capital of France is", **fields):
    return stream(server, COMPLETION, {"prompt": prompt, **fields})


def hstream(server, content="What is a page table?", **fields):
    return stream(server, CHAT, {"messages": [{"role": "user", "content": content}], **fields})


def metrics(server, key=None):
    """name, with its labels but engine and model_name, to number."""
    out = {}
    for line in get(server, "/metrics", key=key).body.decode().splitlines():
        found = re.fullmatch(r"([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)", line)
        if found:
            labels = [x for x in re.findall(r'(\w+="(?:[^"\\]|\\.)*")', found.group(2) or "")
                      if not x.startswith(("engine=", "model_name="))]
            out[found.group(1) + ("{" + ",".join(sorted(labels)) + "}" if labels else "")] = float(found.group(3))
    return out


GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "spind_calls_active", "spind_stream_unsent_bytes",
          'spind_kv_blocks{state="used",tier="hbm"}', 'spind_kv_blocks{state="used",tier="dram"}')


def quiescent(server):
    """Nothing runs, waits, is owed to a client or holds a KV block (Q of reference/reliability.md)."""
    m = metrics(server)
    return all(m[name] == 0 for name in GAUGES)


def settles(server, name, within=10):
    return ok(eventually(lambda: quiescent(server), within), name, {k: v for k, v in metrics(server).items() if k in GAUGES})


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def until(test, within=PATIENCE):
    if not eventually(test, within, 0.005):
        raise RuntimeError("waited in vain")


def now():
    return time.monotonic()
