"""The bars (docs/performance.md): what is run, which number of its output counts, what it is held against.

Data and nothing else: how a command is run is in runs.py, what a number means against its bar in report.py.
A row is what --only names. It needs runs, some of which rows share, and has one line of the table or several."""
import re
from collections import namedtuple

PEER_SOURCE = "shared/peer/README.md: vLLM 0.24.0 on one H200, 2026-11-21"
PEER = {  # what vLLM has. --peer FILE and --vllm DIR put other numbers in their place
    "step_ms/1x8192": 5.19,
    "prefill_s/65536": 3.25,
    "prefill_s/130000": 9.99,
    "tok_s/1x130000": 114,
    "tok_s/6x130000": 165,
    "tok_s/12x65536": 401,
    "tok_s/64x8192": 3109,
    "sessions_ttft2_s": 22.5,
    "sessions_ttft3_s": 27.4,
    "sessions_s": 229,
    "poisson_ttft_s": 3.2,
    "poisson_tpot_ms": 22,
    "stream_tok_s": 848,
    "stream_ttft_ms": 8.4,
    "streams_tok_s": 35500,
    "start_s": 29,
}

# kind: a function of runs.py. words: of the command; a list in it is a piece with a name (M, W, Z, D).
# server: the daemon that is started for it. warm: the words of a pass before, which nobody counts.
Run = namedtuple("Run", "kind seconds words server warm", defaults=(None, None))
# read: {run: what it gave} -> (number, what to say beside it). times: bar and aim are so many times vLLM's `peer`.
Bar = namedtuple("Bar", "what unit read sign bar aim peer times", defaults=(None, False))
# asked: it runs only if --only names it. gpu: there is nothing to run without one.
Row = namedtuple("Row", "name runs bars asked gpu", defaults=(False, False))


class Missing(Exception):
    """The output does not have the number."""


class Setting:
    """What the command line makes of the commands."""

    def __init__(self, model, default_model, device, small=False, ids=None, dram="90GiB", also=()):
        self.small, self.ids, self.dram = small, ids, "256MiB" if small else dram
        self.M = self.model_words(model, device, also)
        self.D = self.model_words(default_model, device, also)
        self.W = ["--sparse", "wave", "--sparse-budget", 0.02, "--sparse-min-rows", 1024]
        self.Z = self.W + ["--sparse-option", "estimate=0", "--sparse-exempt-layers", 0]

    @staticmethod
    def model_words(model, device, also):
        made_up = ["--load-format", "dummy"] if model.endswith(".json") else []
        return [*([model, *made_up] if device != "mock" else []), "--device", device, *also]

    def pick(self, full, small):
        return small if self.small else full

    def names(self):
        return {"M": self.M, "W": self.W, "Z": self.Z, "D": self.D}


# ---- reading ----


def find(got, **want):
    for row in got.get("rows", []):
        if all(row.get(k) == v for k, v in want.items()):
            if row.get("error"):
                raise Missing(row["error"])
            return row
    raise Missing(f"there is no row with {want}")


def take(row, key):
    if not isinstance(row.get(key), (int, float)):
        raise Missing(f"there is no {key} in {row}")
    return row[key]


def only(key, run, note=None, scale=1, **want):
    """The number `key` of that one row of that run."""

    def read(got):
        row = find(got[run], **want)
        return take(row, key) * scale, note(row) if note else ""

    return read


def top(key, run, note=None):
    """A number of the whole sheet."""
    return lambda got: (take(got[run], key), note(got[run]) if note else "")


def step_ms(row):
    return f"{row['ms']:.2f} ms"


def of_batch(row):
    """What is in which tier, and how often a page that was wanted was there already."""
    hit = f"{100 * row['hit']:.1f} % hits" if "hit" in row else "no hit rate"
    return f"{row['ms']:.2f} ms, {row['batch']} sequences, {row['spilled']:.0f} of them SPILLED, {hit}"


def percentiles(what):
    return lambda row: f"p99 {row[what + '_p99_ms']:,.1f} ms, {row['cached'] * 100:.1f} % of the prompts found"


def kernel(got, name, shape):
    for k in got["kernels"]:
        if (k["kernel"], k["shape"]) == (name, shape):
            return k
    raise Missing(f"there is no line of {name} {shape}")


