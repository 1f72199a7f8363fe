"""Decoding behind a long context, in turn on this machine: `wave` at 5 % with blocks of 8 rows (quality) and
of 16 (speed), RESIDENT and SPILLED (a hot set of five budgets), against our own dense and llama.cpp.

A round runs every contender once, the order alternating by round; ratios are taken within a round, and the
table has medians and ranges. Prompts are computed once per contender. Behind the rounds: where a step's
time goes, by operation.

usage: context.py DECODE MODEL.gguf OUT.json [--context N] [--steps N] [--rounds N] [--text FILE]
                  [--threads N] [--python INTERPRETER]
DECODE is build/tests/bench/decode; without INTERPRETER there is no llama.cpp. OUT.json gets the key
"context" added. Answers are greedy; rows with "text" feed the text's own tokens instead, because a
small model's answers repeat themselves, and a hot set likes that."""
import argparse
import json
import os
import statistics
import sys
import time

import peer

BLOCKS = {8: "quality", 16: "speed"}
BARS = [  # what, contender, against, bar, aim
    ("wave / dense", "wave", "dense", 2, 3),
    ("wave / llama.cpp", "wave", "llamacpp", 6, 10),
    ("SPILLED / RESIDENT", "spilled", "wave", 0.8, 0.95),
    ("same, text fed", "spilled_text", "wave_text", 0.8, 0.95),
]
OPERATIONS = ["linear", "whole", "planned", "score", "known", "select", "resolve", "append", "sample", "embed", "rest", "step"]


def contenders(sides, steps, context):
    """{name: (side, command)}"""
    rows = {}
    for r in BLOCKS:
        for who, mode in (("dense", "greedy"), ("wave", "greedy"), ("spilled", "greedy"), ("wave", "text"),
                          ("spilled", "text")):
            name = "%s%s_%d" % (who, "_text" if mode == "text" else "", r)
            rows[name] = (sides["decode_%d" % r], "run %s %s %d" % (who, mode, steps))
    if "llamacpp" in sides:
        rows["llamacpp"] = (sides["llamacpp"], "kept %d %d" % (context, steps))
    return rows


def measure(rows, rounds):
    rates, missing, answers = {name: [] for name in rows}, {}, {}
    for side, command in rows.values():  # computes the prompts
        side.ask_line(command)
    for k in range(rounds):
        for name in list(rows) if k % 2 == 0 else list(rows)[::-1]:
            side, command = rows[name]
            time.sleep(0.05)  # the last one's threads fall asleep
            rate, *more = side.ask_line(command).split()
            rates[name].append(float(rate))
            if more and float(more[0]) > 0:
                missing[name] = float(more[0])
            if more and answers.setdefault(name.replace("spilled", "wave"), more[1]) != more[1]:
                sys.exit("%s: another answer than RESIDENT, or than in the last round" % name)
        print("round %d: " % (k + 1) + ", ".join("%s %.0f" % (n, r[-1]) for n, r in rates.items()), flush=True)
    return rates, missing


def spread(values):
    return "%.1f .. %.1f" % (min(values), max(values))


def print_rates(rates, missing):
    print("\n%-18s %8s   %-18s %s" % ("tokens/s", "median", "range", "pages that the hot set lacked"))
    for name, r in rates.items():
        lacked = "%.1f %%" % (100 * missing[name]) if name in missing else ""
        print("%-18s %8.1f   %-18s %s" % (name, statistics.median(r), spread(r), lacked))


def print_ratios(rates):
    out = {}
    print("\n%-28s %8s   %-14s %5s %5s" % ("ratio", "median", "range", "bar", "aim"))
    for what, who, against, bar, aim in BARS:
        for r, setting in BLOCKS.items():
            other = against if against == "llamacpp" else "%s_%d" % (against, r)
            if other not in rates:
                continue
            ratios = [x / y for x, y in zip(rates["%s_%d" % (who, r)], rates[other])]
            middle = statistics.median(ratios)
            print("%-28s %7.2fx   %-14s %5g %5g %s" % (
                "%s (%s)" % (what, setting), middle, "%.2f .. %.2f" % (min(ratios), max(ratios)), bar, aim,
                "" if middle >= bar else "BELOW THE BAR"))
            out["%s_%d / %s" % (who, r, other)] = round(middle, 3)
    return out


def profiles(sides, steps):
    """Microseconds of a step by operation; attend as `whole` (layers that attend everything) and `planned`."""
    out = {}
    for r in BLOCKS:
        for who in ("dense", "wave", "spilled"):
            runs = [json.loads(sides["decode_%d" % r].ask_line("profile %s text %d" % (who, steps))) for _ in range(3)]
            out["%s_%d" % (who, r)] = {op: statistics.median(p[op] for p in runs) for op in OPERATIONS}
    print("\n%-14s" % "us of a step" + "".join("%9s" % op for op in OPERATIONS))
    for name, p in out.items():
        print("%-14s" % name + "".join("%9.0f" % p[op] for op in OPERATIONS))
    return out


def main():
    a = argparse.ArgumentParser()
    a.add_argument("decode")
    a.add_argument("model")
    a.add_argument("out")
    a.add_argument("--context", type=int, default=7680)
    a.add_argument("--steps", type=int, default=96)
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--text", default="-")
    a.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    a.add_argument("--python")
    a = a.parse_args()
    sides = {"decode_%d" % r: peer.Side([a.decode, a.model, str(r), str(a.context), a.text, str(a.threads)])
             for r in BLOCKS}
    if a.python:
        sides["llamacpp"] = peer.Side([a.python, peer.__file__, "--llama", a.model, str(a.threads)])
    machine = "%s, %d threads" % (peer.cpu_name(), a.threads)
    text = "generated prose" if a.text == "-" else os.path.basename(a.text)
    print("\n%s; %d tokens of context (%s), %d decoded" % (machine, a.context, text, a.steps))
    for side in sides.values():
        print("  " + side.what)
    began, busy, own = time.time(), peer.machine_cpu_s(), sum(s.cpu_s() for s in sides.values())
    rates, missing = measure(contenders(sides, a.steps, a.context), a.rounds)
    others = peer.machine_cpu_s() - busy - (sum(s.cpu_s() for s in sides.values()) - own)
    others /= (time.time() - began) * os.cpu_count()
    print_rates(rates, missing)
    ratios = print_ratios(rates)
    steps = profiles(sides, a.steps)
    for side in sides.values():
        side.end()
    if others > 0.05:
        print("NOT A CLEAN MEASUREMENT: other processes used %.0f %% of the CPUs" % (100 * others))
    result = {}
    if os.path.exists(a.out):
        with open(a.out) as f:
            result = json.load(f)
    result["context"] = {"machine": machine, "tokens": a.context, "steps": a.steps, "text": text,
                         "others_share": round(others, 3), "missing": missing, "ratios": ratios, "step_us": steps,
                         "tokens_per_s": {n: round(statistics.median(r), 1) for n, r in rates.items()}}
    with open(a.out, "w") as f:
        json.dump(result, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
