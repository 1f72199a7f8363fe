"""`spind inspect`: of flags, against the arithmetic of DESIGN 2 written once more; of a server that runs,
against its /metrics. On the mock device, which has the shape of the default model.

The binary: SPIND, else spind of the build (SPIND_BUILD)."""
import os
import re
import subprocess

import _server
from _server import clean_env, done, equal, ok, skip
from _spind import MODEL, PATIENCE, complete, metrics, mock

LAYERS, KV_HEADS, DIM, R, SEGMENT, TAIL = 30, 3, 64, 16, 1024, 64
SINKS, RECENT = 16, 128
ROW = DIM * 2 * 2  # bytes of K and V of a position in a lane, bf16
MIB = 1 << 20


def inspect(*args, code=0):
    got = subprocess.run([_server.BINARY, "inspect", *args], env=clean_env(), capture_output=True, text=True, timeout=PATIENCE)
    ok(got.returncode == code, f"inspect {' '.join(args)[:60]} ends with {code}", got.returncode, got.stderr)
    return got.stdout if code == 0 else got.stderr


def numbers(text, pattern, name):
    found = re.search(pattern, text)
    ok(found is not None, f"there is a line of {name}", text)
    return [float(x) for x in found.groups()] if found else None


def arena(text, lanes):
    """lanes, R, KiB of a block; blocks and GiB of HBM, tokens; blocks and GiB of DRAM"""
    return numbers(text, rf"{lanes}: (\d+) lanes, blocks of (\d+) positions, ([\d.]+) KiB; HBM tier (\d+) blocks, ([\d.]+) GiB, "
                         r"(\d+) tokens; DRAM tier (\d+) blocks, ([\d.]+) GiB", lanes)


def near(got, want, digit):
    return abs(got - want) <= 0.5 * digit + 1e-9


