"""A consumer of an exclusive channel: it has partitions of its own while its lease lasts, here or at another member's.

`MemberCore` decides; this class performs. A `Port` is the connection to the broker.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import trio

from dep2p.errors import Dep2pError, QueueConsumerClosedError, StreamClosedError
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.ordering.group_member import Beat, Heartbeat, Lost, MemberCore, MemberState, Revoked
from dep2p.protocols.queues.wire.frames import BATCH_ITEMS_MAX, DeliveryResult, QueueCode, Settle, Settled
from dep2p.queues.client_metrics import Handovers
from dep2p.queues.consumer import BATCH_ITEMS, Consumer
from dep2p.queues.types import MessageDelivery

logger: logging.Logger = logging.getLogger("dep2p.queues")

_HEARTBEAT_FIRST_S: Final = 1.0
"""Seconds between heartbeats until the broker has said how long leases are."""


class PartitionHold(NamedTuple):
    """A partition that a consumer holds."""

    partition: int
    epoch: int
    since_s: float
    """The time since when it is held, on trio's clock."""
    is_draining: bool
    """Whether the partition is handed over as soon as its work is done."""


class Port(Protocol):
    """The connection to the broker. Everything is sent in order, or is lost with the link."""

    def heartbeat(self, beat: Heartbeat) -> bool:
        """Send a heartbeat. Returns False when there is no link now."""
        ...

    def unlock(self, partition: int, epoch: int) -> None:
        """Release a partition's lock. Without a link the broker learns it from the next heartbeat."""
        ...

    def send_results(
        self, epoch: int, results: Sequence[DeliveryResult], on_settled: Callable[[Settled | None], None] | None
    ) -> bool:
        """Send results of one partition. ``on_settled`` is called when they are durable, or with None when the link was
        lost before that was known. Returns False when there is no link now."""
        ...

    def ready(self, max_in_flight: int) -> None:
        """Set the number of messages that may be held."""
        ...

    async def leave(self) -> None:
        """Leave the channel, when nothing is in work any more."""
        ...


class _Open:
    """A delivery that has no result yet."""

    __slots__ = ("deadline_s", "delivery", "is_lost", "scopes")

    def __init__(self, delivery: MessageDelivery) -> None:
        self.delivery = delivery
        self.deadline_s = delivery.deadline_s
        self.is_lost = False
        self.scopes: list[trio.CancelScope] = []


