"""The conformance vectors of reference/api.md, Appendix A, by their numbers; on the real model where
numbers matter, on the mock device where the text must be known beforehand. Vectors 55 and 59 to 61
are in abort.py, 57 in scrape.py, 56, 62 and 63 in text.py; tenants (60) do not exist yet."""
import concurrent.futures
import json
import os
import re
import time

from _server import done, equal, eventually, ok, request
from _spind import (CHAT, COMPLETION, JSON, MODEL, PATIENCE, Reply, ask, chat, complete, cstream, get, hstream, mock, real,
                    stream, text_of, tokens_of)

POOL = concurrent.futures.ThreadPoolExecutor(16)
GREEDY = {"temperature": 0}
CHOICE = ["index", "text", "logprobs", "finish_reason", "stop_reason"]
CHAT_CHOICE = ["index", "message", "logprobs", "finish_reason", "stop_reason"]
WHOLE = ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
LIMIT_N = 8


def is_refusal(got, status=400, param=None, code=None):
    """Vector 51 holds for every one of them."""
    e = got.error
    return (got.status == status and isinstance(e, dict)
            and list(e)[:4] == ["message", "type", "param", "code"] and set(e) <= {"message", "type", "param", "code", "n_prompt_tokens", "n_ctx"}
            and isinstance(e["message"], str) and e["message"] and isinstance(e["type"], str)
            and (e["code"] is None or isinstance(e["code"], str)) and (e["param"] is None or isinstance(e["param"], str))
            and got.header("Content-Type") == "application/json" and got.header("X-Request-Id") is not None
            and (param is None or e["param"] == param) and (code is None or e["code"] == code))


def refused(got, name, status=400, param=None, code=None, words=()):
    words = (words,) if isinstance(words, str) else words
    return ok(is_refusal(got, status, param, code) and all(w in got.error["message"] for w in words), name, got, param, code, words)


def table(call, field, cases, numbers, **more):
    """cases: value and whether it is right; a wrong one is refused by the field's name."""
    for value, good in cases:
        fields = {"max_tokens": 1, **more, field: value}
        got = call(**fields)
        shown = json.dumps(value)
        if good:
            ok(got.status == 200, f"{numbers}: {field} {shown[:40]} is fine", got)
        else:
            refused(got, f"{numbers}: {field} {shown[:40]} is refused", param=field)


def raw_body(server, text, path=COMPLETION):
    return ask(server, path, text.encode() if isinstance(text, str) else text)


# ---- 1 to 7: prompts ----

def shapes(server, name):
    got = complete(server, ignore_eos=True)  # without it one answer in some dozens ends early: the temperature is 1
    j = got.json
    equal((list(j), list(j["choices"][0])), (WHOLE, CHOICE), "1: a completion has exactly these keys, in this order")
    usage = j["usage"]
    equal(list(usage), ["prompt_tokens", "completion_tokens", "total_tokens"], "1: and these of usage")
    ok(usage["prompt_tokens"] == 5 and usage["completion_tokens"] == 16 and usage["total_tokens"] == 21, "1: 16 tokens by default; usage sums", usage)
    ok(re.fullmatch("cmpl-[0-9a-f]{32}", j["id"]) and j["object"] == "text_completion" and isinstance(j["created"], int)
       and j["model"] == name and j["choices"][0]["finish_reason"] == "length" and j["choices"][0]["stop_reason"] is None
       and j["choices"][0]["logprobs"] is None and j["system_fingerprint"].startswith("b"), "1: with these values", j)
    equal(got.header("Content-Type"), "application/json", "1: typed as JSON")
    equal(name, os.path.basename(MODEL)[:-len(".gguf")], "the model is named after its file")
    nulls = dict.fromkeys(["max_tokens", "temperature", "stop", "n", "logprobs", "stream_options", "seed", "top_p", "top_k", "min_p", "logit_bias",
                           "echo", "suffix", "best_of", "stream", "user", "model", "min_tokens", "ignore_eos", "response_format", "cache_salt"])
    j = complete(server, **nulls).json
    n = j["usage"]["completion_tokens"]
    equal((list(j), list(j["choices"][0]), list(j["usage"])), (WHOLE, CHOICE, list(usage)), "2: null is as good as absent")
    ok(n == 16 if j["choices"][0]["finish_reason"] == "length" else 1 <= n <= 16, "2: max_tokens as well", j)
    j = chat(server, max_tokens=4).json
    equal((list(j), list(j["choices"][0]), list(j["choices"][0]["message"])), (WHOLE + ["service_tier"], CHAT_CHOICE, ["role", "content", "refusal"]),
          "1: a chat completion has exactly these keys")
    m = j["choices"][0]["message"]
    ok(j["object"] == "chat.completion" and re.fullmatch("chatcmpl-[0-9a-f]{32}", j["id"]) and j["service_tier"] is None
       and m["role"] == "assistant" and m["refusal"] is None and isinstance(m["content"], str), "1: with these values", j)


