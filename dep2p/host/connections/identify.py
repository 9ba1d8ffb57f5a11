"""/ipfs/id/1.0.0, /ipfs/id/push/1.0.0 and /ipfs/ping/1.0.0 on our own streams, with py-libp2p's messages.

Rules: https://github.com/libp2p/specs/tree/master/identify and /ping.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import trio
from google.protobuf.message import DecodeError
from libp2p.crypto.keys import KeyPair
from libp2p.identity.identify.pb.identify_pb2 import Identify as IdentifyMessage
from libp2p.peer.envelope import seal_record
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import ProtocolError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.addresses import parse_address
from dep2p.host.connections.peerstore import ADDRS_PER_PEER_MAX, PROTOCOLS_PER_PEER_MAX, PeerStore
from dep2p.host.connections.signed_records import open_signed_record
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, Connection
from dep2p.protocols.addresses.dialable import AddressScope, addrs_over, link_scope
from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

IDENTIFY = "/ipfs/id/1.0.0"
IDENTIFY_PUSH = "/ipfs/id/push/1.0.0"
PING = "/ipfs/ping/1.0.0"

MESSAGE_BYTES_MAX = 65_536
PING_BYTES = 32
_PING_IDLE_S = 120.0
_PING_UNREAD_S = 10.0
"""The time that a peer has to read the answers to its pings: meanwhile a whole window of pings waits in memory."""
_PING_STREAMS_MAX = 8
"""Ping streams of one connection at most."""
_PINGS_BURST = 32.0
_PINGS_PER_S = 8.0
"""Pings of one connection that are answered; further ones wait. libp2p nodes send one in some seconds."""
_PUSHES_BURST = 16.0
_PUSHES_PER_S = 1.0
"""Identify messages that one connection may push: each costs milliseconds of parsing."""
_ADDR_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDescription:
    """The description of this host: its key, its software, and its present addresses and protocols."""

    key_pair: KeyPair
    agent: str
    addrs: Callable[[], Sequence[str]]
    protocols: Callable[[Connection], Sequence[str]]


class IdentifyService:
    """Describes this host to peers, and remembers how they describe themselves."""

    def __init__(
        self,
        own: OwnDescription,
        peer_store: PeerStore,
        counters: Counters,
        *,
        timeout_s: float,
        on_identified: Callable[[PeerId], None],
        on_observed: Callable[[Connection, bytes], None],
    ) -> None:
        """``on_observed``: takes the multiaddr, not checked, at which the peer of a connection sees this host."""
        self._own = own
        self._public_key = own.key_pair.public_key.serialize()
        self._peer_store = peer_store
        self._counters = counters
        self._timeout_s = timeout_s
        self._on_identified = on_identified
        self._on_observed = on_observed
        self._records: dict[tuple[str, ...], bytes] = {}
        """Signed records of the present addresses, for each scope of a link."""
        self._pushes: WeakKeyDictionary[Connection, tuple[float, float]] = WeakKeyDictionary()
        """Tokens left at a time."""

    def message(self, connection: Connection) -> bytes:
        """The message for this peer, with its length prefix."""
        own_addrs = addrs_over(self._own.addrs(), link_scope(connection.remote_addr))
        addrs = [Multiaddr(parse_address(text).text).to_bytes() for text in own_addrs]
        observed = b""
        if connection.remote_addr:
            observed = Multiaddr(connection.remote_addr).to_bytes()
        body = IdentifyMessage(
            protocol_version="ipfs/0.1.0",
            agent_version=self._own.agent,
            public_key=self._public_key,
            listen_addrs=addrs,
            observed_addr=observed,
            protocols=list(self._own.protocols(connection)),
            signedPeerRecord=self._signed_record(own_addrs),
        ).SerializeToString()
        return encode_length_prefixed(body)

    def _signed_record(self, own_addrs: tuple[str, ...]) -> bytes:
        found = self._records.get(own_addrs)
        if found is None:
            peer = ID.from_pubkey(self._own.key_pair.public_key)
            record = PeerRecord(peer, [Multiaddr(parse_address(text).text) for text in own_addrs])
            found = seal_record(record, self._own.key_pair.private_key).marshal_envelope()
            if len(self._records) >= len(AddressScope):
                self._records.clear()
            self._records[own_addrs] = found
        return found

    async def serve(self, stream: ByteStream) -> None:
        """Answer an identify request."""
        await stream.write(self.message(stream.connection))
        await stream.close()

    async def serve_push(self, stream: ByteStream) -> None:
        """Take a pushed message, unless the peer pushes too often."""
        now = trio.current_time()
        tokens, since = self._pushes.get(stream.connection, (_PUSHES_BURST, now))
        tokens = min(_PUSHES_BURST, tokens + (now - since) * _PUSHES_PER_S)
        if tokens < 1.0:
            self._counters.add("identify_push_refused_rate")
            stream.reset()
            return
        self._pushes[stream.connection] = (tokens - 1.0, now)
        await self._take(stream)
        await stream.close()

    async def query(self, connection: Connection) -> None:
        """Ask the peer. A failure is counted, never raised: nothing else depends on the answer."""
        try:
            stream = await connection.open_stream(IDENTIFY, timeout_s=self._timeout_s)
            try:
                await self._take(stream)
                await stream.close()
            finally:
                if not stream.is_write_closed:
                    stream.reset()
        except (ProtocolError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError) as error:
            if not connection.is_closed:
                self._counters.add("identify_failed")
                logger.debug("identify of %s: %s", connection.peer, error)

    async def push(self, connection: Connection) -> None:
        """Send the peer our present description. A failure is counted, never raised."""
        known = self._peer_store.protocols(connection.peer)
        if known and IDENTIFY_PUSH not in known:
            return
        try:
            stream = await connection.open_stream(IDENTIFY_PUSH, timeout_s=self._timeout_s)
            await stream.write(self.message(connection))
            await stream.close()
            self._counters.add("identify_pushed")
        except (ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError) as error:
            if not connection.is_closed:
                self._counters.add("identify_push_failed")
                logger.debug("identify push to %s: %s", connection.peer, error)

    async def _take(self, stream: ByteStream) -> None:
        try:
            with trio.fail_after(self._timeout_s):
                body = await read_length_prefixed(stream, MESSAGE_BYTES_MAX)
        except trio.TooSlowError:
            raise RequestTimeoutError(f"no identify message within {self._timeout_s:g} s") from None
        message = IdentifyMessage()
        try:
            message.ParseFromString(body)
        except (DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"an identify message that cannot be read: {error}") from None
        if not stream.connection.is_closed:
            self._on_observed(stream.connection, message.observed_addr)
            self._remember(stream.connection.peer, message)

    def _checked_record(self, peer: PeerId, envelope: bytes) -> bytes:
        """The envelope when its record is the peer's own and holds, else b""."""
        if not envelope:
            return b""
        try:
            open_signed_record(envelope, peer)
        except ProtocolError as error:
            self._counters.add("identify_signed_record_refused")
            logger.debug("the signed record of %s is not kept: %s", peer, error)
            return b""
        return envelope

    def _remember(self, peer: PeerId, message: IdentifyMessage) -> None:
        self._peer_store.set_protocols(
            peer,
            [name[:1024] for name in message.protocols[:PROTOCOLS_PER_PEER_MAX]],
            message.agent_version[:256],
            self._checked_record(peer, message.signedPeerRecord),
        )
        addrs: list[str] = []
        for raw in message.listen_addrs[: 2 * ADDRS_PER_PEER_MAX]:
            try:
                addrs.append(parse_address(str(Multiaddr(raw))).text)
            except (ValueError, TypeError, KeyError, MultiaddrError) as error:
                # Not an offence: other nodes listen on transports that are not spoken here.
                logger.debug("address of %s not used: %s", peer, error)
        self._peer_store.add_addrs(peer, addrs[:ADDRS_PER_PEER_MAX], _ADDR_TTL_S)
        self._on_identified(peer)


