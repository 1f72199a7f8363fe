"""tests/bench/bars, the table of the bars: the whole of it on the CPU and on the mock device, whose step is known; with
programs in the place of ours that fail in every way; and the arithmetic of bars."""
import json
import os
import subprocess
import sys
import tempfile

from _server import done, equal, ok
from _spind import _server

BARS = os.path.join(os.path.dirname(__file__), "..", "bench", "bars")
SHAPE = os.path.join(os.path.dirname(__file__), "..", "..", "configs", "models", "smollm2-135m.json")
sys.path.insert(0, BARS)
import peer  # noqa: E402
import report  # noqa: E402
import rows  # noqa: E402
import runs  # noqa: E402


def bars(*args, out, spind=None, env=None):
    """(exit status, bars.json or None, stdout, stderr)"""
    p = subprocess.run([sys.executable, BARS, "--spind", spind or _server.BINARY, "--out", out, *args], capture_output=True, text=True,
                       timeout=120, env={**os.environ, **(env or {})})
    path = os.path.join(out, "bars.json")
    return p.returncode, json.load(open(path)) if os.path.exists(path) else None, p.stdout, p.stderr


def of(sheet, row):
    return [x for x in sheet["bars"] if x["row"] == row]


def raw(out, name):
    with open(os.path.join(out, name + ".json")) as f:
        return json.load(f)


def script(folder, name, text):
    path = os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    with open(path, "w") as f:
        f.write("#!/bin/bash\n" + text)
    os.chmod(path, 0o755)
    return path


# ---- arithmetic ----


def a_number_is_held_against_its_bar():
    row = rows.Row("x", ["x"], [])
    peers = {"v": (100, "somebody")}

    def verdict(sign, bar, aim, value, times=False):
        b = rows.Bar("what", "ms", None, sign, bar, aim, "v", times)
        return report.line(row, b, "", {"value": value, "note": ""}, peers)["verdict"]

    got = [verdict("≤", 5, 4.5, x) for x in (4.5, 4.51, 5, 5.01)]
    equal(got, ["aim", "met", "met", "missed"], "at most")
    got = [verdict("<", 5, None, x) for x in (1, 5)]
    equal(got, ["met", "missed"], "less than, without an aim")
    got = [verdict("≥", 1.6, 2, x, True) for x in (200, 199, 160, 159)]
    equal(got, ["aim", "met", "met", "missed"], "at least so many times vLLM's")
    line = report.line(row, rows.Bar("w", "s", None, "≤", 1.05, 0.9, "v", True), "", {"value": 250, "note": ""}, peers)
    ok(line["ratio"] == 2.5 and report.text(line) == "**250 s (2.5×)**, missed", "a line says the ratio, and shows what is missed", line)
    about = {"failures": []}
    codes = [report.status(about, [{"verdict": x} for x in v]) for v in
             (["met", "aim"], ["met", "missed", "left out"], ["missed", "failed"], ["left out"])]
    equal(codes, [0, 1, 2, 2], "exit status: all met, one missed, one failed, nothing measured")


def every_row_is_complete():
    s = rows.Setting("m.json", "d.gguf", "cuda")
    table, names = rows.rows(s), rows.runs(s)
    ok(all(n in names for r in table for n in r.runs) and len({r.name for r in table}) == len(table), "rows name runs that are there")
    ok(all(b.peer is None or b.peer in rows.PEER for r in table for b in r.bars) and all(b.peer for r in table for b in r.bars if b.times),
       "and numbers of vLLM that are there")
    ok(all(r.kind in runs.KINDS and r.seconds > 0 for r in names.values()) and {n for r in table for n in r.runs} == set(names),
       "no run is of an unknown kind, none is left over")
    ok(len([b for r in table for b in r.bars]) >= 22, "every line of the issue's table is there", len(table))
    equal(runs.command(names["dense"], s.names()), "spind bench decode M --steps 64 --warm-up 64 --batch 1 --context 8192", "a command reads well")
    got = {"seal": {"kernels": [{"kernel": "seal", "shape": "8B/R16/bisect-centroids-0", "us": 840.0}]},
           "prefill-64k": {"rows": [{"tokens": 8192, "s": 0.196}, {"tokens": 65536, "s": 3.3}]}}
    share, note = rows.seal_share(8192)(got)
    ok(abs(share - 3.0) < 1e-9 and note.startswith("7 segments of 840") and "3.4 % of an equal part" in note
       and 1.6 < rows.seal_share(65536)(got)[0] < 1.61, "seven of eight segments of 8,192 tokens are sealed", share, note)
    ok("--load-format" in s.M and "--load-format" not in s.D, "a description's weights are made up, a file's are not")


# ---- the machinery ----


