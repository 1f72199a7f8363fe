"""The daemon on a GPU with a second tier in pinned host memory: what does not fit HBM waits there, comes back,
and answers as it would have otherwise but for rounding.

usage: tiers.py SPIND MODEL"""
import concurrent.futures
import re
import sys
import time
import urllib.request

import serve
from serve import Server, ok, same_beginning

STREAMS, TOKENS = 12, 160


def text(i, n=210):
    return f"Chapter {i}. " + " ".join(f"Item {j} of list {i} is {(i + 3) * j}." for j in range(n))


def metrics(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as f:
        return f.read().decode()


def metric(server, name, label=""):
    found = re.search(rf'^{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$', metrics(server), re.M)
    return float(found.group(1)) if found else -1


def all_at_once(server):
    """Tokens of every answer, and how many prompt tokens were found cached."""
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        got = list(pool.map(lambda i: server.ask(text(i), max_tokens=TOKENS, ignore_eos=True, logprobs=1), range(STREAMS)))
    good = all(s == 200 and g["usage"]["completion_tokens"] == TOKENS for s, g in got)
    ok(good, f"{STREAMS} at once are answered", [g for s, g in got if s != 200])
    cached = [(g["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) for s, g in got if s == 200]
    return [g["choices"][0]["logprobs"]["tokens"] if s == 200 else [] for s, g in got], cached


def alike(name, a, b):
    same = [same_beginning(x, y) for x, y in zip(a, b)]
    print(f"# {name}: first tokens that are the same, of {TOKENS}: {same}", flush=True)
    return sum(same) > STREAMS * TOKENS // 2


def run(name, want, least, *args):
    server = Server("--device", "cuda", "--max-model-len", "8192", "--max-num-seqs", str(STREAMS), *args)
    ready = server.log
    begun = time.monotonic()
    got, _ = all_at_once(server)
    print(f"# {name}: {STREAMS * TOKENS / (time.monotonic() - begun):.0f} tokens/s", flush=True)
    ok(want is None or alike(name, want, got), f"{name}: the answers begin as with all in HBM", server.log)
    again, cached = all_at_once(server)
    ok(alike(name + ", again", got, again), f"{name}: asked again they begin alike")
    counts = {c: metric(server, "spind_kv_changes_total", f'change="{c}"') for c in ("spill", "restore", "pause")}
    counts |= {"down": metric(server, "spind_kv_blocks_copied_total", 'to="dram"'),
               "up": metric(server, "spind_kv_blocks_copied_total", 'to="hbm"')}
    counts |= {c: metric(server, "spind_hot_pages_total", f'outcome="{c}"') for c in ("hit", "miss")}
    print(f"# {name}: {counts}, prompts found again: {cached}", flush=True)
    for key in least:
        ok(counts[key] > 0, f"{name}: {key}: {counts[key]:.0f}")
    pinned = -1
    for _ in range(100):
        pinned = metric(server, "spind_kv_dram_pinned_bytes")
        if "--kv-dram" not in args or pinned > 7e9:
            break
        time.sleep(0.1)
    if "--kv-dram" in args:
        ok(pinned > 7e9, f"{name}: {pinned / 2**30:.2f} GiB are pinned by now")
        ok(min(cached) > 1000, f"{name}: every prompt is found again, though HBM holds a third of them", cached)
        ok(re.search(r"DRAM tier: \d.*pinned", server.log), f"{name}: the log tells", server.log)
        ok("GiB pinned" not in ready or server.seconds < 5, f"{name}: ready in {server.seconds:.1f} s, before that", ready)
    ok(server.stop() == 0 and "step failed" not in server.log, f"{name}: it ends well", server.log)
    return got


def main():
    want = run("dense, HBM", None, [], "--kv-hbm", "2G")
    run("dense, two tiers", want, ["down", "up"], "--kv-hbm", "240M", "--kv-dram", "8G")
    try:
        want = run("wave, HBM", None, [], "--kv-hbm", "2G", "--sparse", "wave", "--sparse-budget", "512")
        run("wave, two tiers", want, ["down", "hit", "miss"], "--kv-hbm", "240M", "--kv-dram", "8G", "--sparse", "wave",
            "--sparse-budget", "512")
    except SystemExit:
        print("# no plug-ins on this device")
    print(f"1..{serve.count}")
    return 1 if serve.bad else 0


if __name__ == "__main__":
    sys.exit(main())
