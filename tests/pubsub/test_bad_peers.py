"""Strangers, slow peers and hostile ones: bounded, counted, and nobody else notices."""

import struct
from dataclasses import replace

import trio
import trio.testing

from dep2p import Limits, Node
from dep2p.encoding.cbor import encode_bytes
from dep2p.gossipsub.codecs.realm import RealmCodec, derive_pubsub_key
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import Rpc, RpcMessage, SubscriptionChange
from dep2p.identity import Identity
from dep2p.protocols.wire.frame import FrameDecoder, FrameType, decode_error, encode_frame
from dep2p.pubsub.wire_formats import pubsub_protocol
from dep2p.testing import MemoryNetwork
from dep2p.types import peer_id_bytes
from tests.pubsub.nodes import host_of, joined, pubsub_nodes, take, until

Clock = trio.testing.MockClock


def protocol_of(node: Node) -> str:
    return pubsub_protocol(node.realm().realm_id)


async def test_an_unknown_peer_is_reported_so_and_nothing_of_it_is_heard(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    async with pubsub_nodes(2, network=network) as nodes:
        a, b = await joined(nodes)
        stranger = network.host()
        connection = await stranger.dial(nodes[1].peer_id, nodes[1].listen_addrs())
        stream = await connection.open_stream(protocol_of(nodes[1]))
        stream.write_nowait(encode_frame(FrameType.GOSSIP, b"\xa0"))
        (frame,) = FrameDecoder(2_000).feed(await stream.read())
        assert decode_error(frame.payload)[0] == 5
        assert nodes[1].counters()["pubsub_streams_refused_not_member"] == 1
        async with b.subscribe() as messages:
            await a.publish(b"x")
            assert await take(messages, 1) == [b"x"]
        assert stranger.peer_id not in nodes[1].pubsub().peers()


def hostile_bytes() -> list[bytes]:
    gossip = FrameType.GOSSIP
    return [
        bytes(100),
        encode_frame(FrameType.REQUEST, b"x", req_id=1),
        encode_frame(gossip, b"\xff" * 50),
        encode_frame(gossip, b"\xa1\x02\x9b" + b"\xff" * 8),
        encode_frame(gossip, b"\xa1\x02\x81\x83\x84"),
        encode_frame(gossip, b"\xa0", flags=1),
        encode_frame(gossip, b"\xa0", req_id=7),
        struct.pack(">BBHII", 1, gossip, 0, 0, 0xFFFF_FFFF),
        encode_frame(FrameType.ERROR, b"\0"),
    ]


async def test_bytes_that_are_no_rpc_cost_their_sender_the_stream_and_no_one_else_anything(
    autojump_clock: Clock,
) -> None:
    async with pubsub_nodes(3) as nodes:
        a, b, _ = await joined(nodes)
        hostile = nodes[2]
        async with b.subscribe() as messages:
            for number, data in enumerate(hostile_bytes()):
                connection = hostile.membership().verified_connection(nodes[1].peer_id)
                assert connection is not None
                stream = await connection.open_stream(protocol_of(hostile))
                for at in range(0, len(data), 7):  # split anywhere
                    stream.write_nowait(data[at : at + 7])
                await until(lambda s=stream: s.is_write_closed)  # type: ignore[misc]
                await a.publish(b"%d" % number)
                assert await take(messages, 1) == [b"%d" % number]
        assert nodes[1].counters()["pubsub_rpcs_malformed"] >= len(hostile_bytes()) - 1
        assert nodes[1].pubsub().scores()[hostile.peer_id] < 0
        assert hostile.peer_id not in b.mesh()


async def test_forged_messages_are_refused_counted_and_scored(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        realm = nodes[0].realm()
        author = peer_id_bytes(nodes[0].peer_id)
        identity = nodes[0].identity
        key = derive_pubsub_key(realm.psk, realm.realm_id)
        params = GossipParams()
        connection = nodes[0].membership().verified_connection(nodes[1].peer_id)
        assert connection is not None
        stream = await connection.open_stream(protocol_of(nodes[0]))

        def say(codec: RealmCodec, number: int) -> None:
            message = codec.compose("chat", b"forged", (2**62 + number).to_bytes(8, "big"))
            for payload in codec.encode(Rpc((message,))):
                stream.write_nowait(encode_frame(FrameType.GOSSIP, payload))

        async with b.subscribe() as messages:
            say(RealmCodec(author, lambda data: bytes(64), key, params), 1)
            say(RealmCodec(author, identity.sign, bytes(32), params), 2)
            await trio.sleep(1.5)
            assert len(messages) == 0
            assert nodes[1].pubsub().scores()[nodes[0].peer_id] < a.scores()[nodes[1].peer_id]
        counters = nodes[1].counters()
        assert counters["pubsub_rejected_invalid_signature"] == counters["pubsub_rejected_invalid_mac"] == 1


async def test_a_forged_message_in_a_batch_harms_no_other_of_the_batch(autojump_clock: Clock) -> None:
    """In front of the good ones, behind them, and once their signature is known: one member signs, another forges."""
    async with pubsub_nodes(2) as nodes:
        _, b = await joined(nodes)
        realm = nodes[0].realm()
        key = derive_pubsub_key(realm.psk, realm.realm_id)
        other = Identity(bytes(range(32)))
        codec = RealmCodec(peer_id_bytes(other.peer_id), other.sign, key, GossipParams(), sign_batch_max=4)
        batch = [codec.compose("chat", b"%d" % number, (2**62 + number).to_bytes(8, "big")) for number in range(4)]
        forged: list[RpcMessage] = []
        for number, true in enumerate(batch[:3]):
            codec_of_forger = RealmCodec(peer_id_bytes(other.peer_id), lambda _: bytes(64), key, GossipParams())
            false = codec_of_forger.compose("chat", b"forged", (2**61 + number).to_bytes(8, "big"))
            wire = false.wire.replace(b"\x83", b"\x84", 1) + encode_bytes(true.proof)
            forged.append(replace(false, wire=wire.replace(bytes(64), true.signature)))
        connection = nodes[0].membership().verified_connection(nodes[1].peer_id)
        assert connection is not None
        stream = await connection.open_stream(protocol_of(nodes[0]))
        async with b.subscribe() as messages:
            for one in (forged[0], batch[0], forged[1], batch[1], batch[2], forged[2], batch[3]):
                for payload in codec.encode(Rpc((one,))):
                    stream.write_nowait(encode_frame(FrameType.GOSSIP, payload))
            assert await take(messages, 4) == [b"0", b"1", b"2", b"3"]
            await trio.sleep(1.5)
            assert len(messages) == 0
        assert nodes[1].counters()["pubsub_rejected_invalid_signature"] == 3


async def test_topics_invented_by_a_peer_are_capped_and_forgotten_when_it_goes(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        await until(lambda: nodes[0].membership().verified_connection(nodes[1].peer_id) is not None)
        connection = await nodes[0].membership().connect(nodes[1].peer_id)
        stream = await connection.open_stream(protocol_of(nodes[0]))
        realm = nodes[0].realm()
        key = derive_pubsub_key(realm.psk, realm.realm_id)
        codec = RealmCodec(peer_id_bytes(nodes[0].peer_id), nodes[0].identity.sign, key, GossipParams())
        for number in range(5_000):
            for payload in codec.encode(Rpc(subscriptions=(SubscriptionChange(f"t{number}", True),))):
                stream.write_nowait(encode_frame(FrameType.GOSSIP, payload))
        await trio.sleep(1)
        sizes = nodes[1].pubsub().stats()["sizes"]
        assert isinstance(sizes, dict) and 0 < sizes["topics"] <= 256  # pyright: ignore[reportUnknownVariableType]
        host_of(nodes[0]).kill()
        await trio.sleep(1)
        sizes = nodes[1].pubsub().stats()["sizes"]
        assert isinstance(sizes, dict) and sizes["topics"] == sizes["peers"] == 0  # pyright: ignore[reportUnknownVariableType]


async def test_a_peer_that_takes_nothing_is_dropped_for_and_named_and_the_others_get_all(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    limits = Limits(pubsub_out_items_max=100, pubsub_out_bytes_max=400_000)
    async with pubsub_nodes(3, network=network, limits=limits) as nodes:
        a, b, _ = await joined(nodes)
        slow = nodes[2].peer_id
        network.partition(nodes[0].peer_id, slow)
        dropped = 0
        async with b.subscribe() as messages:
            began_s = trio.current_time()
            for _number in range(2_000):
                result = await a.publish(bytes(1_000))
                assert set(result.dropped) <= {slow}
                dropped += bool(result.dropped)
            assert trio.current_time() - began_s < 2 * limits.pubsub_slow_peer_s + 1
            assert len(await take(messages, 2_000)) == 2_000
        assert 0 < dropped < 2_000
        counters = nodes[0].counters()
        assert counters["pubsub_messages_dropped_queue_full"] == dropped
        assert counters["pubsub_peers_found_slow"] >= 1
        stats = nodes[0].pubsub().stats()["peers"]
        assert isinstance(stats, list)
        (of_slow,) = [one for one in stats if one.peer == slow]  # pyright: ignore[reportUnknownVariableType]
        assert of_slow.is_slow and of_slow.queued_bytes <= 400_000 + 50_000


async def test_the_only_peer_is_waited_for_until_it_has_stalled_for_ten_seconds(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    limits = Limits(pubsub_out_items_max=100, pubsub_out_bytes_max=400_000)
    async with pubsub_nodes(2, network=network, limits=limits) as nodes:
        a, b = await joined(nodes)
        network.partition(nodes[0].peer_id, nodes[1].peer_id)
        began_s = trio.current_time()
        while not (await a.publish(bytes(10_000))).dropped:
            pass
        assert 10 <= trio.current_time() - began_s < 12
        async with b.subscribe() as messages:
            network.heal()
            await trio.sleep(2)
            assert len(messages) > 0
            assert (await a.publish(b"caught up")).dropped == ()


async def test_a_publish_that_does_not_wait_reports_what_a_full_queue_refused(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    limits = Limits(pubsub_out_items_max=10, pubsub_out_bytes_max=100_000)
    async with pubsub_nodes(2, network=network, limits=limits) as nodes:
        a, _b = await joined(nodes)
        network.partition(nodes[0].peer_id, nodes[1].peer_id)
        began_s = trio.current_time()
        results = [await a.publish(bytes(20_000), wait=False) for _ in range(50)]
        assert trio.current_time() - began_s < 0.1
        assert [bool(result.sent_to) for result in results] == [not result.dropped for result in results]
        assert any(result.dropped for result in results)
