#!/bin/sh
# Installs the NSQ clients of the interop tests, unchanged, beside this script: nsqjs from npm, pynsq from PyPI.
set -eu
cd "$(dirname "$0")"
npm=../../../.venv/bin/npm
[ -x "$npm" ] || npm=npm
if ! command -v "$npm" >/dev/null 2>&1; then
    echo "nsq clients: npm is not here, so the tests with nsqjs will be skipped" >&2
elif ! { [ -e node_modules/.locked ] && cmp -s package-lock.json node_modules/.locked; }; then
    "$npm" ci --ignore-scripts --loglevel=error
    cp package-lock.json node_modules/.locked
fi
if ! { [ -e venv/.locked ] && cmp -s requirements.txt venv/.locked; }; then
    ../../../.venv/bin/python -m venv --clear venv
    venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt venv/.locked
fi
