"""A two-way stream through the daemon: one upload and one download, each with its own back-pressure."""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from dep2p.arguments import checks_arguments
from dep2p.client.transport import Body, Transport
from dep2p.control_api.encoding import ItemSplitter, decode_headers, encode_item
from dep2p.control_api.errors import DaemonUnreachableError, code_of, error_from_problem
from dep2p.control_api.replies import StreamClosed, StreamLine, StreamOpenedReply
from dep2p.errors import Dep2pError, StreamClosedError
from dep2p.types import Headers, PeerId, RealmId

_PENDING_BYTES_MAX: Final = 1_048_576
_PIECE_BYTES: Final = 65_536
_ITEM_BYTES_MAX: Final = 2**31  # larger than the daemon's own bound, which counts
_ABORT_TIMEOUT_S: Final = 2.0


@checks_arguments
class ClientStream:
    """A stream of items to and from a peer. Send in one task, iterate in one (the same or another).

    Leaving its block after an error, or before the peer's end was read, ends it for the peer too. A stream does not
    outlive its daemon: when that goes away, both directions end with StreamClosedError. Open another one then.
    """

    def __init__(
        self,
        transport: Transport,
        tasks: anyio.abc.TaskGroup,
        opened: StreamOpenedReply | StreamLine,
    ) -> None:
        self.id: str = opened.id
        self.peer: PeerId = opened.peer
        self.name: str = opened.name
        self.realm: RealmId = opened.realm_id
        self.body: bytes = opened.data if isinstance(opened, StreamLine) else b""
        """The opener's first bytes; empty on the opener's own side."""
        self.headers: Headers = decode_headers(opened.headers) if isinstance(opened, StreamLine) else {}
        self._transport = transport
        self._tasks = tasks
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._wake_upload = anyio.Event()
        self._room = anyio.Event()
        self._sent_bytes = 0
        self._upload_scope: anyio.CancelScope | None = None
        self._uploaded = anyio.Event()
        self._eof = False
        self._send_error: BaseException | None = None
        self._download = AsyncExitStack()
        self._body: Body | None = None
        self._splitter = ItemSplitter(_ITEM_BYTES_MAX)
        self._items: deque[bytes] = deque()
        self._ended = False
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`aclose` was called."""
        return self._closed

    @property
    def sent_bytes(self) -> int:
        """Bytes that the daemon has taken, with the 4 bytes before each item: rises while what was sent flows."""
        return self._sent_bytes

    async def __aenter__(self) -> Self:
        # At once, so that the daemon sees when this program dies, and resets the stream.
        self._check_open()
        self._start_upload()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the rest and the end; after an error, abort."""
        try:
            if error is None and not self._closed and self._send_error is None:
                await self.send_eof()
        finally:
            await self.aclose()

    # Sending

    async def send(self, item: bytes) -> None:
        """Send one item. Waits while about 1 MiB of earlier ones is on its way to the daemon, which waits for the peer.

        Raises StreamClosedError and what else ended the stream.
        """
        while self._pending_bytes > _PENDING_BYTES_MAX and self._send_error is None and not self._closed:
            self._room = anyio.Event()
            await self._room.wait()
        self._check_open()
        self._start_upload()
        self._pending.append(encode_item(item))
        self._pending_bytes += len(item) + 4
        self._wake_upload.set()
        if self._pending_bytes > _PENDING_BYTES_MAX:
            return
        await anyio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        """Send the end: no more items from here. Returns when the peer's node has taken all of them. Raises as
        :meth:`send`."""
        if not self._eof:
            self._check_open()
            self._eof = True
            self._start_upload()
            self._wake_upload.set()
        await self._uploaded.wait()
        if self._send_error is not None:
            raise self._send_error

    def _check_open(self) -> None:
        if self._send_error is not None:
            raise self._send_error
        if self._closed or self._eof:
            raise StreamClosedError("this side of the stream is closed")

    def _start_upload(self) -> None:
        if self._upload_scope is None:
            self._upload_scope = anyio.CancelScope()
            self._tasks.start_soon(self._upload, self._upload_scope)

    async def _upload(self, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                chunks = self._chunks()
                try:
                    await self._transport.upload(f"/v1/streams/{self.id}/items", chunks, params={"eof": "1"})
                finally:
                    await chunks.aclose()
            if scope.cancelled_caught:
                self._send_error = StreamClosedError("the stream was closed")
        except Dep2pError as error:
            self._send_error = _end_of_stream(error)
        finally:
            self._uploaded.set()
            self._room.set()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            if self._pending:
                batch = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
                self._pending.clear()
                self._pending_bytes = 0
                self._room.set()
                for start in range(0, len(batch), _PIECE_BYTES):
                    piece = batch[start : start + _PIECE_BYTES] if len(batch) > _PIECE_BYTES else batch
                    yield piece
                    self._sent_bytes += len(piece)
            elif self._eof:
                return
            else:
                self._wake_upload = anyio.Event()
                await self._wake_upload.wait()

    # Receiving

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next item. The iteration ends at the peer's end. Raises StreamClosedError and what else ended
        it."""
        while not self._items:
            if self._ended or self._closed:
                raise StopAsyncIteration
            await self._read_more()
        return self._items.popleft()

    async def _read_more(self) -> None:
        try:
            if self._body is None:
                opened = self._transport.opened("GET", f"/v1/streams/{self.id}/items")
                self._body = await self._download.enter_async_context(opened)
            piece = await self._body.piece()
        except Dep2pError as error:
            raise _end_of_stream(error) from error
        if not piece:
            self._ended = True
            if self._splitter.is_inside_item:
                raise StreamClosedError("the stream ended inside an item")
            return
        self._items.extend(self._splitter.feed(piece))
        if self._splitter.aborted and not self._splitter.is_inside_item and self._items:
            self._ended = True
            raise error_from_problem(msgspec.json.decode(self._items.pop(), type=dict[str, object]))

    # Closing

    async def aclose(self) -> None:
        """End the stream now and drop unsent and unread items; before :meth:`send_eof` this resets it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._upload_scope is not None and not self._uploaded.is_set():
            self._upload_scope.cancel()
        self._room.set()
        finished = self._ended and self._eof and self._send_error is None
        with anyio.CancelScope(shield=True):
            await self._download.aclose()
            if not finished:
                with anyio.move_on_after(_ABORT_TIMEOUT_S):
                    await self._notify_daemon()

    async def _notify_daemon(self) -> None:
        try:
            await self._transport.ask("DELETE", f"/v1/streams/{self.id}", StreamClosed)
        except Dep2pError:
            return  # the stream or the daemon is gone already


def _end_of_stream(error: Dep2pError) -> Dep2pError:
    """Return the error of a stream: one class, whichever way the daemon that had it is gone."""
    if isinstance(error, DaemonUnreachableError) or code_of(error) == "D6002":
        return StreamClosedError(f"the stream is gone with the daemon: {error}")
    return error