def attention(got):
    shapes = {"1 × 32K": "B1/32768", "1 × 131K": "B1/131072", "4 × 32K": "B4/32768", "8 × 32K": "B8/32768"}
    share = {what: kernel(got["attend"], "attend-decode", shape)["share"] for what, shape in shapes.items()}
    return min(share.values()), ", ".join(f"{what} {x:.0f} %" for what, x in share.items())


def gather(got):
    speed = {n: n * 8192e-3 / kernel(got["gather"], "gather", f"{n}-pages/8KiB")["us"] for n in (4096, 512, 128)}
    return speed[4096], ", ".join(f"{n} pages {x:.1f}" for n, x in speed.items())


def prefill_attention(got):
    """The operation, a prompt by chunks in pages of 16, over one call of cuDNN on contiguous K and V."""
    share = {}
    for n in (8192, 32768):
        theirs = tflops(got["cudnn"], r"exact, one call +%d " % n)
        ours = tflops(got["paged"], r"layer R 16 +a prompt of +%d " % n)
        share[n] = (100 * ours / theirs, f"{n // 1024}K {ours:.0f} of {theirs:.0f} TFLOP/s")
    return min(x for x, _ in share.values()), ", ".join(text for _, text in share.values())


def tflops(got, line):
    found = re.search(r"^%s.* ms +([0-9.]+) TFLOP/s" % line, got["text"], re.M)
    if found is None:
        raise Missing(f"there is no line like {line!r}")
    return float(found.group(1))


def seal_share(tokens):
    """Seals of all layers, launched alone, beside the prompt without: a segment is 1,024 tokens, the last 64 are never sealed."""

    def read(got):
        us = kernel(got["seal"], "seal", "8B/R16/bisect-centroids-0")["us"]
        s = take(find(got["prefill-64k"], tokens=tokens), "s")
        n, equal = (tokens - 64) // 1024, 100 * tokens / 1024 * us * 1e-6 / s
        return 100 * n * us * 1e-6 / s, f"{n} segments of {us:.0f} µs in {s:.3f} s; {equal:.1f} % of an equal part"

    return read


def longer(short, long):
    def read(got):
        a, b = (take(find(got["long"], context=n), "ms") for n in (short, long))
        return b / a, f"{b:.2f} against {a:.2f} ms"

    return read


def long_prompt(got):
    x = got["one-1m-prompt"]
    first, again = x["first"], x["again"]
    told = f"{x['lines']} lines of progress"
    freed = f"a cancel at {100 * x['cancelled_at']:.0f} % freed everything in {x['freed_s']:.1f} s" if x["freed"] \
        else f"{x['freed_s']:.0f} s after a cancel there was still {x['left']}"
    good = [first["tokens"] == 4, x["lines"] > 0, x["freed"], again["found"] > 0.99 * x["tokens"] and 0 <= x["apart"] <= 0.05]
    return sum(good), f"first token after {first['s']:.1f} s, {told}, {freed}; asked again, {again['found']:,} found, " \
        f"after {again['s']:.2f} s, log-probabilities apart by {x['apart']:.3f}"


# ---- what is run ----


