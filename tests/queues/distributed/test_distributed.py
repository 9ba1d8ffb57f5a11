"""Queues whose partitions are on several nodes: routing, assignment, handover, nodes that are away, expansion."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import (
    Dep2pError,
    PartitionMovedError,
    PeerNotFoundError,
    QueueExistsError,
    QueueIsDistributedError,
    QueueNotFoundError,
    RequestTimeoutError,
)
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.queues.admin import CreateQueue, OptionValue, QueueInfo, QueueRoute
from dep2p.protocols.queues.names import logical_partition, parse_message_id
from dep2p.protocols.queues.wire.admin import parse_request
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.api.queues import Queues
from dep2p.queues.distributed.consumer import DistributedConsumer
from dep2p.storage.memory import MemoryStore
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.nodes import REALM
from tests.queues.broker.test_exclusive import Seen, consume_all, in_order, put, until
from tests.queues.nodes import QueueSide, queue_sides

LEASE_S = 6.0


class Cluster:
    """Nodes with stores that outlive them, which can be killed and started again."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork()
        self.sides: list[QueueSide] = []
        self._nursery = nursery
        self._identities: list[Identity] = []
        self._stores: list[MemoryStore] = []
        self._scopes: list[trio.CancelScope] = []
        self._ended: list[trio.Event] = []

    async def add(self) -> None:
        self._identities.append(Identity.generate())
        self._stores.append(MemoryStore())
        self.sides.append(self._make(len(self.sides)))
        self._scopes.append(trio.CancelScope())
        self._ended.append(trio.Event())

    def _make(self, index: int) -> QueueSide:
        limits = Limits(request_timeout_s=10.0, dial_timeout_s=2.0)
        return QueueSide(self.network, limits, store=self._stores[index], identity=self._identities[index])

    async def start(self, index: int) -> None:
        side = self.sides[index]
        self._know()
        scope = self._scopes[index] = trio.CancelScope()
        ended = self._ended[index] = trio.Event()

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            try:
                with scope:
                    await side.run(task_status=task_status)
            finally:
                with trio.CancelScope(shield=True):
                    await side.engine.aclose()
                ended.set()

        await self._nursery.start(run)

    async def kill(self, index: int) -> None:
        self.sides[index].host.kill()
        self._scopes[index].cancel()
        await self._ended[index].wait()

    async def restart(self, index: int) -> None:
        self.sides[index] = self._make(index)
        await self.start(index)

    def _know(self) -> None:
        for side in self.sides:
            side.knows(*[other for other in self.sides if other is not side])


@asynccontextmanager
async def cluster(count: int) -> AsyncGenerator[Cluster, None]:
    async with trio.open_nursery() as nursery:
        made = Cluster(nursery)
        for _ in range(count):
            await made.add()
        for index in range(count):
            await made.start(index)
        yield made
        nursery.cancel_scope.cancel()


async def make(controller: Queues, nodes: list[QueueSide], partitions: int = 4, **options: OptionValue) -> QueueInfo:
    given: dict[str, OptionValue] = {"partitions": partitions, "order": "strict", "lease_s": LEASE_S, **options}
    return await controller.ask(CreateQueue(queue="jobs", options=given, nodes=tuple(side.peer for side in nodes)))


def shards(side: QueueSide) -> list[str]:
    return [name for name in side.engine.queue_names(REALM) if name.startswith("jobs.")]


def key_at(route: QueueRoute, node: str, *, count: int = 1) -> list[str]:
    """Keys whose partition is on a node."""
    mine = {each.partition for each in route.partitions if each.node == node}
    found: list[str] = []
    for number in range(10_000):
        logical = logical_partition(f"k{number}")
        if any(each.low <= logical < each.high and each.partition in mine for each in route.routes):
            found.append(f"k{number}")
            if len(found) == count:
                break
    return found


