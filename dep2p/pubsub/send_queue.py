"""The send queue of one peer: three bounded lanes, written by one task (docs/spec/pubsub.md)."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import trio

from dep2p.concurrency.wait_queue import Sleeper
from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.rpc import Rpc
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.pubsub.wire_formats import Pace
from dep2p.types import PeerId

_CONTROL, _MESSAGE, _GOSSIP = (int(lane) for lane in Lane)
"""Looking up a member of an enumeration costs as much as a small call, and every message passes here."""
_JOIN_BYTES: Final = 262_144
"""About the bytes that are joined into one write."""
_UNSENT_HIGH_BYTES: Final = 131_072
"""Bytes that the stream holds unsent, from which on the writer waits: RPCs that wait here can still be overtaken."""
_UNSENT_LOW_BYTES: Final = 32_768
_MANY: Final = 1 << 62
_SENT_MAX: Final = 20_000
"""Ids of sent messages remembered for one heartbeat, where there is a pace."""
_BURST_MIN: Final = 24
"""So many messages in a heartbeat fit into the queue of a peer that checks none of them meanwhile: go's holds 32."""
_ANNOUNCED_MAX: Final = 3_000
"""go reads ten IHAVE in a heartbeat; one RPC holds some 340 ids."""


class LateFrame:
    """A frame that is made when its first recipient is written to. Until then its message waits for others that share
    its signature."""

    __slots__ = ("_frame", "_make", "size")

    def __init__(self, make: Callable[[], bytes], size: int) -> None:
        self._make = make
        self._frame = b""
        self.size: int = size
        """Bytes of the frame at most."""

    def __len__(self) -> int:
        return self.size

    def frame(self) -> bytes:
        """The frame, made at the first call."""
        if not self._frame:
            self._frame = self._make()
        return self._frame


class _QueuedRpc:
    """One RPC; an empty frame when it need not be sent any more."""

    __slots__ = ("frame", "message_id", "rpc", "size")

    def __init__(self, frame: bytes | LateFrame, size: int, rpc: Rpc, message_id: bytes) -> None:
        self.frame = frame
        self.size = size
        self.rpc = rpc
        self.message_id = message_id
        """The id of the only message; empty for anything else."""


