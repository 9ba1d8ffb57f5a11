"""Dialling: every known address of a peer, one after another with a small stagger, until the first one answers.

py-libp2p's own dial logic is not used: it takes one address per transport class, drops loopback ones, waits 250 ms
after each success and refuses a peer for a minute after one failure.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Sequence

import trio
from libp2p.io.exceptions import IOException

from dep2p.errors import PeerNotFoundError, StreamClosedError
from dep2p.host.addresses import Address, dial_rank, expect_peer
from dep2p.host.connections.connection import PeerConnection
from dep2p.host.connections.upgrade import UpgradeError
from dep2p.host.counters import Counters
from dep2p.host.scopes import new_scope
from dep2p.limits import Limits
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

STAGGER_S = 0.1
"""How long an address may be tried alone before the next one is tried beside it."""
ADDRS_PER_DIAL_MAX = 32
DIALS_IN_FLIGHT_MAX = 64

ConnectOnce = Callable[[Address, PeerId], Awaitable[PeerConnection]]
"""Dial, upgrade and admit over one address. Raises OSError, UpgradeError or StreamClosedError."""


class _Flight:
    """One attempt to reach one peer, shared by all callers that want it at the time."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.scope = new_scope()
        self.done = trio.Event()
        self.more = trio.Event()
        self.waiting = 0
        self.queue: list[Address] = []
        self.seen: dict[str, None] = {}
        self.failures: dict[str, str] = {}
        self.connection: PeerConnection | None = None
        self.via: str | None = None

    def add(self, addrs: Sequence[Address]) -> None:
        for address in sorted(addrs, key=dial_rank):
            if address.text not in self.seen and len(self.seen) < ADDRS_PER_DIAL_MAX:
                self.seen[address.text] = None
                self.queue.append(address)
        self.more.set()


class Dialer:
    """Single-flight dialling per peer."""

    def __init__(
        self,
        nursery: trio.Nursery,
        own_peer: PeerId,
        live: Callable[[PeerId], PeerConnection | None],
        known_addrs: Callable[[PeerId], list[str]],
        connect_once: ConnectOnce,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self._nursery = nursery
        self._own_peer = own_peer
        self._live = live
        self._known_addrs = known_addrs
        self._connect_once = connect_once
        self._limits = limits
        self._counters = counters
        self._flights: dict[PeerId, _Flight] = {}
        self._slots = trio.CapacityLimiter(DIALS_IN_FLIGHT_MAX)

    async def dial(self, peer: PeerId, addrs: Sequence[str], timeout_s: float | None) -> PeerConnection:
        """Return a live connection to the peer. Raises PeerNotFoundError that names each address and its reason."""
        if peer == self._own_peer:
            raise PeerNotFoundError(f"{peer} is this node itself: a node does not dial itself")
        live = self._live(peer)
        if live is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
            return live
        timeout_s = self._limits.dial_timeout_s if timeout_s is None else timeout_s
        usable, malformed = self._usable(peer, addrs)
        flight = self._flights.get(peer)
        if flight is None:
            if not usable:
                detail = "; ".join(f"{text}: {why}" for text, why in malformed.items())
                raise PeerNotFoundError(
                    f"no usable address of {peer} is known ({detail})"
                    if detail
                    else f"no address of {peer} is known: give one (/ip4/…/tcp/…), or turn a discovery source on"
                )
            flight = _Flight(peer)
            self._flights[peer] = flight
            self._nursery.start_soon(self._fly, flight)
        flight.add(usable)
        flight.failures.update(malformed)
        return await self._wait(flight, timeout_s)

    def _usable(self, peer: PeerId, addrs: Sequence[str]) -> tuple[list[Address], dict[str, str]]:
        usable: list[Address] = []
        malformed: dict[str, str] = {}
        for text in addrs[:ADDRS_PER_DIAL_MAX]:
            try:
                usable.append(expect_peer(text, peer))
            except ValueError as error:
                self._counters.add("dial_address_malformed")
                malformed[text[:200]] = str(error)
        usable.extend(expect_peer(text, peer) for text in self._known_addrs(peer))
        return usable, malformed

    async def _wait(self, flight: _Flight, timeout_s: float) -> PeerConnection:
        flight.waiting += 1
        try:
            with trio.move_on_after(timeout_s):
                await flight.done.wait()
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                flight.scope.cancel()
                self._retire(flight)
        connection = flight.connection or self._live(flight.peer)
        if connection is not None and not connection.is_closed:
            return connection
        if flight.connection is not None and flight.via is not None:
            flight.failures[flight.via] = f"connected, then {flight.connection.end_reason}"
        tried = [
            f"{text}: {flight.failures.get(text, f'no answer within {timeout_s:g} s')}"
            for text in (*flight.seen, *(t for t in flight.failures if t not in flight.seen))
        ]
        self._counters.add("dial_failed")
        raise PeerNotFoundError(f"cannot connect to {flight.peer}: " + "; ".join(tried))

    async def _fly(self, flight: _Flight) -> None:
        try:
            with flight.scope:
                async with self._slots, trio.open_nursery() as nursery:
                    await self._launch(flight, nursery)
        finally:
            self._retire(flight)
            flight.done.set()

    def _retire(self, flight: _Flight) -> None:
        """End a flight: from here on a new caller starts a new one."""
        if self._flights.get(flight.peer) is flight:
            del self._flights[flight.peer]

    async def _launch(self, flight: _Flight, nursery: trio.Nursery) -> None:
        flying = 0
        finished = trio.Event()

        async def attempt(address: Address) -> None:
            nonlocal flying, finished
            try:
                connection = await self._connect_once(address, flight.peer)
            except (OSError, IOException, UpgradeError, StreamClosedError) as error:
                flight.failures[address.text] = _reason(error)
                logger.debug("dialling %s at %r: %s", flight.peer, address.text, error)
            except Exception as error:
                flight.failures[address.text] = f"internal error: {error!r}"
                self._counters.add("dial_crashed")
                logger.exception("dialling %s at %r failed in an unexpected way", flight.peer, address.text)
            else:
                if flight.connection is None:
                    flight.connection, flight.via = connection, address.text
                    nursery.cancel_scope.cancel()
                else:
                    self._counters.add("dial_duplicate_closed")
                    await connection.close()
            finally:
                flying -= 1
                finished.set()
                finished = trio.Event()

        while True:
            while flight.queue:
                flying += 1
                nursery.start_soon(attempt, flight.queue.pop(0))
                with trio.move_on_after(STAGGER_S):
                    await finished.wait()
            if flying == 0:
                return
            flight.more = trio.Event()
            await _first_of(finished, flight.more)


async def _first_of(*events: trio.Event) -> None:
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
