"""Posts a request with curl and shows the text of the events as they come, then the rate. Exits with 1
if the stream was not a complete one.   usage: show_stream.py URL BODY"""
import json
import subprocess
import sys
import time

url, body = sys.argv[1:]
print("\n$ curl -N %s -d '%s'" % (url, body), flush=True)
started = time.perf_counter()
curl = subprocess.Popen(["curl", "-sSN", url, "-H", "Content-Type: application/json", "-d", body],
                        stdout=subprocess.PIPE)
first = last = None
usage = error = None
complete = False
for line in curl.stdout:
    line = line.decode("utf-8", "strict").strip()
    if not line.startswith("data:"):
        error = error or (line if line.startswith("{") else None)
        continue
    data = line[5:].strip()
    if data == "[DONE]":
        complete = True
        break
    event = json.loads(data)
    error = event.get("error", error)
    usage = event.get("usage") or usage
    for choice in event.get("choices", []):
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        if text:
            last = time.perf_counter()
            first = first or last
            print(text, end="", flush=True)
print()
if error or not complete or first is None or usage is None:
    sys.exit("the stream ended without a result: %s" % (error,))
tokens = usage["completion_tokens"]
rate = (tokens - 1) / (last - first) if last > first else 0.0
print("-- %d prompt tokens, first text after %.0f ms, %d tokens at %.0f tokens/s"
      % (usage["prompt_tokens"], (first - started) * 1e3, tokens, rate))
