"""The CUDA backend's host side without a GPU, through the whole daemon: it starts, serves, and ends a request whose step
failed with an error, whichever call of CUDA it was that failed (tests/cuda/dry/runtime.c). What it computes is nothing."""
import json
import os
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "e2e"))
import _server  # noqa: E402
from _server import BUILD, Server, clean_env, done, equal, eventually, ok  # noqa: E402
from _spind import COMPLETION, PATIENCE, ask, get, kept, metrics, quiescent, settles, stream  # noqa: E402

DRY = os.path.join(BUILD, "tests", "cuda", "dry", "libspind_cuda.so")
SMALL, LARGE = "configs/models/smollm2-135m.json", "configs/models/llama-3.1-8b.json"
# A second tier, segments to seal, hot sets: every operation is in use.
ARGS = ["--load-format", "dummy", "--device", "cuda", "--sparse", "wave", "--max-model-len", "4096", "--kv-hbm", "192M", "--kv-dram", "64M"]
OUT_OF_MEMORY, BROKEN, HANGS = 2, 700, 600
ENGINE_STOPPED = 70  # exit status
# Calls of a step; of some the first is not every step's.
IN_STEPS = ("cudaGraphLaunch", "launch", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventQuery")
AT_START = (("cudaMalloc", 1), ("cudaMalloc", 3), ("cudaMalloc", 30), ("cudaMalloc", 130), ("cudaMallocHost", 1), ("cudaHostAlloc", 1),
            ("cudaStreamCreate", 1), ("cudaEventCreate", 2), ("cudaFuncSetAttribute", 5), ("cudaMemcpyAsync", 2), ("launch", 3),
            ("cublasLtCreate", 1), ("cudaStreamQuery", 4), ("cudaGetDeviceProperties", 1))


def env(**more):
    return clean_env(SPIND_CUDA_LIBRARY=DRY, **more)


def serve(*args, model=SMALL, **more):
    server = kept(Server(*ARGS, *args, model, key=None, wait=False, env=env(**more)))
    if not server._ready.wait(PATIENCE) or "listening on" not in server.log:
        raise RuntimeError("the server did not get ready: " + server.log)
    return server


def prompt(k):
    return [(7 * i + k) % 5000 + 10 for i in range(1500)]


def body(k=0, n=24):
    return {"prompt": prompt(k), "max_tokens": n, "ignore_eos": True}


def does_not_start(name, text, *args, model=SMALL, **more):
    p = subprocess.run([_server.BINARY, "serve", model, "--port", "0", *ARGS, *args], capture_output=True, text=True,
                       timeout=PATIENCE, env=env(**more))
    ok(p.returncode == 1 and "cannot serve: " in p.stderr and text in p.stderr, name, p.stderr)


def it_serves():
    server = serve()
    ok("device: cuda: no GPU (dry)" in server.log, "the backend opens", server.log)
    for k in range(3):
        got = ask(server, COMPLETION, body(k, 40))
        equal((got.status, got.json["usage"]["completion_tokens"]), (200, 40), f"answer {k}")
    got = stream(server, COMPLETION, body(9))
    ok(got.good(), "and a stream", got)
    settles(server, "nothing is left")
    server.stop()


def steps_are_replayed():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "steps.json")
        subprocess.run([_server.BINARY, "bench", "decode", LARGE, "--load-format", "dummy", "--device", "cuda", "--batch", "4", "--context",
                        "8192", "--sparse", "wave", "--steps", "64", "--json", path], capture_output=True, timeout=PATIENCE, env=env(), check=True)
        with open(path, encoding="utf-8") as f:
            row = json.load(f)["rows"][0]
    ok(row["replayed"] >= 0.95, "steps of a constant batch are one launch of a graph", row)


def what_fails_at_the_start_is_said():
    for call, n in AT_START:
        does_not_start(f"{call}, the {n}.", "", SPIND_DRY_FAULT=f"{call}:{n}")
    does_not_start("scratch that is not to be had", "scratch of 0.06 GiB where 140.00 are free (give KV less", SPIND_DRY_FAULT="cudaMalloc:1")
    does_not_start("KV that is larger than what is left", "M would fit", "--kv-hbm", "139G", SPIND_DRY_MEMORY=str(138 << 30))
    does_not_start("weights that are larger than the GPU", "its weights take 15.0 GiB in bf16, device cuda has 7.9 GiB free",
                   model=LARGE, SPIND_DRY_MEMORY=str(8 << 30))


def what_leaves_steps_too_little_is_said():
    words = "of the device's memory to steps; with 8448 tokens each these may want"
    server = serve(SPIND_DRY_MEMORY=str(1600 << 20))
    ok(words in server.log, "KV beside which steps may lack memory", server.log)
    server.stop()
    server = serve()
    ok(words not in server.log, "where there is enough nothing is said", server.log)
    server.stop()


