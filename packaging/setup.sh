#!/usr/bin/env bash
# Makes .venv from requirements.lock, or says the exact line that is missing. Safe to run again; fast when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.dep2p-setup

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "error: $1"; [ -z "${2-}" ] || say "try:   $2"; exit 1; }

wanted=$(cat requirements.lock pyproject.toml packaging/setup.sh | sha256sum | cut -d' ' -f1)
if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

python=
for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'; then
        python=$(command -v "$candidate")
        break
    fi
done

# Everything that needs the system's packages is looked at before the first file is written.
missing=()
if [ -z "$python" ]; then
    missing+=(python3 python3-venv python3-dev)
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] || missing+=(python3-dev)
fi
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
# py-libp2p depends on fastecdsa, which has no wheel: it is compiled against GMP.
if ! { command -v gcc >/dev/null && printf '#include <gmp.h>\n' | gcc -E -x c - >/dev/null 2>&1; }; then
    missing+=(libgmp-dev)
fi
if [ ${#missing[@]} -gt 0 ]; then
    line="apt-get update && apt-get install -y ${missing[*]}"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${missing[*]}"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null; } ||
            fail "apt-get could not install ${missing[*]}" "$line"
        if [ -z "$python" ]; then
            python=$(command -v python3) && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
                fail "this system's python3 is older than 3.11" "install Python 3.11, 3.12 or 3.13"
        fi
    else
        fail "missing on this machine: ${missing[*]}" "sudo sh -c '$line'"
    fi
fi

say "making $venv with $("$python" --version) (half a minute)"
[ -x $venv/bin/python ] && $venv/bin/python -c '' 2>/dev/null || { rm -rf $venv; "$python" -m venv $venv; }
rm -f $stamp
export PIP_DISABLE_PIP_VERSION_CHECK=1
$venv/bin/python -m pip install -q -r requirements.lock ||
    fail "pip could not install requirements.lock" "look at pip's lines above, then run make again: it goes on where it stopped"
$venv/bin/python -m pip install -q --no-deps --no-build-isolation -e . || fail "pip could not install dep2p itself"
# trio-typing, which py-libp2p pulls in, ships stubs of an old trio that hide the types of the installed one.
rm -rf $venv/lib/python3.*/site-packages/{trio,outcome,async_generator}-stubs
printf '%s\n' "$wanted" >$stamp
