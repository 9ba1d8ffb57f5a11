"""One neighbour of the router, and the two streams: this node only writes its own, and only reads the peer's."""

from collections import Counter, deque
from typing import Final, Protocol

import trio

from dep2p.errors import ErrorCode, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.links.fairness import Fairness
from dep2p.protocols.fairness.turns import UNITS_ALONE
from dep2p.pubsub.peers import Neighbours
from dep2p.pubsub.send_queue import PeerQueue
from dep2p.pubsub.wire_formats import RpcDecoder, Wire, count_refusal
from dep2p.types import PeerId

INBOUND_PER_PEER_MAX: Final = 2
"""Inbound streams of one peer. A peer that opens more loses its oldest: it may have restarted."""
_WORK_PER_UNIT: Final = 4
"""Work of RPCs in one unit of turns, some 15 µs."""
QUICK_END_S: Final = 5.0
"""Seconds. An outbound stream that ends sooner is opened again after a growing pause."""
QUICK_PAUSE_S: Final = 0.2
QUICK_PAUSE_MAX_S: Final = 30.0


class Neighbour:
    """A peer that the router knows."""

    __slots__ = (
        "inbound",
        "is_moving",
        "opening",
        "opening_on",
        "peer",
        "queue",
        "quick_ends",
        "stream",
    )

    def __init__(self, peer: PeerId, queue: PeerQueue) -> None:
        self.peer: PeerId = peer
        self.queue: PeerQueue = queue
        self.inbound: dict[InboundStream, None] = {}
        self.opening: trio.CancelScope | None = None
        """The scope of the task that opens and writes our stream."""
        self.opening_on: int | None = None
        """The connection that this task uses."""
        self.is_moving: bool = False
        """Our stream goes to another connection of the peer: it is opened again without a pause."""
        self.stream: ByteStream | None = None
        self.quick_ends: int = 0

    @property
    def reopen_pause_s(self) -> float:
        """Seconds before our stream is opened again; it grows while the stream ends at once."""
        if not self.quick_ends:
            return 0.0
        return float(min(QUICK_PAUSE_S * 2.0 ** min(self.quick_ends, 16), QUICK_PAUSE_MAX_S))


class ReceiveRpc(Protocol):
    """Takes one RPC of a peer; ``is_old``: on a stream that another one has replaced. Returns its cost; see
    `Rpc.work`."""

    def __call__(self, peer: PeerId, payload: bytes, *, is_old: bool) -> int: ...


class InboundOwner(Protocol):
    """The pub/sub that an inbound stream belongs to, as the stream uses it."""

    neighbours: Neighbours
    wire: Wire
    counters: Counter[str]
    is_held: bool
    """Whether no more RPCs are taken for now."""
    held_peers: dict[PeerId, None]
    """Peers of which no more RPCs are taken for now."""
    fairness: Fairness

    def line_of(self, peer: PeerId) -> PeerId:
        """Return the member in whose line the peer waits for its turn."""
        ...

    def receive(self, peer: PeerId, payload: bytes, *, is_old: bool) -> int:
        """Take one RPC; return its cost, see `Rpc.work`."""
        ...

    def received_all(self) -> None:
        """Act on the end of a read: no more RPCs were in it."""
        ...

    def malformed(self, peer: PeerId, detail: str, /) -> None: ...

    def inbound_ended(self, stream: "InboundStream") -> None: ...


class InboundStream:
    """A peer's stream to us. Bytes are pushed in. Those that the owner cannot take yet wait here, and hold back the
    peer.

    An RPC is paid for when it has been decoded: its size says little of its cost. A peer whose last RPC is more than
    its share of this moment waits for its turn before the next one.
    """

    __slots__ = (
        "_backlog",
        "_decoder",
        "_is_in_line",
        "_is_over",
        "_is_paused",
        "_line",
        "_owed",
        "_owner",
        "is_replaced",
        "peer",
        "stream",
    )

    def __init__(self, owner: InboundOwner, stream: ByteStream) -> None:
        self._owner = owner
        self.stream: ByteStream = stream
        self.peer: PeerId = stream.connection.peer
        self._decoder: RpcDecoder = owner.wire.decoder()
        self._backlog: deque[bytes] = deque()
        self._is_paused = False
        self._is_over = False
        self._is_in_line = False
        self._line: PeerId = owner.line_of(self.peer)
        self._owed = 0
        """Work of RPCs that no turn or share has paid for yet."""
        self.is_replaced: bool = False
        """The peer has opened another one since. What it says here about itself is of before."""

    def start(self) -> None:
        """Begin to receive."""
        self.stream.set_receiver(self._on_data, self._on_end)

    @property
    def waiting_items(self) -> int:
        """The number of RPCs that wait until the owner takes more."""
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
        """Hand over waiting RPCs, as long as the owner takes them and the peer has its share."""
        if self._is_in_line:
            return
        owner, backlog = self._owner, self._backlog
        if not backlog:
            self._end_batch()
            return
        spent_units, fairness = 0, owner.fairness
        fairness.note(self._line)  # also for little: the node is shared then
        is_admitted, connection, held_peers = owner.neighbours.is_admitted, self.stream.connection, owner.held_peers
        while backlog and not owner.is_held and not self._is_over and self.peer not in held_peers:
            if not is_admitted(connection):
                self.refuse()
                break
            units = self._owed // _WORK_PER_UNIT
            if units:
                if spent_units > UNITS_ALONE or not fairness.admits(self._line, units):
                    self._wait_for_turn(fairness)
                    break
                spent_units += units
                self._owed -= units * _WORK_PER_UNIT
            self._owed += owner.receive(self.peer, backlog.popleft(), is_old=self.is_replaced)
        self._end_batch()

    def take_turn(self, units: int) -> bool:
        """See :class:`dep2p.links.fairness.TurnTaker`."""
        self._is_in_line = True
        self._owed -= units * _WORK_PER_UNIT
        while self._owed <= 0 and self._may_take():
            self._owed += self._take_one()
        self._owed = max(0, self._owed)
        self._is_in_line = has_more = self._may_take()
        self._end_batch()
        return has_more

    def _wait_for_turn(self, fairness: Fairness) -> None:
        self._owner.counters["rpc_turns_waited"] += 1
        self._is_in_line = True
        fairness.add(self._line, self)

    def _may_take(self) -> bool:
        owner = self._owner
        if not self._backlog or owner.is_held or self._is_over or self.peer in owner.held_peers:
            return False
        if not owner.neighbours.is_admitted(self.stream.connection):
            self.refuse()
            return False
        return True

    def _take_one(self) -> int:
        return self._owner.receive(self.peer, self._backlog.popleft(), is_old=self.is_replaced)

    def _end_batch(self) -> None:
        owner, peer = self._owner, self.peer
        owner.received_all()
        if self._is_over:
            return
        if self._backlog or owner.is_held or peer in owner.held_peers:
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
        """End the stream of a peer that may not talk here at this moment, and say so."""
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
        """Reset the stream. Idempotent."""
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
