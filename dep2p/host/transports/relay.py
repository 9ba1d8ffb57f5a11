"""Circuit relay v2 on our own streams, with py-libp2p's messages: serving it, reserving at one, dialling through one.

Rules: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. py-libp2p's own server is not used: it takes the
reserving peer's id out of the message, where any peer can write it.
"""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio
from google.protobuf.message import DecodeError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
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
    Limit,
    Status,
    StopMessage,
)
from multiaddr import Multiaddr

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import Dep2pError, ProtocolError, RequestTimeoutError, StreamClosedError
from dep2p.host.addresses import Address, parse_address
from dep2p.host.connections.circuit_limit import CircuitLimit
from dep2p.host.connections.upgrade import UpgradeError
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, Connection, HostEvent, PeerDisconnected, StreamHandler
from dep2p.host.resources.control_allowance import ControlRate
from dep2p.host.resources.ledger import Ledger, address_block
from dep2p.host.resources.scopes import ChargedStream
from dep2p.host.scopes import new_scope
from dep2p.limits import Limits
from dep2p.types import PeerId, parse_peer_id, peer_id_bytes, peer_id_from_bytes

logger: logging.Logger = logging.getLogger("dep2p.host")

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
MESSAGE_BYTES_MAX = 4_096

RESERVATIONS_MAX = 256
RESERVATIONS_PER_BLOCK_MAX = 64
"""Reservations of one IPv4 /24 or IPv6 /56."""
RESERVATION_UNUSED_S = 10.0
"""Seconds until a reservation to which no circuit was ever made may be replaced by that of another peer."""
CIRCUITS_MAX = 256
CIRCUITS_PER_PEER_MAX = 16
"""Circuits that one peer has dialled."""
CIRCUITS_PER_TARGET_MAX = 64
"""Circuits to one peer, which ends those of strangers itself (RELAYED_UNPROVEN_MAX)."""
CIRCUITS_PER_PAIR_MAX = 2
"""Circuits from one peer to another at most; a further one replaces the oldest."""
CONNECTS_PER_BLOCK_PER_S = 8.0
"""Circuits that the peers of one address block may ask for, after a burst of 128."""
_CONNECTS_BURST_S = 16.0
_BLOCKS_MAX = 4_096
CIRCUIT_FIRST_S = 15.0
"""Seconds within which the dialler has to begin its handshake, else the circuit ends."""
CIRCUIT_IDLE_S = 120.0
"""Seconds after which a circuit that carries nothing ends: connections are probed at least every 30 s."""
CIRCUIT_HALF_CLOSED_S = 5.0
"""Seconds in which the second end of a circuit closes after the first: a libp2p connection has no half-close."""
_UNSENT_BYTES_MAX = 32_768
_READ_BYTES = 32_768
"""Together with `_UNSENT_BYTES_MAX` and both directions: `CIRCUIT_UNSENT_BYTES`."""
RESERVATION_S = 3_600
CIRCUIT_S = 3_600
CIRCUIT_BYTES_MAX = 268_435_456
"""Bytes that a circuit may carry in one direction; a circuit over it, or older than CIRCUIT_S, is reset."""
RELAYS_MAX = 3
"""Relays at which a client reserves at a time."""


class RelayHost(Protocol):
    """The host, as a relay and its clients use it."""

    @property
    def peer_id(self) -> PeerId: ...

    def listen_addrs(self) -> list[str]: ...

    def connections(self, peer: PeerId | None = None) -> Sequence[Connection]: ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]: ...

    async def dial(self, peer: PeerId, addrs: Sequence[str], *, timeout_s: float | None = None) -> Connection: ...

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None: ...

    def is_protected(self, connection: Connection) -> bool: ...