def armed(call, code, *args):
    """A server one of whose next calls fails, and the file that arms it."""
    there, path = tempfile.mkstemp()
    os.close(there)
    os.unlink(path)
    return serve(*args, SPIND_DRY_FAULT=f"{call}:1:{code}", SPIND_DRY_ARMED=path), path


def arm(path):
    with open(path, "w", encoding="ascii"):
        pass


def a_failed_step_ends_its_requests():
    for call in (*IN_STEPS, "cudaMalloc"):
        server, path = armed(call, OUT_OF_MEMORY)
        arm(path)
        got = ask(server, COMPLETION, body())
        ok(got.status in (500, 503) and got.error, f"{call} fails: its request gets an error", got)
        os.unlink(path)
        got = [ask(server, COMPLETION, body(k)).status for k in range(2)]
        equal((got, get(server, "/health").status), ([200, 200], 200), f"{call} failed: the next ones are served")
        ok(eventually(lambda: quiescent(server), 10), f"{call} failed: nothing is left")
        server.stop()


def a_broken_device_ends_the_daemon():
    for call in IN_STEPS:
        server, path = armed(call, BROKEN)
        arm(path)
        got = stream(server, COMPLETION, body())
        os.unlink(path)
        ok(b'"error"' in got.raw and not got.done, f"{call} breaks the device: a stream ends with an error", got)
        ok(eventually(lambda: server.process.poll() == ENGINE_STOPPED, PATIENCE), f"{call} broke it: the daemon leaves", server.process.poll())
        ok("engine has stopped: cuda: " in server.log, f"{call} broke it: and says why", server.log)


def a_device_that_hangs_is_given_up():
    for call in ("cudaGraphLaunch", "launch"):
        server, path = armed(call, HANGS, "--device-timeout", "2")
        ok(ask(server, COMPLETION, body()).status == 200, f"before {call} it serves")
        arm(path)
        began = time.monotonic()
        got = stream(server, COMPLETION, body(1))
        took = time.monotonic() - began
        os.unlink(path)
        ok(b'"error"' in got.raw and not got.done, f"{call} and the device hangs: a stream ends with an error", got)
        ok(2 <= took < 10, f"{call}: after --device-timeout", took)
        ok(eventually(lambda: server.process.poll() == ENGINE_STOPPED, PATIENCE), f"{call}: the daemon leaves", server.process.poll())
        ok("does not answer for 2 s" in server.log and "dmesg" in server.log, f"{call}: and says why, and what to do", server.log)


LONG, LONG_ARGS = 6000, ("--max-model-len", "8192", "--kv-hbm", "72M", "--kv-dram", "256M")


def read_layer_by_layer(server):
    return metrics(server)["spind_layer_major_prompts_total"]


def whole_dram(server):
    return eventually(lambda: metrics(server)["spind_kv_dram_pinned_bytes"] >= 250 << 20, PATIENCE)


def long_prompts_are_read_layer_by_layer():
    """Through the daemon, which plans HBM for many sequences; a layer's pages have a geometry of their own."""
    body_of = {"prompt": [i % 5000 + 10 for i in range(LONG)], "max_tokens": 24, "ignore_eos": True}
    server = serve(*LONG_ARGS, SPIND_DRY_COUNTS="1")
    ok(whole_dram(server), "DRAM is pinned")
    equal([ask(server, COMPLETION, body_of | {"prompt": p}).status for p in (body_of["prompt"], body_of["prompt"][::-1])], [200, 200],
          "prompts longer than HBM are answered")
    equal(read_layer_by_layer(server), 2, "and were read layer by layer")
    settles(server, "nothing is left")
    server.stop()
    found = re.search(r"dry: +(\d+) cudaMemcpy$", server.log, re.M)
    ok(found and int(found.group(1)) < 8, "lanes of both geometries stay where they are", server.log)
    server = serve(*LONG_ARGS, SPIND_LAYER_MAJOR="0")
    ok(whole_dram(server) and ask(server, COMPLETION, body_of).status == 200 and read_layer_by_layer(server) == 0,
       "SPIND_LAYER_MAJOR=0: not", server.log)
    server.stop()
    server = serve(*LONG_ARGS, "--kv-hbm", "60M")
    ok(whole_dram(server) and ask(server, COMPLETION, body_of).status == 200 and read_layer_by_layer(server) == 0,
       "in too little HBM they are answered too", server.log)
    ok("chunk by chunk: to read it layer by layer --kv-hbm lacks " in server.log, "and the log says what is missing", server.log)
    server.stop()


def main():
    it_serves()
    steps_are_replayed()
    long_prompts_are_read_layer_by_layer()
    what_fails_at_the_start_is_said()
    what_leaves_steps_too_little_is_said()
    a_failed_step_ends_its_requests()
    a_broken_device_ends_the_daemon()
    a_device_that_hangs_is_given_up()
    done()


main()
