"""The types of the fixtures that run a test's body."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from dep2p.client import Client
from tests.client.scripted_daemon import ScriptedDaemon

Body = Callable[[Client], Awaitable[None]]
Run = Callable[[Body], None]
ScriptedBody = Callable[[ScriptedDaemon, Client], Awaitable[None]]


class ScriptedRun(Protocol):
    """Runs a body with a scripted daemon. ``reconnect_s``: of the client."""

    def __call__(self, body: ScriptedBody, reconnect_s: float = 1e6) -> None: ...
