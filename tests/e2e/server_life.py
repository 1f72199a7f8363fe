"""The life of the process: loading, ready, draining, gone; and what it says when it cannot start."""
import json
import os
import signal
import socket
import subprocess
import tempfile
import time

from _server import BINARY, Server, clean_env, done, equal, eventually, ok, read_all, request, Answers


def run(*args, env=None, timeout=10):
    p = subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=timeout, env=env or clean_env())
    return p.returncode, p.stdout, p.stderr


def last_line(text):
    return text.strip().splitlines()[-1] if text.strip() else ""


def loading():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "notify")
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(path)
        notify.settimeout(0.1)
        r, w = os.pipe()
        server = Server("--mock-fail-step", "700", "--ready-fd", str(w), key=None, wait=False,
                        env=clean_env(NOTIFY_SOCKET=path), pass_fds=[w])
        os.close(w)
        got = server.talk(request("GET", "/health", "Connection: close\r\n", key=None))
        ok(got.status == 503 and got.header("Retry-After") and got.is_error(), "/health is 503 while the engine loads", got)
        ok("ready in" not in server.log, "nothing claims to be ready")
        try:
            early = notify.recv(100)
        except socket.timeout:
            early = None
        equal(early, None, "nor tells systemd so")
        server.ready()
        got = server.talk(request("GET", "/health", "Connection: close\r\n", key=None))
        equal((got.status, got.body), (200, b""), "then it is 200, with an empty body")
        ok(f"listening on http://127.0.0.1:{server.port}\n" in server.log and "ready in" in server.log, "the log says where", server.log)
        notify.settimeout(2)
        equal(notify.recv(100), b"READY=1", "systemd is told")
        equal(os.read(r, 100), b"READY=1\n", "--ready-fd is told")
        os.close(r)
        equal(server.stop(), 0, "SIGTERM when idle ends at once, with 0")

    server = Server("--mock-fail-step", "2000", wait=False)
    start = time.monotonic()
    equal(server.stop(), 0, "SIGTERM while loading ends with 0")
    ok(time.monotonic() - start < 1, "and does not wait for the model")


def drain():
    server = Server("--drain-timeout", "10")
    s = server.connect(10)
    s.sendall(request("POST", "/stream?25,20,100", "", b"{}"))
    s.recv(100)
    idle = server.connect()
    idle.sendall(request("GET", "/v1/models"))
    idle.recv(1000)
    server.process.send_signal(signal.SIGTERM)
    ok(eventually(lambda: "draining: 1 running" in server.log, 2), "draining is logged", server.log)
    equal(idle.recv(100), b"", "idle connections are closed")
    got = server.talk(request("GET", "/v1/models"), 2)
    ok(got.statuses == [503] and got.closed == "fin" and got.header("Connection") == "close", "new requests get 503 and the end", got)
    got = server.talk(request("GET", "/health", key=None), 2)
    equal(got.statuses, [503], "readiness is off")
    rest, closed = read_all(s)
    ok(rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and closed == "fin", "the running stream ends whole", rest[-60:])
    equal(server.wait(3), 0, "then the process ends, with 0")
    ok(server.log.count("draining: 1 running") >= 2, "it says so each second", server.log)

    server = Server("--drain-timeout", "0.5")
    streaming, waiting = server.connect(10), server.connect(10)
    streaming.sendall(request("POST", "/stream?1000,20,100", "", b"{}"))
    waiting.sendall(request("POST", "/wait", "", b"{}"))
    streaming.recv(100)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    rest, closed = read_all(streaming)
    ok(b'"code":"shutting_down"' in rest and b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n") and closed == "fin",
       "out of time, a stream ends with an error event and no [DONE]", rest[-200:])
    got = Answers(*read_all(waiting))
    equal((got.statuses, got.closed), ([503], "fin"), "and a waiting request with 503", got)
    equal(server.wait(3), 0, "then the process ends, with 0")
    ok(0.4 < time.monotonic() - start < 2, "in time", time.monotonic() - start)

    server = Server("--drain-timeout", "0")
    s = server.connect(10)
    s.sendall(request("POST", "/stream?1000,20,100", "", b"{}"))
    s.recv(100)
    start = time.monotonic()
    equal(server.stop(), 0, "--drain-timeout 0 ends with 0")
    ok(time.monotonic() - start < 2, "at once", time.monotonic() - start)

    server = Server()
    s = server.connect(10)
    s.sendall(request("POST", "/wait", "", b"{}"))
    eventually(lambda: server.calls()["active"] == 1)
    server.process.send_signal(signal.SIGINT)
    ok(eventually(lambda: "draining" in server.log, 2), "SIGINT drains too")
    start = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    equal(server.wait(3), 130, "a second signal ends it at once")
    ok(time.monotonic() - start < 0.5, "really at once")


