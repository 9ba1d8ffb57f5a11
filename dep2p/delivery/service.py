"""Reliable delivery in one joined realm: a message is handled once by its receiver, or the sender knows why not."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import trio

from dep2p.arguments import as_bytes, check_number, check_text
from dep2p.delivery.context import DeliveryContext, DeliveryGate
from dep2p.delivery.journal import Journal
from dep2p.delivery.quota import OVERHEAD_BYTES, size_of
from dep2p.delivery.receipts import Receipt, Statuses, TopicPublish
from dep2p.delivery.receiver import DeliveryInbound, TopicReceiver
from dep2p.delivery.sender import PeerSender
from dep2p.delivery.trace_events import TracedStatuses
from dep2p.delivery.types import DeliveryStats, OutboxItem
from dep2p.errors import MessageTooLargeError, StreamClosedError
from dep2p.gossipsub.topic_types import Acknowledgement
from dep2p.host.interface import Connection, Host
from dep2p.limits import Limits
from dep2p.messaging.service import Messaging
from dep2p.outside_text import one_line
from dep2p.protocols.delivery.lost import LostMessage, LostMessages
from dep2p.protocols.delivery.sender import DeliveryPolicy, SendWindow
from dep2p.protocols.delivery.states import ENDS, DeliveryState, DeliveryStatus
from dep2p.protocols.delivery.wire import EPOCH_BYTES
from dep2p.protocols.fairness.shares import SHARE_OF_FREE
from dep2p.protocols.wire.frame import HEADERS
from dep2p.protocols.wire.payload import HeaderEncoder, check_body
from dep2p.storage.delivery_store import OutboxRow, SendWindowRow
from dep2p.token_bucket import TokenBucket
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId, Rng

logger: logging.Logger = logging.getLogger("dep2p.io")

_COUNTED: Final = {state: f"messages_{state}" for state in ENDS}
_IDLE_CHECK_S: Final = 60.0
_HEADS_MAX: Final = 256
_CHECKPOINT_MASK: Final = 7
"""One checkpoint costs a fifth of a message."""
_LOST_LINES_PER_S: Final = 0.1
"""Lines of the log about lost messages; one counts those that had none."""
_DROPPED: Final = "dropped by request"
TTL_MAX_S: Final = 30 * 86_400.0
"""Seconds that a message may wait at most: 30 days."""
_YIELD_ITEMS: Final = 64
"""A task that only ever sends lets others run after so many messages."""


def checked_ttl_s(ttl_s: float) -> float:
    """Return a time to live. Raises ``ValueError`` unless it is above 0 and at most 30 days."""
    check_number(ttl_s, "ttl_s")
    if not 0.001 <= ttl_s <= TTL_MAX_S:
        raise ValueError(f"ttl_s is {ttl_s}: it must be from 0.001 to {TTL_MAX_S:.0f} seconds (30 days)")
    return ttl_s


class DeliveryOfTopics(TopicReceiver, Protocol):
    """Both ends of reliable publishes."""

    async def publish(
        self,
        topic: str,
        body: bytes,
        by: Acknowledgement,
        wait: bool,
        *,
        origin: object | None = None,
        headers: Mapping[str, object] | None = None,
    ) -> TopicPublish:
        """Publish, and have each critical peer acknowledge. ``origin``: the handle that publishes."""
        ...


class ReliableDelivery:
    """The reliable messages of one realm, both ways. The handler of a direct one is that of notifies of its name."""

    def __init__(
        self,
        host: Host,
        gate: DeliveryGate,
        realm_id: RealmId,
        limits: Limits,
        messaging: Messaging,
        journal: Journal,
        *,
        rng: Rng,
    ) -> None:
        self.realm_id = realm_id
        context = DeliveryContext(
            realm_id,
            limits,
            gate,
            journal,
            rng=rng,
            notify_entries=messaging.notify_entries,
            fairness=messaging.fairness,
        )
        self.context: DeliveryContext = context
        self._watch_handlers = messaging.watch_notify_handlers
        self._journal = journal
        self._is_durable = journal.is_durable
        self._quota = context.quota
        self.topics: DeliveryOfTopics | None = None
        """Reliable publishes; None in a realm without pub/sub."""
        self._topic_receipts: type[Receipt] = Receipt
        self._host = host
        self.counts: Counter[str] = context.counts
        self._encoder = HeaderEncoder(limits)
        self._heads: dict[str, bytes] = {}
        self._policy = DeliveryPolicy(
            ack_timeout_s=limits.delivery_ack_timeout_s,
            retries_max=limits.delivery_retries,
            age_max_s=limits.delivery_age_max_s,
        )
        self._lost = LostMessages(limits.delivery_lost_items_max, limits.delivery_lost_bytes_max)
        self._lost_lines = TokenBucket(_LOST_LINES_PER_S, burst=8)
        self._lost_unsaid = 0
        """Lost messages since the last line of the log."""
        self._sending: dict[PeerId, PeerSender] = {}
        self.inbound: DeliveryInbound = DeliveryInbound(context)
        self._since_yield = 0
        self._takes_now = False
        """Whether a message can be accepted without any wait."""
        self._watchers: dict[Statuses, None] = {}
        self._time: Callable[[], float] = trio.current_time

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. First it sends the messages that an earlier run left. Raises StoreError."""
        self._time = trio.lowlevel.current_clock().current_time  # saves a look-up of the run for each message
        await self._restore()
        unsubscribe = [
            self.context.gate.subscribe_unverified(self._on_unverified),
            self.context.gate.subscribe_verified(self._on_verified),
            self._watch_handlers(lambda name: self.inbound.app_came(("handler", name))),
        ]
        try:
            async with trio.open_nursery() as nursery:
                self.context.nursery = nursery
                self._takes_now = not self._is_durable
                try:
                    self._host.set_stream_handler(self.context.protocol, self.inbound.accept)
                    for sending in self._sending.values():
                        sending.resume()
                    task_status.started()
                    nursery.start_soon(self._close_idle)
                    await self.context.due.run()
                finally:  # before the nursery closes, after which it takes no task
                    self.context.nursery = None
                    self._takes_now = False
        finally:
            self._host.remove_stream_handler(self.context.protocol)
            for each in unsubscribe:
                each()
            self._release_waiters()

    async def _restore(self) -> None:
        if not self._journal.is_durable:
            await trio.lowlevel.checkpoint()
            return
        stored = await self._journal.load(self.realm_id)
        now = trio.current_time()
        wall_us = time.time_ns() // 1000
        for peer, inbox in stored.inboxes.items():
            self.inbound.restore(PeerId(peer), inbox)
        for peer, window in stored.windows.items():
            self._sending[PeerId(peer)] = self._make_sending(PeerId(peer), window.epoch, window.next_number)
        by_peer: dict[str, list[Receipt]] = {}
        for row in stored.rows:
            age_s = max(0.0, (wall_us - row.created_us) / 1e6)  # a clock that was set back makes no message older
            kind = self._topic_receipts if row.topic else Receipt
            receipt = kind(
                *(row.head, row.flags, row.body, now - age_s), peer=PeerId(row.peer), name=row.name, topic=row.topic
            )
            receipt.is_restored = True
            receipt.ttl_s = row.ttl_ms / 1_000
            receipt.number = row.number
            by_peer.setdefault(row.peer, []).append(receipt)
            self._quota.acquire(receipt)
        for peer, receipts in by_peer.items():
            self._sending[PeerId(peer)].core.restore(receipts)
        self._journal.forget_lost(self.realm_id, self._lost.restore(stored.lost))
        if stored.rows:
            self.counts["messages_restored"] += len(stored.rows)
            logger.info("the outbox has %d messages from before for %d peers", len(stored.rows), len(by_peer))

    def _release_waiters(self) -> None:
        """End all waits: no message will end any more."""
        for sending in self._sending.values():
            for receipt in list(sending.core.unsettled.values()):
                if self._is_durable:
                    receipt.left()
                else:
                    sending.core.drop(receipt.number, "this node has stopped, and its outbox is in memory")
        for watcher in list(self._watchers):
            watcher.close()
        self._quota.wake_all()

    async def _close_idle(self) -> None:
        idle_s = self.context.limits.link_idle_timeout_s or _IDLE_CHECK_S
        while True:
            await trio.sleep(idle_s)
            for sending in self._sending.values():
                sending.close_if_idle()

    async def drain(self) -> None:
        """Take no new messages, from apps or peers, and wait for those that a durable outbox would not keep."""
        self.context.is_draining = True
        self._takes_now = False
        self._quota.wake_all()
        if self._journal.is_durable:
            await self._journal.flush()
        else:
            await self.flush()

    @property
    def own_peer(self) -> PeerId:
        """This node, which may send to itself: one program of it to another."""
        return self._host.peer_id

    def attach_topics(self, topics: DeliveryOfTopics, receipts: type[Receipt]) -> None:
        """Give messages for topics to ``topics``, and restore those of the outbox as ``receipts``. Before `run`."""
        self.topics = self.inbound.topic_receiver = topics
        self._topic_receipts = receipts

    def trace_to(self, log: TraceLog | None) -> None:
        """Write events of received messages to a trace; None ends that."""
        self.context.trace_log = log

    def _on_unverified(self, connection: Connection) -> None:
        links = self.inbound.links()
        links += [each.link for each in self._sending.values() if each.link is not None]
        for link in links:
            if link.connection.id == connection.id:
                link.lose_membership()

    def _on_verified(self, connection: Connection) -> None:
        sending = self._sending.get(connection.peer)
        if sending is not None:
            link = sending.link
            if link is not None and link.connection.is_superseded and link.connection.id != connection.id:
                # It may be dead without a word. What is unsettled goes out again on the new one, and arrives once.
                link.end(StreamClosedError("the peer has a newer connection"), abort=True)
            sending.peer_came()

    # Sending

    async def send(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        headers: Mapping[str, object] | None = None,
        wait: bool = True,
        ttl_s: float | None = None,
    ) -> Receipt:
        """Accept a message for ``peer``; its handler is that of notifies ``name`` there.

        Returns when the message is in the outbox: on disk where that is durable. Then it is delivered, or the receipt
        and `statuses` say why not. Waits while the outbox is full, or with ``wait`` False raises
        DeliveryQueueFullError. Cancelled, the message may have been accepted. With room left, only every eighth call is
        a checkpoint. ``ttl_s``: seconds from now until it expires, at most 30 days; ``Limits.delivery_age_max_s`` by
        default. A message that expires or fails is kept, bounded, for `lost` and `replay`.

        Raises MessageTooLargeError or ``ValueError`` (nothing was accepted), StoreError (it is not on disk), or
        StreamClosedError (this node is stopping).
        """
        if type(body) is not bytes:
            body = as_bytes(body, "the message")
        if len(body) > self.context.limits.message_bytes_max:
            check_body(body, self.context.limits.message_bytes_max)
        try:
            head = self._heads.get(name) if not headers else None
            sending = self._sending.get(peer)
        except TypeError:  # one of them is no text: `_encode` or `accept` says so
            head = sending = None
        if head is None:
            head = self._encode(name, headers)
        receipt = Receipt(head, HEADERS, body, self._time(), peer=peer, name=name)
        if ttl_s is not None:
            receipt.ttl_s = checked_ttl_s(ttl_s)
        if (
            sending is None
            or not self._takes_now
            or (core := sending.core).next_number >= core.free_until
            or (sending.link is None and self._is_over_share(sending))
            or (quota := self._quota).waiting.tasks
            or quota.items >= quota.items_max
            or (size := quota.bytes + len(head) + len(body) + OVERHEAD_BYTES) > quota.bytes_max
        ):
            await self.accept(receipt, wait=wait)
            return receipt
        # The usual case has nothing to wait for. It avoids calls: each costs a fiftieth of a message.
        quota.items += 1
        quota.bytes = size
        core.add_now(receipt)
        self.counts["messages_accepted"] += 1
        if self._watchers:
            self._notify_watchers(receipt, DeliveryState.CREATED)
        if len(core.unsent) >= sending.unsent_for_added:
            sending.added()
        since_yield = self._since_yield = self._since_yield + 1
        if since_yield >= _YIELD_ITEMS:
            self._since_yield = 0
            await trio.lowlevel.checkpoint()
        elif not since_yield & _CHECKPOINT_MASK:
            await trio.lowlevel.checkpoint_if_cancelled()
        return receipt

    def _encode(self, name: str, headers: Mapping[str, object] | None) -> bytes:
        head = self._encoder.encode(name, 0, False, headers)
        if not headers:
            if len(self._heads) >= _HEADS_MAX:
                self._heads.clear()
            self._heads[name] = head
        return head

    async def accept(self, receipt: Receipt, *, wait: bool = True) -> None:
        """Put a message into the outbox; see `send`."""
        quota = self._quota
        size = size_of(receipt)
        if size > quota.bytes_max:
            raise MessageTooLargeError(f"a message of {size} bytes is larger than the whole outbox")
        check_text(receipt.peer, "the peer")
        sending = self._sending.get(receipt.peer)
        if sending is None:
            sending = self._new_sending(receipt.peer)
        has_waited = False
        if (
            self.context.nursery is None
            or self.context.is_draining
            or quota.is_full(size)
            or sending.core.is_full
            or self._is_over_share(sending)
        ):
            sending.write_now()
            has_waited = await quota.wait(size, lambda: self._may_accept(sending), wait=wait)
        quota.acquire(receipt)
        if self._is_durable:
            receipt.number = sending.core.reserve()
            await self._write(receipt, sending)
            return
        sending.core.add_now(receipt)
        self._created(receipt)
        sending.added()
        if has_waited:
            self._since_yield = 0
        else:
            await trio.lowlevel.checkpoint()

    async def _write(self, receipt: Receipt, sending: PeerSender) -> None:
        row = OutboxRow(
            self.realm_id,
            receipt.peer,
            receipt.number,
            time.time_ns() // 1000,
            receipt.name,
            receipt.topic,
            receipt.head,
            receipt.flags,
            receipt.body,
            round(receipt.ttl_s * 1_000),
        )

        core = sending.core

        def accepted() -> None:
            self._created(receipt)
            sending.add(receipt)
            if self.context.nursery is None:
                receipt.left()

        def refused() -> None:
            core.release(receipt.number)
            self._quota.release(receipt)
            self._quota.admit()

        await self._journal.add(row, SendWindowRow(core.epoch, core.next_number), accepted, refused)

    def _created(self, receipt: Receipt) -> None:
        self.counts["messages_accepted"] += 1
        if self._watchers:
            self._notify_watchers(receipt, DeliveryState.CREATED)

    def _may_accept(self, sending: PeerSender) -> bool:
        if self.context.nursery is None or self.context.is_draining:
            raise StreamClosedError("this node takes no more messages: it is stopping, or has left the realm")
        core = sending.core
        if core.is_full and core.is_settled:
            core.renew(self.context.rng.randbytes(EPOCH_BYTES))
        return not core.is_full and not self._is_over_share(sending)

    def _is_over_share(self, sending: PeerSender) -> bool:
        """Whether a receiver that is away has its share of the outbox: the rest is for messages to others."""
        free = self._quota.items_max - self._quota.items
        return sending.link is None and free > 0 and len(sending.core.unsettled) >= SHARE_OF_FREE * free

    def _new_sending(self, peer: PeerId) -> PeerSender:
        if len(self._sending) >= self.context.limits.peers_known_max:
            for known in [known for known, each in self._sending.items() if each.is_idle]:
                del self._sending[known]
        sending = self._sending[peer] = self._make_sending(peer, self.context.rng.randbytes(EPOCH_BYTES), 1)
        return sending

    def _make_sending(self, peer: PeerId, epoch: bytes, next_number: int) -> PeerSender:
        core = SendWindow(
            epoch, self._policy, self._changed, next_number=next_number, on_acknowledged=self._acknowledged
        )
        core.reports_all = bool(self._watchers)
        return PeerSender(self.context, peer, core)

    def _acknowledged(self, receipts: list[Receipt]) -> None:
        """Release the quota of acknowledged messages, and wake their waiting tasks."""
        self.counts["messages_acknowledged"] += len(receipts)
        size = 0
        for receipt in receipts:
            size += len(receipt.head) + len(receipt.body)
            if receipt.waiting is not None:
                receipt.ended()
        self._quota.release_all(len(receipts), size)
        if self._is_durable:
            for receipt in receipts:
                self._journal.remove(self.realm_id, receipt.peer, receipt.number)
        if self._watchers:
            for receipt in receipts:
                self._notify_watchers(receipt, DeliveryState.ACKNOWLEDGED)

    def _changed(self, message: Receipt) -> None:
        """Act on a message's new state, other than acknowledged."""
        state = message.state
        if state in ENDS:
            self.counts[_COUNTED[state]] += 1
            self._quota.release(message)
            lost = None if message.reason == _DROPPED else self._lose(message)
            if self._is_durable:
                self._remove_failed(self._sending[message.peer].core, message, lost)
            message.ended()
        elif state is DeliveryState.RETRYING:
            self.counts["messages_retried"] += 1
        if self._watchers:
            self._notify_watchers(message, state)

    def _lose(self, message: Receipt) -> LostMessage:
        """Keep a message that failed or expired, and say so."""
        ended_us = time.time_ns() // 1000
        age_s = trio.current_time() - message.created_s
        lost = LostMessage(
            peer=message.peer,
            number=message.number,
            created_us=ended_us - round(age_s * 1e6),
            ended_us=ended_us,
            name=message.name,
            topic=message.topic,
            head=message.head,
            flags=message.flags,
            body=message.body,
            ttl_ms=round(message.ttl_s * 1_000),
            state=message.state.value,
            reason=message.reason,
            may_have_been_taken=message.may_have_been_taken,
        )
        forgotten = self._lost.add(lost)
        self.counts["messages_lost_forgotten"] += len(forgotten)
        self._journal.forget_lost(self.realm_id, forgotten)
        self._lost_unsaid += 1
        if not self._lost_lines.take(trio.current_time()):
            also = f" (and {self._lost_unsaid - 1} others before it)" if self._lost_unsaid > 1 else ""
            self._lost_unsaid = 0
            logger.warning(
                "a reliable message %r to %s is lost after %.0f s%s: %s; see `dep2p outbox ls --failed`",
                message.topic or message.name,
                message.peer,
                age_s,
                also,
                one_line(message.reason),
            )
        return lost

    def _remove_failed(self, core: SendWindow[Receipt], message: Receipt, lost: LostMessage | None) -> None:
        number = message.number
        core.leave(number)

        def removed() -> None:
            core.left(number)
            self._quota.admit()  # some tasks may wait for a new numbering

        self._journal.remove(self.realm_id, message.peer, number, removed, lost=lost)

    def _notify_watchers(self, message: Receipt, state: DeliveryState) -> None:
        status = DeliveryStatus(
            message.id,
            message.peer,
            message.name,
            state,
            message.tries,
            message.reason,
            self.realm_id,
            message.may_have_been_taken,
        )
        for watcher in self._watchers:
            watcher.put(status)

    async def flush(self) -> None:
        """Wait until every message that was accepted before has ended, one way or the other."""
        for sending in list(self._sending.values()):
            for receipt in list(sending.core.unsettled.values()):
                await receipt.until_ended()
        await trio.lowlevel.checkpoint()

    def drop(self, message_id: str | None = None, *, peer: PeerId | None = None) -> int:
        """Give up one message, all for a peer, or all; they end as failed. Returns how many."""
        dropped = 0
        for sending in self._sending.values():
            if peer is not None and sending.peer != peer:
                continue
            for receipt in list(sending.core.unsettled.values()):
                if message_id is None or f"{sending.peer}:{receipt.number}" == message_id:
                    dropped += sending.core.drop(receipt.number, _DROPPED)
        self._quota.admit()
        return dropped

    def lost(self) -> list[OutboxItem]:
        """List the messages that failed or expired and are still kept, in the order of their ends; the ages are those
        of today."""
        now_us = time.time_ns() // 1000
        return [
            OutboxItem(
                id=message.id,
                peer=PeerId(message.peer),
                name=message.name,
                topic=message.topic,
                state=DeliveryState(message.state),
                size_bytes=len(message.body),
                tries=0,
                age_s=max(0.0, (now_us - message.created_us) / 1e6),
                last_error=message.reason,
                may_have_been_taken=message.may_have_been_taken,
            )
            for message in self._lost.all()
        ]

    async def replay(self, message_id: str | None = None, *, peer: PeerId | None = None) -> int:
        """Send a lost message again, all for a peer, or all: each as a new message, with its time to live anew. Returns
        how many. Waits while the outbox is full.

        A crash in the middle may leave a message that was accepted among the lost ones, too. Raises StoreError,
        StreamClosedError.
        """
        replayed = 0
        for message in self._chosen_lost(message_id, peer):
            kind = self._topic_receipts if message.topic else Receipt
            receipt = kind(
                *(message.head, message.flags, message.body, trio.current_time()),
                peer=PeerId(message.peer),
                name=message.name,
                topic=message.topic,
            )
            receipt.is_restored = True
            receipt.ttl_s = message.ttl_ms / 1_000
            await self.accept(receipt)
            replayed += self.forget_lost(message.id)
        return replayed

    def forget_lost(self, message_id: str | None = None, *, peer: PeerId | None = None) -> int:
        """Forget a lost message, all for a peer, or all. Returns how many."""
        forgotten = [
            found
            for message in self._chosen_lost(message_id, peer)
            if (found := self._lost.take(message.id)) is not None
        ]
        self._journal.forget_lost(self.realm_id, forgotten)
        return len(forgotten)

    def _chosen_lost(self, message_id: str | None, peer: PeerId | None) -> list[LostMessage]:
        return [
            message
            for message in self._lost.all()
            if message_id in (None, message.id) and (peer is None or message.peer == peer)
        ]

    def retry_now(self) -> None:
        """Try again now to reach every peer with waiting messages."""
        for sending in self._sending.values():
            sending.peer_came()

    def statuses(self) -> Statuses:
        """Return all changes of state from now on, in one ordered stream: ``async with … as statuses``."""
        return Statuses(self._watchers, self._watched)

    def traced(self, log: TraceLog) -> TracedStatuses:
        """Return the same stream for a trace."""
        return TracedStatuses(self._watchers, self._watched, log, lambda peer: self._sending[peer].core.epoch)

    def _watched(self) -> None:
        """Act on watchers that came or went."""
        for sending in self._sending.values():
            sending.core.reports_all = bool(self._watchers)

    # Watching

    def outbox(self) -> list[OutboxItem]:
        """List the messages that wait, oldest first for each peer."""
        now = trio.current_time()
        items: list[OutboxItem] = []
        for sending in self._sending.values():
            error = "" if sending.link is not None else sending.last_error
            for message in sending.core.unsettled.values():
                assert isinstance(message, Receipt)
                items.append(
                    OutboxItem(
                        message.id,
                        message.peer,
                        message.name,
                        message.topic,
                        message.state,
                        len(message.body),
                        message.tries,
                        now - message.created_s,
                        error,
                    )
                )
        return items

    def stats(self) -> DeliveryStats:
        """Return counts of this moment."""
        sendings = self._sending.values()
        return DeliveryStats(
            self._journal.is_durable,
            self._quota.items,
            self._quota.bytes,
            sum(1 for each in sendings if each.core.unsettled),
            sum(1 for each in sendings if each.link is not None),
            len(self.inbound.links()),
            len(self._lost),
        )

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return {**self.counts, "messages_refused_queue_full": self._quota.refused}
