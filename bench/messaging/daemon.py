"""The idle daemon, as users run it: ``python -m dep2p.daemon`` in a realm, with everything on."""

import os
import sys
import tempfile
from pathlib import Path

import trio
from trio.socket import AF_UNIX, SOCK_DGRAM

from bench.harness.environment import process_rss_kb
from bench.harness.processes import WorkerError, other_process

_READY_TIMEOUT_S = 60.0
_OPTIONS = (
    *("--listen", "/ip4/127.0.0.1/tcp/0"),
    *("--listen", "/ip4/127.0.0.1/tcp/0/ws"),
    *("--listen", "/ip4/127.0.0.1/udp/0/quic-v1"),
    *("--set", "control.tcp=127.0.0.1:0"),
    *("--set", "node.dht=true"),
    *("--set", "node.relay=server"),
)
"""All that can be on without leaving the loopback interface, as mDNS would."""


async def idle_daemon_kb(bootstrap: str) -> float:
    """Resident memory of a daemon in a realm of its own when it says that it is ready, KB.

    ``bootstrap`` is the address of a node, for the DHT. Raises WorkerError when the daemon is never ready.
    """
    from dep2p.realm.credentials import Realm  # here, so that only this benchmark needs it

    with tempfile.TemporaryDirectory(prefix="dep2p-bench-") as directory:
        realms = Path(directory) / "realms"
        realms.mkdir(mode=0o700)
        Realm.generate("bench").save(realms / "bench.realm")
        said = str(Path(directory) / "said")
        with trio.socket.socket(AF_UNIX, SOCK_DGRAM) as listener:
            await listener.bind(said)
            command = [sys.executable, "-m", "dep2p.daemon", "--data-dir", directory]
            command += ["--bootstrap", bootstrap, *_OPTIONS]
            settings = {name: value for name, value in os.environ.items() if not name.startswith("DEP2P_")}
            async with other_process(command, settings | {"NOTIFY_SOCKET": said}) as process:
                with trio.move_on_after(_READY_TIMEOUT_S):
                    while b"READY=1" not in await listener.recv(4_096):
                        pass
                    return process_rss_kb(process.pid)
                raise WorkerError(f"the daemon was not ready in {_READY_TIMEOUT_S:g} s: {' '.join(command)}")