class RelayedTransport(ReadWriteCloser):
    """A stream through a relay, as the transport of a connection that is upgraded over it."""

    def __init__(self, stream: ByteStream, limit: CircuitLimit, counters: Counters) -> None:
        self._stream = stream
        self.circuit_limit: CircuitLimit = limit
        self._counters = counters
        self._written = 0
        self._end_s = trio.current_time() + limit.duration_s if limit.duration_s else float("inf")

    async def read(self, n: int | None = None) -> bytes:
        """Return up to ``n`` bytes; b"" at the end. Raises ConnectionClosedError."""
        try:
            with trio.move_on_at(self._end_s):
                return await self._stream.read(65_536 if n is None or n < 0 else n)
        except StreamClosedError as error:
            raise ConnectionClosedError(str(error)) from error
        raise self._used_up()

    async def write(self, data: bytes) -> None:
        """Send all of the bytes. Raises ConnectionClosedError, also for more than the relay carries."""
        most = self.circuit_limit.data_bytes
        if (most and self._written + len(data) > most) or trio.current_time() >= self._end_s:
            raise self._used_up()
        self._written += len(data)
        try:
            await self._stream.write(data)
        except StreamClosedError as error:
            raise ConnectionClosedError(str(error)) from error

    def _used_up(self) -> ConnectionClosedError:
        self._counters.add("relay_limit_reached")
        return ConnectionClosedError(f"the relay carries at most {self.circuit_limit} for this connection")

    async def close(self) -> None:
        await self._stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def is_relayed(connection: Connection) -> bool:
    """Whether a connection goes through a relay itself."""
    return "/p2p-circuit" in connection.remote_addr


@dataclass(slots=True, eq=False)
class Circuit:
    """One circuit, counted from before it is made, so that many asked for at once keep to the limits, too."""

    source: PeerId
    target: PeerId
    block: str
    """The address block of the source."""
    scope: trio.CancelScope = field(default_factory=new_scope)
    """Cancelled to end it."""
    is_open: bool = False
    half_closed: trio.Event = field(default_factory=trio.Event)
    carried_bytes: int = 0
    """Bytes carried in both directions together."""


@dataclass(slots=True, eq=False)
class Reservation:
    """The right of a peer to be dialled through this relay."""

    connection: Connection
    block: str
    since_s: float
    expires_s: float
    is_used: bool = False
    """Whether a circuit to the peer was ever made."""


