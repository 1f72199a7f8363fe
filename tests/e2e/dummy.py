"""--load-format dummy: a model that is only described, its weights made up, served as any other."""
import json
import os
import subprocess
import tempfile

import _server
from _server import clean_env, done, equal, ok
from _spind import CHAT, COMPLETION, MODEL, PATIENCE, Server, ask, get, kept, settles

CONFIG = "configs/models/smollm2-135m.json"
NAME = "smollm2-135m"


def serve(*args):
    server = kept(Server("--device", "cpu", *args, key=None, wait=False))
    if not server._ready.wait(PATIENCE) or "listening on" not in server.log:
        raise RuntimeError("the server did not get ready: " + server.log)
    return server


def does_not_start(args, text, name):
    p = subprocess.run([_server.BINARY, "serve", *args, "--port", "0", "--device", "cpu"], capture_output=True,
                       text=True, timeout=PATIENCE, env=clean_env())
    ok(p.returncode != 0 and text in p.stderr, name, p.stderr)


def described(**changes):
    """A small qwen3 in a file of its own."""
    c = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
         "vocab_size": 1000, "eos_token_id": 999}
    c.update(changes)
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(c, f)
    return folder


def greedy(server, prompt, n=16, **more):
    return ask(server, COMPLETION, {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, **more})


def it_is_served():
    server = serve(CONFIG, "--load-format", "dummy", "--max-model-len", "1024", "--max-num-seqs", "4")
    ok(f"making up {NAME}" in server.log, "the log says what is done", server.log)
    got = get(server, "/v1/models")
    model = got.json["data"][0]
    equal((model["id"], model["meta"]["n_vocab"], model["meta"]["n_params"]), (NAME, 49152, 134515008),
          "name, vocabulary and parameters are the description's")
    first = greedy(server, [49151, 300, 7, 1000])
    equal((first.status, first.json["usage"]["prompt_tokens"], first.json["usage"]["completion_tokens"]), (200, 4, 16),
          "token ids up to the vocabulary are a prompt, max_tokens come out")
    text = first.choices[0]["text"]
    ok(text.count("<") >= 1 and ">" in text, "tokens read as their number", text)
    got = greedy(server, "bytes: \u00e9", n=1)
    equal((got.status, got.json["usage"]["prompt_tokens"]), (200, 9), "a text is its bytes")
    got = ask(server, COMPLETION, {"prompt": [49152], "max_tokens": 1})
    equal(got.status, 400, "an id beyond the vocabulary is refused")
    got = ask(server, CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
    equal(got.status, 200, "a chat is served")
    settles(server, "and nothing is left")
    server.stop()
    again = serve(CONFIG, "--load-format", "dummy", "--max-model-len", "1024", "--threads", "1")
    equal(greedy(again, [49151, 300, 7, 1000]).choices[0]["text"], text, "another start makes up the same weights")
    again.stop()


def other_families_and_lengths():
    folder = described()
    server = serve(folder, "--load-format", "dummy", "--max-model-len", "4096")
    got = greedy(server, [5] * 600, n=4)
    equal((got.status, got.json["usage"]["prompt_tokens"]), (200, 600),
          "a qwen3 in a folder, with a longer context than described")
    server.stop()


def what_cannot_be_is_refused():
    does_not_start([CONFIG], f"{CONFIG}: describes a model but holds no weights: name a GGUF file, or let weights be "
                   "made up for measurements (--load-format dummy)", "a description without weights")
    does_not_start([described()], "describes a model but holds no weights", "a folder with a description")
    does_not_start([MODEL, "--load-format", "dummy"], f"{MODEL}: a GGUF file, whose weights are served without "
                   "--load-format dummy", "a GGUF file as a description")
    does_not_start([CONFIG, "--load-format", "safetensors"], "auto|gguf|dummy", "a format that is not known")
    folder = described(num_hidden_layers=10**9)
    does_not_start([folder, "--load-format", "dummy"], f'{folder}/config.json: "num_hidden_layers" is 1000000000, must '
                   "be a whole number from 1 to 1024", "a number out of range")
    folder = described(num_hidden_layers=1024, hidden_size=65536, intermediate_size=1 << 20)
    does_not_start([folder, "--load-format", "dummy"], "GiB in bf16, device cpu has", "a model beyond the memory")


it_is_served()
other_families_and_lengths()
what_cannot_be_is_refused()
done()
