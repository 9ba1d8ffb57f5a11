"""The client of relays: reserves at some, is dialled through them, and dials through any."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import SystemRandom

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    NO_RESERVATION,
    OK,
    PERMISSION_DENIED,
    RESERVATION_REFUSED,
    RESOURCE_LIMIT_EXCEEDED,
    HopMessage,
    StopMessage,
)
from multiaddr import Multiaddr

from dep2p.errors import Dep2pError, ProtocolError, RequestTimeoutError
from dep2p.host.addresses import Address, parse_address
from dep2p.host.connections.upgrade import UpgradeError
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, Connection, HostEvent, PeerDisconnected
from dep2p.host.transports.relay.circuit import RelayedTransport
from dep2p.host.transports.relay.messages import (
    HOP,
    RESERVATION_S,
    STOP,
    RelayHost,
    is_relayed,
    limit_of,
    read_hop_status,
    read_stop,
    send_message,
)
from dep2p.outside_text import one_line
from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import PeerId, peer_id_bytes

logger: logging.Logger = logging.getLogger("dep2p.host")

RELAYS_MAX = 3
"""Relays at which a client reserves at a time."""
_INTEREST = "relay"
"""The name of this part where it asks the host to keep a relay connected."""
_RETRY = Backoff(0.25, 60.0)
"""Waits after a relay has refused. The first is short: a relay gives members places, but must verify them first."""
_LOOK_S = 60.0
"""Seconds after which the client looks at its connections again without a cause."""
_RENEW_AT = 0.75
"""Part of a reservation's time after which it is renewed."""
_ADDRS_MAX = 16


class ReservationRefusedError(ProtocolError):
    """The relay answered, and grants no reservation."""


@dataclass(slots=True)
class _Reserved:
    """A reservation that this host holds at a relay."""

    addrs: list[str]
    expires_s: float


@dataclass(slots=True)
class _Relay:
    """A relay at which this host reserves, or tries to."""

    due_s: float = 0.0
    """The time of the next try."""
    failures: int = 0
    is_asking: bool = False
    reserved: _Reserved | None = None


