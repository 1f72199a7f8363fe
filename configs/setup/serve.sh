#!/bin/bash
# `make serve`: from a bare machine to a daemon that answers. usage: serve.sh [flags of spind serve]
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

configs/setup/packages.sh build
if [ -z "${MODEL:-}" ]; then
    configs/setup/model.sh
    MODEL=$(configs/setup/model.sh --path)
fi
build "building $SPIND" "$SPIND"

# A model's own defaults, if there are any: named after its file without the quantisation. Flags win.
name=$(basename "$MODEL" .gguf | tr '[:upper:]' '[:lower:]')
defaults=configs/serve/${name%.*}.json
config=()
if [ -f "$defaults" ] && [[ " $* " != *" --config"* ]]; then
    config=(--config "$defaults")
fi
exec "$SPIND" serve "$MODEL" "${config[@]}" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"
