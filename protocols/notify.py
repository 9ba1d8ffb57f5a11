"""Notifies that came over one link and wait for their handlers: ordered, bounded, paused instead of dropped. Pure."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from dep2p.errors import ProtocolError
from dep2p.protocols.frame import COMPRESSED, Frame
from dep2p.protocols.headers import HeaderMap
from dep2p.protocols.payload import PayloadReader, required_name

_ITEM_OVERHEAD_BYTES: Final = 64


class NotifyInbox:
    """One link's notifies in their order. The shell takes them out one by one and pauses the link when asked to."""

    __slots__ = ("_bytes", "_bytes_max", "_items", "_items_max", "_payloads", "violation")

    def __init__(self, payloads: PayloadReader, *, items_max: int, bytes_max: int) -> None:
        self._payloads = payloads
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._items: deque[tuple[HeaderMap, bytes, int]] = deque()  # the body as it came, and the frame's flags
        self._bytes = 0
        self.violation: ProtocolError | None = None

    def handle(self, frames: Iterable[Frame], now: float) -> None:
        """Take NOTIFY frames in; see `violation` and `must_pause` afterwards."""
        split = self._payloads.split
        append = self._items.append
        known: HeaderMap | None = None
        size = 0
        try:
            for frame in frames:
                if frame.req_id:
                    raise ProtocolError("NOTIFY with a req_id")
                headers, body = split(frame)
                if headers is not known:
                    known = headers
                    required_name(known)
                append((headers, body, frame.flags))
                size += len(body) + _ITEM_OVERHEAD_BYTES
        except ProtocolError as violation:
            self.violation = violation
        self._bytes += size

    def take(self) -> tuple[HeaderMap, bytes] | None:
        """The oldest notify, or None. The headers have a NAME.

        Bodies are decompressed here and not when they come: else a few compressed bytes would fill the memory. One
        that cannot be decompressed is a `violation`, and None.
        """
        if not self._items:
            return None
        headers, body, flags = self._items.popleft()
        self._bytes -= len(body) + _ITEM_OVERHEAD_BYTES
        if flags & COMPRESSED:
            try:
                body = self._payloads.content(flags, body)
            except ProtocolError as violation:
                self.violation = violation
                return None
        return headers, body

    def __len__(self) -> int:
        return len(self._items)

    @property
    def queued_bytes(self) -> int:
        """Bytes held, as they came, with an allowance per item."""
        return self._bytes

    @property
    def must_pause(self) -> bool:
        """Full: receive nothing more on this link. It may be over by what came in one go."""
        return len(self._items) >= self._items_max or self._bytes >= self._bytes_max

    @property
    def may_resume(self) -> bool:
        """Half empty again."""
        return len(self._items) <= self._items_max // 2 and self._bytes <= self._bytes_max // 2

    def clear(self) -> int:
        """Drop all; how many there were, for the caller to count."""
        dropped = len(self._items)
        self._items.clear()
        self._bytes = 0
        return dropped