class _Pings:
    """The pings of one connection."""

    __slots__ = ("bucket", "streams")

    def __init__(self) -> None:
        self.streams = 0
        self.bucket = TokenBucket(_PINGS_PER_S, _PINGS_BURST)


class PingServer:
    """Echoes pings; what a peer can make it hold and do is bounded in streams, time and pings a second."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._pings: WeakKeyDictionary[Connection, _Pings] = WeakKeyDictionary()

    async def serve(self, stream: ByteStream) -> None:
        """Echo 32 bytes at a time until the peer closes, says nothing for two minutes, or does not read.

        Above the rate of its connection an answer waits, and with it all that the peer sends behind it.
        """
        pings = self._pings.setdefault(stream.connection, _Pings())
        if pings.streams >= _PING_STREAMS_MAX:
            self._counters.add("ping_stream_refused")
            stream.reset()
            return
        pings.streams += 1
        try:
            await self._echo(stream, pings.bucket)
        except (trio.TooSlowError, StreamClosedError):
            stream.reset()
        finally:
            pings.streams -= 1

    async def _echo(self, stream: ByteStream, bucket: TokenBucket) -> None:
        buffer = b""
        while True:
            with trio.fail_after(_PING_IDLE_S):
                data = await stream.read(PING_BYTES - len(buffer))
            if not data:
                await stream.close()
                return
            buffer += data
            if len(buffer) == PING_BYTES:
                wait_s = bucket.wait_s(trio.current_time())
                bucket.spend()
                if wait_s:
                    self._counters.add("pings_delayed")
                    await trio.sleep(wait_s)
                stream.write_nowait(buffer, urgent=True)
                with trio.fail_after(_PING_UNREAD_S):
                    await stream.drain(PING_BYTES)
                buffer = b""


async def ping(connection: Connection, *, timeout_s: float) -> float:
    """Round-trip seconds. Raises RequestTimeoutError, StreamClosedError."""
    stream: ByteStream | None = None
    try:
        with trio.fail_after(timeout_s):
            stream = await connection.open_stream(PING, timeout_s=timeout_s)
            payload = secrets.token_bytes(PING_BYTES)
            sent_s = trio.current_time()
            stream.write_nowait(payload, urgent=True)
            answer = b""
            while len(answer) < PING_BYTES:
                data = await stream.read(PING_BYTES - len(answer))
                if not data:
                    raise StreamClosedError(f"{connection.peer} closed the ping stream without an answer")
                answer += data
            rtt_s = trio.current_time() - sent_s
            if answer != payload:
                raise StreamClosedError(f"{connection.peer} answered a ping with other bytes")
            await stream.close()
            return rtt_s
    except trio.TooSlowError:
        raise RequestTimeoutError(f"{connection.peer} did not answer a ping within {timeout_s:g} s") from None
    finally:
        if stream is not None and not stream.is_write_closed:
            stream.reset()
