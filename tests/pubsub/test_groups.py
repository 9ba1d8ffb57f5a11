"""Groups of subscriptions: one of a group gets each message, whoever publishes it and whichever reader goes."""

from collections import Counter
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from dep2p import Node, NotInRealmError, Subscription, TopicMessage
from dep2p.protocols.realm.statement import GROUPS_MAX, TopicGroup
from dep2p.protocols.services.group_choice import chosen_reader
from dep2p.types import PeerId
from tests.pubsub.nodes import host_of, pubsub_nodes, until

Clock = trio.testing.MockClock
WORKERS = TopicGroup("jobs", "workers")


class Readers:
    """Subscriptions, and the messages that came to each."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.got: list[list[bytes]] = []

    def add(self, messages: Subscription) -> int:
        got: list[bytes] = []
        self.got.append(got)

        async def read() -> None:
            async for item in messages:
                assert isinstance(item, TopicMessage), item
                got.append(item.body)

        self._nursery.start_soon(read)
        return len(self.got) - 1

    def counts(self) -> Counter[bytes]:
        return Counter(body for got in self.got for body in got)

    @property
    def total(self) -> int:
        return sum(map(len, self.got))


def readers_of(node: Node, group: TopicGroup = WORKERS) -> int:
    return len(node.services().topic_groups.readers(group))


async def all_know(nodes: list[Node], count: int, group: TopicGroup = WORKERS) -> None:
    await until(lambda: all(readers_of(node, group) == count for node in nodes))


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


async def publish_all(node: Node, bodies: list[bytes], topic: str = "jobs") -> None:
    for body in bodies:
        await node.publish(topic, body)


async def test_each_message_goes_to_one_of_the_group_and_their_shares_are_even(autojump_clock: Clock) -> None:
    async with pubsub_nodes(4) as nodes, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        publisher, *workers = nodes
        readers = Readers(nursery)
        for worker in workers:
            readers.add(await stack.enter_async_context(worker.subscribe("jobs", group="workers")))
        await all_know(workers, 3)
        await publish_all(publisher, numbers(600))
        await until(lambda: readers.total == 600)
        await trio.sleep(5)
        assert readers.counts() == Counter(numbers(600))
        assert all(125 < len(got) < 275 for got in readers.got), [len(got) for got in readers.got]  # six deviations
        nursery.cancel_scope.cancel()


async def test_other_groups_and_subscriptions_without_one_get_each_message_too(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        publisher, *workers = nodes
        workers_group, auditors, all_messages = Readers(nursery), Readers(nursery), Readers(nursery)
        for worker in workers:
            workers_group.add(await stack.enter_async_context(worker.subscribe("jobs", group="workers")))
            auditors.add(await stack.enter_async_context(worker.subscribe("jobs", group="audit")))
            all_messages.add(await stack.enter_async_context(worker.subscribe("jobs")))
        await all_know(workers, 2)
        await all_know(workers, 2, TopicGroup("jobs", "audit"))
        await publish_all(publisher, numbers(100))
        await until(lambda: all_messages.total == 200 and workers_group.total == auditors.total == 100)
        await trio.sleep(5)
        assert workers_group.counts() == auditors.counts() == Counter(numbers(100))
        assert all(got == numbers(100) for got in all_messages.got)
        nursery.cancel_scope.cancel()


async def test_programs_of_one_node_share_its_part_and_one_that_is_behind_gets_less(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        publisher, worker = nodes
        readers = Readers(nursery)
        for _ in range(2):
            readers.add(await stack.enter_async_context(worker.subscribe("jobs", group="workers")))
        await until(lambda: bool(publisher.pubsub().peers("jobs")))
        stuck = await stack.enter_async_context(worker.subscribe("jobs", group="workers"))
        for body in numbers(300):
            await publisher.publish("jobs", body)
            await trio.sleep(0.01)
        await until(lambda: readers.total + len(stuck) == 300)
        assert len(stuck) <= 3, "a reader that reads nothing is not given more while others have read all"
        assert set(readers.counts().values()) == {1}
        assert all(len(got) > 120 for got in readers.got)
        nursery.cancel_scope.cancel()


async def test_a_reader_s_own_messages_go_to_one_of_the_group_too(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        readers = Readers(nursery)
        topics = [await node.join("jobs") for node in nodes]
        for topic in topics:
            readers.add(await stack.enter_async_context(topic.subscribe(group="workers")))
        await all_know(nodes, 3)
        for body in numbers(300):
            await topics[0].publish(body)
        await until(lambda: readers.total == 300)
        await trio.sleep(5)
        assert readers.counts() == Counter(numbers(300))
        assert all(readers.got)
        nursery.cancel_scope.cancel()


async def test_alone_in_its_group_a_program_gets_all_of_its_own_messages(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1) as (node,):
        topic = await node.join("jobs")
        async with topic.subscribe(group="workers") as messages:
            result = await topic.publish(b"x")
            assert result.local_subscriptions == 1
            item = await anext(messages)
            assert isinstance(item, TopicMessage) and item.body == b"x"


@pytest.mark.parametrize("way", ["cut", "closed", "stopped"])
async def test_the_share_of_a_reader_that_goes_falls_to_the_others(autojump_clock: Clock, way: str) -> None:
    async with pubsub_nodes(4) as nodes, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        publisher, *workers = nodes
        readers = Readers(nursery)
        gone = AsyncExitStack()
        for worker in workers[:2]:
            readers.add(await stack.enter_async_context(worker.subscribe("jobs", group="workers")))
        readers.add(await gone.enter_async_context(workers[2].subscribe("jobs", group="workers")))
        await all_know(workers, 3)
        await publish_all(publisher, numbers(90))
        await until(lambda: readers.total == 90)
        if way == "cut":
            for node in nodes[:3]:
                host_of(node).network.partition(node.peer_id, workers[2].peer_id)
                await node.disconnect(workers[2].peer_id)
        elif way == "closed":
            await gone.aclose()
        else:
            await workers[2].services().topic_groups.drain()
        await all_know(workers[:2], 2)
        share = len(readers.got[2])
        await publish_all(publisher, numbers(90, 90))
        await until(lambda: readers.total == 180)
        await trio.sleep(5)
        assert readers.counts() == Counter(numbers(180))
        assert len(readers.got[2]) == share
        nursery.cancel_scope.cancel()
        await gone.aclose()


async def test_a_pattern_has_groups_over_all_its_topics(autojump_clock: Clock) -> None:
    group = TopicGroup("sensors.*.temp", "workers")
    async with pubsub_nodes(3) as nodes, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        publisher, *workers = nodes
        readers = Readers(nursery)
        for worker in workers:
            readers.add(await stack.enter_async_context(worker.subscribe("sensors.*.temp", group="workers")))
        await all_know(workers, 2, group)
        for room in range(5):
            await publish_all(publisher, numbers(20, 20 * room), f"sensors.{room}.temp")
        await until(lambda: readers.total == 100)
        await trio.sleep(5)
        assert readers.counts() == Counter(numbers(100)) and all(readers.got)
        nursery.cancel_scope.cancel()


async def test_a_reliable_publish_is_acknowledged_by_the_whole_group(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes, AsyncExitStack() as stack, trio.open_nursery() as nursery:
        publisher, *workers = nodes
        readers = Readers(nursery)
        for worker in workers:
            readers.add(await stack.enter_async_context(worker.subscribe("jobs", group="workers")))
        await all_know(workers, 2)
        await until(lambda: len(publisher.pubsub().peers("jobs")) == 2)
        topic = await publisher.join("jobs")
        for body in numbers(40):
            published = await topic.publish(body, reliable=True)
            with trio.fail_after(30):
                await published.wait()
            assert set(published.acknowledged_by) == {worker.peer_id for worker in workers}
        await trio.sleep(5)
        assert readers.counts() == Counter(numbers(40)) and all(readers.got)
        nursery.cancel_scope.cancel()


async def test_the_last_subscription_of_a_group_ends_its_announcement(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as (a, b):

        def announced() -> tuple[TopicGroup, ...]:
            return tuple(group for group in (WORKERS,) if b.peer_id in a.membership().offers.readers(group))

        async with b.subscribe("jobs", group="workers"), b.subscribe("jobs", group="workers"):
            await until(lambda: announced() == (WORKERS,))
        await until(lambda: announced() == ())


async def test_groups_that_are_not_allowed_are_refused_with_the_reason(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1, public_pubsub=True) as (node,), AsyncExitStack() as stack:
        topic = await node.join("jobs")
        for name in ("", "x" * 65, "a\nb"):
            with pytest.raises(ValueError, match="name of a group"):
                topic.subscribe(group=name)
        with pytest.raises(NotInRealmError, match="groups need a realm"):
            await stack.enter_async_context(node.subscribe("jobs", group="workers", public=True))
        for number in range(GROUPS_MAX):
            await stack.enter_async_context(topic.subscribe(group=f"g{number}"))
        with pytest.raises(ValueError, match="at most 64"):
            await stack.enter_async_context(topic.subscribe(group="one more"))
        with pytest.raises(ValueError, match="at most 64"):
            await stack.enter_async_context(node.subscribe("sensors.*", group="one more"))
        assert node.topics()[0].subscriptions == GROUPS_MAX
        await node.publish("jobs", b"x", on_no_peers="ok")


def test_the_choice_is_that_of_the_specification() -> None:
    readers = [PeerId(name) for name in ("12D3KooWA", "12D3KooWB", "12D3KooWC")]
    assert chosen_reader(readers, bytes(range(16))) == "12D3KooWB"


def test_few_messages_change_hands_when_a_reader_goes() -> None:
    readers = [PeerId(f"peer{number}") for number in range(10)]
    before: dict[bytes, PeerId | None] = {body: chosen_reader(readers, body) for body in numbers(1_000)}
    after = {body: chosen_reader(readers[:9], body) for body in numbers(1_000)}
    moved = [body for body in before if before[body] != after[body]]
    assert {before[body] for body in moved} == {readers[9]}
    assert all(60 < count < 140 for count in Counter(before.values()).values())
