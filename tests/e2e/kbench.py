"""tests/cuda/kbench, the collector behind `make kbench`, on programs that print what benches print."""
import os
import subprocess
import tempfile

from _server import done, ok

COLLECTOR = os.path.join(os.path.dirname(__file__), "..", "cuda", "kbench")


def run(*programs):
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, text in enumerate(programs):
            paths.append(os.path.join(folder, f"bench_{i}"))
            with open(paths[-1], "w") as f:
                f.write("#!/bin/bash\n" + text)
            os.chmod(paths[-1], 0o755)
        table = os.path.join(folder, "table.md")
        p = subprocess.run([COLLECTOR, "--markdown", table, *paths], capture_output=True, text=True, timeout=60,
                           env={**os.environ, "KBENCH_S": "2"})
        return p.returncode, p.stdout, p.stderr, open(table).read()


GOOD = 'echo noise; echo "kbench attend B8/131072 258.3 4159GB/s 4275GB/s 97.3%"\n'
MORE = 'echo "kbench gather 128x8KiB 28.10 37GB/s 51GB/s 72.8%"; echo "kbench gather one 23.00 - 23.00us 100.0%"\n'

rc, out, err, table = run(GOOD, MORE)
ok(rc == 0 and [line.split() for line in out.splitlines()] == [
    ["kernel", "shape", "us", "reached", "limit", "share"],
    ["attend", "B8/131072", "258.3", "4159GB/s", "4275GB/s", "97.3%"],
    ["gather", "128x8KiB", "28.10", "37GB/s", "51GB/s", "72.8%"],
    ["gather", "one", "23.00", "-", "23.00us", "100.0%"]], "one table of all", out)
ok("| gather | one | 23.00 | - | 23.00us | 100.0% |\n" in table and table.count("\n") == 5, "and as Markdown", table)
rc, out, err, _ = run(GOOD + "exit 3", MORE)
ok(rc == 1 and "failed (3)" in err and "gather" in out, "a bench that fails fails it; the others are shown", err)
rc, out, err, _ = run("echo nothing to say", MORE)
ok(rc == 1 and "bench_0 has no result" in err, "so does one that says nothing", err)
rc, out, err, _ = run('echo "kbench attend B8 / 13 1.0 5GB/s 10GB/s 50%"\n' + GOOD)
ok(rc == 1 and "not six words" in err, "and a line that is none", err)
rc, out, err, _ = run(GOOD + "sleep 9")
ok(rc == 1 and "failed (124)" in err, "and one that does not end", err)
done()
