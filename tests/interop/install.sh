#!/bin/sh
# Installs the peers of the interop tests beside this script: NSQ clients, go-libp2p, and js-libp2p exactly as locked.
set -eu
cd "$(dirname "$0")"
./nsq/install.sh
./go/install.sh
# The development requirements bring Node.js along; a machine's own may be too old or absent.
npm=../../.venv/bin/npm
if [ ! -x "$npm" ]; then
    npm=npm
    if ! command -v npm >/dev/null 2>&1; then
        echo "interop peer: npm is not here, so the tests against js-libp2p will be skipped (they need Node 20 or newer)" >&2
        exit 0
    fi
fi
if [ -e node_modules/.locked ] && cmp -s package-lock.json node_modules/.locked; then
    exit 0
fi
"$npm" ci --ignore-scripts --loglevel=error
cp package-lock.json node_modules/.locked
