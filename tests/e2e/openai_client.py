"""The openai package against the real model: what its users do, and what must hold whoever else asks
at the same time."""
import asyncio
import concurrent.futures
import os

import openai

from _server import clean_env, done, equal, ok
from _spind import PATIENCE, get, metrics, mock, real, settles, until

POOL = concurrent.futures.ThreadPoolExecutor(2)
KEY = "sk-one-two-three"
GREEDY = {"temperature": 0}
TOPICS = "rivers mountains trains bread music chess winter letters clocks gardens ships maps bridges candles horses kings".split()


def client_of(server, **more):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": PATIENCE, **more})


def async_client_of(server):
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)


def user(text):
    return [{"role": "user", "content": text}]


def raised(call, *args, **fields):
    try:
        call(*args, **fields)
    except openai.OpenAIError as e:
        return e
    return None


# ---- one client ----

def models(client):
    listed = client.models.list().data
    equal([m.object for m in listed], ["model"], "models.list() names the model")
    model = client.models.retrieve(listed[0].id)
    ok(model.id == listed[0].id and model.owned_by and model.created > 1e9, "models.retrieve() finds it", model)
    return model.id


def chats(client, model):
    a = client.chat.completions.create(model=model, messages=user("Name three colours."), max_tokens=24, **GREEDY)
    c = a.choices[0]
    ok(a.object == "chat.completion" and a.model == model and c.message.role == "assistant" and len(c.message.content) > 10
       and c.finish_reason in ("stop", "length") and a.usage.total_tokens == a.usage.prompt_tokens + a.usage.completion_tokens, "chat.completions.create()", a)
    pieces = list(client.chat.completions.create(model=model, messages=user("Name three colours."), max_tokens=24, stream=True,
                                                 stream_options={"include_usage": True}, **GREEDY))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    equal(text, c.message.content, "streamed, it is the same text")
    ok(pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices == [] and pieces[-2].choices[0].finish_reason == c.finish_reason
       and len({p.id for p in pieces}) == 1, "with role first, reason last, then usage", pieces[-2:])
    equal((pieces[-1].usage.prompt_tokens, pieces[-1].usage.completion_tokens), (a.usage.prompt_tokens, a.usage.completion_tokens), "and the same usage")
    with client.chat.completions.stream(model=model, messages=user("Name three colours."), max_tokens=24, stop=text[9:14], **GREEDY) as s:
        kinds = [e.type for e in s]
        final = s.get_final_completion()
    ok(final.choices[0].message.content == text[:text.find(text[9:14])] and "content.delta" in kinds and kinds[-1] == "content.done", "chat.completions.stream() puts it together", kinds)
    many = client.chat.completions.create(model=model, max_tokens=8, n=3, seed=1, temperature=1, messages=[
        {"role": "system", "content": "You are terse."}, {"role": "user", "content": [{"type": "text", "text": "Say a"}, {"type": "text", "text": "word."}]},
        {"role": "assistant", "content": "Word."}, {"role": "user", "content": "Another."}])
    equal([x.index for x in many.choices], [0, 1, 2], "several turns, parts and n = 3")
    a = client.chat.completions.create(model=model, messages=user("Count."), max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY)
    tokens = a.choices[0].logprobs.content
    ok("".join(t.token for t in tokens) == a.choices[0].message.content and all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob == t.logprob <= 0 for t in tokens),
       "logprobs are typed, and greedy tokens are their own best", tokens)
    a = client.chat.completions.create(model=model, messages=user("Name three colours."), max_tokens=24, stop=[text[6:12]], **GREEDY)
    ok(a.choices[0].message.content == text[:text.find(text[6:12])] and a.choices[0].finish_reason == "stop", "stop cuts", a)


def completions(client, model):
    prompt = "Roses are red,"
    a = client.completions.create(model=model, prompt=prompt, max_tokens=12, logprobs=2, **GREEDY)
    lp = a.choices[0].logprobs
    ok(a.object == "text_completion" and "".join(lp.tokens) == a.choices[0].text and len(lp.top_logprobs) == 12 and a.usage.completion_tokens == 12, "completions.create()", a)
    pieces = list(client.completions.create(model=model, prompt=prompt, max_tokens=12, stream=True, **GREEDY))
    ok("".join(p.choices[0].text for p in pieces) == a.choices[0].text and pieces[-1].choices[0].finish_reason == "length" and pieces[-1].choices[0].text, "streamed, with text and reason last", pieces[-1])
    ids = client.completions.create(model=model, prompt=prompt, max_tokens=12, extra_body={"return_token_ids": True, "top_k": 5, "min_p": 0.1}, seed=3)
    again = client.completions.create(model=model, prompt=ids.choices[0].prompt_token_ids, max_tokens=12, extra_body={"top_k": 5, "min_p": 0.1}, seed=3)
    equal(again.choices[0].text, ids.choices[0].text, "extra_body reaches us; ids and seed give the text again")
    a = client.completions.create(model=model, prompt=["One", "Two"], max_tokens=3, echo=True, user="me", logit_bias={"42": -5}, presence_penalty=1, frequency_penalty=-1, best_of=1)
    ok([c.index for c in a.choices] == [0, 1] and a.choices[1].text.startswith("Two"), "a batch, with echo and penalties", a)


