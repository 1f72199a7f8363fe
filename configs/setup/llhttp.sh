#!/bin/bash
# Puts the C sources of llhttp 9 into CACHE/llhttp. Debian 12 has 8.1, which lets smuggled requests
# through; the source distribution of httptools carries 9.4.3. Where the system has 9 or newer, the
# Makefile uses that and never asks for this.
. "$(dirname "$0")/lib.sh"

sdist=httptools-0.9.0.tar.gz
sha=d484ebb7e3a3f3597b0f645fbd1b85633674ca808c1f5ba11c2caf7c66f5c8b6
[ -f "$CACHE/llhttp/include/llhttp.h" ] && exit 0

fetch httptools==0.9.0 "$sdist" "$sha" --no-binary :all: ||
    die "no llhttp: put $sdist (SHA-256 $sha) into $CACHE/downloads, or install llhttp 9 or newer"
part=$(mktemp -d "$CACHE/llhttp.XXXXXX")
tar -xzf "$CACHE/downloads/$sdist" -C "$part" --strip-components=3 "${sdist%.tar.gz}/vendor/llhttp"
chmod 755 "$part"
mv -T "$part" "$CACHE/llhttp"
