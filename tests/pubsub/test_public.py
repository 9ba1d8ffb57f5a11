"""Public pub/sub between nodes of ours; against js-libp2p see tests/interop."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from dep2p import MessageTooLargeError, Node, NotInRealmError, PublicPubSub, Realm, TopicMessage
from dep2p.gossipsub.effects import Effect
from dep2p.gossipsub.rpc import Rpc
from dep2p.gossipsub.scoring.peer_gater import GaterParams
from dep2p.gossipsub.signing.policy import SigningPolicy
from dep2p.gossipsub.subscriptions import allow_topics
from dep2p.pubsub.wire_formats import MESHSUB_1_1, MESHSUB_1_2
from dep2p.testing import MemoryNetwork
from dep2p.types import PeerId
from tests.pubsub.nodes import host_of, joined, pubsub_nodes, take, until

Clock = trio.testing.MockClock
UNSIGNED = PublicPubSub(policy=SigningPolicy.STRICT_NO_SIGN)


@asynccontextmanager
async def public_pair(
    first: bool | PublicPubSub = True, second: bool | PublicPubSub = True
) -> AsyncGenerator[tuple[Node, Node], None]:
    """Two connected nodes in no realm."""
    network = MemoryNetwork()
    a_host, b_host = network.host(), network.host()
    async with (
        Node.open(host=a_host, identity=a_host.identity, public_pubsub=first) as a,
        Node.open(host=b_host, identity=b_host.identity, public_pubsub=second) as b,
    ):
        await a.host.dial(b.peer_id, b.listen_addrs())
        yield a, b


@pytest.mark.parametrize("options", [PublicPubSub(), UNSIGNED, PublicPubSub(protocols=(MESHSUB_1_1,))], ids=repr)
async def test_nodes_in_no_realm_exchange_messages(autojump_clock: Clock, options: PublicPubSub) -> None:
    async with public_pair(options, options) as (a, b):
        topic_a, topic_b = await a.join("chat", public=True), await b.join("chat", public=True)
        await until(lambda: bool(topic_a.mesh() and topic_b.mesh()))
        async with topic_b.subscribe() as messages:
            await topic_a.publish(b"hello")
            message = await anext(messages)
            assert isinstance(message, TopicMessage)
            assert message.body == b"hello"
            assert message.sender == (a.peer_id if options.policy is SigningPolicy.STRICT_SIGN else None)
        assert topic_a.realm_id is None
        assert a.counters()["public_pubsub_router_published"] == 1


async def test_an_older_and_a_newer_node_agree_on_the_older_version(autojump_clock: Clock) -> None:
    async with public_pair(PublicPubSub(protocols=(MESHSUB_1_1,)), PublicPubSub()) as (a, b):
        topic_a, topic_b = await a.join("chat", public=True), await b.join("chat", public=True)
        await until(lambda: bool(topic_a.mesh() and topic_b.mesh()))
        protocols = {stream.protocol for one in host_of(a).connections() for stream in one.streams}
        assert MESHSUB_1_1 in protocols
        assert MESHSUB_1_2 not in protocols


async def test_nodes_with_different_signing_policies_take_nothing_of_each_other(autojump_clock: Clock) -> None:
    async with public_pair(True, UNSIGNED) as (a, b):
        topic_a, topic_b = await a.join("chat", public=True), await b.join("chat", public=True)
        await until(lambda: bool(topic_a.mesh() and topic_b.mesh()))
        async with topic_a.subscribe() as to_a, topic_b.subscribe() as to_b:
            await topic_a.publish(b"signed")
            await topic_b.publish(b"unsigned")
            await trio.sleep(2)
            assert len(to_a) == len(to_b) == 0
        assert a.counters()["public_pubsub_router_rejected_missing_signature"] >= 1
        assert b.counters()["public_pubsub_router_rejected_unexpected_signature"] >= 1


async def test_a_realms_topic_and_a_public_one_of_the_same_name_are_two(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2, public_pubsub=True) as nodes:
        private = [await node.join("chat") for node in nodes]
        public = [await node.join("chat", public=True) for node in nodes]
        await until(lambda: all(topic.mesh() for topic in (*private, *public)))
        async with private[1].subscribe() as secret, public[1].subscribe() as open_to_all:
            await private[0].publish(b"secret")
            await public[0].publish(b"open")
            assert await take(secret, 1) == [b"secret"]
            assert await take(open_to_all, 1) == [b"open"]
            assert len(secret) == len(open_to_all) == 0
        assert [status.realm_id is None for status in nodes[0].topics()] == [False, True]


async def test_where_it_is_off_joining_says_how_to_turn_it_on(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1, realm=Realm.generate("team")) as (node,):
        with pytest.raises(NotInRealmError, match="public_pubsub=True"):
            await node.join("chat", public=True)


@pytest.mark.parametrize(
    "data", [b"\xff" * 9, b"\xff\xff\xff\x7f", b"\x05\x12\x7f\x00\x00\x00", b"\x02\x12\x05"], ids=repr
)
async def test_bytes_that_are_no_rpc_end_that_stream_only(autojump_clock: Clock, data: bytes) -> None:
    async with public_pair() as (a, b):
        topic_a, topic_b = await a.join("chat", public=True), await b.join("chat", public=True)
        await until(lambda: bool(topic_a.mesh() and topic_b.mesh()))
        (connection,) = host_of(a).connections()
        stream = await connection.open_stream(MESHSUB_1_2)
        for byte in data:
            stream.write_nowait(bytes((byte,)))
        await until(lambda: stream.is_write_closed)
        assert b.counters()["public_pubsub_rpcs_malformed"] == 1
        async with topic_a.subscribe() as messages:
            await topic_b.publish(b"still here")
            assert await take(messages, 1) == [b"still here"]


async def test_topics_that_the_filter_leaves_out_are_not_remembered(autojump_clock: Clock) -> None:
    only_chat = PublicPubSub(subscription_filter=allow_topics("chat"))
    async with public_pair(only_chat, True) as (a, b):
        pubsub = a.pubsub(public=True)
        for name in ("other", "chat"):
            await b.join(name, public=True)
        await until(lambda: pubsub.peers("chat") == [b.peer_id])
        assert pubsub.peers("other") == []
        assert a.counters()["public_pubsub_router_drop_subscription_filtered"] == 1


async def test_the_gater_is_an_option(autojump_clock: Clock) -> None:
    """Nothing is overloaded here, so the gater drops nothing. tests/gossipsub has the overloaded case."""
    gated = PublicPubSub(gater=GaterParams())
    async with public_pair(True, gated) as (a, b):
        topic_a, topic_b = await a.join("chat", public=True), await b.join("chat", public=True)
        await until(lambda: bool(topic_a.mesh() and topic_b.mesh()))
        async with topic_b.subscribe() as messages:
            for number in range(50):
                await topic_a.publish(b"%d" % number)
            assert len(await take(messages, 50)) == 50


async def test_a_blocked_peer_is_heard_no_more_neither_itself_nor_by_others(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes:
        a, b, c = await joined(nodes)
        pubsub = nodes[0].pubsub()
        pubsub.block(nodes[1].peer_id)
        assert nodes[1].peer_id not in a.peers()
        async with a.subscribe() as messages:
            await b.publish(b"blocked")
            await c.publish(b"heard")
            assert await take(messages, 1) == [b"heard"]
            await until(lambda: nodes[0].counters().get("pubsub_router_rejected_blacklisted_source") == 1)
            assert len(messages) == 0


async def test_the_apps_opinion_of_a_peer_counts(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, _ = await joined(nodes)
        nodes[0].pubsub().set_app_score(nodes[1].peer_id, -5.0)
        await until(lambda: not a.mesh(), within_s=3)
        assert a.scores()[nodes[1].peer_id] < 0


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="message id profile"):
        PublicPubSub(message_ids="swift")
    with pytest.raises(ValueError, match="meshsub"):
        PublicPubSub(protocols=("/floodsub/1.0.0",))


@pytest.mark.parametrize("options", [PublicPubSub(), UNSIGNED], ids=repr)
async def test_sizes_are_limited_as_peers_count_them(autojump_clock: Clock, options: PublicPubSub) -> None:
    """The whole RPC: libp2p's nodes end a stream on which a larger one comes."""
    async with public_pair(options, options) as (a, b):
        topic_a, topic_b = await a.join("chat", public=True), await b.join("chat", public=True)
        await until(lambda: bool(topic_a.mesh() and topic_b.mesh()))
        async with topic_b.subscribe() as messages:
            with pytest.raises(MessageTooLargeError, match="peers read at most 1048576, which leaves") as refused:
                await topic_a.publish(bytes(1_048_570))
            most = int(str(refused.value).rpartition("leaves ")[2].split()[0])
            await topic_a.publish(bytes(most))
            assert await take(messages, 1) == [bytes(most)]
            with pytest.raises(MessageTooLargeError):
                await topic_a.publish(bytes(most + 1))
            assert topic_a.mesh() == [b.peer_id]


async def test_a_peer_that_has_dropped_messages_of_a_burst_gets_them_again(autojump_clock: Clock) -> None:
    """As go does when the 32 places of its check are full: without a word, and without having seen them."""
    async with public_pair() as (a, b):
        topic_a, topic_b = await a.join("chat", public=True), await b.join("chat", public=True)
        await until(lambda: bool(topic_a.mesh() and topic_b.mesh()))
        router = b.pubsub(public=True)._router  # pyright: ignore[reportPrivateUsage]
        receive, dropped = router.receive, 0

        def drop_some(peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
            nonlocal dropped
            if rpc.messages and dropped < 60:
                dropped += len(rpc.messages)
                rpc = Rpc(rpc.messages[1:])
                dropped -= len(rpc.messages)
            return receive(peer, rpc, now)

        router.receive = drop_some
        async with topic_b.subscribe() as messages:
            for number in range(200):
                assert not (await topic_a.publish(b"%d" % number)).dropped
            assert sorted(await take(messages, 200)) == sorted(b"%d" % number for number in range(200))
        counters = a.counters()
        assert counters["public_pubsub_messages_dropped_by_peer"] == dropped == 60
        assert counters["public_pubsub_bursts_announced"] >= 1
