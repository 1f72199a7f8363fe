# What the set-up scripts share: where things are kept, how a step is shown, how a package of the
# Python registry is fetched. Sourced by the others; bash.
#
# Downloads live outside the tree, so that a fresh clone finds what the last one fetched. Every
# file is checked against the digest in this folder before it gets its final name.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CACHE=${SPIND_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spind}
LOGS=$CACHE/logs
mkdir -p "$CACHE/downloads" "$LOGS"

say()
{
    printf 'spind: %s\n' "$*"
}

die()
{
    printf 'spind: %s\n' "$*" >&2
    exit 1
}

# step NAME TEXT COMMAND...: runs it with its output in a log, says how long it took; when it fails
# shows the end of the log, unless STEP_QUIET is set, and returns its status.
step()
{
    local name=$1 text=$2 log=$LOGS/$1.log start=$EPOCHREALTIME rc=0
    shift 2
    printf 'spind: %s ... ' "$text"
    "$@" > "$log" 2>&1 < /dev/null || rc=$?
    local us=$((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}))
    if [ "$rc" -eq 0 ]; then
        printf '%d.%d s\n' $((us / 1000000)) $((us / 100000 % 10))
    else
        printf 'failed after %d s (%s)\n' $((us / 1000000)) "$log"
        [ -n "${STEP_QUIET:-}" ] || tail -n 25 "$log" | sed 's/^/    /'
    fi
    return "$rc"
}

sha256_is()
{
    [ -f "$1" ] && [ "$(sha256sum < "$1" | cut -d' ' -f1)" = "$2" ]
}

# A virtual environment in the cache, because the system's Python refuses to be installed into.
# One for each version of Python: a distribution upgrade must not leave a broken one behind.
venv_path()
{
    printf '%s/%s-%s' "$CACHE" "$1" "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
}

venv_make()
{
    [ -x "$1/bin/python" ] && "$1/bin/python" -m pip --version > /dev/null 2>&1 && return
    command -v python3 > /dev/null || die "python3 is missing; configs/setup/packages.sh build installs it"
    step venv "making a Python environment in $1" python3 -m venv --clear "$1" ||
        die "python3 -m venv failed: is the package python3-venv installed?"
}

# fetch NAME==VERSION FILE SHA256 [pip options]: CACHE/downloads/FILE, verified. pip itself retries and
# knows the registry, mirrors and proxies that this machine is set up for.
fetch()
{
    local what=$1 file=$2 sha=$3 venv
    shift 3
    sha256_is "$CACHE/downloads/$file" "$sha" && return
    venv=$(venv_path venv)
    venv_make "$venv"
    local part
    part=$(mktemp -d "$CACHE/downloads/part.XXXXXX")
    local try ok=1 tries=3 STEP_QUIET
    for ((try = 1; try <= tries; try++)); do
        STEP_QUIET=$([ $try -eq $tries ] || echo yes)
        step "fetch-$file" "fetching $what from the Python package registry" "$venv/bin/python" -m pip \
            --disable-pip-version-check download --no-deps --retries 3 --timeout 20 --dest "$part" \
            "$@" "$what" || continue
        sha256_is "$part/$file" "$sha" && ok=0 && break
        say "$file is not what was expected (SHA-256); trying again"
    done
    [ "$ok" -eq 0 ] && mv "$part/$file" "$CACHE/downloads/$file"
    rm -rf "$part"
    return "$ok"
}

# build TEXT TARGET...: what the Makefile fetches is shown as steps of its own.
build()
{
    local text=$1
    shift
    "${MAKE:-make}" llhttp
    step build "$text" "${MAKE:-make}" "$@"
}
