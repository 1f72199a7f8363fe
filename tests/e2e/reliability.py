"""docs/reliability.md holds what it says: each row of the failure table is there once, each test that it names is in the
tree with that very sentence, the counts at its top are right, and its numbers are the code's. And what a row promises
by never calling something (A5, A7, B3, B5, C10, H5) is not called.

The binary: SPIND, else spind of the build (SPIND_BUILD)."""
import ast
import json
import os
import re
import subprocess

import _spind  # noqa: F401  says which binary
import _server
from _server import clean_env, done, equal, ok

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
ROWS = {"A": 16, "B": 9, "C": 13, "D": 10, "E": 11, "F": 9, "G": 10, "H": 9}  # reference/reliability.md 1
STATES = {"tested": "tested", "tested in part": "tested in part", "no test": "without a test", "not here": "not here"}
DAEMON = ("server", "api", "engine", "cache", "sparse", "kernels")
TOOLS = ("engine/tool/", "api/load/")  # verbs of their own, not the daemon
NEVER = {  # what would break a promise: a pattern, and the files that may
    "A5: nobody makes llhttp lenient": (r"llhttp_set_lenient", ()),
    "A7: nobody takes stack by a length": (r"\balloca\s*\(", ()),
    "B3: nobody walks an array by index": (r"\bcJSON_GetArrayItem\s*\(", ()),
    "B5: nobody reads a number that cJSON made an int": (r"\bvalueint\b", ()),
    "C10: nobody connects or runs a program": (r"\b(connect|system|popen|fork|vfork|posix_spawnp?|exec[vl]p?e?)\s*\(", ()),
    "H5: the wall clock is read for dates, the log and when keys expire": (
        r"\bCLOCK_REALTIME\b|\bgettimeofday\s*\(|\btime\s*\((NULL|&)",
        ("server/serve.c", "api/admit.c", "api/api.c", "api/metrics.c", "api/call.c", "kernels/log.c")),
}
C_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def text_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def c_sentences(text):
    """The strings of a C file, pieces joined, with … for what is filled in."""
    found, end = [], 0
    for m in C_TOKEN.finditer(text):
        if not m.group().startswith('"'):
            continue
        if found and not text[end:m.start()].strip():
            found[-1] += m.group()[1:-1]
        else:
            found.append(m.group()[1:-1])
        end = m.end()
    return {re.sub(r"%[-+ 0-9.*]*(?:ll|l|z)?[a-zA-Z]", "…", s).replace('\\"', '"').replace("%%", "%") for s in found}


def py_sentences(text):
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


_sentences = {}


def sentences(path):
    if path not in _sentences:
        text = text_of(path)
        _sentences[path] = py_sentences(text) if path.endswith(".py") else c_sentences(text)
    return _sentences[path]


def tables(page):
    """The cells of each row of each table, and the section that it is in."""
    section = None
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        if line.startswith("| ") and not line.startswith("|---"):
            yield section, [cell.strip() for cell in line.strip("|").split("|")]


def named(cell):
    """(file, sentence) for each case that a cell names."""
    for part in cell.split("missing:")[0].split("; "):
        found = re.match(r'`(tests/\S+)` "', part)
        if found:
            for sentence in re.findall(r'"((?:[^"])*)"', part):
                yield found.group(1), sentence


def fault_of(cells):
    """What is wrong with a row of the failure table, or None."""
    if len(cells) != 5:
        return f"{len(cells)} cells"
    _, promise, _, state, tests = cells
    cases = list(named(tests))
    if state not in STATES:
        return f"state {state!r}"
    if state.startswith("tested") != bool(cases):
        return f"{state}, with {len(cases)} cases"
    if (state == "tested in part") != ("missing:" in tests):
        return f"{state}, and missing is {'there' if 'missing:' in tests else 'not there'}"
    if not tests or (state.startswith("tested") and not promise):
        return "an empty cell"
    for path, sentence in cases:
        if not os.path.exists(os.path.join(ROOT, path)):
            return f"there is no {path}"
        if sentence not in sentences(path):
            return f"{path} has no case {sentence!r}"
    return None


def failure_table(page, rows):
    want = [letter + str(i + 1) for letter, n in ROWS.items() for i in range(n)]
    equal([cells[0] for cells in rows], want, "each row of the failure table is there, once and in order")
    for cells in rows:
        fault = fault_of(cells)
        ok(fault is None, f"{cells[0]}: what it names is in the tree", fault)
    count = {state: sum(cells[3] == state for cells in rows) for state in STATES}
    line = f"{len(rows)} rows: " + ", ".join(f"{count[s]} {STATES[s]}" for s in STATES) + "."
    ok(line in page.split("\n## ")[0], f"the counts at the top are right: {line}")


def bounds(rows):
    shipped = json.loads(subprocess.run([_server.BINARY, "serve", "--print-config"], capture_output=True, check=True,
                                        env=clean_env()).stdout)
    flags = [c for c in rows if c[1].startswith("`--")]
    codes = [c for c in rows if re.match(r"`\w+/", c[1])]
    ok(len(flags) > 10 and len(codes) > 10, "both tables of bounds are there", len(flags), len(codes))
    wrong = [(flag, default, shipped.get(flag.strip("`-"), "no such option")) for _, flag, default, _ in flags
             if default != str(shipped.get(flag.strip("`-"), "no such option"))]
    equal(wrong, [], "the defaults of flags are those that the daemon prints")
    wrong = [(path, number) for _, path, number, _ in codes if number.strip("`") not in text_of(path.strip("`"))]
    equal(wrong, [], "the numbers of the code are in the files that are named")


def is_never_called():
    code = {}
    for folder in DAEMON:
        for where, _, names in os.walk(os.path.join(ROOT, folder)):
            for name in names:
                path = os.path.relpath(os.path.join(where, name), ROOT)
                if name.endswith((".c", ".h", ".cu")) and not path.startswith(TOOLS):
                    code[path] = C_TOKEN.sub(" ", text_of(path))
    ok(len(code) > 150, f"{len(code)} files of the daemon are read", sorted(code)[:5])
    for promise, (pattern, may) in NEVER.items():
        found = {path for path, text in code.items() if re.search(pattern, text)}
        equal((sorted(found - set(may)), [p for p in may if p not in found]), ([], []), promise)


def main():
    page = text_of("docs/reliability.md")
    rows = list(tables(page))
    failure_table(page, [cells for _, cells in rows if re.fullmatch(r"[A-H]\d+", cells[0])])
    is_never_called()
    bounds([cells for section, cells in rows if section == "What is bounded" and len(cells) == 4])
    done()


main()