def prompts(server, vocab):
    text = "The capital of France is"
    ids = tokens_of(server, text)
    by_text, by_ids = complete(server, text, **GREEDY), complete(server, ids, **GREEDY)
    equal(by_ids.text, by_text.text, "3: a prompt as ids gives what it gives as text")
    equal(complete(server, [ids], **GREEDY).text, by_text.text, "3: and as a list of id lists")
    a, b = "Once upon a time", "The three primary colours are"
    got = complete(server, [a, b], n=2, **GREEDY)
    alone = [complete(server, p, **GREEDY) for p in (a, b)]
    equal([c["index"] for c in got.choices], [0, 1, 2, 3], "4: two prompts with n = 2 are four choices")
    equal([c["text"] for c in got.choices], [alone[0].text] * 2 + [alone[1].text] * 2, "4: index = prompt * n + i")
    equal(got.json["usage"]["prompt_tokens"], sum(g.json["usage"]["prompt_tokens"] for g in alone), "4: each prompt is counted once")
    equal(got.json["usage"]["completion_tokens"], 64, "4: and each choice's tokens")
    for bad in [], "", [[]], {}, 5, None, [1, "a"], [-1], [""], [1.5], [[1], "a"], [True]:
        refused(complete(server, bad), f"5: prompt {json.dumps(bad)} is refused", param="prompt")
    refused(ask(server, COMPLETION, {}), "5: no prompt is refused", param="prompt")
    for bad in [vocab], [0, 1 << 40], [[5], [vocab]]:
        refused(complete(server, bad), f"5: prompt {json.dumps(bad)} is refused", param="prompt", words="out of vocabulary")
    equal(complete(server, [vocab - 1], max_tokens=1).status, 200, "5: the last id is one")


def echoes(server):
    text = "The quick brown fox"
    got = complete(server, text, echo=True, max_tokens=0, logprobs=1)
    c, lp = got.choices[0], got.choices[0]["logprobs"]
    ok(c["text"] == text and c["finish_reason"] == "length" and got.json["usage"]["completion_tokens"] == 0, "6: echo with max_tokens 0 is the prompt", got)
    ok(lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None and all(x < 0 for x in lp["token_logprobs"][1:])
       and "".join(lp["tokens"]) == text, "6: whose first token has no probability", lp)
    equal(lp["text_offset"], [text.index(t.strip()) - t.startswith(" ") for t in lp["tokens"]], "6: offsets are of characters")
    refused(complete(server, text, max_tokens=0), "6: without echo it is refused", param="max_tokens", words="at least 1")
    refused(chat(server, max_tokens=0, echo=True), "6: and in a chat", param="max_tokens")

    # lm-eval asks whether a continuation is greedy by comparing printed numbers.
    start = "A list of fruits: apples, pears,"
    more = complete(server, start, max_tokens=12, logprobs=1, return_token_ids=True, **GREEDY)
    ids = more.choices[0]["prompt_token_ids"] + more.choices[0]["token_ids"]
    raw = complete(server, ids, echo=True, max_tokens=1, logprobs=1, **GREEDY).body
    scored = json.loads(raw, parse_float=str)["choices"][0]["logprobs"]
    n = len(more.choices[0]["prompt_token_ids"])
    tops = [list(t.values()) for t in scored["top_logprobs"][n:-1]]
    ok(len(tops) == 12 and all(x == t[0] for x, t in zip(scored["token_logprobs"][n:-1], tops)),
       "7: a greedy prefix is its own top, digit by digit", scored)
    drawn = json.loads(more.body, parse_float=str)["choices"][0]["logprobs"]["token_logprobs"]
    equal(scored["token_logprobs"][n:-1], drawn, "7: and scored it has the probabilities it was drawn with")
    text_both = complete(server, start, echo=True, max_tokens=12, **GREEDY).text
    equal(text_both, start + more.text, "7: echo puts the prompt in front of the answer")


# ---- 8 to 12, 65: log-probabilities and ids ----

