"""The bars' commands at their real size, on a GPU that computes nothing (tests/cuda/dry/runtime.c): that a context, a
batch or an option is refused should not be learned on a machine that is lent for minutes."""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "e2e"))
from _server import BUILD, done, equal, ok  # noqa: E402

BARS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "bars")
ROWS = ("dense", "prefill-64k", "prefill-130k", "sparse-1x130k", "sparse-6x130k", "sparse-12x64k", "sparse-64x8k", "host", "long", "start")

with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "nvidia-smi"), "w") as f:
        f.write("#!/bin/sh\necho 'a GPU that computes nothing'\n")
    os.chmod(f.name, 0o755)
    out = os.path.join(folder, "out")
    library = os.path.abspath(os.path.join(BUILD, "tests", "cuda", "dry", "libspind_cuda.so"))
    # The host here may have little memory: the second tier is the one thing that is smaller than it will be.
    p = subprocess.run([sys.executable, BARS, "--spind", os.path.join(BUILD, "spind"), "--out", out, "--only", ",".join(ROWS),
                        "--kv-dram", "1GiB"], capture_output=True, text=True, timeout=300,
                       env={**os.environ, "PATH": folder + ":" + os.environ["PATH"], "SPIND_CUDA_LIBRARY": library})
    with open(os.path.join(out, "bars.json")) as f:
        lines = json.load(f)["bars"]
    equal([x["row"] for x in lines], list(ROWS), "every row was run", p.stdout, p.stderr)
    for x in lines:
        ok("value" in x and x["value"] > 0, f"{x['row']} is taken as it is", x.get("why"))
    with open(os.path.join(out, "long.json")) as f:
        cells = json.load(f)["rows"]
    equal([(r["context"], r["selected_rows"], r["running"], r["spilled"]) for r in cells], [(131072, 2608, 1, 0), (1000000, 20000, 1, 0)],
          "a million positions lie in HBM", cells)
    with open(os.path.join(out, "sparse-64x8k.json")) as f:
        cell = json.load(f)["rows"][0]
    ok((cell["batch"], cell["context"], cell["selected_rows"], cell["spilled"]) == (64, 8192, 1024, 0) and cell["planned_rows"] >= 64 * 64,
       "64 sequences select 1,024 rows of 8,192", cell)
done()
