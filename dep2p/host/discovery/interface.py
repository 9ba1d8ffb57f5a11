"""Sources of peers' addresses, behind one interface; a source that fails is logged, counted and tried again."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import trio

from dep2p.host.counters import Counters
from dep2p.host.interface import Connection, HostEvent
from dep2p.types import PeerId

if TYPE_CHECKING:
    from dep2p.host.discovery.libp2p_adapter import FacadeHost

logger = logging.getLogger("dep2p.host")

RETRY_INITIAL_S = 1.0
RETRY_MAX_S = 300.0
_STEADY_S = 60.0

Emit = Callable[[PeerId, Sequence[str]], None]
"""Names addresses of a peer; the host remembers them and emits PeerDiscovered when they or the peer are new."""


class HostView(Protocol):
    """What a source may use of the host."""

    @property
    def peer_id(self) -> PeerId: ...

    def listen_addrs(self) -> list[str]: ...

    def connections(self, peer: PeerId | None = None) -> list[Connection]: ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]: ...

    async def dial(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection: ...

    def add_addrs(self, peer: PeerId, addrs: Sequence[str], *, ttl_s: float) -> None: ...

    def addrs(self, peer: PeerId) -> list[str]: ...

    def keep_connected(self, peer: PeerId) -> None: ...

    def facade(self) -> "FacadeHost":
        """This host as py-libp2p's protocols want it."""
        ...


class Discovery(Protocol):
    """One source of peers."""

    @property
    def name(self) -> str:
        """For counters, logs and PeerDiscovered.source."""
        ...

    async def run(self, host: HostView, emit: Emit) -> None:
        """Find peers until cancelled. What it raises is logged and counted, and it is run again with back-off."""
        ...


@runtime_checkable
class NamespaceDiscovery(Protocol):
    """A source that can also announce this host under a name, and look one up; both while `Discovery.run` runs."""

    async def advertise(self, namespace: str) -> None:
        """Announce this host under ``namespace`` once. Raises PeerNotFoundError when nobody takes it."""
        ...

    async def find(self, namespace: str) -> dict[PeerId, list[str]]:
        """Peers announced under ``namespace`` and their addresses."""
        ...


async def run_source(source: Discovery, host: HostView, emit: Emit, counters: Counters) -> None:
    """Run one source for as long as the host lives."""
    delay_s = RETRY_INITIAL_S
    while True:
        started_s = trio.current_time()
        try:
            await source.run(host, emit)
            logger.warning("the discovery source %s ended; it is started again in %g s", source.name, delay_s)
            counters.add(f"discovery_{source.name}_ended")
        except Exception as error:
            logger.warning("the discovery source %s failed (%r); tried again in %g s", source.name, error, delay_s)
            counters.add(f"discovery_{source.name}_failed")
        if trio.current_time() - started_s > _STEADY_S:
            delay_s = RETRY_INITIAL_S
        await trio.sleep(delay_s)
        delay_s = min(RETRY_MAX_S, 2 * delay_s)