def on_the_cpu(out):
    rc, s, text, err = bars("--device", "cpu", "--small", "--model", SHAPE, "--only", "sparse-1x130k,stream", "--also",
                            "--threads 2", out=out)
    ok(rc in (0, 1) and len(s["bars"]) == 3 and all(x["verdict"] in ("aim", "met", "missed") for x in s["bars"]), "rows run on the CPU",
       text, err)
    wave = raw(out, "sparse-1x130k")["rows"][0]
    ok(of(s, "sparse-1x130k")[0]["value"] == wave["tok_s"] and wave["plugin"] == "wave 0.02" and wave["planned_rows"] > 0,
       "numbers are those of the JSON that is kept", s["bars"], wave)
    tok, ttft = of(s, "stream")
    client = raw(out, "stream")
    ok(tok["value"] == client["output_tokens_per_s"] and ttft["value"] == client["rows"][-1]["ttft_p50_ms"] and client["rows"][-1]["good"] == 2,
       "through HTTP, too", client)
    ok("spind_requests_total" in open(os.path.join(out, "stream.metrics")).read() and "drained" in
       open(os.path.join(out, "stream.server.log")).read(), "the daemon's gauges and log are kept, and it has ended well")
    ok(s["before"]["spind"].startswith("spind ") and s["before"]["gpu"] and s["after"]["date"] >= s["before"]["date"], "the machine is named")
    table = open(os.path.join(out, "bars.md")).read()
    ok("| what | vLLM | bar | aim | spind | bound by | command |" in table and "| ≥ 1.6× | ≥ 2× |" in table and "`M`: `" in table,
       "the table has the columns of docs/performance.md", table)


def on_the_mock(out):
    peer = os.path.join(out, "peer")
    with open(peer, "w") as f:
        json.dump({"tok_s/1x130000": 1, "sessions_s": 100, "poisson_ttft_s": 1e-6}, f)
    mock = ("--device", "mock", "--small", "--ids", "1,250", "--peer", peer)
    rc, s, text, err = bars(*mock, "--also", "--mock-step-us 12000", "--only", "dense", out=out)
    ok(rc == 1 and of(s, "dense")[0]["verdict"] == "missed" and 5 < of(s, "dense")[0]["value"] < 40, "a step of 12 ms misses 5", text, err)
    rc, s, text, err = bars(*mock, "--also", "--mock-step-us 1000", "--only", "sparse-1x130k,host,start,sessions,poisson,one-1m-prompt",
                            out=out)
    line = of(s, "sparse-1x130k")[0]
    ok(line["verdict"] == "aim" and line["peer"] == 1 and line["ratio"] == line["value"] and "--peer" in line["peer_source"],
       "what is measured beside takes the place of what is written down", line)
    ok(of(s, "poisson")[0]["verdict"] == "missed" and [x["verdict"] for x in of(s, "sessions")] == ["aim"] * 3, "whole loads", s["bars"])
    ok(of(s, "start")[0]["verdict"] == "met" and of(s, "host")[0]["unit"] == "µs", "the start, and the host's work")
    line, told = of(s, "one-1m-prompt")[0], raw(out, "one-1m-prompt")
    ok(told["first"]["tokens"] == 4 and told["freed"] and 0.1 <= told["cancelled_at"] < 1 and told["left"] == {}, "a long prompt: cancelled, then served", told)
    ok(told["again"]["found"] > 2475 and told["apart"] == 0 and len(told["first"]["top"]) == 5, "and found when it is asked again", told)
    ok(line["value"] == 3 + (told["lines"] > 0), "and without a line of progress, which comes every 10 s, it is not good", line, told)


# ---- faults ----

# What spind bench decode does by the context that is asked, and spind serve.
STAND_IN = """
json=; context=; while [ $# -gt 0 ]; do case $1 in --json) json=$2;; --context) context=$2;; serve) serve=1;; --batch) batch=$2;; esac; shift; done
[ -n "$serve" ] && { echo loading; echo 'cannot serve: no room' >&2; exit 1; }
case $context in
8192) [ -n "$batch" ] && [ "$batch" = 64 ] && { echo '{"rows":[{"context":8192,"tok_s":7000,"ms":9}]}' > $json; exit 0; }
    echo '{"rows":[{"context":8192,"ms":4.0}]}' > $json ;;
130000) seq 100; echo 'the device is gone' >&2; exit 3 ;;
65536) echo '{"rows":[{"error":"no room for all"}]}' > $json ;;
131072,1000000) ;;
esac
"""


