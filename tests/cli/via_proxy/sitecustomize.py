"""In daemons of tests/cli/test_real_sessions.py: TCP connections go where a file says, for example through a proxy.

The file that DEP2P_TEST_ROUTES names has lines "PORT OTHER_PORT". Nodes tell each other their real addresses, so this
is the only way to keep a proxy between them that they do not know of.
"""

import os
import socket
from pathlib import Path
from typing import Any

_routes = os.environ.get("DEP2P_TEST_ROUTES")
_connect = socket.socket.connect


def _by_route(self: socket.socket, address: Any) -> None:
    if _routes and self.family == socket.AF_INET:
        for line in Path(_routes).read_text().splitlines():
            port, other = line.split()
            if address[1] == int(port):
                address = (address[0], int(other))
                break
    _connect(self, address)


if _routes:
    socket.socket.connect = _by_route  # type: ignore[assignment, method-assign]