def one_class():
    text = inspect("--device", "mock", "--max-model-len", "2048", "--max-num-seqs", "2", "--kv-hbm", "100M", "--kv-dram", "300M",
                   "--sparse-exempt-layers", "0")
    block = LAYERS * KV_HEADS * R * ROW
    lanes, r, kib, up, up_gib, tokens, down, down_gib = arena(text, "KV cache")
    equal((lanes, r, kib), (LAYERS * KV_HEADS, R, block / 1024), "lanes, positions and bytes of a block")
    equal((up, down), (100 * MIB // block, 300 * MIB // block), "whole blocks, as many as the tiers have room for")
    equal(tokens, up * R, "their positions")
    ok(near(up_gib, up * block / (1 << 30), 0.01) and near(down_gib, down * block / (1 << 30), 0.01), "and bytes", text)


def pages_of_fp8():
    same = ("--device", "mock", "--max-model-len", "2048", "--max-num-seqs", "2", "--kv-hbm", "100M", "--sparse-exempt-layers", "0")
    wide, narrow = (inspect(*same, "--kv-cache-dtype", t) for t in ("bf16", "fp8"))
    ok("K and V are kept as fp8_e4m3" in narrow and "are kept" not in wide, "pages of fp8 are said", narrow)
    equal(arena(narrow, "KV cache")[2], arena(wide, "KV cache")[2] / 2, "their blocks have half the bytes")
    equal(arena(narrow, "KV cache")[3], 100 * MIB // (LAYERS * KV_HEADS * R * ROW // 2), "there are twice as many")


def two_classes():
    hbm, dram, length = 256 * MIB, 512 * MIB, 4096
    text = inspect("--device", "mock", "--max-model-len", str(length), "--max-num-seqs", "4", "--kv-hbm", str(hbm), "--kv-dram", str(dram),
                   "--sparse", "wave", "--sparse-budget", "0.05", "--sparse-exempt-layers", "2")
    sparse, dense = arena(text, "SPARSE lanes"), arena(text, r"DENSE lanes \(exempt from selection\)")
    equal((sparse[0], dense[0]), ((LAYERS - 2) * KV_HEADS, 2 * KV_HEADS), "two layers of lanes are exempt")
    units = [n * R * ROW for n in (sparse[0], dense[0])]
    for tier, room, at in (("HBM", hbm, 3), ("DRAM", dram, 6)):
        used = sparse[at] * units[0] + dense[at] * units[1]
        ok(room - sum(units) < used <= room, f"{tier} is used, and not more", used, room)
    segments, kib, gib = numbers(text, r"digests: room for (\d+) segments of 1024 positions, ([\d.]+) KiB each, ([\d.]+) GiB", "digests")
    equal(segments, (sparse[3] + sparse[6]) * R // SEGMENT + 1, "a record for every segment that can be stored")
    ok(near(gib, segments * kib / MIB, 0.01), "their bytes", text)
    more, = numbers(text, r"Maximum concurrency for 4096 tokens per request: ([\d.]+)x", "concurrency")
    ok(near(more, (sparse[3] + sparse[6]) * R / length, 0.01), "what both tiers hold of longest sequences", more)
    table, leaves, share = numbers(text, r"tables of a sequence of 4096 tokens: ([\d.]+) KiB of blocks; if spilled, leaves of ([\d.]+) KiB: "
                                         r"([\d.]+) %", "tables")
    equal((table, leaves), (3 * 4 * length / R / 1024, 2 * sparse[0] * -(-length // R // 512) * 512 / 1024),
          "ids of blocks in each class, and leaves of 512 pages in each lane")
    ok(near(share, 100 * (table + leaves) * 1024 / (length * LAYERS * KV_HEADS * ROW), 0.01), "their share of the KV", share)
    rows, slots, tail, mib = numbers(text, r"wave at 4096 tokens: (\d+) rows selected per lane; spilled it needs (\d+) HBM blocks of hot set "
                                           r"and (\d+) of tail, ([\d.]+) MiB", "wave")
    pages = int(0.05 * length) // R
    equal((rows, slots, tail), (pages * R, pages + SINKS // R, (SEGMENT + TAIL) // R), "budget, sinks and longest tail in whole pages")
    ok(near(mib, (slots + tail) * units[0] / MIB, 0.1), "what a spilled sequence needs", mib)


def rings():
    length = 8192
    text = inspect("--device", "mock", "--max-model-len", str(length), "--kv-hbm", "64M", "--head-policy", "streaming", "--max-num-seqs", "2",
                   "--head-policy-sinks", str(SINKS), "--head-policy-recent", str(RECENT))
    lanes = LAYERS * KV_HEADS
    equal(arena(text, r"STREAM lanes \(sinks and recent rows\)")[:3], [lanes, R, lanes * R * ROW / 1024], "all lanes are STREAM")
    now, whole = numbers(text, r"a sequence of 8192 tokens takes ([\d.]+) MiB of KV; ([\d.]+) MiB if all its lanes", "what is saved")
    kept = (SINKS + RECENT + 64) * lanes * ROW
    ok(near(now, kept / MIB, 0.1) and near(whole, length * lanes * ROW / MIB, 0.1), "sinks, recent rows and 64 more; or every row", now, whole)
    share, = numbers(text, r"leaves of 0.0 KiB: ([\d.]+) % of its KV", "tables")
    ok(near(share, 100 * 2 * 4 * length / R / kept, 0.01), "a table's share is of the rows kept", share)


def a_model():
    if not os.path.exists(MODEL) or "SPIND_MODEL" in os.environ and "SmolLM2-135M" not in MODEL:
        skip("a model's parameters", f"no {MODEL}")
        return
    hidden, ff, vocab = 576, 1536, 49152
    layer = 2 * hidden + 2 * hidden * hidden + 2 * hidden * KV_HEADS * DIM + 3 * hidden * ff
    count, = numbers(inspect(MODEL), r": ([\d.]+) M parameters, weights", "the model")
    ok(near(count, (vocab * hidden + LAYERS * layer + hidden) / 1e6, 0.1), "the parameters of SmolLM2-135M", count)


def a_running_one():
    flags = ("--max-model-len", "4096", "--max-num-seqs", "4", "--kv-hbm", "128M")
    server = mock(*flags)
    plan = inspect("--device", "mock", *flags)
    for line in plan.splitlines():
        if line.startswith(("KV cache", "digests", "Maximum")):
            ok(line in server.log, f"the server says the same at start: {line[:40]}", server.log)
    complete(server, "x" * 100, max_tokens=3)
    want = {k: v for k, v in metrics(server).items() if k.startswith(("spind_kv_", "spind_hot_", "spind_segments_", "spind_planned_"))}
    got = {}
    for line in inspect(f"http://127.0.0.1:{server.port}").splitlines():
        name, labels, value = line[:42].strip(), line[42:-1].rpartition(" ")[0].strip(), line.split()[-1]
        got[name + ("{" + ",".join(sorted(labels.split(", "))) + "}" if labels else "")] = float(value)
    shown = {k: got.get(k) for k in want}
    equal(shown, want, "what /metrics say, without the labels that all have")
    blocks = sum(v for k, v in got.items() if k.startswith("spind_kv_blocks{") and "hbm" in k)
    equal(blocks, arena(plan, "SPARSE lanes")[3], "blocks of HBM are those of the plan")
    server.stop()
    ok("refused" in inspect(f"http://127.0.0.1:{server.port}", code=1), "nobody listens: said")
    ok("must be http://" in inspect("http:///", code=2), "no address: said")
    ok("smaller than one block" in inspect("--device", "mock", "--kv-hbm", "1K", code=1), "no room for a block: said")


one_class()
two_classes()
rings()
a_model()
a_running_one()
done()
