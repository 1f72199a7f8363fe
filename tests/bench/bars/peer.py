"""vLLM on the same machine in the same run, by the scripts that its numbers were first taken with.

--vllm DIR names a folder with vllm_longctx.py and vLLM's packages, beside it or in DIR/site (pack-vllm.sh makes the
parts; they are unpacked as its README says). Only what the chosen rows are held against is run: one engine for the cells
and Poisson (vllm_child.py), another for the sessions, and its server for what is measured through HTTP."""
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import runs

CELLS = {"step_ms/1x8192": "1x8192", "prefill_s/65536": "1x65536", "prefill_s/130000": "1x130000", "tok_s/1x130000": "1x130000",
         "tok_s/6x130000": "6x130000", "tok_s/12x65536": "12x65536", "tok_s/64x8192": "64x8192"}
SECONDS = {"1x8192": 3, "1x65536": 6, "1x130000": 14, "64x8192": 35, "12x65536": 60, "6x130000": 85}
MEASURED = {*CELLS, "start_s", "poisson_ttft_s", "poisson_tpot_ms", "sessions_ttft2_s", "sessions_ttft3_s", "sessions_s"}
HTTP = {"stream": "stream_tok_s", "streams-256": "streams_tok_s"}  # by the row that has the load
START_S, POISSON_S, SESSIONS_S, RATE = 45, 175, 275, "0.15"


def wanted(keys):
    """(words of vllm_child.py, whether the sessions are run, about how many seconds)"""
    cells = [c for c in SECONDS if any(CELLS.get(k) == c for k in keys)]
    poisson = any(k.startswith("poisson_") for k in keys)
    sessions = any(k.startswith("sessions_") for k in keys)
    words = cells + ["poisson=" + RATE] * poisson
    seconds = START_S * bool(words or "start_s" in keys) + sum(SECONDS[c] for c in cells) + POISSON_S * poisson + SESSIONS_S * sessions
    return words, sessions, seconds


def environment(folder):
    site = os.path.join(folder, "site")
    paths = [folder, *([site] if os.path.isdir(site) else []), os.environ.get("PYTHONPATH", "")]
    # Safe: our folder, with names that others may have too, stays off its path.
    return {**os.environ, "PYTHONPATH": ":".join(x for x in paths if x), "PYTHONSAFEPATH": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def results(path):
    """What the lines RESULT {..} of a log say, by our names."""
    out = {}
    with open(path, errors="replace") as f:
        found = [json.loads(x[7:]) for x in f if x.startswith("RESULT {")]
    for r in found:
        if r["what"] == "start":
            out["start_s"] = r["seconds"]
        elif r["what"] == "poisson":
            out.update(poisson_ttft_s=r["ttft_p50"], poisson_tpot_ms=r["tpot_p50_ms"])
        elif r["what"] == "sessions":
            out.update(sessions_ttft2_s=r["ttft_p50_turn2"], sessions_ttft3_s=r["ttft_p50_turn3"], sessions_s=r["seconds"])
        elif r["what"] == "cell" and "error" not in r:
            got = {"step_ms": r["step_ms"], "prefill_s": r["first_ttft"], "tok_s": r["decode_tok_s"]}
            cell = f"{r['B']}x{r['ctx']}"
            out.update({key: got[key.split("/")[0]] for key, of in CELLS.items() if of == cell})
    return out


def beside(place, folder, keys, found, say):
    """Puts vLLM's numbers into `found`. Why not all of them, or None."""
    cells, sessions, seconds = wanted(keys)
    if seconds == 0:
        return None
    say(f"vLLM, about {seconds} s")
    child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vllm_child.py")
    programs = [("vllm", [child, *cells])] * bool(cells or "start_s" in keys)
    programs += [("vllm-sessions", [os.path.join(folder, "vllm_longctx.py"), "sessions"])] * sessions
    for name, argv in programs:
        log = place.file(name + ".log")
        try:
            how = f"exit status {runs.run_logged([sys.executable, '-u', *argv], log, environment(folder), max(300, 2 * seconds))}"
        except runs.Failed as e:
            how = str(e).split("\n")[0]
        found.update(results(log))
        missing = sorted(k for k in keys & MEASURED if k not in found and k.startswith("sessions_") == (name == "vllm-sessions"))
        if missing:
            return f"vLLM: {how}, without {', '.join(missing)}\n{runs.last_lines(log)}"
    return None


@contextlib.contextmanager
def server(place, folder, model):
    """vLLM's own, on a description whose weights are made up. Prompts are ids, so it goes without a tokenizer. Its URL."""
    home, log = place.file("vllm-model"), place.file("vllm-http.log")
    os.makedirs(home, exist_ok=True)
    shutil.copy(model, os.path.join(home, "config.json"))
    with socket.create_server(("127.0.0.1", 0)) as s:
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", home, "--load-format", "dummy", "--skip-tokenizer-init",
            "--max-num-seqs", "256", "--host", "127.0.0.1", "--port", url.split(":")[2]]
    with open(log, "w") as f:
        p = subprocess.Popen(argv, stdout=f, stderr=f, stdin=subprocess.DEVNULL, env=environment(folder), start_new_session=True)
    try:
        until = time.monotonic() + 3 * START_S
        while not healthy(url):
            if p.poll() is not None or time.monotonic() > until:
                raise runs.Failed(f"its server did not get ready\n{runs.last_lines(log)}")
            time.sleep(0.1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):  # its engine is a process of its own
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()


def healthy(url):
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as f:
            return f.status == 200
    except OSError:
        return False


def load(place, url, table, keys, found):
    """What a server gives under the loads of our rows of the default model."""
    for name, of in HTTP.items():
        if of not in keys:
            continue
        run = table[name]
        for w in (run.warm, run.words):
            sheet = runs.spind(place, "vllm." + name, [w, "--url", url], runs.patience_of(run))
        found[of] = sheet["output_tokens_per_s"]
        if name == "stream":
            found["stream_ttft_ms"] = sheet["rows"][-1]["ttft_p50_ms"]


def through_http(session, keys, found):
    """The same of a server that runs already, or of one of ours. Why not, or None."""
    place, a = session.place, session.a
    try:
        if a.vllm_url:
            load(place, a.vllm_url, session.runs, keys, found)
        else:
            with server(place, os.path.abspath(a.vllm), session.default_model) as url:
                load(place, url, session.runs, keys, found)
    except (runs.Failed, OSError) as e:
        return f"vLLM through HTTP: {e}"
    return None


def measure(session, rows, say):
    """({key: number}, why not all, or None) of what those rows are held against."""
    found, place, a = {}, session.place, session.a
    keys = {bar.peer for row in rows for bar in row.bars if bar.peer}
    failures = [beside(place, os.path.abspath(a.vllm), keys, found, say) if a.vllm else None]
    if (a.vllm or a.vllm_url) and keys & set(HTTP.values()):
        say("vLLM through HTTP, about 60 s")
        failures.append(through_http(session, keys, found))
    if found:
        with open(place.file("peer.json"), "w") as f:
            json.dump(found, f, indent=1)
    return found, "\n".join(x for x in failures if x) or None
