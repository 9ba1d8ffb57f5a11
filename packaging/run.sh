#!/bin/sh
# `make run`: says what to type next, then is the node until Ctrl-C.
cd "$(dirname "$0")/.." || exit 1
cat >&2 <<'TXT'
Starting a node in this terminal (Ctrl-C stops it). What to type next, in a second one:

  .venv/bin/dep2p status                  how it is
  .venv/bin/dep2p realm new team          make a private group
  .venv/bin/dep2p realm invite team       print the line that lets others join it
  .venv/bin/dep2p listen news             print notifies that members send
  .venv/bin/dep2p help                    everything else

On the machine of a friend (or here, with --data-dir ./friend before each command and its own port):

  .venv/bin/dep2p --data-dir ./friend daemon --listen /ip4/127.0.0.1/tcp/0
  .venv/bin/dep2p --data-dir ./friend realm join          asks for the invite
  .venv/bin/dep2p --data-dir ./friend notify --all news "hello"

TXT
exec .venv/bin/dep2p daemon
