"""The daemon on a GPU: the same answers as on the CPU but for rounding, many at once, what is refused, and how
fast. Needs nothing but Python, so it runs where only `make dist` was copied to.

usage: serve.py SPIND MODEL"""
import concurrent.futures
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time there was a", "The first ten numbers are 1, 2, 3,",
           "To bake a simple cake, you need", "The sun rises in the", "A page table is", "My favourite animal is the"]
TOKENS = 32
count, bad = 0, 0


def ok(good, name, *notes):
    global count, bad
    count += 1
    print("ok" if good else "not ok", count, "-", name, flush=True)
    if not good:
        bad += 1
        for note in notes:
            print("#  ", str(note)[-2000:].replace("\n", "\n#   "), flush=True)
    return good


class Server:
    def __init__(self, *args, model=None, env=None):
        self.log, self.port, self.ready = "", None, threading.Event()
        self.began = time.monotonic()
        self.process = subprocess.Popen([sys.argv[1], "serve", model or sys.argv[2], "--port", "0", *args],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.ready.wait(60)
        if self.port is None:
            print("Bail out! the server did not get ready:\n# " + self.log.replace("\n", "\n# "), flush=True)
            self.process.kill()
            sys.exit(1)

    def read(self):
        for line in self.process.stderr:
            self.log += line
            found = re.search(r"listening on http://\S+:(\d+)", line)
            if found:
                self.seconds = time.monotonic() - self.began
                self.port = int(found.group(1))
                self.ready.set()
        self.ready.set()

    def ask(self, prompt, **fields):
        body = json.dumps({"prompt": prompt, "temperature": 0, **fields}).encode()
        r = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(r, timeout=120) as f:
                return f.status, json.load(f)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def answers(self):
        out = []
        for p in PROMPTS:
            status, got = self.ask(p, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
            out.append(got["choices"][0]["logprobs"]["tokens"] if status == 200 else [str(got)])
        return out

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def same_beginning(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def tokens_per_second(server, streams, tokens=256, prompt=None):
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        start = time.monotonic()
        got = list(pool.map(lambda i: server.ask(prompt or f"{PROMPTS[i % 8]} {i}", max_tokens=tokens, ignore_eos=True),
                            range(streams)))
        seconds = time.monotonic() - start
    good = all(s == 200 and g["usage"]["completion_tokens"] == tokens for s, g in got)
    ok(good, f"{streams} at once, {tokens} tokens each", [g for s, g in got if s != 200])
    print(f"# {streams} at once: {streams * tokens / seconds:.0f} tokens/s, prompts, HTTP and the client included", flush=True)


def main():
    server = Server("--device", "cpu")
    cpu = server.answers()
    server.stop()
    server = Server("--device", "cuda")
    device = re.search(r"device: (.*)", server.log).group(1)
    ok(device.startswith("cuda: "), f"--device cuda starts in {server.seconds:.1f} s: {device}", server.log)
    gpu = server.answers()
    same = [same_beginning(a, b) for a, b in zip(cpu, gpu)]
    print(f"# first tokens that are the CPU's, of {TOKENS}: {same}")
    ok(sum(same) > len(PROMPTS) * TOKENS // 2, "greedy answers begin as the CPU's do", cpu, gpu)
    again = server.answers()
    same = [same_beginning(a, b) for a, b in zip(gpu, again)]
    print(f"# first tokens that are the same when asked again, behind a cached prefix: {same}")
    ok(sum(same) > len(PROMPTS) * TOKENS // 2, "asked again, behind cached prefixes, they begin alike", gpu, again)
    for streams in (1, 16, 64):
        tokens_per_second(server, streams)
    text = " ".join(f"{i} plus {i} is {2 * i}." for i in range(420))
    start = time.monotonic()
    status, got = server.ask(text, max_tokens=1)
    seconds = time.monotonic() - start
    n = got["usage"]["prompt_tokens"] if status == 200 else 0
    ok(status == 200 and n > 4000, f"a prompt of {n} tokens is read", got)
    print(f"# in {seconds:.2f} s: {n / seconds:.0f} tokens/s")
    status, got = server.ask(text, max_tokens=1)
    cached = (got.get("usage", {}).get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    ok(status == 200 and cached > 4000, f"and {cached} tokens of it are found again", got)
    status, got = server.ask("hello", max_tokens=2, sparse={"plugin": "wave"})
    ok(status == 200 and got["usage"]["completion_tokens"] == 2, "a short request for a plug-in is served", got)
    status, got = server.ask(text, max_tokens=24, ignore_eos=True, sparse={"plugin": "wave"})
    ok(status == 200 and got["usage"]["completion_tokens"] == 24, "and so is one behind a long prompt", got)
    status, whole = server.ask(text, max_tokens=24, ignore_eos=True, temperature=0, sparse={"plugin": "wave", "budget": 1})
    status, dense = server.ask(text, max_tokens=24, ignore_eos=True, temperature=0)
    ok(same_beginning(whole["choices"][0]["text"], dense["choices"][0]["text"]) > 0, "with the whole context as budget it begins as dense", (whole, dense))
    ok(server.stop() == 0, "SIGTERM ends it", server.log)
    ok("step failed" not in server.log, "and no step failed", server.log)
    print("\n".join("# " + line for line in server.log.splitlines() if " POST " not in line))
    server = Server("--device", "auto")
    ok("device: cuda: " in server.log, "auto takes the GPU", server.log)
    server.stop()
    print(f"1..{count}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
