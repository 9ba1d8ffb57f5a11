"""The upgrade of a raw connection: multistream agrees on `/noise`, then inside it on `/yamux/1.0.0`, nothing else.

py-libp2p's own negotiation reads a length that the peer chooses without a bound and hard-codes its own yamux class;
this one is bounded in bytes, messages and time. The messages on the wire are the same.
"""

from collections.abc import Callable
from typing import Protocol

import trio
from libp2p.abc import IMuxedConn, IRawConnection, ISecureConn
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader

from dep2p.errors import ProtocolError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.multistream import respond, select
from dep2p.host.noise import session as noise
from dep2p.host.noise.session import NoiseTransport, Scratch
from dep2p.host.scopes import shielded
from dep2p.host.yamux import connection as yamux
from dep2p.host.yamux.connection import YamuxConnection
from dep2p.limits import Limits

OnUpgradeEvent = Callable[[str], None]
"""Called with ``security_failed``, ``security_timeout``, ``muxer_failed`` or ``muxer_timeout``."""


class _ReadWriter(Protocol):
    async def read(self, n: int | None = None) -> bytes: ...
    async def write(self, data: bytes) -> None: ...


class _NegotiationStream:
    """The part of ByteStream that a negotiation needs, over a raw or an encrypted connection."""

    def __init__(self, conn: _ReadWriter) -> None:
        self._conn = conn
        self._unsent = b""

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        self._unsent += data

    async def flush(self) -> None:
        if self._unsent:
            data, self._unsent = self._unsent, b""
            await self._conn.write(data)

    async def read(self, max_bytes: int = 65_536) -> bytes:
        await self.flush()
        return await self._conn.read(max_bytes)


_FAILURES = (
    HandshakeFailure,
    IOException,
    RawConnError,
    ProtocolError,
    ProtocolNotSupportedError,
    RequestTimeoutError,
    StreamClosedError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


class HardenedUpgrader(TransportUpgrader):
    """py-libp2p's `TransportUpgrader` with `NoiseTransport` and `YamuxConnection` only.

    Each of the two upgrades takes at most ``limits.handshake_timeout_s``; one that fails or is cancelled closes the
    connection.
    """

    def __init__(self, key_pair: KeyPair, *, limits: Limits, on_event: OnUpgradeEvent | None = None) -> None:
        self._noise = NoiseTransport(key_pair, Scratch())
        # What py-libp2p's code looks up in an upgrader; the negotiation itself is done here.
        super().__init__({TProtocol(noise.PROTOCOL_ID): self._noise}, {TProtocol(yamux.PROTOCOL_ID): YamuxConnection})
        self._limits = limits
        self._on_event = on_event

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """Secure a connection. Raises SecurityUpgradeFailure, for another peer than ``peer_id`` too."""
        if is_initiator and peer_id is None:
            raise ValueError("an outbound connection needs the id of the peer that it is to")
        done = False
        with trio.move_on_after(self._limits.handshake_timeout_s):
            try:
                await self._agree(raw_conn, noise.PROTOCOL_ID, is_initiator)
                if is_initiator and peer_id is not None:
                    session = await self._noise.secure_outbound(raw_conn, peer_id)
                else:
                    session = await self._noise.secure_inbound(raw_conn)
                done = True
                return session
            except _FAILURES as error:
                self._report("security_failed")
                raise SecurityUpgradeFailure(f"no secure connection: {error}") from error
            finally:
                if not done:
                    await _close(raw_conn)
        self._report("security_timeout")
        raise SecurityUpgradeFailure(f"no secure connection within {self._limits.handshake_timeout_s:g} s")

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Multiplex a connection. Raises MuxerUpgradeFailure."""
        done = False
        with trio.move_on_after(self._limits.handshake_timeout_s):
            try:
                await self._agree(conn, yamux.PROTOCOL_ID, conn.is_initiator)
                done = True
                muxed = YamuxConnection(conn, peer_id, limits=self._limits)
                muxed.negotiated_muxer_protocol = yamux.PROTOCOL_ID
                muxed.negotiated_security_protocol = noise.PROTOCOL_ID
                return muxed
            except _FAILURES as error:
                self._report("muxer_failed")
                raise MuxerUpgradeFailure(f"no multiplexed connection: {error}") from error
            finally:
                if not done:
                    await _close(conn)
        self._report("muxer_timeout")
        raise MuxerUpgradeFailure(f"no multiplexed connection within {self._limits.handshake_timeout_s:g} s")

    async def _agree(self, conn: IRawConnection | ISecureConn, protocol: str, is_initiator: bool) -> None:
        stream = _NegotiationStream(conn)
        timeout_s = self._limits.handshake_timeout_s
        if is_initiator:
            await select(stream, protocol, timeout_s=timeout_s)
        else:
            await respond(stream, (protocol,), timeout_s=timeout_s)
        await stream.flush()

    def _report(self, event: str) -> None:
        if self._on_event is not None:
            self._on_event(event)


async def _close(conn: IRawConnection | ISecureConn) -> None:
    with shielded(noise.CLOSE_TIMEOUT_S):
        try:
            await conn.close()
        except (IOException, RawConnError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            return  # it is as closed as it can be
