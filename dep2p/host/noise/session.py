"""`/noise` for py-libp2p connections: its XX handshake, then a session that works on the socket itself.

py-libp2p's own session makes two exact reads, three locks and one write of every message. Here one receive takes up to
256 KiB and decrypts every message in it, and one send carries as many messages as the socket takes.
"""

import fcntl
import logging
import os
import struct
import termios
from collections.abc import Awaitable, Callable

import trio
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.connection_types import ConnectionType
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import NoiseFailure
from multiaddr import Multiaddr

from dep2p.errors import ProtocolError
from dep2p.host.noise.codec import (
    LENGTH_BYTES,
    PLAINTEXT_BYTES_MAX,
    WIRE_BYTES_MAX,
    NoiseOpener,
    NoiseSealer,
    OnPlaintext,
)
from dep2p.host.noise.handshake import HANDSHAKE_BYTES_MAX, HandshakeResult, NoiseHandshake
from dep2p.host.resources.turns import Turns
from dep2p.host.scopes import shielded

logger: logging.Logger = logging.getLogger("dep2p.host")

PROTOCOL_ID = "/noise"
RECEIVE_BYTES_MAX = 262_144
SEND_MESSAGES_MAX = 4
"""Full Noise messages per send: about 256 KiB."""
CLOSE_TIMEOUT_S = 1.0
"""Seconds for closing a connection that is not a plain TCP socket."""

Fill = Callable[[memoryview], int]
"""Writes plaintext to the start of the buffer; returns how many bytes, 0 for none."""
Turn = Callable[[], Awaitable[None]]
"""Waits until bytes that have come may be worked on."""


class Scratch:
    """Buffers that all sessions of a host share; one thread only. What is in them never outlives one step of a task."""

    __slots__ = ("plain", "received", "sealed", "to_seal")

    def __init__(self) -> None:
        self.received: memoryview[int] = memoryview(bytearray(RECEIVE_BYTES_MAX))
        self.plain: memoryview[int] = memoryview(bytearray(RECEIVE_BYTES_MAX))
        self.to_seal: memoryview[int] = memoryview(bytearray(PLAINTEXT_BYTES_MAX))
        self.sealed: memoryview[int] = memoryview(bytearray(SEND_MESSAGES_MAX * WIRE_BYTES_MAX))


