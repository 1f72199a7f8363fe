"""tests/cuda/sanitize with a tool in the place of compute-sanitizer that prints what it is asked: which kernels are
looked at, what is said of a program that fails, and that no kernel of ours is forgotten."""
import glob
import os
import re
import shutil
import subprocess
import tempfile

from _server import done, equal, ok

ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
SCRIPT = os.path.join(ROOT, "tests", "cuda", "sanitize")
TOOL = """#!/bin/bash
printf '%s\\n' "$*" >> "$ASKED"
program=${*: -1}
echo 'ok 1 - a case'; echo '========= RACECHECK SUMMARY: 0 hazards displayed'
case "$program $*" in *seal*bisect_cluster*) echo '========= Race reported'; exit 99 ;; *slow*) sleep 9 ;; esac
exit 0
"""


def sanitize(*programs, **env):
    """(exit status, output, what the tool was asked, in order)"""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(SCRIPT, folder)
        os.makedirs(os.path.join(folder, "tests", "cuda"))
        for name, text in (("spind", ""), ("compute-sanitizer", TOOL), ("tests/cuda/libproducts.so", "")):
            with open(os.path.join(folder, name), "w") as f:
                f.write(text)
            os.chmod(f.name, 0o755)
        asked = os.path.join(folder, "asked")
        p = subprocess.run([os.path.join(folder, "sanitize"), *programs], capture_output=True, text=True, timeout=60,
                           env={**os.environ, "PATH": folder + ":" + os.environ["PATH"], "ASKED": asked, **env})
        return p.returncode, p.stdout, sorted(open(asked).read().splitlines())


def only(line):
    return re.findall(r"--kernel-name (\S+)", line)


rc, out, asked = sanitize("select", "seal")
ok(rc == 0 and len(asked) == 4 and all(only(x) == [] and "--kernel-name-exclude kns=cublas" in x for x in asked),
   "two tools over each program, and no kernel of a library", out, asked)
ok(out.count(" clean\n") == 4 and len(re.findall(r"^(memcheck|racecheck) +(select|seal) .* 1 cases", out, re.M)) == 4, "a line for each", out)
rc, out, asked = sanitize("seal", TOOLS="racecheck", KERNELS="move_kernel regex=^_Z.*codes", OPTIONS="--racecheck-memcpy-async no")
equal(only(asked[0]), ["kns=move_kernel", "regex=^_Z.*codes"], "kernels by name, or as the tool has it", asked)
ok(len(asked) == 1 and "exclude" not in asked[0] and "--racecheck-memcpy-async no" in asked[0] and "--tool racecheck" in asked[0],
   "one tool, with more words", asked)
rc, out, asked = sanitize("seal", TOOLS="racecheck", EACH="1", KERNELS="move_kernel bisect_cluster codes_kernel")
equal([only(x) for x in asked], [["kns=bisect_cluster"], ["kns=codes_kernel"], ["kns=move_kernel"]], "each kernel by itself")
ok(rc == 1 and re.search(r"racecheck +seal bisect_cluster .* exit 99: RACECHECK SUMMARY", out) and out.count("clean") == 2
   and "Race reported" in out, "the one that fails is named, with what was found", out)
rc, out, asked = sanitize("linear", TOOLS="racecheck", PLAIN="1")
ok(rc == 0 and re.search(r"--preload-library /\S+/tests/cuda/libproducts.so /\S+/linear$", asked[0]), "products by a plain kernel", asked)
rc, out, asked = sanitize("slow", TOOLS="memcheck", SECONDS_EACH="1")
ok(rc == 1 and "not finished in 1 s" in out, "what does not end is said", out)

rc, out, asked = sanitize("seal", TOOLS="memcheck", KERNELS="ours")
named = {x[4:] for x in only(asked[0])}
there = set()
for path in glob.glob(os.path.join(ROOT, "kernels", "cuda", "*.cu")) + glob.glob(os.path.join(ROOT, "kernels", "cuda", "*.h")):
    with open(path) as f:
        for text in f.read().split("__global__")[1:]:
            declared = re.sub(r"__(launch_bounds|cluster_dims)__\((?:[^()]|\([^()]*\))*\)", "", text)
            there.add(re.match(r"\s*(?:static\s+)?void\s+([a-z_0-9]+)\(", declared).group(1))
equal(there - named, set(), "every kernel of kernels/cuda is in its list", named - there)
ok(len(there) > 30, f"of {len(there)}", there)
done()
