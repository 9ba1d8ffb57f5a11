"""The receiving half of an ordered session: in order, once, bounded."""

import heapq
from collections import deque

from dep2p.errors import ProtocolError
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.wire import (
    ITEM_BYTES,
    SEQ_BYTES,
    SKIP,
    Push,
    first_seq_of,
    read_items,
    reset_mark,
)


class SessionReceiver:
    """Takes numbered items in any order and any number of times; gives each to the app once, in order.

    Items that the app took from ``queue`` (`take`) are handled when it reports that (`done`), by coming for more.
    """

    __slots__ = (
        "_bytes_max",
        "_early",
        "_early_bytes",
        "_gap_deadline",
        "_heap",
        "_items_max",
        "_options",
        "_taken_bytes",
        "_taken_seq",
        "duplicates",
        "early_dropped",
        "failure",
        "handled",
        "queue",
        "received",
        "skipped",
        "stale",
        "unhandled_bytes",
    )

    def __init__(self, options: SessionOptions, handled: int = 0) -> None:
        self._options = options
        self._items_max = 2 * options.items_max  # half of the window is for responses
        self._bytes_max = 2 * options.bytes_max
        self._early: dict[int, Push] = {}  # behind a gap
        self._heap: list[int] = []  # their numbers
        self._early_bytes = 0
        self._gap_deadline: float | None = None
        self._taken_seq = handled
        self._taken_bytes = 0
        self.queue: deque[Push] = deque()
        """Items in order that the app has not taken."""
        self.received: int = handled
        """Everything up to this number is here."""
        self.handled: int = handled
        """Everything up to this number was handled by the app."""
        self.unhandled_bytes: int = 0
        self.duplicates: int = 0
        self.early_dropped: int = 0
        self.skipped: int = 0
        self.stale: int = 0
        """Items at the front of ``queue`` that are of an earlier epoch, the RESET included."""
        self.failure: str | None = None
        """The reason why the session cannot go on; None while it can."""

    # From the wire

    def receive(self, payload: bytes, now: float) -> None:
        """Take one PUSH frame's payload. Raises ProtocolError for a malformed one or one over the window."""
        first = first_seq_of(payload)
        if not first:
            raise ProtocolError("PUSH with the number 0")
        old = self.received + 1 - first
        pushes, skipped = read_items(payload, first, max(0, old), self._options.message_bytes_max)
        if old < 0:
            self._keep_early(pushes, now)
            return
        self.duplicates += skipped
        if not pushes:
            return
        unhandled = self.received - self.handled + len(pushes)
        size = len(payload) - SEQ_BYTES if not skipped else _size(pushes)
        self.unhandled_bytes += size
        if unhandled > self._items_max or (unhandled > 1 and self.unhandled_bytes > self._bytes_max):
            raise ProtocolError("more pushes came than this side's window allows")
        self.received += len(pushes)
        self.queue.extend(pushes)
        if self._early:
            self._join_early(now)

    def _keep_early(self, pushes: list[Push], now: float) -> None:
        early, options = self._early, self._options
        for push in pushes:
            seq = push.seq
            size = len(push.body) + ITEM_BYTES
            if seq in early:
                self.duplicates += 1
            elif (
                seq - self.handled > self._items_max
                or self.unhandled_bytes + self._early_bytes + size > self._bytes_max
            ):
                self.early_dropped += 1  # it comes again
            else:
                early[seq] = push
                heapq.heappush(self._heap, seq)
                self._early_bytes += size
        if early and self._gap_deadline is None:
            self._gap_deadline = now + options.gap_timeout_s

    def _join_early(self, now: float) -> None:
        heap, early, queue = self._heap, self._early, self.queue
        while heap and heap[0] <= self.received + 1:
            push = early.pop(heapq.heappop(heap))
            size = len(push.body) + ITEM_BYTES
            self._early_bytes -= size
            if push.seq <= self.received:
                self.duplicates += 1
                continue
            self.unhandled_bytes += size
            self.received = push.seq
            queue.append(push)
        self._gap_deadline = now + self._options.gap_timeout_s if early else None

    def forget_early(self) -> None:
        """Forget items behind a gap, which come again: a new link begins."""
        self._early.clear()
        self._heap.clear()
        self._early_bytes = 0
        self._gap_deadline = None

    def reset(self, epoch: int, next_seq: int, reason: str) -> None:
        """Go on with the server's other numbers: ``queue`` gets a RESET in between."""
        self.forget_early()
        if self.stale == 1 == len(self.queue):
            self.queue.clear()  # one RESET says it
        self.queue.append(reset_mark(epoch, next_seq, reason))
        self.stale = len(self.queue)
        self.received = self.handled = self._taken_seq = next_seq - 1
        self.unhandled_bytes = self._taken_bytes = 0

    # To the app

    def take(self) -> Push | None:
        """Return the next item for the app."""
        if not self.queue:
            return None
        push = self.queue.popleft()
        if self.stale:
            self.stale -= 1
            return push
        self._taken_seq = push[0]
        self._taken_bytes += len(push[1]) + ITEM_BYTES
        return push

    def take_many(self, items_max: int) -> list[Push]:
        """Return up to so many items."""
        queue = self.queue
        if self.stale:
            return [push for push in [self.take()] if push is not None]
        if len(queue) <= items_max:
            pushes = list(queue)
            queue.clear()
        else:
            pushes = [queue.popleft() for _ in range(items_max)]
        if pushes:
            self._taken_seq = pushes[-1][0]
            self._taken_bytes += _size(pushes)
        return pushes

    def done(self) -> None:
        """Note that the app has handled all that it took."""
        self.handled = self._taken_seq
        self.unhandled_bytes -= self._taken_bytes
        self._taken_bytes = 0

    def give_back(self) -> None:
        """Put back items that the app took and has not handled. Only before the session is left."""
        self._taken_seq = self.handled
        self._taken_bytes = 0

    # Time

    def next_deadline(self) -> float | None:
        """Return when a gap is given up."""
        return self._gap_deadline

    def on_deadline(self, now: float) -> None:
        """Skip over a gap or fail, by option; see ``failure``."""
        if self._gap_deadline is None or self._gap_deadline > now:
            return
        missing, following = self.received + 1, self._heap[0]
        reason = f"{missing} to {following - 1} did not come within {self._options.gap_timeout_s:g} s"
        if self._options.gap == "fail":
            self._gap_deadline = None
            self.failure = f"pushes {reason}"
            return
        self.skipped += following - missing
        self.received = following - 1
        self.unhandled_bytes += ITEM_BYTES + len(reason)
        self.queue.append(Push(self.received, reason.encode(), SKIP, 0))
        self._join_early(now)


def _size(pushes: list[Push]) -> int:
    return sum([len(push[1]) for push in pushes]) + ITEM_BYTES * len(pushes)
