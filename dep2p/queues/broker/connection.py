"""The serving end of a stream of queue frames: what one member publishes, takes and settles here."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

import trio

from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    MessageTooLargeError,
    NotOwnerError,
    OverloadedError,
    ProtocolError,
    QueueAccessError,
    QueueConsumerClosedError,
    QueueFullError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.links.link import Link
from dep2p.protocols.queues import wire
from dep2p.protocols.queues import wire_exclusive as fenced
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.wire import Delivered, QueueCode, Result, Settled, WireMessage
from dep2p.protocols.wire.cbor import decode_bounded
from dep2p.protocols.wire.frame import Frame, encode_frame
from dep2p.queues.broker.exclusive_consumer import KeptMember
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.remote.link import code_of, payload_bytes_max, text_of
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId

logger = logging.getLogger("dep2p.io")

_DELIVER_ITEMS: Final = 256
_DELIVER_BYTES: Final = 262_144
"""About so much goes into one DELIVER."""
_PUBLISHES_MAX: Final = 64
_PUBLISH_BYTES_MAX: Final = 16_777_216
"""Of one link, that are not durable yet."""
_ADMIN_MAX: Final = 16
_RECEIVING_MAX: Final = 64
"""Receives that wait."""
_SUBSCRIPTIONS_MAX: Final = 256
_RETRY_AFTER_MS: Final = 50
_IN_FLIGHT_MAX: Final = 65_536
_IN_FLIGHT_BYTES_MAX: Final = 268_435_456


class QueueHost(Protocol):
    """What a link serves: the queues of one realm that this node keeps."""

    def publish_soon(
        self,
        peer: PeerId,
        name: str,
        messages: Sequence[WireMessage],
        publisher: tuple[bytes, int] | None,
        on_done: Callable[[Sequence[tuple[int, int]], Dep2pError | None], None],
    ) -> None:
        """Take all or none of the messages, or raise; ``on_done`` is called when they are durable, or are not."""
        ...

    async def subscribe(
        self,
        peer: PeerId,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        bytes_max: int,
        from_start: bool,
        filter_text: str,
        member: bytes,
        of_placed: bool,
    ) -> LocalConsumer:
        """A consumer for a member; with a name of its own in an exclusive channel."""
        ...

    async def administer(self, peer: PeerId, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request of a member."""
        ...


class _Subscription:
    """One consumer of the peer."""

    __slots__ = ("consumer", "is_ending", "scope")

    def __init__(self) -> None:
        self.consumer: LocalConsumer | None = None
        self.scope = trio.CancelScope()
        self.is_ending = False


