"""Sources of peers' addresses, behind one interface; a source that fails is logged, counted and tried again."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import trio

from dep2p.host.counters import Counters
from dep2p.host.interface import Connection, HostEvent
from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import PeerId

if TYPE_CHECKING:
    from dep2p.host.discovery.libp2p_adapter import FacadeHost

logger: logging.Logger = logging.getLogger("dep2p.host")

_BACKOFF = Backoff(first_s=1.0, max_s=60.0)
_STEADY_S = 60.0

Emit = Callable[[PeerId, Sequence[str]], None]
"""Names addresses of a peer; the host remembers them and emits PeerDiscovered when they or the peer are new."""


class HostView(Protocol):
    """The part of the host that a source may use."""

    @property
    def peer_id(self) -> PeerId: ...

    def listen_addrs(self) -> list[str]: ...

    def connections(self, peer: PeerId | None = None) -> list[Connection]: ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]: ...

    async def dial(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection: ...

    def add_addrs(self, peer: PeerId, addrs: Sequence[str], *, ttl_s: float) -> None: ...

    def addrs(self, peer: PeerId) -> list[str]: ...

    def keep_connected(self, peer: PeerId, by: str) -> None: ...

    def facade(self) -> "FacadeHost":
        """This host as py-libp2p's protocols want it."""
        ...


class Discovery(Protocol):
    """One source of peers."""

    @property
    def name(self) -> str:
        """The name of the source, for counters, logs and PeerDiscovered.source."""
        ...

    async def run(self, host: HostView, emit: Emit) -> None:
        """Find peers until cancelled. Its errors are logged and counted, and it is run again with back-off."""
        ...


async def run_source(source: Discovery, host: HostView, emit: Emit, counters: Counters) -> None:
    """Run one source for as long as the host lives."""
    failures = 0
    while True:
        started_s, delay_s = trio.current_time(), _BACKOFF.after(failures + 1)
        try:
            await source.run(host, emit)
            logger.warning("the discovery source %s ended; it is started again in %g s", source.name, delay_s)
            counters.add(f"discovery_{source.name}_ended")
        except Exception as error:
            logger.warning("the discovery source %s failed (%r); tried again in %g s", source.name, error, delay_s)
            counters.add(f"discovery_{source.name}_failed")
        if trio.current_time() - started_s > _STEADY_S:
            failures = 0
        failures += 1
        await trio.sleep(_BACKOFF.after(failures))
