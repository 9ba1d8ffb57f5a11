"""A distributed queue in virtual time: its controller, a node for each partition, publishers with old tables,
consumers; all fail.

Built of the processes of `ordering_world`: a node is a broker with a store of its own; a consumer is one process with a
member at the controller, and one at each shard that the controller assigns to it. Cores are the real ones, and so is
all that the controller decides; asking a node is a call that fails while it is down.
"""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dep2p.errors import PartitionMovedError, QueueFullError
from dep2p.protocols.queues.deduplication import PendingPublish
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.ordering.placement import Placement, ShardLocation, narrowed_by, ranges_of
from dep2p.protocols.wire.cbor import encode_canonical
from dep2p.storage.memory import MemoryStore
from tests.protocols.queues.ordering.world import (
    START_US,
    Agenda,
    Broker,
    Handler,
    Order,
    OrderBrokenError,
    Plan,
    SimConsumer,
)


@dataclass(frozen=True, kw_only=True)
class DistributedPlan(Plan):
    """The settings of a run."""

    partitions: int = 3
    expansions: tuple[int, ...] = field(default=(1, 2))
    publishers: int = 2
    crash_when_asked: float = 0.0
    """How often a node crashes when it was asked how far its channel is."""


class DistributedOrder(Order):
    """A key of which a message went elsewhere has no order any more; all the others have all of it."""

    def __init__(self, is_strict: bool) -> None:
        super().__init__(is_strict)
        self.loose: dict[str, None] = {}

    def start(self, handler: Handler) -> None:
        key, number = handler.what
        if key not in self.loose:
            super().start(handler)
            return
        for other in self.inside.setdefault(handler.partition, []):
            if other.consumer is not handler.consumer and other.consumer.is_running:
                raise OrderBrokenError(f"two consumers are inside partition {handler.partition}: {handler.what}")
        self.inside[handler.partition].append(handler)
        last = self._last.get(key, 0)
        if number < last:
            self.reorderings += 1
        self._last[key] = max(last, number)


class Node:
    """A broker that crashes and starts again; for its processes, what `World` is in `ordering_world`."""

    def __init__(self, world: "DistributedWorld", first_partition: int, options: QueueOptions) -> None:
        self.world = world
        self.plan = world.plan
        self.rng = world.rng
        self.agenda = world.agenda
        self.order = world.order
        self.counts = world.counts
        self.store = MemoryStore()
        self.consumers: list[SimConsumer] = []
        self.broker: Broker | None = None
        broker = self.broker = Broker(self)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        broker.registry.new_partition_ids(first_partition - 1)  # each node has numbers of its own
        self.queue = broker.registry.create("", "jobs", options)

    @property
    def wall_us(self) -> int:
        return START_US + round(self.agenda.now * 1e6)

    def begin(self) -> None:
        """Store the queue and its channel, then open."""
        broker = self.broker
        assert broker is not None
        self.queue.create_channel("work", exclusive=True, from_start=True)
        batch = broker.registry.take_changes()
        self.store.commit(copy.deepcopy(batch))
        broker.registry.committed(batch)
        broker.open()

    def crash(self) -> None:
        if self.broker is None:
            return
        self.broker = None
        for consumer in self.consumers:
            if consumer.link is not None:
                consumer.link.cut()
        self.agenda.after(self.rng.choice((0.1, 2.0, self.plan.lease_s * 1.5)), self._restart)

    def _restart(self) -> None:
        self.broker = Broker(self)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self.broker.open()

    def when_stored(self, call: Callable[[], None]) -> None:
        """When everything until now is on disk; never, when it crashes before."""
        broker = self.broker
        assert broker is not None
        broker.registry.define("tick", next(self.world.ticks))
        broker.registry.when_committed(lambda: call() if self.broker is broker else None)
        broker.kick()


class ControllerMember(SimConsumer):
    """A consumer's part at the controller: hears what is its own."""

    def __init__(self, node: Node, number: int, process: "Process") -> None:
        self.process = process
        super().__init__(node, number)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def on_lease(self, lease: Lease) -> None:
        super().on_lease(lease)
        self.process.follow()


class Process:
    """A consumer: killed and frozen as a whole."""

    def __init__(self, world: "DistributedWorld", number: int) -> None:
        self.world = world
        self.number = number
        self.shards: dict[int, SimConsumer] = {}
        self._leaving: list[SimConsumer] = []
        self.controller = ControllerMember(world.controller, number, self)
        world.controller.consumers.append(self.controller)

    @property
    def is_running(self) -> bool:
        return self.controller.is_running

    def members(self) -> list[SimConsumer]:
        return [self.controller, *self.shards.values(), *self._leaving]

    def follow(self) -> None:
        """Do the same as `DistributedConsumer._follow`."""
        self._leaving = [each for each in self._leaving if not each.is_dead]
        wanted = self.controller.core.assigned
        for partition in [each for each in self.shards if each not in wanted]:
            member = self.shards.pop(partition)
            member.step(member.start_leaving)
            self._leaving.append(member)
        for partition in wanted:
            node = self.world.nodes.get(partition)
            is_leaving = any(each in self._leaving for each in (node.consumers if node is not None else ()))
            if partition not in self.shards and node is not None and not is_leaving:
                member = SimConsumer(node, next(self.world.numbers))  # type: ignore[arg-type]  # pyright: ignore
                self.shards[partition] = member
                node.consumers.append(member)

    def kill(self) -> None:
        for each in self.members():
            each.kill()

    def freeze(self, seconds: float) -> None:
        for each in self.members():
            if not each.is_dead:
                each.freeze(seconds)

    def leave(self) -> None:
        """It goes: shares first."""
        for each in self.members():
            each.step(each.start_leaving)


