"""A hostile peer's end of a connection: Noise and yamux by hand, so that none of our own limits holds it back."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import trio

from dep2p.errors import Dep2pError
from dep2p.host.libp2p_import import import_libp2p
from dep2p.host.multistream import encode_message
from dep2p.host.noise.codec import PLAINTEXT_BYTES_MAX, NoiseOpener, NoiseSealer
from dep2p.host.noise.handshake import NoiseHandshake
from dep2p.host.yamux.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    HEADER_BYTES,
    PING,
    RST,
    SYN,
    WINDOW_INITIAL_BYTES,
    WINDOW_UPDATE,
    encode_header,
)
from dep2p.identity import Identity
from dep2p.protocols.realm.handshake import (
    AUTH_PROTOCOL,
    HandshakeBytes,
    HandshakeChannel,
    HandshakeEffect,
    HandshakeInitiator,
    PeerAuthenticated,
    SendBytes,
)
from dep2p.realm.credentials import Realm
from dep2p.types import PeerId

HEADER_MESSAGE = b"\x13/multistream/1.0.0\n"
_DIAL_TIMEOUT_S = 10.0
_DIALS = trio.CapacityLimiter(16)
_PIECE_BYTES = 32_768
_READ_BYTES = 262_144


class RefusedError(Exception):
    """The node ended the connection or the stream, or does not take it."""


class Transport(Protocol):
    """The channel of a connection: a socket, or a stream of another connection through a relay."""

    async def send_all(self, data: bytes) -> None: ...
    async def receive_some(self) -> bytes: ...
    async def aclose(self) -> None: ...


class _ForgedHandshake(NoiseHandshake):
    """A handshake whose last message carries any bytes in the place of a signed identity."""

    forged_payload: bytes = b""

    def _write_payload(self) -> bytes:
        return (
            bytes(self._state.write_message(self.forged_payload)) if self.forged_payload else super()._write_payload()
        )


class RawStream:
    """A stream as the attacker holds it. ``is_kept`` False drops what arrives, and counts it."""

    def __init__(self, connection: "RawConnection", stream_id: int, preamble_bytes: int) -> None:
        self.id = stream_id
        self.window_bytes = WINDOW_INITIAL_BYTES
        self.received = bytearray()
        self.received_bytes = 0
        self.is_kept = True
        self.is_crediting = True
        self.is_ended = False
        self.on_data: Callable[[bytes], None] | None = None
        self._connection = connection
        self._preamble_bytes = preamble_bytes
        self._changed = trio.lowlevel.ParkingLot()

    def take(self, data: bytes) -> None:
        """Bytes of the peer, the answer to the negotiation first."""
        skipped = min(self._preamble_bytes, len(data))
        self._preamble_bytes -= skipped
        data = data[skipped:]
        self.received_bytes += len(data)
        if self.on_data is not None:
            self.on_data(data)
        elif self.is_kept:
            self.received += data
        self._changed.unpark_all()

    def change(self, *, credit_bytes: int = 0, ends: bool = False) -> None:
        """The peer granted window, or ended the stream."""
        self.window_bytes += credit_bytes
        self.is_ended = self.is_ended or ends
        self._changed.unpark_all()

    async def send(self, data: bytes) -> None:
        """Send all of it within the window that the peer grants. Raises RefusedError."""
        at = 0
        while at < len(data):
            while not self.window_bytes:
                self._check()
                await self._changed.park()
            self._check()
            piece = data[at : at + min(_PIECE_BYTES, self.window_bytes)]
            self.window_bytes -= len(piece)
            at += len(piece)
            await self._connection.send(encode_header(DATA, 0, self.id, len(piece)) + piece)

    async def send_all(self, data: bytes) -> None:
        """As `send`, when the stream is the transport of another connection."""
        await self.send(data)

    async def receive_some(self) -> bytes:
        """Bytes that arrived; b"" at the end."""
        while not self.received:
            if self.is_ended or self._connection.is_closed:
                return b""
            await self._changed.park()
        data = bytes(self.received)
        self.received.clear()
        return data

    async def wait_ended(self) -> None:
        """Wait until the peer ends it, or its connection."""
        while not self.is_ended and not self._connection.is_closed:
            await self._changed.park()

    async def aclose(self) -> None:
        """Reset it."""
        if not self._connection.is_closed:
            await self._connection.send(encode_header(WINDOW_UPDATE, RST, self.id, 0))

    def _check(self) -> None:
        if self.is_ended or self._connection.is_closed:
            raise RefusedError("the node ended the stream")


class RawConnection:
    """One connection of an attacker; made by `dial` or `over`. Its reader runs in the nursery that they are given."""

    def __init__(self, transport: Transport) -> None:
        self.streams: dict[int, RawStream] = {}
        self.accepts: dict[str, Callable[[RawStream], None]] = {}
        """Protocols that the peer may open towards the attacker; all others are reset."""
        self._closed = trio.Event()
        self._transport = transport
        self._plain = bytearray()
        self._scratch = memoryview(bytearray(PLAINTEXT_BYTES_MAX * 5))
        self._lock = trio.Lock()
        self._control = bytearray()
        self._next_id = 1
        self._negotiating: dict[int, bytearray] = {}
        self.peer = PeerId("")
        self.own = PeerId("")
        self.binding = b""

    @property
    def is_closed(self) -> bool:
        """Whether either side has ended it."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Wait for its end."""
        await self._closed.wait()

    @classmethod
    async def dial(
        cls, nursery: trio.Nursery, address: str, *, identity: Identity | None = None, payload: bytes = b""
    ) -> Self:
        """Connect to ``/ip4/HOST/tcp/PORT…``. Raises RefusedError, for a time-out too."""
        parts = address.split("/")
        try:
            # Hundreds of handshakes at the same time in one process would all be too slow.
            async with _DIALS:
                with trio.fail_after(_DIAL_TIMEOUT_S):
                    return await cls._dial(nursery, parts[2], int(parts[4]), identity, payload)
        except (OSError, trio.TooSlowError) as error:
            raise RefusedError(f"no connection: {type(error).__name__}") from error

    @classmethod
    async def _dial(
        cls, nursery: trio.Nursery, host: str, port: int, identity: Identity | None, payload: bytes
    ) -> Self:
        return await cls.over(
            nursery, _Socket(await trio.open_tcp_stream(host, port)), identity=identity, payload=payload
        )

    @classmethod
    async def over(
        cls, nursery: trio.Nursery, transport: Transport, *, identity: Identity | None = None, payload: bytes = b""
    ) -> Self:
        """The same over a transport that is connected already."""
        made = cls(transport)
        try:
            await made._upgrade(identity or Identity.generate(), payload)
        except BaseException as error:
            with trio.CancelScope(shield=True), trio.move_on_after(0.1):
                await transport.aclose()
            if isinstance(error, Dep2pError | trio.BrokenResourceError | trio.ClosedResourceError):
                raise RefusedError(f"no connection: {error!r}") from error
            raise
        nursery.start_soon(made._read_all)
        return made

    async def _upgrade(self, identity: Identity, payload: bytes) -> None:
        import_libp2p()
        from libp2p.crypto.ed25519 import create_new_key_pair
        from libp2p.crypto.x25519 import create_new_key_pair as create_static_pair

        received = bytearray()

        async def read(count: int) -> bytes:
            while len(received) < count:
                data = await self._transport.receive_some()
                if not data:
                    raise RefusedError("the node closed the connection during its upgrade")
                received.extend(data)
            taken = bytes(received[:count])
            del received[:count]
            return taken

        proposal = HEADER_MESSAGE + encode_message("/noise")
        await self._transport.send_all(proposal)
        await read(len(proposal))
        handshake = _ForgedHandshake(
            create_new_key_pair(identity.private_seed), create_static_pair().private_key, is_initiator=True
        )
        handshake.forged_payload = payload
        await self._transport.send_all(_sized(handshake.start()))
        answer = handshake.receive(await read(int.from_bytes(await read(2), "big")))
        result = handshake.result
        assert answer is not None and result is not None
        await self._transport.send_all(_sized(answer))
        self._sealer, self._opener = NoiseSealer(result.send_key), NoiseOpener(result.receive_key)
        self.own, self.peer, self.binding = identity.peer_id, PeerId(str(result.remote_peer)), result.handshake_hash
        proposal = HEADER_MESSAGE + encode_message("/yamux/1.0.0")
        await self.send(proposal)
        if received:
            self._open(bytes(received))
        while len(self._plain) < len(proposal):
            data = await self._transport.receive_some()
            if not data:
                raise RefusedError("the node closed the connection during its upgrade")
            self._open(data)
        del self._plain[: len(proposal)]

    def _open(self, data: bytes) -> None:
        self._opener.feed(memoryview(data), self._scratch, self._plain.extend)

    async def send(self, data: bytes) -> None:
        """Send plaintext, and what the reader has to answer. Raises RefusedError."""
        if self.is_closed:
            raise RefusedError("the node ended the connection")
        async with self._lock:
            while data or self._control:
                data, self._control = bytes(self._control) + data, bytearray()
                try:
                    await self._transport.send_all(self._sealer.seal(data))
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    self._closed.set()
                    raise RefusedError("the node ended the connection") from error
                data = b""

    async def open_stream(self, protocol: str, *first: bytes) -> RawStream:
        """Propose ``protocol`` on a new stream and send ``first`` without waiting for its answer."""
        proposal = HEADER_MESSAGE + encode_message(protocol)
        stream = self.new_stream(len(proposal))
        await self.send(encode_header(WINDOW_UPDATE, SYN, stream.id, 0))
        await stream.send(b"".join((proposal, *first)))
        return stream

    def new_stream(self, preamble_bytes: int = 0) -> RawStream:
        """A stream whose SYN the caller sends."""
        stream = self.streams[self._next_id] = RawStream(self, self._next_id, preamble_bytes)
        self._next_id += 2
        return stream

    async def close(self) -> None:
        """End the connection."""
        self._closed.set()
        await self._transport.aclose()

    async def _read_all(self) -> None:
        try:
            while True:
                self._take_frames()
                if self._control and not self._lock.locked():
                    await self.send(b"")
                data = await self._transport.receive_some()
                if not data:
                    return
                self._open(data)
        except (RefusedError, Dep2pError, trio.BrokenResourceError, trio.ClosedResourceError):
            return
        finally:
            self._closed.set()
            for stream in self.streams.values():
                stream.change(ends=True)
            with trio.CancelScope(shield=True), trio.move_on_after(0.1):
                await self._transport.aclose()

    def _take_frames(self) -> None:
        plain, at = self._plain, 0
        while len(plain) - at >= HEADER_BYTES:
            _, kind, flags, stream_id, length = HEADER.unpack_from(plain, at)
            body = length if kind == DATA else 0
            if len(plain) - at < HEADER_BYTES + body:
                break
            at += HEADER_BYTES
            self._take_frame(kind, flags, stream_id, length, bytes(plain[at : at + body]))
            at += body
        del plain[:at]

    def _take_frame(self, kind: int, flags: int, stream_id: int, length: int, body: bytes) -> None:
        if kind == PING:
            if flags & SYN:
                self._control += encode_header(PING, ACK, 0, length)
            return
        if kind == GO_AWAY:
            return
        if flags & SYN and stream_id % 2 == 0:
            self._negotiating[stream_id] = bytearray()
            self._control += encode_header(WINDOW_UPDATE, ACK if self.accepts else RST, stream_id, 0)
        stream = self.streams.get(stream_id)
        if body:
            if stream is None or stream.is_crediting:
                self._control += encode_header(WINDOW_UPDATE, 0, stream_id, len(body))
            if stream is not None:
                stream.take(body)
            elif stream_id in self._negotiating:
                self._negotiate(stream_id, body)
        if stream is not None and (kind == WINDOW_UPDATE or flags & (FIN | RST)):
            stream.change(credit_bytes=length if kind == WINDOW_UPDATE else 0, ends=bool(flags & (FIN | RST)))

    def _negotiate(self, stream_id: int, body: bytes) -> None:
        """Accept an inbound stream whose proposal is complete and known."""
        said = self._negotiating[stream_id]
        said += body
        for protocol, serve in self.accepts.items():
            proposal = HEADER_MESSAGE + encode_message(protocol)
            if said.startswith(proposal):
                rest = bytes(said[len(proposal) :])
                del self._negotiating[stream_id]
                self._control += encode_header(DATA, 0, stream_id, len(proposal)) + proposal
                stream = self.streams[stream_id] = RawStream(self, stream_id, 0)
                serve(stream)
                if rest:
                    stream.take(rest)
                return
        if said.count(b"\n") >= 2:
            del self._negotiating[stream_id]
            self._control += encode_header(WINDOW_UPDATE, RST, stream_id, 0)


