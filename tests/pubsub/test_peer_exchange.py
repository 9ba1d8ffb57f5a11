"""Peers that a neighbour names in a PRUNE: dialed where this node knows their addresses, forgotten where not."""

import pytest
import trio
import trio.testing

from dep2p import GossipParams, Node, PublicPubSub
from dep2p.gossipsub.effects import Dial
from dep2p.gossipsub.rpc import PeerInfo
from dep2p.gossipsub.scoring.params import hardening_scores
from dep2p.host.host import LibP2PHost
from dep2p.host.interface import Connection
from dep2p.identity import Identity
from dep2p.testing import MemoryNetwork
from dep2p.types import PeerId, peer_id_bytes
from tests.host.hostile_keys import private_key_envelope
from tests.pubsub.nodes import until

Clock = trio.testing.MockClock
NAMING = PublicPubSub(params=GossipParams(px_send=True))
TRUSTING = PublicPubSub(scores=hardening_scores())


async def connected(node: Node, other: Node) -> Connection:
    return await node.host.dial(other.peer_id, other.listen_addrs())


async def test_a_peer_named_by_a_neighbour_that_leaves_is_dialed_where_its_address_is_known(
    autojump_clock: Clock,
) -> None:
    network = MemoryNetwork()
    hosts = [network.host() for _ in range(3)]
    async with (
        Node.open(host=hosts[0], identity=hosts[0].identity, public_pubsub=NAMING) as hub,
        Node.open(host=hosts[1], identity=hosts[1].identity, public_pubsub=TRUSTING) as a,
        Node.open(host=hosts[2], identity=hosts[2].identity, public_pubsub=TRUSTING) as b,
    ):
        earlier = await connected(a, b)
        await earlier.close()
        await until(lambda: not a.host.connections())
        topics = [await node.join("chat", public=True) for node in (hub, a, b)]
        for node in (a, b):
            await connected(node, hub)
        await until(lambda: len(topics[0].mesh()) == 2)
        await topics[0].leave()
        await until(lambda: topics[1].mesh() == [b.peer_id])
        assert a.counters()["public_pubsub_px_peers_dialed"] == 1
        # The other one has no address of the first; it says so and lives on.
        assert b.counters()["public_pubsub_dials_failed"] == 1


@pytest.mark.parametrize("identity", [b"", b"\x00", b"\xff" * 40, b"\x12\x20short"])
async def test_a_name_that_is_no_peer_is_counted_and_nothing_is_dialed(autojump_clock: Clock, identity: bytes) -> None:
    network = MemoryNetwork()
    host = network.host()
    async with Node.open(host=host, identity=host.identity, public_pubsub=True) as node:
        pubsub = node.pubsub(public=True)
        pubsub.perform([Dial(None, PeerInfo(identity))], trio.current_time())
        counters = node.counters()
        assert counters["public_pubsub_px_peers_malformed"] == 1
        assert "public_pubsub_px_peers_dialed" not in counters


@pytest.mark.real
@pytest.mark.parametrize("is_forged", [False, True])
async def test_the_signed_record_of_a_named_peer_makes_it_known(
    is_forged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a and b know the hub only; when it leaves, the records that they gave it bring them together."""
    if is_forged:

        def forged(_host: LibP2PHost, _peer: PeerId) -> bytes:
            return private_key_envelope()

        monkeypatch.setattr(LibP2PHost, "signed_record", forged)
    listen = ["/ip4/127.0.0.1/tcp/0"]
    with trio.fail_after(30):
        async with (
            Node.open(listen=listen, identity=Identity.generate(), public_pubsub=NAMING) as hub,
            Node.open(listen=listen, identity=Identity.generate(), public_pubsub=TRUSTING) as a,
            Node.open(listen=listen, identity=Identity.generate(), public_pubsub=TRUSTING) as b,
        ):
            topics = [await node.join("chat", public=True) for node in (hub, a, b)]
            for node in (a, b):
                await connected(node, hub)
            await until(lambda: len(topics[0].mesh()) == 2 and bool(hub.host.signed_record(b.peer_id)))
            assert not a.host.connections(b.peer_id)
            await topics[0].leave()
            if is_forged:
                refused = "public_pubsub_px_records_refused"
                await until(lambda: [node.counters().get(refused) for node in (a, b)] == [1, 1])
                assert not a.host.addrs(b.peer_id)
                return
            await until(lambda: topics[1].mesh() == [b.peer_id])
            counters = (a.counters(), b.counters())
            assert sum(one.get("public_pubsub_px_records_taken", 0) for one in counters) >= 1


async def test_dials_at_the_same_time_are_bounded(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    host, others = network.host(), [network.host() for _ in range(100)]
    async with Node.open(host=host, identity=host.identity, public_pubsub=True) as node:
        pubsub = node.pubsub(public=True)
        named = [PeerInfo(peer_id_bytes(other.peer_id)) for other in others]
        pubsub.perform([Dial(None, info) for info in (*named, *named)], trio.current_time())
        await until(lambda: node.counters().get("public_pubsub_dials_failed") == 64)
        assert node.counters()["public_pubsub_dials_dropped_busy"] == 72
