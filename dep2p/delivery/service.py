"""Reliable delivery in one joined realm: a message is handled once by its receiver, or the sender knows why not."""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol, cast

import trio

from dep2p.concurrency.deadline_heap import DueTimes
from dep2p.delivery.journal import Journal
from dep2p.delivery.quota import OVERHEAD_BYTES, OutboxRoom, size_of
from dep2p.delivery.receipts import Receipt, Status, Statuses
from dep2p.delivery.receiver import DeliveryInbound
from dep2p.delivery.sender import Sending
from dep2p.delivery.types import DeliveryStats, OutboxItem
from dep2p.errors import Dep2pError, MessageTooLargeError, PeerNotFoundError, StreamClosedError
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import Limits
from dep2p.links.pull_link import SessionLink
from dep2p.messaging.service import Messaging
from dep2p.messaging.trace_events import TracedStatuses
from dep2p.protocols.delivery.sender import DeliveryPolicy, Outgoing, SenderLane
from dep2p.protocols.delivery.states import ENDS, State
from dep2p.protocols.delivery.wire import BATCH_BYTES_MAX, EPOCH_BYTES, delivery_protocol
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.frame import HEADERS, Frame
from dep2p.protocols.wire.payload import HeaderEncoder, check_body, payload_bytes_max
from dep2p.realm.interface import RealmGate
from dep2p.storage.delivery_store import LaneRow, OutboxRow
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId, Rng

if TYPE_CHECKING:
    from dep2p.delivery.topic_delivery import DeliveryTopics

logger = logging.getLogger("dep2p.io")

_COUNTED: Final = {state: f"messages_{state}" for state in ENDS}
_IDLE_CHECK_S: Final = 60.0
_HEADS_MAX: Final = 256
_CHECKPOINT_MASK: Final = 7
"""One checkpoint costs a fifth of a message."""
_YIELD_ITEMS: Final = 64
"""A task that only ever sends lets others run after so many messages."""


class DeliveryGate(RealmGate, Protocol):
    """The membership, with word of who comes."""

    def subscribe_verified(self, on_verified: Callable[[Connection], None]) -> Callable[[], None]: ...


