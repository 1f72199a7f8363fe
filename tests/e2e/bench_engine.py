"""`spind bench decode` and `spind bench prefill`: on the mock device, whose step time is known, and on the
default model."""
import json
import os
import subprocess
import tempfile

from _server import done, ok
from _spind import MODEL, _server

STEP_MS = 10


def bench(*args, timeout=120):
    with tempfile.TemporaryDirectory() as folder:
        path, svg = os.path.join(folder, "b.json"), os.path.join(folder, "b.svg")
        p = subprocess.run([_server.BINARY, "bench", *args, "--json", path, "--svg", svg], capture_output=True, text=True,
                           timeout=timeout)
        sheet = None
        if os.path.exists(path):
            with open(path) as f:
                sheet = json.load(f)
            sheet["svg"] = open(svg).read()
        return p.returncode, sheet, p.stdout, p.stderr


def steps_are_the_mocks():
    rc, s, out, err = bench("decode", "--device", "mock", "--mock-step-us", str(STEP_MS * 1000), "--batch", "1,8", "--context",
                            "300,3000,9000", "--sparse", "dense,wave", "--sparse-min-rows", "256", "--steps", "20")
    ok(rc == 0 and len(s["rows"]) == 12, "two batches, three contexts, two plug-ins", out, err)
    good = [r for r in s["rows"] if r["context"] < 9000]
    # The upper ends only tell a step from a warm-up or a unit: this machine does other work, too.
    ok(all(0.98 * STEP_MS <= r["ms"] < 10 * STEP_MS and 0.98 * STEP_MS <= r["ms_p50"] < 5 * STEP_MS for r in good), "a step takes its time",
       good)
    ok(all(abs(r["tok_s"] - r["batch"] * 1000 / r["ms"]) < 1 and r["running"] == r["batch"] and r["steps"] == 20 for r in good),
       "every sequence gets a token in every step", good)
    ok([r["planned_rows"] for r in good if r["context"] == 3000] == [0, 0, 20, 160],
       "behind a sealed segment wave attends by plan, in every measured step", good)
    ok([r["selected_rows"] for r in good if r["plugin"] != "dense"] == [256] * 4, "the least number of rows counts", good)
    ok(all("needs 90" in r["error"] and "there are 8192" in r["error"] for r in s["rows"] if r["context"] == 9000)
       and "needs 90" in out, "what does not fit is said", s["rows"])
    ok("synthetic KV" in out and s["fill"] == "synthetic" and s["svg"].startswith("<svg"), "what the context is made of is said, too")
    ok(all(0 < r["host_us_p50"] <= r["host_us_p99"] for r in good), "the engine's own work is told beside", good)
    rc, s, out, err = bench("decode", "--device", "mock", "--mock-step-us", "2000", "--batch", "8", "--context", "300", "--steps", "40",
                            "--churn", "4")
    ok(rc == 0 and 4 <= s["rows"][0]["running"] < 8, "with --churn answers end and others begin", out, err)
    rc, s, out, err = bench("prefill", "--device", "mock", "--mock-step-us", str(STEP_MS * 1000), "--tokens", "100,1000,9000", "--chunk",
                            "200", "--repeat", "3")
    ms = [1000 * r["s"] for r in s["rows"] if "s" in r]
    ok(rc == 0 and len(ms) == 2 and STEP_MS <= ms[0] < 3 * STEP_MS and 5 * STEP_MS <= ms[1] < 8 * STEP_MS,
       "a prompt takes a step per chunk", out, err)
    ok(s["rows"][2]["error"] == "there are 8192 positions", "a prompt that does not fit is said", s["rows"])


def the_default_model_runs():
    """Its numbers are the machine's; what must hold is what they are numbers of."""
    rc, s, out, err = bench("decode", MODEL, "--device", "cpu", "--batch", "2", "--context", "2200", "--sparse", "dense,wave,quest",
                            "--sparse-budget", "0.05,128", "--sparse-option", "outliers=1", "--block-size", "8", "--chunk", "512",
                            "--steps", "4", "--warm-up", "2")
    ok(rc == 0 and [r["plugin"] for r in s["rows"]] == ["dense", "wave 0.05", "wave 128", "quest 0.05", "quest 128"]
       and all(r["tok_s"] > 0 and r["running"] == 2 and r["spilled"] == 0 for r in s["rows"]), "every plug-in, RESIDENT", out, err)
    ok([r.get("selected_rows") for r in s["rows"]] == [None, 104, 128, 104, 128], "budgets as shares and as rows", s["rows"])
    rc, s, out, err = bench("decode", MODEL, "--device", "cpu", "--batch", "4", "--context", "2200", "--sparse", "dense,wave",
                            "--sparse-budget", "32", "--block-size", "8", "--chunk", "512", "--steps", "32", "--warm-up", "2", "--hot-set",
                            "0,2", "--feed", "0,3")
    spilled = [r for r in s["rows"] if r["hot_asked"] > 0]
    ok(rc == 0 and len(s["rows"]) == 6 and len(spilled) == 2, "hot sets: dense has none", out, err)
    ok(all(r["spilled"] > 0 and r["hot"] >= 1 and 0 < r["hit"] <= 1 and r["tok_s"] > 0 for r in spilled),
       "sequences are SPILLED, and the rate that was reached is told", spilled)
    ok([r["feed"] for r in spilled] == ["greedy", "3"] and "not a real model's" in out, "by what is fed", out)
    rc, s, out, err = bench("decode", MODEL, "--device", "cpu", "--context", "1200", "--fill", "prefill", "--sparse", "wave", "--steps", "3",
                            "--chunk", "256")
    ok(rc == 0 and s["rows"][0]["planned_rows"] == 3 and "computed" in out and "synthetic" not in out, "with a prompt that is computed", out,
       err)
    rc, s, out, err = bench("decode", MODEL, "--device", "cpu", "--batch", "2,9", "--context", "2200", "--sparse", "wave",
                            "--sparse-budget", "0.02", "--block-size", "8", "--chunk", "512", "--steps", "4", "--kv-hbm", "80MiB", "--kv-dram",
                            "1GiB")
    ok(rc == 0 and s["rows"][0]["tok_s"] > 0 and s["rows"][1]["error"].startswith("no room for all: "),
       "of two tiers it says how many sequences there is room for", s["rows"])


def words_are_checked():
    for words, text in (
        (["decode", "--sparse", "wawe"], 'unknown plug-in "wawe"'),
        (["decode", "--sparse", "wave", "--sparse-option", "nonsense=1"], "none of these plug-ins has it"),
        (["decode", "--batch", "0"], "--batch 0: wanted are numbers from 1 to 4096"),
        (["decode", "--fill", "water"], "--fill water: there are synthetic and prefill"),
        (["decode", "--kv-hbm", "lots"], "--kv-hbm lots: wanted is a size such as 8GiB"),
        (["prefill", "--tokens", "x"], "--tokens x: wanted are numbers"),
        (["decode", "a", "b"], "b: one model is enough"),
        (["encode"], 'unknown command "encode"; there are decode, prefill, serve'),
    ):
        rc, _, _, err = bench(*words, "--device", "mock")
        ok(rc == 2 and text in err, " ".join(words), err)


steps_are_the_mocks()
the_default_model_runs()
words_are_checked()
done()
