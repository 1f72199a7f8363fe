#!/bin/bash
# `make demo`: starts the daemon on a free port, asks it for a chat and a completion with curl, shows
# the text as it comes and what the daemon counted, and stops it.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

configs/setup/packages.sh build demo
if [ -z "${MODEL:-}" ]; then
    configs/setup/model.sh
    MODEL=$(configs/setup/model.sh --path)
fi
build "building $SPIND" "$SPIND"

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
log=$LOGS/demo.log
"$SPIND" serve "$MODEL" --host 127.0.0.1 --port "$port" > "$log" 2>&1 &
daemon=$!
trap 'kill -KILL $daemon 2> /dev/null || true' EXIT

ready()
{
    local i
    for ((i = 0; i < 3000; i++)); do
        curl -sf -o /dev/null -m 2 "$url/health" && return
        kill -0 $daemon 2> /dev/null || return 1
        sleep 0.01
    done
    return 1
}
step ready "starting $SPIND at $url" ready || {
    tail -n 20 "$log"
    die "the daemon did not become ready; its log is $log"
}

ask()
{
    python3 configs/setup/show_stream.py "$url$1" "$2"
}
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "What is a page table? Two sentences."}],
 "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 120, "temperature": 0}'
ask /v1/completions '{"prompt": "The three primary colours are", "stream": true,
 "stream_options": {"include_usage": true}, "max_tokens": 40, "temperature": 0}'

echo
echo "\$ curl $url/metrics | grep ..."
curl -sS "$url/metrics" > "$LOGS/demo-metrics.txt"
grep -E '^[a-z]+:(prompt_tokens_total|generation_tokens_total|request_success_total|num_requests_running|time_to_first_token_seconds_(sum|count)|(gpu|kv)_cache_usage_perc|prefix_cache_(queries|hits)_total)' \
    "$LOGS/demo-metrics.txt" | grep -v ' 0\.0$' || head -n 20 "$LOGS/demo-metrics.txt"

echo
kill -TERM $daemon
rc=0
wait $daemon || rc=$?
trap - EXIT
say "the daemon has drained and ended with status $rc"
exit $rc