class ServedQueueLink(Link):
    """The serving end. `serve` runs its writer and the tasks of its subscriptions."""

    def __init__(
        self, stream: ByteStream, gate: RealmGate, limits: Limits, counters: Counter[str], host: QueueHost
    ) -> None:
        super().__init__(stream, gate, limits, counters, payload_bytes_max=payload_bytes_max(limits))
        self._host = host
        self._subscriptions: dict[int, _Subscription] = {}
        self._publishes = 0
        self._publish_bytes = 0
        self._administering = 0
        self._receiving = 0
        self._is_draining = False
        self._nursery: trio.Nursery | None = None

    async def serve(self) -> None:
        """Until the link is over; then what its consumers held is given back."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.start()
            await self.run()
            nursery.cancel_scope.cancel()

    @property
    def subscriptions(self) -> int:
        """How many consumers the peer has here."""
        return len(self._subscriptions)

    def drain(self) -> None:
        """Hand out nothing more; results are still taken."""
        self._is_draining = True
        for subscription in self._subscriptions.values():
            if subscription.consumer is not None:
                subscription.consumer.set_ready(0)

    @property
    def is_holding(self) -> bool:
        """Whether a consumer of the peer has messages that it has not settled."""
        return any(each.consumer is not None and each.consumer.core.held for each in self._subscriptions.values())

    # Frames

    def receive(self, frames: list[Frame]) -> None:
        try:
            for frame in frames:
                wire.require_request(frame)
                self._take(frame)
                if self.error is not None:
                    return
        except ProtocolError as error:
            self.violate(error)

    def _take(self, frame: Frame) -> None:
        kind, _flags, req_id, payload = frame
        if kind == wire.PUBLISH:
            self._publish(req_id, payload)
        elif kind == wire.SETTLE:
            self._settle(req_id, payload)
        elif kind == fenced.FENCED_SETTLE:
            self._settle_fenced(req_id, payload)
        elif kind == fenced.HEARTBEAT:
            self._heartbeat(req_id, payload)
        elif kind == fenced.UNLOCK:
            self._unlock(req_id, payload)
        elif kind == wire.READY:
            items, size_bytes = wire.decode_ready(payload)
            subscription = self._subscriptions.get(req_id)
            if subscription is not None and subscription.consumer is not None:
                del size_bytes  # the bytes of a subscription stay as they were asked for
                subscription.consumer.set_ready(0 if self._is_draining else min(items, _IN_FLIGHT_MAX))
        elif kind == wire.SUBSCRIBE:
            self._subscribe(req_id, payload)
        elif kind == wire.UNSUBSCRIBE:
            if payload:
                raise ProtocolError("UNSUBSCRIBE with a payload")
            subscription = self._subscriptions.get(req_id)
            if subscription is not None:
                subscription.is_ending = True
                subscription.scope.cancel()
        elif kind == wire.ADMIN:
            self._admin(req_id, payload)
        else:
            raise ProtocolError(f"queue frame 0x{kind:02x} to the side that serves")

    # Publishing

    def _publish(self, req_id: int, payload: bytes) -> None:
        batch = wire.decode_publish(payload)
        size = len(payload)
        if self._publishes >= _PUBLISHES_MAX or self._publish_bytes + size > _PUBLISH_BYTES_MAX:
            self.counters["publishes_refused_overloaded"] += len(batch.messages)
            self._refuse(req_id, OverloadedError("too much is waiting to become durable"), _RETRY_AFTER_MS)
            return
        if any(len(body) > self.limits.message_bytes_max for _, body in batch.messages):
            self._refuse(req_id, MessageTooLargeError(f"a body of more than {self.limits.message_bytes_max} bytes"))
            return
        publisher = (batch.publisher, batch.first_number) if batch.publisher else None

        def on_done(points: Sequence[tuple[int, int]], error: Dep2pError | None) -> None:
            self._publishes -= 1
            self._publish_bytes -= size
            if self.error is not None:
                return
            if error is None:
                self._put(wire.encode_published(req_id, points))
            else:
                self._refuse(req_id, error, _RETRY_AFTER_MS if isinstance(error, QueueFullError) else 0)

        self._publishes += 1
        self._publish_bytes += size
        try:
            self._host.publish_soon(self.peer, batch.queue, batch.messages, publisher, on_done)
        except (Dep2pError, ValueError) as error:
            on_done((), _public(error))
        else:
            self.counters["messages_published"] += len(batch.messages)

    # Consuming

    def _subscribe(self, req_id: int, payload: bytes) -> None:
        fields = decode_bounded(payload, "SUBSCRIBE", depth_max=2, entries_max=16)
        options = cast(dict[object, object], fields) if isinstance(fields, dict) else {}
        queue, channel = options.get("q"), options.get("c")
        items, size_bytes, from_start = options.get("n"), options.get("b"), options.get("s", False)
        filter_text, member = options.get("f", ""), options.get("x", b"")
        of_placed = options.get("p", False)
        if (
            not isinstance(queue, str)
            or not isinstance(channel, str)
            or not isinstance(items, int)
            or not isinstance(size_bytes, int)
            or not isinstance(from_start, bool)
            or not isinstance(filter_text, str)
            or not isinstance(member, bytes)
            or not isinstance(of_placed, bool)
            or len(member) not in (0, fenced.MEMBER_BYTES)
            or not 0 <= items <= _IN_FLIGHT_MAX
            or not 0 < size_bytes <= _IN_FLIGHT_BYTES_MAX
            or not all(name in ("q", "c", "n", "b", "s", "f", "x", "p") for name in options)
        ):
            raise ProtocolError("SUBSCRIBE is malformed")
        if req_id in self._subscriptions:
            raise ProtocolError(f"SUBSCRIBE with the req_id {req_id} of another one")
        nursery = self._nursery
        if len(self._subscriptions) >= _SUBSCRIPTIONS_MAX or nursery is None:
            self._refuse(req_id, OverloadedError(f"{len(self._subscriptions)} subscriptions: no more"), _RETRY_AFTER_MS)
            return
        self._subscriptions[req_id] = _Subscription()
        nursery.start_soon(
            self._serve_subscription,
            req_id,
            queue,
            channel,
            items,
            size_bytes,
            from_start,
            filter_text,
            member,
            of_placed,
        )

    async def _serve_subscription(
        self,
        req_id: int,
        queue: str,
        channel: str,
        items: int,
        size_bytes: int,
        from_start: bool,
        filter_text: str,
        member: bytes,
        of_placed: bool,
    ) -> None:
        subscription = self._subscriptions[req_id]
        try:
            with subscription.scope:
                try:
                    consumer = await self._host.subscribe(
                        self.peer,
                        queue,
                        channel,
                        max_in_flight=items,
                        bytes_max=size_bytes,
                        from_start=from_start,
                        filter_text=filter_text,
                        member=member,
                        of_placed=of_placed,
                    )
                except (Dep2pError, ValueError) as error:
                    self._refuse(req_id, _public(error))
                    return
                async with consumer:
                    subscription.consumer = consumer
                    if isinstance(consumer, KeptMember):
                        consumer.on_lease = partial(self._tell, req_id)
                    if self._is_draining:
                        consumer.set_ready(0)
                    self._put(encode_frame(wire.SUBSCRIBED, b"", req_id=req_id))
                    try:
                        await self._deliver_all(req_id, consumer)
                    except (QueueConsumerClosedError, NotOwnerError) as error:
                        self._put(wire.encode_refused(wire.ENDED, req_id, code_of(error), text_of(error)))
                    finally:
                        if isinstance(consumer, KeptMember):
                            consumer.is_leaving = subscription.is_ending
        except StreamClosedError:
            return  # the link is over
        finally:
            self._subscriptions.pop(req_id, None)

    async def _deliver_all(self, req_id: int, consumer: LocalConsumer) -> None:
        while True:
            deliveries = await consumer.receive(_DELIVER_ITEMS)
            now = trio.current_time()
            # Of an exclusive channel, what is of one partition goes together.
            batches: dict[tuple[int, int], list[Delivered]] = {}
            sizes: Counter[tuple[int, int]] = Counter()
            for partition, seq, attempts, published_us, deadline_s, attributes, body, epoch in deliveries:
                timeout_ms = max(0, round((deadline_s - now) * 1000))
                group = (partition, epoch) if epoch else (0, 0)
                batch = batches.setdefault(group, [])
                batch.append(Delivered(partition, seq, attempts, published_us, timeout_ms, attributes, body))
                sizes[group] += len(body) + len(attributes)
                if sizes[group] >= _DELIVER_BYTES:
                    await self._send_batch(req_id, epoch, batch)
                    del batches[group], sizes[group]
            for (_partition, epoch), batch in batches.items():
                await self._send_batch(req_id, epoch, batch)
            self.counters["messages_delivered"] += len(deliveries)

    async def _send_batch(self, req_id: int, epoch: int, batch: list[Delivered]) -> None:
        await self._send(
            fenced.encode_fenced_deliver(req_id, epoch, batch) if epoch else wire.encode_deliver(req_id, batch)
        )

    def _tell(self, req_id: int, lease: Lease) -> None:
        told = fenced.WireLease(lease.beat, round(lease.lease_s * 1000), lease.serial, lease.version, lease.assigned)
        self._put(fenced.encode_lease(req_id, told))

    def _member(self, req_id: int) -> KeptMember | None:
        subscription = self._subscriptions.get(req_id)
        member = None if subscription is None else subscription.consumer
        if member is not None and not isinstance(member, KeptMember):
            raise ProtocolError("a frame of exclusive channels for a subscription that shares its channel")
        return member

    def _heartbeat(self, req_id: int, payload: bytes) -> None:
        beat = fenced.decode_heartbeat(payload)
        member = self._member(req_id)
        if member is not None:
            try:
                member.heartbeat(*beat)
            except ValueError as error:
                self._put(wire.encode_refused(wire.ENDED, req_id, QueueCode.OVERLOADED, str(error)))
                self._subscriptions[req_id].scope.cancel()

    def _unlock(self, req_id: int, payload: bytes) -> None:
        partition, epoch = fenced.decode_unlock(payload)
        member = self._member(req_id)
        if member is not None:
            member.unlock(partition, epoch)

    def _settle_fenced(self, req_id: int, payload: bytes) -> None:
        epoch, ticket, results = fenced.decode_fenced_settle(payload)
        member = self._member(req_id)
        if member is None:
            self._settled_late(req_id, ticket, results)
        else:
            self._answer_settle(req_id, ticket, member, member.apply_fenced(epoch, results))

    def _settle(self, req_id: int, payload: bytes) -> None:
        ticket, results = wire.decode_settle(payload)
        subscription = self._subscriptions.get(req_id)
        if subscription is None or subscription.consumer is None:
            self._settled_late(req_id, ticket, results)
            return
        if isinstance(subscription.consumer, KeptMember):
            raise ProtocolError("SETTLE without an epoch for a subscription of an exclusive channel")
        self._answer_settle(req_id, ticket, subscription.consumer, subscription.consumer.apply(results))

    def _settled_late(self, req_id: int, ticket: int, results: Sequence[Result]) -> None:
        self.counters["results_dropped_late"] += len(results)
        if ticket:
            refused = [(each.partition, each.seq, int(QueueCode.NOT_IN_FLIGHT)) for each in results]
            self._put(wire.encode_settled(req_id, Settled(ticket, refused, [])))

    def _answer_settle(self, req_id: int, ticket: int, consumer: LocalConsumer, settled: Settled) -> None:
        settled = settled._replace(ticket=ticket)
        if ticket:
            consumer.when_durable(lambda: self._put(wire.encode_settled(req_id, settled)))
        elif settled.refused:
            self._put(wire.encode_settled(req_id, settled))

    # Administration

    def _admin(self, req_id: int, payload: bytes) -> None:
        nursery = self._nursery
        if len(payload) > wire.ADMIN_BYTES_MAX:
            raise ProtocolError(f"ADMIN of {len(payload)} bytes")
        op, fields = decode_admin(payload)
        is_full = self._receiving >= _RECEIVING_MAX if op == "receive" else self._administering >= _ADMIN_MAX
        if is_full or nursery is None:
            self._refuse(req_id, OverloadedError("too many requests of this kind at once"), _RETRY_AFTER_MS)
            return
        if op == "receive":
            self._receiving += 1
        else:
            self._administering += 1
        nursery.start_soon(self._administer, req_id, op, fields)

    async def _administer(self, req_id: int, op: str, fields: Mapping[str, object]) -> None:
        try:
            answer = await self._host.administer(self.peer, op, fields)
            frame = encode_frame(wire.ANSWER, json.dumps(answer, separators=(",", ":")).encode(), req_id=req_id)
            await self._send(frame)
        except StreamClosedError:
            return
        except (Dep2pError, ValueError) as error:
            self._refuse(req_id, _public(error))
        except Exception:
            logger.exception("an administrative request %r of %s failed", op, self.peer)
            self._refuse(req_id, StreamClosedError("an internal error"))
        finally:
            if op == "receive":
                self._receiving -= 1
            else:
                self._administering -= 1

    # Sending

    def _put(self, frame: bytes) -> None:
        if self.error is None:
            self.out.put((frame,), len(frame))

    async def _send(self, frame: bytes) -> None:
        await self.out.room(len(frame))
        if self.error is not None:
            raise StreamClosedError("the link is over")
        self.out.put((frame,), len(frame))

    def _refuse(self, req_id: int, error: Dep2pError, retry_after_ms: int = 0) -> None:
        code = code_of(error)
        self.counters[f"refused_{code.name.lower()}"] += 1
        if isinstance(error, QueueAccessError):
            logger.info("refused %s: %s", self.peer, error)
        self._put(wire.encode_refused(wire.REFUSED, req_id, code, text_of(error), retry_after_ms))

    def ended(self, error: Dep2pError) -> None:
        for subscription in self._subscriptions.values():
            subscription.scope.cancel()

    def peer_half_closed(self) -> None:
        self.end(StreamClosedError("the peer closed the link"))

    def collect_counts(self) -> None:
        pass


def decode_admin(payload: bytes) -> tuple[str, Mapping[str, object]]:
    """The operation and its fields. Raises :class:`ProtocolError`."""
    try:
        value: object = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"ADMIN is not JSON: {type(error).__name__}", ErrorCode.INVALID_REQUEST) from None
    if not isinstance(value, dict):
        raise ProtocolError("ADMIN is no object")
    fields = cast(dict[str, object], value)
    op = fields.pop("op", None)
    if not isinstance(op, str):
        raise ProtocolError("ADMIN without an operation")
    return op, fields


def _public(error: Exception) -> Dep2pError:
    return error if isinstance(error, Dep2pError) else ProtocolError(str(error))
