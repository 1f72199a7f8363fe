#!/bin/bash
# usage: promtool.sh [--path]      puts Prometheus' checker of metrics and rules into CACHE/promtool; --path says where
# From Debian's package prometheus (19 MB to fetch, 48 MB kept), which is not installed: that would start a server on
# every machine that runs the tests. apt-get checks what it fetches. A promtool on the PATH is used as it is.
. "$(dirname "$0")/lib.sh"

found=$(command -v promtool || printf '%s/promtool' "$CACHE")
[ "${1:-}" = --path ] && printf '%s\n' "$found" && exit 0
[ -x "$found" ] && exit 0
command -v apt-get > /dev/null || die "no promtool: its tests are skipped"

part=$(mktemp -d "$CACHE/promtool.XXXXXX")
trap 'rm -rf "$part"' EXIT
take()
{
    cd "$part" && apt-get -q download prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
}
STEP_QUIET=1 step promtool "fetching promtool from the package prometheus" take || die "no promtool: its tests are skipped"
mv "$part/usr/bin/promtool" "$CACHE/promtool"
