#!/bin/bash
# usage: python.sh NAME: a Python environment with the packages of configs/setup/NAME.txt, in the
# cache; prints nothing when it is there. With --path NAME prints the path of its interpreter.
. "$(dirname "$0")/lib.sh"

path_only=
[ "$1" = --path ] && path_only=1 && shift
name=$1
venv=$(venv_path "venv-$name")
[ -n "$path_only" ] && echo "$venv/bin/python" && exit 0

list=$ROOT/configs/setup/$name.txt
cmp -s "$list" "$venv/installed.txt" && exit 0
venv_make "$venv"
step "pip-$name" "installing $(grep -vc '^#' "$list") Python packages for $name" "$venv/bin/python" -m pip \
    --disable-pip-version-check install --retries 3 --timeout 20 -r "$list" ||
    die "the Python packages of $list could not be installed"
cp "$list" "$venv/installed.txt"
