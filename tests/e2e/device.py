"""--device: what a GPU that cannot do everything yet refuses, and how auto chooses. In the place of the CUDA
backend is a library that computes on the CPU (tests/plugin/dense-cuda.c), loaded the same way."""
import os
import subprocess

import _server
from _server import BUILD, Server, clean_env, done, equal, ok
from _spind import COMPLETION, MODEL, PATIENCE, ask, complete, kept, settles

STAND_IN = os.path.join(BUILD, "tests", "plugin", "dense-cuda.so")
ABSENT = os.path.join(BUILD, "there-is-no.so")


def serve(*args, library):
    device = [] if "--device" in args else ["--device", "auto"]
    server = kept(Server(*device, *args, MODEL, key=None, wait=False, env=clean_env(SPIND_CUDA_LIBRARY=library)))
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
    # 64 MiB free, of which KV gets 85 %: 54.4 MiB of blocks of 16 positions and 360 KiB
    ok("2464 tokens" in server.log, "--kv-hbm auto is sized by what the device has free", server.log)
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
    does_not_start([*cuda, "--kv-hbm", "80M"], "the KV arenas and digests (0.1 GiB) are larger than the memory available (0.1 GiB)")
    does_not_start(["--device", "cuda"], f"no CUDA backend: there is no {ABSENT}; 'make CUDA=1' builds it", ABSENT)


def auto_says_what_it_chose():
    for args, library, text in (
            ([], STAND_IN, "device: cuda: a stand-in"),
            ([], ABSENT, f"device auto: cpu (no CUDA backend: there is no {ABSENT};"),
            (["--sparse", "wave"], STAND_IN, "device auto: cpu, because device cuda has no --sparse"),
            (["--kv-dram", "16M"], STAND_IN, "device auto: cpu, because device cuda has no --kv-dram")):
        server = serve("--max-model-len", "1024", "--max-num-seqs", "2", *args, library=library)
        ok(text in server.log, f"auto {' '.join(args)}: {text[:60]}", server.log)
        server.stop()


a_device_without_plug_ins()
what_it_cannot_do_is_refused()
auto_says_what_it_chose()
done()
