"""The serving end of a stream of queue frames: a member's publishes, subscriptions and results."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import trio

from dep2p.concurrency.contained import run_contained
from dep2p.encoding.shapes import is_map
from dep2p.errors import (
    Dep2pError,
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
from dep2p.links.fairness import Fairness
from dep2p.links.link import Link
from dep2p.protocols.queues.admin import AdminRequest, R, ReceiveMessages, operation_of
from dep2p.protocols.queues.names import message_id
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.wire import exclusive as fenced
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.admin import decode_admin, encode_answer, parse_request
from dep2p.protocols.queues.wire.frames import Delivered, DeliveryResult, QueueCode, Settle, Settled, WireMessage
from dep2p.protocols.wire.cbor import decode_bounded
from dep2p.protocols.wire.frame import Frame, encode_frame
from dep2p.queues.broker.exclusive_consumer import BrokerGroupMember
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.types import SubscribeOptions
from dep2p.queues.wire_errors import code_of, payload_bytes_max, text_of
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_DELIVER_ITEMS: Final = 256
_DELIVER_BYTES: Final = 262_144
"""About the bytes of one DELIVER frame."""
_PUBLISHES_MAX: Final = 64
_PUBLISH_BYTES_MAX: Final = 16_777_216
"""Bytes of one member's publishes that are not durable yet, at most."""
_ADMIN_MAX: Final = 16
"""Administrative requests of one member at work, at most."""
_RETRY_AFTER_MS: Final = 50
_IN_FLIGHT_MAX: Final = 65_536
_IN_FLIGHT_BYTES_MAX: Final = 268_435_456