def logprobs(server):
    table(lambda **f: complete(server, **f), "logprobs", [(0, True), (5, True), (20, True), (21, False), (-1, False), (True, False), ("5", False)], "8")
    for k in 0, 5, 20:
        lp = complete(server, logprobs=k, max_tokens=4, **GREEDY).choices[0]["logprobs"]
        equal(list(lp), ["text_offset", "token_logprobs", "tokens", "top_logprobs"], f"8: logprobs {k} has four arrays")
        ok(all(len(v) == 4 for v in lp.values()) and all(max(1, k) <= len(t) <= k + 1 for t in lp["top_logprobs"])
           and all(t[tok] == x for t, tok, x in zip(lp["top_logprobs"], lp["tokens"], lp["token_logprobs"])), "8: with the token among its tops", lp)
    for fields in {"seed": 3}, {"seed": 4, "echo": True}, {"seed": 5, "stop": ["the"], "max_tokens": 40}, {"temperature": 0, "n": 3}:
        fields = {"logprobs": 2, "max_tokens": 12, **fields}
        whole, parts = complete(server, **fields), cstream(server, **fields)
        same = parts.good() and all(
            parts.text(i) == c["text"] and parts.reason(i) == c["finish_reason"]
            and all([x for e in parts.of(i) if e["logprobs"] for x in e["logprobs"][k]] == v for k, v in c["logprobs"].items())
            for i, c in enumerate(whole.choices))
        ok(same, f"9: streamed logprobs, joined, are those of a whole answer ({fields})", whole, parts)
        lp = whole.choices[0]["logprobs"]
        offsets = [0]
        for t in lp["tokens"]:
            offsets.append(offsets[-1] + len(t))
        whole_characters = not any("\ufffd" in t for t in lp["tokens"])
        ok(lp["text_offset"] == (offsets[:-1] if whole_characters else sorted(lp["text_offset"])), "9: offsets are continuous", lp)
    got = chat(server, logprobs=True, max_tokens=6, **GREEDY)
    lp = got.choices[0]["logprobs"]
    ok(list(lp) == ["content", "refusal"] and all(list(t) == ["token", "logprob", "bytes", "top_logprobs"] and t["top_logprobs"] == []
       and bytes(t["bytes"]).decode() == t["token"] for t in lp["content"]) and len(lp["content"]) == 6, "10: chat logprobs: bytes are the token, no tops unasked", lp)
    equal("".join(t["token"] for t in lp["content"]), got.text, "10: and the tokens are the text")
    refused(chat(server, top_logprobs=1), "11: top_logprobs needs logprobs", param="top_logprobs",
            words="when using `top_logprobs`, `logprobs` must be set to true.")
    for k in 20, 1:
        got = chat(server, logprobs=True, top_logprobs=k, max_tokens=2, **GREEDY)
        tops = [t["top_logprobs"] for t in got.choices[0]["logprobs"]["content"]]
        ok(all(len(t) == k and [x["logprob"] for x in t] == sorted((x["logprob"] for x in t), reverse=True) for t in tops), f"12: top_logprobs {k} is {k}, best first", got)
    refused(chat(server, logprobs=True, top_logprobs=21), "12: 21 is too many", param="top_logprobs")
    whole = chat(server, logprobs=True, top_logprobs=2, max_tokens=8, seed=9)
    parts = hstream(server, logprobs=True, top_logprobs=2, max_tokens=8, seed=9)
    equal([t for c in parts.of() if c["logprobs"] for t in c["logprobs"]["content"]], whole.choices[0]["logprobs"]["content"],
          "9: and so it is for chats")
    got = complete(server, prompt_logprobs=2, max_tokens=1)
    scores = got.choices[0]["prompt_logprobs"]
    ok(scores[0] is None and len(scores) == 5 and all(2 <= len(s) <= 3 and all(list(x) == ["logprob", "rank", "decoded_token"] for x in s.values()) for s in scores[1:]),
       "8: prompt_logprobs scores each token of the prompt but the first", scores)
    refused(complete(server, prompt_logprobs=2, stream=True), "8: but not in a stream", param="prompt_logprobs", words="not available when `stream=True`")

    whole = complete(server, return_token_ids=True, **GREEDY)
    parts = cstream(server, return_token_ids=True, **GREEDY)
    equal(whole.choices[0]["prompt_token_ids"], tokens_of(server, "The capital of France is"), "65: prompt ids on demand")
    equal([t for c in parts.of() for t in c["token_ids"]], whole.choices[0]["token_ids"], "65: a stream's ids joined are the sequence")
    equal([("prompt_token_ids" in c) for c in parts.of()][:2], [True, False], "65: with the prompt's in the first event")
    equal(ask(server, "/detokenize", {"tokens": whole.choices[0]["token_ids"]}).json["prompt"], whole.text, "65: and they are the text")
    whole, parts = chat(server, return_token_ids=True, max_tokens=5, **GREEDY), hstream(server, return_token_ids=True, max_tokens=5, **GREEDY)
    ok(whole.json["prompt_token_ids"] == parts.events[0]["prompt_token_ids"]
       and [t for c in parts.of()[1:] for t in c["token_ids"]] == whole.choices[0]["token_ids"], "65: likewise in chats", whole, parts)


# ---- 13 to 20: streams ----

