"""The relay: serves reservations and circuits, bounded in number, bytes, time and rate."""

import logging
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import trio
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    CONNECTION_FAILED,
    MALFORMED_MESSAGE,
    NO_RESERVATION,
    OK,
    PERMISSION_DENIED,
    RESERVATION_REFUSED,
    RESOURCE_LIMIT_EXCEEDED,
    UNEXPECTED_MESSAGE,
    HopMessage,
    Status,
    StopMessage,
)
from multiaddr import Multiaddr

from dep2p.errors import Dep2pError, ProtocolError, StreamClosedError
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, Connection, HostEvent, PeerDisconnected
from dep2p.host.resources.ledger import Ledger, address_block
from dep2p.host.resources.scopes import ChargedStream
from dep2p.host.scopes import new_scope
from dep2p.host.transports.relay.messages import (
    CIRCUIT_BYTES_MAX,
    CIRCUIT_S,
    HOP,
    RESERVATION_S,
    STOP,
    RelayHost,
    is_relayed,
    read_hop,
    read_stop,
    send_message,
    write_limit,
)
from dep2p.limits import Limits
from dep2p.protocols.addresses.dialable import addrs_for_others
from dep2p.protocols.relay.bounds import CircuitBounds, RelayAsker, ReservationBounds
from dep2p.protocols.relay.circuits import Circuit, Circuits
from dep2p.protocols.relay.reservations import Reservation, ReservationGranted, Reservations
from dep2p.types import PeerId, parse_peer_id, peer_id_bytes, peer_id_from_bytes

logger: logging.Logger = logging.getLogger("dep2p.host")

CIRCUIT_FIRST_S = 15.0
"""Seconds within which the dialler has to begin its handshake, else the circuit ends."""
CIRCUIT_IDLE_S = 120.0
"""Seconds after which a circuit that carries nothing ends: connections are probed at least every 30 s."""
CIRCUIT_HALF_CLOSED_S = 5.0
"""Seconds in which the second end of a circuit closes after the first: a libp2p connection has no half-close."""
UNREAD_MAX = 256
"""Streams of strangers that have not sent their message yet; the oldest ends for a further one."""
UNREAD_PER_PEER_MAX = 32
DIALLERS_KEPT_PER_BLOCK_MAX = 32
"""Strangers of one address block whose connections keep their places because they have dialled circuits."""
_UNSENT_BYTES_MAX = 32_768
_READ_BYTES = 32_768
"""Together with `_UNSENT_BYTES_MAX` and both directions: `CIRCUIT_UNSENT_BYTES`."""
_ADDRS_S = 5.0
"""Seconds for which the addresses in grants are kept: they are costly to encode."""


@dataclass(slots=True, eq=False)
class _Carried:
    """The streams and the end of one circuit."""

    reservations: list[Reservation]
    """Those of its two ends."""
    scope: trio.CancelScope = field(default_factory=new_scope)
    """Cancelled to end it."""
    half_closed: trio.Event = field(default_factory=trio.Event)


