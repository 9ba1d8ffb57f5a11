"""The opener's end of a stream of queue frames: requests that wait for answers, and subscriptions that get messages."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    LockLostError,
    MessageTooLargeError,
    NotInFlightError,
    NotOwnerError,
    OverloadedError,
    ProtocolError,
    QueueAccessError,
    QueueConsumerClosedError,
    QueueExistsError,
    QueueFullError,
    QueueMessageNotFoundError,
    QueueMovedError,
    QueueNotFoundError,
    QueuePlacedError,
    RemoteError,
    StoreError,
    StoreFullError,
    StoreUnknownError,
    StreamClosedError,
    error_from_wire,
)
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.links.link import Link
from dep2p.protocols.queues import wire
from dep2p.protocols.queues import wire_exclusive as fenced
from dep2p.protocols.queues.wire import Delivered, QueueCode, Settled
from dep2p.protocols.wire.frame import Frame, FrameType, decode_error
from dep2p.realm.interface import RealmGate

_ERROR: Final = int(FrameType.ERROR)
_REQ_ID_MAX: Final = 0xFFFF_FFFF
_OVERHEAD_BYTES: Final = 65_536
_BATCH_BYTES: Final = 1_048_576
_ANSWER_BYTES: Final = 524_288

_EXCEPTIONS: Final[dict[int, type[Dep2pError]]] = {
    QueueCode.INVALID: ProtocolError,
    QueueCode.QUEUE_NOT_FOUND: QueueNotFoundError,
    QueueCode.CHANNEL_NOT_FOUND: ChannelNotFoundError,
    QueueCode.MESSAGE_NOT_FOUND: QueueMessageNotFoundError,
    QueueCode.EXISTS: QueueExistsError,
    QueueCode.FULL: QueueFullError,
    QueueCode.NOT_IN_FLIGHT: NotInFlightError,
    QueueCode.ACCESS: QueueAccessError,
    QueueCode.OVERLOADED: OverloadedError,
    QueueCode.TOO_LARGE: MessageTooLargeError,
    QueueCode.STORE: StoreError,
    QueueCode.STORE_FULL: StoreFullError,
    QueueCode.CONSUMER_CLOSED: QueueConsumerClosedError,
    QueueCode.STORE_UNKNOWN: StoreUnknownError,
    QueueCode.LOCK_LOST: LockLostError,
    QueueCode.PLACED: QueuePlacedError,
    QueueCode.MOVED: QueueMovedError,
    QueueCode.NOT_OWNER: NotOwnerError,
}


def error_of(code: int, text: str) -> Dep2pError:
    """The public exception of a refusal. Raises ProtocolError for a malformed one."""
    if code == QueueCode.NOT_OWNER:
        epoch, owner, nodes, rest = wire.read_not_owner(text)
        return NotOwnerError(rest, owner, epoch, nodes)
    return _EXCEPTIONS.get(code, RemoteError)(text)


def code_of(error: BaseException) -> QueueCode:
    """The code under which a refusal crosses the wire."""
    if isinstance(error, ValueError | TypeError):
        return QueueCode.INVALID
    for code, kind in reversed(_EXCEPTIONS.items()):
        if kind is not StoreError and isinstance(error, kind):
            return QueueCode(code)
    return QueueCode.STORE if isinstance(error, StoreError) else QueueCode.OTHER


def text_of(error: BaseException) -> str:
    """The text of a refusal."""
    if isinstance(error, NotOwnerError):
        return wire.not_owner_text(error.epoch, error.owner, error.nodes, str(error))
    return str(error)


def payload_bytes_max(limits: Limits) -> int:
    """The largest payload of a queue frame: an ANSWER with messages, the last one of the largest size, in base64."""
    return 2 * (max(limits.message_bytes_max, _BATCH_BYTES) + _ANSWER_BYTES) + _OVERHEAD_BYTES


class Subscriber(Protocol):
    """What a subscription is to its link. Called from the connection's reader: nothing here blocks."""

    def deliver(self, messages: list[Delivered]) -> None:
        """Messages have come."""
        ...

    def deliver_fenced(self, epoch: int, messages: list[Delivered]) -> None:
        """Messages of one partition have come, in an exclusive channel."""
        ...

    def lease(self, lease: fenced.WireLease) -> None:
        """What the consumer of an exclusive channel is told."""
        ...

    def settled(self, settled: Settled) -> None:
        """An answer to results."""
        ...

    def ended(self, error: Dep2pError) -> None:
        """The other side has ended it."""
        ...

    def lost(self, error: Dep2pError) -> None:
        """The link is over."""
        ...


@dataclass(slots=True)
class Answer:
    """What came for a request."""

    type: int = 0
    payload: bytes = b""
    error: Dep2pError | None = None
    """Why it was refused, or that the link is over (StreamClosedError)."""
    retry_after_ms: int = 0


