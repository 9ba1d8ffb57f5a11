"""The members streams of one realm: one per verified connection, opened by the side that dialed."""

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    NotMemberError,
    ProtocolError,
    ProtocolNotSupportedError,
    StreamClosedError,
    WireError,
)
from dep2p.host.interface import ByteStream, Connection
from dep2p.limits import Limits
from dep2p.protocols.realm.anti_entropy import SendFrames
from dep2p.protocols.realm.messages import (
    MEMBERS_PAYLOAD_BYTES_MAX,
    MembersMessage,
    decode_members,
    in_turns,
    members_protocol,
)
from dep2p.protocols.timing.backoff import Backoff
from dep2p.protocols.wire.frame import Frame, FrameDecoder, FrameType, decode_error, encode_error
from dep2p.types import RealmId

LINKS_PER_CONNECTION_MAX: Final = 2
GOSSIP_UNSENT_BYTES_MAX: Final = 1_048_576
"""Unsent bytes from which on gossip to a peer that reads too slowly is dropped; the next sync makes up for it."""
TURN_PAUSES: Final = 3.0
"""Pause after a part of a message, in times of what the part took."""
TURN_PAUSE_MAX_S: Final = 1.0
"""A part that took a second did so because the machine had no time for this process."""
_REOPEN: Final = Backoff(first_s=1.0, max_s=30.0)

_logger = logging.getLogger("dep2p.realm")


class LinkOwner(Protocol):
    """The membership that links belong to, as they use it."""

    def is_verified(self, connection: Connection) -> bool: ...

    async def wait_for_attempt(self, connection: Connection) -> None:
        """Wait until our own handshake on the connection, if any, has a verdict."""
        ...

    def link_opened(self, link: int, connection: Connection) -> None: ...

    def link_closed(self, link: int, connection: Connection) -> None: ...

    def link_message(self, link: int, message: MembersMessage, *, has_more: bool) -> list[SendFrames]:
        """Act on a message, or on a part of one of which more follows; return the replies, for the same link."""
        ...

    def link_refused(self, connection: Connection, *, is_gone: bool) -> None:
        """Note that the peer says that we are not verified, or (``is_gone``) that it is not in the realm."""
        ...


@dataclass(slots=True)
class _MemberLink:
    stream: ByteStream
    scope: trio.CancelScope
    error: Dep2pError | None = None
    """The reason for which our side ends the link; None when the peer ends it."""


