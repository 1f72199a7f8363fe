"""How a run of rows.py is run: programs with their output in files, daemons on free ports with a ready check, and what
comes back as one dictionary. All that is seen is kept under --out: NAME.json, NAME.log, NAME.server.log, NAME.metrics."""
import http.client
import json
import os
import random
import re
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "spind_calls_active",
        'spind_kv_blocks{state="used",tier="hbm"}', 'spind_kv_blocks{state="used",tier="dram"}')
LAST_LINES = 6


class Failed(Exception):
    """Of a run: why, and the last lines that it wrote."""


def flat(words):
    out = []
    for w in words:
        out += flat(w) if isinstance(w, list) else [f"{w}"]
    return out


def shown(words, names):
    """The words for people: pieces that have a name by their name."""
    out = []
    for w in words:
        name = next((n for n, piece in names.items() if piece is w), None)
        out.append(name or (shown(w, names) if isinstance(w, list) else shlex.quote(f"{w}")))
    return " ".join(x for x in out if x)


def command(run, names):
    """A run as people would type it."""
    if run.kind == "long_prompt":
        return f"spind {shown(run.server, names)}, and a prompt of {run.words[0]:,} ids"
    if run.kind == "start":
        return f"spind {shown(run.server, names)}"
    words = shown(run.words, names)
    return (words if run.kind == "kernels" else f"spind {words}") + (f" (spind {shown(run.server, names)})" if run.server else "")


def last_lines(path, n=LAST_LINES):
    try:
        with open(path, errors="replace") as f:
            lines = [x.rstrip() for x in f if x.strip()]
    except OSError:
        return ""
    return "\n".join(lines[-n:])


def run_logged(argv, log, env, patience):
    """Its exit status. A program that takes too long, or that we are ended under, does not stay behind."""
    with open(log, "w") as f:
        try:
            p = subprocess.Popen(argv, stdout=f, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
        except OSError as e:
            raise Failed(f"{argv[0]}: {e.strerror}") from None
        try:
            return p.wait(patience)
        except subprocess.TimeoutExpired:
            raise Failed(f"not finished in {patience:.0f} s\n{last_lines(log)}") from None
        finally:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()


def spind(place, name, words, patience):
    """A command of spind that writes JSON."""
    path, log = place.file(name + ".json"), place.file(name + ".log")
    if os.path.exists(path):
        os.remove(path)
    code = run_logged([place.spind, *flat(words), "--json", path], log, place.env, patience)
    try:
        with open(path) as f:
            sheet = json.load(f)
    except (OSError, ValueError):
        sheet = None
    if code != 0 or sheet is None:
        raise Failed(f"exit status {code}\n{last_lines(log)}")
    return sheet


class Server:
    """The daemon, from its start to its end. What it says is in a file."""

    def __init__(self, place, name, words, patience=120):
        self.place, self.name, self.log = place, name, place.file(name + ".server.log")
        began = time.monotonic()
        with open(self.log, "w") as f:
            try:
                self.process = subprocess.Popen([place.spind, *flat(words), "--port", "0"], stdout=subprocess.DEVNULL, stderr=f,
                                                stdin=subprocess.DEVNULL, env=place.env, start_new_session=True)
            except OSError as e:
                raise Failed(f"{place.spind}: {e.strerror}") from None
        try:
            self.port = self.wait_ready(began + patience)
        except BaseException:
            self.kill()
            raise
        self.ready_s = time.monotonic() - began

    def wait_ready(self, until):
        while time.monotonic() < until and self.process.poll() is None:
            found = re.search(r"listening on http://\S+:(\d+)", self.text())
            if found and self.get("/health", int(found.group(1))) is not None:
                return int(found.group(1))
            time.sleep(0.01)
        raise Failed(f"the daemon did not get ready\n{last_lines(self.log)}")

    def text(self):
        with open(self.log, errors="replace") as f:
            return f.read()

    def get(self, path, port=None):
        """What it answers with status 200; else None."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.port}{path}", timeout=20) as f:
                return f.read().decode()
        except (OSError, urllib.error.URLError):
            return None

    def metrics(self):
        """Numbers by name, with their labels but the engine's and the model's."""
        out = {}
        for line in (self.get("/metrics") or "").splitlines():
            found = re.fullmatch(r"([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)", line)
            if found:
                labels = [x for x in re.findall(r'\w+="(?:[^"\\]|\\.)*"', found.group(2) or "")
                          if not x.startswith(("engine=", "model_name="))]
                out[found.group(1) + ("{" + ",".join(sorted(labels)) + "}" if labels else "")] = float(found.group(3))
        return out

    def settle(self, seconds):
        """DRAM is pinned behind the start, and takes the driver's locks meanwhile: waits for the end of it."""
        tier, until = re.search(r"DRAM tier \d+ blocks, ([\d.]+) GiB", self.text()), time.monotonic() + seconds
        while tier and self.metrics().get("spind_kv_dram_pinned_bytes", 0) < (float(tier[1]) - 0.01) * 2**30:
            if time.monotonic() > until:
                raise Failed(f"DRAM was not pinned within {seconds} s\n{last_lines(self.log)}")
            time.sleep(0.2)

    def busy(self):
        """What is not back to nothing; None: the daemon does not say."""
        m = self.metrics()
        return {n: m[n] for n in IDLE if m.get(n)} if m else None

    def stop(self):
        """Its last words are kept; a daemon whose steps failed, or that does not end well, has not measured anything."""
        with open(self.place.file(self.name + ".metrics"), "w") as f:
            f.write(self.get("/metrics") or "")
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"the daemon did not end in 60 s\n{last_lines(self.log)}") from None
        if code != 0 or "step failed" in self.text():
            raise Failed(f"the daemon ended with {code}\n{last_lines(self.log)}")

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.stop()
        else:
            self.kill()


