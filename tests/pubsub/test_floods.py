"""Floods of control messages and of messages: their sender is held to its share, and others are served as before."""

import logging
from collections import Counter
from collections.abc import Callable

import pytest
import trio
import trio.testing

from dep2p import Limits, Node, TopicMessage
from dep2p.encoding.length_prefixed import encode_length_prefixed
from dep2p.gossipsub.codecs.libp2p import Libp2pCodec
from dep2p.gossipsub.codecs.realm import RealmCodec, derive_pubsub_key
from dep2p.gossipsub.events import Verdict
from dep2p.gossipsub.messages.message_id import MessageIds
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.state.control_rate import CONTROL_FLOOD_S, CONTROL_ITEMS_BURST, CONTROL_ITEMS_PER_S
from dep2p.host.interface import ByteStream, Connection
from dep2p.protocols.fairness.turns import UNITS_PER_TURN
from dep2p.protocols.wire.frame import FrameType, encode_frame
from dep2p.pubsub.validation import Validation
from dep2p.pubsub.wire_formats import MESHSUB_1_2, pubsub_protocol
from dep2p.testing import MemoryHost, MemoryNetwork
from dep2p.types import PeerId, peer_id_bytes
from tests.pubsub.nodes import joined, pubsub_nodes, take, until

Clock = trio.testing.MockClock
WINDOW_BYTES = 262_144
MESSAGES_PER_TURN = 4 * UNITS_PER_TURN


async def stranger_at(network: MemoryNetwork, node: Node) -> tuple[MemoryHost, Connection, ByteStream, Libp2pCodec]:
    """A peer of no realm with a stream of public pub/sub to the node."""
    host = network.host()
    connection = await host.dial(node.peer_id, node.listen_addrs())
    stream = await connection.open_stream(MESHSUB_1_2)
    codec = Libp2pCodec(peer_id_bytes(host.peer_id), host.identity.sign, MessageIds("go"), GossipParams())
    return host, connection, stream, codec


async def member_at(member: Node, node: Node) -> tuple[Connection, ByteStream, RealmCodec]:
    """A further stream of pub/sub of a member to the node."""
    realm = node.realm()
    connection = await member.membership().connect(node.peer_id)
    stream = await connection.open_stream(pubsub_protocol(realm.realm_id))
    key = derive_pubsub_key(realm.psk, realm.realm_id)
    return connection, stream, RealmCodec(peer_id_bytes(member.peer_id), member.identity.sign, key, GossipParams())


def subscriptions(number: int) -> Rpc:
    return Rpc(subscriptions=tuple(SubscriptionChange(f"t{number}-{index}", True) for index in range(100)))


def grafts(number: int) -> Rpc:
    return Rpc(graft=("chat",) * 50) if number % 2 else Rpc(prune=(Prune("chat", 1),) * 50)


async def flood_until_closed(
    connection: Connection, stream: ByteStream, codec: Libp2pCodec, make: Callable[[int], Rpc]
) -> int:
    """Send RPCs as fast as the node takes them, until it closes the connection; return how many went out."""
    number = 0
    while not connection.is_closed:
        if stream.is_write_closed or stream.unsent_bytes > WINDOW_BYTES:
            await trio.sleep(0.05)
            continue
        number += 1
        stream.write_nowait(b"".join(map(encode_length_prefixed, codec.encode(make(number)))))
    return number