def what_fails_is_told_as_failed(folder):
    spind, tools = script(folder, "spind", STAND_IN), os.path.join(folder, "bin")
    script(tools, "nvidia-smi",
           "case \"$*\" in *lms*) while :; do echo '1980, 90, 30'; echo '1755, 690, 61'; sleep 0.02; done;; *) echo 'NVIDIA H200, 1980 MHz';; esac\n")
    kernels = os.path.join(folder, "tests", "cuda")
    script(kernels, "bench_attend", "".join(f"echo kbench attend-decode {s} 10 4000GB/s 4275GB/s {p}%\n" for s, p in
                                            (("B1/32768", 84.5), ("B1/131072", 93), ("B4/32768", 95), ("B8/32768", 97))))
    script(kernels, "bench_gather", "echo kbench gather 4096-pages/8KiB 660.0 51GB/s 51GB/s 99%\nexit 1\n")
    script(kernels, "bench_prefill", "[ $3 = 0 ] && printf 'exact, one call %6u  1.0 ms  600.0 TFLOP/s\\n' 8192 32768\n"
           "[ $3 = 8 ] && printf 'layer R 16  a prompt of %6u  1.0 ms  %s TFLOP/s\\n' 8192 590 32768 564\nsleep 0.2\n")
    out = os.path.join(folder, "out")
    path = {"PATH": tools + ":" + os.environ["PATH"]}
    rc, s, text, err = bars("--only", "attend,gather,prefill-attention,dense,sparse-1x130k,sparse-12x64k,sparse-64x8k,host,long,start", out=out,
                            spind=spind, env=path)
    verdicts = {x["row"]: x["verdict"] for x in s["bars"]}
    want = {"attend": "met", "gather": "failed", "prefill-attention": "met", "dense": "aim", "sparse-1x130k": "failed",
                     "sparse-12x64k": "failed", "sparse-64x8k": "aim", "host": "failed", "long": "failed", "start": "failed"}
    equal(verdicts, want, "each by its fault", text, err)
    why = {x["row"]: x.get("why", "") for x in s["bars"]}
    ok(rc == 2 and not any("value" in x for x in s["bars"] if x["verdict"] == "failed"), "a failed row has no number", s["bars"])
    ok("exit status 3" in why["sparse-1x130k"] and why["sparse-1x130k"].endswith("100\nthe device is gone") and "94" not in why["sparse-1x130k"]
       and "    the device is gone" in text, "but its last lines", why)
    ok(why["sparse-12x64k"] == "there is no row with {}" or "no room for all" in why["sparse-12x64k"], "a cell that did not fit says so", why)
    ok("host_us_p50" in why["host"] and "exit status 0" in why["long"], "so does output without the number, and no output", why)
    ok("did not get ready" in why["start"] and "no room" in why["start"], "and a daemon that does not start", why)
    line = of(s, "prefill-attention")[0]
    ok(line["value"] == 94 and "8K 590 of 600" in line["note"], "of two shares the smaller counts", line)
    equal(line["clocks"], "1,755 MHz at 690 W, 61 °C", "the clocks at the highest power stand beside")
    rc, s, text, _ = bars("--only", "dense,long", "--seconds", "8", out=out, spind=spind, env=path)
    ok(rc == 0 and of(s, "dense")[0]["verdict"] == "aim" and of(s, "long")[0]["verdict"] == "left out"
       and "its 9 s do not fit" in text, "rows that do not fit into --seconds are left out, and named", text)


VLLM = """
import json, sys
import report, vllm.engine
assert not hasattr(report, "line")  # of its own, not ours
def say(**kw): print("RESULT", json.dumps(kw), flush=True)
class Engine:
    def shutdown(self): pass
async def engine(prefix, offload):
    print("loading")
    say(what="start", seconds=30.0)
    return Engine()
async def cell(e, rng, B, ctx, steps=96):
    if (B, ctx) == FAULT: raise MemoryError("no room")
    say(what="cell", B=B, ctx=ctx, first_ttft=1.5, decode_tok_s=500.0, step_ms=8.0)
async def poisson(rate):
    e = await engine(False, 0)
    say(what="poisson", rate=rate, ttft_p50=2.5, tpot_p50_ms=20.0)
"""


