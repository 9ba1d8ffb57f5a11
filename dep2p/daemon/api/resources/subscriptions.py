"""NDJSON subscriptions: a bounded queue for each reader, with the number of lines that it missed, and the response."""

from collections import Counter, deque
from collections.abc import Callable

import trio
from starlette.types import Receive, Scope, Send

from dep2p.control_api.encoding import encode_line
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.connection import PIECES_WRITTEN
from dep2p.daemon.problems import Problem, problem_of

_BATCH_BYTES = 262_144


class _Tracked:
    """A line whose sender waits until its reader has it."""

    def __init__(self, line: bytes) -> None:
        self.line = line
        self.ended = trio.Event()
        self.was_written = False

    def end(self, *, was_written: bool) -> None:
        self.was_written = was_written
        self.ended.set()


class LineQueue:
    """Lines on their way to one reader. A full queue drops the oldest, and the reader learns how many."""

    def __init__(self, items_max: int, bytes_max: int, on_lagged: Callable[[], None]) -> None:
        self._lines: deque[bytes | _Tracked] = deque()
        self._bytes = 0
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._lagged = 0
        self._on_lagged = on_lagged
        self._closed = False
        self._writing: list[_Tracked] = []
        self._wake = trio.Event()
        self._room = trio.Event()

    @property
    def queued_bytes(self) -> int:
        """The number of bytes that wait for the reader."""
        return self._bytes

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more lines; those that it has still go to the reader."""
        return self._closed

    def has_room(self, line: bytes) -> bool:
        """Whether ``line`` fits without dropping another."""
        return len(self._lines) < self._items_max and self._bytes + len(line) <= self._bytes_max

    def put(self, line: bytes) -> None:
        """Add a line; never blocks."""
        if self._closed:
            return
        while self._lines and not self.has_room(line):
            oldest = self._lines.popleft()
            if isinstance(oldest, _Tracked):
                self._bytes -= len(oldest.line)
                oldest.end(was_written=False)  # its sender adds it again when there is room
            else:
                self._bytes -= len(oldest)
                self._lagged += 1
                self._on_lagged()
        self._add(line, len(line))

    def _add(self, line: bytes | _Tracked, size: int) -> None:
        self._lines.append(line)
        self._bytes += size
        self._wake.set()

    async def deliver(self, line: bytes) -> bool:
        """Add a line when there is room for it. Return true when it was written, false when the reader is gone."""
        while not self._closed:
            if self._lines and not self.has_room(line):
                await self._room.wait()
                continue
            tracked = _Tracked(line)
            self._add(tracked, len(line))
            await tracked.ended.wait()
            if tracked.was_written:
                return True
        return False

    def close(self, last: bytes = b"") -> None:
        """Take no more lines after ``last``."""
        if not self._closed:
            if last:
                self._lines.append(last)
                self._bytes += len(last)
            self._closed = True
            self._wake.set()
            self._room.set()

    def end(self) -> None:
        """Close, and give up the lines that the reader did not get."""
        self.close()
        for line in [*self._writing, *self._lines]:
            if isinstance(line, _Tracked):
                line.end(was_written=False)
        self._writing.clear()

    def written(self) -> None:
        """Note that the lines which `take` returned are in the reader's socket."""
        for line in self._writing:
            line.end(was_written=True)
        self._writing.clear()

    async def take(self) -> bytes:
        """Wait for lines, and return up to about 256 KiB of them; b"" at the end."""
        while not self._lines:
            if self._closed:
                return b""
            self._wake = trio.Event()
            await self._wake.wait()
        batch: list[bytes] = []
        if self._lagged:
            batch.append(encode_line({"lagged": self._lagged}))
            self._lagged = 0
        size = 0
        while self._lines and size < _BATCH_BYTES:
            line = self._lines.popleft()
            if isinstance(line, _Tracked):
                self._writing.append(line)
                line = line.line
            size += len(line)
            batch.append(line)
        self._bytes -= size
        self._room.set()
        self._room = trio.Event()
        return b"".join(batch)


class SubscriptionRegistry:
    """All the subscriptions of a daemon: counted, bounded, and ended together."""

    def __init__(self, bounds: ControlBounds, counts: Counter[str]) -> None:
        self._bounds = bounds
        self._counts = counts
        self._open: dict[LineQueue, str] = {}
        self._is_over = False

    def open(self, kind: str) -> LineQueue:
        """Return a queue for a new reader. Raises :class:`Problem` D3008 when there are too many, D3006 when the daemon
        stops."""
        if self._is_over:
            raise Problem("D3006", "the daemon stops")
        if len(self._open) >= self._bounds.subscriptions_max:
            raise Problem("D3008", f"{len(self._open)} subscriptions are open, as many as there may be")
        name = f"lagged_{kind}"

        def on_lagged() -> None:
            self._counts[name] += 1

        queue = LineQueue(self._bounds.subscription_items_max, self._bounds.subscription_bytes_max, on_lagged)
        self._open[queue] = kind
        return queue

    def forget(self, queue: LineQueue) -> None:
        """Forget the queue of a reader that is gone."""
        self._open.pop(queue, None)
        queue.end()

    def by_kind(self) -> dict[str, int]:
        """Return the number of open subscriptions by kind."""
        return dict(Counter(self._open.values()))

    def end_all(self) -> None:
        """End all subscriptions, and take no new ones: the daemon stops."""
        self._is_over = True
        last = encode_line({"error": problem_of(Problem("D3006", "the daemon stops"))})
        for queue in list(self._open):
            queue.close(last)


class LinesResponse:
    """The answer of a subscription: 200, then lines until the queue or the client ends; then ``on_end`` runs once."""

    def __init__(self, queue: LineQueue, on_end: Callable[[], None]) -> None:
        self._queue = queue
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pieces_written: Callable[[], int] = scope["extensions"][PIECES_WRITTEN]
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_on_disconnect, receive, nursery.cancel_scope)
                while lines := await self._queue.take():
                    before = pieces_written()
                    await send({"type": "http.response.body", "body": lines, "more_body": True})
                    if pieces_written() > before:
                        self._queue.written()
                nursery.cancel_scope.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()


async def cancel_on_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    """Wait until the client hangs up, then cancel."""
    while (await receive())["type"] == "http.request":
        pass
    scope.cancel()
