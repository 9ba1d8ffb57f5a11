"""Circuit relay v2 on our own streams, with py-libp2p's messages: serving it, reserving at one, dialling through one.

Rules: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. py-libp2p's own server is not used: it takes the
id of who reserves out of the message, where anybody can write it.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import trio
from google.protobuf.message import DecodeError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from multiaddr import Multiaddr

from dep2p.errors import Dep2pError, ProtocolError, RequestTimeoutError, StreamClosedError
from dep2p.host.addresses import Address, parse_address
from dep2p.host.connections.upgrade import UpgradeError
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, Connection, HostEvent, PeerDisconnected, StreamHandler
from dep2p.host.length_prefixed import encode_message, read_message
from dep2p.types import PeerId, parse_peer_id, peer_id_bytes, peer_id_from_bytes

logger = logging.getLogger("dep2p.host")

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
MESSAGE_BYTES_MAX = 4_096

RESERVATIONS_MAX = 256
CIRCUITS_MAX = 256
CIRCUITS_PER_PEER_MAX = 16
RESERVATION_S = 3_600
CIRCUIT_S = 3_600
CIRCUIT_BYTES_MAX = 268_435_456
"""Per direction; a circuit over it, or older than CIRCUIT_S, is reset."""
RELAYS_MAX = 3
"""Relays at which a client reserves at a time."""

OK, REFUSED, LIMIT_EXCEEDED, DENIED, FAILED, NO_RESERVATION = 100, 200, 201, 202, 203, 204
MALFORMED, UNEXPECTED = 400, 401


class RelayHost(Protocol):
    """What relaying needs of the host."""

    @property
    def peer_id(self) -> PeerId: ...

    def listen_addrs(self) -> list[str]: ...

    def connections(self, peer: PeerId | None = None) -> Sequence[Connection]: ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]: ...

    async def dial(self, peer: PeerId, addrs: Sequence[str], *, timeout_s: float | None = None) -> Connection: ...

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None: ...


class RelayedTransport(ReadWriteCloser):
    """A stream through a relay, as the transport of a connection that is upgraded over it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """Up to ``n`` bytes; b"" at the end. Raises ConnectionClosedError."""
        try:
            return await self._stream.read(65_536 if n is None or n < 0 else n)
        except StreamClosedError as error:
            raise ConnectionClosedError(str(error)) from error

    async def write(self, data: bytes) -> None:
        """Raises ConnectionClosedError."""
        try:
            await self._stream.write(data)
        except StreamClosedError as error:
            raise ConnectionClosedError(str(error)) from error

    async def close(self) -> None:
        await self._stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def is_relayed(connection: Connection) -> bool:
    """Whether a connection goes through a relay itself."""
    return "/p2p-circuit" in connection.remote_addr