class PeerQueue:
    """Encoded RPCs for one peer, in lanes: control goes before messages, gossip after them.

    A lane that has no room refuses; before a message is refused, gossip makes room. The messages outlive a lost stream.
    """

    __slots__ = (
        "_announced",
        "_control_bytes_max",
        "_control_items_max",
        "_gossip_items_max",
        "_is_closed",
        "_lanes",
        "_messages",
        "_next_s",
        "_on_gossip_dropped",
        "_on_low",
        "_pace",
        "_sent",
        "_sleeper",
        "_taken_messages",
        "bytes_by_lane",
        "bytes_max",
        "full_since_s",
        "is_pressed",
        "is_slow",
        "items_max",
        "items_written",
        "paced",
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
        pace: Pace | None = None,
    ) -> None:
        """``on_low``: called when a pressed queue has shrunk, for tasks that wait for room."""
        self.peer: PeerId = peer
        self.items_max: int = limits.pubsub_out_items_max
        self.bytes_max: int = limits.pubsub_out_bytes_max
        self._control_items_max = limits.pubsub_out_control_items_max
        self._gossip_items_max = limits.pubsub_out_gossip_items_max
        self._control_bytes_max = max(1, limits.pubsub_out_bytes_max // 8)
        self._on_gossip_dropped = on_gossip_dropped
        self._on_low = on_low
        self._lanes: tuple[deque[_QueuedRpc], ...] = (deque(), deque(), deque())
        self._messages: dict[bytes, _QueuedRpc] = {}
        """Single messages that wait, by id."""
        self.bytes_by_lane: list[int] = [0, 0, 0]
        self._sleeper = Sleeper()
        self._is_closed = False
        self.is_pressed: bool = False
        """Whether it is more than half full: publishers have to check before they publish."""
        self.is_slow: bool = False
        """Whether publishes do not wait for it, until it has caught up."""
        self.full_since_s: float | None = None
        self.progress_s: float = 0.0
        self._pace = pace
        self._taken_messages = 0
        self._next_s = 0.0
        self._sent: deque[tuple[str, bytes]] = deque(maxlen=_SENT_MAX)
        self._announced: dict[bytes, None] = {}
        self.paced: int = 0
        """How often the writer waited since the peer could not take more messages at once."""
        self.writes: int = 0
        self.items_written: int = 0

    @property
    def items(self) -> int:
        """RPCs that wait, over all lanes."""
        return sum(len(lane) for lane in self._lanes)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait, over all lanes."""
        return sum(self.bytes_by_lane)

    def fits(self, size: int) -> bool:
        """Whether the queue would take a message of this encoded size; gossip gives way."""
        lane = self._lanes[_MESSAGE]
        if not lane:
            return True
        return len(lane) < self.items_max and self.bytes_by_lane[_MESSAGE] + size <= self.bytes_max

    def put(self, lane: Lane, frame: bytes | LateFrame, rpc: Rpc) -> bool:
        """Queue one RPC. Returns False, and does nothing, when its lane is full."""
        size = frame.size if type(frame) is LateFrame else len(frame)
        entries = self._lanes[lane]
        lane_bytes = self.bytes_by_lane
        if lane == _MESSAGE:
            if not self.fits(size):
                return False
            if lane_bytes[_GOSSIP] and lane_bytes[_MESSAGE] + lane_bytes[_GOSSIP] + size > self.bytes_max:
                self._drop_gossip()
            if not self.is_pressed and (
                2 * len(entries) >= self.items_max or 2 * (lane_bytes[_MESSAGE] + size) >= self.bytes_max
            ):
                self.is_pressed = True
        elif lane == _GOSSIP:
            if len(entries) >= self._gossip_items_max or (entries and self.waiting_bytes + size > self.bytes_max):
                return False
        elif len(entries) >= self._control_items_max or (
            entries and lane_bytes[_CONTROL] + size > self._control_bytes_max
        ):
            return False
        message_id = rpc.messages[0].id if lane == _MESSAGE and len(rpc.messages) == 1 else b""
        entry = _QueuedRpc(frame, size, rpc, message_id)
        entries.append(entry)
        if message_id:
            self._messages[message_id] = entry
        lane_bytes[lane] += size
        if self._sleeper.task is not None:
            self._sleeper.wake()
        return True

    def _drop_gossip(self) -> None:
        lane = self._lanes[_GOSSIP]
        dropped = list(lane)
        lane.clear()
        self.bytes_by_lane[_GOSSIP] = 0
        for entry in dropped:
            self._on_gossip_dropped(self.peer, entry.rpc)

    @property
    def has_messages(self) -> bool:
        """Whether a message waits that `discard` might find."""
        return bool(self._messages)

    def discard(self, message_id: bytes) -> bool:
        """Drop a message that the peer has by now. Returns whether it was waiting."""
        entry = self._messages.pop(message_id, None)
        if entry is None:
            return False
        self.bytes_by_lane[_MESSAGE] -= entry.size
        entry.frame = b""
        return True

    def clear(self, *, keep_messages: bool = False) -> int:
        """Drop all waiting RPCs; with ``keep_messages`` only control and gossip. Returns how many messages are lost."""
        lost = 0
        for lane in (_CONTROL, _GOSSIP) if keep_messages else (_CONTROL, _MESSAGE, _GOSSIP):
            if lane == _MESSAGE:
                lost = sum(len(entry.rpc.messages) for entry in self._lanes[lane] if entry.frame)
                self._messages.clear()
            self._lanes[lane].clear()
            self.bytes_by_lane[lane] = 0
        self._note_low()
        return lost

    def close(self) -> None:
        """End `write_to`, when it comes to this."""
        self._is_closed = True
        self._sleeper.wake()

    async def write_to(self, stream: ByteStream) -> None:
        """Write the queue, until `close` or until the stream ends (StreamClosedError)."""
        self.progress_s = trio.current_time()
        while not self._is_closed:
            if self._pace is not None and self._taken_messages:
                await self._wait_for_peer(self._pace)
            data = self._take()
            if data is None:
                await self._sleeper.wait()
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

    async def _wait_for_peer(self, pace: Pace) -> None:
        """Give the peer time for the messages of the last write."""
        now = trio.current_time()
        self._next_s = max(self._next_s, now) + self._taken_messages * pace.interval_s / pace.messages
        self._taken_messages = 0
        if self._lanes[_MESSAGE]:
            self.paced += 1
            await trio.sleep_until(self._next_s)

    def take_burst(self) -> dict[str, list[bytes]]:
        """Ids by topic of what was sent since the last call, if that was so much that the peer may have dropped some.

        Announced to the peer, they let it ask for those that it does not have. Empty without a pace.
        """
        sent, found = self._sent, dict[str, list[bytes]]()
        if len(sent) <= _BURST_MIN:
            sent.clear()
            self._announced = {}
            return found
        for _ in range(min(len(sent), _ANNOUNCED_MAX)):
            topic, message_id = sent.popleft()
            found.setdefault(topic, []).append(message_id)
        self._announced = {message_id: None for ids in found.values() for message_id in ids}
        return found

    def count_dropped(self, asked: Iterable[bytes]) -> int:
        """Count the ids that the peer asks for although they were sent to it: it had no room for them."""
        return sum(1 for message_id in asked if self._announced.pop(message_id, 0) is None)

    def _take(self) -> bytes | None:
        """Take all waiting RPCs, up to the size of one write; None when there is nothing."""
        taken: list[bytes] = []
        size = messages = 0
        messages_max = _MANY if self._pace is None else self._pace.messages
        waiting = self._messages
        for number, lane in enumerate(self._lanes):
            lane_size = 0
            while lane and size < _JOIN_BYTES and messages < messages_max:
                entry = lane.popleft()
                frame = entry.frame
                if not frame:
                    continue
                if isinstance(frame, LateFrame):
                    frame = frame.frame()
                if entry.message_id:
                    waiting.pop(entry.message_id, None)
                taken.append(frame)
                if self._pace is not None:
                    messages += len(entry.rpc.messages)
                    self._sent.extend((message.topic, message.id) for message in entry.rpc.messages)
                lane_size += entry.size
                size += entry.size
            self.bytes_by_lane[number] -= lane_size
        self._taken_messages = messages
        if not taken:
            return None
        self.items_written += len(taken)
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _note_low(self) -> None:
        if not self.is_pressed:
            return
        if 2 * len(self._lanes[_MESSAGE]) < self.items_max and 2 * self.bytes_by_lane[_MESSAGE] < self.bytes_max:
            self.is_pressed = False
            self.is_slow = False
            self.full_since_s = None
        self._on_low(self)
