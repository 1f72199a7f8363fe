"""Sparse attention as clients and operators ask for it: the request's "sparse", flags that are wrong, and a
plug-in of somebody else's, loaded into the real daemon and used on the CPU."""
import json
import os
import subprocess

import _server
from _server import BUILD, clean_env, done, equal, ok, skip
from _spind import MODEL, PATIENCE, ask, chat, complete, metrics, mock, real, settles, tokens_of, until, CHAT, COMPLETION

PLUGINS = os.path.join(BUILD, "tests", "plugin")
SIGNS = os.path.join(PLUGINS, "signs.so")
LAYERS, KV_HEADS = 30, 3  # of the mock
KNOWN = "dense, oracle, quest, wave"


def refused(server, fields, param, code, message):
    for path, body in ((COMPLETION, {"prompt": "hello"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        got = ask(server, path, {**body, "max_tokens": 2, "sparse": fields})
        want = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        equal((got.status, got.error), (400, want), f"{path}: {json.dumps(fields)}")


def requests_are_checked():
    server = mock("--sparse", "wave", "--sparse-budget", "0.1", "--sparse-option", "estimate=0.5", "--plugin", SIGNS)
    others = KNOWN + ", signs"
    refused(server, {"plugin": "wawe"}, "sparse.plugin", "invalid_value",
            f'sparse.plugin: unknown plug-in "wawe"; there are {others}.')
    refused(server, {"estimat": 1}, "sparse.estimat", "unknown_parameter",
            'sparse: unknown option "estimat" of plug-in wave, which has outliers, estimate, balance, coarse_group, coarse_open, '
            "reduce, codes, known, values, and with every plug-in budget, min_rows, interval, top_p, miss_threshold and min_context.")
    refused(server, {"budget": 0}, "sparse.budget", "invalid_value",
            "sparse.budget must be a share of the context, above 0 to 1, or more than 1: a number of rows, at most 1073741824; got 0.")
    refused(server, {"budget": "a lot"}, "sparse.budget", "invalid_type", "`sparse.budget` must be a number.")
    refused(server, {"estimate": 2}, "sparse.estimate", "invalid_value", "sparse.estimate must be a number, 0 to 1, got 2.")
    refused(server, {"balance": 1}, "sparse.balance", "invalid_type", "`sparse.balance` must be a boolean.")
    refused(server, {"reduce": "max"}, "sparse.reduce", "invalid_value",
            "sparse.reduce must be one of max_prob|sum_prob|mean_raw|max_raw, got max.")
    refused(server, {"plugin": "signs", "sinks": 4096}, "sparse.sinks", "invalid_value",
            "sparse.sinks must be a whole number, 0 to 1024, got 4096.")
    refused(server, {"plugin": "signs", "miss_threshold": 0.1}, "sparse", "invalid_value",
            "sparse: miss_threshold must be 0 with plug-in signs, got 0.1: it keeps nothing from which a page could be estimated.")
    refused(server, "wave", "sparse", "invalid_type", "`sparse` must be an object.")
    for fields in ({}, None, {"plugin": "dense"}, {"plugin": "quest", "budget": 64, "reduce": "sum_prob"}, {"plugin": "signs", "sinks": 32},
                   {"budget": 0.02, "min_rows": 1024, "interval": 1, "top_p": 1, "miss_threshold": 0, "estimate": 0.25, "min_context": 0}):
        got = complete(server, "hello", max_tokens=2, sparse=fields)
        ok(got.status == 200, f"served: {json.dumps(fields)}", got)
    settles(server, "and nothing is left")
    server.stop()
    server = mock()
    refused(server, {"budget": 0.05}, "sparse.budget", "invalid_value",
            f"sparse.budget has no effect with plug-in dense, the server's; sparse.plugin may be one of {KNOWN}.")
    refused(server, {"plugin": "dense", "budget": 0.05}, "sparse.budget", "invalid_value",
            f"sparse.budget has no effect with plug-in dense; sparse.plugin may be one of {KNOWN}.")
    server.stop()


def there_is_room_for_what_is_offered():
    """What a request may name is what the server has digests' room for, and it says so at start."""
    if not os.path.exists(MODEL):
        skip("what is offered", "no model")
        return
    for offer, others, sizes in (("wave", "dense, oracle, wave; no room for quest (16640 bytes): --sparse-offer", (200, 400)),
                                 ("wave,quest", "dense, oracle, quest, wave", (200, 200))):
        server = real("--block-size", "16", "--sparse", "wave", "--sparse-offer", offer)
        ok(f"requests may name {others}\n" in server.log, f"--sparse-offer {offer}: told at start", server.log)
        equal(tuple(complete(server, "hello", max_tokens=2, sparse={"plugin": p}).status for p in ("wave", "quest")), sizes,
              "and requests for wave and for quest are served or refused")
        if offer == "wave":
            refused(server, {"plugin": "quest"}, "sparse", "invalid_value",
                    "sparse: the digests of plug-in quest with these options take 16640 bytes per lane and segment; "
                    "the server was started for at most 12544 (--sparse-offer).")
        settles(server, "and nothing is left")
        server.stop()


def flags_are_checked():
    def so(name):
        return os.path.join(PLUGINS, f"bad-{name}.so")

    wrong = [
        (["--sparse", "wawe"], f'--sparse: unknown plug-in "wawe"; there are {KNOWN}'),
        (["--sparse", "quest", "--sparse-option", "estimate=1"],
         '--sparse-option: unknown option "estimate" of plug-in quest, which has reduce'),
        (["--sparse", "wave", "--sparse-option", "outliers=3"], "--sparse-option: outliers must be a whole number, 0 to 2, got 3"),
        (["--sparse-offer", "wave,qest"], f'--sparse-offer: unknown plug-in "qest"; there are {KNOWN}'),
        (["--sparse-budget", "0"], "--sparse-budget: 0: must be a number, above 0 to 1073741824"),
        (["--plugin", "/nonexistent.so"], "--plugin: /nonexistent.so: cannot open shared object file: No such file or directory"),
        (["--plugin", so("symbol")], f"--plugin: {so('symbol')}: no symbol spind_sparse_plugin: not a plug-in of spind"),
        (["--plugin", so("abi")], f"--plugin: {so('abi')}: made for plug-in ABI 7; this spind has 2"),
        (["--plugin", so("taken")], f"--plugin: {so('taken')}: there is a plug-in quest already"),
        (["--plugin", SIGNS, "--plugin", SIGNS], f"--plugin: {SIGNS}: there is a plug-in signs already"),
        (["--plugin", so("score")], f"--plugin: {so('score')}: plug-in bad lacks score"),
        (["--head-policy", "duo"], "--head-policy duo needs --head-policy-file"),
    ]
    for args, text in wrong:
        p = subprocess.run([_server.BINARY, "serve", "--device", "mock", "--port", "0", *args], capture_output=True, text=True,
                           timeout=PATIENCE, env=clean_env())
        equal((p.returncode, p.stderr), (2, f"spind: {text}\n"), " ".join(args))
    p = subprocess.run([_server.BINARY, "serve", "--device", "mock", "--port", "0", "--sparse", "wave", "--sparse-option", "coarse_group=5"],
                       capture_output=True, text=True, timeout=PATIENCE, env=clean_env())
    ok(p.returncode == 1 and "cannot serve: coarse_group must be 0, 4, 8, 16 or 32, got 5" in p.stderr,
       "what only the model can tell ends the start with 1", p.stderr)


def no_lane_needs_to_be_sparse():
    for flags in (["--head-policy", "streaming"], ["--sparse-exempt-layers", "1000"]):
        server = mock("--sparse", "wave", "--max-model-len", "4096", *flags)
        got = complete(server, [65] * 1200, max_tokens=3)
        equal((got.status, got.json["usage"]["completion_tokens"]), (200, 3), "a sealed segment's worth of prompt, " + " ".join(flags))
        equal(server.stop(), 0, "and the daemon ends well")


def a_head_policy_serves(folder):
    """The mock checks that every page which rows attend holds what was written; hits end where segments end."""
    razor = os.path.join(folder, "razor.json")
    with open(razor, "w") as f:
        json.dump({"format": "spind razor policy, version 1", "layers": LAYERS, "kv_heads": KV_HEADS, "sinks": 16, "recent": 64,
                   "keep": [[(i + j) % 2 for j in range(KV_HEADS)] for i in range(LAYERS)]}, f)
    server = mock("--max-model-len", "4096", "--head-policy", "razor", "--head-policy-file", razor)
    cached = []
    for _ in range(2):
        got = complete(server, [65] * 2500, max_tokens=3)
        cached.append((got.status, (got.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)))
    equal(cached, [(200, 0), (200, 2048)], "razor: served, and served again from the prefix cache, which ends where a segment does")
    settles(server, "and nothing is left")
    equal(server.stop(), 0, "and the daemon ends well")


def head_policies_are_checked(folder):
    def start(*args):
        p = subprocess.run([_server.BINARY, "serve", "--device", "cpu", MODEL, "--port", "0", *args], capture_output=True, text=True,
                           timeout=PATIENCE, env=clean_env())
        return p.returncode, p.stderr

    table = os.path.join(folder, "full_attention_heads.tsv")
    with open(table, "w") as f:
        f.write("\n".join(["\t".join(["1.0"] * 8)] * 32) + "\n")
    code, err = start("--head-policy", "duo", "--head-policy-file", folder)
    ok(code == 1 and f"cannot serve: {table}: made for a model of 32 layers with 8 KV heads; this one has 30 with 3" in err,
       "a pattern of another model: both shapes, and 1", err)


TEXT = " ".join(f"Section {i}: the quick brown fox number {i * 7919 % 1000} jumps over the lazy dog." for i in range(90))


def a_third_party_is_served():
    if not os.path.exists(MODEL):
        skip("a third party's plug-in on the CPU", "no model")
        return
    server = real("--plugin", SIGNS, "--max-model-len", "4096")
    want = complete(server, TEXT, max_tokens=12, temperature=0, ignore_eos=True)
    n_prompt = want.json["usage"]["prompt_tokens"]
    ok(want.status == 200 and n_prompt > 1088 + 64, "a prompt with a sealed segment", n_prompt)
    before = metrics(server)["spind_planned_rows_total"]
    got = complete(server, TEXT, max_tokens=12, temperature=0, ignore_eos=True, sparse={"plugin": "signs", "budget": 1.0})
    equal(got.text, want.text, "a budget of all there is: what dense says")
    equal((want.json["usage"].get("sparse_details"), got.json["usage"].get("sparse_details")), (None, {"plugin": "signs", "budget": 1}),
          "usage says which was sparse, and how")
    short = complete(server, TEXT[:400], max_tokens=3, temperature=0, ignore_eos=True, sparse={"plugin": "signs", "budget": 0.1})
    ok("sparse_details" not in short.json["usage"], "a context too short to select from was not", short.json["usage"])
    rows = metrics(server)["spind_planned_rows_total"] - before
    ok(rows >= 11, "its rows attended by plan", rows)
    some = complete(server, TEXT, max_tokens=12, temperature=0, ignore_eos=True, sparse={"plugin": "signs", "budget": 0.1})
    again = complete(server, TEXT, max_tokens=12, temperature=0, ignore_eos=True, sparse={"plugin": "signs", "budget": 0.1})
    ok(some.status == 200 and some.json["usage"]["completion_tokens"] == 12, "a tenth of it is served", some)
    equal(again.text, some.text, "and again the same")
    settles(server, "nothing is left")
    equal(server.stop(), 0, "and the daemon ends well")


def longer_than_the_first_tier():
    """Read layer by layer (engine/layer_major.h): the same text as where all fits, one who leaves in between, an answer beside it."""
    if not os.path.exists(MODEL):
        skip("a prompt longer than the first tier", "no model")
        return
    row = 30 * 3 * 64 * 2 * 2  # bytes of a position
    args = ["--max-model-len", "4096", "--kv-dram", "256MiB", "--sparse", "wave", "--sparse-budget", "0.05", "--sparse-exempt-layers", "0"]
    ask_for = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    server = real(*args)
    prompt = tokens_of(server, TEXT * 2)[:3000]
    want = complete(server, prompt, **ask_for)
    equal(metrics(server)["spind_layer_major_prompts_total"], 0, "what the first tier holds is read chunk by chunk")
    server.stop()
    server = real(*args, "--kv-hbm", str(2000 * row), "--max-num-batched-tokens", "256")
    with server.connect() as s:
        body = json.dumps({"prompt": prompt[::-1], **ask_for}).encode()
        s.sendall(_server.request("POST", COMPLETION, "Content-Type: application/json\r\n", body))
        until(lambda: 0 < metrics(server)["spind_layer_major_progress"] < 1)
        short = complete(server, "The capital of France is", max_tokens=4, temperature=0)
        ok(short.status == 200 and metrics(server)["spind_layer_major_progress"] > 0, "an answer comes while a long prompt is read", short)
    settles(server, "who leaves while it is read leaves nothing")
    equal(metrics(server)["spind_layer_major_progress"], 0, "nor is anything being read")
    got = complete(server, prompt, **ask_for)
    equal((got.status, got.text), (200, want.text), "a prompt of one and a half times the first tier: the same text")
    equal(metrics(server)["spind_layer_major_prompts_total"], 2, "read layer by layer")
    settles(server, "nothing is left")
    equal(server.stop(), 0, "and the daemon ends well")


def main():
    import tempfile
    requests_are_checked()
    there_is_room_for_what_is_offered()
    flags_are_checked()
    no_lane_needs_to_be_sparse()
    with tempfile.TemporaryDirectory() as folder:
        a_head_policy_serves(folder)
        if os.path.exists(MODEL):
            head_policies_are_checked(folder)
    a_third_party_is_served()
    longer_than_the_first_tier()
    done()


main()
