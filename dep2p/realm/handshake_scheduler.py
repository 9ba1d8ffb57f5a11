"""When to try a handshake: on new connections, on discovered peers, and again when something may have changed."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from dep2p.errors import (
    Dep2pError,
    NotInRealmError,
    NotMemberError,
    OverloadedError,
    ProtocolNotSupportedError,
    RateLimitedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import Connection, PeerDiscovered
from dep2p.realm.handshakes import Handshakes
from dep2p.types import PeerId

DELAYS_S: Final = (0.0, 2.0, 8.0)
"""Before each try on one connection: at once, after 2 s, after 10 s. A peer may join the realm a moment later."""
AGAIN_DELAYS_S: Final = (0.1, 2.0, 8.0)
AGAIN_PER_CONNECTION_MAX: Final = 20
"""In an hour."""
AGAIN_WINDOW_S: Final = 3_600.0
DIALING_MAX: Final = 4
DISCOVERED_MAX: Final = 64
STRANGERS_MAX: Final = 1_024
STRANGER_PAUSE_S: Final = 600.0
UNREACHABLE_PAUSE_S: Final = 30.0

_logger = logging.getLogger("dep2p.realm")


class Connector(Protocol):
    """What seeking needs of the membership."""

    def verified_connection(self, peer: PeerId) -> Connection | None: ...

    async def connect(
        self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> Connection: ...

    def link_refused(self, connection: Connection, *, is_gone: bool) -> None: ...


class Seeking:
    """Decides when to try; `Handshakes` does it."""

    def __init__(self, connector: Connector, handshakes: Handshakes, own: PeerId, counts: Counter[str]) -> None:
        self._connector = connector
        self._handshakes = handshakes
        self._own = own
        self._counts = counts
        self._pause_until: dict[PeerId, float] = {}
        self._pending: dict[PeerId, None] = {}
        self._sought: dict[int, None] = {}
        self._again: dict[int, tuple[float, int]] = {}
        """Start of the current hour, and tries in it, by connection."""
        self._nursery: trio.Nursery | None = None
        self._send, self._receive = trio.open_memory_channel[PeerDiscovered](DISCOVERED_MAX)

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to dial what discovery finds."""
        self._nursery = nursery
        for _ in range(DIALING_MAX):
            nursery.start_soon(self._dial_discovered)

    async def seek(self, connection: Connection) -> None:
        """Try the handshake on a connection, at most three times; failures are known by their counters."""
        if connection.id not in self._sought:
            self._sought[connection.id] = None
            try:
                await self._try(connection, DELAYS_S, again=False)
            finally:
                del self._sought[connection.id]

    def prove_again(self, connection: Connection) -> None:
        """The peer does not count us, or we doubt it: do the handshake anew, soon."""
        now = trio.current_time()
        since, tries = self._again.get(connection.id, (now, 0))
        if now - since > AGAIN_WINDOW_S:
            since, tries = now, 0
        if self._nursery is None or connection.is_closed or tries >= AGAIN_PER_CONNECTION_MAX:
            return
        if connection.id not in self._sought:
            self._again[connection.id] = (since, tries + 1)
            self._nursery.start_soon(self._prove_again, connection)

    def disconnected(self, connection: Connection) -> None:
        """Forget a connection."""
        self._again.pop(connection.id, None)

    async def _prove_again(self, connection: Connection) -> None:
        if connection.id in self._sought:
            return
        self._sought[connection.id] = None
        try:
            if not await self._try(connection, AGAIN_DELAYS_S, again=True):
                self._connector.link_refused(connection, is_gone=True)
        finally:
            del self._sought[connection.id]

    async def _try(self, connection: Connection, delays_s: Sequence[float], *, again: bool) -> bool:
        for delay_s in delays_s:
            if delay_s:
                await trio.sleep(delay_s)
            if connection.is_closed:
                return False
            try:
                await self._handshakes.settle(connection, again=again)
                return True
            except ProtocolNotSupportedError:
                self._counts["not_in_realm"] += 1
            except (StreamClosedError, RequestTimeoutError, RateLimitedError, OverloadedError) as error:
                _logger.debug("realm handshake with %s did not end: %s", connection.peer, error)
            except (NotMemberError, NotInRealmError) as error:
                _logger.info("no realm handshake with %s: %s", connection.peer, error)
                return False
            except Dep2pError as error:
                _logger.warning("realm handshake with %s broke the protocol: %s", connection.peer, error)
                return False
        return False

    def discovered(self, event: PeerDiscovered) -> None:
        """A discovery source named a peer: dial it, unless it is known, was tried lately, or too many are waiting."""
        peer = event.peer
        if self._nursery is None or peer == self._own or peer in self._pending:
            return
        if self._connector.verified_connection(peer) is not None:
            return
        if self._pause_until.get(peer, 0.0) > trio.current_time():
            self._counts["discovered_paused"] += 1
            return
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            self._counts["discovered_dropped"] += 1
            return
        self._pending[peer] = None

    async def _dial_discovered(self) -> None:
        async for event in self._receive:
            try:
                await self._connector.connect(event.peer, event.addrs)
            except NotInRealmError:
                return
            except NotMemberError:
                self._pause(event.peer, STRANGER_PAUSE_S)
            except Dep2pError as error:
                _logger.debug("discovered %s, but: %s", event.peer, error)
                self._pause(event.peer, UNREACHABLE_PAUSE_S)
            finally:
                del self._pending[event.peer]

    def _pause(self, peer: PeerId, pause_s: float) -> None:
        self._pause_until.pop(peer, None)
        if len(self._pause_until) >= STRANGERS_MAX:
            del self._pause_until[next(iter(self._pause_until))]
        self._pause_until[peer] = trio.current_time() + pause_s
