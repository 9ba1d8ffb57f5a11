"""A broker, its publishers and an exclusive channel's consumers in virtual time, with everything that can go wrong.

All cores are the real ones; links, processes and disks are simulated from one seed. A process has a clock of its own,
may be frozen for longer than a lease, and finds on waking whatever comes first. `Order` judges what handlers see.
"""

import copy
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dep2p.errors import NotInFlightError, QueueFullError
from dep2p.protocols.queues.consumer import ChannelDelivery, ConsumerWindow
from dep2p.protocols.queues.deduplication import PendingPublish
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel, ExclusiveChannelConsumer
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.ordering.group_member import Beat, Heartbeat, Lost, MemberCore, Revoked, Unlock
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.registry.registry import QueueRegistry
from dep2p.protocols.wire.cbor import encode_canonical
from dep2p.storage.memory import MemoryStore

START_US = 1_700_000_000_000_000


class OrderBrokenError(AssertionError):
    """A property does not hold."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run."""

    order: str = "strict"
    messages: int = 160
    keys: int = 7
    consumers: int = 3
    partitions: int = 2
    expansions: tuple[int, ...] = (2, 1)
    lease_s: float = 6.0
    max_attempts: int = 4
    faults: bool = True
    slow_commits: float = 0.03
    """The share of commits that take 0.4 s."""
    crash_when_told: float = 0.0
    """How often the broker crashes a moment after it has told a consumer of its partitions."""
    settle_s: float = 400.0
    """Without faults at the end: everything must be done by then."""


class Agenda:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._count), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        while self._heap and self._heap[0][0] <= until and not done():
            self.now, _, call = heapq.heappop(self._heap)
            call()


class Order:
    """Judges the starts and ends of handlers. A message is (key, number), numbered by its publisher from 1."""

    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._last: dict[str, int] = {}
        self.resolved: dict[tuple[str, int], str] = {}
        """Done by a handler, or a dead letter."""
        self._failed: dict[tuple[str, int], None] = {}
        self.inside: dict[int, list[Handler]] = {}
        """By partition."""
        self.repeats = 0
        self.reorderings = 0
        self._notified: dict[tuple[int, int], bytes] = {}

    def notified(self, partition: int, epoch: int, member: bytes) -> None:
        """A consumer hears that it holds a partition."""
        if epoch and self._notified.setdefault((partition, epoch), member) != member:
            raise OrderBrokenError(f"two consumers were given partition {partition} under the epoch {epoch}")

    def start(self, handler: "Handler") -> None:
        key, number = handler.what
        for other in self.inside.setdefault(handler.partition, []):
            if other.consumer is not handler.consumer and other.consumer.is_running:
                raise OrderBrokenError(f"two consumers are inside partition {handler.partition}: {handler.what}")
            retried = not self._is_strict and (handler.what in self._failed or other.what in self._failed)
            if other.what[0] == key and other.consumer is handler.consumer and not retried:
                raise OrderBrokenError(f"{handler.what} begins while {other.what} is in work")
        self.inside[handler.partition].append(handler)
        last = self._last.get(key, 0)
        if number <= last:
            self.repeats += 1
            if number < last:
                self.reorderings += 1
                if self._is_strict or handler.what not in self._failed:
                    raise OrderBrokenError(f"{handler.what} comes again after {last}")
            return
        for before in range(max(1, last), number):
            if (key, before) not in self.resolved and (self._is_strict or (key, before) not in self._failed):
                raise OrderBrokenError(f"{handler.what} comes before {before} is done")
        self._last[key] = number

    def end(self, handler: "Handler", outcome: str) -> None:
        self.inside[handler.partition].remove(handler)
        if outcome == "done":
            self.resolved[handler.what] = "done"
        elif outcome == "failed":
            self._failed[handler.what] = None


class Handler:
    """A message in work."""

    def __init__(self, consumer: "SimConsumer", partition: int, seq: int, epoch: int, what: tuple[str, int]) -> None:
        self.consumer = consumer
        self.partition = partition
        self.seq = seq
        self.epoch = epoch
        self.what = what
        self.is_over = False