class QueueHost(Protocol):
    """The queues of one realm that this node stores, as a link serves them."""

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
        options: SubscribeOptions,
        *,
        member: bytes,
    ) -> LocalConsumer:
        """Open a consumer for a member; with a ``member`` of its own in an exclusive channel."""
        ...

    async def administer(self, peer: PeerId, request: AdminRequest[R]) -> R:
        """Carry out an administrative request of a member."""
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
        self,
        stream: ByteStream,
        gate: RealmGate,
        limits: Limits,
        counters: Counter[str],
        host: QueueHost,
        fairness: Fairness,
    ) -> None:
        """``fairness``: its ledger has what the member holds over all its links: another link gives it no more."""
        super().__init__(stream, gate, limits, counters, payload_bytes_max=payload_bytes_max(limits), fairness=fairness)
        self._ledger = fairness.ledger
        self._host = host
        self._subscriptions: dict[int, _Subscription] = {}
        self._is_draining = False
        self._nursery: trio.Nursery | None = None

    async def serve(self) -> None:
        """Serve until the link is over; then release the messages that its consumers held."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.start()
            await self.run()
            nursery.cancel_scope.cancel()

    @property
    def subscriptions(self) -> int:
        """The number of the peer's consumers here."""
        return len(self._subscriptions)

    def drain(self) -> None:
        """Deliver nothing more; results still count."""
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
                del size_bytes  # the bound in bytes of a subscription stays as it was
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
        if any(len(body) > self.limits.message_bytes_max for _, body in batch.messages):
            self._refuse(req_id, MessageTooLargeError(f"a body of more than {self.limits.message_bytes_max} bytes"))
            return
        ledger, peer = self._ledger, self.peer
        if not ledger.acquire(peer, "queue_publish_bytes", size, most=_PUBLISH_BYTES_MAX):
            self._refuse_publish(req_id, len(batch.messages), f"{_PUBLISH_BYTES_MAX} bytes")
            return
        if not ledger.acquire(peer, "queue_publishes", 1, most=_PUBLISHES_MAX):
            ledger.release(peer, "queue_publish_bytes", size)
            self._refuse_publish(req_id, len(batch.messages), f"{_PUBLISHES_MAX} publishes")
            return
        publisher = (batch.publisher, batch.first_number) if batch.publisher else None

        def on_done(points: Sequence[tuple[int, int]], error: Dep2pError | None) -> None:
            ledger.release(peer, "queue_publishes", 1)
            ledger.release(peer, "queue_publish_bytes", size)
            if self.error is not None:
                return
            if error is None:
                self._put(wire.encode_published(req_id, points))
            else:
                self._refuse(req_id, error, _RETRY_AFTER_MS if isinstance(error, QueueFullError) else 0)

        try:
            self._host.publish_soon(peer, batch.queue, batch.messages, publisher, on_done)
        except (Dep2pError, ValueError) as error:
            on_done((), _public(error))
        else:
            self.counters["messages_published"] += len(batch.messages)

    def _refuse_publish(self, req_id: int, messages: int, most: str) -> None:
        self.counters["publishes_refused_overloaded"] += messages
        text = f"{most} of this member wait to become durable, the most allowed: publish more when some are answered"
        self._refuse(req_id, OverloadedError(text), _RETRY_AFTER_MS)

    # Consuming

    def _subscribe(self, req_id: int, payload: bytes) -> None:
        fields = decode_bounded(payload, "SUBSCRIBE", depth_max=2, entries_max=16)
        options: dict[object, object] = fields if is_map(fields) else {}
        queue, channel = options.get("q"), options.get("c")
        items, size_bytes, from_start = options.get("n"), options.get("b"), options.get("s", False)
        filter_text, member = options.get("f", ""), options.get("x", b"")
        of_distributed = options.get("p", False)
        if (
            not isinstance(queue, str)
            or not isinstance(channel, str)
            or not isinstance(items, int)
            or not isinstance(size_bytes, int)
            or not isinstance(from_start, bool)
            or not isinstance(filter_text, str)
            or not isinstance(member, bytes)
            or not isinstance(of_distributed, bool)
            or len(member) not in (0, fenced.MEMBER_BYTES)
            or not 0 <= items <= _IN_FLIGHT_MAX
            or not 0 < size_bytes <= _IN_FLIGHT_BYTES_MAX
            or not all(name in ("q", "c", "n", "b", "s", "f", "x", "p") for name in options)
        ):
            raise ProtocolError("SUBSCRIBE is malformed")
        if req_id in self._subscriptions:
            raise ProtocolError(f"SUBSCRIBE with the req_id {req_id} of another one")
        nursery = self._nursery
        if nursery is None:
            self._refuse(req_id, OverloadedError("the link is about to end"), _RETRY_AFTER_MS)
            return
        most = self.limits.queue_consumers_per_peer_max
        if not self._ledger.acquire(self.peer, "queue_consumers", 1, most=most):
            text = (
                f"this member has {most} consumers here, the most allowed (queue_consumers_per_peer_max): "
                "subscribe again when some are closed"
            )
            self._refuse(req_id, OverloadedError(text), _RETRY_AFTER_MS)
            return
        self._subscriptions[req_id] = _Subscription()
        serve = partial(
            self._serve_subscription,
            req_id,
            queue,
            channel,
            SubscribeOptions(
                max_in_flight=items,
                bytes_max=size_bytes,
                from_start=from_start,
                filter=filter_text,
                of_distributed=of_distributed,
            ),
            member,
        )
        nursery.start_soon(run_contained, serve, f"a subscription of {self.peer}", partial(self._fail, req_id))

    def _fail(self, req_id: int, _error: Exception) -> None:
        text = "an internal error ended the subscription: the log of the broker has it"
        self._put(wire.encode_refused(wire.ENDED, req_id, code_of(StreamClosedError(text)), text))

    async def _serve_subscription(
        self, req_id: int, queue: str, channel: str, options: SubscribeOptions, member: bytes
    ) -> None:
        subscription = self._subscriptions[req_id]
        try:
            with subscription.scope:
                try:
                    consumer = await self._host.subscribe(self.peer, queue, channel, options, member=member)
                except (Dep2pError, ValueError) as error:
                    self._refuse(req_id, _public(error))
                    return
                async with consumer:
                    subscription.consumer = consumer
                    if isinstance(consumer, BrokerGroupMember):
                        consumer.on_lease = partial(self._send_lease, req_id)
                    if self._is_draining:
                        consumer.set_ready(0)
                    self._put(encode_frame(wire.SUBSCRIBED, b"", req_id=req_id))
                    try:
                        await self._deliver_all(req_id, consumer)
                    except (QueueConsumerClosedError, NotOwnerError) as error:
                        self._put(wire.encode_refused(wire.ENDED, req_id, code_of(error), text_of(error)))
                    finally:
                        if isinstance(consumer, BrokerGroupMember):
                            consumer.is_leaving = subscription.is_ending
        except StreamClosedError:
            return  # the link is over
        finally:
            self._subscriptions.pop(req_id, None)
            self._ledger.release(self.peer, "queue_consumers", 1)

    async def _deliver_all(self, req_id: int, consumer: LocalConsumer) -> None:
        while True:
            deliveries = await consumer.receive(_DELIVER_ITEMS)
            now = trio.current_time()
            # Of an exclusive channel, what is of one partition goes together.
            batches: dict[tuple[int, int], list[Delivered]] = {}
            sizes: Counter[tuple[int, int]] = Counter()
            for partition, seq, attempts, published_us, deadline_s, attributes, body, epoch in deliveries:
                undeliverable = wire.undeliverable_because(attributes)
                if undeliverable:
                    self._reject(consumer, (partition, seq), epoch, undeliverable)
                    continue
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

    def _reject(self, consumer: LocalConsumer, key: tuple[int, int], epoch: int, reason: str) -> None:
        """Reject a message that no consumer of a member can ever take: delivered again, it would hold up those behind
        it."""
        logger.error("message %s of the queue %r %s: it is a dead letter now", message_id(*key), consumer.queue, reason)
        self.counters["messages_undeliverable"] += 1
        results = [DeliveryResult(Settle.REJECT, *key, 0, reason)]
        if epoch and isinstance(consumer, BrokerGroupMember):
            consumer.apply_fenced(epoch, results)
        else:
            consumer.apply(results)

    async def _send_batch(self, req_id: int, epoch: int, batch: list[Delivered]) -> None:
        await self._send(
            fenced.encode_fenced_deliver(req_id, epoch, batch) if epoch else wire.encode_deliver(req_id, batch)
        )

    def _send_lease(self, req_id: int, lease: Lease) -> None:
        frame = fenced.WireLease(lease.beat, round(lease.lease_s * 1000), lease.serial, lease.version, lease.assigned)
        self._put(fenced.encode_lease(req_id, frame))

    def _member(self, req_id: int) -> BrokerGroupMember | None:
        subscription = self._subscriptions.get(req_id)
        member = None if subscription is None else subscription.consumer
        if member is not None and not isinstance(member, BrokerGroupMember):
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
        if isinstance(subscription.consumer, BrokerGroupMember):
            raise ProtocolError("SETTLE without an epoch for a subscription of an exclusive channel")
        self._answer_settle(req_id, ticket, subscription.consumer, subscription.consumer.apply(results))

    def _settled_late(self, req_id: int, ticket: int, results: Sequence[DeliveryResult]) -> None:
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
        fields = decode_admin(payload)
        is_receive = fields["op"] == operation_of(ReceiveMessages)
        quota = "queue_receives" if is_receive else "queue_administration"
        most = self.limits.queue_receives_per_peer_max if is_receive else _ADMIN_MAX
        if nursery is None or not self._ledger.acquire(self.peer, quota, 1, most=most):
            text = f"{most} requests of this kind by this member are at work, the most allowed: ask again in a moment"
            self._refuse(req_id, OverloadedError(text), _RETRY_AFTER_MS)
            return
        nursery.start_soon(self._administer, req_id, fields, quota)

    async def _administer(self, req_id: int, fields: Mapping[str, object], quota: str) -> None:
        try:
            request = parse_request(fields)
            reply = await self._host.administer(self.peer, request)
            await self._send(encode_frame(wire.ANSWER, encode_answer(request, reply), req_id=req_id))
        except StreamClosedError:
            return
        except (Dep2pError, ValueError) as error:
            self._refuse(req_id, _public(error))
        except Exception:
            logger.exception("an administrative request %r of %s failed", fields["op"], self.peer)
            self._refuse(req_id, StreamClosedError("an internal error"))
        finally:
            self._ledger.release(self.peer, quota, 1)

    # Sending

    def _put(self, frame: bytes) -> None:
        if self.error is None:
            self.out.put((frame,), len(frame))

    async def _send(self, frame: bytes) -> None:
        await self.out.wait_for_space(len(frame))
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


def _public(error: Exception) -> Dep2pError:
    return error if isinstance(error, Dep2pError) else ProtocolError(str(error))
