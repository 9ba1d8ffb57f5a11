"""What waits to be sent to one peer: three bounded lanes, written by one task (docs/spec/pubsub.md)."""

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.rpc import Rpc
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.types import PeerId

_JOIN_BYTES: Final = 262_144
"""At most about so much is joined into one write."""
_UNSENT_HIGH_BYTES: Final = 131_072
"""More than this in the stream itself, and the writer waits: what waits here can still be overtaken."""
_UNSENT_LOW_BYTES: Final = 32_768


class LateFrame:
    """A frame that is made when the first of its recipients is written to: until then its message waits for company
    under one signature."""

    __slots__ = ("_frame", "_make", "_size")

    def __init__(self, make: Callable[[], bytes], size: int) -> None:
        """``size``: of the frame, at most."""
        self._make = make
        self._frame = b""
        self._size = size

    def __len__(self) -> int:
        return self._size

    def frame(self) -> bytes:
        """The frame, made at the first call."""
        if not self._frame:
            self._frame = self._make()
        return self._frame


class _Entry:
    """One RPC; an empty frame when it need not be sent any more."""

    __slots__ = ("frame", "message_id", "rpc", "size")

    def __init__(self, frame: bytes | LateFrame, size: int, rpc: Rpc, message_id: bytes) -> None:
        self.frame = frame
        self.size = size
        self.rpc = rpc
        self.message_id = message_id
        """Of the only message; empty for anything else."""


