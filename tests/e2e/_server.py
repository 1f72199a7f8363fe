"""What the server's tests share: TAP, a server process on a free port, raw connections.

The binary: SPIND_TEST_SERVER, else tests/server_fake of the build (SPIND_BUILD, default build)."""
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

BUILD = os.environ.get("SPIND_BUILD", "build")
BINARY = os.environ.get("SPIND_TEST_SERVER", os.path.join(BUILD, "tests", "server_fake"))
KEY = "k3y"
_count = 0
_bad = 0
_telling = threading.Lock()  # several threads may have something to tell, and numbers come in order


def ok(good, name, *notes):
    global _count, _bad
    with _telling:
        _count += 1
        print(("ok" if good else "not ok"), _count, "-", name, flush=True)
        if not good:
            _bad += 1
            for note in notes:
                print("#  ", repr(note)[:600], flush=True)
    return good


def skip(name, why):
    """One case that cannot run here; tests/run counts them."""
    global _count
    with _telling:
        _count += 1
        print("ok", _count, "-", name, "# SKIP", why, flush=True)


def equal(got, want, name, *notes):
    return ok(got == want, name, f"got {got!r}, want {want!r}", *notes)


def done():
    print(f"1..{_count}")
    sys.exit(_bad != 0)


def clean_env(**more):
    env = {k: v for k, v in os.environ.items()
           if k not in ("HOST", "PORT", "SPIND_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY",
                        "VLLM_LOGGING_LEVEL", "NOTIFY_SOCKET")}
    env.update(more)
    return env


class Server:
    """A running server. `log` grows while it runs."""

    def __init__(self, *args, key=KEY, wait=True, env=None, prefix=(), pass_fds=()):
        argv = [*prefix, BINARY, "serve", "--device", "mock", "--port", "0", *args]
        if key:
            argv += ["--api-key", key]
        self.log = ""
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        env=env or clean_env(), pass_fds=pass_fds)
        self.port = None
        self._bound = threading.Event()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._bound.wait(20)
        if wait:
            self.ready()
        if self.port is None:
            raise RuntimeError("the server did not start: " + self.log)

    def ready(self):
        return self._ready.wait(20)

    def _read(self):
        for line in self.process.stderr:
            text = line.decode("utf-8", "replace")
            self.log += text
            found = re.search(r"(bound to|listening on) http://\S+:(\d+)", text)
            if found:
                self.port = int(found.group(2))
                self._bound.set()
                if found.group(1) == "listening on":
                    self._ready.set()
        self._bound.set()
        self._ready.set()

    def connect(self, timeout=5, rcvbuf=0):
        s = socket.socket()
        if rcvbuf:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        s.settimeout(timeout)
        s.connect(("127.0.0.1", self.port))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return s

    def talk(self, data, timeout=5, half_close=False):
        """Sends, reads until the server closes or says nothing for `timeout`."""
        with self.connect(timeout) as s:
            try:
                s.sendall(data)
                if half_close:
                    s.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            return Answers(*read_all(s))

    def get(self, path, extra="", timeout=5):
        return self.talk(request("GET", path, extra + "Connection: close\r\n"), timeout)

    def post(self, path, body=b"", extra="", timeout=5):
        return self.talk(request("POST", path, extra + "Connection: close\r\n", body), timeout)

    def calls(self):
        """The fake's counters."""
        text = self.get("/calls").body.decode()
        return {k: int(v) for k, v in (item.split("=") for item in text.split())}

    def rss_kib(self):
        with open(f"/proc/{self.process.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))

    def cpu_s(self):
        with open(f"/proc/{self.process.pid}/stat") as f:
            fields = f.read().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, timeout=10):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None

    def wait(self, timeout=10):
        code = self.process.wait(timeout)
        self._reader.join(2)
        return code


def read_all(s):
    out, how = b"", "open"
    try:
        while True:
            b = s.recv(65536)
            if not b:
                how = "fin"
                break
            out += b
    except socket.timeout:
        pass
    except OSError:
        how = "reset"
    return out, how


class Answers:
    def __init__(self, raw, closed):
        self.raw, self.closed = raw, closed
        self.statuses = [int(x) for x in re.findall(rb"HTTP/1\.1 (\d{3}) ", raw)]
        head, _, self.body = raw.rpartition(b"\r\n\r\n") if self.statuses[:1] == [100] \
            else raw.partition(b"\r\n\r\n")
        self.head = head.decode("latin-1")

    @property
    def status(self):
        return self.statuses[-1] if self.statuses else None

    def header(self, name):
        found = re.search(rf"^{name}: (.*)\r?$", self.head, re.I | re.M)
        return found.group(1).strip() if found else None

    def is_error(self):
        try:
            error = json.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError):
            return False
        return set(error) >= {"message", "type", "param", "code"}

    def __repr__(self):
        return f"{self.statuses} {self.closed} {self.raw[:300]!r}"


def request(method, path, extra="", body=None, host="localhost", version="1.1", key=KEY):
    head = f"{method} {path} HTTP/{version}\r\n"
    if host:
        head += f"Host: {host}\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    if body is not None:
        head += f"Content-Length: {len(body)}\r\n"
    return (head + extra + "\r\n").encode("latin-1") + (body or b"")


async def talk_in_pieces(port, data, split, timeout=8, pause=0.001):
    """Sends `data` in pieces of `split` bytes (0: whole); reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out, closed = b"", "open"

    async def send():
        try:
            for i in range(0, len(data), split or len(data) or 1):
                writer.write(data[i:i + (split or len(data))])
                await writer.drain()
                if split:
                    await asyncio.sleep(pause if len(data) < 4000 else 0)
        except OSError:
            pass

    sending = asyncio.ensure_future(send())
    try:
        while True:
            b = await asyncio.wait_for(reader.read(65536), timeout)
            if not b:
                closed = "fin"
                break
            out += b
    except asyncio.TimeoutError:
        pass
    except OSError:
        closed = "reset"
    sending.cancel()
    writer.close()
    return Answers(out, closed)


def eventually(test, within=5, every=0.05):
    end = time.monotonic() + within
    while time.monotonic() < end:
        got = test()
        if got:
            return got
        time.sleep(every)
    return test()
