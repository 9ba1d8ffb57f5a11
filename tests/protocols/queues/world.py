"""A registry of queues over a store in memory, with the clock in the test's hands, and crashes."""

import copy
from collections.abc import Callable, Sequence

from dep2p.errors import StoreError, StoreUnknownError
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.consumer import ChannelConsumer, ChannelDelivery, ConsumerWindow
from dep2p.protocols.queues.deduplication import PendingPublish
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import StoreBatch
from dep2p.protocols.queues.registry.registry import QueueRegistry
from dep2p.storage.memory import MemoryStore
from tests.protocols.queues.trace_recorder import TraceRecorder

START_US = 1_700_000_000_000_000


class World:
    """The work of an engine, by hand: `commit` is one turn of it."""

    def __init__(self, *, cache_bytes: int = 1 << 26) -> None:
        self.store = MemoryStore()
        self.now = 1_000.0
        self.wall_us = START_US
        self.cache_bytes = cache_bytes
        self.trace = TraceRecorder()
        self.registry = self._new_registry()
        self._consumers = 0
        self.fail_next: StoreError | None = None
        self.doubt_next: bool | None = None
        """The store goes away in the next commit: before it has written (False), or after it."""
        self._doubtful: StoreBatch | None = None
        self._is_written = False

    def _new_registry(self) -> QueueRegistry:
        registry = QueueRegistry(cache_bytes=self.cache_bytes)
        registry.at(self.wall_us)
        registry.trace = self.trace = TraceRecorder()
        registry.restore(self.store.load())
        return registry

    # Time

    def sleep(self, seconds: float) -> None:
        """Time goes on, and with it what is due."""
        self.now += seconds
        self.wall_us += round(seconds * 1e6)
        self.registry.on_deadline(self.now, self.wall_us)
        self.settle()

    def crash(self) -> None:
        """The process is gone: what was not committed, too."""
        self.registry = self._new_registry()
        self._doubtful = None
        self.now = 5.0

    # Queues

    def create(self, name: str = "jobs", **options: object) -> Queue:
        queue = self.registry.create("", name, QueueOptions(**options))  # type: ignore[arg-type]  # pyright: ignore
        self.settle()
        return queue

    def queue(self, name: str = "jobs") -> Queue:
        queue = self.registry.find("", name)
        self.registry.load(queue, {each: self.store.load_partition(each) for each in queue.partition_ids})
        return queue

    def channel(self, queue: Queue, name: str = "work", **options: object) -> Channel:
        channel = queue.create_channel(name, **options)  # type: ignore[arg-type]  # pyright: ignore
        self.settle()
        return channel

    def consumer(self, channel: Channel, max_in_flight: int = 10, **options: float) -> "Taker":
        self._consumers += 1
        return Taker(self, channel, f"c{self._consumers}", max_in_flight, **options)

    def publish(self, queue: Queue, *bodies: bytes, settle: bool = True, **options: object) -> PendingPublish:
        messages = [NewMessage(body, **options) for body in bodies]  # type: ignore[arg-type]  # pyright: ignore
        publish = queue.publish(messages, lambda _publish: None, wall_us=self.wall_us)
        if settle:
            self.settle()
        return publish

    # The engine's turn

    def commit(self) -> bool:
        """One batch; False when there was nothing to do."""
        if self._doubtful is not None:
            batch, self._doubtful = self._doubtful, None
            if not self._is_written:
                self.store.commit(copy.deepcopy(batch))
            self.registry.committed(batch)
            return True
        for read in self.registry.pump(self.now, self.wall_us):
            rows = self.store.scan(read.partition, read.from_seq, items_max=read.items_max, bytes_max=read.bytes_max)
            self.registry.loaded(read, rows)
        if not self.registry.has_changes:
            return bool(self.registry.awake)
        batch = self.registry.take_changes()
        is_written, self.doubt_next = self.doubt_next, None
        if is_written is not None:
            if is_written:
                self.store.commit(copy.deepcopy(batch))
            self._doubtful, self._is_written = batch, is_written
            self.registry.uncertain(batch, StoreUnknownError("the server went away"))
            return True
        error, self.fail_next = self.fail_next, None
        if error is not None:
            self.registry.failed(batch, error)
            return True
        if not batch.is_empty:
            self.store.commit(copy.deepcopy(batch))
        self.registry.committed(batch)
        return True

    def settle(self) -> None:
        """Until nothing is to be done."""
        for _ in range(10_000):
            if not self.commit():
                return
        raise AssertionError("it never comes to rest")


class Taker:
    """A consumer that keeps what it was given."""

    def __init__(
        self,
        world: World,
        channel: Channel,
        consumer_id: str,
        max_in_flight: int,
        *,
        msg_timeout_s: float = 60.0,
        bytes_max: float = 1 << 30,
    ) -> None:
        self.world = world
        self.channel = channel
        self.got: list[ChannelDelivery] = []
        self.closed = ""
        self.core = ChannelConsumer(
            consumer_id,
            ConsumerWindow(max_in_flight, int(bytes_max), msg_timeout_s),
            on_deliver=self.got.extend,
            on_closed=self._closed,
        )
        channel.attach(self.core)
        world.settle()

    def _closed(self, reason: str) -> None:
        self.closed = reason

    def bodies(self) -> list[bytes]:
        """Return the bodies that it has received since the last look, oldest first."""
        got, self.got[:] = list(self.got), []
        return [each.message.body for each in got]

    def finish(self, *deliveries: ChannelDelivery) -> list[tuple[int, int]]:
        refused = self.channel.finish(self.core, [(each.partition, each.message.seq) for each in deliveries])
        self.world.settle()
        return refused

    def finish_all(self) -> list[bytes]:
        """Finish whatever comes until nothing comes; the bodies in their order."""
        bodies: list[bytes] = []
        while self.got:
            got, self.got[:] = list(self.got), []
            bodies += [each.message.body for each in got]
            self.finish(*got)
        return bodies

    def requeue(self, delivery: ChannelDelivery, delay_s: float = 0.0, reason: str = "") -> None:
        key = (delivery.partition, delivery.message.seq)
        self.channel.requeue(self.core, key, delay_s, reason, self.world.now)
        self.world.settle()

    def do(self, what: Callable[..., object], delivery: ChannelDelivery, *arguments: object) -> object:
        """`Channel.release`, ``reject`` or ``touch`` of a delivery."""
        answer = what(self.core, (delivery.partition, delivery.message.seq), *arguments)
        self.world.settle()
        return answer

    def leave(self) -> None:
        self.channel.detach(self.core, self.world.now)
        self.world.settle()


def seqs(deliveries: Sequence[ChannelDelivery]) -> list[int]:
    """Their numbers."""
    return [each.message.seq for each in deliveries]
