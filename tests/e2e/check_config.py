"""`spind check-config`: says what serve would use, or what is wrong, as serve would; and serves nothing.

The binary: SPIND, else spind of the build (SPIND_BUILD)."""
import json
import os
import socket
import subprocess
import tempfile

import _server
from _server import clean_env, done, equal, ok, skip
from _spind import MODEL, PATIENCE

PREFIX = "spind check-config: "


def run(verb, *args, env=None):
    got = subprocess.run([_server.BINARY, verb, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE,
                         env=env or clean_env())
    return got.returncode, got.stdout, got.stderr


def fine(args, name, *lines, **more):
    code, out, err = run("check-config", *args, **more)
    said = out.splitlines()
    return ok(code == 0 and err == "" and said[-1:] == ["nothing is wrong"] and all(line in said for line in lines), name, code, out, err)


def wrong(args, want, name, words, asks_serve=True):
    """One line on stderr, nothing on stdout; and serve, asked the same, says the same and does not serve."""
    code, out, err = run("check-config", *args)
    told = err[len(PREFIX):].rstrip("\n")
    ok(code == want and out == "" and err.startswith(PREFIX) and err.count("\n") == 1 and words in told, name, code, out, err)
    if asks_serve:
        code, out, err = run("serve", "--port", "0", *args)
        ok(code in (1, want) and told and err.rstrip("\n").endswith(told), f"{name}: serve says so, too", code, told, err)


def file_of(folder, name, text):
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text if isinstance(text, str) else json.dumps(text))
    return path


def what_is_used(d):
    config = file_of(d, "spind.json", {"port": 9123, "max-num-seqs": "1k", "//": "ours", "strict-fields": True})
    keys = file_of(d, "keys", "# ours\nS3CRETone\nS3CRETtwo\n")
    mock = ("--device", "mock", "--config", config)
    fine(mock, "a file of options", "address: http://127.0.0.1:9123", "keys:    none, whoever reaches it may ask", "device:  mock",
         "model:   made up",
         "  port = 9123 (file)", "  max-num-seqs = 1000 (file)", "  strict-fields = true (file)")
    fine((*mock, "--port", "9", "--host", "::1"), "flags win over it", "address: http://[::1]:9", "  port = 9")
    fine(mock, "the environment, too", "  port = 77 (environment)", env=clean_env(PORT="77"))
    fine((*mock, "--host", "0.0.0.0", "--api-key-file", keys), "a file of keys", "keys:    2")
    tenant = {"name": "research", "keys": [{"id": "k1", "sha256": "0" * 64}]}
    tenants = file_of(d, "tenants.json", json.dumps({"tenants": [tenant]}))
    wrong((*mock, "--tenants", tenants), 78, "a file of tenants that others may read", "chmod")
    os.chmod(tenants, 0o600)
    fine((*mock, "--host", "0.0.0.0", "--tenants", tenants), "a file of tenants", "keys:    1, of 1 tenant")
    bad = file_of(d, "bad.json", json.dumps({"tenants": [{**tenant, "weight": -1}]}))
    os.chmod(bad, 0o600)
    wrong((*mock, "--tenants", bad), 78, "a weight that is none", "weight")
    code, out, err = run("check-config", *mock, "--api-key", "S3CRETthree", "--api-key-file", keys)
    ok(code == 0 and "S3CRET" not in out + err and "  api-key = ***" in out, "no key is printed", out, err)
    shipped = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "configs", "default.json")
    fine(("--device", "mock", "--config", shipped), "configs/default.json is fine", "address: http://127.0.0.1:8000")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        fine(("--device", "mock", "--port", port), "a server that runs on the port is no matter", f"address: http://127.0.0.1:{port}")
        s.settimeout(0)
        try:
            s.accept()
            called = True
        except BlockingIOError:
            called = False
        ok(not called, "and nobody calls it")


def words_and_files(d):
    mock = ("--device", "mock")
    for args, words in ((("--prot", "1"), "did you mean --port?"), (("--port", "99999"), "0 to 65535"),
                        (("--config", "/nonexistent.json"), "/nonexistent.json: No such file"),
                        (("--config", file_of(d, "a.json", '{"port": 1,\n"prot": 2}')), 'unknown key "prot", did you mean "port"?'),
                        (("--config", file_of(d, "b.json", '{"port": 1,\n,')), "line 2: not JSON"),
                        (("--config", file_of(d, "c.json", {"port": "x"})), "not a number"),
                        (("--api-key-file", "/nonexistent"), "/nonexistent: No such file"),
                        (("--api-key-file", file_of(d, "none", "# nothing\n")), "no key in it"),
                        (("--plugin", "/nonexistent.so"), "/nonexistent.so"), (("--head-policy", "duo"), "needs --head-policy-file")):
        wrong((*mock, *args), 2, f"{args[0]} {os.path.basename(args[1])}: 2", words)
    wrong((), 2, "no model: 2", "no model given", asks_serve=False)  # where serve has more to say to who begins
    wrong((*mock, "--print-config"), 2, "--print-config checks nothing, so it is not for here: 2", "leave it out", asks_serve=False)
    wrong((*mock, "--host", "0.0.0.0"), 78, "an open door: 78", "--insecure-no-auth")
    fine((*mock, "--host", "0.0.0.0", "--insecure-no-auth"), "unless it is meant")
    code, out, _ = run("check-config", "--help")
    ok(code == 0 and "--max-model-len" in out, "--help is serve's")


def models(d):
    if not os.path.exists(MODEL):
        skip("a model's header is checked", f"there is no {MODEL}")
        return
    fine((MODEL,), "a model is named with its shape",
         "model:   Smollm2 135M 8k Lc100K Mix1 Ep2 (llama): 30 layers, 8192 positions, 0.09 GiB")
    fine((MODEL, "--max-model-len", "2048"), "with the context that was asked for",
         "model:   Smollm2 135M 8k Lc100K Mix1 Ep2 (llama): 30 layers, 2048 positions, 0.09 GiB")
    llama = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "configs", "models", "llama-3.1-8b.json")
    fine((llama, "--load-format", "dummy"), "a description as well",
         "model:   llama-3.1-8b (llama): 32 layers, 131072 positions, 14.96 GiB of weights to be made up")
    wrong((llama,), 78, "a description without --load-format dummy: 78", "describes a model but holds no weights")
    with open(MODEL, "rb") as f:
        start = f.read(1 << 20)
    cut = os.path.join(d, "cut.gguf")
    with open(cut, "wb") as f:
        f.write(start)
    wrong((cut,), 78, "a model that was cut: 78", "offset")
    wrong((file_of(d, "notes.md", "# A text\n\nlonger than a header.\n" * 99),), 78, "a text: 78", "not a GGUF file")
    wrong(("/nonexistent.gguf",), 78, "a model that is not there: 78", "/nonexistent.gguf: No such file", asks_serve=False)
    wrong((MODEL, "--max-model-len", "9000"), 78, "a context that it does not have: 78", "8192 positions")
    cpu = (MODEL, "--device", "cpu")
    wrong((*cpu, "--sparse", "wave", "--sparse-option", "coarse_group=5"), 78, "an option that only the shape can judge: 78",
          "coarse_group must be")
    policy = file_of(d, "policy.json", {"format": "spind razor policy, version 1", "layers": 32, "kv_heads": 8})
    wrong((*cpu, "--head-policy", "razor", "--head-policy-file", policy), 78, "a head policy of another model: 78",
          "made for a model of 32 layers")


def main():
    with tempfile.TemporaryDirectory() as d:
        what_is_used(d)
        words_and_files(d)
        models(d)
    done()


main()