def errors(client, model, server):
    def bad(status, kind, param, code, name, call, **fields):
        e = raised(call, **fields)
        return ok(isinstance(e, kind) and e.status_code == status and e.param == param and e.code == code and e.request_id and e.type and str(e.status_code) in str(e), name,
                  type(e), getattr(e, "body", e))
    chat, complete = client.chat.completions.create, client.completions.create
    good = {"model": model, "messages": user("hi")}
    bad(404, openai.NotFoundError, "model", "model_not_found", "an unknown model is NotFoundError", chat, **{**good, "model": "nope"})
    bad(404, openai.NotFoundError, "model", "model_not_found", "also when it is asked for", client.models.retrieve, model="nope")
    bad(400, openai.BadRequestError, "temperature", "invalid_value", "a value out of range is BadRequestError, with the field", chat, **good, temperature=3)
    bad(400, openai.BadRequestError, "messages", "invalid_value", "no messages too", chat, model=model, messages=[])
    bad(400, openai.BadRequestError, "prompt", "context_length_exceeded", "and a prompt too long", complete, model=model, prompt=[5] * 9000)
    bad(400, openai.BadRequestError, "response_format", "unsupported_parameter", "and what is not built", chat, **good, response_format={"type": "json_object"})
    bad(400, openai.BadRequestError, "tool_choice", "unsupported_parameter", "and tools that are demanded", chat, **good, tool_choice="required",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    bad(400, openai.BadRequestError, "logprobs", "invalid_value", "a stream's mistakes are found before it begins", complete, model=model, prompt="x", logprobs=21, stream=True)
    bad(401, openai.AuthenticationError, None, "invalid_api_key", "a wrong key is AuthenticationError", client_of(server, api_key="sk-wrong").models.list)
    e = raised(client.embeddings.create, model=model, input="x")
    ok(isinstance(e, openai.NotFoundError) and e.code == "unknown_url", "an endpoint that is not there is NotFoundError", e)
    raw = client.chat.completions.with_raw_response.create(**good, max_tokens=1, extra_headers={"X-Request-Id": "my-id"})
    ok(raw.headers["x-request-id"] == "my-id" and raw.parse()._request_id == "my-id" and raw.parse().id != "my-id", "X-Request-Id comes back, and is not the answer's id")


def retries():
    """A full server: the package waits as told and tries again."""
    server = mock("--mock-step-us", "1000", "--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--mock-first-token", "97", "--mock-n-tokens", "26")
    once = client_of(server)
    stream = once.completions.create(model="mock", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    behind = POOL.submit(once.completions.create, model="mock", prompt="x", max_tokens=3)
    until(lambda: metrics(server)["vllm:num_requests_waiting"] == 1)
    e = raised(once.completions.create, model="mock", prompt="y", max_tokens=2)
    ok(isinstance(e, openai.InternalServerError) and e.status_code == 503 and e.code == "server_overloaded", "a full server is InternalServerError with 503", e)
    patient = client_of(server, max_retries=5)
    equal(patient.completions.create(model="mock", prompt="y", max_tokens=2).choices[0].text, "ab", "a client that retries is served")
    equal(behind.result().choices[0].text, "abc", "as is the one that waited")
    stream.close()
    settles(server, "a stream that is closed early is over")
    equal(server.stop(), 0, "the server ends well")


def cached(client, model):
    text = "A long introduction about the history of maps and those who drew them, read twice. " * 8
    first = client.completions.create(model=model, prompt=text, max_tokens=8, **GREEDY)
    again = client.completions.create(model=model, prompt=text, max_tokens=8, **GREEDY)
    longer = client.completions.create(model=model, prompt=text + "And then?", max_tokens=8, stop="zzz", **GREEDY)
    hits = again.usage.prompt_tokens_details.cached_tokens
    ok(first.usage.prompt_tokens_details is None and hits == (again.usage.prompt_tokens - 1) // 16 * 16, "cached_tokens tells what the prefix cache held", again.usage)
    equal(again.choices[0].text, first.choices[0].text, "which changes no text")
    ok(longer.usage.prompt_tokens_details.cached_tokens >= hits - 16, "longer prompts find their beginning", longer.usage)
    stop = first.choices[0].text.strip().split()[0]
    cut = client.completions.create(model=model, prompt=text, max_tokens=8, stop=stop, **GREEDY)
    ok(cut.choices[0].finish_reason == "stop" and cut.usage.prompt_tokens_details.cached_tokens == hits, "an answer cut by a stop string tells it too", cut)
    pieces = list(client.completions.create(model=model, prompt=text, max_tokens=2, stream=True, stream_options={"include_usage": True}))
    equal(pieces[-1].usage.prompt_tokens_details.cached_tokens, hits, "so does a stream")


# ---- many clients ----

async def answer(client, model, prompt, **fields):
    a = await client.completions.create(model=model, prompt=prompt, **fields)
    return [c.text for c in a.choices]


async def streamed(client, model, prompt, **fields):
    texts = {}
    async for p in await client.completions.create(model=model, prompt=prompt, stream=True, **fields):
        for c in p.choices:
            texts[c.index] = texts.get(c.index, "") + c.text
    return [texts[i] for i in sorted(texts)]


async def crowd(server, model):
    """Greedy or drawn, alone or among others, streamed or not, in whatever order: one text."""
    async with async_client_of(server) as client:
        greedy = {"max_tokens": 32, "temperature": 0}
        prompts = [f"A story about {t}" + " and more" * (i * 5) + ":" for i, t in enumerate(TOPICS)]
        alone = [(await answer(client, model, p, **greedy))[0] for p in prompts]
        together = await asyncio.gather(*(answer(client, model, p, **greedy) for p in prompts))
        equal([t[0] for t in together], alone, "greedy answers are the same alone and among 15 others")
        backwards = await asyncio.gather(*(streamed(client, model, p, **greedy) for p in reversed(prompts)))
        equal([t[0] for t in reversed(backwards)], alone, "and streamed, in another order")
        drawn = [{"max_tokens": 24, "seed": i, "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5} for i in range(16)]
        alone = [(await answer(client, model, p, **f))[0] for p, f in zip(prompts, drawn)]
        together = await asyncio.gather(*(streamed(client, model, p, **f) for p, f in zip(prompts, drawn)))
        equal([t[0] for t in together], alone, "so are drawn ones, by their seed")
        n = {"max_tokens": 16, "n": 4, "seed": 11, "temperature": 1}
        first = await answer(client, model, prompts[0], **n)
        noise = [asyncio.ensure_future(answer(client, model, p, max_tokens=24)) for p in prompts[:8]]
        second = await streamed(client, model, prompts[0], **n)
        await asyncio.gather(*noise)
        ok(first == second and len(set(first)) == 4, "four choices of one seed are four texts, the same again", first, second)
        equal((await answer(client, model, prompts[0], **{**n, "n": 2})), first[:2], "and do not depend on how many they are")

        chats = await asyncio.gather(*(one_chat(client, model, f"Tell me about {TOPICS[i % 16]} number {i}.") for i in range(64)))
        ok(all(text and reason in ("stop", "length") and usage.completion_tokens <= 16 for text, reason, usage in chats), "64 streams at once all end well", chats[:3])
        fresh = await asyncio.gather(*(one_chat(client, model, f"Tell me about {TOPICS[i % 16]} number {i}.") for i in (0, 31, 63)))
        equal([f[0] for f in fresh], [chats[i][0] for i in (0, 31, 63)], "with the text they have among three")


async def one_chat(client, model, text):
    out, reason, usage = "", None, None
    async for p in await client.chat.completions.create(model=model, messages=user(text), max_tokens=16, stream=True, stream_options={"include_usage": True}, temperature=0):
        usage = p.usage or usage
        for c in p.choices:
            out += c.delta.content or ""
            reason = c.finish_reason or reason
    return out, reason, usage


def main():
    for name in "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY":
        os.environ.pop(name, None)
    server = real(key=KEY, env=clean_env())
    with client_of(server) as client:
        model = models(client)
        chats(client, model)
        completions(client, model)
        errors(client, model, server)
        cached(client, model)
    asyncio.run(crowd(server, model))
    equal(get(server, "/health").status, 200, "the server is well")
    equal(server.stop(), 0, "and ends well")
    retries()
    done()


main()