class QueueLink(Link):
    """The opener's end."""

    def __init__(
        self,
        stream: ByteStream,
        gate: RealmGate,
        limits: Limits,
        counters: Counter[str],
        on_ended: Callable[["QueueLink"], None],
    ) -> None:
        super().__init__(stream, gate, limits, counters, payload_bytes_max=payload_bytes_max(limits))
        self._waiting: dict[int, Callable[[Answer], None]] = {}
        self._subscribers: dict[int, Subscriber] = {}
        self._next_id = 1
        self._on_ended = on_ended

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._subscribers or super().is_busy)

    def new_id(self) -> int:
        """A ``req_id`` that nothing on this link uses."""
        while self._next_id in self._waiting or self._next_id in self._subscribers:
            self._next_id = self._next_id % _REQ_ID_MAX + 1
        found = self._next_id
        self._next_id = found % _REQ_ID_MAX + 1
        return found

    def expect(self, req_id: int, on_answer: Callable[[Answer], None]) -> None:
        """Call ``on_answer`` once: with the answer, or with the error that ended the link."""
        self.was_used = True
        self._waiting[req_id] = on_answer

    def forget(self, req_id: int) -> None:
        """Nobody waits any more; a late answer is dropped."""
        self._waiting.pop(req_id, None)

    def add(self, req_id: int, subscriber: Subscriber) -> None:
        """Messages with this ``req_id`` are for ``subscriber`` from now on."""
        self._subscribers[req_id] = subscriber

    def remove(self, req_id: int) -> None:
        """The subscription is over; what still comes is dropped."""
        self._subscribers.pop(req_id, None)

    def put(self, frame: bytes) -> None:
        """Send a frame whatever waits already. Raises StreamClosedError."""
        self.was_used = True
        self.out.put((frame,), len(frame))

    async def send(self, frame: bytes) -> None:
        """Send a frame when there is room. Raises StreamClosedError."""
        await self.out.room(len(frame))
        self.put(frame)

    def receive(self, frames: list[Frame]) -> None:
        self.was_used = True
        try:
            for frame in frames:
                self._take(frame)
        except ProtocolError as error:
            self.violate(error)

    def _take(self, frame: Frame) -> None:
        kind, _flags, req_id, payload = frame
        if kind == _ERROR:
            if frame.flags:
                raise ProtocolError(f"flags 0x{frame.flags:04x} on an ERROR")
            code, text = decode_error(payload)
            self.counters["links_refused_by_peer"] += 1
            self.end(error_from_wire(code, text), abort=True)
            return
        wire.require_request(frame)
        if kind == wire.DELIVER:
            messages = wire.decode_deliver(payload)
            subscriber = self._subscribers.get(req_id)
            if subscriber is None:
                self.counters["deliveries_dropped_late"] += len(messages)
            else:
                subscriber.deliver(messages)
        elif kind == fenced.FENCED_DELIVER:
            epoch, messages = fenced.decode_fenced_deliver(payload)
            subscriber = self._subscribers.get(req_id)
            if subscriber is None:
                self.counters["deliveries_dropped_late"] += len(messages)
            else:
                subscriber.deliver_fenced(epoch, messages)
        elif kind == fenced.LEASE:
            lease = fenced.decode_lease(payload)
            subscriber = self._subscribers.get(req_id)
            if subscriber is not None:
                subscriber.lease(lease)
        elif kind == wire.SETTLED:
            settled = wire.decode_settled(payload)
            subscriber = self._subscribers.get(req_id)
            if subscriber is not None:
                subscriber.settled(settled)
        elif kind == wire.ENDED:
            code, _, text = wire.decode_refused(payload)
            subscriber = self._subscribers.pop(req_id, None)
            if subscriber is not None:
                subscriber.ended(error_of(code, text))
        elif kind in (wire.PUBLISHED, wire.SUBSCRIBED, wire.ANSWER, wire.REFUSED):
            self._answered(kind, req_id, payload)
        else:
            raise ProtocolError(f"queue frame 0x{kind:02x} to the side that asks")

    def _answered(self, kind: int, req_id: int, payload: bytes) -> None:
        answer = Answer(kind, payload)
        if kind == wire.REFUSED:
            code, answer.retry_after_ms, text = wire.decode_refused(payload)
            answer.error = error_of(code, text)
        on_answer = self._waiting.pop(req_id, None)
        if on_answer is None:
            self.counters["answers_dropped_late"] += 1
        else:
            on_answer(answer)

    def ended(self, error: Dep2pError) -> None:
        self._on_ended(self)
        waiting, self._waiting = self._waiting, {}
        for on_answer in waiting.values():
            on_answer(Answer(error=StreamClosedError(f"the link to {self.peer} ended: {error}")))
        subscribers, self._subscribers = self._subscribers, {}
        for subscriber in subscribers.values():
            subscriber.lost(error)

    def peer_half_closed(self) -> None:
        self.end(StreamClosedError("the peer closed the link"))

    def collect_counts(self) -> None:
        pass