# ---- kinds ----


def bench(place, name, run, say):
    return spind(place, name, run.words, patience_of(run))


def kernels(place, name, run, say):
    """A bench of kernels: the lines of tests/cuda/kbench.h, and the text."""
    log, words = place.file(name + ".log"), flat(run.words)
    code = run_logged([os.path.join(place.kernels, words[0]), *words[1:]], log, place.env, patience_of(run))
    with open(log, errors="replace") as f:
        text = f.read()
    out = {"text": text, "kernels": [kernel_line(x.split()) for x in text.splitlines() if re.match(r"kbench( \S+){6}$", x)]}
    if code != 0 or not (out["kernels"] or "TFLOP/s" in text):
        raise Failed(f"exit status {code}, {len(out['kernels'])} results\n{last_lines(log)}")
    with open(place.file(name + ".json"), "w") as f:
        json.dump(out, f, indent=1)
    return out


def kernel_line(words):
    _, name, shape, us, reached, limit, share = words
    return {"kernel": name, "shape": shape, "us": float(us), "reached": reached, "limit": limit, "share": float(share.rstrip("%"))}


def start(place, name, run, say):
    with Server(place, name, run.server) as server:
        out = {"ready_s": server.ready_s}
    with open(place.file(name + ".json"), "w") as f:
        json.dump(out, f)
    return out


def client(place, name, run, say):
    with Server(place, name, run.server) as server:
        url = ["--url", f"http://127.0.0.1:{server.port}"]
        server.settle(90)
        if run.warm:
            spind(place, name + ".warm", [run.warm, url], patience_of(run))
        return {**spind(place, name, [run.words, url], patience_of(run)), "ready_s": server.ready_s}


def patience_of(run):
    """Seconds after which it will not end any more."""
    return max(60, 3 * run.seconds)


# ---- a prompt of a million tokens ----

CANCEL_AT = 0.1  # of the prompt: reading half of a million takes two minutes, a tenth 8 s
PROGRESS = re.compile(r"layer by layer|Avg prompt throughput")


