"""The words of identify: a peer learns the addresses that it can use over its link."""

from dataclasses import dataclass

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.pb.identify_pb2 import Identify as IdentifyMessage
from multiaddr import Multiaddr

from dep2p.host.connections.identify import IdentifyService, OwnDescription
from dep2p.host.connections.peerstore import PeerStore
from dep2p.host.connections.signed_records import open_signed_record
from dep2p.host.counters import Counters
from dep2p.identity import Identity

LOOPBACK, HOME, WORLD = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1", "/ip4/198.51.100.7/tcp/1"
RELAYED = "/ip4/203.0.113.9/tcp/1/p2p/12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD/p2p-circuit"


@dataclass
class Link:
    """A connection, for what identify asks of it."""

    remote_addr: str


@pytest.mark.parametrize(
    ("remote", "told"),
    [
        ("/ip4/127.0.0.1/tcp/50000", [LOOPBACK, HOME, WORLD, RELAYED]),
        ("/ip4/192.168.1.9/tcp/50000", [HOME, WORLD, RELAYED]),
        ("/ip4/203.0.113.5/udp/50000/quic-v1", [WORLD, RELAYED]),
        ("/ip6/2001:db8::5/tcp/50000", [WORLD, RELAYED]),
        (RELAYED, [WORLD, RELAYED]),
        ("", [WORLD, RELAYED]),
    ],
)
def test_a_peer_is_told_the_addresses_that_it_can_use_over_its_link(remote: str, told: list[str]) -> None:
    identity, counters = Identity.generate(), Counters()
    service = IdentifyService(
        OwnDescription(
            key_pair=create_new_key_pair(identity.private_seed),
            agent="dep2p/test",
            addrs=lambda: [LOOPBACK, HOME, WORLD, RELAYED],
            protocols=lambda _connection: [],
        ),
        PeerStore(identity.peer_id, 10, counters, path=None),
        counters,
        timeout_s=1.0,
        on_identified=lambda _peer: None,
        on_observed=lambda _connection, _addr: None,
    )
    for _ in range(2):  # the signed record of a scope is kept
        framed = service.message(Link(remote))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        message = IdentifyMessage.FromString(framed[2 if len(framed) > 129 else 1 :])
        assert [str(Multiaddr(raw)) for raw in message.listen_addrs] == told
        assert list(open_signed_record(message.signedPeerRecord, identity.peer_id).addrs) == told
