"""One neighbour of the router, and the streams between: ours to it is only written, its to us only read."""

from collections import Counter, deque
from typing import Final, Protocol

import trio

from dep2p.errors import ErrorCode, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.pubsub.peers import Neighbours
from dep2p.pubsub.send_queue import PeerQueue
from dep2p.pubsub.wire_formats import RpcDecoder, Wire, count_refusal
from dep2p.types import PeerId

INBOUND_PER_PEER_MAX: Final = 2
"""A peer that opens more loses its oldest: it may have restarted."""
QUICK_END_S: Final = 5.0
"""An outbound stream that ends sooner is opened again after a growing pause."""
QUICK_PAUSE_S: Final = 0.2
QUICK_PAUSE_MAX_S: Final = 30.0


class Neighbour:
    """A peer that the router knows."""

    __slots__ = (
        "inbound",
        "opening",
        "peer",
        "queue",
        "quick_ends",
        "stream",
    )

    def __init__(self, peer: PeerId, queue: PeerQueue) -> None:
        self.peer = peer
        self.queue = queue
        self.inbound: dict[InboundStream, None] = {}
        self.opening: trio.CancelScope | None = None
        """The task that opens and writes our stream."""
        self.stream: ByteStream | None = None
        self.quick_ends = 0

    @property
    def reopen_pause_s(self) -> float:
        """Before our stream is opened again; grows while it ends at once."""
        if not self.quick_ends:
            return 0.0
        return float(min(QUICK_PAUSE_S * 2.0 ** min(self.quick_ends, 16), QUICK_PAUSE_MAX_S))


class InboundOwner(Protocol):
    """What an inbound stream needs of the pub/sub that it belongs to."""

    neighbours: Neighbours
    wire: Wire
    counters: Counter[str]
    is_held: bool
    """Take nothing more for now."""

    def receive(self, peer: PeerId, payload: bytes) -> None: ...

    def received_all(self) -> None:
        """Nothing more was in this read."""
        ...

    def malformed(self, peer: PeerId, detail: str) -> None: ...

    def inbound_ended(self, stream: "InboundStream") -> None: ...


class InboundStream:
    """A peer's stream to us. Bytes are pushed in; what the owner cannot take yet waits here, and the peer with it."""

    __slots__ = ("_backlog", "_decoder", "_is_over", "_is_paused", "_owner", "peer", "stream")

    def __init__(self, owner: InboundOwner, stream: ByteStream) -> None:
        self._owner = owner
        self.stream = stream
        self.peer = stream.connection.peer
        self._decoder: RpcDecoder = owner.wire.decoder()
        self._backlog: deque[bytes] = deque()
        self._is_paused = False
        self._is_over = False

    def start(self) -> None:
        """Begin to receive."""
        self.stream.set_receiver(self._on_data, self._on_end)

    @property
    def waiting_items(self) -> int:
        """RPCs that wait until the owner takes more."""
        return len(self._backlog)

    def _on_data(self, data: bytes | memoryview) -> None:
        if self._is_over:
            return
        owner = self._owner
        if not owner.neighbours.is_admitted(self.stream.connection):
            self.refuse()
            return
        self._backlog.extend(self._decoder.feed(data))
        self.process()

    def process(self) -> None:
        """Hand over what waits, as long as the owner takes it."""
        owner, backlog, peer = self._owner, self._backlog, self.peer
        while backlog and not owner.is_held and not self._is_over:
            if not owner.neighbours.is_admitted(self.stream.connection):
                self.refuse()
                return
            owner.receive(peer, backlog.popleft())
        owner.received_all()
        if self._is_over:
            return
        if backlog or owner.is_held:
            if not self._is_paused:
                self._is_paused = True
                self.stream.pause_receiving()
            return
        decoder = self._decoder
        if decoder.error is not None:
            owner.malformed(peer, str(decoder.error))
            self.reset()
        elif decoder.refusal is not None:
            count_refusal(owner.counters, decoder.refusal)
            self.reset()
        elif self._is_paused:
            self._is_paused = False
            self.stream.resume_receiving()

    def refuse(self) -> None:
        """The peer may not talk here at this moment: say so and end the stream."""
        self._owner.counters["streams_refused_not_member"] += 1
        self._say_and_reset(ErrorCode.NOT_MEMBER, "not a verified member of this realm")

    def _say_and_reset(self, code: ErrorCode, text: str) -> None:
        words = self._owner.wire.refuse(code, text)
        if words and not self._is_over:
            try:
                self.stream.write_nowait(words)
            except StreamClosedError:
                words = b""
        self._end(reset=not words)

    def reset(self) -> None:
        """End it at once. Idempotent."""
        self._end(reset=True)

    def _end(self, *, reset: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._backlog.clear()
        if reset:
            self.stream.reset()
        self._owner.inbound_ended(self)

    def _on_end(self, _error: BaseException | None) -> None:
        if self._backlog and not self._is_over:
            self._owner.counters["rpcs_dropped_stream_ended"] += len(self._backlog)
        self._end(reset=True)
