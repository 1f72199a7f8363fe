"""Prompts that are longer than HBM are read layer by layer (engine/layer_major.h), and answered as where HBM holds them
but for rounding; an answer beside one goes on, and who leaves in between leaves nothing.

usage: layers.py SPIND [MODEL]     without a model: the 8B shape with made-up weights. LAYERS_SHAPE: another config.json;
LAYERS_TOKENS: of a prompt (20,000); LAYERS_DEVICE: cpu, with a small shape, to rehearse without a GPU"""
import concurrent.futures
import http.client
import json
import os
import random
import re
import sys
import time
import urllib.request

import serve
from serve import Server, ok, same_beginning

DEVICE = os.environ.get("LAYERS_DEVICE", "cuda")
OUT, BUDGET, PROMPTS = 16, 512, 3
PATIENCE = 120
# Of two log-probabilities of a token. With one layer of thirty left out made-up weights have 0.21 at the first token; of the
# default model that one is certain, and the answers behind it differ in half of their tokens. Made-up weights have no favourites:
# on a GPU (0.003 to 0.011 at the first token) another one may be the greatest, and all is different behind it.
NEAR, FIRST = 0.1, 0.05
JUDGED = DEVICE == "cpu" or len(sys.argv) > 2


def shape_file():
    here = os.path.dirname(os.path.abspath(sys.argv[1]))
    tried = [os.path.join(d, "configs/models/llama-3.1-8b.json") for d in (here, os.path.dirname(here), ".")]
    return os.environ.get("LAYERS_SHAPE") or next(f for f in tried if os.path.exists(f))


def made_up():
    """Words of the daemon, prompts, bytes of K and V of a row in all layers and in one, and of the row between layers."""
    path, n = shape_file(), int(os.environ.get("LAYERS_TOKENS", 20000))
    with open(path, encoding="utf-8") as f:
        c = json.load(f)
    r = random.Random(7)
    prompts = [[r.randrange(1000, c["vocab_size"] - 1000) for _ in range(n)] for _ in range(PROMPTS)]
    layer = c["num_key_value_heads"] * c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]) * 2 * 2
    return [path, "--load-format", "dummy"], prompts, layer * c["num_hidden_layers"], layer, 4 * c["hidden_size"]


def default_model():
    def text(i):
        return f"Chapter {i}. " + " ".join(f"Item {j} of list {i} is {(i + 3) * j}." for j in range(480)) + f" Item 217 of list {i} is"
    return [sys.argv[2]], [text(i) for i in range(PROMPTS)], 30 * 3 * 64 * 2 * 2, 3 * 64 * 2 * 2, 4 * 576


def metric(server, name, label=""):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as f:
        found = re.search(rf"^{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$", f.read().decode(), re.M)
    return float(found.group(1)) if found else -1


def eventually(good, seconds=PATIENCE):
    until = time.monotonic() + seconds
    while not good() and time.monotonic() < until:
        time.sleep(0.005)
    return good()


def used(server):
    return sum(metric(server, "spind_kv_blocks", f'tier="{t}",state="used"') for t in ("hbm", "dram"))


def answers(server, prompts):
    """Of each: its tokens and their log-probabilities."""
    got = []
    for p in prompts:
        begun = time.monotonic()
        status, a = server.ask(p, max_tokens=OUT, ignore_eos=True, logprobs=1, return_token_ids=True)
        if status != 200:
            ok(False, "a long prompt is answered", a, server.log)
            return got
        print(f"# {a['usage']['prompt_tokens']} tokens in {time.monotonic() - begun:.2f} s", flush=True)
        a = a["choices"][0]
        got.append((a["token_ids"], a["logprobs"]["token_logprobs"]))
    return got


def compare(name, want, got):
    same = [same_beginning(a[0], b[0]) for a, b in zip(want, got)]
    off = [abs(a[1][i] - b[1][i]) for a, b, n in zip(want, got, same) for i in range(n)]
    first = [abs(a[1][0] - b[1][0]) for a, b in zip(want, got)]
    print(f"# {name}: first tokens that are the same, of {OUT}: {same}; log-probabilities off by {max(first or [9]):.2g} (first), {max(off or [9]):.2g}")
    ok(len(got) == PROMPTS and max(first or [9]) < FIRST, f"{name}: the first tokens are as likely as with all in HBM", want, got)
    if JUDGED:
        ok(sum(same) > PROMPTS * OUT // 2 and max(off or [9]) < NEAR, f"{name}: and the answers go on alike", want, got)


def leaves(name, server, prompt):
    """A client that goes while its prompt is read, and a short answer meanwhile."""
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        c.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 4}), {"Content-Type": "application/json"})
        reading = eventually(lambda: metric(server, "spind_layer_major_progress") > 0)
        beside = pool.submit(server.ask, prompt[:40], max_tokens=8, ignore_eos=True).result()
        share = metric(server, "spind_layer_major_progress")
        c.close()
    ok(reading and beside[0] == 200, f"{name}: a short answer comes while a prompt is {100 * share:.0f} % read", beside, server.log)
    ok(eventually(lambda: used(server) == 0, 20), f"{name}: who leaves then leaves nothing", used(server))


def run(name, made, *args):
    model, prompts, row, layer, stream = made
    n = len(prompts[0]) if isinstance(prompts[0], list) else 8192
    words = ["--device", DEVICE, "--max-model-len", str(n + 64 if len(model) > 1 else n), "--sparse", "wave", "--sparse-budget", str(BUDGET),
             *model[1:], *args]
    server = Server(*words, "--kv-hbm", str(4 * row * n), model=model[0])
    want = answers(server, prompts)
    server.stop()
    # What its reading takes, or the beginning of its answer: a layer, the stream, hot set and tail. And some more.
    need = int(1.25 * (n * (layer + stream) + (1088 + 2 * BUDGET) * row))
    server = Server(*words, "--kv-hbm", str(need), "--kv-dram", str(4 * row * n), model=model[0])
    eventually(lambda: DEVICE != "cuda" or re.search(r"([0-9.]+) of \1 GiB pinned", server.log))
    got = answers(server, prompts)
    ok(metric(server, "spind_layer_major_prompts_total") == PROMPTS, f"{name}: {n} tokens in {need / 2**30:.2f} GiB of HBM are read layer by layer",
       server.log)
    compare(name, want, got)
    again = answers(server, prompts[:1])
    ok(again and metric(server, "spind_layer_major_prompts_total") == PROMPTS and abs(again[0][1][0] - want[0][1][0]) < FIRST,
       f"{name}: asked again the prompt is found in DRAM, and the first token is as likely", again, want)
    leaves(name, server, prompts[0][::-1])
    ok(server.stop() == 0 and "step failed" not in server.log, f"{name}: it ends well", server.log)


def main():
    made = default_model() if len(sys.argv) > 2 else made_up()
    run("bf16", made)
    run("fp8", made, "--kv-cache-dtype", "fp8")
    print(f"1..{serve.count}")
    return 1 if serve.bad else 0


if __name__ == "__main__":
    sys.exit(main())
