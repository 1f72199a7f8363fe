"""/metrics as a scraper sees it: the format, read strictly; the names that dashboards query; and exact
counts after known requests (reference/api.md 3). Vector 57."""
import concurrent.futures
import math
import re

from _server import done, equal, eventually, ok
from _spind import ask, chat, complete, cstream, get, hstream, mock, quiescent, real, settles, tokens_of, until

POOL = concurrent.futures.ThreadPoolExecutor(16)
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (\S+)")
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}


class Page:
    """Prometheus' text format 0.0.4; raises on what a strict parser would."""

    def __init__(self, text):
        self.types, self.samples = {}, {}  # samples: name to {labels: value}
        family, closed = None, set()
        if not text.endswith("\n"):
            raise ValueError("no line feed at the end")
        for line in text[:-1].split("\n"):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                if not re.fullmatch(NAME, name) or name in self.types:
                    raise ValueError(f"a second HELP: {line}")
                family = name
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                if name != family or name in closed or kind not in SUFFIXES:
                    raise ValueError(f"TYPE out of place: {line}")
                self.types[name] = kind
                closed.add(name)
            else:
                self.sample(family, line)
        for name, kind in self.types.items():
            if kind == "histogram":
                self.check_histogram(name)

    def sample(self, family, line):
        found = SAMPLE.fullmatch(line)
        if not found or family not in self.types:
            raise ValueError(f"not a sample: {line!r}")
        name = found.group(1)
        if name not in [family + s for s in SUFFIXES[self.types[family]]]:
            raise ValueError(f"{name} among samples of {family}")
        labels = tuple(sorted((k, v) for k, v in re.findall(LABEL, found.group(2) or "")))
        if len({k for k, _ in labels}) != len(labels):
            raise ValueError(f"a label twice: {line}")
        value = float(found.group(found.lastindex))
        series = self.samples.setdefault(name, {})
        if labels in series or math.isnan(value) or (value < 0 and self.types[family] != "gauge"):
            raise ValueError(f"twice, or impossible: {line}")
        series[labels] = value

    def check_histogram(self, name):
        groups = {}
        for labels, v in self.samples.get(name + "_bucket", {}).items():
            rest = tuple(x for x in labels if x[0] != "le")
            groups.setdefault(rest, []).append((dict(labels)["le"], v))
        for rest, buckets in groups.items():
            bounds = [float(le) for le, _ in buckets]
            counts = [v for _, v in buckets]
            if bounds != sorted(set(bounds)) or bounds[-1] != math.inf or counts != sorted(counts):
                raise ValueError(f"buckets of {name}: {buckets}")
            if any(le != ("+Inf" if math.isinf(float(le)) else repr(float(le))) for le, _ in buckets):
                raise ValueError(f"a bound of {name} is not printed as Python prints it: {buckets}")
            if self.samples[name + "_count"][rest] != counts[-1] or rest not in self.samples[name + "_sum"]:
                raise ValueError(f"count or sum of {name}")

    def value(self, name, **labels):
        found = [v for k, v in self.samples.get(name, {}).items() if all(dict(k).get(x) == y for x, y in labels.items())]
        return found[0] if len(found) == 1 else None

    def series(self):
        return {(n, k) for n, s in self.samples.items() for k in s}


def page_of(server):
    return Page(get(server, "/metrics").body.decode("utf-8", "strict"))


HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_max_tokens request_prefill_kv_computed_tokens
    request_params_n iteration_tokens_total request_num_preemptions""".split()
COUNTERS = """num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total
    external_prefix_cache_queries_total external_prefix_cache_hits_total prompt_tokens_total generation_tokens_total prompt_tokens_cached_total
    prompt_tokens_by_source_total request_success_total admission_rejections_total corrupted_requests_total""".split()
GAUGES = """num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc gpu_cache_usage_perc engine_sleep_state
    cache_config_info""".split()
BOUNDS = {
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
    "inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "e2e_request_latency_seconds": ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_params_n": "1 2 5 10 20",
}


def names(server, model):
    got = get(server, "/metrics")
    equal(got.header("Content-Type"), "text/plain; version=0.0.4; charset=utf-8", "57: the page is typed as scrapers want it")
    try:
        page, fault = Page(got.body.decode("utf-8", "strict")), None
    except (ValueError, KeyError) as e:
        page, fault = None, e
    ok(page is not None, "57: it parses, strictly", fault)
    for kind, list_ in (("histogram", HISTOGRAMS), ("counter", COUNTERS), ("gauge", GAUGES)):
        missing = [n for n in list_ if page.types.get("vllm:" + n) != kind]
        equal(missing, [], f"57: every {kind} of vLLM is there")
    ours = {"engine": "0", "model_name": model}
    bare = [n for n in page.samples if n.startswith("vllm:") and page.value(n, **ours) is None and not all(dict(k).items() >= ours.items() for k in page.samples[n])]
    equal(bare, [], "57: with engine and model_name on each")
    for name, bounds in BOUNDS.items():
        have = {dict(k)["le"] for k in page.samples[f"vllm:{name}_bucket"]}
        equal({repr(float(b)) for b in bounds.split()} - have, set(), f"57: {name} has vLLM's bounds")
    reasons = {dict(k)["finished_reason"]: v for k, v in page.samples["vllm:request_success_total"].items()}
    equal(reasons, {"stop": 0, "length": 0, "abort": 0, "error": 0}, "57: all reasons are there at zero before the first request")
    unused = [n for n in HISTOGRAMS if n != "iteration_tokens_total" and page.value(f"vllm:{n}_count") != 0]
    equal(unused, [], "57: and no request's histogram has counted the start")
    for n in "process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "process_start_time_seconds":
        ok(page.value(n) and page.value(n) > 0, f"57: {n} is there")
    config = dict(next(iter(page.samples["vllm:cache_config_info"])))
    ok(config["block_size"] == "16" and int(config["num_gpu_blocks"]) > 0 and config["enable_prefix_caching"] == "True", "57: the cache's configuration is there", config)


def queries(page):
    """What 3.2 asks for must be answerable: sums over labels, quantiles over le."""
    for name in "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds":
        buckets = sorted((float(dict(k)["le"]), v) for k, v in page.samples[f"vllm:{name}_bucket"].items())
        rank = 0.99 * buckets[-1][1]
        upper = next(le for le, v in buckets if v >= rank)
        ok(buckets[-1][1] > 0 and 0 < upper < math.inf, f"3.2: histogram_quantile(0.99, {name}) has data", buckets)
    ok(page.value("vllm:request_queue_time_seconds_sum") / page.value("vllm:request_queue_time_seconds_count") >= 0, "3.2: queue time has a mean")
    ok(sum(page.samples["vllm:num_requests_running"].values()) == 0 and max(page.samples["vllm:kv_cache_usage_perc"].values()) == 0, "3.2: gauges are back at 0")
    ok(0 < page.value("vllm:prefix_cache_hits_total") / page.value("vllm:prefix_cache_queries_total") < 1, "3.2: there is a hit rate")


def counts(server):
    """Every definition of 3.1, on requests whose tokens are known."""
    before = page_of(server)
    n = lambda text: len(tokens_of(server, text))  # noqa: E731
    p = ["One", "Two words", "A prompt of a few more words"]
    sizes = [n(x) for x in p]
    fields = {"temperature": 0, "ignore_eos": True}
    complete(server, p[0], max_tokens=5, **fields)
    cstream(server, p[1], max_tokens=7, **fields)
    complete(server, [p[0], p[2]], max_tokens=3, n=2, **fields)
    got = hstream(server, "hi", max_tokens=4, stream_options={"include_usage": True}, **fields)
    chat_size = got.usage["prompt_tokens"]
    once = complete(server, p[0], max_tokens=9, stop=" ", **fields)
    stopped = once.json["usage"]["completion_tokens"]
    complete(server, p[2], max_tokens=0, echo=True, logprobs=0)
    refused = complete(server, p[0], max_tokens=-1)
    until(lambda: quiescent(server))
    page = page_of(server)

    def rise(name, **labels):
        return page.value(name, **labels) - (before.value(name, **labels) or 0)

    outputs = [5, 7, 3, 3, 3, 3, 4, stopped, 0]
    inputs = [sizes[0], sizes[1], sizes[0], sizes[0], sizes[2], sizes[2], chat_size, sizes[0], sizes[2]]
    ok(once.choices[0]["finish_reason"] == "stop" and refused.status == 400, "the requests went as planned", once, refused)
    equal(rise("vllm:request_success_total", finished_reason="length"), 8, "57: choices that ended by length")
    equal(rise("vllm:request_success_total", finished_reason="stop"), 1, "57: and by a stop string")
    equal(rise("vllm:request_success_total", finished_reason="abort"), 0, "57: which is no abort")
    equal(rise("vllm:request_success_total", finished_reason="error"), 0, "57: nor is a refused request an error of the model")
    equal((rise("vllm:request_prompt_tokens_count"), rise("vllm:request_prompt_tokens_sum")), (9, sum(inputs)), "57: prompt tokens by choice")
    equal((rise("vllm:request_generation_tokens_count"), rise("vllm:request_generation_tokens_sum")), (9, sum(outputs)), "57: generated tokens by choice")
    equal(rise("vllm:prompt_tokens_total"), sum(inputs), "57: prompt_tokens_total")
    equal((rise("vllm:request_params_n_count"), rise("vllm:request_params_n_sum")), (7, 9), "57: n, once per prompt")
    equal(rise("vllm:request_params_max_tokens_sum"), 5 + 7 + 4 * 3 + 4 + 9 + 0, "57: max_tokens as asked")
    equal(rise("vllm:request_max_num_generation_tokens_sum"), 5 + 7 + 3 + 3 + 4 + stopped, "57: the longest choice of each prompt")
    equal(rise("vllm:time_to_first_token_seconds_count"), 8, "57: a time to the first token for each choice that has one")
    equal(rise("vllm:inter_token_latency_seconds_count"), sum(x - 1 for x in outputs if x), "57: a latency between tokens for each but the first")
    equal(rise("vllm:time_per_output_token_seconds_count"), rise("vllm:inter_token_latency_seconds_count"), "57: under its old name too")
    equal(rise("vllm:e2e_request_latency_seconds_count"), 9, "57: a whole latency for each")
    equal(rise("vllm:request_queue_time_seconds_count"), 9, "57: and a time in the queue")
    equal(rise("vllm:request_decode_time_seconds_count"), 8, "57: and of decoding, if any")
    ok(rise("vllm:generation_tokens_total") >= sum(outputs) and rise("vllm:generation_tokens_total") <= sum(outputs) + 3,
       "57: generation_tokens_total counts what was made, of which a stop string may cut the last", rise("vllm:generation_tokens_total"), outputs)
    computed = rise("vllm:prompt_tokens_by_source_total", source="local_compute")
    cached = rise("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    equal(computed + cached, sum(inputs), "57: each prompt token was computed or found")
    equal(cached, rise("vllm:prefix_cache_hits_total"), "57: and the found ones are the prefix cache's hits")
    equal(rise("vllm:iteration_tokens_total_sum"), computed + rise("vllm:generation_tokens_total"), "57: the steps' tokens are those computed")
    equal(rise("vllm:iteration_tokens_total_count"), rise("spind_steps_total"), "57: one observation a step")
    ok(rise("vllm:request_inference_time_seconds_sum") <= rise("vllm:request_prefill_time_seconds_sum") + rise("vllm:request_decode_time_seconds_sum") + 1e-3,
       "57: inference is prefill and decode")
    equal(rise("http_requests_total", handler="/v1/completions", method="POST", status="2xx"), 5, "57: HTTP requests by status")
    equal(rise("http_requests_total", handler="/v1/completions", method="POST", status="4xx"), 1, "57: and refused ones")


def prefix(server):
    text = "Sixteen tokens make a block, so a prompt of many words is found again in the cache when it is sent a second time. " * 3
    size = len(tokens_of(server, text))
    before = page_of(server)
    one = complete(server, text, max_tokens=4, temperature=0)
    two = complete(server, text, max_tokens=4, temperature=0)
    other = complete(server, text, max_tokens=4, temperature=0, cache_salt="mine")
    until(lambda: quiescent(server))
    page = page_of(server)
    found = two.json["usage"].get("prompt_tokens_details", {}).get("cached_tokens")
    ok("prompt_tokens_details" not in one.json["usage"] and found == (size - 1) // 16 * 16 > 0, "a prompt that comes again is found, in whole blocks", size, two.json["usage"])
    ok("prompt_tokens_details" not in other.json["usage"], "but not under another cache_salt", other)
    equal({one.text, two.text, other.text}, {one.text}, "and the answer is the same")
    equal(page.value("vllm:prefix_cache_queries_total") - before.value("vllm:prefix_cache_queries_total"), 3 * size, "57: queries are counted once per request, in tokens")
    equal(page.value("vllm:prefix_cache_hits_total") - before.value("vllm:prefix_cache_hits_total"), found, "57: and hits")
    queries(page)


def cardinality(server):
    complete(server, "hi", max_tokens=1)
    chat(server, "hi", max_tokens=1)
    get(server, "/nope")
    get(server, "/v1/models/none")
    ask(server, "/v1/completions", {"prompt": "x", "model": "none"})
    base = page_of(server).series()
    for i in range(60):
        complete(server, f"p{i}", max_tokens=1, user=f"user{i}", model=f"model{i}" if i % 2 else None)
        get(server, f"/path{i}", f"X-Request-Id: id{i}\r\n")
        get(server, f"/v1/models/m{i}")
    equal(page_of(server).series() - base, set(), "users, models, paths and ids make no series")


def concurrent_sums(server):
    before = page_of(server)
    sizes = [3 + i % 5 for i in range(64)]
    got = list(POOL.map(lambda i: complete(server, f"number {i}", max_tokens=sizes[i], ignore_eos=True), range(64)))
    ok(all(g.status == 200 for g in got), "64 requests at once are served")
    settles(server, "and over")
    page = page_of(server)
    equal(page.value("vllm:generation_tokens_total") - before.value("vllm:generation_tokens_total"), sum(sizes), "57: their tokens add up")
    equal(page.value("vllm:request_success_total", finished_reason="length") - before.value("vllm:request_success_total", finished_reason="length"), 64, "57: and so do they")
    equal(page.value("vllm:inter_token_latency_seconds_count") - before.value("vllm:inter_token_latency_seconds_count"), sum(sizes) - 64, "57: and what is between")


def main():
    server = real()
    model = get(server, "/v1/models").json["data"][0]["id"]
    names(server, model)
    counts(server)
    prefix(server)
    equal(server.stop(), 0, "the server ends well")
    odd = mock("--served-model-name", 'a "quoted" \\ name')
    ok(page_of(odd).value("vllm:num_requests_running", model_name='a \\"quoted\\" \\\\ name') == 0, "labels are escaped")
    cardinality(odd)
    concurrent_sums(odd)
    equal(odd.stop(), 0, "the server ends well")
    bad = mock("--mock-nan-every", "5", "--mock-first-token", "97", "--mock-n-tokens", "26")
    got = [complete(bad, "hi", max_tokens=2, ignore_eos=True) for _ in range(4)]
    broken = [g for g in got if g.status == 500]
    ok(broken and all(g.error["type"] == "server_error" and g.header("x-should-retry") == "false" for g in broken), "numbers that are not finite are a 500", got)
    settles(bad, "that leaves nothing behind")
    page = page_of(bad)
    equal((page.value("vllm:corrupted_requests_total"), page.value("vllm:request_success_total", finished_reason="error")), (len(broken),) * 2, "57: and is counted")
    equal(bad.stop(), 0, "the server ends well")
    off = mock("--metrics-listen", "off")
    equal(get(off, "/metrics").status, 404, "--metrics-listen off has no page")
    equal(off.stop(), 0, "the server ends well")
    done()


main()
