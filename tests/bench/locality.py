"""Records what `wave` selects behind needle and chat prompts, in the daemon, and says how local it is.

usage: locality.py SPIND MODEL.gguf TEXT OUT [--budgets 0.02,0.05] [--tokens 7000] [--answer 192] [--warm-up 32]
                   [--serve="--block-size 8 --sparse-exempt-layers 2"]

TEXT is any long text; the needles are put into it, and the chat is about it. For each kind and budget a
daemon (with the flags of --serve) writes OUT/KIND-BUDGET.trace, and `spind locality` makes
OUT/KIND-BUDGET.json and .md of it.

needle: three prompts in completion form, answered and written on: a pass key in the text, the third of
five coloured keys in the text, a number in noise. chat: three turns through the chat template about a
passage, each answer part of the next prompt. Everything is sampled at temperature 0.8 from fixed seeds:
greedy answers of a small model repeat themselves, and a hot set likes that."""
import argparse
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request

COLOURS = {"red": 31415, "green": 27182, "blue": 60221, "yellow": 16180, "black": 66743}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
QUESTIONS = ["Here is a part of a novel.\n\n%s\n\nWhat happens in it? Tell me in your own words.",
             "Who are the people in it, and what do they think of each other?",
             "Which of them do you like best, and why? Answer with what the text says."]


class Daemon:
    def __init__(self, spind, model, *flags):
        self.process = subprocess.Popen(
            [spind, "serve", model, "--device", "cpu", "--port", "0", *flags],
            stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            found = re.search(r"listening on (http://\S+)", line)
            if found:
                self.url = found.group(1)
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return
            self.last = line
        sys.exit("locality.py: the daemon did not start: " + self.last)

    def ask(self, path, **fields):
        request = urllib.request.Request(self.url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

    def cut(self, text, tokens):
        """The longest head of a text of so many tokens, by words."""
        low, high = 0, min(len(text), 8 * tokens)
        while high - low > 16:
            middle = (low + high) // 2
            n = self.ask("/tokenize", prompt=text[:middle])["count"]
            low, high = (middle, high) if n <= tokens else (low, middle)
        return text[:low].rsplit(" ", 1)[0]

    def stop(self):
        self.process.terminate()
        if self.process.wait() != 0:
            sys.exit("locality.py: the daemon did not end well")


def put(text, at, fact):
    """The fact between two paragraphs, at a share of the text."""
    place = text.find("\n\n", int(at * len(text)))
    return text[:place] + "\n\n" + fact + text[place:]


def needles(daemon, text, tokens, answer):
    head = "There is an important fact hidden in the following text. Memorize it.\n\n"
    body = daemon.cut(text, tokens)
    one = put(body, 0.4, "The pass key is 57229. Remember it. 57229 is the pass key.")
    many = body
    for i, (colour, key) in enumerate(COLOURS.items()):
        many = put(many, 0.15 + 0.17 * i, "The %s key is %d. Remember it. %d is the %s key." % (colour, key, key, colour))
    noise = daemon.cut(NOISE * (tokens // 20), tokens).split("\n")
    noise.insert(len(noise) // 3, "One of the special magic numbers for orchard is: 8125047.")
    prompts = [head + one + "\n\nThe pass key is", head + many + "\n\nThe blue key is",
               head + "\n".join(noise) + "\n\nThe special magic number for orchard is:"]
    for seed, prompt in enumerate(prompts):
        got = daemon.ask("/v1/completions", prompt=prompt, max_tokens=answer, ignore_eos=True, temperature=0.8, seed=seed)
        yield got["usage"]["prompt_tokens"], got["choices"][0]["text"]


def chat(daemon, text, tokens, answer):
    messages = [{"role": "system", "content": "You are a helpful assistant who has read the text."}]
    passage = daemon.cut(text, tokens - 2 * answer)
    for seed, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question % passage if "%s" in question else question})
        got = daemon.ask("/v1/chat/completions", messages=messages, max_tokens=answer, min_tokens=answer // 2,
                         temperature=0.8, seed=seed)
        messages.append(got["choices"][0]["message"])
        yield got["usage"]["prompt_tokens"], messages[-1]["content"]


def main():
    a = argparse.ArgumentParser()
    a.add_argument("spind")
    a.add_argument("model")
    a.add_argument("text")
    a.add_argument("out")
    a.add_argument("--budgets", default="0.02,0.05")
    a.add_argument("--tokens", type=int, default=7000)
    a.add_argument("--answer", type=int, default=192)
    a.add_argument("--warm-up", default="32")
    a.add_argument("--serve", default="--block-size 8 --sparse-exempt-layers 2")
    a = a.parse_args()
    os.makedirs(a.out, exist_ok=True)
    with open(a.text, encoding="utf-8") as f:
        text = f.read()
    for kind, record in (("needle", needles), ("chat", chat)):
        for budget in a.budgets.split(","):
            stem = os.path.join(a.out, "%s-%s" % (kind, budget))
            if os.path.exists(stem + ".trace"):
                os.unlink(stem + ".trace")
            daemon = Daemon(a.spind, a.model, "--sparse", "wave", "--sparse-budget", budget, "--record-selection", stem + ".trace",
                            *a.serve.split())
            for tokens, answer in record(daemon, text, a.tokens, a.answer):
                print("%s, budget %s: %d tokens of prompt; %r" % (kind, budget, tokens, answer[:90]), flush=True)
            daemon.stop()
            subprocess.run([a.spind, "locality", stem + ".trace", "--warm-up", a.warm_up, "--json", stem + ".json",
                            "--markdown", stem + ".md"], check=True)


if __name__ == "__main__":
    main()