def ids(n, words, seed):
    low, high = (int(x) for x in words.split(","))
    r = random.Random(seed)
    return [r.randrange(low, high) for _ in range(n)]


def ask(server, prompt, patience):
    """A connection on which the answer, of four tokens, comes as a stream."""
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patience)
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "logprobs": 5, "stream": True,
            "stream_options": {"include_usage": True}}
    c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return c


def share_read(server, n):
    """How much of the only prompt has its K and V, by the gauges."""
    m = server.metrics()
    blocks = sum(v for k, v in m.items() if k.startswith("spind_kv_blocks{") and 'state="used"' in k)
    return max(m.get("spind_layer_major_progress", 0), 16 * blocks / n)


def cancelled(server, n, words, say):
    """Goes away in the midst of a prompt. (how much was read, seconds until all was free or -1, what was left)"""
    c = ask(server, ids(n, words, 1), 60)
    began, share = time.monotonic(), 0
    while share < CANCEL_AT and time.monotonic() < began + 300 and server.process.poll() is None:
        time.sleep(0.2 if n > 100000 else 0.002)
        share = max(share, share_read(server, n))
        if time.monotonic() > began + 5 and server.busy() == {}:
            break  # it was answered meanwhile
    c.close()
    gone = time.monotonic()
    say(f"cancelled at {100 * share:.0f} % after {gone - began:.1f} s")
    while time.monotonic() < gone + 30:
        if server.busy() == {}:
            return share, time.monotonic() - gone, {}
        time.sleep(0.02)
    return share, time.monotonic() - gone, server.busy()


def served(server, n, words, patience):
    """seconds to the first token; its candidates, {token: log-probability}; tokens of the answer; of the prompt, found in the cache."""
    began, first, top, usage = time.monotonic(), None, {}, {}
    answer = ask(server, ids(n, words, 2), patience).getresponse()
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("error"):
            raise Failed(str(event["error"]))
        if event.get("choices") and first is None:
            first = time.monotonic() - began
            top = event["choices"][0]["logprobs"]["top_logprobs"][0]
        usage = event.get("usage") or usage
    if answer.status != 200 or first is None:
        raise Failed(f"the prompt was answered with {answer.status}\n{last_lines(server.log)}")
    return {"s": first, "top": top, "tokens": usage.get("completion_tokens", 0),
            "found": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)}


def apart(a, b):
    """The largest difference of what two answers say of the candidates that both have; -1: none."""
    return max((abs(a[x] - b[x]) for x in a.keys() & b.keys()), default=-1)


class Follower(threading.Thread):
    """Says what the log says of the progress, as it comes."""

    def __init__(self, server, say):
        super().__init__(daemon=True)
        self.server, self.say, self.lines, self.ended = server, say, 0, threading.Event()
        self.start()

    def run(self):
        last = False
        while not last:
            last = self.ended.wait(1)
            found = [x for x in self.server.text().splitlines() if PROGRESS.search(x)]
            for line in found[self.lines:]:
                self.say(line)
            self.lines = len(found)

    def stop(self):
        self.ended.set()
        self.join()


def long_prompt(place, name, run, say):
    n, words = run.words
    with Server(place, name, run.server) as server:
        progress = Follower(server, say)
        share, freed_s, left = cancelled(server, n, words, say)
        first = served(server, n, words, patience_of(run))
        # The last rows are attended by other kernels now: those of few queries.
        again = served(server, n, words, 60)
        progress.stop()
    out = {"tokens": n, "cancelled_at": share, "freed": not left and 0 < share < 1, "freed_s": freed_s, "left": left, "first": first,
           "again": again, "apart": apart(first["top"], again["top"]), "lines": progress.lines, "ready_s": server.ready_s}
    with open(place.file(name + ".json"), "w") as f:
        json.dump(out, f, indent=1)
    return out


KINDS = {f.__name__: f for f in (bench, kernels, start, client, long_prompt)}


def perform(place, name, run, say):
    """What the run gave. Failed: it did not."""
    return KINDS[run.kind](place, name, run, say)
