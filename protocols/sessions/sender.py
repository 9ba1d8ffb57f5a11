"""The sending half of an ordered session: numbers, a bounded log of unhandled items, go-back-N."""

import heapq
from typing import Final

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.wire import ITEM, ITEM_BYTES, SKIP, encode_item, push_header

_FRAME_BYTES: Final = 65_536
"""About the bytes of a frame that joins items."""


class SessionSender:
    """Numbers pushes, and keeps each until the client has handled it.

    Two floors come back: ``received`` (in order, in the client's process: it ends retransmission) and ``handled`` (by
    the client's app: it releases). A number is given together with its encoded content, or explicitly reserved; so a
    failed encoding leaves no gap.
    """

    __slots__ = (
        "_bytes_max",
        "_deadline",
        "_flight_bytes",
        "_items_max",
        "_log",
        "_options",
        "_reserved",
        "_tries",
        "_waiting",
        "_window_bytes",
        "_window_items",
        "failure",
        "handled",
        "kept_bytes",
        "last_sent",
        "last_seq",
        "received",
        "retransmissions",
        "retransmitted_items",
        "sent",
        "skipped",
        "wants_probe",
    )

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._items_max = options.items_max  # for pushes, on this link
        self._bytes_max = options.bytes_max
        self._window_items = 2 * options.items_max
        self._window_bytes = 2 * options.bytes_max
        self._log: list[bytes] = []  # encoded; the first one has the number handled + 1; without holes
        self._waiting: list[tuple[int, bytes]] = []  # a heap: behind a reserved number that is not filled yet
        self._reserved: dict[int, float] = {}  # number -> when its time is over; in this order
        self._flight_bytes = 0  # of what was sent on this link and is not handled
        self._tries = 0
        self._deadline: float | None = None
        self.handled: int = 0
        """Everything up to this number was handled by the client's app, and is forgotten."""
        self.received: int = 0
        """Everything up to this number is in the client's process."""
        self.sent: int = 0
        """The last number sent on this link, or counted as such because the client has it."""
        self.last_sent: int = 0
        """The highest number ever sent."""
        self.last_seq: int = 0
        """The last number given."""
        self.kept_bytes: int = 0
        self.retransmissions: int = 0
        self.retransmitted_items: int = 0
        self.skipped: int = 0
        self.wants_probe: bool = False
        """Whether the client has to be asked for its floors."""
        self.failure: str | None = None
        """The reason why the session has failed; None while it has not."""

    # Taking in

    def has_room(self, items: int, size_bytes: int) -> bool:
        """Whether so many items, of so many bytes of data together, may be appended now: all of them or none.

        For responses and the pushes bound to them: they may take as much again as other pushes, so that a client which
        asks and does not take pushes meanwhile is answered.
        """
        kept = self.last_seq - self.handled
        kept_bytes = self.kept_bytes + size_bytes + items * ITEM_BYTES
        return not kept or (kept + items <= 2 * self._items_max and kept_bytes <= 2 * self._bytes_max)

    def offer(self, kind: int, request_id: int, data: bytes) -> int:
        """Append one item and return its number; 0 when there is no room for it."""
        size = ITEM_BYTES + len(data)
        kept_bytes = self.kept_bytes + size
        kept = self.last_seq - self.handled
        if kept and (kept >= self._items_max or kept_bytes > self._bytes_max):
            return 0
        item = ITEM.pack(kind, request_id, size - ITEM_BYTES) + data
        self.kept_bytes = kept_bytes
        self.last_seq = seq = self.last_seq + 1
        if self._reserved:
            heapq.heappush(self._waiting, (seq, item))
        else:
            self._log.append(item)
        return seq

    def append(self, kind: int, request_id: int, data: bytes) -> int:
        """Append one item over any bound, and return its number: the caller has made room for it."""
        item = encode_item(kind, request_id, data)
        self.kept_bytes += len(item)
        self.last_seq = seq = self.last_seq + 1
        if self._reserved:
            heapq.heappush(self._waiting, (seq, item))
        else:
            self._log.append(item)
        return seq

    def reserve(self, now: float) -> int:
        """Return a number whose content comes later, by `fill`; 0 when there is no room.

        Items behind it wait until then, at most ``gap_timeout_s``.
        """
        kept = self.last_seq - self.handled
        if kept and (kept >= self._items_max or self.kept_bytes > self._bytes_max):
            return 0
        self.last_seq = seq = self.last_seq + 1
        self._reserved[seq] = now + self._options.gap_timeout_s
        return seq

    def fill(self, seq: int, kind: int, data: bytes) -> None:
        """Set the content of a reserved number. It always fits: its place was counted when it was reserved.

        Raises LocalProtocolError when the number is not reserved (any more).
        """
        if self._reserved.pop(seq, None) is None:
            raise LocalProtocolError(f"number {seq} is not reserved, or it was filled or skipped before")
        item = encode_item(kind, 0, data)
        self.kept_bytes += len(item)
        heapq.heappush(self._waiting, (seq, item))
        waiting, log = self._waiting, self._log
        following = self.handled + len(log) + 1
        while waiting and waiting[0][0] == following:
            log.append(heapq.heappop(waiting)[1])
            following += 1

    # Sending

    @property
    def unsent(self) -> bool:
        """Whether items may be sent as soon as the window lets them."""
        return self.sent - self.handled < len(self._log)

    @property
    def in_order(self) -> int:
        """The highest number without a hole in front of it."""
        return self.handled + len(self._log)

    @property
    def unhandled(self) -> int:
        """The count of numbers that the client has not handled."""
        return self.last_seq - self.handled

    def attach(self, received: int, window_items: int, window_bytes: int) -> None:
        """Begin a link at ``received + 1`` with the client's window: pushes fill half of it, responses the rest.

        ``received`` may be less than before: a client that was started again has lost what it had not handled.
        """
        options = self._options
        self._items_max = max(1, min(options.items_max, window_items // 2))
        self._bytes_max = min(options.bytes_max, window_bytes // 2)
        self._window_items = max(1, min(window_items, 2 * options.items_max))
        self._window_bytes = min(window_bytes, 2 * options.bytes_max)
        self._tries = 0
        self.received = received
        self._go_back()

    def detach(self) -> None:
        """End the link: nothing is sent, and nothing is expected."""
        self.wants_probe = False
        self._deadline = None
        self._items_max = self._options.items_max
        self._bytes_max = self._options.bytes_max

    def _go_back(self) -> None:
        self.sent = self.received
        self._flight_bytes = sum(map(len, self._log[: self.sent - self.handled]))

    def take(self, bytes_max: int, now: float) -> list[bytes]:
        """Return the pieces to write, in order: PUSH frames of about ``bytes_max`` bytes together; [] when nothing may
        be sent."""
        log = self._log
        first = position = self.sent - self.handled
        limit = min(len(log), self._window_items)
        if position >= limit:
            if self._deadline is None and self.handled < self.sent:
                self._deadline = now + self._options.ack_timeout_s
            return []
        pieces: list[bytes] = []
        flight, window = self._flight_bytes, self._window_bytes
        until = flight + bytes_max
        frame_bytes = 0
        while position < limit:
            size = len(log[position])
            if flight + size > window and position:
                break
            if frame_bytes and frame_bytes + size > _FRAME_BYTES:
                pieces.append(push_header(self.handled + first + 1, frame_bytes))
                pieces += log[first:position]
                first, frame_bytes = position, 0
            frame_bytes += size
            flight += size
            position += 1
            if flight >= until:
                break
        if not frame_bytes:
            return []
        pieces.append(push_header(self.handled + first + 1, frame_bytes))
        pieces += log[first:position]
        self._flight_bytes = flight
        sent = self.handled + position
        if self.sent < self.last_sent:
            self.retransmitted_items += min(sent, self.last_sent) - self.sent
        self.sent = sent
        if sent > self.last_sent:
            self.last_sent = sent
        if self._deadline is None:
            self._deadline = now + self._options.ack_timeout_s
        return pieces

    # Acknowledgements

    def acknowledge(self, received: int, handled: int, now: float) -> bool:
        """Take the client's floors. Old ones change nothing. Returns whether items were released.

        Raises ProtocolError for a number that was never sent, or for more handled than received.
        """
        if received > self.last_sent or handled > received:
            raise ProtocolError(
                f"an acknowledgement of {received} received and {handled} handled: {self.last_sent} was sent last"
            )
        if received > self.received:
            self.received = received
            self._tries = 0
            if received > self.sent:  # a retransmission was under way in vain
                log, base = self._log, self.handled
                self._flight_bytes += sum(map(len, log[self.sent - base : received - base]))
                self.sent = received
            self._deadline = now + self._options.ack_timeout_s
        count = handled - self.handled
        if count <= 0:
            return False
        log = self._log
        released = sum(map(len, log[:count]))
        del log[:count]
        self.handled = handled
        self.kept_bytes -= released
        self._flight_bytes -= released
        self._deadline = None if handled == self.sent else now + self._options.ack_timeout_s
        return True

    def note_flow(self, now: float) -> None:
        """Note that what was written before still flows: the client cannot have acknowledged all of it."""
        if self._deadline is not None:
            self._deadline = now + self._options.ack_timeout_s

    def next_deadline(self) -> float | None:
        """Return the earlier deadline: of the acknowledgement, or of the oldest reserved number."""
        deadline = self._deadline
        if self._reserved:
            gap = next(iter(self._reserved.values()))
            deadline = gap if deadline is None else min(deadline, gap)
        return deadline

    def on_deadline(self, now: float) -> None:
        """Send again from the oldest without receipt, skip or fail; see ``failure``."""
        while self._reserved:
            seq, due = next(iter(self._reserved.items()))
            if due > now:
                break
            if self._options.gap == "skip":
                self.skipped += 1
                self.fill(seq, SKIP, f"not filled within {self._options.gap_timeout_s:g} s".encode())
            else:
                del self._reserved[seq]
                self.failure = f"push {seq} was reserved and not filled within {self._options.gap_timeout_s:g} s"
                return
        if self._deadline is None or self._deadline > now:
            return
        if self.received == self.sent:
            # The client has all items. Handling may take any time, but its acknowledgement may have been lost.
            self.wants_probe = True
            self._deadline = now + self._options.ack_timeout_s
            return
        self._deadline = None
        if self._tries >= self._options.retries_max:
            self.failure = f"push {self.received + 1} was sent {self._tries + 1} times and not acknowledged"
            return
        self._tries += 1
        self.retransmissions += 1
        self._go_back()

    def stats(self) -> dict[str, object]:
        """Return statistics of the sending queue (docs/reference/control-api.md)."""
        return {
            "queue_size": len(self._waiting) + self.in_order - min(self.sent, self.in_order),
            "pending_count": max(0, self.sent - self.handled),
            "max_queue_size": self._items_max,
            "next_expected_seq": self.in_order + 1,
            "last_sent_seq": self.last_sent,
            "last_received_seq": self.received,
            "last_acked_seq": self.handled,
            "last_seq": self.last_seq,
            "kept_bytes": self.kept_bytes,
            "reserved": len(self._reserved),
            "window_items": self._window_items,
            "window_bytes": self._window_bytes,
            "retransmissions": self.retransmissions,
            "retransmitted_items": self.retransmitted_items,
            "skipped": self.skipped,
            "stopped": self.failure is not None,
        }
