#!/bin/bash
# usage: packages.sh [--check] GROUP...      groups: build demo test browser lint
# Installs the Debian or Ubuntu packages that are missing, and touches nothing when none is.
# --check only names them, and fails if there are any.
. "$(dirname "$0")/lib.sh"

declare -A group=(
    [build]='build-essential libuv1-dev libcjson-dev libjemalloc-dev python3 python3-venv'
    [demo]='curl'
    [test]='perl curl valgrind strace clang-14 libclang-rt-14-dev clang-format-14'
    [browser]='chromium chromium-driver'
    [lint]='clang-tidy-14 cppcheck clang-format-14'
)

check=
[ "$1" = --check ] && check=1 && shift
command -v dpkg-query > /dev/null || [ -z "$check" ] || exit 0 # elsewhere the compiler will tell

missing=()
for g in "$@"; do
    for p in ${group[$g]}; do
        case "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2> /dev/null || true)" in
        installed) ;;
        *) missing+=("$p") ;;
        esac
    done
done
[ ${#missing[@]} -eq 0 ] && exit 0
[ -n "$check" ] && die "not installed: ${missing[*]} (make serve installs what is missing; for a machine where nothing can be: make CUDA=1 cuda-pack, or dist, on another one)"

command -v apt-get > /dev/null ||
    die "this is not Debian or Ubuntu: please install what is called here ${missing[*]}"
sudo=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo > /dev/null || die "as root, please run: apt-get install ${missing[*]}"
    sudo=(sudo)
    sudo -v # asks for the password here, not in the middle of a step
fi
apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q)
hint="packages could not be installed; when the network is back, or by hand: apt-get install ${missing[*]}"
step apt-update "reading the lists of the system's packages" "${apt[@]}" update || die "$hint"
step apt-install "installing ${missing[*]}" \
    "${apt[@]}" install -y --no-install-recommends "${missing[@]}" || die "$hint"