class RelayServer:
    """Serves reservations and circuits, bounded in number, bytes and time.

    One address block can take a part of either only, and where all is taken the blocks that hold most give way.
    """

    def __init__(self, host: RelayHost, counters: Counters, *, timeout_s: float, ledger: Ledger | None = None) -> None:
        self._host = host
        self._counters = counters
        self._timeout_s = timeout_s
        self._ledger = Ledger(Limits()) if ledger is None else ledger
        self._reservations: dict[PeerId, Reservation] = {}
        self._circuits: dict[Circuit, None] = {}
        """The oldest first."""
        self._rates: dict[str, ControlRate] = {}
        host.set_stream_handler(HOP, self._serve)
        host.subscribe(self._on_event)

    def _on_event(self, event: HostEvent) -> None:
        if isinstance(event, PeerDisconnected) and event.last:
            self._reservations.pop(event.connection.peer, None)

    async def _serve(self, stream: ByteStream) -> None:
        circuit: tuple[ByteStream, Circuit] | None = None
        with trio.move_on_after(self._timeout_s) as scope:
            message = HopMessage()
            try:
                message.ParseFromString(await read_length_prefixed(stream, MESSAGE_BYTES_MAX))
            except (DecodeError, UnicodeDecodeError) as error:
                raise ProtocolError(f"a relay message that cannot be read: {error}") from None
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

    async def _refuse(self, stream: ByteStream, status: Status.ValueType, why: str) -> None:
        self._counters.add(f"relay_refused_{why}")
        await _send(stream, HopMessage(type=HopMessage.STATUS, status=status))
        await stream.close()

    # Reservations

    async def _reserve(self, stream: ByteStream) -> None:
        now_s = trio.current_time()
        peer = stream.connection.peer
        for one, each in list(self._reservations.items()):
            if each.expires_s <= now_s:
                del self._reservations[one]
        block = address_block(stream.connection.remote_addr)
        known = self._reservations.pop(peer, None)
        replaced: Reservation | None = None
        if known is None:
            has_place, replaced = self._reservation_place(block, now_s)
            if not has_place:
                await self._refuse(stream, RESERVATION_REFUSED, "reservations_max")
                return
        reservation = Reservation(stream.connection, block, now_s, now_s + RESERVATION_S)
        reservation.is_used = known is not None and known.is_used
        self._reservations[peer] = reservation
        self._counters.add("relay_reservations")
        answer = HopMessage(type=HopMessage.STATUS, status=OK)
        answer.reservation.expire = int(time.time()) + RESERVATION_S
        own = [text for text in self._host.listen_addrs() if "/p2p-circuit" not in text]
        answer.reservation.addrs.extend(Multiaddr(text).to_bytes() for text in own)
        _limit(answer.limit)
        await _send(stream, answer)
        await stream.close()
        if replaced is not None:
            # The end of the connection reports it to the peer, which would rely on the reservation for an hour.
            self._counters.add("relay_reservations_replaced")
            await replaced.connection.close()

    def _reservation_place(self, block: str, now_s: float) -> tuple[bool, Reservation | None]:
        """Whether a peer of ``block`` gets a reservation, and the one that it replaces."""
        held = Counter(each.block for each in self._reservations.values())
        if len(self._reservations) < RESERVATIONS_MAX and held[block] < RESERVATIONS_PER_BLOCK_MAX:
            return True, None
        largest = block
        if held[block] < RESERVATIONS_PER_BLOCK_MAX:
            largest, most = held.most_common(1)[0]
            if most <= held[block]:
                return False, None
        for peer, each in self._reservations.items():
            if each.block == largest and self._may_replace(each, now_s):
                del self._reservations[peer]
                return True, each
        return False, None

    def _may_replace(self, reservation: Reservation, now_s: float) -> bool:
        if reservation.is_used or self._host.is_protected(reservation.connection):
            return False
        return now_s - reservation.since_s >= RESERVATION_UNUSED_S

    # Circuits

    async def _connect(self, stream: ByteStream, message: HopMessage) -> tuple[ByteStream, Circuit] | None:
        source = stream.connection.peer
        try:
            target = parse_peer_id(peer_id_from_bytes(message.peer.id))
        except ValueError:
            await self._refuse(stream, MALFORMED_MESSAGE, "malformed")
            return None
        reservation = self._reservations.get(target)
        if reservation is None or reservation.expires_s <= trio.current_time():
            await self._refuse(stream, NO_RESERVATION, "no_reservation")
            return None
        wanted = Circuit(source, target, address_block(stream.connection.remote_addr))
        if not self._may_connect(wanted.block):
            await self._refuse(stream, RESOURCE_LIMIT_EXCEEDED, "circuits_rate")
            return None
        if not self._take_place(wanted):
            await self._refuse(stream, RESOURCE_LIMIT_EXCEEDED, "circuits_max")
            return None
        onward: ByteStream | None = None
        circuit: tuple[ByteStream, Circuit] | None = None
        try:
            onward = await self._open_onward(source, target)
            answer = HopMessage(type=HopMessage.STATUS, status=OK)
            _limit(answer.limit)
            await _send(stream, answer)
            circuit = onward, wanted
            wanted.is_open = True
        except Dep2pError as error:
            logger.debug("relaying from %s to %s: %s", source, target, error)
            await self._refuse(stream, CONNECTION_FAILED, "target_failed")
            return None
        finally:
            if circuit is None:
                if onward is not None:
                    onward.reset()
                self._circuits.pop(wanted, None)
        reservation.is_used = True
        self._counters.add("relay_circuits")
        return circuit

    def _may_connect(self, block: str) -> bool:
        rate = self._rates.get(block)
        if rate is None:
            if len(self._rates) >= _BLOCKS_MAX:
                self._rates.clear()  # at worst some blocks get another burst
            rate = self._rates[block] = ControlRate(CONNECTS_PER_BLOCK_PER_S, _CONNECTS_BURST_S, trio.current_time())
        if rate.take(1) or rate.refill(trio.current_time(), 0):
            return True
        rate.give_back(1)
        return False

    def _take_place(self, wanted: Circuit) -> bool:
        pair = [each for each in self._circuits if (each.source, each.target) == (wanted.source, wanted.target)]
        if len(pair) >= CIRCUITS_PER_PAIR_MAX:
            # A peer that dials again has lost its last circuit, or holds circuits to keep others out.
            oldest = next((each for each in pair if each.is_open), None)
            if oldest is None:
                return False
            self._end(oldest, "pair")
        if sum(each.source == wanted.source for each in self._circuits) >= CIRCUITS_PER_PEER_MAX:
            return False
        to_target = [each for each in self._circuits if each.target == wanted.target]
        if len(to_target) >= CIRCUITS_PER_TARGET_MAX and not self._make_space(to_target, wanted.block):
            return False
        if len(self._circuits) >= CIRCUITS_MAX and not self._make_space(list(self._circuits), wanted.block):
            return False
        self._circuits[wanted] = None
        return True

    def _make_space(self, circuits: Sequence[Circuit], block: str) -> bool:
        """End the oldest circuit of the block that has most of them; False when no block has more than ``block``."""
        held = Counter(each.block for each in circuits)
        largest, most = held.most_common(1)[0]
        if most <= held[block]:
            return False
        oldest = next((each for each in circuits if each.block == largest and each.is_open), None)
        if oldest is None:
            return False
        self._end(oldest, "block")
        return True

    def _end(self, circuit: Circuit, why: str) -> None:
        self._counters.add(f"relay_circuit_ended_{why}")
        self._circuits.pop(circuit, None)
        circuit.scope.cancel()

    async def _open_onward(self, source: PeerId, target: PeerId) -> ByteStream:
        connections = [one for one in self._host.connections(target) if not is_relayed(one)]
        if not connections:
            raise StreamClosedError(f"{target} is not connected")
        onward = await connections[0].open_stream(STOP, timeout_s=self._timeout_s)
        try:
            ask = StopMessage(type=StopMessage.CONNECT)
            ask.peer.id = peer_id_bytes(source)
            _limit(ask.limit)
            await _send(onward, ask)
            answer = StopMessage()
            answer.ParseFromString(await read_length_prefixed(onward, MESSAGE_BYTES_MAX))
            if answer.type != StopMessage.STATUS or answer.status != OK:
                raise ProtocolError(f"{target} refused with status {answer.status}")
        except (DecodeError, UnicodeDecodeError) as error:
            onward.reset()
            raise ProtocolError(f"{target} answered with an unreadable message") from error
        except BaseException:
            onward.reset()
            raise
        return onward

    async def _carry(self, one: ByteStream, other: ByteStream, circuit: Circuit) -> None:
        account = self._ledger.open_circuit(lambda _reason: self._end(circuit, "memory"))
        try:
            for stream in (one, other):
                if isinstance(stream, ChargedStream):
                    stream.charge_to(account)
            with circuit.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, circuit)
                    async with trio.open_nursery() as pumps:
                        pumps.start_soon(self._pump, one, other, circuit)
                        pumps.start_soon(self._pump, other, one, circuit)
                    nursery.cancel_scope.cancel()
        finally:
            one.reset()
            other.reset()
            account.close()
            self._circuits.pop(circuit, None)

    async def _watch(self, circuit: Circuit) -> None:
        """End a circuit that carries nothing, has lasted its time, or was closed by one end only."""
        end_s = trio.current_time() + CIRCUIT_S
        await trio.sleep(CIRCUIT_FIRST_S)
        seen = 0
        while circuit.carried_bytes != seen and trio.current_time() < end_s:
            seen = circuit.carried_bytes
            with trio.move_on_after(min(CIRCUIT_IDLE_S, max(0.0, end_s - trio.current_time()))):
                await circuit.half_closed.wait()
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
            circuit.half_closed.set()
        except StreamClosedError:
            circuit.scope.cancel()
        finally:
            self._counters.add("relay_bytes", carried)


