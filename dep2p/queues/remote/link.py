"""The opener's end of a stream of queue frames: requests that wait for answers, and subscriptions that get messages."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from dep2p.errors import (
    Dep2pError,
    ProtocolError,
    StreamClosedError,
    error_from_wire,
)
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.links.link import Link
from dep2p.protocols.queues.wire import exclusive as fenced
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.frames import Delivered, Settled
from dep2p.protocols.wire.frame import Frame, FrameType, decode_error
from dep2p.queues.wire_errors import error_of, payload_bytes_max
from dep2p.realm.interface import RealmGate

_ERROR: Final = int(FrameType.ERROR)
_REQ_ID_MAX: Final = 0xFFFF_FFFF


class Subscriber(Protocol):
    """A subscription, as its link calls it from the connection's reader: nothing here blocks."""

    def deliver(self, messages: list[Delivered]) -> None:
        """Take messages."""
        ...

    def deliver_fenced(self, epoch: int, messages: list[Delivered]) -> None:
        """Take messages of one partition, in an exclusive channel."""
        ...

    def lease(self, lease: fenced.WireLease) -> None:
        """Take a lease for the consumer of an exclusive channel."""
        ...

    def settled(self, settled: Settled) -> None:
        """Take the answer to results."""
        ...

    def ended(self, error: Dep2pError) -> None:
        """The other side has ended the subscription."""
        ...

    def lost(self, error: Dep2pError) -> None:
        """The link is over."""
        ...


@dataclass(slots=True)
class LinkAnswer:
    """The answer to a request, or the error."""

    type: int = 0
    payload: bytes = b""
    error: Dep2pError | None = None
    """The refusal, or the error that ended the link (StreamClosedError)."""
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
        self._waiting: dict[int, Callable[[LinkAnswer], None]] = {}
        self._subscribers: dict[int, Subscriber] = {}
        self._next_id = 1
        self._on_ended = on_ended

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._subscribers or super().is_busy)

    def new_id(self) -> int:
        """Return a ``req_id`` that nothing on this link uses."""
        while self._next_id in self._waiting or self._next_id in self._subscribers:
            self._next_id = self._next_id % _REQ_ID_MAX + 1
        found = self._next_id
        self._next_id = found % _REQ_ID_MAX + 1
        return found

    def expect(self, req_id: int, on_answer: Callable[[LinkAnswer], None]) -> None:
        """Call ``on_answer`` once: with the answer, or with the error that ended the link."""
        self.was_used = True
        self._waiting[req_id] = on_answer

    def forget(self, req_id: int) -> None:
        """Drop a request whose caller waits no more; a late answer is ignored."""
        self._waiting.pop(req_id, None)

    def add(self, req_id: int, subscriber: Subscriber) -> None:
        """Route messages with this ``req_id`` to ``subscriber`` from now on."""
        self._subscribers[req_id] = subscriber

    def remove(self, req_id: int) -> None:
        """Remove a subscription; later messages of it are ignored."""
        self._subscribers.pop(req_id, None)

    def put(self, frame: bytes) -> None:
        """Send a frame, however many wait already. Raises StreamClosedError."""
        self.was_used = True
        self.out.put((frame,), len(frame))

    async def send(self, frame: bytes) -> None:
        """Send a frame when there is room. Raises StreamClosedError."""
        await self.out.wait_for_space(len(frame))
        self.put(frame)

    def receive(self, frames: list[Frame]) -> None:
        self.was_used: bool = True
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
        answer = LinkAnswer(kind, payload)
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
            on_answer(LinkAnswer(error=StreamClosedError(f"the link to {self.peer} ended: {error}")))
        subscribers, self._subscribers = self._subscribers, {}
        for subscriber in subscribers.values():
            subscriber.lost(error)

    def peer_half_closed(self) -> None:
        self.end(StreamClosedError("the peer closed the link"))

    def collect_counts(self) -> None:
        pass
