"""`make bars`: every bar of docs/performance.md, measured on this machine with a GPU, as a table.

Each row runs its commands of spind (bench decode, bench prefill, bench serve against a daemon of its own) or a bench
of a kernel, takes one number of the output, and holds it against its bar and against what vLLM has. All output is kept
under --out, with bars.md and bars.json, which are written again after every row. Needs Python and what `make dist` or
`make cuda-pack` put into a folder (rows of kernels: the latter)."""
import argparse
import json
import os
import shlex
import signal
import sys

import report
from measure import Session, measure_all, say
from place import REPOSITORY, Place, gpu
from rows import PEER, Setting

HERE = os.path.dirname(os.path.abspath(__file__))
EPILOG = """exit status: 0 every bar that was measured is met, 1 one was missed, 2 a row failed or nothing could be run.

vLLM's numbers are those of shared/peer/README.md. --peer FILE puts others in their place, as JSON {"step_ms/1x8192": 5.2, ..}
(--list names the keys). --vllm DIR measures them: DIR holds vllm_longctx.py and, there or in DIR/site, the packages that
pack-vllm.sh made parts of. Behind our rows it runs what they are held against: cells and Poisson in one engine (start 45 s,
all cells 200 s, Poisson 175 s), the sessions in another (275 s), the rows through HTTP against its server (60 s), on the
description of the default model; --vllm-url names one that runs already. All of it is in peer.json, for --peer of a later run."""


def words():
    a = argparse.ArgumentParser(prog="bars", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--only", metavar="ROW,..", help="these rows and no others")
    a.add_argument("--list", action="store_true", help="the rows with their commands and about how long each takes")
    a.add_argument("--seconds", type=float, metavar="N", help="rows in their order, as long as they fit into so many seconds")
    a.add_argument("--out", metavar="DIR", default="build/bars", help="where everything is kept (build/bars)")
    a.add_argument("--spind", metavar="FILE", help="the daemon (beside this folder, or build/spind)")
    a.add_argument("--kernels", metavar="DIR", help="the benches of kernels (tests/cuda beside the daemon)")
    a.add_argument("--peer", metavar="FILE", help="numbers of vLLM instead of those written down")
    a.add_argument("--vllm", metavar="DIR", help="measure vLLM, too: see below")
    a.add_argument("--vllm-url", metavar="URL", help="a server of vLLM that runs already, with the default model's shape")
    a.add_argument("--device", default="cuda", help="cuda; cpu and mock try the machinery")
    a.add_argument("--model", metavar="FILE", help="instead of the description of Llama-3.1-8B")
    a.add_argument("--default-model", metavar="FILE", help="instead of the description of SmolLM2-135M, whose weights are made up")
    a.add_argument("--small", action="store_true", help="contexts and batches that a CPU can do: the numbers mean nothing")
    a.add_argument("--kv-dram", metavar="SIZE", default="90GiB", help="of the rows with two tiers, where the machine has less than 90GiB")
    a.add_argument("--ids", metavar="A,B", help="prompts' ids are drawn from [A,B): for a --model with fewer")
    a.add_argument("--also", metavar="WORDS", default="", help="more words for every command that opens an engine")
    return a.parse_args()


def stop(text):
    print("bars: " + text, file=sys.stderr)
    sys.exit(2)


def default_spind():
    beside = os.path.join(os.path.dirname(HERE), "spind")
    return beside if os.path.exists(beside) else os.path.join(REPOSITORY, "build", "spind")


def chosen(table, a):
    """The rows to run: those that are named, or all that can be run here."""
    names = [r.name for r in table]
    asked = a.only.split(",") if a.only else []
    for name in asked:
        if name not in names:
            stop(f"--only {name}: there are {', '.join(names)}")
    here = a.device == "cuda" or a.kernels
    return [r for r in table if (r.name in asked if asked else not r.asked and (here or not r.gpu))]


def peers_read(path):
    if path is None:
        return {}
    try:
        with open(path) as f:
            got = json.load(f)
        bad = [k for k, v in got.items() if k not in PEER or not isinstance(v, (int, float)) or v <= 0]
    except (OSError, ValueError, AttributeError) as e:
        stop(f"--peer {path}: {e}")
    if bad:
        stop(f"--peer {path}: {', '.join(bad)}: wanted are numbers of {', '.join(PEER)}")
    return got


def list_rows(session, table):
    for row in table:
        note = " (only if it is named)" if row.asked else ""
        say(f"{row.name}: about {sum(session.runs[n].seconds for n in row.runs)} s{note}\n    {session.command(row)}")
        for bar in row.bars:
            peer = f", vLLM {report.number(PEER[bar.peer], bar.unit)} ({bar.peer})" if bar.peer else ""
            aim = f", aim {report.limit(bar, bar.aim)}" if bar.aim is not None else ""
            say(f"    {bar.what}: {report.limit(bar, bar.bar)}{aim}{peer}")
    for name, text in session.names.items():
        say(f"{name}: {text}")


def main():
    a = words()
    place = Place(a.spind or default_spind(), a.kernels, a.out)
    default_model = a.default_model or place.model("smollm2-135m")
    setting = Setting(a.model or place.model("llama-3.1-8b"), default_model, a.device, a.small, a.ids, a.kv_dram,
                      shlex.split(a.also))
    session = Session(place, setting, a, default_model)
    wanted = chosen(session.rows, a)
    if a.list:
        return list_rows(session, wanted if a.only else session.rows)
    if a.device == "cuda" and gpu() is None:
        stop("no GPU here (nvidia-smi finds none): the bars are measured on one; --device cpu --small tries the machinery")
    read = peers_read(a.peer)
    os.makedirs(place.out, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bars: ended from outside"))
    got = measure_all(session, wanted, read)
    say(f"\n{report.summary(got)}; {place.file('bars.md')}")
    return got["status"]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os._exit(2)
