"""Rows, one after the other: their runs, which several rows may share, what came of them, and the report after each."""
import time

import peer
import report
import runs
from place import Clocks
from rows import PEER, Missing, rows, runs as table_of_runs


def say(text):
    print(text, flush=True)


class Session:
    """What was run so far. outcomes: by row, a line's number with a note, or why there is none."""

    def __init__(self, place, setting, a, default_model):
        self.place, self.a, self.setting, self.default_model = place, a, setting, default_model
        self.rows, self.runs = rows(setting), table_of_runs(setting)
        self.got, self.failed, self.clocks_of, self.outcomes = {}, {}, {}, {}
        self.names = {n: " ".join(runs.flat(w)) for n, w in setting.names().items()}
        self.began, self.clocks = time.monotonic(), None

    def seconds_of(self, row):
        return sum(self.runs[n].seconds for n in row.runs if n not in self.got and n not in self.failed)

    def command(self, row):
        return "; ".join(runs.command(self.runs[n], self.setting.names()) for n in row.runs)

    def run(self, name):
        at = self.clocks.here()
        try:
            self.got[name] = runs.perform(self.place, name, self.runs[name], lambda x: say("    " + x))
        except (runs.Failed, OSError, ValueError) as e:
            self.failed[name] = f"{name}: {e}"
        self.clocks_of[name] = self.clocks.since(at)

    def read(self, row, bar):
        """A line's outcome."""
        why = [self.failed[n] for n in row.runs if n in self.failed]
        out = {"clocks": self.clocks_of[row.runs[-1]]}
        try:
            if why:
                raise Missing("\n".join(why))
            value, note = bar.read(self.got)
            return {**out, "value": value, "note": note}
        except (Missing, KeyError) as e:
            return {**out, "verdict": "failed", "why": f"there is no {e}" if isinstance(e, KeyError) else str(e)}

    def measure(self, row):
        seconds = self.seconds_of(row)
        spent = time.monotonic() - self.began
        if self.a.seconds and spent + seconds > self.a.seconds:
            why = f"its {seconds} s do not fit into --seconds {self.a.seconds:g} after {spent:.0f}"
            self.outcomes[row.name] = [{"verdict": "left out", "why": why}] * len(row.bars)
            return
        say(f"{row.name}, about {seconds} s")
        for name in row.runs:
            if name not in self.got and name not in self.failed:
                self.run(name)
        self.outcomes[row.name] = [self.read(row, bar) for bar in row.bars]

    def lines(self, wanted, peers):
        """The table as it is by now."""
        not_yet = {"verdict": "left out", "why": "it did not come to it"}
        return [report.line(row, bar, self.command(row), self.outcomes.get(row.name, [not_yet] * len(row.bars))[i], peers)
                for row in wanted for i, bar in enumerate(row.bars)]

    def measured(self, wanted):
        return [r for r in wanted if any("value" in x for x in self.outcomes[r.name])]


def tell(lines):
    for x in lines:
        say(f"  {x['what']}: {report.text(x)}")
        for y in x["why"].split("\n")[1:] if x["verdict"] == "failed" else []:
            say("    " + y)


def measure_all(session, wanted, read):
    """The report, which is also kept in files as far as it has come: a lent machine may go."""
    about = {"before": session.place.describe(), "failures": []}
    peers = report.peers_of(PEER, read, {})
    for name, value in about["before"].items():
        say(f"{name}: {value}")
    session.clocks = Clocks(session.place)
    try:
        for row in wanted:
            session.measure(row)
            tell(session.lines([row], peers))
            report.write(session.place, about, session.lines(wanted, peers), session.names)
        found, failure = peer.measure(session, session.measured(wanted), say)
    finally:
        session.clocks.stop()
    if failure:
        say(failure)
        about["failures"].append(failure)
    if found:
        peers = report.peers_of(PEER, read, found)
        tell(session.lines(session.measured(wanted), peers))
    about["after"] = session.place.describe()
    lines = session.lines(wanted, peers)
    report.write(session.place, about, lines, session.names)
    return {**about, "bars": lines, "status": report.status(about, lines)}