class NoiseSession(ISecureConn):
    """An encrypted connection.

    Two faces: py-libp2p's `read`, `write` and `close`, for negotiation; and `receive`, `send_now` and `send`, for the
    muxer, which must be the only user then. One task may receive and one may send at a time.
    """

    is_initiator: bool

    def __init__(
        self,
        raw: IRawConnection,
        result: HandshakeResult,
        *,
        local_peer: ID,
        local_private_key: PrivateKey,
        is_initiator: bool,
        scratch: Scratch | None = None,
    ) -> None:
        self.is_initiator = is_initiator
        self.is_closed: bool = False
        self.negotiated_security_protocol = PROTOCOL_ID  # py-libp2p's swarm looks for it
        self._raw = raw
        self._result = result
        self._local_peer = local_peer
        self._local_private_key = local_private_key
        self._sealer = NoiseSealer(result.send_key)
        self._opener = NoiseOpener(result.receive_key)
        self._scratch = Scratch() if scratch is None else scratch
        self._socket = _socket_of(raw)
        self._plain = bytearray()  # decrypted and not yet read
        self._unsent = bytearray()  # encrypted, and the socket did not take it yet
        self._written_bytes = 0  # that the socket took

    # For the muxer

    @property
    def can_send_now(self) -> bool:
        """True when `send_now` may be used: a TCP socket with nothing waiting before it."""
        return self._socket is not None and not self._unsent and not self.is_closed

    @property
    def unsent_bytes(self) -> int:
        """Encrypted bytes that the socket has not taken yet."""
        return len(self._unsent)

    @property
    def offered_bytes(self) -> int:
        """Encrypted bytes of this TCP connection so far, those that the socket has not taken among them; 0 for other
        transports."""
        return self._written_bytes + len(self._unsent)

    def arrived_bytes(self) -> int:
        """Return how many of them the peer's kernel has acknowledged, or the socket has taken where the kernel does not
        say; 0 for other transports."""
        if self._socket is None or self.is_closed:
            return self._written_bytes
        try:
            waiting = struct.unpack("i", fcntl.ioctl(self._fd(), termios.TIOCOUTQ, bytes(4)))[0]
        except (OSError, ConnectionClosedError):
            return self._written_bytes
        return self._written_bytes - int(waiting)

    @property
    def incomplete_bytes(self) -> int:
        """Received bytes of a message whose end has not arrived."""
        return self._opener.incomplete_bytes

    def send_now(self, plaintext: bytes) -> bool:
        """Encrypt and hand to the socket at once, without waiting; only while `can_send_now`.

        Returns False when the socket did not take all: `send` must follow, and meets the error if there is one.
        Raises ProtocolError.
        """
        sealed = self._sealer.seal(plaintext)
        try:
            sent = self._write_some(sealed)
        except ConnectionClosedError:
            sent = 0
        if sent == len(sealed):
            return True
        self._unsent += sealed[sent:] if sent else sealed
        return False

    async def send(self, fill: Fill) -> None:
        """Send the waiting bytes, or else those that ``fill`` gives now, up to about 256 KiB; return when the
        connection took them.

        Cancelling it tears nothing on TCP; on other transports the session closes.
        Raises ConnectionClosedError, ProtocolError.
        """
        if self._socket is None:
            await self._send_generic(fill)
            return
        if not self._unsent:
            scratch = self._scratch
            sealed, size = scratch.sealed, 0
            for _ in range(SEND_MESSAGES_MAX):
                filled = fill(scratch.to_seal)
                if not filled:
                    break
                size += self._sealer.seal_into(scratch.to_seal[:filled], sealed[size:])
            sent = self._write_some(sealed[:size])
            if sent == size:
                await trio.lowlevel.checkpoint()
                return
            self._unsent += sealed[sent:size]
        await self._flush()

    async def _flush(self) -> None:
        while self._unsent:
            await self._wait_writable()
            with memoryview(self._unsent) as view:
                sent = self._write_some(view)
            del self._unsent[:sent]

    async def _send_generic(self, fill: Fill) -> None:
        filled = fill(self._scratch.to_seal)
        if filled:
            await self._write_generic(self._sealer.seal(bytes(self._scratch.to_seal[:filled])))

    async def receive(
        self, on_plaintext: OnPlaintext, bytes_max: int = RECEIVE_BYTES_MAX, turn: Turn | None = None
    ) -> bool:
        """Wait for bytes and pass what they complete to ``on_plaintext``; False when the peer has closed.

        ``bytes_max``: read at a time, at most RECEIVE_BYTES_MAX. ``turn``: awaited when there are bytes, before they
        are read and decrypted.

        Raises ConnectionClosedError, ProtocolError, and what ``on_plaintext`` raises.
        """
        if self._plain:
            plain, self._plain = self._plain, bytearray()
            await trio.lowlevel.checkpoint()
            on_plaintext(memoryview(plain))
            return True
        if self._socket is None:
            data = await self._read_generic()
            if turn is not None:
                await turn()
            view = memoryview(data)
        else:
            size = await self._read_some(self._scratch.received[:bytes_max], turn)
            view = self._scratch.received[:size]
        if not view:
            return False
        self._opener.feed(view, self._scratch.plain, on_plaintext)
        return True

    def end_sending(self) -> None:
        """Tell the peer of a TCP socket that nothing more comes, so that it reads all before it sees the end."""
        if self._socket is not None and not self.is_closed:
            try:
                self._socket.socket.shutdown(trio.socket.SHUT_WR)
            except OSError as error:
                logger.debug("ending a connection to %s: %r", self._result.remote_peer, error)

    def abort(self) -> None:
        """Close a TCP socket at once, from any step; other transports are closed by `close`. Idempotent."""
        self.is_closed = True
        self._unsent.clear()
        if self._socket is not None:
            self._socket.socket.close()

    # The socket

    def _fd(self) -> int:
        # Asked for each time: after a close from outside the number may belong to another file.
        fd = -1 if self._socket is None or self.is_closed else self._socket.socket.fileno()
        if fd < 0:
            raise ConnectionClosedError("the connection is closed", transport="tcp")
        return fd

    def _write_some(self, data: bytes | memoryview) -> int:
        if not data:
            return 0
        try:
            sent = os.write(self._fd(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionClosedError(f"sending failed: {error}", transport="tcp") from error
        self._written_bytes += sent
        return sent

    async def _read_some(self, into: memoryview, turn: Turn | None) -> int:
        while True:
            fd = self._fd()
            try:
                await trio.lowlevel.wait_readable(fd)
                if turn is not None:
                    await turn()
                return os.readv(self._fd(), [into])
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"receiving failed: {error}", transport="tcp") from error

    async def _wait_writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._fd())
        except (OSError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"sending failed: {error}", transport="tcp") from error

    # Every other connection

    async def _read_generic(self) -> bytes:
        try:
            return await self._raw.read(65_536)
        except ConnectionClosedError:
            return b""
        except (IOException, RawConnError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"receiving failed: {error}") from error

    async def _write_generic(self, sealed: bytes) -> None:
        finished = False
        try:
            await self._raw.write(sealed)
            finished = True
        except ConnectionClosedError:
            raise
        except (IOException, RawConnError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"sending failed: {error}") from error
        finally:
            if not finished:
                self.is_closed = True  # part of a message may be out: nothing can follow it

    # py-libp2p's face

    async def read(self, n: int | None = None) -> bytes:
        """Return up to ``n`` bytes, at least one. Raises ConnectionClosedError at the end, and for a malformed
        message."""
        if n == 0:
            return b""
        while not self._plain:
            if self.is_closed:
                raise ConnectionClosedError("the connection is closed")
            try:
                is_open = await self.receive(self._keep)
            except ProtocolError as error:
                self.is_closed = True
                raise ConnectionClosedError(str(error)) from error
            if not is_open:
                raise ConnectionClosedError("the peer closed the connection")
        size = len(self._plain) if n is None or n < 0 else n
        data = bytes(self._plain[:size])
        del self._plain[:size]
        return data

    def _keep(self, plaintext: memoryview) -> None:
        self._plain += plaintext

    async def write(self, data: bytes) -> None:
        """Send all of ``data``. Raises ConnectionClosedError."""
        if self.is_closed:
            raise ConnectionClosedError("the connection is closed")
        try:
            sealed = self._sealer.seal(data)
        except ProtocolError as error:
            raise ConnectionClosedError(str(error)) from error
        if self._socket is None:
            await self._write_generic(sealed)
            return
        self._unsent += sealed
        with memoryview(self._unsent) as view:
            sent = self._write_some(view)
        del self._unsent[:sent]
        await trio.lowlevel.checkpoint()
        await self._flush()

    async def close(self) -> None:
        """Close the connection. Idempotent, shielded and bounded."""
        self.abort()
        with shielded(CLOSE_TIMEOUT_S):
            try:
                await self._raw.close()
            except (IOException, RawConnError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                logger.debug("closing a connection to %s: %r", self._result.remote_peer, error)

    def get_local_peer(self) -> ID:
        return self._local_peer

    def get_local_private_key(self) -> PrivateKey:
        return self._local_private_key

    def get_remote_peer(self) -> ID:
        return self._result.remote_peer

    def get_remote_public_key(self) -> PublicKey:
        """The peer's identity key."""
        return self._result.remote_public_key

    @property
    def channel_binding(self) -> bytes:
        """The hash of the handshake's transcript, 32 bytes (Noise specification §11.2)."""
        return self._result.handshake_hash

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self._raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self._raw.get_connection_type()


class NoiseTransport(ISecureTransport):
    """py-libp2p's secure transport for ``/noise``, with sessions that share one `Scratch`."""

    def __init__(self, key_pair: KeyPair, scratch: Scratch | None = None) -> None:
        self._key_pair = key_pair
        self._local_peer = ID.from_pubkey(key_pair.public_key)
        self._static_key = create_new_key_pair().private_key
        self._scratch = Scratch() if scratch is None else scratch
        self._turns = Turns()

    async def secure_inbound(self, conn: IRawConnection) -> NoiseSession:
        """Answer a handshake. Raises HandshakeFailure, with ``conn`` closed."""
        return await self._secure(conn, is_initiator=False, peer=None)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> NoiseSession:
        """Make a handshake with ``peer_id`` and no other peer. Raises HandshakeFailure, with ``conn`` closed."""
        return await self._secure(conn, is_initiator=True, peer=peer_id)

    async def _dial(self, conn: IRawConnection, peer: ID | None) -> HandshakeResult:
        handshake = NoiseHandshake(self._key_pair, self._static_key, is_initiator=True, expected_peer=peer)
        await _write_message(conn, handshake.start())
        while handshake.result is None:
            answer = handshake.receive(await _read_message(conn))
            if answer is not None:
                await _write_message(conn, answer)
        return handshake.result

    async def _answer(self, conn: IRawConnection) -> HandshakeResult:
        """Each message costs about a millisecond before any proof: it waits for its turn, and so does all that the
        first one needs."""
        handshake: NoiseHandshake | None = None
        while handshake is None or handshake.result is None:
            message = await _read_message(conn)
            await self._turns.next()
            if handshake is None:
                handshake = NoiseHandshake(self._key_pair, self._static_key, is_initiator=False)
            answer = handshake.receive(message)
            if answer is not None:
                await _write_message(conn, answer)
        return handshake.result

    async def _secure(self, conn: IRawConnection, *, is_initiator: bool, peer: ID | None) -> NoiseSession:
        finished = False
        try:
            if is_initiator:
                result = await self._dial(conn, peer)
            else:
                result = await self._answer(conn)
            finished = True
        except (ProtocolError, IOException, RawConnError) as error:
            raise NoiseFailure(str(error)) from error
        finally:
            if not finished:
                with shielded(CLOSE_TIMEOUT_S):
                    await conn.close()
        return NoiseSession(
            conn,
            result,
            local_peer=self._local_peer,
            local_private_key=self._key_pair.private_key,
            is_initiator=is_initiator,
            scratch=self._scratch,
        )


async def _read_message(conn: IRawConnection) -> bytes:
    length = int.from_bytes(await _read_exactly(conn, LENGTH_BYTES), "big")
    if length > HANDSHAKE_BYTES_MAX:
        raise ProtocolError(f"a Noise handshake message of {length} bytes is over {HANDSHAKE_BYTES_MAX}")
    return await _read_exactly(conn, length)


async def _write_message(conn: IRawConnection, message: bytes) -> None:
    await conn.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)


async def _read_exactly(conn: IRawConnection, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await conn.read(size - len(data))
        if not more:
            raise ProtocolError("the peer closed the connection during the Noise handshake")
        data += more
    return data


def _socket_of(raw: IRawConnection) -> trio.SocketStream | None:
    """The TCP socket behind a raw connection; None for every other transport."""
    if type(raw) is not RawConnection or type(raw.stream) is not TrioTCPStream:
        return None
    return raw.stream.stream