def cannot_start():
    code, out, err = run("serve", "--device", "mock", "--port", "0", "--mock-nan-every", "13")
    ok(code == 1 and "cannot serve: the fake was told to fail" in err, "an engine that cannot start: its message and 1", err)
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    code, out, err = run("serve", "--device", "mock", "--port", port)
    ok(code == 1 and f"port {port} on 127.0.0.1 is in use" in last_line(err) and "--port" in last_line(err), "a port in use: one line that says what to do, and 1", err)
    code, out, err = run("serve", "--device", "mock", "--host", "192.0.2.1", "--api-key", "k", "--port", "0")
    ok(code == 1 and "not an address of this machine" in last_line(err), "a foreign address likewise", err)
    code, out, err = run("serve", "/nonexistent/model.gguf")
    ok(code == 1 and "/nonexistent/model.gguf: No such file" in last_line(err) and "make serve" in last_line(err), "a missing model likewise", err)
    code, out, err = run("serve")
    ok(code == 2 and "no model given" in err, "no model at all: 2", err)
    code, out, err = run("serve", "--device", "mock", "--host", "0.0.0.0", "--port", "0")
    ok(code == 78 and "--insecure-no-auth" in err and len(err.splitlines()) == 1, "0.0.0.0 without a key: 78 and the flag that overrides it", err)
    server = Server("--host", "0.0.0.0", "--insecure-no-auth", key=None)
    equal(server.talk(request("GET", "/v1/models", "Connection: close\r\n", key=None, host=f"10.1.2.3:{server.port}")).statuses, [200],
          "with it, it serves, under any address")
    equal(server.talk(request("GET", "/v1/models", "Connection: close\r\n", key=None, host="evil.example")).statuses, [421], "but not under any name")
    ok("without an API key" in server.log, "and warns", server.log)
    server.stop()
    server = Server("--host", "0.0.0.0")
    equal(server.get("/v1/models").statuses, [200], "0.0.0.0 with a key serves")
    server.stop()
    for args, word in ((["--prot", "1"], "did you mean --port?"), (["--port"], "needs a value"), (["--port", "99999"], "0 to 65535"),
                       (["--port=abc"], "not a number"), (["--device", "gpu"], "auto|cpu|cuda|mock"), (["a.gguf", "b.gguf"], "only one model"),
                       (["--config", "/nonexistent.json"], "/nonexistent.json: No such file")):
        code, out, err = run("serve", *args)
        ok(code == 2 and word in err and len(err.splitlines()) == 1, f"{' '.join(args)}: 2, and {word!r}", err)


def secrets():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "keys")
        with open(path, "w") as f:
            f.write("# ours\nfileK3Y\n\n  other  \n")
        server = Server("--api-key-file", path, "--log-level", "debug", key="argK3Y")
        for key in "argK3Y", "fileK3Y", "other":
            equal(server.talk(request("GET", "/v1/models", "Connection: close\r\n", key=key)).statuses, [200], f"key {key} opens")
        equal(server.talk(request("GET", "/v1/models", "Connection: close\r\n", key="# ours")).statuses, [401], "a comment does not")
        server.talk(request("POST", "/echo", "X-A: CANARY\r\nConnection: close\r\n", b"CANARY", key="argK3Y"))
        server.stop()
        ok("K3Y" not in server.log and "CANARY" not in server.log, "no key, header or body is in the log", server.log)
        ok("non-default args: " in server.log and "api-key=***" in server.log, "the log names the options that were set", server.log)
        server = Server(key=None, env=clean_env(SPIND_API_KEY="envK3Y", VLLM_API_KEY="no"))
        equal(server.talk(request("GET", "/v1/models", "Connection: close\r\n", key="envK3Y")).statuses, [200], "a key of the environment opens")
        server.stop()
        server = Server(key="flag", env=clean_env(SPIND_API_KEY="envK3Y"))
        equal(server.talk(request("GET", "/v1/models", "Connection: close\r\n", key="envK3Y")).statuses, [401], "a flag replaces it")
        server.stop()


def printed():
    code, out, err = run("serve", "--help")
    ok(code == 0 and "--max-model-len" in out and "Security (security)" in out and err == "", "--help lists options by group")
    code, out, err = run("serve", "--help=kv")
    ok(code == 0 and "--kv-dram" in out and "--port" not in out, "--help=GROUP shows one")
    code, out, err = run("serve", "--port", "9", "--max-num-seqs=1k", "--no-enable-prefix-caching", "--print-config", "--api-key", "S3CRET")
    got = json.loads(out)
    ok(code == 0 and got["port"] == 9 and got["max-num-seqs"] == 1000 and got["enable-prefix-caching"] is False, "--print-config prints what is set")
    ok("S3CRET" not in out, "but no key")


def main():
    loading()
    drain()
    cannot_start()
    secrets()
    printed()
    done()


main()
