"""The dials of one try: both sides knock at each other at the same time, so that both routers let them in."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import trio
from libp2p.io.exceptions import IOException

from dep2p.errors import StreamClosedError
from dep2p.host.addresses import Address
from dep2p.host.connections.upgrade import UpgradeError
from dep2p.host.counters import Counters
from dep2p.host.interface import Connection
from dep2p.types import PeerId, Rng

logger: logging.Logger = logging.getLogger("dep2p.host")

DIAL_S: Final = 5.0
"""Seconds of a try: two more requests of TCP after the first, and four of QUIC."""
TCP_FIRST_S: Final = 1.0
"""Seconds for which a peer with addresses of both kinds is dialed over TCP alone: it is faster here than QUIC, whose
shorter handshake would win each time."""
RANDOM_BYTES: Final = 64
"""Bytes of the datagrams that open the way for the peer's QUIC packets."""
_RANDOM_MIN_S: Final = 0.01
_RANDOM_MAX_S: Final = 0.2
"""The time between two of them (specification)."""


class DirectTransports(Protocol):
    """The transports of a host, as a try uses them."""

    async def connect_once(self, address: Address, peer: PeerId) -> Connection:
        """Dial, upgrade and admit. Raises OSError, IOException, UpgradeError, StreamClosedError."""
        ...

    async def answer_once(self, address: Address, peer: PeerId) -> Connection:
        """The same over TCP, but the peer is the client of the connection, and this node answers."""
        ...

    async def send_random(self, address: Address, size_bytes: int) -> bool:
        """Send a datagram of random bytes from the socket that QUIC listens with; False when there is none."""
        ...


class DirectDials:
    """Makes the dials of a try, as the client or as the server of the connection that comes of it."""

    def __init__(self, transports: DirectTransports, counters: Counters, rng: Rng) -> None:
        self._transports = transports
        self._counters = counters
        self._rng = rng

    async def dial(self, peer: PeerId, targets: Sequence[Address]) -> Connection | None:
        """Dial all addresses as the client; return the first connection, or None when there is none in time."""
        found: list[Connection] = []
        has_tcp = any(address.transport == "tcp" for address in targets)

        async def attempt(address: Address) -> None:
            if has_tcp and address.transport != "tcp":
                await trio.sleep(TCP_FIRST_S)
            connection = await self._try(address, peer, self._transports.connect_once)
            if connection is None:
                return
            if found:
                self._counters.add("dial_duplicate_closed")
                await connection.close()
                return
            found.append(connection)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(DIAL_S):
            async with trio.open_nursery() as nursery:
                for address in targets:
                    nursery.start_soon(attempt, address)
        return found[0] if found else None

    async def answer(self, peer: PeerId, targets: Sequence[Address], connected: trio.Event) -> None:
        """Open the way for the client: until ``connected`` is set, at most for the time of a try.

        Over TCP this node dials as well: the routers and both systems take it for one connection. Over QUIC the client
        alone dials, and this node sends what opens its router.
        """
        with trio.move_on_after(DIAL_S):
            async with trio.open_nursery() as nursery:
                for address in targets:
                    if address.transport == "tcp":
                        nursery.start_soon(self._try, address, peer, self._transports.answer_once)
                    elif address.transport == "quic":
                        nursery.start_soon(self._send_random, address)
                await connected.wait()
                nursery.cancel_scope.cancel()

    async def _send_random(self, address: Address) -> None:
        while await self._transports.send_random(address, RANDOM_BYTES):  # noqa: ASYNC110 - at random times
            await trio.sleep(_RANDOM_MIN_S + (_RANDOM_MAX_S - _RANDOM_MIN_S) * self._rng.random())

    async def _try(
        self, address: Address, peer: PeerId, connect: Callable[[Address, PeerId], Awaitable[Connection]]
    ) -> Connection | None:
        try:
            return await connect(address, peer)
        except (OSError, IOException, UpgradeError, StreamClosedError) as error:
            logger.debug("no direct path to %s at %r: %r", peer, address.text, error)
        except Exception:
            self._counters.add("dial_crashed")
            logger.exception("dialling %s at %r failed in an unexpected way", peer, address.text)
        return None