class Delivery:
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
        self.protocol = delivery_protocol(realm_id)
        self.realm_id = realm_id
        self.limits = limits
        self.gate = gate
        self.messaging = messaging
        self.journal = journal
        self._is_durable = journal.is_durable
        self.due = DueTimes()
        self.is_draining = False
        self.topic_receipts: type[Receipt] = Receipt
        self.topics: DeliveryTopics | None = None
        """Reliable publishes; set by themselves where the realm has pub/sub."""
        self._host = host
        self._rng = rng
        self.counts: Counter[str] = Counter()
        self._encoder = HeaderEncoder(limits)
        self._heads: dict[str, bytes] = {}
        self._zstd = Zstd(limits.message_bytes_max)
        self._policy = DeliveryPolicy(
            ack_timeout_s=limits.delivery_ack_timeout_s,
            retries_max=limits.delivery_retries,
            age_max_s=limits.delivery_age_max_s,
        )
        self._sending: dict[PeerId, Sending] = {}
        self.inbound = DeliveryInbound(self)
        self.room = OutboxRoom(limits.delivery_queue_items_max, limits.delivery_queue_bytes_max)
        self._since_yield = 0
        self._takes_now = False
        """Nothing is waited for before a message is accepted."""
        self._watchers: dict[Statuses, None] = {}
        self.trace_log: TraceLog | None = None
        self._nursery: trio.Nursery | None = None
        self._time: Callable[[], float] = trio.current_time

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. What the outbox has from before is sent first. Raises StoreError."""
        self._time = trio.lowlevel.current_clock().current_time  # without looking the run up for each message
        await self._restore()
        unsubscribe = [
            self.gate.subscribe_unverified(self._on_unverified),
            self.gate.subscribe_verified(self._on_verified),
        ]
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._takes_now = not self._is_durable
                try:
                    self._host.set_stream_handler(self.protocol, self.inbound.accept)
                    for sending in self._sending.values():
                        sending.resume()
                    task_status.started()
                    nursery.start_soon(self._close_idle)
                    await self.due.run()
                finally:  # before the nursery closes, which takes nothing new then
                    self._nursery = None
                    self._takes_now = False
        finally:
            self._host.remove_stream_handler(self.protocol)
            for each in unsubscribe:
                each()
            self._let_go()

    async def _restore(self) -> None:
        if not self.journal.is_durable:
            await trio.lowlevel.checkpoint()
            return
        stored = await self.journal.load(self.realm_id)
        now = trio.current_time()
        wall_us = time.time_ns() // 1000
        for peer, inbox in stored.inboxes.items():
            self.inbound.restore(PeerId(peer), inbox)
        for peer, lane in stored.lanes.items():
            self._sending[PeerId(peer)] = self._make_sending(PeerId(peer), lane.epoch, lane.next_number)
        by_peer: dict[str, list[Outgoing]] = {}
        for row in stored.rows:
            age_s = max(0.0, (wall_us - row.created_us) / 1e6)  # a clock that was set back makes nothing older
            kind = self.topic_receipts if row.topic else Receipt
            receipt = kind(
                *(row.head, row.flags, row.body, now - age_s), peer=PeerId(row.peer), name=row.name, topic=row.topic
            )
            receipt.is_restored = True
            receipt.number = row.number
            by_peer.setdefault(row.peer, []).append(receipt)
            self.room.take(receipt)
        for peer, receipts in by_peer.items():
            self._sending[PeerId(peer)].core.restore(receipts)
        if stored.rows:
            self.counts["messages_restored"] += len(stored.rows)
            logger.info("the outbox has %d messages from before for %d peers", len(stored.rows), len(by_peer))

    def _let_go(self) -> None:
        """Nobody waits for what will not happen any more."""
        for sending in self._sending.values():
            for receipt in list(sending.core.unsettled.values()):
                assert isinstance(receipt, Receipt)
                if self._is_durable:
                    receipt.left()
                else:
                    sending.core.drop(receipt.number, "this node has stopped, and its outbox is in memory")
        for watcher in list(self._watchers):
            watcher.close()
        self.room.wake_all()

    async def _close_idle(self) -> None:
        idle_s = self.limits.link_idle_timeout_s or _IDLE_CHECK_S
        while True:
            await trio.sleep(idle_s)
            for sending in self._sending.values():
                sending.close_if_idle()

    async def drain(self) -> None:
        """Take no new messages, from apps or peers, and wait for what a durable outbox would not keep."""
        self.is_draining = True
        self._takes_now = False
        self.room.wake_all()
        if self.journal.is_durable:
            await self.journal.flush()
        else:
            await self.flush()

    def start(self, task: Callable[[], Awaitable[None]]) -> bool:
        """Run a task of a part; False when nothing runs any more."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(task)
        return True

    def jitter(self) -> float:
        """Between 0 and 1."""
        return self._rng.random()

    def _on_unverified(self, connection: Connection) -> None:
        links = self.inbound.links()
        links += [each.link for each in self._sending.values() if each.link is not None]
        for link in links:
            if link.connection.id == connection.id:
                link.lose_membership()

    def _on_verified(self, connection: Connection) -> None:
        sending = self._sending.get(connection.peer)
        if sending is not None:
            sending.peer_came()

    # Sending

    async def send(
        self,
        peer: PeerId,
        name: str,
        data: bytes,
        *,
        headers: Mapping[str, object] | None = None,
        wait: bool = True,
    ) -> Receipt:
        """Accept a message for ``peer``; its handler is that of notifies ``name`` there.

        Returns when the message is in the outbox: on disk where that is durable. Then it is delivered, or the receipt
        and `statuses` say why not. Waits while the outbox is full, or with ``wait`` False raises
        DeliveryQueueFullError. Cancelled, the message may have been accepted. With room left, only every eighth call is
        a checkpoint.

        Raises MessageTooLargeError, ``ValueError`` or PeerNotFoundError for this node itself (nothing was accepted),
        StoreError (it is not on disk), StreamClosedError (this node is stopping).
        """
        if type(data) is not bytes:
            data = bytes(data)
        if len(data) > self.limits.message_bytes_max:
            check_body(data, self.limits.message_bytes_max)
        head = self._heads.get(name) if not headers else None
        if head is None:
            head = self._encode(name, headers)
        receipt = Receipt(head, HEADERS, data, self._time(), peer=peer, name=name)
        sending = self._sending.get(peer)
        if (
            sending is None
            or not self._takes_now
            or (core := sending.core).next_number >= core.free_until
            or (room := self.room).waiting
            or room.items >= room.items_max
            or (size := room.bytes + len(head) + len(data) + OVERHEAD_BYTES) > room.bytes_max
        ):
            await self.accept(receipt, wait=wait)
            return receipt
        # Nearly all: nothing to wait for. What a call costs, a fiftieth of a message, is saved where it can be.
        room.items += 1
        room.bytes = size
        core.add_now(receipt)
        self.counts["messages_accepted"] += 1
        if self._watchers:
            self._tell_watchers(receipt, State.CREATED)
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
        room = self.room
        size = size_of(receipt)
        if size > room.bytes_max:
            raise MessageTooLargeError(f"a message of {size} bytes is larger than the whole outbox")
        sending = self._sending.get(receipt.peer)
        if sending is None:
            if receipt.peer == self._host.peer_id:
                raise PeerNotFoundError(f"{receipt.peer} is this node itself: reliable messages are for other members")
            sending = self._new_sending(receipt.peer)
        has_waited = False
        if self._nursery is None or self.is_draining or room.is_full(size) or sending.core.is_full:
            sending.write_now()
            has_waited = await room.wait(size, lambda: self._may_accept(sending), wait=wait)
        room.take(receipt)
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

    async def _write(self, receipt: Receipt, sending: Sending) -> None:
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
        )

        core = sending.core

        def accepted() -> None:
            self._created(receipt)
            sending.add(receipt)
            if self._nursery is None:
                receipt.left()

        def refused() -> None:
            core.release(receipt.number)
            self.room.give(receipt)
            self.room.let_in()

        await self.journal.add(row, LaneRow(core.epoch, core.next_number), accepted, refused)

    def _created(self, receipt: Receipt) -> None:
        self.counts["messages_accepted"] += 1
        if self._watchers:
            self._tell_watchers(receipt, State.CREATED)

    def _may_accept(self, sending: Sending) -> bool:
        if self._nursery is None or self.is_draining:
            raise StreamClosedError("this node takes no more messages: it is stopping, or has left the realm")
        core = sending.core
        if core.is_full and core.is_settled:
            core.renew(self._rng.randbytes(EPOCH_BYTES))
        return not core.is_full

    def _new_sending(self, peer: PeerId) -> Sending:
        if len(self._sending) >= self.limits.peers_known_max:
            for known in [known for known, each in self._sending.items() if each.is_idle]:
                del self._sending[known]
        sending = self._sending[peer] = self._make_sending(peer, self._rng.randbytes(EPOCH_BYTES), 1)
        return sending

    def _make_sending(self, peer: PeerId, epoch: bytes, next_number: int) -> Sending:
        core = SenderLane(
            epoch, self._policy, self._changed, next_number=next_number, on_acknowledged=self._acknowledged
        )
        core.tells_all = bool(self._watchers)
        return Sending(self, peer, core, self.counts)

    def _acknowledged(self, messages: list[Outgoing]) -> None:
        """These were taken."""
        self.counts["messages_acknowledged"] += len(messages)
        receipts = cast(list[Receipt], messages)  # every lane here is given nothing else
        size = 0
        for receipt in receipts:
            size += len(receipt.head) + len(receipt.body)
            if receipt.waiting is not None:
                receipt.ended()
        self.room.give_all(len(receipts), size)
        if self._is_durable:
            for receipt in receipts:
                self.journal.remove(self.realm_id, receipt.peer, receipt.number)
        if self._watchers:
            for receipt in receipts:
                self._tell_watchers(receipt, State.ACKNOWLEDGED)

    def _changed(self, message: Outgoing) -> None:
        """A message changed its state, but not to acknowledged."""
        assert isinstance(message, Receipt)
        state = message.state
        if state in ENDS:
            self.counts[_COUNTED[state]] += 1
            self.room.give(message)
            if self._is_durable:
                self._remove_failed(self._sending[message.peer].core, message)
            message.ended()
        elif state is State.RETRYING:
            self.counts["messages_retried"] += 1
        if self._watchers:
            self._tell_watchers(message, state)

    def _remove_failed(self, core: SenderLane, message: Receipt) -> None:
        number = message.number
        core.leave(number)

        def removed() -> None:
            core.left(number)
            self.room.let_in()  # some may wait for numbers that begin anew

        self.journal.remove(self.realm_id, message.peer, number, removed)

    def _tell_watchers(self, message: Receipt, state: State) -> None:
        status = Status(message.id, message.peer, message.name, state, message.tries, message.reason)
        for watcher in self._watchers:
            watcher.put(status)

    async def flush(self) -> None:
        """Wait until every message that was accepted before has ended, one way or the other."""
        for sending in list(self._sending.values()):
            for receipt in list(sending.core.unsettled.values()):
                assert isinstance(receipt, Receipt)
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
                    dropped += sending.core.drop(receipt.number, "dropped by request")
        self.room.let_in()
        return dropped

    def retry_now(self) -> None:
        """Try again to reach every peer that something waits for, without waiting for the next try."""
        for sending in self._sending.values():
            sending.peer_came()

    def statuses(self) -> Statuses:
        """Every change of state from now on, in one ordered stream: ``async with … as statuses``."""
        return Statuses(self._watchers, self._watched)

    def traced(self, log: TraceLog) -> TracedStatuses:
        """The same for a trace."""
        return TracedStatuses(self._watchers, self._watched, log, lambda peer: self._sending[peer].core.epoch)

    def _watched(self) -> None:
        """Somebody looks from now on, or does not any more."""
        for sending in self._sending.values():
            sending.core.tells_all = bool(self._watchers)

    # Links

    def make_link(
        self,
        stream: ByteStream,
        collect: Callable[[int], list[bytes]],
        on_frames: Callable[[SessionLink, list[Frame]], None],
        on_end: Callable[[SessionLink, Dep2pError], None],
    ) -> SessionLink:
        """One end of a stream of this protocol."""
        return SessionLink(
            stream,
            self.gate,
            self.limits,
            self.counts,
            collect=collect,
            on_frames=on_frames,
            on_end=on_end,
            payload_bytes_max=max(payload_bytes_max(self.limits), BATCH_BYTES_MAX),
        )

    def zstd_for(self, connection: Connection) -> Zstd | None:
        """The compressor, when the peer offered to take compressed bodies."""
        return self._zstd if "zstd" in self.gate.features(connection) else None

    # Watching

    def outbox(self) -> list[OutboxItem]:
        """What waits, oldest first for each peer."""
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
        """What is going on now."""
        sendings = self._sending.values()
        return DeliveryStats(
            self.journal.is_durable,
            self.room.items,
            self.room.bytes,
            sum(1 for each in sendings if each.core.unsettled),
            sum(1 for each in sendings if each.link is not None),
            len(self.inbound.links()),
        )

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return {**self.counts, "messages_refused_queue_full": self.room.refused}