async def test_messages_go_straight_to_the_node_of_their_key(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(4) as [controller, one, two, publisher]:
        await make(controller.queues, [one, two, controller])
        assert [len(shards(side)) for side in (one, two, controller, publisher)] == [2, 1, 1, 0]
        route = await publisher.at(controller).route("jobs")
        assert all(each.is_up for each in route.partitions)
        for side in (one, two, controller):
            (key,) = key_at(route, side.peer)
            message_id = await publisher.at(controller).publish("jobs", b"x", key=key)
            assert publisher.at(controller).is_off_partition("jobs", key, message_id) is False
            partition = parse_message_id(message_id)[0]
            assert {each.partition: each.node for each in route.partitions}[partition] == side.peer
        after = await publisher.at(controller).route("jobs")
        assert sum(each.messages for each in after.partitions) == 3
        assert one.service.counters()["messages_published"] == 1  # none came by way of the controller
        # Without keys: to all of them in turn.
        for _ in range(8):
            await publisher.at(controller).publish("jobs", b"y")
        after = await publisher.at(controller).route("jobs")
        assert min(each.messages for each in after.partitions) >= 2


async def test_order_per_key_over_consumers_that_come_and_go(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(5) as [controller, one, two, publisher, other]:
        await make(controller.queues, [one, two])
        seen = Seen()
        ending = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume_all, publisher.at(controller), seen, "first")
            await put(publisher.at(controller), 40, 1, 5)
            await seen.until(100)
            nursery.start_soon(lambda: consume_all(other.at(controller), seen, "second", ending=ending, work_s=0.01))
            nursery.start_soon(consume_all, controller.queues, seen, "at controller")
            nursery.start_soon(consume_all, one.at(controller), seen, "beside a partition")
            await trio.sleep(2)  # each has one by then
            await put(publisher.at(controller), 40, 6, 15)
            await seen.until(500)
            ending.set()
            await put(publisher.at(controller), 40, 16, 20)
            await seen.until(800)
            nursery.cancel_scope.cancel()
        in_order(seen, 40, 20)
        assert {name for names in seen.by.values() for name in names} >= {"first", "second", "at controller"}


async def test_a_consumer_has_what_the_controller_assigns_and_locks_are_those_of_the_nodes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two])
        async with user.at(controller).consume("jobs", "c", exclusive=True, max_in_flight=8) as first:
            mine = first.consumer
            assert isinstance(mine, DistributedConsumer)
            await until(lambda: len(mine.partitions()) == 4)
            async with controller.queues.consume("jobs", "c", exclusive=True, max_in_flight=8) as second:
                theirs = second.consumer
                assert isinstance(theirs, DistributedConsumer)
                before_s = trio.current_time()
                await until(lambda: len(theirs.partitions()) == 2 and len(mine.partitions()) == 2)
                assert trio.current_time() - before_s < 1.0
                assert not set(mine.partitions()) & set(theirs.partitions())
                locks = (await user.at(controller).locks("jobs", "c")).locks
                assert {each.partition: each.node for each in locks} == {
                    each.partition: each.node for each in (await user.at(controller).route("jobs")).partitions
                }
                assert len((await user.at(controller).consumers("jobs", "c")).consumers) == 2
            before_s = trio.current_time()
            await until(lambda: len(mine.partitions()) == 4)
            assert trio.current_time() - before_s < 1.0


async def test_what_a_handler_has_is_done_before_the_next_consumer_gets_the_partition(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 2)
        async with user.at(controller).consume("jobs", "c", exclusive=True, max_in_flight=64) as first:
            mine = first.consumer
            assert isinstance(mine, DistributedConsumer)
            await until(lambda: len(mine.partitions()) == 2)
            await put(user.at(controller), 8, 1, 2)
            held = [await first.__anext__() for _ in range(8)]
            async with controller.queues.consume("jobs", "c", exclusive=True, max_in_flight=8) as second:
                theirs = second.consumer
                assert isinstance(theirs, DistributedConsumer)
                await trio.sleep(2)
                assert not theirs.partitions()  # not before everything of it is settled
                for message in held:
                    await message.finish()
                await until(lambda: len(theirs.partitions()) == 1 and len(mine.partitions()) == 1)
                with trio.fail_after(60):
                    assert (await second.__anext__()).attempts == 1


async def test_strict_messages_wait_in_line_for_a_node_that_is_away(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        await make(controller.queues, [controller, away], 2)
        route = await user.at(controller).route("jobs")
        (here,), (there,) = key_at(route, controller.peer), key_at(route, away.peer)
        queues = user.at(controller)
        await queues.publish("jobs", b"1", key=there)
        await nodes.kill(1)
        await queues.publish("jobs", b"1", key=here)  # others do not wait
        with pytest.raises((RequestTimeoutError, PeerNotFoundError), match="partition"):
            await queues.publish("jobs", b"lost", key=there, timeout_s=1.0)
        assert user.count("distributed_sent_off_partition") == 0
        assert [each.is_up for each in (await queues.route("jobs")).partitions] == [True, False]
        async with queues.producer("jobs", order="strict") as producer, trio.open_nursery() as nursery:
            ids: list[str] = []

            async def send(number: int) -> None:
                ids.append(await producer.publish(b"%d" % number, key=there))

            for number in (2, 3, 4):
                nursery.start_soon(send, number)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(30)
            assert not ids
            assert producer.statistics()["waiting"] == 3
            await nodes.restart(1)
        assert len(ids) == 3
        assert user.count("distributed_waited_in_key_queue") >= 2
        assert "wait in their key queues" in caplog.text
        seen = Seen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume_all, user.at(controller), seen, "")
            await seen.until(5)
            nursery.cancel_scope.cancel()
        assert (seen.numbers[there], seen.numbers[here]) == ([1, 2, 3, 4], [1])