class RelayServer:
    """Serves reservations and circuits, bounded in number, bytes and time."""

    def __init__(self, host: RelayHost, counters: Counters, *, timeout_s: float) -> None:
        self._host = host
        self._counters = counters
        self._timeout_s = timeout_s
        self._reservations: dict[PeerId, float] = {}
        self._circuits: dict[PeerId, int] = {}
        host.set_stream_handler(HOP, self._serve)
        host.subscribe(self._on_event)

    def _on_event(self, event: HostEvent) -> None:
        if isinstance(event, PeerDisconnected) and event.last:
            self._reservations.pop(event.connection.peer, None)

    async def _serve(self, stream: ByteStream) -> None:
        circuit: tuple[ByteStream, PeerId] | None = None
        peer = stream.connection.peer
        with trio.move_on_after(self._timeout_s) as scope:
            message = HopMessage()
            try:
                message.ParseFromString(await read_message(stream, MESSAGE_BYTES_MAX))
            except (DecodeError, UnicodeDecodeError) as error:
                raise ProtocolError(f"a relay message that cannot be read: {error}") from None
            if is_relayed(stream.connection):
                await self._refuse(stream, DENIED, "over_relay")
            elif message.HasField("type") and message.type == HopMessage.RESERVE:
                await self._reserve(stream, peer)
            elif message.type == HopMessage.CONNECT:
                circuit = await self._connect(stream, peer, message)
            else:
                await self._refuse(stream, UNEXPECTED, "unexpected")
        if circuit is not None:
            await self._carry(stream, circuit[0], peer, circuit[1])
        elif scope.cancelled_caught:
            self._counters.add("relay_refused_timeout")
            stream.reset()

    async def _refuse(self, stream: ByteStream, status: int, why: str) -> None:
        self._counters.add(f"relay_refused_{why}")
        await _send(stream, HopMessage(type=HopMessage.STATUS, status=_status(status)))
        await stream.close()

    async def _reserve(self, stream: ByteStream, peer: PeerId) -> None:
        now_s = trio.current_time()
        for one, expires_s in list(self._reservations.items()):
            if expires_s <= now_s:
                del self._reservations[one]
        if len(self._reservations) >= RESERVATIONS_MAX and peer not in self._reservations:
            await self._refuse(stream, REFUSED, "reservations_max")
            return
        self._reservations[peer] = now_s + RESERVATION_S
        self._counters.add("relay_reservations")
        answer = HopMessage(type=HopMessage.STATUS, status=_status(OK))
        answer.reservation.expire = int(time.time()) + RESERVATION_S
        own = [text for text in self._host.listen_addrs() if "/p2p-circuit" not in text]
        answer.reservation.addrs.extend(Multiaddr(text).to_bytes() for text in own)
        _limit(answer.limit)
        await _send(stream, answer)
        await stream.close()

    async def _connect(
        self, stream: ByteStream, source: PeerId, message: HopMessage
    ) -> tuple[ByteStream, PeerId] | None:
        try:
            target = parse_peer_id(peer_id_from_bytes(message.peer.id))
        except ValueError:
            await self._refuse(stream, MALFORMED, "malformed")
            return None
        if self._reservations.get(target, 0.0) <= trio.current_time():
            await self._refuse(stream, NO_RESERVATION, "no_reservation")
            return None
        if not self._take_places(source, target):
            await self._refuse(stream, LIMIT_EXCEEDED, "circuits_max")
            return None
        onward: ByteStream | None = None
        circuit: tuple[ByteStream, PeerId] | None = None
        try:
            onward = await self._open_onward(source, target)
            answer = HopMessage(type=HopMessage.STATUS, status=_status(OK))
            _limit(answer.limit)
            await _send(stream, answer)
            circuit = onward, target
        except Dep2pError as error:
            logger.debug("relaying from %s to %s: %s", source, target, error)
            await self._refuse(stream, FAILED, "target_failed")
            return None
        finally:
            if circuit is None:
                if onward is not None:
                    onward.reset()
                self._give_places(source, target)
        self._counters.add("relay_circuits")
        return circuit

    def _take_places(self, source: PeerId, target: PeerId) -> bool:
        """Count a circuit from before it is made, so that many asked for at once keep to the limit, too."""
        busy = max(self._circuits.get(source, 0), self._circuits.get(target, 0))
        if sum(self._circuits.values()) >= 2 * CIRCUITS_MAX or busy >= CIRCUITS_PER_PEER_MAX:
            return False
        for peer in (source, target):
            self._circuits[peer] = self._circuits.get(peer, 0) + 1
        return True

    def _give_places(self, source: PeerId, target: PeerId) -> None:
        for peer in (source, target):
            self._circuits[peer] -= 1
            if not self._circuits[peer]:
                del self._circuits[peer]

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
            answer.ParseFromString(await read_message(onward, MESSAGE_BYTES_MAX))
            if answer.type != StopMessage.STATUS or answer.status != OK:
                raise ProtocolError(f"{target} refused with status {answer.status}")
        except (DecodeError, UnicodeDecodeError) as error:
            onward.reset()
            raise ProtocolError(f"{target} answered with an unreadable message") from error
        except BaseException:
            onward.reset()
            raise
        return onward

    async def _carry(self, one: ByteStream, other: ByteStream, source: PeerId, target: PeerId) -> None:
        try:
            with trio.move_on_after(CIRCUIT_S) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, one, other, nursery.cancel_scope)
                    nursery.start_soon(self._pump, other, one, nursery.cancel_scope)
            if scope.cancelled_caught:
                self._counters.add("relay_circuit_ended_time")
        finally:
            one.reset()
            other.reset()
            self._give_places(source, target)

    async def _pump(self, source: ByteStream, sink: ByteStream, scope: trio.CancelScope) -> None:
        carried = 0
        try:
            while data := await source.read():
                carried += len(data)
                if carried > CIRCUIT_BYTES_MAX:
                    self._counters.add("relay_circuit_ended_bytes")
                    scope.cancel()
                    return
                sink.write_nowait(data, urgent=True)
                await sink.drain(262_144)
            await sink.close_write()
        except StreamClosedError:
            scope.cancel()
        finally:
            self._counters.add("relay_bytes", carried)