class RelayClient:
    """Reserves at connected relays, is dialled through them, and dials through any relay."""

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
        self._reserved: dict[PeerId, tuple[float, list[str]]] = {}
        self._changed = trio.Event()
        if reserves:
            host.set_stream_handler(STOP, self._serve)
            host.subscribe(self._on_event)

    def addrs(self) -> list[str]:
        """Return the addresses at which this host can be dialled through its relays, without its own id."""
        return [text for _, texts in self._reserved.values() for text in texts]

    def consider(self, peer: PeerId) -> None:
        """Look at a peer whose protocols are known now: it may be a relay."""
        if self._reserves and HOP in self._protocols(peer):
            self._changed.set()

    def _on_event(self, event: HostEvent) -> None:
        if isinstance(event, PeerDisconnected) and event.last and event.connection.peer in self._reserved:
            del self._reserved[event.connection.peer]
            self._counters.add("relay_reservation_lost")
            self._changed.set()

    async def run(self) -> None:
        """Keep reservations at up to RELAYS_MAX connected relays, until cancelled."""
        while True:
            now_s = trio.current_time()
            for connection in self._host.connections():
                due_s = self._reserved.get(connection.peer, (0.0, []))[0]
                is_new = connection.peer not in self._reserved
                if now_s < due_s or is_relayed(connection) or HOP not in self._protocols(connection.peer):
                    continue
                if is_new and len(self._reserved) >= RELAYS_MAX:
                    continue
                await self._renew(connection)
            due = [due_s for due_s, _ in self._reserved.values()]
            with trio.move_on_after(max(1.0, min(due, default=60.0 + now_s) - trio.current_time())):
                await self._changed.wait()
            self._changed = trio.Event()

    async def _renew(self, connection: Connection) -> None:
        try:
            with trio.fail_after(self._timeout_s):
                await self.reserve(connection)
        except (Dep2pError, trio.TooSlowError) as error:
            self._reserved.pop(connection.peer, None)
            self._counters.add("relay_reservation_failed")
            logger.debug("reserving at %s: %r", connection.peer, error)

    async def reserve(self, connection: Connection) -> None:
        """Reserve at a relay, or renew. Raises ProtocolError when it refuses, or what opening a stream raises."""
        stream = await connection.open_stream(HOP, timeout_s=self._timeout_s)
        try:
            await _send(stream, HopMessage(type=HopMessage.RESERVE))
            answer = await _hop_answer(stream)
            if answer.status != OK:
                raise ProtocolError(f"the relay {connection.peer} refused the reservation with status {answer.status}")
        finally:
            stream.reset()
        addrs: dict[str, None] = {}
        for raw in answer.reservation.addrs[:16]:
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
        lasts_s = max(60.0, min(float(RESERVATION_S), answer.reservation.expire - time.time()))
        self._reserved[connection.peer] = (trio.current_time() + 0.75 * lasts_s, list(addrs))
        self._counters.add("relay_reserved")

    async def _serve(self, stream: ByteStream) -> None:
        relay = stream.connection
        if relay.peer not in self._reserved:
            self._counters.add("relay_inbound_refused_no_reservation")
            await _send(stream, StopMessage(type=StopMessage.STATUS, status=PERMISSION_DENIED))
            await stream.close()
            return
        ask = StopMessage()
        try:
            with trio.fail_after(self._timeout_s):
                ask.ParseFromString(await read_length_prefixed(stream, MESSAGE_BYTES_MAX))
        except (DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a relay message that cannot be read: {error}") from None
        except trio.TooSlowError:
            raise RequestTimeoutError("no relay message in time") from None
        if ask.type != StopMessage.CONNECT:
            raise ProtocolError("not a CONNECT of the relay protocol")
        await _send(stream, StopMessage(type=StopMessage.STATUS, status=OK))
        # The handshake through the relay, which follows, proves the peer's identity.
        transport = RelayedTransport(stream, _limit_of(ask), self._counters)
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
            await _send(stream, ask)
            answer = await _hop_answer(stream)
            if answer.status != OK:
                known = {
                    NO_RESERVATION: "the peer has no reservation there",
                    RESOURCE_LIMIT_EXCEEDED: "it is at its limit",
                }
                raise UpgradeError(f"the relay refused: {known.get(answer.status, f'status {answer.status}')}")
            done = True
            return RelayedTransport(stream, _limit_of(answer), self._counters)
        except Dep2pError as error:
            raise UpgradeError(f"the relay: {error}") from error
        finally:
            if not done:
                stream.reset()


async def _send(stream: ByteStream, message: HopMessage | StopMessage) -> None:
    await stream.write(encode_length_prefixed(message.SerializeToString()))


async def _hop_answer(stream: ByteStream) -> HopMessage:
    answer = HopMessage()
    try:
        answer.ParseFromString(await read_length_prefixed(stream, MESSAGE_BYTES_MAX))
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a relay message that cannot be read: {error}") from None
    if answer.type != HopMessage.STATUS:
        raise ProtocolError("the relay answered with something else than a status")
    return answer


def _limit_of(message: HopMessage | StopMessage) -> CircuitLimit:
    return CircuitLimit(message.limit.data, float(message.limit.duration))


def _limit(limit: Limit) -> None:
    limit.duration = CIRCUIT_S
    limit.data = CIRCUIT_BYTES_MAX
