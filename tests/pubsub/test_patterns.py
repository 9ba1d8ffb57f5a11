"""Subscriptions to patterns: what matches is joined when it appears, nothing of it is missed, and a bound holds."""

import pytest
import trio
import trio.testing

from dep2p import Limits, Node, NoPeersSubscribedError, Subscription, TooManyTopicsError, TopicMessage
from dep2p.gossipsub.topic_types import MatchedTopicsFull
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import pubsub_nodes, until

Clock = trio.testing.MockClock


async def bodies(messages: Subscription, count: int) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    with trio.fail_after(60):
        while len(found) < count:
            item = await anext(messages)
            assert isinstance(item, TopicMessage), item
            found.append((item.topic, item.body))
    return found


async def nothing_comes(messages: Subscription, within_s: float = 20.0) -> None:
    with trio.move_on_after(within_s):
        pytest.fail(f"{await anext(messages)} came")


async def known(nodes: list[Node], pattern: str, holder: Node) -> None:
    """Every other node knows of the holder's pattern."""
    others = [node for node in nodes if node is not holder]
    await until(lambda: all(holder.peer_id in node.pubsub().peers(pattern) for node in others))


async def test_the_first_message_of_a_new_topic_comes(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with b.subscribe("sensors.>") as messages:
            await known(nodes, "sensors.>", b)
            result = await a.publish("sensors.hall.temp", b"1")
            assert result.sent_to == (b.peer_id,)
            await a.publish("sensors.hall.temp", b"2")
            await a.publish("sensors.roof", b"3")
            with pytest.raises(NoPeersSubscribedError):
                await a.publish("other", b"x")
            assert await bodies(messages, 3) == [
                ("sensors.hall.temp", b"1"),
                ("sensors.hall.temp", b"2"),
                ("sensors.roof", b"3"),
            ]
            assert [(status.topic, status.by_pattern) for status in b.topics()] == [
                ("sensors.hall.temp", True),
                ("sensors.roof", True),
            ]
        assert b.topics() == []
        await until(lambda: not a.pubsub().peers("sensors.hall.temp"))
        with pytest.raises(NoPeersSubscribedError):
            await a.publish("sensors.hall.temp", b"x")


async def test_messages_pass_nodes_that_are_in_the_topic_to_one_that_has_a_pattern(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    async with pubsub_nodes(3, network=network) as nodes:
        a, b, c = nodes
        network.partition(a.peer_id, c.peer_id)
        async with b.subscribe("sensors.hall") as middle, c.subscribe("sensors.*") as messages:
            await until(lambda: c.peer_id in b.pubsub().mesh("sensors.hall"))
            await until(lambda: b.peer_id in a.pubsub().peers("sensors.hall"))
            for number in range(20):
                await a.publish("sensors.hall", b"%d" % number)
            expected = [("sensors.hall", b"%d" % number) for number in range(20)]
            assert await bodies(middle, 20) == expected
            assert await bodies(messages, 20) == expected


async def test_topics_that_are_there_before_the_pattern_are_joined_at_once(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with a.subscribe("sensors.hall"), a.subscribe("other"):
            await until(lambda: b.pubsub().peers("sensors.hall") != [])
            async with b.subscribe("sensors.*"):
                assert [status.topic for status in b.topics()] == ["sensors.hall"]
                await until(lambda: b.peer_id in a.pubsub().mesh("sensors.hall"))


async def test_each_subscription_that_matches_gets_a_message_once(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with (
            b.subscribe("a.>") as rest,
            b.subscribe("a.*") as one,
            b.subscribe("a.*") as same,
            b.subscribe("a.b") as plain,
            b.subscribe("*.c") as other,
        ):
            await known(nodes, "*.c", b)
            await until(lambda: a.pubsub().peers("a.b") == [b.peer_id])
            await a.publish("a.b", b"1")
            await a.publish("a.b.c", b"2")
            for messages in (one, same, plain):
                assert await bodies(messages, 1) == [("a.b", b"1")]
            assert await bodies(rest, 2) == [("a.b", b"1"), ("a.b.c", b"2")]
            for messages in (one, same, plain, rest, other):
                await nothing_comes(messages)


async def test_programs_of_the_same_node_count(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1) as (node,):
        async with node.subscribe("a.*") as messages:
            result = await node.publish("a.b", b"1")
            assert (result.sent_to, result.local_subscriptions) == ((), 1)
            async with await node.join("a.b") as topic, topic.subscribe() as own:
                await topic.publish(b"2")
                await node.publish("a.b", b"3")
                assert await bodies(own, 1) == [("a.b", b"3")]
            await node.publish("a.b", b"4")
            assert [body for _, body in await bodies(messages, 4)] == [b"1", b"2", b"3", b"4"]
        with pytest.raises(NoPeersSubscribedError):
            await node.publish("a.b", b"x")


async def test_leaving_a_topic_that_a_pattern_matches_keeps_the_pattern_s_subscription(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with b.subscribe("a.*") as messages:
            async with b.subscribe("a.b") as plain:
                await until(lambda: a.pubsub().peers("a.b") == [b.peer_id])
                await a.publish("a.b", b"1")
                assert await bodies(plain, 1) == [("a.b", b"1")]
            assert [(status.topic, status.by_pattern) for status in b.topics()] == [("a.b", True)]
            await a.publish("a.b", b"2")
            assert [body for _, body in await bodies(messages, 2)] == [b"1", b"2"]


async def test_a_pattern_is_no_topic(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with b.subscribe("a.*"):
            await known(nodes, "a.*", b)
            for name in ("a.*", "a.>", ">", "*", "a.>.b"):
                with pytest.raises(ValueError, match="pattern"):
                    await a.publish(name, b"x", on_no_peers="ok")
                with pytest.raises(ValueError, match="pattern"):
                    await a.join(name)
        for name in ("a.>.b", ">.>", ".".join("*" * 17)):
            with pytest.raises(ValueError, match=r"last token|at most 16"):
                async with a.subscribe(name):
                    pass
        async with a.subscribe("a*"), a.subscribe("->"), a.subscribe("a.b*.c"):
            assert [status.by_pattern for status in a.topics()] == [False] * 3


async def test_a_publish_that_waits_for_a_first_peer_finds_a_pattern(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        assert (await a.publish("a.b", b"1", on_no_peers="queue")).queued
        await trio.sleep(3)
        async with b.subscribe("a.*") as messages:
            assert await bodies(messages, 1) == [("a.b", b"1")]


async def test_a_reliable_publish_counts_a_pattern_s_subscriber(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with b.subscribe("a.*") as messages, trio.open_nursery() as nursery:
            await known(nodes, "a.*", b)
            published = await a.publish_reliably("a.b", b"1")
            nursery.start_soon(published.wait)
            assert await bodies(messages, 1) == [("a.b", b"1")]
            with trio.move_on_after(1):
                await anext(messages)
            await published.wait()
        assert published.acknowledged_by == (b.peer_id,)


async def test_an_idle_topic_is_left_and_its_next_message_comes_all_the_same(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes:
        a, b, c = nodes
        async with b.subscribe("a.*") as messages, c.subscribe("a.>") as others:
            await known(nodes, "a.*", b)
            await known(nodes, "a.>", c)
            await a.publish("a.b", b"1")
            assert await bodies(messages, 1) == await bodies(others, 1) == [("a.b", b"1")]
            await trio.sleep(200)
            assert [status.topic for status in b.topics()] == ["a.b"]
            await until(lambda: not b.topics() and not c.topics(), within_s=200)
            await until(lambda: "a.b" not in a.pubsub().stats(), within_s=10)
            await a.publish("a.b", b"2")
            assert await bodies(messages, 1) == await bodies(others, 1) == [("a.b", b"2")]


async def test_a_topic_that_another_holds_by_its_name_is_not_left(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with a.subscribe("a.b"), b.subscribe("a.*"):
            await until(lambda: b.topics() != [])
            await trio.sleep(1_000)
            assert [status.topic for status in b.topics()] == ["a.b"]


async def test_more_topics_than_the_limit_are_counted_and_told(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3, limits=Limits(pubsub_matched_topics_max=10)) as nodes:
        a, b, c = nodes
        async with b.subscribe("a.*") as messages:
            await known(nodes, "a.*", b)
            for number in range(300):
                await a.publish(f"a.{number}", b"x", on_no_peers="ok")
            await trio.sleep(3)
            assert len(b.topics()) == 8  # four fifths for one neighbour
            notice = None
            while not isinstance(notice, MatchedTopicsFull):
                notice = await anext(messages)
            assert (notice.count, notice.topics_max) == (0, 10)
            assert notice.topics > 200
            assert b.counters()["pubsub_matching_topics_not_joined"] == notice.topics
            await c.publish("a.new", b"mine")  # another neighbour finds a place
            assert await bodies(messages, 1) == [("a.new", b"mine")]


async def test_patterns_are_bounded(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1) as (node,):
        async with trio.open_nursery() as nursery:

            async def hold(pattern: str, *, task_status: trio.TaskStatus[None]) -> None:
                async with node.subscribe(pattern):
                    task_status.started()
                    await trio.sleep_forever()

            for number in range(32):
                await nursery.start(hold, f"a.{number}.*")
            with pytest.raises(TooManyTopicsError, match="32 patterns"):
                async with node.subscribe("b.*"):
                    pass
            async with node.subscribe("a.0.*"):  # one that is there
                pass
            nursery.cancel_scope.cancel()
        async with node.subscribe("b.*"):
            pass


async def test_the_public_network_has_names_only(autojump_clock: Clock) -> None:
    host = MemoryNetwork().host()
    async with Node.open(host=host, identity=host.identity, public_pubsub=True) as node:
        with pytest.raises(ValueError, match="patterns match topics of realms"):
            async with node.subscribe("a.*", public=True):
                pass
        async with await node.join("a.*", public=True) as topic:
            assert topic.name == "a.*"


async def test_subscriptions_end_with_their_realm(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = nodes
        async with b.subscribe("a.*") as messages, a.subscribe("a.b"):
            await until(lambda: b.topics() != [])
            await b.leave_realm(None)
            with trio.fail_after(10), pytest.raises(StopAsyncIteration):
                await anext(messages)
