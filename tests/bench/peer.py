"""spind against llama.cpp on this machine: the same file, the same threads, the same work, in turn.

Each side is a child process that reads commands and sleeps in between (checked: the CPU time that it
used while the other one worked is printed). A round measures every row of the table on both sides,
one directly after the other, the order alternating by round; the table has the medians.

usage: peer.py ENGINE MODEL.gguf OUT.json [--threads N] [--rounds N] [--python INTERPRETER]
ENGINE is build/tests/bench/engine; INTERPRETER has llama-cpp-python and numpy."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROWS = {  # name: command; the llama.cpp side understands the same ones
    "decode_1": "decode 1 64 128",
    "decode_1_ctx1800": "decode 1 1800 64",
    "decode_16": "decode 16 64 48",
    "prefill_512": "prefill 512",
}


def serve_llama(path, threads):
    """The llama.cpp child. Random ids, one llama_decode per step, logits read after each."""
    import llama_cpp as L
    import numpy as np

    silent = L.llama_log_callback(lambda level, text, data: None)
    L.llama_log_set(silent, None)
    L.llama_backend_init()
    model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
    rng = np.random.default_rng(0)

    def context(tokens, streams):
        p = L.llama_context_default_params()
        p.n_ctx, p.n_seq_max, p.n_batch, p.n_ubatch = tokens, streams, 2048, 512
        p.n_threads = p.n_threads_batch = threads
        p.kv_unified = True
        return L.llama_init_from_model(model, p)

    def feed(ctx, ids, positions, streams, logits):
        b = L.llama_batch_init(len(ids), 0, 1)
        b.n_tokens = len(ids)
        for i, (token, position, stream, wanted) in enumerate(zip(ids, positions, streams, logits)):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, wanted
            b.seq_id[i][0] = stream
        assert L.llama_decode(ctx, b) == 0
        L.llama_batch_free(b)

    def random_ids(n):
        return rng.integers(100, 40000, n).tolist()

    def prefill(n):
        ctx = context(n + 64, 1)
        feed(ctx, random_ids(16), range(16), [0] * 16, [0] * 15 + [1])
        L.llama_memory_clear(L.llama_get_memory(ctx), True)
        start = time.perf_counter()
        feed(ctx, random_ids(n), range(n), [0] * n, [0] * (n - 1) + [1])
        rate = n / (time.perf_counter() - start)
        L.llama_free(ctx)
        return rate

    def decode(streams, length, steps):
        ctx = context((length + steps + 8) * streams, streams)
        for s in range(streams):
            feed(ctx, random_ids(length), range(length), [s] * length, [0] * (length - 1) + [1])
        start = time.perf_counter()
        for k in range(steps):
            feed(ctx, random_ids(streams), [length + k] * streams, range(streams), [1] * streams)
            L.llama_get_logits(ctx)
        rate = streams * steps / (time.perf_counter() - start)
        L.llama_free(ctx)
        return rate

    kept = {}

    def decode_kept(length, steps):
        """Behind a prompt that is computed once, as tests/bench/decode.c does it."""
        if length not in kept:
            kept[length] = context(length + steps + 8, 1)
            for at in range(0, length, 2048):
                n = min(2048, length - at)
                feed(kept[length], random_ids(n), range(at, at + n), [0] * n, [0] * (n - 1) + [1])
        ctx = kept[length]
        L.llama_memory_seq_rm(L.llama_get_memory(ctx), 0, length, -1)
        start = time.perf_counter()
        for k in range(steps):
            feed(ctx, random_ids(1), [length + k], [0], [1])
            L.llama_get_logits(ctx)
        return steps / (time.perf_counter() - start)

    print("ready llama-cpp-python", __import__("llama_cpp").__version__, flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        run = {"decode": decode, "prefill": prefill, "kept": decode_kept}[word]
        print("%.2f" % run(*map(int, numbers)), flush=True)


class Side:
    def __init__(self, argv):
        self.child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self.child.stdout.readline().split(maxsplit=1)
        if not ready or ready[0] != "ready":
            sys.exit("%s did not start" % argv[0])
        self.what = ready[1].strip()

    def ask_line(self, command):
        self.child.stdin.write(command + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline() or sys.exit("%s ended" % self.child.args[0])

    def ask(self, command):
        return float(self.ask_line(command))

    def cpu_s(self):
        with open("/proc/%d/stat" % self.child.pid) as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.child.stdin.close()
        if self.child.wait() != 0:
            sys.exit("%s failed" % self.child.args[0])


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((l.split(":", 1)[1].strip() for l in f if l.startswith("model name")), "unknown CPU")


def machine_cpu_s():
    """CPU time that anybody used since boot: user, nice, system, irq, softirq."""
    with open("/proc/stat") as f:
        n = [int(x) for x in f.readline().split()[1:]]
    return (n[0] + n[1] + n[2] + n[5] + n[6]) / os.sysconf("SC_CLK_TCK")


def measure(sides, rounds):
    rates = {row: {name: [] for name in sides} for row in ROWS}
    idle = {name: 0.0 for name in sides}
    for command in ROWS.values():  # warm both: pages, clocks, thread pools
        for side in sides.values():
            side.ask(command)
    began, busy, own = time.time(), machine_cpu_s(), sum(s.cpu_s() for s in sides.values())
    for k in range(rounds):
        order = list(sides) if k % 2 == 0 else list(sides)[::-1]
        for row, command in ROWS.items():
            for name in order:
                other = next(n for n in sides if n != name)
                time.sleep(0.05)  # the other one's threads fall asleep
                before = sides[other].cpu_s()
                rates[row][name].append(sides[name].ask(command))
                idle[other] += sides[other].cpu_s() - before
        print("round %d: " % (k + 1) + ", ".join(
            "%s %.0f/%.0f" % (row, r["spind"][-1], r["llamacpp"][-1]) for row, r in rates.items()), flush=True)
    others = machine_cpu_s() - busy - (sum(s.cpu_s() for s in sides.values()) - own)
    return rates, idle, others / ((time.time() - began) * os.cpu_count())


def main():
    if sys.argv[1:2] == ["--llama"]:
        return serve_llama(sys.argv[2], int(sys.argv[3]))
    a = argparse.ArgumentParser()
    a.add_argument("engine")
    a.add_argument("model")
    a.add_argument("out")
    a.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--python", default=sys.executable)
    a = a.parse_args()
    sides = {"spind": Side([a.engine, a.model, str(a.threads)]),
             "llamacpp": Side([a.python, os.path.abspath(__file__), "--llama", a.model, str(a.threads)])}
    machine = "%s, %d threads" % (cpu_name(), a.threads)
    print("%s; %s against %s; tokens/s" % (machine, sides["spind"].what, sides["llamacpp"].what))
    rates, idle, others = measure(sides, a.rounds)
    for side in sides.values():
        side.end()

    result = {"machine": machine, "model": os.path.basename(a.model), "rounds": a.rounds,
              "idle_cpu_s": {n: round(s, 2) for n, s in idle.items()}, "others_share": round(others, 3)}
    print("\n%-18s %10s %10s %7s   %s" % ("median of %d" % a.rounds, "spind", "llama.cpp", "ratio", "range of the ratio"))
    for row, r in rates.items():
        ours, theirs = statistics.median(r["spind"]), statistics.median(r["llamacpp"])
        ratios = [x / y for x, y in zip(r["spind"], r["llamacpp"])]
        print("%-18s %10.1f %10.1f %6.2fx   %.2f .. %.2f" % (row, ours, theirs, ours / theirs, min(ratios), max(ratios)))
        result[row] = {"spind": round(ours, 1), "llamacpp": round(theirs, 1), "ratio": round(ours / theirs, 3)}
    print("CPU time used while the other side worked: " + ", ".join("%s %.2f s" % i for i in idle.items()))
    if others > 0.05:
        print("NOT A CLEAN MEASUREMENT: other processes used %.0f %% of the CPUs, which hurts llama.cpp more: "
              "its threads wait for each other in a loop" % (100 * others))
    with open(a.out, "w") as f:
        json.dump(result, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
