"""Headers of messages: they reach every subscriber, whole and checked, and count against every bound."""

import time

import pytest
import trio
import trio.testing

from dep2p import MessageTooLargeError, Node, NotInRealmError, PublishRefusedError, Subscription, TopicMessage
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import host_of, joined, pubsub_nodes, until

Clock = trio.testing.MockClock
HEADERS: dict[str, object] = {"trace": "42", "count": -7, "ok": True, "raw": b"\xff", "many": ["a", 3]}


async def one(messages: Subscription) -> TopicMessage:
    with trio.fail_after(60):
        item = await anext(messages)
    assert isinstance(item, TopicMessage)
    return item


async def test_headers_reach_neighbours_and_programs_of_the_same_node_with_the_time_of_arrival(
    autojump_clock: Clock,
) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        here = await nodes[0].join("chat")
        async with b.subscribe() as far, here.subscribe() as near:
            before_s = time.time()
            await a.publish(b"x", headers=HEADERS)
            await a.publish(b"y")
            for messages in (far, near):
                message, plain = await one(messages), await one(messages)
                assert (message.body, dict(message.headers)) == (b"x", HEADERS)
                assert (plain.body, dict(plain.headers)) == (b"y", {})
                assert message.received_at_s == pytest.approx(before_s, abs=60)
                with pytest.raises(TypeError):
                    message.headers["trace"] = "other"  # type: ignore[index]


async def test_headers_pass_through_a_node_in_the_middle(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes:
        a, b, c = await joined(nodes)
        host_of(nodes[0]).network.partition(nodes[0].peer_id, nodes[2].peer_id)
        async with c.subscribe() as messages:
            await a.publish(b"x", headers=HEADERS)
            message = await one(messages)
            assert (dict(message.headers), message.sender) == (HEADERS, nodes[0].peer_id)
            assert message.received_from == nodes[1].peer_id
        assert b.is_joined


async def test_a_publish_without_joining_has_headers_too(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        topic = await nodes[1].join("chat")
        await until(lambda: bool(nodes[0].pubsub().peers("chat")))
        async with topic.subscribe() as messages:
            await nodes[0].publish("chat", b"x", headers={"a": "b"})
            assert dict((await one(messages)).headers) == {"a": "b"}


async def test_validators_see_headers_of_own_messages_and_of_others(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        a.add_validator(lambda message: "bad" not in message.headers)
        b.add_validator(lambda message: "worse" not in message.headers)
        with pytest.raises(PublishRefusedError):
            await a.publish(b"x", headers={"bad": 1})
        async with b.subscribe() as messages:
            await a.publish(b"refused", headers={"worse": 1})
            await a.publish(b"taken", headers={"good": 1})
            assert (await one(messages)).body == b"taken"


async def test_headers_that_are_not_allowed_are_refused_before_anything_is_sent(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        with pytest.raises(ValueError, match="float"):
            await a.publish(b"x", headers={"a": 1.5})
        with pytest.raises(TypeError, match="a dict of names and values, not list"):
            await a.publish(b"x", headers=["a"])  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="at most 16384"):
            await a.publish(b"x", headers={"a": bytes(16_384)})
        with pytest.raises(MessageTooLargeError, match="bytes of headers"):
            await a.publish(bytes(1_048_576), headers={"a": 1})
        with pytest.raises(ValueError, match="with the topic's name"):
            await a.publish(b"x", headers={"a": bytes(16_360)}, reliable=True)
        assert nodes[0].counters().get("pubsub_router_published", 0) == 0
        async with b.subscribe() as messages:
            await a.publish(bytes(1_048_576 - 16_384), headers={"a": bytes(16_000)})
            assert len((await one(messages)).headers["a"]) == 16_000  # type: ignore[arg-type]


async def test_the_public_network_has_no_headers(autojump_clock: Clock) -> None:
    host = MemoryNetwork().host()
    async with Node.open(host=host, identity=host.identity, public_pubsub=True) as node:
        topic = await node.join("chat", public=True)
        for on_no_peers in ("error", "queue", "ok"):
            with pytest.raises(NotInRealmError, match="headers need a realm"):
                await topic.publish(b"x", headers={"a": 1}, on_no_peers=on_no_peers)


async def test_a_buffer_counts_headers(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe(buffer_bytes=2_500) as messages:
            for _ in range(4):
                await a.publish(b"", headers={"a": bytes(1_000)})
            await until(lambda: messages.lagged_total == 2)
            assert len(messages) == 2
            assert 2_000 <= messages.buffered_bytes < 2_100
            assert nodes[1].pubsub().stats()["sizes"]["mcache bytes"] > 4_000  # type: ignore[index]


@pytest.mark.parametrize("by_pubsub", [True, False])
async def test_a_reliable_publish_brings_its_headers_by_either_way(autojump_clock: Clock, by_pubsub: bool) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        if not by_pubsub:  # what pub/sub brings is refused as the neighbour's; delivery brings it by itself
            nodes[1].pubsub().block(nodes[0].peer_id)
        async with b.subscribe() as messages, trio.open_nursery() as nursery:
            if by_pubsub:
                published = await a.publish(b"x", headers=HEADERS, reliable=True)
            else:
                published = await nodes[0].publish_reliably(
                    "chat", b"x", critical_peers=[nodes[1].peer_id], headers=HEADERS
                )
            nursery.start_soon(published.wait)
            message = await one(messages)
            assert (message.body, dict(message.headers)) == (b"x", HEADERS)
            with trio.move_on_after(1):
                await anext(messages)
            await published.wait()
            nursery.cancel_scope.cancel()
        assert nodes[1].counters().get("delivery_topic_messages_delivered_direct", 0) == (0 if by_pubsub else 1)