class Publisher:
    """One after the other, with a table that may be old, under numbers of its own for each shard."""

    def __init__(self, world: "DistributedWorld", index: int) -> None:
        self.world = world
        self.name = bytes([index]) * 16
        self.placement = world.table()
        self.left = world.plan.messages // world.plan.publishers
        self._index = index
        self._numbers: Counter[int] = Counter()
        self._sent: Counter[str] = Counter()
        self._turn = 0
        self._try = 0

    def next(self) -> None:
        world = self.world
        if not self.left:
            return
        self.left -= 1
        key = f"k{self._index}.{world.rng.randrange(world.plan.keys)}"
        self._sent[key] += 1
        self._turn += 1
        world.sent.append((key, self._sent[key]))
        body = f"{key} {self._sent[key]}".encode()
        self._publish(NewMessage(body, encode_canonical({"k": key}), key), None)

    def _publish(self, message: NewMessage, started: tuple[int, int] | None) -> None:
        """``started``: partition and number under which it is under way: only the same may follow."""
        world = self.world
        if started is None:
            if world.rng.random() < 0.1 and world.controller.broker is not None:
                self.placement = world.table()
            found = self.placement.candidates(
                message.key, self._turn, lambda node: world.nodes[int(node)].broker is None
            )
            partition = found[0]
            self._numbers[partition] += 1
            started = partition, self._numbers[partition]
            if self.placement.is_off_partition(message.key, partition):
                world.counts["elsewhere"] += 1
                world.order.loose[message.key] = None
        partition, number = started
        broker = world.nodes[partition].broker
        self._try += 1
        attempt = self._try

        def again() -> None:
            if self._try == attempt:
                world.counts["sent_again"] += 1
                self._publish(message, started)

        if broker is None:
            world.agenda.after(0.3, again)
            return

        def done(publish: PendingPublish) -> None:
            if self._try == attempt and world.nodes[partition].broker is broker and publish.error is None:
                self._try += 1
                world.agenda.after(world.rng.choice((0.0, 0.02, 0.3)), self.next)

        try:
            broker.queue.publish([message], done, wall_us=world.wall_us, publisher=(self.name, number))
        except PartitionMovedError:
            world.counts["moved"] += 1
            if world.controller.broker is not None:
                self.placement = world.table()
            self._try += 1
            world.agenda.after(0.1, lambda: self._publish(message, None))
            return
        except QueueFullError:
            world.agenda.after(0.2, again)
            return
        broker.kick()
        world.agenda.after(2.0, again)  # the answer was lost