class ExclusiveConsumer(Consumer):
    """Made by ``consume(…, exclusive=True)``. See `Consumer`; besides:

    Work on each delivery in its `scope`: it ends with the lease, with the loss of the partition, and with the message's
    own time. A handler that ignores that cannot be stopped, but its result is refused (LOCK_LOST).
    """

    max_in_flight: int

    is_exclusive = True

    def __init__(self, port: Port, queue: str, channel: str, member: bytes, max_in_flight: int) -> None:
        self.queue = queue
        self.channel = channel
        self.member = member
        """The member's name among the channel's consumers."""
        self.max_in_flight = max_in_flight
        self.on_assigned: Callable[[], None] | None = None
        """Called after each lease of the broker."""
        self.counters: Counter[str] = Counter()
        self.handovers: Handovers = Handovers()
        self._revoked_at: dict[int, float] = {}
        self.error: Dep2pError | None = None
        self.core: MemberCore = MemberCore()
        self._port = port
        self._open: dict[tuple[int, int], _Open] = {}
        self._inbox: deque[MessageDelivery] = deque()
        self._leases: deque[Lease] = deque()
        self._results: dict[tuple[int, int], list[DeliveryResult]] = {}
        """Results to send, by partition and epoch."""
        self._confirming: dict[tuple[int, int], list[Callable[[Settled | None], None]]] = {}
        self._arrived = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()
        self._wake = trio.Event()
        self._is_stepping = False
        self._is_linked = False
        self._is_leaving = False
        self._scope = trio.CancelScope()

    # For the app

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[MessageDelivery]:
        await trio.lowlevel.checkpoint()
        while True:
            taken: list[MessageDelivery] = []
            now = trio.current_time()
            while self._inbox and len(taken) < items_max:
                delivery = self._inbox.popleft()
                if self.core.epoch_of(delivery.partition, now) == delivery.epoch and now < delivery.deadline_s:
                    taken.append(delivery)
                else:
                    self.drop(delivery)
            if taken:
                return taken
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._arrived.park()

    def settle(self, results: Sequence[DeliveryResult]) -> list[tuple[int, int, int]]:
        return self._take_results(results, None)

    def _take_results(
        self, results: Sequence[DeliveryResult], groups: dict[tuple[int, int], None] | None
    ) -> list[tuple[int, int, int]]:
        refused: list[tuple[int, int, int]] = []
        closed: list[tuple[int, int]] = []
        now = trio.current_time()
        for result in results:
            key = (result.partition, result.seq)
            open_ = self._open.get(key)
            if open_ is None or open_.is_lost or now >= self.core.lease_end:
                code = QueueCode.NOT_IN_FLIGHT if open_ is None else QueueCode.LOCK_LOST
                refused.append((*key, int(code)))
                if open_ is not None:
                    del self._open[key]
                    closed.append((result.partition, open_.delivery.epoch))
                continue
            group = (result.partition, open_.delivery.epoch)
            self._results.setdefault(group, []).append(result)
            if groups is not None:
                groups[group] = None
            if result.kind != Settle.TOUCH:
                del self._open[key]
                closed.append(group)
        for partition, epoch in closed:
            self.core.closed(partition, epoch)
        self._wake.set()
        self._step()
        return refused

    async def confirm(self, results: Sequence[DeliveryResult]) -> Settled:
        groups: dict[tuple[int, int], None] = {}
        refused = self._take_results(results, groups)
        if not groups:
            await trio.lowlevel.checkpoint()
            return Settled(0, refused, [])
        answers: list[Settled | None] = []
        done = trio.Event()

        def on_settled(settled: Settled | None) -> None:
            answers.append(settled)
            if len(answers) == len(groups):
                done.set()

        for group in groups:
            if group in self._results:
                self._confirming.setdefault(group, []).append(on_settled)
            else:  # it was sent at once, in front of an UNLOCK
                on_settled(Settled(0, [], []))
        self._flush()
        await done.wait()
        mine = {(result.partition, result.seq): None for result in results}
        touched: list[tuple[int, int, int]] = []
        now = trio.current_time()
        for settled in answers:
            if settled is None:
                raise StreamClosedError(
                    "the link to the queue was lost before it confirmed: the messages may come again"
                )
            refused += [each for each in settled.refused if each[:2] in mine]
            touched += [each for each in settled.touched if each[:2] in mine]
        for partition, seq, left_ms in touched:
            open_ = self._open.get((partition, seq))
            if open_ is not None:
                open_.deadline_s = now + left_ms / 1000
        return Settled(0, refused, touched)

    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        open_ = self._open.get((partition, seq))
        now = trio.current_time()
        return (
            open_ is not None
            and not open_.is_lost
            and now < min(open_.deadline_s, self.core.lease_end)
            and epoch in (0, open_.delivery.epoch)
        )

    def scope(self, delivery: MessageDelivery) -> trio.CancelScope:
        """Return a scope for work on a delivery: it ends with the lease, with the loss of the partition, or with the
        message's time."""
        scope = trio.CancelScope(deadline=min(delivery.deadline_s, self.core.lease_end))
        open_ = self._open.get((delivery.partition, delivery.seq))
        if open_ is None or open_.is_lost or open_.delivery.epoch != delivery.epoch:
            scope.cancel()
        else:
            open_.scopes.append(scope)
        return scope

    def limit_s(self, delivery: MessageDelivery) -> float:
        return self.core.lease_end

    def drop(self, delivery: MessageDelivery) -> None:
        key = (delivery.partition, delivery.seq)
        open_ = self._open.get(key)
        if open_ is not None and open_.delivery.epoch == delivery.epoch:
            del self._open[key]
            self.core.closed(delivery.partition, delivery.epoch)
            self._step()

    def partitions(self) -> dict[int, PartitionHold]:
        """Return the partitions that it holds now."""
        return {
            partition: PartitionHold(partition, hold.epoch, hold.since, hold.state is not MemberState.HELD)
            for partition, hold in self.core.holds.items()
            if hold.state in (MemberState.HELD, MemberState.DRAINING, MemberState.RECONNECTED)
        }

    flow_kind = "consumer"

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.error is not None

    def flow_counts(self) -> dict[str, int]:
        """Return its counts since it began."""
        return dict(self.counters)

    def flow_values(self) -> dict[str, float]:
        """Return the gauges of this moment: the number of partitions."""
        return {"partitions": len(self.partitions())}

    def lease_s_left(self) -> float:
        """Seconds that are left of the lease. At 0 or less nothing may be worked on."""
        return self.core.lease_end - trio.current_time()

    def set_ready(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._port.ready(max_in_flight)

    async def drain(self) -> None:
        """Take nothing more, release messages that wait unreceived, and return when nothing is in work here."""
        self.set_ready(0)
        while self.error is None:
            for delivery in reversed(self._inbox):
                self._open.pop((delivery.partition, delivery.seq), None)
                self.core.closed(delivery.partition, delivery.epoch)
                self._results.setdefault((delivery.partition, delivery.epoch), []).append(
                    DeliveryResult(Settle.RELEASE, delivery.partition, delivery.seq)
                )
            self._inbox.clear()
            self._flush()
            if not self._open:
                return
            await self._idle.park()

    async def aclose(self) -> None:
        """Close. Messages that wait here are released without an attempt. Messages that the app holds go to other
        consumers at once: no handler may work on them any more."""
        if self.error is None:
            for delivery in reversed(self._inbox):
                self._results.setdefault((delivery.partition, delivery.epoch), []).append(
                    DeliveryResult(Settle.RELEASE, delivery.partition, delivery.seq)
                )
            self._flush()
            self._is_leaving = True
            await self._port.leave()
            self.close(QueueConsumerClosedError("the consumer was closed"))
        await trio.lowlevel.checkpoint()

    def close(self, error: Dep2pError) -> None:
        """End with an error."""
        if self.error is not None:
            return
        self.error = error
        self._lose_link()
        for open_ in self._open.values():
            self._lose(open_)
        self._open.clear()
        self._inbox.clear()
        self._results.clear()
        self._arrived.unpark_all()
        self._idle.unpark_all()
        self._scope.cancel()

    # Life

    async def run(self) -> None:
        """Send heartbeats and results, and keep time, until it is closed."""
        with self._scope:
            beat_at = 0.0
            while True:
                self._wake = trio.Event()
                now = trio.current_time()
                self._expire(now)
                self.core.on_deadline(now)
                self._step()
                self._flush()
                if now >= beat_at:
                    self._beat()
                    beat_at = now + (self.core.heartbeat_s or _HEARTBEAT_FIRST_S)
                deadline = self.core.next_deadline()
                with trio.move_on_at(beat_at if deadline is None else min(beat_at, deadline)):
                    await self._wake.wait()
                await trio.lowlevel.checkpoint()

    def _expire(self, now: float) -> None:
        """Drop deliveries whose time is over: other consumers have them by now, and their scopes have cancelled the
        handlers."""
        for key in [key for key, open_ in self._open.items() if open_.deadline_s <= now]:
            delivery = self._open.pop(key).delivery
            self.core.closed(delivery.partition, delivery.epoch)

    # From the broker

    def linked(self) -> None:
        """Act on a link: the first, or a new one."""
        self._is_linked = True
        self._flush()
        self._beat()

    def link_lost(self) -> None:
        """Act on a lost link. Locks and lease stay; unsent results go over the next link."""
        self._lose_link()
        if self._is_leaving:
            return
        self.core.link_lost()
        self._step()

    def _lose_link(self) -> None:
        self._is_linked = False
        confirming, self._confirming = self._confirming, {}
        for calls in confirming.values():
            for call in calls:
                call(None)

    def lease_arrived(self, lease: Lease) -> None:
        """Take a lease that the broker sent."""
        self._leases.append(lease)
        self._step()

    def arrived(self, deliveries: Sequence[MessageDelivery]) -> None:
        """Take messages."""
        now = trio.current_time()
        for delivery in deliveries:
            partition, epoch = delivery.partition, delivery.epoch
            if self.core.epoch_of(partition, now) == epoch:
                before = self._open.get((partition, delivery.seq))
                if before is not None:  # its time was over at the broker
                    self.core.closed(partition, before.delivery.epoch)
                    self._lose(before)
                self._open[partition, delivery.seq] = _Open(delivery)
                self.core.opened(partition, epoch)
                self._inbox.append(delivery)
                continue
            self.counters["deliveries_not_taken"] += 1
            hold = self.core.holds.get(partition)
            if hold is not None and hold.epoch == epoch and hold.state is not MemberState.ENDING:
                # The partition is being handed over: release the message without an attempt.
                self._results.setdefault((partition, epoch), []).append(
                    DeliveryResult(Settle.RELEASE, partition, delivery.seq)
                )
                self._wake.set()
        self._arrived.unpark_all()

    # Inside

    def _step(self) -> None:
        """Perform what the core decides; not reentrant."""
        if self._is_stepping or self.error is not None:
            return
        self._is_stepping = True
        core = self.core
        is_notified = bool(self._leases)
        try:
            while self._leases or core.effects:
                if self._leases:
                    end = core.lease_end
                    core.on_lease(self._leases.popleft(), trio.current_time())
                    while core.taken_s:
                        self.handovers.taken.add(core.taken_s.pop())
                    if core.lease_end != end:
                        self._extend()
                        self._wake.set()
                effects, core.effects = core.effects, []
                for effect in effects:
                    if isinstance(effect, Beat):
                        self._beat()
                    elif isinstance(effect, Revoked):
                        self._revoked_at[effect.partition] = trio.current_time()
                        self._revoke(effect.partition)
                    elif isinstance(effect, Lost):
                        self._lost(effect)
                    else:
                        self._flush()
                        self._port.unlock(effect.partition, effect.epoch)
                        now = trio.current_time()
                        self.handovers.given.add(now - self._revoked_at.pop(effect.partition, now))
        finally:
            self._is_stepping = False
        if not self._open:
            self._idle.unpark_all()
        if is_notified and self.on_assigned is not None:
            self.on_assigned()

    def _extend(self) -> None:
        for open_ in self._open.values():
            for scope in open_.scopes:
                scope.deadline = min(open_.deadline_s, self.core.lease_end)

    def _beat(self) -> None:
        if self._is_linked:
            self._flush()  # a partition is asked for anew when its results were sent
            self._port.heartbeat(self.core.beat(trio.current_time()))

    def _revoke(self, partition: int) -> None:
        self._wake.set()
        for delivery in reversed(self._take_from_inbox(partition)):
            del self._open[partition, delivery.seq]
            self._results.setdefault((partition, delivery.epoch), []).append(
                DeliveryResult(Settle.RELEASE, partition, delivery.seq)
            )
            self.core.closed(partition, delivery.epoch)
        self._notify_revoked(partition)

    def _lost(self, lost: Lost) -> None:
        self.counters["partitions_lost"] += 1
        for delivery in self._take_from_inbox(lost.partition):
            del self._open[lost.partition, delivery.seq]
            self.core.closed(lost.partition, delivery.epoch)
        for (partition, _seq), open_ in self._open.items():
            if partition == lost.partition and open_.delivery.epoch == lost.epoch:
                self._lose(open_)
        self.counters["results_dropped_late"] += len(self._results.pop((lost.partition, lost.epoch), ()))
        for call in self._confirming.pop((lost.partition, lost.epoch), ()):
            call(None)
        self._notify_revoked(lost.partition)

    def _lose(self, open_: _Open) -> None:
        open_.is_lost = True
        # Its handler is cancelled now. A handler that does not report its end (`drop`) counts as ended a while later.
        open_.deadline_s = min(open_.deadline_s, trio.current_time() + (self.core.heartbeat_s or _HEARTBEAT_FIRST_S))
        for scope in open_.scopes:
            scope.cancel()

    def _take_from_inbox(self, partition: int) -> list[MessageDelivery]:
        taken = [each for each in self._inbox if each.partition == partition]
        if taken:
            self._inbox = deque(each for each in self._inbox if each.partition != partition)
        return taken

    def _notify_revoked(self, partition: int) -> None:
        if self.on_revoke is not None:
            try:
                self.on_revoke(partition)
            except Exception:
                logger.exception("on_revoke of the consumer of %r failed", self.queue)

    def _flush(self) -> None:
        for group in list(self._results):
            results = self._results[group]
            calls = self._confirming.pop(group, [])
            on_settled = None if not calls else _all(calls)
            while len(results) > BATCH_ITEMS_MAX and self._port.send_results(group[1], results[:BATCH_ITEMS_MAX], None):
                del results[:BATCH_ITEMS_MAX]
            if self._port.send_results(group[1], results, on_settled):
                del self._results[group]
            elif on_settled is not None:
                self._confirming[group] = calls


def _all(calls: Sequence[Callable[[Settled | None], None]]) -> Callable[[Settled | None], None]:
    def call_all(settled: Settled | None) -> None:
        for call in calls:
            call(settled)

    return call_all