class RelayServer:
    """Serves reservations and circuits.

    `Reservations` and `Circuits` decide who gets one and which one gives way. Members, which have proved their
    membership of a realm of this node, have places that no stranger takes.
    """

    def __init__(
        self,
        host: RelayHost,
        counters: Counters,
        *,
        timeout_s: float,
        ledger: Ledger | None = None,
        reservations: ReservationBounds | None = None,
        circuits: CircuitBounds | None = None,
    ) -> None:
        self._host = host
        self._counters = counters
        self._timeout_s = timeout_s
        self._ledger = Ledger(Limits()) if ledger is None else ledger
        self._reservations = Reservations(reservations or ReservationBounds(lasts_s=RESERVATION_S), self._is_member)
        self._circuits = Circuits(circuits or CircuitBounds())
        self._carried: dict[Circuit, _Carried] = {}
        self._unread: OrderedDict[trio.CancelScope, PeerId] = OrderedDict()
        self._addrs: tuple[float, list[bytes]] = (-_ADDRS_S, [])
        host.set_stream_handler(HOP, self._serve)
        host.subscribe(self._on_event)

    def values(self) -> dict[str, int]:
        """Return the reservations and circuits that are held now, by the names of their counters."""
        return {
            "relay_reservations_held": len(self._reservations),
            "relay_reservations_held_members": self._reservations.members,
            "relay_circuits_held": len(self._circuits),
            "relay_circuits_held_members": self._circuits.members,
        }

    def _is_member(self, peer: PeerId) -> bool:
        return any(map(self._host.is_protected, self._host.connections(peer)))

    def _asker(self, connection: Connection) -> RelayAsker:
        return RelayAsker(connection.peer, address_block(connection.remote_addr), self._is_member(connection.peer))

    def _on_event(self, event: HostEvent) -> None:
        if not isinstance(event, PeerDisconnected):
            return
        if event.last:
            self._reservations.release(event.connection.peer)
        else:
            self._update_place(event.connection.peer)

    def _update_place(self, peer: PeerId) -> None:
        """Let the connections of a peer that uses the relay keep their places while strangers want some."""
        keeps = peer in self._reservations
        for connection in self._host.connections(peer):
            dials = self._circuits.open_from(peer) > 0
            if dials and not keeps:
                dials = self._circuits.sources(address_block(connection.remote_addr)) <= DIALLERS_KEPT_PER_BLOCK_MAX
            self._host.keep_place(connection, keeps=keeps or dials)

    async def _serve(self, stream: ByteStream) -> None:
        circuit: tuple[ByteStream, Circuit] | None = None
        with trio.move_on_after(self._timeout_s) as scope:
            message = await self._read(stream)
            if message is None:
                return
            if is_relayed(stream.connection):
                await self._refuse(stream, PERMISSION_DENIED, "over_relay")
            elif message.HasField("type") and message.type == HopMessage.RESERVE:
                await self._reserve(stream)
            elif message.type == HopMessage.CONNECT:
                circuit = await self._connect(stream, message)
            else:
                await self._refuse(stream, UNEXPECTED_MESSAGE, "unexpected")
        if circuit is not None:
            await self._carry(stream, *circuit)
        elif scope.cancelled_caught:
            self._counters.add("relay_refused_timeout")
            stream.reset()

    async def _read(self, stream: ByteStream) -> HopMessage | None:
        """Read the message of a stream; None when the stream gave way to others."""
        peer = stream.connection.peer
        if self._host.is_protected(stream.connection):
            return await read_hop(stream)
        if Counter(self._unread.values())[peer] >= UNREAD_PER_PEER_MAX:
            self._counters.add("relay_refused_unread")
            stream.reset()
            return None
        if len(self._unread) >= UNREAD_MAX:
            oldest, _ = self._unread.popitem(last=False)
            oldest.cancel()
        message: HopMessage | None = None
        with new_scope() as scope:
            self._unread[scope] = peer
            try:
                message = await read_hop(stream)
            finally:
                self._unread.pop(scope, None)
        if message is None:
            self._counters.add("relay_refused_unread")
            stream.reset()
        return message

    async def _refuse(self, stream: ByteStream, status: Status.ValueType, why: str) -> None:
        self._counters.add(f"relay_refused_{why}")
        await send_message(stream, HopMessage(type=HopMessage.STATUS, status=status))
        await stream.close()

    # Reservations

    async def _reserve(self, stream: ByteStream) -> None:
        peer = stream.connection.peer
        outcome = self._reservations.ask(self._asker(stream.connection), trio.current_time())
        if not isinstance(outcome, ReservationGranted):
            await self._refuse(stream, RESERVATION_REFUSED, outcome)
            return
        self._update_place(peer)
        self._counters.add("relay_reservations")
        try:
            answer = HopMessage(type=HopMessage.STATUS, status=OK)
            answer.reservation.expire = int(time.time()) + RESERVATION_S
            answer.reservation.addrs.extend(self._own_addrs())
            write_limit(answer.limit)
            await send_message(stream, answer)
            await stream.close()
        finally:
            if outcome.replaced is not None:
                await self._replaced(outcome.replaced)

    async def _replaced(self, peer: PeerId) -> None:
        # The end of the connection reports it to the peer, which would rely on the reservation for an hour.
        self._counters.add("relay_reservations_replaced")
        self._update_place(peer)
        for connection in self._host.connections(peer):
            await connection.close()

    def _own_addrs(self) -> list[bytes]:
        now_s = trio.current_time()
        made_s, addrs = self._addrs
        if now_s - made_s >= _ADDRS_S:
            own = [text for text in addrs_for_others(self._host.listen_addrs()) if "/p2p-circuit" not in text]
            addrs = [Multiaddr(text).to_bytes() for text in own]
            self._addrs = now_s, addrs
        return addrs

    # Circuits

    async def _connect(self, stream: ByteStream, message: HopMessage) -> tuple[ByteStream, Circuit] | None:
        source, now_s = self._asker(stream.connection), trio.current_time()
        try:
            target = parse_peer_id(peer_id_from_bytes(message.peer.id))
        except ValueError:
            await self._refuse(stream, MALFORMED_MESSAGE, "malformed")
            return None
        reservation = self._reservations.find(target, now_s)
        if reservation is None:
            await self._refuse(stream, NO_RESERVATION, "no_reservation")
            return None
        if not self._circuits.may_ask(source, now_s):
            await self._refuse(stream, RESOURCE_LIMIT_EXCEEDED, "circuits_rate")
            return None
        wanted = Circuit(source, target)
        outcome = self._circuits.add(wanted)
        if isinstance(outcome, str):
            await self._refuse(stream, RESOURCE_LIMIT_EXCEEDED, outcome)
            return None
        for ended, why in outcome:
            self._end(ended, why)
        onward: ByteStream | None = None
        circuit: tuple[ByteStream, Circuit] | None = None
        try:
            onward = await self._open_onward(source.peer, target)
            answer = HopMessage(type=HopMessage.STATUS, status=OK)
            write_limit(answer.limit)
            await send_message(stream, answer)
            circuit = onward, wanted
        except Dep2pError as error:
            logger.debug("relaying from %s to %s: %s", source.peer, target, error)
            await self._refuse(stream, CONNECTION_FAILED, "target_failed")
            return None
        finally:
            if circuit is None:
                if onward is not None:
                    onward.reset()
                self._circuits.remove(wanted)
        own = self._reservations.find(source.peer, trio.current_time())
        carried = _Carried([reservation] if own is None else [reservation, own])
        self._carried[wanted] = carried
        wanted.is_open = True
        for each in carried.reservations:
            each.circuit_opened(trio.current_time())
        self._update_place(source.peer)
        self._counters.add("relay_circuits")
        return circuit

    def _end(self, circuit: Circuit, why: str) -> None:
        self._counters.add(f"relay_circuit_ended_{why}")
        self._circuits.remove(circuit)
        carried = self._carried.get(circuit)
        if carried is not None:
            carried.scope.cancel()

    async def _open_onward(self, source: PeerId, target: PeerId) -> ByteStream:
        connections = [one for one in self._host.connections(target) if not is_relayed(one)]
        if not connections:
            raise StreamClosedError(f"{target} is not connected")
        onward = await connections[0].open_stream(STOP, timeout_s=self._timeout_s)
        is_agreed = False
        try:
            ask = StopMessage(type=StopMessage.CONNECT)
            ask.peer.id = peer_id_bytes(source)
            write_limit(ask.limit)
            await send_message(onward, ask)
            answer = await read_stop(onward)
            if answer.type != StopMessage.STATUS or answer.status != OK:
                raise ProtocolError(f"{target} refused with status {answer.status}")
            is_agreed = True
        finally:
            if not is_agreed:
                onward.reset()
        return onward

    async def _carry(self, one: ByteStream, other: ByteStream, circuit: Circuit) -> None:
        carried = self._carried[circuit]
        account = self._ledger.open_circuit(
            lambda _reason: self._end(circuit, "memory"), is_proven=circuit.source.is_member
        )
        try:
            for stream in (one, other):
                if isinstance(stream, ChargedStream):
                    stream.charge_to(account)
            with carried.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, circuit, carried)
                    async with trio.open_nursery() as pumps:
                        pumps.start_soon(self._pump, one, other, circuit)
                        pumps.start_soon(self._pump, other, one, circuit)
                    nursery.cancel_scope.cancel()
        finally:
            one.reset()
            other.reset()
            account.close()
            circuit.is_open = False
            self._circuits.remove(circuit)
            del self._carried[circuit]
            for each in carried.reservations:
                each.circuit_ended(trio.current_time())
            self._update_place(circuit.source.peer)

    async def _watch(self, circuit: Circuit, carried: _Carried) -> None:
        """End a circuit that carries nothing, has lasted its time, or was closed by one end only."""
        end_s = trio.current_time() + CIRCUIT_S
        await trio.sleep(CIRCUIT_FIRST_S)
        seen = 0
        while circuit.carried_bytes != seen and trio.current_time() < end_s:
            seen = circuit.carried_bytes
            with trio.move_on_after(min(CIRCUIT_IDLE_S, max(0.0, end_s - trio.current_time()))):
                await carried.half_closed.wait()
                moved = -1
                while circuit.carried_bytes != moved:  # the other direction still flows
                    moved = circuit.carried_bytes
                    await trio.sleep(CIRCUIT_HALF_CLOSED_S)
                self._end(circuit, "half_closed")
        self._end(circuit, "time" if trio.current_time() >= end_s else "silent")

    async def _pump(self, source: ByteStream, sink: ByteStream, circuit: Circuit) -> None:
        carried = 0
        try:
            while data := await source.read(_READ_BYTES):
                carried += len(data)
                circuit.carried_bytes += len(data)
                if carried > CIRCUIT_BYTES_MAX:
                    self._end(circuit, "bytes")
                    return
                sink.write_nowait(data, urgent=True)
                await sink.drain(_UNSENT_BYTES_MAX)
            await sink.close_write()
            self._carried[circuit].half_closed.set()
        except StreamClosedError:
            self._carried[circuit].scope.cancel()
        finally:
            self._counters.add("relay_bytes", carried)
