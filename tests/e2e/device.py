"""--device: what a GPU that cannot do everything refuses, and how auto chooses. In the place of the CUDA
backend is a library that computes on the CPU (tests/plugin/dense-cuda.c), loaded the same way."""
import os
import subprocess

import _server
from _server import BUILD, Server, clean_env, done, equal, eventually, ok
from _spind import COMPLETION, MODEL, PATIENCE, ask, complete, cstream, get, kept, metrics, settles

STAND_IN = os.path.join(BUILD, "tests", "plugin", "dense-cuda.so")
ABSENT = os.path.join(BUILD, "there-is-no.so")


def serve(*args, library, **env):
    device = [] if "--device" in args else ["--device", "auto"]
    server = kept(Server(*device, *args, MODEL, key=None, wait=False, env=clean_env(SPIND_CUDA_LIBRARY=library, **env)))
    if not server._ready.wait(PATIENCE) or "listening on" not in server.log:
        raise RuntimeError("the server did not get ready: " + server.log)
    return server


def does_not_start(args, text, library=STAND_IN):
    p = subprocess.run([_server.BINARY, "serve", MODEL, "--port", "0", *args], capture_output=True, text=True,
                       timeout=PATIENCE, env=clean_env(SPIND_CUDA_LIBRARY=library))
    ok(p.returncode == 1 and f"cannot serve: {text}" in p.stderr, " ".join(args), p.stderr)


def a_device_without_plug_ins():
    server = serve("--device", "cuda", "--max-model-len", "1024", library=STAND_IN)
    ok("device: cuda: a stand-in" in server.log, "--device cuda takes the library's device", server.log)
    ok(eventually(lambda: "W device: it only stands in" in server.log), "what the device has to say is in the log", server.log)
    # 64 MiB free, less than steps need, so KV gets half: 32 MiB of blocks of 16 positions and 360 KiB
    ok("1456 tokens" in server.log, "--kv-hbm auto is sized by what the device has free", server.log)
    got = complete(server, max_tokens=4, temperature=0)
    equal((got.status, got.json["usage"]["completion_tokens"]), (200, 4), "it serves")
    got = ask(server, COMPLETION, {"prompt": "hello", "max_tokens": 2, "sparse": {"plugin": "wave"}})
    want = "sparse: plug-in wave cannot run on device cuda: only dense can."
    equal((got.status, got.error and got.error["message"]), (400, want), "a request that names a plug-in is refused")
    got = ask(server, COMPLETION, {"prompt": "hello", "max_tokens": 2, "sparse": {"plugin": "dense"}})
    equal(got.status, 200, "one that names dense is served")
    settles(server, "and nothing is left")
    server.stop()


def what_it_cannot_do_is_refused():
    cuda = ["--device", "cuda", "--max-model-len", "512"]
    does_not_start([*cuda, "--sparse", "wave"], "plug-in wave cannot run on device cuda: only dense can")
    does_not_start([*cuda, "--kv-dram", "64M"],
                   "--kv-dram: device cuda has no second tier: leave it 0, or choose --device cpu")
    does_not_start([*cuda, "--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: device cuda has no fp8 pages: leave it out")
    does_not_start([*cuda, "--kv-hbm", "80M"], "the KV arenas and digests (0.1 GiB) are larger than the memory available (0.1 GiB)")
    does_not_start(["--device", "cuda"], f"no CUDA backend: there is no {ABSENT}; 'make CUDA=1' builds it", ABSENT)


def auto_says_what_it_chose():
    for args, library, text in (
            ([], STAND_IN, "device: cuda: a stand-in"),
            ([], ABSENT, f"device auto: cpu (no CUDA backend: there is no {ABSENT};"),
            (["--sparse", "wave"], STAND_IN, "device auto: cpu, because device cuda has no --sparse"),
            (["--kv-dram", "16M"], STAND_IN, "device auto: cpu, because device cuda has no --kv-dram"),
            (["--kv-cache-dtype", "fp8"], STAND_IN, "device auto: cpu, because device cuda has no --kv-cache-dtype fp8")):
        server = serve("--max-model-len", "1024", "--max-num-seqs", "2", *args, library=library)
        ok(text in server.log, f"auto {' '.join(args)}: {text[:60]}", server.log)
        server.stop()


def pinned(server):
    return next(v for name, v in metrics(server).items() if name.startswith("spind_kv_dram_pinned_bytes"))


def its_second_tier_comes_behind_the_start():
    cuda = ["--device", "cuda", "--max-model-len", "1024", "--kv-dram", "160M"]
    server = serve(*cuda, library=STAND_IN, STAND_IN_DRAM="16")
    ok("pinned" not in server.log.split("listening on")[0], "it serves before the second tier is there", server.log)
    ok(eventually(lambda: pinned(server) > 150 << 20, PATIENCE), "the gauge grows to all of it", server.log)
    ok(eventually(lambda: "DRAM tier: 0.2 of 0.2 GiB pinned after" in server.log, PATIENCE), "and the log tells", server.log)
    equal(complete(server, max_tokens=4).status, 200, "it serves")
    server.stop()
    server = serve(*cuda, library=STAND_IN, STAND_IN_DRAM="-32")
    ok(eventually(lambda: "ulimit -l); going on with 0.0" in server.log, PATIENCE), "what cannot be pinned is said, and what to do", server.log)
    ok(complete(server, max_tokens=4).status == 200 and 32 << 20 <= pinned(server) < 48 << 20, "it serves with what it has")
    server.stop()


def a_broken_device_ends_the_work_of_the_daemon():
    server = serve("--device", "cuda", "--max-model-len", "1024", library=STAND_IN, STAND_IN_FAILS="12")
    got = cstream(server, max_tokens=200, ignore_eos=True)
    ok(b'"error":{"message":"The device failed' in got.raw, "its stream ends with an error event", got.raw[-300:])
    ok(eventually(lambda: get(server, "/health").status == 503, PATIENCE), "/health knows it after that one step", server.log)
    got = get(server, "/health")
    ok("cudaErrorIllegalAddress" in got.error["message"], f"and says why: {got.error['message']}", got)
    ok(eventually(lambda: server.log.count("step failed") > 0, PATIENCE), "the log tells", server.log)
    equal(server.log.count("step failed"), 1, "no other request had to fail for that", server.log)
    server.stop()


a_device_without_plug_ins()
its_second_tier_comes_behind_the_start()
a_broken_device_ends_the_work_of_the_daemon()
what_it_cannot_do_is_refused()
auto_says_what_it_chose()
done()