class DistributedWorld:
    """One run."""

    def __init__(self, seed: int, plan: DistributedPlan | None = None) -> None:
        self.plan = plan or DistributedPlan()
        self.rng = random.Random(seed)
        self.agenda = Agenda()
        self.order = DistributedOrder(self.plan.order == "strict")
        self.counts: Counter[str] = Counter()
        self.numbers = itertools.count(1)
        self.ticks = itertools.count(1)
        self.nodes: dict[int, Node] = {}
        self.sent: list[tuple[str, int]] = []
        self.processes: list[Process] = []
        self.controller = Node(self, 1, self._options(self.plan.partitions))
        queue = self.controller.queue
        queue.set_locations({each: ShardLocation(str(each), f"jobs.{each}") for each in queue.partition_ids})
        for partition, (low, high) in ranges_of(queue.routes).items():
            self._make_node(partition, low, high)
        self.controller.begin()
        self.publishers = [Publisher(self, index) for index in range(self.plan.publishers)]
        self._narrowed: dict[int, int] = {}

    @property
    def wall_us(self) -> int:
        return START_US + round(self.agenda.now * 1e6)

    def _options(self, partitions: int) -> QueueOptions:
        plan = self.plan
        return QueueOptions(
            partitions=partitions, order=plan.order, lease_s=plan.lease_s, max_attempts=plan.max_attempts
        )

    def _make_node(self, partition: int, low: int, high: int) -> None:
        node = Node(self, partition * 1_000, self._options(1))
        node.queue.serve(low, high)
        node.begin()
        self.nodes[partition] = node

    def table(self) -> Placement:
        """Return the controller's table; only while it is up."""
        assert self.controller.broker is not None
        queue = self.controller.broker.registry.find("", "jobs")
        return Placement(queue.routes, queue.locations, queue.options.order)

    # Expansion and barriers: the steps of `QueueController`

    def _expand(self, count: int) -> None:
        broker = self.controller.broker
        if broker is None or broker.queue.pending_expansion:
            self.agenda.after(1.0, lambda: self._expand(count))
            return
        ids = broker.registry.new_partition_ids(count)
        broker.queue.plan_expansion({each: ShardLocation(str(each), f"jobs.{each}") for each in ids})
        self.controller.when_stored(lambda: None)
        self.counts["expansions"] += 1

    def _tend(self) -> None:
        """Four times a second, as the controller does."""
        self.agenda.after(0.25, self._tend)
        broker = self.controller.broker
        if broker is None:
            return
        queue = broker.queue
        if queue.pending_expansion:
            self._complete_expansion(broker)
        elif queue.routes.has_barriers:
            barriers = {barrier.partition: None for route in queue.routes.routes for barrier in route.after}
            ack_floors: dict[int, int] = {}
            for partition in barriers:
                self._ask_ack_floor(partition, ack_floors)

            def passed() -> None:
                if self.controller.broker is broker:
                    queue.passed({"work": lambda partition: ack_floors.get(partition, 0)})
                    broker.kick()

            self.agenda.after(0.2, passed)

    def _ask_ack_floor(self, partition: int, ack_floors: dict[int, int]) -> None:
        node = self.nodes[partition]
        if node.broker is None:
            return
        [local] = node.broker.queue.partition_ids
        ack_floor = node.broker.channel.ack_floor(local)
        node.when_stored(lambda: ack_floors.update({partition: ack_floor}))
        if self.rng.random() < self.plan.crash_when_asked:
            self.counts["node"] += 1
            self.agenda.after(0.001, node.crash)

    def _complete_expansion(self, broker: Broker) -> None:
        queue = broker.queue
        changed, _origin = narrowed_by(queue.routes, list(queue.pending_expansion))
        for partition in queue.pending_expansion:
            if partition not in self.nodes:
                self._make_node(partition, *changed[partition])
        answers: dict[int, int] = {}
        old = [each for each in changed if each not in queue.pending_expansion]
        for partition in old:
            node = self.nodes[partition]
            if node.broker is None:
                return  # tried again
            last_seq = node.broker.queue.serve(*changed[partition])
            node.when_stored(partial(answers.update, {partition: last_seq}))

        def stored() -> None:
            if self.controller.broker is broker and queue.pending_expansion and len(answers) == len(old):
                queue.complete_expansion(answers)
                broker.kick()

        self.agenda.after(0.1, stored)

    # Faults

    def _fault(self, until: float) -> None:
        if self.agenda.now >= until:
            return
        rng = self.rng
        alive = [each for each in self.processes if each.is_running and not each.controller.is_leaving]
        kind = rng.choice(("kill", "freeze", "freeze", "cut", "cut", "leave", "join", "home", "node", "node", "node"))
        self.counts[kind] += 1
        if kind == "home":
            self.controller.crash()
        elif kind == "node":
            self.nodes[rng.choice(list(self.nodes))].crash()
        elif kind == "join" or not alive:
            if len(alive) < 6:
                self._join()
        elif kind == "kill":
            rng.choice(alive).kill()
            self.agenda.after(rng.uniform(0, 5), self._join)
        elif kind == "freeze":
            rng.choice(alive).freeze(self.plan.lease_s * rng.choice((0.2, 1.01, 1.5, 3.0)))
        elif kind == "cut":
            link = rng.choice(rng.choice(alive).members()).link
            if link is not None:
                link.cut()
        elif kind == "leave":
            rng.choice(alive).leave()
            self.agenda.after(rng.uniform(0, 5), self._join)
        self.agenda.after(rng.expovariate(1 / 3), lambda: self._fault(until))

    def _join(self) -> None:
        self.processes.append(Process(self, next(self.numbers)))

    def run(self) -> "DistributedWorld":
        """Raises `OrderBrokenError`."""
        for _ in range(self.plan.consumers):
            self.agenda.after(self.rng.uniform(0, 1), self._join)
        for publisher in self.publishers:
            self.agenda.after(0.1, publisher.next)
        self.agenda.after(0.25, self._tend)
        faults_s = 60.0 if self.plan.faults else 0.0
        if self.plan.faults:
            self.agenda.after(1.0, lambda: self._fault(faults_s))
        for index, count in enumerate(self.plan.expansions):
            self.agenda.after(self.rng.uniform(2 + 10 * index, 12 + 10 * index), partial(self._expand, count))
        self.agenda.after(faults_s + 1, self._join)
        self.agenda.run(faults_s + self.plan.settle_s, self._is_done)
        missing = [each for each in self.sent if each not in self.order.resolved]
        left = sum(each.left for each in self.publishers)
        if missing or left:
            raise OrderBrokenError(f"not done at the end: {len(missing)} and {left} not sent, the first {missing[:5]}")
        return self

    def _is_done(self) -> bool:
        return not any(each.left for each in self.publishers) and len(self.order.resolved) == len(self.sent)