class Link:
    """A stream between a consumer and the broker: in order, until it breaks; then what is on its way is lost."""

    def __init__(self, world: "World", consumer: "SimConsumer") -> None:
        self.world = world
        self.consumer = consumer
        self.served: ExclusiveChannelConsumer | None = None
        self.is_broken = False
        self._at = [0.0, 0.0]

    def send(self, broker_route: int, call: Callable[[], None]) -> None:
        """0: to the broker, 1: to the consumer."""
        rng = self.world.rng
        self._at[broker_route] = max(self._at[broker_route], self.world.agenda.now + rng.uniform(0.0005, 0.02))

        def arrive() -> None:
            if not self.is_broken:
                call()

        if broker_route == 0:
            self.world.agenda.at(self._at[broker_route], arrive)
        else:
            self.world.agenda.at(self._at[broker_route], lambda: self.consumer.step(arrive))

    def cut(self) -> None:
        """Both ends learn of it, the broker maybe much later."""
        if self.is_broken:
            return
        self.is_broken = True
        world, served = self.world, self.served
        broker = world.broker
        if served is not None and broker is not None:
            delay = world.rng.choice((0.01, 0.5, 20.0))
            world.agenda.after(delay, lambda: broker.detached(served) if world.broker is broker else None)
        self.consumer.step(lambda: self.consumer.link_lost(self))