class PeerQueue:
    """Encoded RPCs for one peer, in lanes: control goes before messages, gossip after them.

    A lane that has no room refuses; before a message is refused, gossip makes room. The messages outlive a lost stream.
    """

    __slots__ = (
        "_control_bytes_max",
        "_control_items_max",
        "_gossip_items_max",
        "_is_closed",
        "_lanes",
        "_messages",
        "_on_gossip_dropped",
        "_on_low",
        "_sleeper",
        "bytes_by_lane",
        "bytes_max",
        "full_since_s",
        "is_pressed",
        "is_slow",
        "items_max",
        "items_written",
        "peer",
        "progress_s",
        "writes",
    )

    def __init__(
        self,
        peer: PeerId,
        limits: Limits,
        on_gossip_dropped: Callable[[PeerId, Rpc], None],
        on_low: Callable[["PeerQueue"], None],
    ) -> None:
        """``on_low``: called when a pressed queue has shrunk, for those who wait for room."""
        self.peer = peer
        self.items_max = limits.pubsub_out_items_max
        self.bytes_max = limits.pubsub_out_bytes_max
        self._control_items_max = limits.pubsub_out_control_items_max
        self._gossip_items_max = limits.pubsub_out_gossip_items_max
        self._control_bytes_max = max(1, limits.pubsub_out_bytes_max // 8)
        self._on_gossip_dropped = on_gossip_dropped
        self._on_low = on_low
        self._lanes: tuple[deque[_Entry], ...] = (deque(), deque(), deque())
        self._messages: dict[bytes, _Entry] = {}
        """Single messages that wait, by id."""
        self.bytes_by_lane = [0, 0, 0]
        self._sleeper: trio.lowlevel.Task | None = None
        self._is_closed = False
        self.is_pressed = False
        """More than half full: publishers have to look before they publish."""
        self.is_slow = False
        """Nobody waits for it until it has caught up."""
        self.full_since_s: float | None = None
        self.progress_s = 0.0
        self.writes = 0
        self.items_written = 0

    @property
    def items(self) -> int:
        """RPCs that wait, over all lanes."""
        return sum(len(lane) for lane in self._lanes)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait, over all lanes."""
        return sum(self.bytes_by_lane)

    def fits(self, size: int) -> bool:
        """Whether a message of this encoded size would be taken; gossip gives way."""
        lane = self._lanes[Lane.MESSAGE]
        if not lane:
            return True
        return len(lane) < self.items_max and self.bytes_by_lane[Lane.MESSAGE] + size <= self.bytes_max

    def put(self, lane: Lane, frame: bytes | LateFrame, rpc: Rpc) -> bool:
        """Queue one RPC; False, and nothing done, when its lane is full."""
        size = len(frame)
        entries = self._lanes[lane]
        lane_bytes = self.bytes_by_lane
        if lane == Lane.MESSAGE:
            if not self.fits(size):
                return False
            if lane_bytes[Lane.GOSSIP] and lane_bytes[Lane.MESSAGE] + lane_bytes[Lane.GOSSIP] + size > self.bytes_max:
                self._drop_gossip()
            if not self.is_pressed and (
                2 * len(entries) >= self.items_max or 2 * (lane_bytes[Lane.MESSAGE] + size) >= self.bytes_max
            ):
                self.is_pressed = True
        elif lane == Lane.GOSSIP:
            if len(entries) >= self._gossip_items_max or (entries and self.waiting_bytes + size > self.bytes_max):
                return False
        elif len(entries) >= self._control_items_max or (
            entries and lane_bytes[Lane.CONTROL] + size > self._control_bytes_max
        ):
            return False
        message_id = rpc.messages[0].id if lane == Lane.MESSAGE and len(rpc.messages) == 1 else b""
        entry = _Entry(frame, size, rpc, message_id)
        entries.append(entry)
        if message_id:
            self._messages[message_id] = entry
        lane_bytes[lane] += size
        sleeper = self._sleeper
        if sleeper is not None:
            self._sleeper = None
            trio.lowlevel.reschedule(sleeper)
        return True

    def _drop_gossip(self) -> None:
        lane = self._lanes[Lane.GOSSIP]
        dropped = list(lane)
        lane.clear()
        self.bytes_by_lane[Lane.GOSSIP] = 0
        for entry in dropped:
            self._on_gossip_dropped(self.peer, entry.rpc)

    @property
    def has_messages(self) -> bool:
        """Some message waits that `discard` might find."""
        return bool(self._messages)

    def discard(self, message_id: bytes) -> bool:
        """The peer has this message by now: do not send it. Whether it was waiting."""
        entry = self._messages.pop(message_id, None)
        if entry is None:
            return False
        self.bytes_by_lane[Lane.MESSAGE] -= entry.size
        entry.frame = b""
        return True

    def clear(self, *, keep_messages: bool = False) -> int:
        """Forget what waits; with ``keep_messages`` control and gossip only. Returns how many messages are lost."""
        lost = 0
        for lane in (Lane.CONTROL, Lane.GOSSIP) if keep_messages else tuple(Lane):
            if lane == Lane.MESSAGE:
                lost = sum(len(entry.rpc.messages) for entry in self._lanes[lane] if entry.frame)
                self._messages.clear()
            self._lanes[lane].clear()
            self.bytes_by_lane[lane] = 0
        self._note_low()
        return lost

    def close(self) -> None:
        """`write_to` returns when it comes to it."""
        self._is_closed = True
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            trio.lowlevel.reschedule(sleeper)

    async def write_to(self, stream: ByteStream) -> None:
        """The writer: until `close` or until the stream ends (StreamClosedError)."""
        self.progress_s = trio.current_time()
        while not self._is_closed:
            data = self._take()
            if data is None:
                await self._sleep()
                continue
            self.writes += 1
            stream.write_nowait(data, urgent=True)
            if stream.unsent_bytes > _UNSENT_HIGH_BYTES:
                await stream.drain(_UNSENT_LOW_BYTES)
                self.progress_s = trio.current_time()
                self._note_low()
            else:
                self.progress_s = trio.current_time()
                self._note_low()
                if any(self._lanes):
                    await trio.lowlevel.checkpoint()

    def _take(self) -> bytes | None:
        """All that waits, up to what one write should hold; None when there is nothing."""
        taken: list[bytes] = []
        size = 0
        waiting = self._messages
        for number, lane in enumerate(self._lanes):
            lane_size = 0
            while lane and size < _JOIN_BYTES:
                entry = lane.popleft()
                frame = entry.frame
                if not frame:
                    continue
                if isinstance(frame, LateFrame):
                    frame = frame.frame()
                if entry.message_id:
                    waiting.pop(entry.message_id, None)
                taken.append(frame)
                lane_size += entry.size
                size += entry.size
            self.bytes_by_lane[number] -= lane_size
        if not taken:
            return None
        self.items_written += len(taken)
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _note_low(self) -> None:
        if not self.is_pressed:
            return
        if (
            2 * len(self._lanes[Lane.MESSAGE]) < self.items_max
            and 2 * self.bytes_by_lane[Lane.MESSAGE] < self.bytes_max
        ):
            self.is_pressed = False
            self.is_slow = False
            self.full_since_s = None
        self._on_low(self)

    async def _sleep(self) -> None:
        task = trio.lowlevel.current_task()
        self._sleeper = task

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._sleeper = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
