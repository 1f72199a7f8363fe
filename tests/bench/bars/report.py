"""What a number means against its bar, and the table as bars.md and bars.json."""
import json

from rows import PEER_SOURCE

COLUMNS = ("what", "vLLM", "bar", "aim", "spind", "bound by", "command")


def number(x, unit):
    if unit.startswith("of "):
        return f"{x:g} {unit}"
    digits = f"{x:,.0f}" if abs(x) >= 200 else f"{x:.1f}" if abs(x) >= 20 else f"{x:.2f}" if abs(x) >= 0.1 else f"{x:.3g}"
    return digits + ("" if unit == "×" else " ") + unit


def limit(bar, x):
    """The cell of a bar or an aim."""
    unit = "×" if bar.times or bar.unit == "×" else " " + bar.unit
    return "" if x is None else f"{bar.sign} {x:g}{unit}"


def within(bar, value, x, peer):
    most = x * peer if bar.times else x
    return {"≤": value <= most, "<": value < most, "≥": value >= most}[bar.sign]


def line(row, bar, command, outcome, peers):
    """A line of the table."""
    peer, source = peers.get(bar.peer, (None, None))
    out = {"row": row.name, "what": bar.what, "unit": bar.unit, "peer": peer, "peer_source": source, "bar": limit(bar, bar.bar),
           "aim": limit(bar, bar.aim), "command": command, **outcome}
    if "value" in out:
        met = within(bar, out["value"], bar.bar, peer)
        aim = bar.aim is not None and within(bar, out["value"], bar.aim, peer)
        out["verdict"] = "aim" if aim else "met" if met else "missed"
    if "value" in out and peer:
        out["ratio"] = out["value"] / peer
    return out


def text(out):
    """The cell with our number, or why there is none."""
    if "value" not in out:
        return f"{out['verdict']}: {out['why']}".split("\n")[0]
    ratio = f" ({out['ratio']:.3g}×)" if "ratio" in out else ""
    ours = number(out["value"], out["unit"]) + ratio
    ours = f"**{ours}**" if out["verdict"] == "missed" else ours
    return f"{ours}, {out['verdict']}" + (f": {out['note']}" if out["note"] else "")


def status(about, lines):
    """2: something failed, or nothing was measured; 1: a bar was missed; 0."""
    verdicts = [x["verdict"] for x in lines]
    if about["failures"] or "failed" in verdicts or set(verdicts) <= {"left out"}:
        return 2
    return 1 if "missed" in verdicts else 0


def summary(report):
    verdicts = [x["verdict"] for x in report["bars"]]
    n = {v: verdicts.count(v) for v in ("aim", "met", "missed", "failed", "left out")}
    return (f"{n['aim'] + n['met']} of {len(verdicts)} bars met, {n['aim']} of them with their aim; {n['missed']} missed, "
            f"{n['failed']} failed, {n['left out']} left out")


def cells(out):
    peer = "" if out["peer"] is None else number(out["peer"], out["unit"])
    return out["what"], peer, out["bar"], out["aim"], text(out), out.get("clocks", ""), f"`{out['command']}`"


def markdown(about, lines, names):
    first = about["before"]
    rows = ["# The bars", ""]
    rows += [f"- {when}: {about[when]['date']}, {about[when]['gpu']}" for when in ("before", "after") if when in about]
    rows += [f"- {first['host']}, {first['cpu']}; {first['spind']}, commit {first['commit']}"]
    rows += [f"- `{name}`: `{words}`" for name, words in names.items()]
    rows += [f"- vLLM: {source}" for source in sorted({x["peer_source"] for x in lines if x["peer_source"]})]
    rows += ["- " + x.split("\n")[0] for x in about["failures"]]
    rows += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows += ["| " + " | ".join(x.replace("|", "\\|") for x in cells(out)) + " |" for out in lines]
    return "\n".join(rows) + "\n"


def write(place, about, lines, names):
    with open(place.file("bars.json"), "w") as f:
        json.dump({**about, "names": names, "status": status(about, lines), "bars": lines}, f, indent=1, ensure_ascii=False)
        f.write("\n")
    with open(place.file("bars.md"), "w") as f:
        f.write(markdown(about, lines, names))


def peers_of(table, read, beside):
    """{key: (number, where it is from)}: what was measured beside wins over a file, that over the constants."""
    out = {k: (v, PEER_SOURCE) for k, v in table.items()}
    out.update({k: (v, "measured on this machine, --peer") for k, v in read.items()})
    out.update({k: (v, "measured beside, in this run") for k, v in beside.items()})
    return out