class _Socket:
    """A TCP socket as a transport."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.send_all = stream.send_all
        self.aclose = stream.aclose

    async def receive_some(self) -> bytes:
        return bytes(await self._stream.receive_some(_READ_BYTES))


async def join_realm(connection: RawConnection, realm: Realm) -> None:
    """Prove membership on the connection. Raises RefusedError."""
    handshake = HandshakeInitiator(
        realm.keys,
        HandshakeChannel(connection.own, connection.peer, connection.binding),
        features=(),
        rng=random.SystemRandom(),
        now=trio.current_time(),
        timeout_s=_DIAL_TIMEOUT_S,
    )
    stream = await connection.open_stream(AUTH_PROTOCOL)
    effects: Sequence[HandshakeEffect] = handshake.start()
    while True:
        for effect in effects:
            if isinstance(effect, SendBytes):
                await stream.send(effect.data)
            elif isinstance(effect, PeerAuthenticated):
                return
            else:
                raise RefusedError(str(effect.error))
        data = await stream.receive_some()
        if not data:
            raise RefusedError("the node ended the handshake")
        effects = handshake.handle(HandshakeBytes(data), trio.current_time())


async def dial_member(
    nursery: trio.Nursery, address: str, realm: Realm, identity: Identity | None = None
) -> RawConnection:
    """A connection that has proved its membership. Raises RefusedError."""
    connection = await RawConnection.dial(nursery, address, identity=identity)
    await join_realm(connection, realm)
    return connection


def _sized(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message