class Broker:
    """A process that keeps the queue: a registry over the store. Gone with a crash; the store stays."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.offset = world.rng.uniform(0, 1_000)
        """Its monotonic clock is its own."""
        self.registry = QueueRegistry(cache_bytes=world.rng.choice((1 << 26, 20_000)))
        self.registry.at(world.wall_us)
        self.registry.restore(world.store.load())
        self.is_committing = False
        self._timer = float("inf")
        self.number = itertools.count(1)

    @property
    def now(self) -> float:
        return self.world.agenda.now + self.offset

    def open(self) -> None:
        self.queue: Queue = self.registry.find("", "jobs")
        records = {each: self.world.store.load_partition(each) for each in self.queue.partition_ids}
        self.registry.load(self.queue, records)
        channel = self.queue.channels["work"]
        assert isinstance(channel, ExclusiveChannel)
        self.channel = channel
        add_dead_letter = self.queue.add_dead_letter

        def buried(channel: Any, row: Any) -> None:
            self.world.order.resolved[_what(row.body)] = "dead"
            add_dead_letter(channel, row)

        self.queue.add_dead_letter = buried  # type: ignore[method-assign]
        self.kick()

    def kick(self) -> None:
        if not self.is_committing:
            self.is_committing = True
            self.world.agenda.after(self.world.rng.uniform(0, 0.002), self._guarded(self._turn))

    def _guarded(self, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if self.world.broker is self:
                call()

        return run

    def _turn(self) -> None:
        registry, world = self.registry, self.world
        for _ in range(50):
            reads = registry.pump(self.now, world.wall_us)
            for read in reads:
                rows = world.store.scan(
                    read.partition, read.from_seq, items_max=read.items_max, bytes_max=read.bytes_max
                )
                registry.loaded(read, rows)
            if not reads:
                break
        self._watch()
        if not registry.has_changes:
            self.is_committing = False
            return
        batch = registry.take_changes()
        wrote = copy.deepcopy(batch)

        def write() -> None:
            if not wrote.is_empty:
                world.store.commit(wrote)
            registry.committed(batch)
            self.is_committing = False
            self.kick()

        # A disk is slow now and then.
        took_s = world.rng.uniform(0.001, 0.006) if world.rng.random() >= world.plan.slow_commits else 0.4
        world.agenda.after(took_s, self._guarded(write))

    def _watch(self) -> None:
        deadline = self.registry.next_deadline()
        if deadline is not None and deadline < self._timer:
            self._timer = deadline
            soon = self.world.agenda.now + 0.001
            self.world.agenda.at(max(soon, deadline - self.offset), self._guarded(self._due))

    def _due(self) -> None:
        self._timer = float("inf")
        self.registry.on_deadline(self.now, self.world.wall_us)
        self._watch()
        self.kick()

    # Frames of consumers

    def attach(self, link: Link) -> None:
        consumer = link.consumer

        def on_deliver(deliveries: list[ChannelDelivery]) -> None:
            link.send(1, lambda: consumer.deliver(deliveries))

        def on_lease(lease: Lease) -> None:
            link.send(1, lambda: consumer.on_lease(lease))
            if lease.assigned and self.world.rng.random() < self.world.plan.crash_when_told:
                self.world.agenda.after(0.03, self._guarded(self.world.crash_broker))

        served = link.served = ExclusiveChannelConsumer(
            f"c{next(self.number)}",
            consumer.member,
            ConsumerWindow(16, 1 << 30, 25.0),
            on_deliver=on_deliver,
            on_closed=lambda _reason: None,
            on_lease=on_lease,
        )
        self.registry.at(self.world.wall_us)
        self.channel.attach(served)
        self.kick()

    def heartbeat(self, link: Link, beat: Heartbeat) -> None:
        assert link.served is not None
        self.registry.at(self.world.wall_us)
        self.channel.heartbeat(link.served, beat.beat, beat.seen, dict(beat.held), self.now)
        self.kick()

    def settle(self, partition: int, seq: int, epoch: int, kind: str) -> None:
        self.registry.at(self.world.wall_us)
        try:
            holder = self.channel.holder(partition, epoch)
            if kind == "finish":
                if self.channel.finish(holder, [(partition, seq)]):
                    raise NotInFlightError("not in flight")
            elif kind == "release":
                self.channel.release(holder, (partition, seq))
            else:
                self.channel.requeue(holder, (partition, seq), 0.0, "failed", self.now)
        except NotInFlightError:
            self.world.counts["refused"] += 1
        self.kick()

    def unlock(self, link: Link, partition: int, epoch: int) -> None:
        assert link.served is not None
        self.channel.unlock(link.served, partition, epoch)
        self.kick()

    def leave(self, link: Link) -> None:
        assert link.served is not None
        self.channel.leave(link.served, self.now)
        self.kick()

    def detached(self, served: ExclusiveChannelConsumer) -> None:
        self.channel.detach(served, self.now)
        self.kick()


class SimConsumer:
    """A process that consumes. `step` runs something in it: not while it is frozen, never after its death."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.member = number.to_bytes(16, "big")
        self.core = MemberCore()
        self.rate = world.rng.uniform(0.997, 1.003)
        self.offset = world.rng.uniform(0, 1_000)
        self.link: Link | None = None
        self.is_dead = False
        self.is_leaving = False
        self.is_frozen = False
        self._frozen: list[Callable[[], None]] = []
        self._outbox: list[tuple[str, int, int, int]] = []
        """Results that wait for a link: kind, partition, seq, epoch."""
        self._inbox: deque[Handler] = deque()
        self._working: list[Handler] = []
        self._jobs = world.rng.choice((1, 2, 8))
        self.connect()
        self._tick()

    @property
    def is_running(self) -> bool:
        return not self.is_dead and not self.is_frozen

    @property
    def now(self) -> float:
        return self.world.agenda.now * self.rate + self.offset

    def step(self, call: Callable[[], None]) -> None:
        if self.is_dead:
            return
        if self.is_frozen:
            self._frozen.append(call)
            return
        call()
        self._perform()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self.world.agenda.after(seconds / self.rate, lambda: self.step(call))

    # Faults

    def kill(self) -> None:
        self.is_dead = True
        for handler in self._working:
            self.world.order.end(handler, "killed")
        if self.link is not None:
            self.link.cut()

    def freeze(self, seconds: float) -> None:
        self.is_frozen = True
        self.world.agenda.after(seconds, self._thaw)

    def _thaw(self) -> None:
        if self.is_dead or not self.is_frozen:
            return
        self.is_frozen = False
        calls, self._frozen = self._frozen, []
        # Timers that are due are in no order to each other: the lease's, too, may come late.
        calls.insert(self.world.rng.randrange(len(calls) + 1), self._on_time)
        for call in calls:
            self.step(call)

    # Link

    def connect(self) -> None:
        if self.link is not None or self.world.broker is None:
            if self.link is None:
                self._later(0.2, self.connect)
            return
        link = self.link = Link(self.world, self)
        broker = self.world.broker
        link.send(0, lambda: broker.attach(link))
        outbox, self._outbox = self._outbox, []
        for kind, partition, seq, epoch in outbox:
            self._send_result(kind, partition, seq, epoch)
        self._beat()

    def link_lost(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.core.link_lost()
            self._later(self.world.rng.choice((0.05, 1.0, 9.0)), self.connect)

    def _tick(self) -> None:
        self._beat()
        self._later(self.core.heartbeat_s or 0.1, self._tick)

    def _beat(self) -> None:
        link, broker = self.link, self.world.broker
        if link is not None and broker is not None and not self.is_leaving:
            beat = self.core.beat(self.now)
            link.send(0, lambda: broker.heartbeat(link, beat))

    def _send_result(self, kind: str, partition: int, seq: int, epoch: int) -> None:
        link, broker = self.link, self.world.broker
        if link is None or broker is None:
            self._outbox.append((kind, partition, seq, epoch))
        else:
            link.send(0, lambda: broker.settle(partition, seq, epoch, kind))

    # Messages

    def on_lease(self, lease: Lease) -> None:
        for partition, epoch in lease.assigned:
            self.world.order.notified(partition, epoch, self.member)
        self.core.on_lease(lease, self.now)

    def deliver(self, deliveries: list[ChannelDelivery]) -> None:
        for partition, message, _attempts, _deadline, epoch in deliveries:
            if epoch and self.core.epoch_of(partition, self.now) == epoch and not self.is_leaving:
                self.core.opened(partition, epoch)
                self._inbox.append(Handler(self, partition, message.seq, epoch, _what(message.body)))
        self._work()

    def _work(self) -> None:
        while self._inbox and len(self._working) < self._jobs:
            handler = self._inbox.popleft()
            # As a program does that asks right before it begins: is this still mine?
            if self.core.epoch_of(handler.partition, self.now) != handler.epoch:
                self.core.closed(handler.partition, handler.epoch)
                continue
            self.world.order.start(handler)
            self._working.append(handler)
            rng = self.world.rng
            took_s = rng.choice((0.002, 0.02, 0.2, 2.0)) if rng.random() > 0.01 else 8.0
            is_bad = handler.what[0] == "k0" or rng.random() < 0.03
            self._later(took_s, partial(self._end, handler, is_bad))

    def _end(self, handler: Handler, is_bad: bool) -> None:
        if handler.is_over:
            return
        self._stop(handler, "failed" if is_bad else "done")
        self._send_result("requeue" if is_bad else "finish", handler.partition, handler.seq, handler.epoch)
        self.core.closed(handler.partition, handler.epoch)
        self._work()

    def _stop(self, handler: Handler, outcome: str) -> None:
        handler.is_over = True
        self._working.remove(handler)
        self.world.order.end(handler, outcome)

    # Effects

    def _on_time(self) -> None:
        self.core.on_deadline(self.now)

    def _perform(self) -> None:
        core = self.core
        while core.effects:
            effects, core.effects = core.effects, []
            for effect in effects:
                if isinstance(effect, Beat):
                    self._beat()
                elif isinstance(effect, Revoked):
                    self._drop_inbox(effect.partition, release=True)
                elif isinstance(effect, Lost):
                    self._drop_inbox(effect.partition, release=False)
                    for handler in [each for each in self._working if each.partition == effect.partition]:
                        if handler.epoch == effect.epoch:
                            self._stop(handler, "stopped")
                            core.closed(handler.partition, handler.epoch)
                else:
                    self._unlock(effect)
        self._work()
        deadline = core.next_deadline()
        if deadline is not None and deadline != getattr(self, "_watched", None):
            self._watched = deadline
            self._later(max(0.0, deadline - self.now) + 1e-6, self._on_time)
        if self.is_leaving and not self._working and not self.is_dead:
            self.leave()

    def _drop_inbox(self, partition: int, *, release: bool) -> None:
        kept: deque[Handler] = deque()
        dropped: list[Handler] = []
        for handler in self._inbox:
            (dropped if handler.partition == partition else kept).append(handler)
        self._inbox = kept
        for handler in reversed(dropped):
            if release:
                self._send_result("release", handler.partition, handler.seq, handler.epoch)
            self.core.closed(handler.partition, handler.epoch)

    def _unlock(self, unlock: Unlock) -> None:
        link, broker = self.link, self.world.broker
        if link is not None and broker is not None:
            link.send(0, lambda: broker.unlock(link, unlock.partition, unlock.epoch))

    def start_leaving(self) -> None:
        """A clean end: what runs finishes, and what waits is given back."""
        self.is_leaving = True
        for partition in {each.partition: None for each in self._inbox}:
            self._drop_inbox(partition, release=True)

    def leave(self) -> None:
        link, broker = self.link, self.world.broker
        if link is not None and broker is not None:
            self.is_dead = True
            link.send(0, lambda: broker.leave(link))


class World:
    """One run."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        self.rng = random.Random(seed)
        self.agenda = Agenda()
        self.store = MemoryStore()
        self.order = Order(self.plan.order == "strict")
        self.counts: Counter[str] = Counter()
        self.broker: Broker | None = None
        self.consumers: list[SimConsumer] = []
        self._number = itertools.count(1)
        self._sent: Counter[str] = Counter()
        self._published = 0
        self._waiting: tuple[NewMessage, int] | None = None
        broker = self.broker = Broker(self)
        options = QueueOptions(
            partitions=self.plan.partitions,
            order=self.plan.order,
            lease_s=self.plan.lease_s,
            max_attempts=self.plan.max_attempts,
        )
        queue = broker.registry.create("", "jobs", options)
        queue.create_channel("work", exclusive=True)
        batch = broker.registry.take_changes()
        self.store.commit(copy.deepcopy(batch))
        broker.registry.committed(batch)
        broker.open()

    @property
    def wall_us(self) -> int:
        return START_US + round(self.agenda.now * 1e6)

    # Publishing: one after the other, again after a crash, with the same number

    def _publish(self) -> None:
        broker = self.broker
        if broker is None:
            self.agenda.after(0.3, self._publish)
            return
        if self._waiting is None:
            if self._published >= self.plan.messages:
                return
            self._published += 1
            key = f"k{self.rng.randrange(self.plan.keys)}"
            self._sent[key] += 1
            body = f"{key} {self._sent[key]}".encode()
            self._waiting = NewMessage(body, encode_canonical({"k": key}), key), self._published
        message, number = self._waiting

        def done(publish: PendingPublish) -> None:
            if self.broker is broker and publish.error is None:
                self._waiting = None
                self.agenda.after(self.rng.choice((0.0, 0.02, 0.3)), self._publish)

        try:
            broker.queue.publish([message], done, wall_us=self.wall_us, publisher=(b"p" * 16, number))
        except QueueFullError:
            self.agenda.after(0.2, self._publish)
        broker.kick()

    # Faults

    def crash_broker(self) -> None:
        if self.broker is None:
            return
        self.counts["keeper_crashes"] += 1
        self.broker = None
        for consumer in self.consumers:
            if consumer.link is not None:
                consumer.link.cut()

        def restart() -> None:
            self.broker = Broker(self)
            self.broker.open()
            if self._waiting is not None:
                self._publish()

        self.agenda.after(self.rng.choice((0.1, 2.0, self.plan.lease_s * 1.5)), restart)

    def _expand(self, count: int) -> None:
        if self.broker is None:
            self.agenda.after(1.0, lambda: self._expand(count))
            return
        self.broker.queue.expand(count)
        self.broker.kick()
        self.counts["expansions"] += 1

    def _fault(self, until: float) -> None:
        if self.agenda.now >= until:
            return
        rng = self.rng
        alive = [each for each in self.consumers if each.is_running and not each.is_leaving]
        kind = rng.choice(("kill", "freeze", "freeze", "cut", "cut", "leave", "join", "keeper"))
        self.counts[kind] += 1
        if kind == "keeper":
            self.crash_broker()
        elif kind == "join" or not alive:
            if len(alive) < 6:
                self._join()
        elif kind == "kill":
            rng.choice(alive).kill()
            self.agenda.after(rng.uniform(0, 5), self._join)
        elif kind == "freeze":
            rng.choice(alive).freeze(self.plan.lease_s * rng.choice((0.2, 1.01, 1.5, 3.0)))
        elif kind == "cut":
            link = rng.choice(alive).link
            if link is not None:
                link.cut()
        elif kind == "leave":
            rng.choice(alive).start_leaving()
            self.agenda.after(rng.uniform(0, 5), self._join)
        self.agenda.after(rng.expovariate(1 / 3), lambda: self._fault(until))

    def _join(self) -> None:
        self.consumers.append(SimConsumer(self, next(self._number)))

    def run(self) -> "World":
        """Raises `OrderBrokenError`."""
        for _ in range(self.plan.consumers):
            self.agenda.after(self.rng.uniform(0, 1), self._join)
        self.agenda.after(0.1, self._publish)
        faults_s = 60.0 if self.plan.faults else 0.0
        if self.plan.faults:
            self.agenda.after(1.0, lambda: self._fault(faults_s))
        for index, count in enumerate(self.plan.expansions):
            self.agenda.after(self.rng.uniform(2 + 10 * index, 12 + 10 * index), partial(self._expand, count))
        self.agenda.after(faults_s + 1, self._join)
        self.agenda.run(faults_s + self.plan.settle_s, self._is_done)
        missing = [
            (key, n)
            for key, sent in self._sent.items()
            for n in range(1, sent + 1)
            if (key, n) not in self.order.resolved
        ]
        if missing or self._published < self.plan.messages:
            raise OrderBrokenError(
                f"not done at the end: {len(missing)} of {self._published}, the first are {missing[:5]}"
            )
        return self

    def _is_done(self) -> bool:
        return self._published >= self.plan.messages and len(self.order.resolved) == self.plan.messages


def _what(body: bytes) -> tuple[str, int]:
    key, number = body.decode().split()
    return key, int(number)