def runs(s):
    """{name: Run}"""
    steps = ["--steps", s.pick(64, 4), "--warm-up", s.pick(64, 2)]
    many = ["--steps", s.pick(128, 32), "--warm-up", s.pick(256, 32)]
    a, b, c = s.pick(8192, 300), s.pick(65536, 1300), s.pick(130000, 2300)
    own_ids = ["--id-range", s.ids] if s.ids else []
    small_ids = ["--id-range", s.ids or "1000,49000"]  # of the default model's vocabulary
    eight = ["serve", s.M, s.Z, "--max-model-len", s.pick(131072, 4096), "--kv-dram", s.dram,
             "--queue-timeout", 300, "--max-num-queued-tokens", 4000000]  # twenty documents may wait at once
    default = ["serve", s.D, "--max-num-seqs", s.pick(256, 8)]
    wide = ["serve", s.M, s.Z, "--kv-cache-dtype", "fp8", "--max-model-len", s.pick(1001024, 4096),
            *s.pick([], ["--max-num-batched-tokens", 32])]

    def decode(seconds, batch, context, *words):
        return Run("bench", seconds, ["bench", "decode", s.M, *words, "--batch", batch, "--context", context])

    def prefill(seconds, tokens, repeat):
        return Run("bench", seconds, ["bench", "prefill", s.M, "--tokens", tokens, "--repeat", s.pick(repeat, 1)])

    def stream(seconds, users, turns):
        words = ["--workload", "stream", *small_ids, "--in", 16, "--out", s.pick(256, 8), "--users", users]
        return Run("client", seconds, ["bench", "serve", *words, "--turns", turns], default, ["bench", "serve", *words, "--turns", 2])

    few_users = s.pick([], ["--users", 2, "--document", 1200, "--in", 16, "--out", 4, "--pause", 0, "--stagger", 0])
    few_requests = s.pick([], ["--requests", 3, "--rate", 20, "--in", 300, "--out", 4])
    return {
        "attend": Run("kernels", 5, ["bench_attend", "decode:1:32768", "decode:1:131072", "decode:4:32768", "decode:8:32768"]),
        "gather": Run("kernels", 15, ["bench_gather"]),
        "cudnn": Run("kernels", 6, ["bench_prefill", 32768, 8192, 0]),
        "paged": Run("kernels", 8, ["bench_prefill", 32768, 8192, 8]),
        "dense": decode(4, 1, a, *steps),
        "prefill-64k": prefill(16, f"{a},{b}", 3),
        "prefill-130k": prefill(15, c, 1),
        "sparse-1x130k": decode(4, 1, c, s.Z, *steps),
        "sparse-6x130k": decode(5, s.pick(6, 2), c, s.Z, *steps),
        "sparse-12x64k": decode(5, s.pick(12, 3), b, s.Z, *steps),
        "sparse-64x8k": decode(5, s.pick(64, 4), a, s.Z, *steps),
        # In the first seconds a thread makes plans for attention of prompts and takes the driver's locks beside the steps.
        "host": decode(9, s.pick(64, 4), a, s.Z, "--steps", s.pick(64, 4), "--warm-up", s.pick(448, 2)),
        "capacity": decode(60, s.pick(11, 2), c, s.Z, "--kv-dram", s.dram,
                           *s.pick([], ["--kv-hbm", "80MiB"]), "--feed", 1, *many),
        "long": decode(9, 1, s.pick("131072,1000000", "1300,2600"), s.Z, "--kv-cache-dtype", "fp8", "--max-model-len",
                       s.pick(1001024, 4096), *steps),
        "seal": Run("kernels", 10, ["bench_seal"]),
        "start": Run("start", 6, [], eight),
        "stream": stream(9, 1, s.pick(8, 2)),
        "streams-256": stream(10, s.pick(256, 8), 2),
        "poisson": Run("client", 185, ["bench", "serve", "--workload", "vllm-poisson", *own_ids, *few_requests], eight),
        "sessions": Run("client", 110, ["bench", "serve", "--workload", "vllm-sessions", *own_ids, *few_users], eight),
        "one-1m-prompt": Run("long_prompt", 500, [s.pick(1000000, 2500), s.ids or s.pick("1000,120000", "1000,49000")], wide),
    }


# ---- the table ----


def kernel_rows():
    return [
        Row("attend", ["attend"], [
            Bar("decode attention over page lists, ≥ 32K tokens per sequence", "% of 4275 GB/s", attention, "≥", 80, 90)], gpu=True),
        Row("gather", ["gather"], [
            Bar("gather of 8 KiB pages from DRAM", "GB/s", gather, "≥", 48, 51)], gpu=True),
        Row("prefill-attention", ["cudnn", "paged"], [
            Bar("prefill attention, paged, 8K–32K", "% of cuDNN contiguous", prefill_attention, "≥", 90, 97)], gpu=True),
    ]