class MemberLinks:
    """Opens, serves and ends members streams; knows nothing of records."""

    def __init__(self, realm_id: RealmId, limits: Limits, counts: Counter[str], owner: LinkOwner) -> None:
        self._protocol = members_protocol(realm_id)
        self._limits = limits
        self._counts = counts
        self._owner = owner
        self._numbers = itertools.count(1)
        self._links: dict[int, _MemberLink] = {}
        self._kept: dict[int, trio.Event] = {}
        self._one_ended = trio.Event()
        self._turns = trio.Lock()

    def __len__(self) -> int:
        return len(self._links)

    def of(self, connection: Connection) -> list[int]:
        """Links of a connection."""
        return [number for number, link in self._links.items() if link.stream.connection.id == connection.id]

    async def keep(self, connection: Connection) -> None:
        """Keep a members stream open while the connection is verified; for the side that dialed.

        Called again for the same connection, it only wakes the first call.
        """
        wake = self._kept.get(connection.id)
        if wake is not None:
            wake.set()
            return
        self._kept[connection.id] = trio.Event()
        try:
            await self._keep(connection)
        finally:
            del self._kept[connection.id]

    async def _keep(self, connection: Connection) -> None:
        failures = 0
        while self._owner.is_verified(connection):
            started = trio.current_time()
            try:
                await self._run(await self._open(connection))
            except ProtocolNotSupportedError:
                self._owner.link_refused(connection, is_gone=True)
                return
            except (Dep2pError, TimeoutError) as error:
                self._counts["link_failures"] += 1
                _logger.debug("members stream with %s: %s", connection.peer, error)
            if not self._owner.is_verified(connection):
                return
            if trio.current_time() - started > _REOPEN.max_s:
                failures = 0
            failures += 1
            wake = self._kept[connection.id] = trio.Event()
            with trio.move_on_after(_REOPEN.after(failures)):
                await wake.wait()

    async def serve(self, stream: ByteStream) -> None:
        """Serve a members stream that a peer opened."""
        connection = stream.connection
        if not self._owner.is_verified(connection):
            # We may be the initiator of the handshake that is just ending.
            await self._owner.wait_for_attempt(connection)
        if not self._owner.is_verified(connection):
            self._counts["stranger_refused"] += 1
            await self._close(stream, NotMemberError("prove first that you are in this realm"))
            return
        if len(self.of(connection)) >= LINKS_PER_CONNECTION_MAX:
            self._counts["link_surplus"] += 1
            await self._close(stream, ProtocolError("too many members streams on one connection"))
            return
        try:
            await self._run(stream)
        except (Dep2pError, TimeoutError) as error:
            self._counts["link_failures"] += 1
            _logger.debug("members stream with %s: %s", connection.peer, error)

    def send(self, effect: SendFrames) -> None:
        """Write gossip without waiting; dropped and counted when the peer is too slow."""
        link = self._links.get(effect.link)
        if link is None or link.error is not None:
            return
        for frame in effect.frames:
            if link.stream.unsent_bytes + len(frame) > GOSSIP_UNSENT_BYTES_MAX:
                self._counts["gossip_dropped_slow"] += 1
                return
            try:
                link.stream.write_nowait(frame)
            except StreamClosedError:
                return

    def end(self, number: int, error: Dep2pError) -> None:
        """End a link from our side; its task tells the peer why and closes the stream."""
        link = self._links.get(number)
        if link is not None and link.error is None:
            link.error = error
            link.scope.cancel()

    async def say_and_end(self, frame: bytes, connections: Sequence[Connection], *, timeout_s: float) -> None:
        """Write last words on every link, and on a new one for each connection without, then wait until the peers end
        these streams, which they do when they have read them."""
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                for connection in connections:
                    if not self.of(connection):
                        nursery.start_soon(self._say, connection, frame)
                for link in list(self._links.values()):
                    nursery.start_soon(self._end_writing, link.stream)
                while self._links:
                    await self._one_ended.wait()

    async def _say(self, connection: Connection, frame: bytes) -> None:
        try:
            stream = await self._open(connection)
            stream.write_nowait(frame)
            await self._end_writing(stream)
            while await stream.read():
                pass
        except (Dep2pError, TimeoutError):
            self._counts["leave_unsaid"] += 1

    async def _end_writing(self, stream: ByteStream) -> None:
        try:
            await stream.drain()
            await stream.close_write()
        except StreamClosedError:
            return

    async def _open(self, connection: Connection) -> ByteStream:
        return await connection.open_stream(self._protocol, timeout_s=self._limits.stream_open_timeout_s)

    async def _run(self, stream: ByteStream) -> None:
        number = next(self._numbers)
        link = self._links[number] = _MemberLink(stream, trio.CancelScope())
        connection = stream.connection
        try:
            self._owner.link_opened(number, connection)
            with link.scope:
                try:
                    await self._read(number, stream)
                except WireError as error:
                    self._counts["link_refused"] += 1
                    link.error = link.error or error
        except BaseException:
            stream.reset()
            raise
        finally:
            del self._links[number]
            self._owner.link_closed(number, connection)
            self._one_ended.set()
            self._one_ended = trio.Event()
        await self._close(stream, link.error)

    async def _read(self, number: int, stream: ByteStream) -> None:
        connection = stream.connection
        decoder = FrameDecoder(MEMBERS_PAYLOAD_BYTES_MAX)
        while data := await stream.read():
            for frame in decoder.feed(data):
                if not self._owner.is_verified(connection):
                    raise NotMemberError("not a member any more")
                if frame.type == FrameType.ERROR:
                    self._on_error(connection, frame)
                    return
                for reply in await self._take(number, connection, frame):
                    for encoded in reply.frames:
                        await stream.write(encoded)
            if decoder.error is not None:
                raise decoder.error

    async def _take(self, number: int, connection: Connection, frame: Frame) -> list[SendFrames]:
        """Act on a message, a part at a time; return the replies.

        The links of a realm take turns, and together they get a quarter of the node's time: what members say of others
        must not hold up requests, however many of them say how much.
        """
        replies: list[SendFrames] = []
        parts: list[MembersMessage] | None = None
        at = 0
        while parts is None or at < len(parts):
            async with self._turns:
                if not self._owner.is_verified(connection):
                    raise NotMemberError("not a member any more")
                started = trio.current_time()
                parts = parts or in_turns(decode_members(frame))
                replies += self._owner.link_message(number, parts[at], has_more=at + 1 < len(parts))
                at += 1
                await trio.sleep(min(TURN_PAUSE_MAX_S, TURN_PAUSES * (trio.current_time() - started)))
        return replies

    def _on_error(self, connection: Connection, frame: Frame) -> None:
        if frame.flags:
            raise ProtocolError("an ERROR with flags on a members stream")
        code, text = decode_error(frame.payload)
        self._counts["link_errors_received"] += 1
        _logger.debug("%s ended the members stream: %d %r", connection.peer, code, text)
        if code == ErrorCode.NOT_MEMBER:
            self._owner.link_refused(connection, is_gone=False)

    async def _close(self, stream: ByteStream, error: Dep2pError | None) -> None:
        if error is not None:
            code = error.code if isinstance(error, WireError) else ErrorCode.UNKNOWN
            try:
                stream.write_nowait(encode_error(code, str(error)))
            except StreamClosedError:
                return
        with trio.move_on_after(self._limits.close_timeout_s) as scope:
            await stream.close()
        if scope.cancelled_caught:
            stream.reset()
