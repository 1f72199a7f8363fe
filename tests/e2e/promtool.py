"""What docs/ops gives to operators is true of the daemon: promtool reads /metrics, the alerts and every query of the
dashboard, whose metrics are those that are served; and systemd reads the unit.

The binary: SPIND, else spind of the build (SPIND_BUILD). promtool: on the PATH, or configs/setup/promtool.sh fetched it."""
import json
import os
import re
import shutil
import subprocess
import tempfile

from _server import done, equal, ok, skip
from _spind import CACHE, ask, chat, complete, cstream, get, mock

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
OPS = os.path.join(ROOT, "docs", "ops")
PROMTOOL = shutil.which("promtool") or os.path.join(CACHE, "promtool")
SCRAPED = {"up"}  # what Prometheus itself knows of whom it scrapes
# vLLM's own names, which its dashboards ask for: a histogram that ends like a counter.
OF_VLLM = ['vllm_iteration_tokens_total non-counter metrics should not have "_total" suffix']
EXPOSURE = 1.5  # of systemd's 0 to 10; this unit has 1.0 in systemd 252


def text_of(name):
    with open(os.path.join(OPS, name), encoding="utf-8") as f:
        return f.read()


def promtool(*args, page=None):
    got = subprocess.run([PROMTOOL, "check", *args], input=page, capture_output=True, timeout=60)
    return got.returncode, (got.stdout + got.stderr).decode()


def metrics_page():
    server = mock()
    complete(server, "hi", max_tokens=2)
    cstream(server, "hi", max_tokens=2)
    chat(server, "hi", max_tokens=2)
    ask(server, "/v1/completions", {"prompt": 5})
    get(server, "/nope")
    page = get(server, "/metrics").body
    equal(server.stop(), 0, "the server ends well")
    return page


def is_read(page):
    """promtool says 1 for what it cannot read, 3 for what it would have named otherwise. Colons are vLLM's."""
    code, said = promtool("metrics", page=page)
    lines = [line for line in said.splitlines() if not line.endswith("metric names should not contain ':'")]
    equal((code, [line.replace("vllm:", "vllm_") for line in lines]), (3, OF_VLLM),
          "promtool reads /metrics, and has only vLLM's names against it")
    code, said = promtool("metrics", page=page.replace(b"vllm:", b"vllm_"))
    equal((code, said.splitlines()), (3, OF_VLLM), "without their colons, of just one")
    code, said = promtool("metrics", page=page.replace(b"# TYPE spind_steps_total counter", b"# TYPE spind_steps_total gauge"))
    ok("spind_steps_total" in said, "and it would have had more")


def queries():
    """Every query of the dashboard, by its panel, as Prometheus gets it: with its variables filled in."""
    board = json.loads(text_of("grafana.json"))
    found = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
    variables = [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    return [(title, expr.replace("$__rate_interval", "5m").replace("$instance", ".*")) for title, expr in found], variables


def rules(panels):
    code, said = promtool("rules", os.path.join(OPS, "alerts.yml"))
    n = len(re.findall(r"- alert: ", text_of("alerts.yml")))
    ok(code == 0 and f"{n} rules found" in said and n >= 10, f"promtool takes the {n} alerts", said)
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "board.yml")
        with open(path, "w", encoding="utf-8") as f:
            json.dump({"groups": [{"name": "board",
                                   "rules": [{"record": f"panel:{i}", "expr": expr} for i, (_, expr) in enumerate(panels)]}]}, f)
        code, said = promtool("rules", path)
    ok(code == 0 and f"{len(panels)} rules found" in said and len(panels) >= 20, f"and the dashboard's {len(panels)} queries", said)


def names_in(expr):
    """The metrics that a query asks for: words that are no function, no label and no text."""
    bare = re.sub(r"(?:by|on|without|ignoring)\s*\([^)]*\)", " ", re.sub(r'"[^"]*"', '""', expr))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    return {w for w in re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\(|[a-zA-Z0-9_:])", bare)
            if w not in ("and", "or", "unless", "by", "on", "bool")}


def are_served(page, panels, variables):
    served = set(re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)[{ ]", page.decode(), re.M)) | SCRAPED
    alerts = re.findall(r"^ +expr: (.*)$", text_of("alerts.yml"), re.M)
    asked = {"alerts.yml": set().union(*map(names_in, alerts)), "grafana.json": set().union(*(names_in(e) for _, e in panels))}
    asked["grafana.json"] |= {re.match(r"label_values\((\w+),", v).group(1) for v in variables}
    for name, metrics in asked.items():
        equal(sorted(metrics - served), [], f"/metrics serves each of the {len(metrics)} metrics that {name} asks for")
        ok(len(metrics) > 8 and any(m.startswith("vllm:") for m in metrics), f"of which {name} has many", metrics)


def unit():
    """systemd looks for the program that a unit names, which is not installed here."""
    if shutil.which("systemd-analyze") is None:
        skip("systemd takes the unit", "systemd-analyze is not installed")
        return
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "spind.service")
        for drop_in in False, True:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text_of("spind.service").replace("/opt/spind/spind", "/bin/true"))
            if drop_in:
                os.mkdir(path + ".d")
                shutil.copy(os.path.join(OPS, "gpu.conf"), path + ".d")
            shown = "the unit for a GPU" if drop_in else "the unit"
            got = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
            if "Failed to initialize manager" in got.stderr or "not been booted" in got.stderr:
                skip(f"systemd takes {shown}", got.stderr.splitlines()[0])
                continue
            about_us = [line for line in got.stderr.splitlines() if "spind" in line]
            equal((got.returncode, about_us), (0, []), f"systemd takes {shown}")
            said = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", path], capture_output=True, text=True,
                                  timeout=60).stdout
            score = re.search(r"Overall exposure level for spind.service: ([0-9.]+)", said)
            ok(score and float(score.group(1)) <= EXPOSURE, f"{shown} exposes little: {score.group(1) if score else said[-200:]} of 10")


def main():
    page = metrics_page()
    panels, variables = queries()
    are_served(page, panels, variables)
    if os.access(PROMTOOL, os.X_OK):
        is_read(page)
        rules(panels)
    else:
        skip("promtool reads /metrics", "promtool is not here: configs/setup/promtool.sh")
    unit()
    done()


main()