def vllm_beside(folder):
    spind, tools = script(folder, "spind", STAND_IN), os.path.join(folder, "bin")
    script(tools, "nvidia-smi", "echo 'NVIDIA H200, 1980 MHz'\n")
    out, path = os.path.join(folder, "out"), {"PATH": tools + ":" + os.environ["PATH"]}
    program = os.path.join(folder, "vllm_longctx.py")
    os.makedirs(os.path.join(folder, "site", "vllm"))
    for name in ("vllm/__init__", "vllm/engine", "report"):
        open(os.path.join(folder, "site", name + ".py"), "w").close()
    with open(program, "w") as f:
        f.write(VLLM.replace("FAULT", "None"))
    rc, s, text, err = bars("--only", "dense,sparse-64x8k", "--vllm", folder, out=out, spind=spind, env=path)
    line, tok = of(s, "dense")[0], of(s, "sparse-64x8k")[0]
    ok(rc == 0 and line["peer"] == 8 and line["ratio"] == 0.5 and tok["ratio"] == 14 and "beside" in tok["peer_source"],
       "vLLM's cells are measured in the same run", text, err)
    equal(raw(out, "peer"), {"start_s": 30, "step_ms/1x8192": 8, "tok_s/64x8192": 500}, "and kept for --peer")
    with open(program, "w") as f:
        f.write(VLLM.replace("FAULT", "(64, 8192)"))
    rc, s, text, err = bars("--only", "dense,sparse-64x8k", "--vllm", folder, out=out, spind=spind, env=path)
    ok(rc == 2 and of(s, "sparse-64x8k")[0]["peer"] == 3109 and of(s, "dense")[0]["peer"] == 8 and "without tok_s/64x8192" in s["failures"][0],
       "what it did not measure stays as it is written down, and is told", text, err)
    words, sessions, seconds = peer.wanted(["poisson_ttft_s", "poisson_tpot_ms", "tok_s/6x130000", "start_s"])
    equal((words, sessions), (["6x130000", "poisson=0.15"], False), "only what is asked is run")
    log = os.path.join(folder, "all.log")
    with open(log, "w") as f:
        for cell in peer.SECONDS:
            batch, context = cell.split("x")
            f.write(f'RESULT {{"what": "cell", "B": {batch}, "ctx": {context}, "first_ttft": 1, "decode_tok_s": 2, "step_ms": 3}}\n')
    value = {"prefill_s": 1, "tok_s": 2, "step_ms": 3}
    equal(peer.results(log), {key: value[key.split("/")[0]] for key in peer.CELLS}, "every number of every cell is found in a log")


def vllm_through_http(folder):
    """Its server here is one of ours, started as vLLM's is."""
    package = os.path.join(folder, "site", "vllm", "entrypoints", "openai")
    os.makedirs(package)
    with open(os.path.join(package, "api_server.py"), "w") as f:
        f.write(f"""import os, sys
words = sys.argv[1:]
assert os.path.exists(os.path.join(words[words.index("--model") + 1], "config.json")) and "--skip-tokenizer-init" in words
os.execv({os.path.abspath(_server.BINARY)!r}, ["spind", "serve", "--device", "mock", "--mock-step-us", "5000", "--port", words[-1]])
""")
    out = os.path.join(folder, "out")
    mock = ("--device", "mock", "--small", "--ids", "1,250", "--also", "--mock-step-us 200", "--only", "stream,streams-256")
    rc, s, text, err = bars(*mock, "--vllm", folder, out=out)
    got = raw(out, "peer")
    ok(set(got) == {"stream_tok_s", "stream_ttft_ms", "streams_tok_s"} and got["stream_ttft_ms"] > 4 and 0 < got["stream_tok_s"] < 250
       and of(s, "stream")[0]["peer"] == got["stream_tok_s"] and of(s, "stream")[0]["ratio"] > 1, "vLLM's server gets the same load", text, err, got)
    os.remove(os.path.join(package, "api_server.py"))
    rc, s, text, err = bars(*mock, "--vllm", folder, out=out)
    ok(rc == 2 and of(s, "stream")[0]["peer"] == 848 and "its server did not get ready" in s["failures"][0], "one that does not start is told", text, err)


def words_are_checked(out):
    rc, s, text, err = bars(out=out, env={"PATH": out})
    ok(rc == 2 and s is None and text == "" and err.count("\n") == 1 and "no GPU here" in err, "without a GPU it says so in one line", text, err)
    rc, _, _, err = bars("--only", "dense,nonsense", out=out)
    ok(rc == 2 and "--only nonsense: there are attend, gather" in err, "a row that is not there", err)
    with open(os.path.join(out, "peer"), "w") as f:
        f.write('{"tok_s/1x1": 5}')
    rc, _, _, err = bars("--device", "mock", "--peer", f.name, out=out)
    ok(rc == 2 and "tok_s/1x1: wanted are numbers of step_ms/1x8192" in err, "a number that nothing is held against", err)
    rc, _, text, _ = bars("--list", out=out)
    ok(rc == 0 and all(f"\n{x}: about" in "\n" + text for x in ("attend", "dense", "capacity", "poisson", "one-1m-prompt", "seal"))
       and "spind bench decode M Z --kv-dram 90GiB" in text and "only if it is named" in text, "the rows with their commands", text)


a_number_is_held_against_its_bar()
every_row_is_complete()
for case in (on_the_cpu, on_the_mock, what_fails_is_told_as_failed, vllm_beside, vllm_through_http, words_are_checked):
    with tempfile.TemporaryDirectory() as folder:
        case(folder)
done()