class RelayClient:
    """Reserves at connected relays, is dialled through them, and dials through any relay."""

    def __init__(
        self,
        host: RelayHost,
        counters: Counters,
        accept: Callable[[Any, str, None], Awaitable[None]],
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
        """Where this host can be dialled through its relays, without its own id."""
        return [text for _, texts in self._reserved.values() for text in texts]

    def consider(self, peer: PeerId) -> None:
        """Something is known of what ``peer`` speaks: it may be a relay."""
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
        lasts_s = max(60.0, min(float(RESERVATION_S), answer.reservation.expire - time.time()))
        self._reserved[connection.peer] = (trio.current_time() + 0.75 * lasts_s, list(addrs))
        self._counters.add("relay_reserved")

    async def _serve(self, stream: ByteStream) -> None:
        relay = stream.connection
        if relay.peer not in self._reserved:
            self._counters.add("relay_inbound_refused_no_reservation")
            await _send(stream, StopMessage(type=StopMessage.STATUS, status=_status(DENIED)))
            await stream.close()
            return
        ask = StopMessage()
        try:
            with trio.fail_after(self._timeout_s):
                ask.ParseFromString(await read_message(stream, MESSAGE_BYTES_MAX))
        except (DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a relay message that cannot be read: {error}") from None
        except trio.TooSlowError:
            raise RequestTimeoutError("no relay message in time") from None
        if ask.type != StopMessage.CONNECT:
            raise ProtocolError("not a CONNECT of the relay protocol")
        await _send(stream, StopMessage(type=StopMessage.STATUS, status=_status(OK)))
        # Who it really is comes out of the handshake that is now made through the relay.
        await self._accept(RelayedTransport(stream), f"{relay.remote_addr}/p2p/{relay.peer}/p2p-circuit", None)

    async def dial(self, address: Address, peer: PeerId) -> RelayedTransport:
        """The transport to ``peer`` through the relay in the address. Raises UpgradeError."""
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
                known = {NO_RESERVATION: "the peer has no reservation there", LIMIT_EXCEEDED: "it is at its limit"}
                raise UpgradeError(f"the relay refused: {known.get(answer.status, f'status {answer.status}')}")
            done = True
            return RelayedTransport(stream)
        except Dep2pError as error:
            raise UpgradeError(f"the relay: {error}") from error
        finally:
            if not done:
                stream.reset()


async def _send(stream: ByteStream, message: Any) -> None:
    await stream.write(encode_message(message.SerializeToString()))


async def _hop_answer(stream: ByteStream) -> HopMessage:
    answer = HopMessage()
    try:
        answer.ParseFromString(await read_message(stream, MESSAGE_BYTES_MAX))
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a relay message that cannot be read: {error}") from None
    if answer.type != HopMessage.STATUS:
        raise ProtocolError("the relay answered with something else than a status")
    return answer


def _limit(limit: Any) -> None:
    limit.duration = CIRCUIT_S
    limit.data = CIRCUIT_BYTES_MAX


def _status(code: int) -> Any:
    return code