def frame(fields):
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def bytes_of_streams(server):
    """The mock says a, b, c and its end token."""
    got = hstream(server, "hi", stream_options={"include_usage": True})
    ok(got.good(), "2.10: the page is well formed", got)
    first = got.events[0] if got.events else {}
    head = {"id": first.get("id"), "object": "chat.completion.chunk", "created": first.get("created"), "model": "m"}

    def event(delta, reason=None, **more):
        return frame({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}], "usage": None})

    n = len(ask(server, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json["tokens"])
    want = (event({"role": "assistant", "content": ""}) + event({"content": "a"}) + event({"content": "b"}) + event({"content": "c"})
            + event({}, "stop", stop_reason=None)
            + frame({**head, "choices": [], "usage": {"prompt_tokens": n, "completion_tokens": 4, "total_tokens": n + 4}}) + b"data: [DONE]\n\n")
    equal(b"".join(got.chunks), want, "2.10: a chat stream with usage, byte for byte")
    for name, value in (("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"),
                        ("Transfer-Encoding", "chunked"), ("Content-Length", None)):
        equal(got.header(name), value, f"2.10: {name} is {value}")
    ok(got.header("X-Request-Id"), "2.10: X-Request-Id is there")
    ok(b'"role"' in got.chunks[0] and b'"content":"a"' in got.chunks[0], "19: the first event comes with the first token, in one write", got.chunks[:2])

    got = cstream(server, "hi", max_tokens=3)
    head = {"id": got.events[0]["id"], "object": "text_completion", "created": got.events[0]["created"], "model": "m"}
    want = b"".join(frame({**head, "choices": [{"index": 0, "text": t, "logprobs": None, "finish_reason": None}]}) for t in "ab")
    want += frame({**head, "choices": [{"index": 0, "text": "c", "logprobs": None, "finish_reason": "length", "stop_reason": None}]}) + b"data: [DONE]\n\n"
    equal(b"".join(got.chunks), want, "14: a stream without usage has no such key and its reason on the last text, byte for byte")

    got = hstream(server, "hi", max_tokens=1)
    equal([(list(e["choices"][0]["delta"]), e["choices"][0]["finish_reason"]) for e in got.events], [(["role", "content"], None), (["content"], "length")],
          "18: one token is a role event and one with text and reason")


def streams(server):
    body = {"prompt": "hi", "max_tokens": 2, "stream_options": {"include_usage": True}, "stream": False}
    refused(ask(server, COMPLETION, body), "13: stream_options without stream is refused", param="stream_options",
            words="Stream options can only be defined when `stream=True`.")
    got = cstream(server, "hi", max_tokens=5, ignore_eos=True, stream_options={"include_usage": True})
    ok(got.good() and all(e["usage"] is None for e in got.events[:-1]) and got.events[-1]["choices"] == [] and got.usage["completion_tokens"] == 5,
       "15: with usage: null on all events but the last, which has no choices", got)
    got = cstream(server, "hi", max_tokens=5, n=2, ignore_eos=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [e["usage"]["completion_tokens"] for e in got.events]
    whole = complete(server, "hi", max_tokens=5, n=2, ignore_eos=True).json["usage"]
    ok(counts == sorted(counts) and counts[0] <= 1 and got.usage == whole, "16: continuous usage rises to that of a whole answer", counts, whole)
    got = cstream(server, "hi", max_tokens=2, stream_options={"continuous_usage_stats": True})
    ok(got.good() and all("usage" not in e for e in got.events), "16: alone it has no effect", got)
    got = hstream(server, "hi", max_tokens=6, n=2, ignore_eos=True)
    for i in 0, 1:
        of = got.of(i)
        ok(of[0]["delta"] == {"role": "assistant", "content": ""} and [c["finish_reason"] for c in of] == [None] * (len(of) - 1) + ["length"]
           and all(c["delta"].get("content") for c in of[1:]), f"17: choice {i} has one role event first and one reason last", of)
    ok(len({e["id"] for e in got.events}) == 1 and len({e["created"] for e in got.events}) == 1, "17: all with one id and one time")
    got = stream(server, COMPLETION, {"prompt": list(range(97, 101)) * 50})
    refused(Reply(server.talk(request("POST", COMPLETION, JSON + "Connection: close\r\n", json.dumps({"prompt": [97] * 8192, "stream": True}).encode(), key=None), PATIENCE)),
            "20: a stream whose prompt does not fit gets a real 400", param="prompt", code="context_length_exceeded")


# ---- 21 to 25: lengths ----

CONTEXT_WORDS = ("is longer than the model's context length", "This model's maximum context length is 64 tokens", "Please reduce the length")


def lengths(server):
    table(lambda **f: complete(server, **f), "max_tokens", [(0, False), (-1, False), (1.5, False), ("5", False), (16.0, True)], "21")
    refused(raw_body(server, '{"prompt":"a","max_tokens":1e300}'), "21: max_tokens 1e300 is refused", param="max_tokens")
    got = chat(server, max_tokens=5, max_completion_tokens=3)
    equal(got.json["usage"]["completion_tokens"], 3, "22: max_completion_tokens wins over max_tokens")


def contexts(clamping, rejecting, ending):
    """--max-model-len 64; a token is a byte, and only the third ever ends."""
    got = chat(clamping, "hi")
    n = got.json["usage"]["prompt_tokens"]
    ok(got.choices[0]["finish_reason"] == "length" and got.json["usage"]["total_tokens"] == 64, "23: a chat that does not say runs to the context's end", got)
    got = chat(ending, "hi")
    ok(got.choices[0]["finish_reason"] == "stop" and got.choices[0]["stop_reason"] is None and got.text == "abc", "23: or to its end token", got)
    for size in 64, 65, 1000:
        got = complete(clamping, [97] * size, max_tokens=1)
        refused(got, f"24: a prompt of {size} in a context of 64 is refused", param="prompt", code="context_length_exceeded", words=CONTEXT_WORDS)
        equal((got.error["n_prompt_tokens"], got.error["n_ctx"]), (size, 64), "24: with both numbers")
    refused(chat(clamping, "x" * 64), "24: so is a chat's", param="messages", code="context_length_exceeded", words=CONTEXT_WORDS)
    refused(chat(clamping, "hi", max_tokens=65), "24: max_tokens over the context alone is refused", code="context_length_exceeded",
            words=("max_tokens is too large: 65", "maximum context length is 64"))
    refused(chat(clamping, "hi", max_completion_tokens=65), "24: by the name that was used", words="max_completion_tokens is too large: 65")
    got = complete(clamping, [97] * 40, max_tokens=60)
    ok(got.status == 200 and got.json["usage"]["completion_tokens"] == 24 and got.choices[0]["finish_reason"] == "length", "25: the sum over the context is clamped", got)
    refused(complete(rejecting, [97] * 40, max_tokens=60), "25: or refused, with --max-tokens-overflow reject", code="context_length_exceeded",
            words="maximum context length is 64 tokens")
    equal(complete(rejecting, [97] * 40, max_tokens=24).status, 200, "25: up to the last token that fits it is served")
    equal(n, len(ask(clamping, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json["tokens"]), "23: prompts are counted as /tokenize counts them")


# ---- 26 to 35: sampling ----

def ranges(server):
    def call(**f):
        return complete(server, **f)
    table(call, "temperature", [(-0.1, False), (0, True), (2, True), (2.1, False), ("0", False), (True, False)], "26")
    refused(raw_body(server, '{"prompt":"a","temperature":1e999}'), "26: temperature 1e999 is refused")
    refused(raw_body(server, '{"prompt":"a","temperature":NaN}'), "26: and NaN")
    table(call, "top_p", [(0, False), (0.5, True), (1, True), (1.01, False)], "27")
    table(call, "top_k", [(-2, False), (-1, True), (0, True), (1, True), (1.5, False), (1 << 40, True)], "28")
    equal(call(top_k=1, seed=77).text, call(**GREEDY).text, "28: top_k 1 is greedy")
    table(call, "min_p", [(-0.1, False), (0, True), (1, True), (1.1, False)], "29")
    table(call, "repetition_penalty", [(0, False), (0.5, True), (-1, False)], "29")
    for field in "presence_penalty", "frequency_penalty":
        table(call, field, [(2, True), (-2, True), (2.1, False), (-2.1, False)], "30")
    table(call, "seed", [((1 << 63) - 1, True), (1 << 63, False), (-1 << 63, True), (-(1 << 63) - 1, False), (0.5, False)], "31")
    refused(call(seed=1 << 63), "31: with the bound's name", words="less_than_equal")
    refused(call(seed=-(1 << 63) - 1), "31: below too", words="greater_than_equal")
    equal(call(seed=(1 << 63) - 2, max_tokens=8).text == call(seed=(1 << 63) - 1, max_tokens=8).text, False, "31: neighbours among large seeds differ")
    one, two = call(seed=5), call(seed=5)
    equal(one.text, two.text, "32: one seed, one text")
    many = call(seed=5, n=3)
    equal(len({c["text"] for c in many.choices}), 3, "32: but three choices are three texts")
    equal([c["text"] for c in call(seed=5, n=3).choices], [c["text"] for c in many.choices], "32: always the same three")
    equal(many.choices[0]["text"], one.text, "32: of which the first is that of n = 1")
    table(call, "n", [(0, False), (1, True), (LIMIT_N, True), (LIMIT_N + 1, False), (10**9, False), (-1, False)], "33")
    equal(len(call(n=LIMIT_N, max_tokens=1).choices), LIMIT_N, "33: as many choices as asked")
    equal(len({c["text"] for c in call(n=2, **GREEDY).choices}), 1, "33: greedy choices are identical")
    table(call, "best_of", [(0, True), (1, True), (2, True), (3, False)], "34", n=2)
    table(call, "stop", [("", False), ([""], False), ([], True), ("x", True), (["x"] * 17, False), (["x"] * 16, True), ("x" * 256, True), ("x" * 257, False), (5, False), ([5], False)], "35")


# ---- 36 to 42: where it ends ----

def stops(server):
    base = complete(server, "The sun rises in the", max_tokens=32, logprobs=0, **GREEDY)
    text, offsets = base.text, base.choices[0]["logprobs"]["text_offset"]

    def check(stop, name, **more):
        fields = {"max_tokens": 32, "stop": stop, **GREEDY, **more}
        whole, parts = complete(server, "The sun rises in the", **fields), cstream(server, "The sun rises in the", **fields)
        first = [stop] if isinstance(stop, str) else stop
        cut = min(text.find(s) for s in first if s in text)
        c = whole.choices[0]
        good = (c["text"] == text[:cut] and c["finish_reason"] == "stop" and c["stop_reason"] in first
                and (parts.good(), parts.text(), parts.reason()) == (True, c["text"], "stop") and parts.of()[-1]["stop_reason"] == c["stop_reason"])
        return ok(good, name, text, whole, parts)

    for at in offsets[1:12]:
        stop = text[at - 2:at + 2]
        check(stop, f"36: a stop across a border of tokens cuts there ({stop!r})")
    check(text[:2], "36: a stop at the first token leaves nothing")
    check(text[offsets[3] + 1:offsets[3] + 3], "36: a stop inside a token cuts inside it")
    at = offsets[6]
    check([text[at:at + 6], text[at:at + 3]], "36: of stops that begin together either may be told")
    check([text[at:at + 40], text[at + 1:at + 4]], "36: a longer stop that never completes does not hide another") if text[at:at + 40] not in text[:-1] else None
    check(["nowhere", "never", text[at:at + 4]], "36: stops that do not occur are no matter")
    got = complete(server, "The sun rises in the", max_tokens=32, stop="nowhere", **GREEDY)
    equal((got.text, got.choices[0]["finish_reason"]), (text, "length"), "36: a stop that never comes changes nothing")
    stop = text[offsets[4] - 1:offsets[4] + 2]
    got = complete(server, "The sun rises in the", max_tokens=32, stop=stop, include_stop_str_in_output=True, **GREEDY)
    ok(got.text == text[:text.find(stop) + len(stop)] and got.choices[0]["stop_reason"] == stop, "37: include_stop_str_in_output keeps it", got)
    got = complete(server, "The sun rises in the", max_tokens=4, echo=True, stop="rises", **GREEDY)
    ok(got.text.startswith("The sun rises in the"), "36: a stop does not match inside an echoed prompt", got)


def stop_ids(server, vocab):
    base = complete(server, max_tokens=16, return_token_ids=True, logprobs=0, **GREEDY).choices[0]
    ids = base["token_ids"]
    at = next(i for i in range(3, 16) if ids[i] not in ids[:i])
    got = complete(server, max_tokens=16, stop_token_ids=[ids[at]], return_token_ids=True, **GREEDY)
    c = got.choices[0]
    ok(c["stop_reason"] == ids[at] and c["finish_reason"] == "stop" and c["text"] == "".join(base["logprobs"]["tokens"][:at]), "38: a stop id ends it and is told, not shown", got)
    equal(got.json["usage"]["completion_tokens"], at + 1, "38: but counted")
    refused(complete(server, stop_token_ids=[-1]), "38: -1 is refused", param="stop_token_ids")
    refused(complete(server, stop_token_ids=[vocab + 1]), "38: an id beyond the logits is refused", param="stop_token_ids", words=(str(vocab + 1), str(vocab)))
    equal(complete(server, stop_token_ids=[vocab - 1], max_tokens=1).status, 200, "38: the last one is not")


def minimum(server):
    """The mock draws its end token at every fourth place."""
    got = complete(server, "hi", ignore_eos=True, max_tokens=50)
    equal((got.json["usage"]["completion_tokens"], got.choices[0]["finish_reason"]), (50, "length"), "39: ignore_eos runs to max_tokens")
    got = complete(server, "hi", min_tokens=10, max_tokens=50)
    equal((got.json["usage"]["completion_tokens"], got.choices[0]["finish_reason"]), (12, "stop"), "40: min_tokens forbids the end until then")
    refused(complete(server, "hi", min_tokens=9, max_tokens=8), "40: min_tokens above max_tokens is refused", param="min_tokens")
    got = complete(server, "hi", min_tokens=2, max_tokens=20, stop="b", ignore_eos=True)
    ok(got.choices[0]["stop_reason"] != "b" or got.json["usage"]["completion_tokens"] > 2, "40: nor do stop strings match before", got)


def biases(server, vocab):
    word = tokens_of(server, " banana")[0]
    got = complete(server, max_tokens=3, logit_bias={str(word): 100}, return_token_ids=True, seed=1)
    equal(got.choices[0]["token_ids"], [word] * 3, "41: a bias of 100 forces a token")
    over = complete(server, max_tokens=3, logit_bias={str(word): 200}, seed=1)
    equal((over.status, over.text), (200, got.text), "41: more is clamped to 100")
    first = complete(server, max_tokens=1, return_token_ids=True, **GREEDY).choices[0]["token_ids"][0]
    got = complete(server, max_tokens=1, logit_bias={str(first): -100}, return_token_ids=True, **GREEDY)
    ok(got.choices[0]["token_ids"] != [first], "41: a bias of -100 bans one", got)
    refused(complete(server, logit_bias={"bad1": 1, "bad2": 1}), "41: all bad keys are named", param="logit_bias", words=("logit_bias", "bad1", "bad2"))
    refused(complete(server, logit_bias={"1": "x"}), "41: a value that is no number is refused", param="logit_bias", words="1")
    refused(complete(server, logit_bias={str(vocab + 1): 1}), "41: an id beyond the logits too", param="logit_bias", words=(str(vocab + 1), str(vocab)))
    refused(complete(server, logit_bias={"foo": 0}), "41: the SDKs' foo is refused", param="logit_bias")
    refused(complete(server, logit_bias=[[1, 2]]), "41: and an array", param="logit_bias")
    table(lambda **f: complete(server, **f), "suffix", [("x", False), (None, True), ("", True)], "42")


# ---- 43 to 54: the rest ----

def fields(server, strict):
    equal(complete(server, "hi", foo=1).status, 200, "43: an unknown key is ignored")
    refused(complete(strict, "hi", foo=1), "43: with --strict-fields it is refused", param="foo")
    equal(complete(server, "hi", max_tokens=1, user="u", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="s", prompt_cache_key="k").status, 200,
          "44: SDKs' extras are accepted")
    equal(chat(server, "hi", max_tokens=1, user="u", metadata={}, store=True, service_tier="auto", verbosity="low", reasoning_effort="low").status, 200, "44: in chats too")
    for value, good in (({"type": "text"}, True), (None, True), ({"type": "json_object"}, False), ({"type": "json_schema"}, False), ("json", False),
                        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, False), ({"type": "xml"}, False), ({}, False)):
        got = chat(server, "hi", max_tokens=1, response_format=value)
        ok(got.status == 200 if good else is_refusal(got) and got.error["param"].startswith("response_format"), f"45: response_format {json.dumps(value)[:40]}: {200 if good else 400}", got)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for more, good in (({"tools": []}, True), ({"tools": [tool], "tool_choice": "none"}, True), ({"tools": [tool], "tool_choice": "required"}, False),
                       ({"tools": [tool]}, False), ({"tool_choice": "required"}, False), ({"tool_choice": "none"}, True), ({"tool_choice": "auto"}, True), ({"tools": "x"}, False)):
        got = chat(server, "hi", max_tokens=1, **more)
        ok(got.status == 200 if good else is_refusal(got) and got.error["param"] in ("tools", "tool_choice"), f"46: {json.dumps(more)[:60]}: {200 if good else 400}", got)
    for unsupported in ("use_beam_search", True), ("guided_json", {}), ("chat_template", "{{x}}"), ("prompt_embeds", "x"), ("length_penalty", 2), ("priority", 3):
        path, body = (CHAT, {"messages": [{"role": "user", "content": "hi"}]}) if unsupported[0] == "chat_template" else (COMPLETION, {"prompt": "hi"})
        refused(ask(server, path, {**body, unsupported[0]: unsupported[1]}), f"2.3: {unsupported[0]} is known and refused", param=unsupported[0], code="unsupported_parameter")


def messages(server):
    user = {"role": "user", "content": "hi"}
    for value in [], None, "hi", [{"content": "hi"}], [user, 5], [{"role": "user"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}]:
        got = ask(server, CHAT, {"messages": value, "max_tokens": 1})
        ok(is_refusal(got) and got.error["param"].startswith("messages"), f"47: messages {json.dumps(value)[:50]} is refused", got)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for value in ([{"role": "user", "content": parts}], [user, {"role": "assistant", "content": None}, user], [{"role": "developer", "content": "x"}, user],
                  [{"role": "critic", "content": "x"}, user], [{"role": "user", "content": "hi", "name": "bob"}]):
        got = ask(server, CHAT, {"messages": value, "max_tokens": 1})
        equal(got.status, 200, f"47: messages {json.dumps(value)[:60]} is served", got)
    joined = ask(server, "/tokenize", {"messages": [{"role": "user", "content": "one\ntwo"}]}).json["tokens"]
    equal(ask(server, "/tokenize", {"messages": [{"role": "user", "content": parts}]}).json["tokens"], joined, "47: parts are joined by line feeds")
    for part in {"type": "image_url", "image_url": {"url": "http://x"}}, {"type": "input_audio"}, {"text": "no type"}:
        got = ask(server, CHAT, {"messages": [{"role": "user", "content": [part]}]})
        ok(is_refusal(got) and got.error["param"] == "messages[0].content[0]", f"47: a part {json.dumps(part)[:40]} is refused", got)
    refused(chat(server, "hi", add_generation_prompt=True, continue_final_message=True), "48: two ways to end the prompt are one too many", words="Cannot set both")


def names(server):
    """--served-model-name m other"""
    refused(complete(server, "hi", model="gpt-9"), "49: an unknown model is 404", 404, "model", "model_not_found", "`gpt-9` does not exist")
    for given, told in ((None, "m"), ("m", "m"), ("other", "other")):
        equal(complete(server, "hi", model=given).json["model"], told, f"49: model {given} is answered as {told}")
        equal({e["model"] for e in cstream(server, "hi", model=given).events}, {told}, "49: in streams too")
    refused(complete(server, "hi", model=5), "49: a model that is no string is refused", param="model")
    equal([m["id"] for m in get(server, "/v1/models").json["data"]], ["m", "other"], "49: all names are listed")
    card = get(server, "/v1/models/other").json
    ok(card["id"] == "other" and card["object"] == "model" and card["max_model_len"] == 8192 and card["parent"] is None, "49: and have a card", card)
    refused(get(server, "/v1/models/nope"), "49: others have none", 404, "model", "model_not_found")


def keys(server):
    def status(extra):
        return get(server, "/v1/models", extra)
    for extra, want in (("", 401), ("Authorization: Bearer wrong\r\n", 401), ("Authorization: bearer k3y\r\n", 200), ("Authorization: Bearer k3y\r\n", 200),
                        ("X-Api-Key: k3y\r\n", 200), ("api-key: k3y\r\n", 200), ("Authorization: Bearer k3y\r\nX-Api-Key: wrong\r\n", 401),
                        ("Authorization: Bearer wrong\r\nX-Api-Key: k3y\r\n", 401), ("Authorization: Basic k3y\r\n", 401), ("Authorization: Bearer k3yy\r\n", 401)):
        got = status(extra)
        if want == 200:
            equal(got.status, 200, f"50: {extra.strip()!r} opens")
        else:
            refused(got, f"50: {extra.strip()!r} does not open", 401, code="invalid_api_key")
            equal(got.header("WWW-Authenticate"), "Bearer", "50: and says what would")
    for path in "/health", "/ping", "/livez", "/readyz":
        equal((get(server, path).status, get(server, path).body), (200, b""), f"50: {path} is open, and empty")
    for path in "/metrics", "/v1/nope", "/version", "/tokenizer_info", "/load", "/", "//v1/models":
        refused(get(server, path), f"50: {path} is not, whatever there is", 401)
    refused(ask(server, COMPLETION, {"prompt": "hi"}), "50: nor is a completion", 401)


def routes(server):
    for path, allow in ((COMPLETION, "POST"), (CHAT, "POST"), ("/tokenize", "POST"), ("/v1/models", "GET"), ("/metrics", "GET")):
        got = get(server, path, method="GET" if allow == "POST" else "POST", extra="" if allow == "POST" else "Content-Length: 0\r\n")
        refused(got, f"52: the wrong method for {path} is 405", 405, code="method_not_allowed")
        ok(allow in got.header("Allow").split(", "), "52: and the right one is told", got.header("Allow"))
    for path in "/v1/nope", "/v2/models", "/V1/models", "/v1/models/", "/":
        refused(get(server, path), f"52: {path} is 404", 404)
    for body in b"[]", b'"x"', b"null", b"", b"{", b"\xef\xbb\xbf{}", b"{}x", b'{"prompt":"a","prompt":"b"}', b'{"prompt":"\xff"}', b'{"prompt":"\\u0000"}', b"{'prompt':1}":
        for path in COMPLETION, CHAT:
            refused(ask(server, path, body), f"53: {body!r} to {path} is refused")
    good = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    for kind, want in (("text/plain", 415), (None, 415), ("application/jsonx", 415), ("application/json; charset=utf-8", 200), ("Application/JSON", 200), ("application/json", 200)):
        head = (f"Content-Type: {kind}\r\n" if kind else "") + "Connection: close\r\n"
        got = Reply(server.talk(request("POST", COMPLETION, head, good, key=None), PATIENCE))
        if want == 200:
            equal(got.status, 200, f"54: Content-Type {kind} is read")
        else:
            refused(got, f"54: Content-Type {kind} is not", 415, words="Only 'application/json' is allowed")
    equal(list(get(server, "/version").json), ["version"], "1.2: /version is a version")
    equal(get(server, "/load").json, {"server_load": 0}, "1.2: /load is 0 when idle")
    ok(isinstance(get(server, "/tokenizer_info").json["eos_token"], str), "1.2: /tokenizer_info names the end token")


def same_ids(server):
    prompts_ = [f"Number {i} is" for i in range(12)]
    alone = [complete(server, p, max_tokens=6, **GREEDY).text for p in prompts_]

    def one(p):
        return ask(server, COMPLETION, {"prompt": p, "max_tokens": 6, **GREEDY}, "X-Request-Id: the-same\r\n")
    got = list(POOL.map(one, prompts_))
    ok([g.text for g in got] == alone and len({g.json["id"] for g in got}) == 12 and all(g.header("X-Request-Id") == "the-same" for g in got),
       "64: one X-Request-Id for twelve requests: twelve answers")


def health_of_a_hung_engine(server):
    """Its steps take 20 s, the one before it serves too; 10 are a stall."""
    eventually(lambda: get(server, "/health").status == 200, 60, 0.5)
    s = server.connect()
    s.sendall(request("POST", COMPLETION, JSON, b'{"prompt":"hi"}', key=None))
    equal(get(server, "/health").status, 200, "58: a busy engine is healthy")
    eventually(lambda: get(server, "/health").status != 200, 30, 0.5)
    got = get(server, "/health")
    refused(got, "58: one that hangs is not", 503, code="engine_stalled")
    ok(got.header("Retry-After"), "58: it may come back")
    equal(get(server, "/livez").status, 200, "58: the process is alive all the same")
    times = []
    for _ in range(15):
        start = time.monotonic()
        get(server, "/health")
        times.append(time.monotonic() - start)
    ok(sorted(times)[7] < 0.05, "58: health is answered in less than 50 ms", sorted(times))
    s.close()
    server.process.kill()


def main():
    hung = mock("--mock-step-us", "20000000", wait=False)
    hanging = POOL.submit(health_of_a_hung_engine, hung)
    letters = ("--mock-first-token", "97", "--mock-n-tokens", "26")
    ends = ("--mock-eos-every", "4", "--mock-eos-token", "258")
    # An event for each token, also on a machine that is busy: the server's loop must get its turn between two steps.
    pace = ("--mock-step-us", "10000")
    m = mock("--served-model-name", "m", "other", *letters, *pace)
    ending = mock("--served-model-name", "m", *letters, *ends, *pace)
    short = mock("--max-model-len", "64", *letters)
    strict = mock("--max-model-len", "64", "--max-tokens-overflow", "reject", "--strict-fields", *letters)
    keyed = mock(key="k3y")
    server = real()
    card = get(server, "/v1/models").json["data"][0]
    vocab = card["meta"]["n_vocab"]
    shapes(server, card["id"])
    prompts(server, vocab)
    echoes(server)
    logprobs(server)
    bytes_of_streams(ending)
    streams(m)
    lengths(server)
    contexts(short, strict, ending)
    ranges(server)
    stops(server)
    stop_ids(server, vocab)
    minimum(ending)
    biases(server, vocab)
    fields(m, strict)
    messages(server)
    names(m)
    keys(keyed)
    routes(m)
    same_ids(server)
    hanging.result()
    for s in m, ending, short, strict, keyed, server:
        equal(s.stop(), 0, "a server ends well")
    done()


main()
