#!/usr/bin/env bash
# PostgreSQL and Redis for the tests of the queue stores, from the system's packages. The tests start servers of their
# own on free ports in temporary directories; the system's are left alone. Safe to run again; fast when both are there.
set -euo pipefail

say() { printf 'services: %s\n' "$*" >&2; }

missing=()
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null || missing+=(postgresql)
command -v redis-server >/dev/null || missing+=(redis-server)
[ ${#missing[@]} -gt 0 ] || exit 0

line="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "missing: ${missing[*]}. Without them the tests of their stores are skipped, and fail where CI=true"
    say "try:   sudo sh -c '$line'"
    exit 0
fi
say "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# A server that the package starts would take the usual port of this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f $policy' EXIT
fi
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null; then
    say "error: apt could not install ${missing[*]}"
    say "try:   $line"
    exit 1
fi