async def test_best_effort_messages_go_elsewhere_and_it_is_said(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        await make(controller.queues, [controller, away], 2, order="best_effort")
        queues = user.at(controller)
        (there,) = key_at(await queues.route("jobs"), away.peer)
        await queues.publish("jobs", b"1", key=there)
        await nodes.kill(1)
        async with queues.producer("jobs") as producer:
            sending = await producer.send(b"2", key=there)
            message_id = await sending.wait()
            assert sending.is_off_partition
            assert producer.statistics()["taken_by_other_broker"] == 1
        assert queues.is_off_partition("jobs", there, message_id)
        began_s = trio.current_time()
        await queues.publish("jobs", b"3", key=there)  # it is known to be away
        assert trio.current_time() - began_s < 1.0
        assert user.count("distributed_sent_off_partition") == 2
        assert "go to other nodes" in caplog.text
        found = (await queues.route("jobs")).partitions
        assert [(each.is_up, each.off_partition) for each in found] == [(True, 2), (False, None)]
        await nodes.restart(1)
        await trio.sleep(6)
        assert not queues.is_off_partition("jobs", there, await queues.publish("jobs", b"4", key=there))


async def test_expansion_to_another_node_reorders_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """Keys that moved are not read before everything in the old partition is done (alibaba/rocketmq#401)."""
    async with queue_sides(5) as [controller, one, two, user, publisher]:
        await make(controller.queues, [one], 2)
        seen = Seen()
        await put(publisher.at(controller), 40, 1, 5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: consume_all(user.at(controller), seen, "a", work_s=0.05))
            await seen.until(60)
            assert len((await user.at(controller).expand("jobs", 5, nodes=[two.peer])).added) == 3
            route = await user.at(controller).route("jobs")
            assert any(each.after for each in route.routes)
            nursery.start_soon(lambda: consume_all(controller.queues, seen, "b", work_s=0.02))
            await put(publisher.at(controller), 40, 6, 10)  # with a table that is older
            await seen.until(400)
            nursery.cancel_scope.cancel()
        in_order(seen, 40, 10)
        route = await user.at(controller).route("jobs")
        by_node = Counter(each.node for each in route.partitions)
        assert by_node == {one.peer: 2, two.peer: 3}
        assert all(each.last_seq for each in route.partitions)
        with trio.fail_after(10):
            while any(each.after for each in (await user.at(controller).route("jobs")).routes):  # noqa: ASYNC110
                await trio.sleep(0.1)


async def test_a_partition_behind_its_barrier_is_nobodys(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        queues = user.at(controller)
        await put(queues, 20, 1, 1)
        async with queues.consume("jobs", "c", exclusive=True, max_in_flight=64) as messages:
            mine = messages.consumer
            assert isinstance(mine, DistributedConsumer)
            held = [await messages.__anext__() for _ in range(20)]
            [added] = (await queues.expand("jobs", 2, nodes=[controller.peer])).added
            await put(queues, 20, 2, 2)
            await trio.sleep(5)
            assert added not in mine.partitions()
            for message in held[:-1]:
                await message.finish()
            await trio.sleep(5)
            assert added not in mine.partitions()
            await held[-1].finish()
            await until(lambda: added in mine.partitions())


async def test_consumers_go_on_without_the_controller_and_come_back_to_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its lease is over meanwhile, its table and group are read from disk: nothing is lost, nothing out of order."""
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two])
        seen = Seen()
        queues = user.at(controller)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume_all, queues, seen, "first")
            nursery.start_soon(consume_all, one.at(controller), seen, "second")
            await put(queues, 20, 1, 2)
            await seen.until(40)
            await nodes.kill(0)
            await put(queues, 20, 3, 4)
            await seen.until(80)
            await trio.sleep(3 * LEASE_S)
            await put(queues, 20, 5, 6)
            await seen.until(120)
            await nodes.restart(0)
            await put(queues, 20, 7, 8)
            await seen.until(160)
            controller = nodes.sides[0]
            route = await user.at(controller).route("jobs")
            assert all(each.is_up for each in route.partitions)
            nursery.cancel_scope.cancel()
        in_order(seen, 20, 8)


async def test_an_expansion_that_was_interrupted_is_ended_after_a_restart(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(3) as nodes:
        controller, one, user = nodes.sides
        await make(controller.queues, [one], 1)
        queues = user.at(controller)
        await put(queues, 20, 1, 1)
        # Everything but the last step: the shard has given up the keys, and nobody has them.
        queue = await controller.engine.loaded(REALM, "jobs")

        def fail(_last_seq: object) -> list[int]:
            raise Dep2pError("the end")

        monkeypatch.setattr(queue, "complete_expansion", fail)
        with pytest.raises(Dep2pError, match="the end"):
            await controller.queues.expand("jobs", 2, nodes=[controller.peer])
        await nodes.kill(0)
        await nodes.restart(0)
        controller = nodes.sides[0]
        await until(lambda: len(controller.engine.registry.queues[REALM, "jobs"].locations) == 2)
        await put(user.at(controller), 20, 2, 2)
        seen = Seen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume_all, user.at(controller), seen, "")
            await seen.until(40)
            nursery.cancel_scope.cancel()
        in_order(seen, 20, 2)


async def test_nothing_is_begun_while_a_node_is_away(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        await make(controller.queues, [controller], 1)
        await nodes.kill(1)
        with pytest.raises(Dep2pError):
            await controller.queues.expand("jobs", 2, nodes=[away.peer])
        assert len((await controller.queues.route("jobs")).partitions) == 1
        await put(user.at(controller), 20, 1, 1)
        with pytest.raises(Dep2pError):
            await controller.queues.ask(
                parse_request(
                    {
                        "op": "create",
                        "queue": "other",
                        "options": {"partitions": 2},
                        "nodes": [controller.peer, away.peer],
                    }
                )
            )
        with pytest.raises(QueueNotFoundError):
            await controller.queues.info("other")


async def test_shared_consumers_get_everything_of_all_nodes(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two])
        await put(user.at(controller), 20, 1, 1)
        got: Counter[str] = Counter()
        async with user.at(controller).consume("jobs", "c", max_in_flight=8) as messages:
            with trio.fail_after(60):
                while len(got) < 20:
                    message = await messages.__anext__()
                    got[message.key] += 1
                    await message.finish(durable=True)
        assert set(got.values()) == {1}


async def test_a_push_consumer_in_fifo_mode(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two])
        seen: dict[str, list[int]] = {}
        done = trio.Event()

        async def handle(message: Any) -> None:
            await trio.sleep(0.01)
            seen.setdefault(message.key, []).append(int(message.body))
            if sum(map(len, seen.values())) == 200:
                done.set()

        async with user.at(controller).queue("jobs").consumer("c", handle, mode="fifo"):
            await put(user.at(controller), 20, 1, 5)
            async with controller.queues.queue("jobs").consumer("c", handle, mode="fifo"):
                await put(user.at(controller), 20, 6, 10)
                with trio.fail_after(300):
                    await done.wait()
        assert all(numbers == list(range(1, 11)) for numbers in seen.values())


async def test_what_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 2)
        queues = user.at(controller)
        with pytest.raises(QueueIsDistributedError):
            await queues.publish_sequenced("jobs", [WireMessage(b"", b"x")], (b"p" * 16, 1))
        route = await queues.route("jobs")
        foreign = route.partitions[1].shard
        (key,) = [each for each in key_at(route, one.peer, count=50) if logical_partition(each) < route.routes[0].high][
            :1
        ]
        with pytest.raises(PartitionMovedError):
            await user.at(one).publish(foreign, b"x", key=key)
        with pytest.raises(Dep2pError, match="only get more"):
            await queues.expand("jobs", 1)
        with pytest.raises(ValueError, match="every node"):
            await controller.queues.ask(
                parse_request(
                    {"op": "create", "queue": "q", "options": {"partitions": 1}, "nodes": [controller.peer, one.peer]}
                )
            )
        with pytest.raises(ValueError, match="at most 40"):
            await controller.queues.create("q" * 41, {}, nodes=[controller.peer])
        with pytest.raises(Dep2pError, match="administer"):  # a shard is its home's
            await user.at(one).delete(foreign)
        await controller.queues.create("plain")
        await controller.queues.publish("plain", b"x")
        with pytest.raises(QueueExistsError, match="on this node alone"):
            await controller.queues.create("plain", {}, nodes=[one.peer])
        assert (await controller.queues.info("plain")).messages == 1
        await queues.delete("jobs")
        assert not shards(one)
        with pytest.raises(QueueNotFoundError):
            await queues.publish("jobs", b"x")