def step_rows(s):
    a, b, c = s.pick(8192, 300), s.pick(65536, 1300), s.pick(130000, 2300)

    def sparse(name, what, peer, bar, aim):
        return Row(name, [name], [Bar(what, "tok/s", only("tok_s", name, step_ms), "≥", bar, aim, peer, True)])

    return [
        Row("dense", ["dense"], [Bar("dense decode step, 1 × 8K", "ms", only("ms", "dense"), "≤", 5.0, 4.5, "step_ms/1x8192")]),
        Row("prefill-64k", ["prefill-64k"], [
            Bar("prefill of 64K tokens", "s", only("s", "prefill-64k", tokens=b), "≤", 1.05, 0.95, "prefill_s/65536", True)]),
        Row("prefill-130k", ["prefill-130k"], [
            Bar("prefill of 130K tokens", "s", only("s", "prefill-130k", tokens=c), "≤", 1.05, 0.95, "prefill_s/130000", True)]),
        sparse("sparse-1x130k", "sparse decode, 1 × 130K", "tok_s/1x130000", 1.6, 2),
        sparse("sparse-6x130k", "sparse decode, 6 × 130K", "tok_s/6x130000", 4, 7),
        sparse("sparse-12x64k", "sparse decode, 12 × 64K", "tok_s/12x65536", 4, 5.5),
        sparse("sparse-64x8k", "sparse decode, 64 × 8K, ≥ 1,024 tokens exact", "tok_s/64x8192", 1.3, 2),
        Row("host", ["host"], [
            Bar("host work per step, 64 sequences", "µs", only("host_us_p50", "host"), "<", 150, 50)]),
        Row("long", ["long"], [
            Bar("decode step 1M against 128K, one sequence, `fp8` pages in both", "×",
                longer(*s.pick((131072, 1000000), (1300, 2600))), "<", 2, 1.4)]),
        Row("seal", ["seal", "prefill-64k"], [
            Bar("seals of a prompt of 8K tokens", "% of prefill", seal_share(a), "<", 3, None),
            Bar("seals of a prompt of 64K tokens", "% of prefill", seal_share(b), "<", 3, None)], gpu=True),
        Row("capacity", ["capacity"], [
            Bar("130K, all that fits in HBM + 90 GiB of DRAM", "tok/s", only("tok_s", "capacity", of_batch), "≥", 6, 10,
                "tok_s/6x130000", True)]),
    ]


def server_rows():
    turn = percentiles("ttft")
    return [
        Row("start", ["start"], [Bar("start to ready", "s", top("ready_s", "start"), "<", 5, None, "start_s")]),
        Row("stream", ["stream"], [
            Bar("default model through HTTP, one stream: tok/s", "tok/s", top("output_tokens_per_s", "stream"), "≥", 2, 4,
                "stream_tok_s", True),
            Bar("the same: TTFT", "ms", only("ttft_p50_ms", "stream", turn="all"), "≤", 4, 2, "stream_ttft_ms")]),
        Row("streams-256", ["streams-256"], [
            Bar("same shape, 256 streams through HTTP", "tok/s", top("output_tokens_per_s", "streams-256"), "≥", 2, 5,
                "streams_tok_s", True)]),
        Row("sessions", ["sessions"], [
            Bar("sessions (20 × 64,000 tokens, 3 turns): TTFT p50 of turn 2", "s",
                only("ttft_p50_ms", "sessions", turn, 1e-3, turn="2"), "≤", 1.5, 0.5, "sessions_ttft2_s"),
            Bar("sessions: TTFT p50 of turn 3", "s", only("ttft_p50_ms", "sessions", turn, 1e-3, turn="3"), "≤", 1.5, 0.5,
                "sessions_ttft3_s"),
            Bar("sessions: total time", "s", top("seconds", "sessions"), "≤", 0.6, 0.45, "sessions_s", True)]),
        Row("poisson", ["poisson"], [
            Bar("Poisson 0.15/s, 64,000 in, 1,024 out: TTFT p50", "s", only("ttft_p50_ms", "poisson", turn, 1e-3, turn="all"),
                "≤", 1.05, 0.9, "poisson_ttft_s", True),
            Bar("the same: TPOT p50", "ms", only("tpot_p50_ms", "poisson", turn="all"), "≤", 0.8, 0.5, "poisson_tpot_ms", True)]),
        Row("one-1m-prompt", ["one-1m-prompt"], [
            Bar("one prompt of 1M tokens: served, told, cancelled, asked again", "of 4", long_prompt, "≥", 4, None)], asked=True),
    ]


def rows(s):
    return kernel_rows() + step_rows(s) + server_rows()
