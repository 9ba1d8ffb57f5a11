"""Publishes reach every subscriber of the realm, or their publisher hears that they did not."""

import json
from pathlib import Path

import pytest
import trio
import trio.testing

from dep2p import (
    GossipParams,
    Limits,
    MessageTooLargeError,
    NoPeersSubscribedError,
    NotInRealmError,
    RateLimitedError,
    Realm,
    TooManyTopicsError,
    TopicMessage,
    TopicNotFoundError,
)
from dep2p.host.interface import ByteStream
from dep2p.pubsub.wire_formats import pubsub_protocol
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import host_of, joined, pubsub_nodes, take, until

Clock = trio.testing.MockClock


async def test_a_message_says_who_wrote_it_and_who_brought_it(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            result = await a.publish(b"hello")
            assert result.sent_to == (nodes[1].peer_id,)
            assert not result.queued and not result.dropped
            message = await anext(messages)
        assert isinstance(message, TopicMessage)
        assert message.seqno is not None
        assert (message.topic, message.body, message.id) == ("chat", b"hello", result.id)
        assert message.sender == message.received_from == nodes[0].peer_id
        assert a.mesh() == a.peers() == [nodes[1].peer_id]
        assert list(a.scores()) == [nodes[1].peer_id]
        (status,) = nodes[0].topics()
        assert (status.topic, status.peers, status.mesh, status.subscriptions) == ("chat", 1, 1, 0)


async def test_a_burst_of_a_thousand_loses_nothing_and_keeps_its_order(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            for number in range(1_000):
                assert (await a.publish(b"%d" % number)).dropped == ()
            assert await take(messages, 1_000) == [b"%d" % number for number in range(1_000)]
        counters = nodes[0].counters()
        assert counters["pubsub_writes"] < counters["pubsub_rpcs_written"] / 10  # coalesced


async def test_among_ten_nodes_a_burst_of_a_thousand_reaches_all(autojump_clock: Clock) -> None:
    async with pubsub_nodes(10) as nodes:
        topics = await joined(nodes)
        got: list[list[bytes]] = []

        async def listen(index: int, *, task_status: trio.TaskStatus[None]) -> None:
            async with topics[index].subscribe() as messages:
                task_status.started()
                got.append(await take(messages, 1_000))

        async with trio.open_nursery() as nursery:
            for index in range(1, 10):
                await nursery.start(listen, index)
            for number in range(1_000):
                assert (await topics[0].publish(b"%d" % number)).dropped == ()
        assert len(got) == 9
        assert all(sorted(one) == sorted(b"%d" % number for number in range(1_000)) for one in got)


async def test_a_publish_before_anybody_is_there_is_an_error_or_waits_by_option(autojump_clock: Clock) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    async with pubsub_nodes(1, network=network, realm=realm) as (a,):
        topic = await a.join("chat")
        with pytest.raises(NoPeersSubscribedError):
            await topic.publish(b"x")
        assert (await topic.publish(b"to nobody", on_no_peers="ok")).sent_to == ()
        assert (await topic.publish(b"early", on_no_peers="queue")).queued
        async with pubsub_nodes(1, network=network, realm=realm) as (b,):
            other = await b.join("chat")
            async with other.subscribe() as messages:
                b.remember(a.peer_id, a.listen_addrs())
                assert await take(messages, 1) == [b"early"]


async def test_publishing_right_after_joining_reaches_subscribers_before_any_heartbeat(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        b = await nodes[1].join("chat")
        await until(lambda: bool(nodes[0].pubsub().peers("chat")))
        async with b.subscribe() as messages:
            a = await nodes[0].join("chat")
            assert (await a.publish(b"now")).sent_to == (nodes[1].peer_id,)
            assert await take(messages, 1, within_s=0.5) == [b"now"]


async def test_a_node_publishes_to_a_topic_that_it_is_not_in(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        b = await nodes[1].join("chat")
        await until(lambda: bool(nodes[0].pubsub().peers("chat")))
        async with b.subscribe() as messages:
            await nodes[0].publish("chat", b"from outside")
            assert await take(messages, 1) == [b"from outside"]
        assert nodes[0].topics() == []


async def test_after_a_lost_connection_messages_flow_again_both_ways(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        for connection in host_of(nodes[0]).connections():
            await connection.close()
        await until(lambda: not a.peers() or not b.peers())
        await until(lambda: bool(a.mesh() and b.mesh()))
        async with a.subscribe() as to_a, b.subscribe() as to_b:
            await a.publish(b"from a")
            await b.publish(b"from b")
            assert await take(to_b, 1) == [b"from a"]
            assert await take(to_a, 1) == [b"from b"]


async def test_a_lost_stream_on_a_live_connection_is_opened_again_and_announced(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        (connection,) = host_of(nodes[0]).connections()
        for node, other in (nodes, reversed(nodes)):
            node.pubsub()._links.reset_inbound(other.peer_id)  # pyright: ignore[reportPrivateUsage]
        await trio.sleep(10)
        assert host_of(nodes[0]).connections() == [connection]
        assert a.mesh() and b.mesh()
        async with b.subscribe() as messages:
            await a.publish(b"again")
            assert await take(messages, 1) == [b"again"]
        assert nodes[0].counters()["pubsub_streams_opened"] >= 2


async def test_leaving_and_joining_again_and_again_ends_in_a_working_topic(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes:
        topics = await joined(nodes)
        async with topics[1].subscribe() as messages:
            for _ in range(5):
                await topics[0].leave()
                topics[0] = await nodes[0].join("chat")
            await trio.sleep(15)  # the back-off after leaving
            assert topics[0].mesh()
            await topics[0].publish(b"back")
            assert await take(messages, 1) == [b"back"]


async def test_who_left_gets_nothing_more_and_its_subscription_ends(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        second = await nodes[1].join("chat")
        async with b.subscribe() as messages:
            await b.leave()
            await a.publish(b"still here")  # another handle of the topic lives
            assert await take(messages, 1) == [b"still here"]
            with pytest.raises(TopicNotFoundError):
                await b.publish(b"x")
            await second.leave()
            assert [item async for item in messages] == []
        await until(lambda: not a.peers())
        with pytest.raises(NoPeersSubscribedError):
            await a.publish(b"x")


async def test_leaving_the_realm_ends_its_topics_and_the_others_notice(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            await nodes[1].leave_realm(None)
            assert [item async for item in messages] == []
        assert not b.is_joined
        await until(lambda: not a.peers())
        with pytest.raises(NotInRealmError):
            await nodes[1].join("chat")


async def test_each_limit_is_an_error_that_names_it_and_nothing_was_sent(autojump_clock: Clock) -> None:
    limits = Limits(message_bytes_max=100, pubsub_publish_burst=2, pubsub_topics_max=2)
    async with pubsub_nodes(2, limits=limits) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            with pytest.raises(MessageTooLargeError, match="100"):
                await a.publish(bytes(101))
            await nodes[0].join("second")
            with pytest.raises(TooManyTopicsError, match="topics_max"):
                await nodes[0].join("third")
            with pytest.raises(ValueError, match="topic name"):
                await nodes[1].join("")
            await a.publish(b"1", wait=False)
            await a.publish(b"2", wait=False)
            with pytest.raises(RateLimitedError, match="100 publishes a second"):
                await a.publish(b"3", wait=False)
            assert await take(messages, 2) == [b"1", b"2"]


async def test_publishing_faster_than_the_rate_waits_and_loses_nothing(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dep2p.io")
    async with pubsub_nodes(2, limits=Limits(pubsub_publish_burst=10)) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            began_s = trio.current_time()
            for number in range(210):
                await a.publish(b"%d" % number)
            assert 1.9 < trio.current_time() - began_s < 3
            assert len(await take(messages, 210)) == 210
        assert caplog.text.count("held to 100 a second: pubsub_publish_per_s") == 1


async def test_the_publish_rate_is_the_nodes_over_all_its_realms(autojump_clock: Clock) -> None:
    blue = Realm.generate("blue")
    async with pubsub_nodes(1, limits=Limits(pubsub_publish_burst=4)) as (node,):
        await node.join_realm(blue)
        for realm in ("team", "blue", "team", "blue"):
            await node.publish("chat", b"one of four", realm=realm, on_no_peers="ok", wait=False)
        for realm in ("team", "blue"):
            with pytest.raises(RateLimitedError):
                await node.publish("chat", b"one too many", realm=realm, on_no_peers="ok", wait=False)


async def test_the_json_trace_holds_what_happened_in_libp2ps_form(autojump_clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "trace.ndjson"
    async with pubsub_nodes(2, trace=True) as others:
        assert others[0].pubsub().traces is not None
    async with pubsub_nodes(2, trace_json=path) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            await a.publish(b"x")
            await take(messages, 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = {name for line in lines for name in line if name not in ("type", "peerID", "timestamp")}
    assert {"join", "addPeer", "graft", "sendRPC", "recvRPC", "publishMessage", "deliverMessage"} <= names
    assert all(line["timestamp"] > 1_600_000_000_000_000_000 for line in lines)


async def test_parameters_of_the_router_can_be_given(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2, pubsub_params=GossipParams(emit_self=True)) as nodes:
        a, _b = await joined(nodes)
        async with a.subscribe() as messages:
            await a.publish(b"to myself too")
            assert await take(messages, 1) == [b"to myself too"]


async def test_what_large_messages_need_not_be_sent_again_is_said_for_many_at_once(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes:
        a, b, _ = await joined(nodes)
        async with b.subscribe() as messages:
            for _number in range(200):
                await a.publish(bytes(2_000))
            await take(messages, 200)
        # At most a forward for each, and an IDONTWANT for each read: not one for each message.
        assert nodes[1].counters()["pubsub_rpcs_written"] < 260


async def test_a_node_that_is_behind_passes_over_gossip_for_a_while_and_still_gets_all(autojump_clock: Clock) -> None:
    limits = Limits(pubsub_validating_max=16)
    async with pubsub_nodes(
        6, limits=limits, pubsub_params=GossipParams(d=2, d_lo=1, d_hi=4, d_score=1, d_out=0)
    ) as nodes:
        topics = await joined(nodes)
        async with topics[1].subscribe() as messages:
            for number in range(1_500):
                await topics[0].publish(b"%d" % number)
                if not number % 100:
                    await trio.sleep(0.3)
            assert sorted(await take(messages, 1_500)) == sorted(b"%d" % number for number in range(1_500))
        assert any(node.counters().get("pubsub_ihave_passed_over_busy", 0) for node in nodes)
        # Nobody was asked for more than could be judged of one answer.
        assert not any(node.counters().get("pubsub_messages_dropped_peer_over_share", 0) for node in nodes)


async def test_a_peer_that_ends_every_stream_for_a_minute_is_tried_on_and_found_again(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        host = host_of(nodes[1])
        protocol = pubsub_protocol(nodes[1].realm().realm_id)
        serve = host.handlers[protocol]
        attempts = 0

        async def refuse(stream: ByteStream) -> None:
            nonlocal attempts
            attempts += 1
            stream.reset()

        host.set_stream_handler(protocol, refuse)
        nodes[1].pubsub()._links.reset_inbound(nodes[0].peer_id)  # pyright: ignore[reportPrivateUsage]
        await trio.sleep(60)
        assert 3 <= attempts <= 12
        host.set_stream_handler(protocol, serve)
        await trio.sleep(40)
        async with b.subscribe() as messages:
            await a.publish(b"found")
            assert await take(messages, 1) == [b"found"]
