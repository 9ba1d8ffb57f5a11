"""Notifies that came over one link and wait for their handlers: ordered, bounded, paused instead of dropped. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.frame import Frame
from dep2p.protocols.wire.headers import HeaderMap
from dep2p.protocols.wire.payload import PayloadReader, required_name

_ITEM_OVERHEAD_BYTES: Final = 64


class NotifyInbox:
    """One link's notifies in their order. The shell takes them out one by one, and pauses the link when asked to."""

    __slots__ = ("_bytes", "_bytes_max", "_frames", "_items_max", "_known", "_payloads", "violation")

    def __init__(self, payloads: PayloadReader, *, items_max: int, bytes_max: int) -> None:
        self._payloads = payloads
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._frames: deque[Frame] = deque()
        self._known: HeaderMap | None = None  # headers that have been checked
        self._bytes = 0
        self.violation: ProtocolError | None = None

    def handle(self, frames: Sequence[Frame], now: float) -> None:
        """Take NOTIFY frames as they came; check `must_pause` afterwards."""
        self._frames.extend(frames)
        self._bytes += sum([len(frame[3]) for frame in frames]) + _ITEM_OVERHEAD_BYTES * len(frames)

    def take(self) -> tuple[HeaderMap, bytes] | None:
        """Return the oldest notify, or None. Its headers have a NAME.

        Frames are decoded here and not when they come: else a few compressed bytes would fill the memory. A
        malformed one is a `violation`, and None; those in front of it have been taken.
        """
        frames = self._frames
        if not frames:
            return None
        frame = frames.popleft()
        self._bytes -= len(frame[3]) + _ITEM_OVERHEAD_BYTES
        try:
            if frame[2]:
                raise ProtocolError("NOTIFY with a req_id")
            item = self._payloads.read(frame)
            if item[0] is not self._known:
                required_name(item[0])
                self._known = item[0]
        except ProtocolError as violation:
            self.violation = violation
            return None
        return item

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the frames as they came, with an allowance per item."""
        return self._bytes

    @property
    def must_pause(self) -> bool:
        """Whether it is full: receive nothing more on this link. One read may fill it over its bound."""
        return len(self._frames) >= self._items_max or self._bytes >= self._bytes_max

    @property
    def may_resume(self) -> bool:
        """Whether it is half empty again."""
        return len(self._frames) <= self._items_max // 2 and self._bytes <= self._bytes_max // 2

    def clear(self) -> int:
        """Drop all; return how many there were, for the caller to count."""
        dropped = len(self._frames)
        self._frames.clear()
        self._bytes = 0
        return dropped