@pytest.mark.parametrize("make", [subscriptions, grafts])
async def test_a_stranger_s_control_flood_is_held_to_its_rate_then_ended(
    autojump_clock: Clock, make: Callable[[int], Rpc], caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()
    caplog.set_level(logging.INFO, "dep2p.io")
    async with pubsub_nodes(2, network=network, public_pubsub=True) as nodes:
        topics = [await node.join("chat", public=True) for node in nodes]
        await until(lambda: all(topic.mesh() for topic in topics))
        host, connection, stream, codec = await stranger_at(network, nodes[0])
        for payload in codec.encode(Rpc(subscriptions=(SubscriptionChange("chat", True),))):
            stream.write_nowait(encode_length_prefixed(payload))
        began_s = trio.current_time()
        async with topics[0].subscribe() as messages, trio.open_nursery() as nursery:
            with trio.fail_after(CONTROL_FLOOD_S + 10):
                nursery.start_soon(flood_until_closed, connection, stream, codec, make)
                for number in range(5):
                    await topics[1].publish(bytes((number,)))
                    assert await take(messages, 1, within_s=0.5) == [bytes((number,))]
                    await trio.sleep(1)
                held = nodes[0].counters()["public_pubsub_peers_held_control_rate"]
                assert held >= 1
        took_s = trio.current_time() - began_s
        counters = nodes[0].counters()
        assert counters.get("public_pubsub_router_drop_control_flood", 0) == 0
        items = CONTROL_ITEMS_BURST + CONTROL_ITEMS_PER_S * took_s
        assert counters["public_pubsub_connections_closed_misuse"] == 1
        assert counters["public_pubsub_peers_held_control_rate"] * 50 <= items
        assert host.peer_id not in nodes[0].pubsub(public=True).peers()
        said = [record for record in caplog.records if "more control messages than its share" in record.getMessage()]
        assert len(said) == 1 and str(host.peer_id) in said[0].getMessage()


async def test_a_member_s_control_flood_costs_it_its_stream_and_not_its_connection(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        flooder, node = nodes
        await joined(nodes)
        connection, stream, codec = await member_at(flooder, node)
        number = 0
        with trio.fail_after(CONTROL_FLOOD_S + 10):
            while not stream.is_write_closed:
                if stream.unsent_bytes > WINDOW_BYTES:
                    await trio.sleep(0.05)
                    continue
                number += 1
                for payload in codec.encode(subscriptions(number)):
                    stream.write_nowait(encode_frame(FrameType.GOSSIP, payload))
        assert not connection.is_closed
        assert node.counters()["pubsub_router_stream_reset_control_flood"] == 1


async def test_who_is_held_back_is_in_the_realm_s_problems(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        flooder, node = nodes
        await joined(nodes)
        assert not any("held back" in text for text in node.realms()[0].problems)
        _, stream, codec = await member_at(flooder, node)
        for number in range(20):
            for payload in codec.encode(subscriptions(number)):
                stream.write_nowait(encode_frame(FrameType.GOSSIP, payload))
        await trio.sleep(0.1)
        (text,) = [text for text in node.realms()[0].problems if "held back" in text]
        assert text.startswith(f"{flooder.peer_id} sends more control messages")
        await trio.sleep(20)
        assert not any("held back" in text for text in node.realms()[0].problems)


def ihaves(number: int) -> Rpc:
    return Rpc(ihave=(IHave("chat", tuple(b"%d %d" % (number, index) for index in range(100))),))


@pytest.mark.parametrize("kind", ["messages", "ihave", "message in each and one RPC with many"])
async def test_a_member_s_flood_is_taken_in_turns_with_another_member(autojump_clock: Clock, kind: str) -> None:
    """Another member's message is delivered after a few turns, not after the flood; and the flood loses nothing."""
    async with pubsub_nodes(3) as nodes:
        flooder, _, node = nodes
        _, of_gentle, of_node = await joined(nodes)
        _, stream, codec = await member_at(flooder, node)
        made = [codec.compose("chat", b"flood", (2**61 + number).to_bytes(8, "big")) for number in range(4_000)]
        rpcs = [Rpc((message,)) for message in made]
        if kind == "ihave":
            rpcs = [ihaves(number) for number in range(300)]
        elif kind != "messages":
            rpcs = [Rpc(tuple(made[:1_000])), *rpcs[1_000:]]
        frames = [encode_frame(FrameType.GOSSIP, payload) for rpc in rpcs for payload in codec.encode(rpc)]
        async with of_node.subscribe() as messages:
            await of_gentle.publish(b"before")
            assert await take(messages, 1) == [b"before"]
            stream.write_nowait(b"".join(frames))
            await of_gentle.publish(b"gentle")
            if kind == "ihave":
                assert await take(messages, 1, within_s=0.5) == [b"gentle"]
            else:
                bodies = await take(messages, 4_001)
                assert bodies.count(b"flood") == 4_000
                assert bodies.index(b"gentle") <= 4 * MESSAGES_PER_TURN, "the flood went first"
        assert node.counters()["pubsub_rpc_turns_waited"] >= 1


class Verdicts:
    """The judge of a `Validation`: the tickets in the order of their verdicts."""

    def __init__(self) -> None:
        self.tickets: list[int] = []

    def judged(self, ticket: int, verdict: Verdict) -> None:
        assert verdict is Verdict.ACCEPT
        self.tickets.append(ticket)

    def received_all(self) -> None: ...


async def test_messages_wait_for_verdicts_in_turns_by_neighbour(autojump_clock: Clock) -> None:
    verdicts = Verdicts()
    validation = Validation(
        verdicts,
        Counter(),
        lambda message: None,
        lambda message, peer: TopicMessage(message.topic, message.data, peer, None, message.id, peer),
        items_max=1_000,
        on_held=lambda is_held: None,
    )

    def put(ticket: int, peer: str) -> None:
        message = RpcMessage(b"%d" % ticket, peer.encode(), b"", "chat", b"")
        validation.put(ticket, message, PeerId(peer), has_signature=False)

    for ticket in range(400):
        put(ticket, "flooder")
    for ticket in (1_000, 1_001, 1_002):
        put(ticket, "gentle")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(validation.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert [verdicts.tickets.index(ticket) for ticket in (1_000, 1_001, 1_002)] == [1, 3, 5]
    assert [ticket for ticket in verdicts.tickets if ticket < 1_000] == list(range(400))


async def test_messages_of_one_rpc_above_the_peer_s_line_are_dropped_and_counted(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2, limits=Limits(pubsub_validating_max=64)) as nodes:
        flooder, node = nodes
        _, of_node = await joined(nodes)
        _, stream, codec = await member_at(flooder, node)
        made = [codec.compose("chat", b"x", (2**61 + number).to_bytes(8, "big")) for number in range(200)]
        async with of_node.subscribe() as messages:
            for payload in codec.encode(Rpc(tuple(made))):
                stream.write_nowait(encode_frame(FrameType.GOSSIP, payload))
            assert await take(messages, 64) == [b"x"] * 64
            await trio.sleep(1)
            assert len(messages) == 0
        assert node.counters()["pubsub_messages_dropped_peer_over_share"] == 136