class RelayClient:
    """Reserves at connected relays, is dialled through them, and dials through any relay.

    It reserves only at relays that this host has dialled once, or whose peer is a member of a realm of this host: a
    stranger that connects and calls itself a relay could otherwise take the places of all true ones. A relay with a
    reservation is kept connected, since others cannot reach this host when that connection is gone.
    """

    def __init__(
        self,
        host: RelayHost,
        counters: Counters,
        accept: Callable[[ReadWriteCloser, str, None], Awaitable[None]],
        protocols: Callable[[PeerId], tuple[str, ...]],
        *,
        reserves: bool,
        timeout_s: float,
    ) -> None:
        self._host = host
        self._counters = counters
        self._accept = accept
        self._protocols = protocols
        self._reserves = reserves
        self._timeout_s = timeout_s
        self._rng = SystemRandom()
        self._relays: dict[PeerId, _Relay] = {}
        """Connected relays, and those that this host keeps connected; the oldest first."""
        self._kept: dict[PeerId, None] = {}
        """Relays that this host keeps connected."""
        self._changed = trio.Event()
        if reserves:
            host.set_stream_handler(STOP, self._serve)
            host.subscribe(self._on_event)

    def values(self) -> dict[str, int]:
        """Return the count of relays with a reservation of this host."""
        return {"relay_reserved_held": len(self._reserved())} if self._reserves else {}

    def addrs(self) -> list[str]:
        """Return the addresses at which this host can be dialled through its relays, without its own id."""
        return [text for reserved in self._reserved().values() for text in reserved.addrs]

    def _reserved(self) -> dict[PeerId, _Reserved]:
        return {peer: each.reserved for peer, each in self._relays.items() if each.reserved is not None}

    def consider(self, peer: PeerId) -> None:
        """Look at a peer whose protocols are known now: it may be a relay."""
        if self._reserves and HOP in self._protocols(peer):
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _on_event(self, event: HostEvent) -> None:
        if not isinstance(event, PeerDisconnected) or not event.last:
            return
        relay = self._relays.pop(event.connection.peer, None)
        if relay is not None and relay.reserved is not None:
            self._counters.add("relay_reservation_lost")
            logger.info(
                "the reservation at the relay %s is lost with the connection (%s)",
                event.connection.peer,
                one_line(event.reason),
            )
            self._wake()

    async def run(self) -> None:
        """Keep reservations at up to RELAYS_MAX connected relays, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                changed, now_s = self._changed, trio.current_time()
                wake_s = now_s + _LOOK_S
                for connection, relay in self._asked():
                    if relay.due_s <= now_s:
                        relay.is_asking = True
                        nursery.start_soon(self._try, connection, relay)
                    else:
                        wake_s = min(wake_s, relay.due_s)
                with trio.move_on_at(wake_s):
                    await changed.wait()

    def _asked(self) -> list[tuple[Connection, _Relay]]:
        """Return the relays that this host asks for a reservation, now or at their time, and one connection to each."""
        found: dict[PeerId, Connection] = {}
        for connection in self._host.connections():
            peer = connection.peer
            if peer in found or is_relayed(connection) or HOP not in self._protocols(peer):
                continue
            if connection.direction == "outbound" or peer in self._kept or self._host.is_protected(connection):
                found[peer] = connection
        active = sum(each.is_asking or each.reserved is not None for each in self._relays.values())
        asked: list[tuple[Connection, _Relay]] = []
        # Members first: at the relay of a stranger, strangers take the places of members.
        for connection in sorted(found.values(), key=lambda one: not self._host.is_protected(one)):
            relay = self._relays.get(connection.peer)
            if relay is not None and relay.is_asking:
                continue
            if relay is None or relay.reserved is None:
                if active >= RELAYS_MAX:
                    continue
                active += 1
            asked.append((connection, self._relays.setdefault(connection.peer, relay or _Relay())))
        return asked

    async def _try(self, connection: Connection, relay: _Relay) -> None:
        peer = connection.peer
        try:
            with trio.fail_after(self._timeout_s):
                await self._reserve(connection, relay)
        except (Dep2pError, trio.TooSlowError) as error:
            self._note_failure(peer, relay, error)
        else:
            relay.failures = 0
            self._keep(peer)
        finally:
            relay.is_asking = False
            self._wake()

    def _note_failure(self, peer: PeerId, relay: _Relay, error: Exception) -> None:
        self._counters.add("relay_reservation_failed")
        relay.failures += 1
        wait_s = _RETRY.jittered(relay.failures, self._rng)
        relay.due_s = trio.current_time() + wait_s
        if relay.reserved is not None and (
            isinstance(error, ReservationRefusedError) or relay.reserved.expires_s <= trio.current_time()
        ):
            relay.reserved = None
        text = str(error) or "it does not answer in time"
        log = logger.warning if relay.failures == 1 else logger.debug
        log("no reservation at the relay %s: %s; the next try is in %.1f s", peer, text, wait_s)

    def _keep(self, peer: PeerId) -> None:
        """Keep a relay connected, in place of one that gives this host no reservation any more."""
        self._kept[peer] = None
        self._host.keep_connected(peer, _INTEREST)
        reserved = self._reserved()
        for other in [each for each in self._kept if each not in reserved][: max(0, len(self._kept) - RELAYS_MAX)]:
            del self._kept[other]
            self._host.forget(other, _INTEREST)

    async def reserve(self, connection: Connection) -> None:
        """Reserve at a relay, or renew. Raises ProtocolError when it refuses, or what opening a stream raises."""
        await self._reserve(connection, self._relays.setdefault(connection.peer, _Relay()))

    async def _reserve(self, connection: Connection, relay: _Relay) -> None:
        stream = await connection.open_stream(HOP, timeout_s=self._timeout_s)
        try:
            await send_message(stream, HopMessage(type=HopMessage.RESERVE))
            answer = await read_hop_status(stream)
        finally:
            stream.reset()
        if answer.status != OK:
            known = {
                RESERVATION_REFUSED: "it has no place for a stranger of this address, or was asked too often",
                PERMISSION_DENIED: "it serves certain peers only",
            }
            raise ReservationRefusedError(f"it refuses: {known.get(answer.status, f'status {answer.status}')}")
        now_s = trio.current_time()
        lasts_s = max(60.0, min(float(RESERVATION_S), answer.reservation.expire - time.time()))
        relay.reserved = _Reserved(_relayed_addrs(connection, answer), now_s + lasts_s)
        relay.due_s = now_s + _RENEW_AT * lasts_s
        self._counters.add("relay_reserved")

    async def _serve(self, stream: ByteStream) -> None:
        relay = stream.connection
        known = self._relays.get(relay.peer)
        if known is None or known.reserved is None:
            self._counters.add("relay_inbound_refused_no_reservation")
            await send_message(stream, StopMessage(type=StopMessage.STATUS, status=PERMISSION_DENIED))
            await stream.close()
            return
        try:
            with trio.fail_after(self._timeout_s):
                ask = await read_stop(stream)
        except trio.TooSlowError:
            raise RequestTimeoutError("no relay message in time") from None
        if ask.type != StopMessage.CONNECT:
            raise ProtocolError("not a CONNECT of the relay protocol")
        await send_message(stream, StopMessage(type=StopMessage.STATUS, status=OK))
        # The handshake through the relay, which follows, proves the peer's identity.
        transport = RelayedTransport(stream, limit_of(ask), self._counters)
        await self._accept(transport, f"{relay.remote_addr}/p2p/{relay.peer}/p2p-circuit", None)

    async def dial(self, address: Address, peer: PeerId) -> RelayedTransport:
        """Return the transport to ``peer`` through the relay in the address. Raises UpgradeError."""
        if address.relay is None:
            raise UpgradeError("the address names no relay")
        base = address.text.removesuffix(f"/p2p/{address.relay}/p2p-circuit")
        try:
            relay = await self._host.dial(address.relay, [base])
            stream = await relay.open_stream(HOP, timeout_s=self._timeout_s)
        except Dep2pError as error:
            raise UpgradeError(f"the relay: {error}") from error
        done = False
        try:
            ask = HopMessage(type=HopMessage.CONNECT)
            ask.peer.id = peer_id_bytes(peer)
            await send_message(stream, ask)
            answer = await read_hop_status(stream)
            if answer.status != OK:
                known = {
                    NO_RESERVATION: "the peer has no reservation there",
                    RESOURCE_LIMIT_EXCEEDED: "it is at its limit",
                }
                raise UpgradeError(f"the relay refused: {known.get(answer.status, f'status {answer.status}')}")
            done = True
            return RelayedTransport(stream, limit_of(answer), self._counters)
        except Dep2pError as error:
            raise UpgradeError(f"the relay: {error}") from error
        finally:
            if not done:
                stream.reset()


def _relayed_addrs(connection: Connection, answer: HopMessage) -> list[str]:
    """Return the relayed addresses of this host, from the relay's addresses in a grant."""
    addrs: dict[str, None] = {}
    for raw in answer.reservation.addrs[:_ADDRS_MAX]:
        try:
            address = parse_address(str(Multiaddr(raw)))
        except (ValueError, TypeError, KeyError) as error:
            logger.debug("address of relay %s not used: %s", connection.peer, error)
            continue
        if address.transport != "circuit" and address.peer in (None, connection.peer):
            addrs[f"{address.text}/p2p/{connection.peer}/p2p-circuit"] = None
    if not addrs and connection.direction == "outbound":
        # go names its public addresses only: in a private network it is reached where we have reached it.
        addrs[f"{connection.remote_addr}/p2p/{connection.peer}/p2p-circuit"] = None
    return list(addrs)
