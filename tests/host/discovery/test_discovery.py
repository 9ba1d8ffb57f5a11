"""Discovery sources on real hosts, and what happens to a source that fails."""

from typing import Any

import pytest
import trio
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from dep2p.host.connections.peerstore import ADDRS_PER_PEER_MAX
from dep2p.host.discovery import dht as discovery_dht
from dep2p.host.discovery.bootstrap import BootstrapDiscovery
from dep2p.host.discovery.dht import DhtDiscovery
from dep2p.host.discovery.interface import Emit, HostView
from dep2p.host.discovery.mdns import MdnsDiscovery
from dep2p.host.discovery.rendezvous import RendezvousDiscovery, RendezvousServer
from dep2p.host.discovery.sources import discovery_sources
from dep2p.host.interface import PeerConnected, PeerDiscovered
from dep2p.identity import Identity

pytestmark = pytest.mark.real


async def test_bootstrap_peers_are_named_and_connected(open_host: Any, event_log: Any) -> None:
    async with open_host() as first:
        source = BootstrapDiscovery(first.listen_addrs())
        async with open_host(discovery=[source]) as host:
            log = event_log(host)
            await log.wait(PeerConnected)
            assert host.connections(first.peer_id)
            assert host.counters()["discovery_bootstrap_found"] == 1


async def test_rendezvous_names_the_others_of_a_namespace(open_host: Any, event_log: Any) -> None:
    async with open_host(discovery=[RendezvousServer()]) as point:
        async with (
            open_host(discovery=[RendezvousDiscovery(point.listen_addrs(), "one")]) as first,
            open_host(discovery=[RendezvousDiscovery(point.listen_addrs(), "two")]),
            open_host(discovery=[RendezvousDiscovery(point.listen_addrs(), "one")]) as second,
        ):
            log = event_log(second)
            found = await log.wait(PeerDiscovered)
            assert found.peer == first.peer_id
            assert found.source == "rendezvous"
            await second.dial(first.peer_id)


async def test_dht_names_the_others_of_a_namespace(open_host: Any, event_log: Any) -> None:
    async with open_host(discovery=[DhtDiscovery("x")]) as node:
        async with (
            open_host(discovery=[DhtDiscovery("x")]) as first,
            open_host(discovery=[DhtDiscovery("x")]) as second,
        ):
            log = event_log(second)
            await first.dial(node.peer_id, node.listen_addrs())
            await second.dial(node.peer_id, node.listen_addrs())
            with trio.fail_after(20):
                while first.peer_id not in [event.peer for event in log.of(PeerDiscovered)]:
                    await log.wait(PeerDiscovered, len(log.of(PeerDiscovered)) + 1, timeout_s=20)
            await second.dial(first.peer_id)


async def test_mdns_names_hosts_of_the_local_network(open_host: Any, event_log: Any) -> None:
    try:
        async with open_host(discovery=[MdnsDiscovery()]) as first, open_host(discovery=[MdnsDiscovery()]) as second:
            log = event_log(second)
            with trio.fail_after(15):
                while first.peer_id not in [event.peer for event in log.of(PeerDiscovered)]:
                    await log.wait(PeerDiscovered, len(log.of(PeerDiscovered)) + 1, timeout_s=15)
    except trio.TooSlowError:
        pytest.skip("no multicast here")


class _Flaky:
    name = "flaky"

    def __init__(self) -> None:
        self.runs = 0

    async def run(self, host: HostView, emit: Emit) -> None:
        self.runs += 1
        if self.runs == 1:
            raise RuntimeError("the network is away")
        emit(Identity.generate().peer_id, ["/ip4/127.0.0.1/tcp/4001", "rubbish"])
        await trio.sleep_forever()


async def test_failing_source_is_counted_and_tried_again(open_host: Any, event_log: Any) -> None:
    source = _Flaky()
    async with open_host(discovery=[source]) as host:
        log = event_log(host)
        found = await log.wait(PeerDiscovered)
        assert found.addrs == ("/ip4/127.0.0.1/tcp/4001",)
        counts = host.counters()
        assert counts["discovery_flaky_failed"] == 1
        assert counts["peerstore_address_malformed"] == 1


def test_sources_of_a_configuration() -> None:
    peer = Identity.generate().peer_id
    addr = f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"
    sources = discovery_sources(mdns=True, dht=True, bootstrap=[addr], rendezvous=[addr])
    assert [source.name for source in sources] == ["bootstrap", "mdns", "rendezvous", "dht"]
    assert discovery_sources() == []
    with pytest.raises(ValueError, match="/p2p/"):
        discovery_sources(bootstrap=["/ip4/127.0.0.1/tcp/4001"])
    with pytest.raises(ValueError, match="/p2p/"):
        discovery_sources(rendezvous=["/ip4/127.0.0.1/tcp/4001"])


async def test_provider_keys_of_unknown_peers_are_bounded(open_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_dht, "_PROVIDER_KEYS_MAX", 3)
    peer = PeerInfo(ID.from_string(Identity.generate().peer_id), [])
    async with open_host(listen=[]) as host:
        store = ProviderStore(host.facade())
        discovery_dht.bound_provider_keys(store)
        for number in (*range(10), 0):
            store.add_provider(bytes([number]), peer)
        assert list(store.providers) == [b"\x00", b"\x01", b"\x02"]


async def test_addresses_that_discovery_protocols_name_are_bounded_per_peer(open_host: Any) -> None:
    async with open_host(listen=[]) as host:
        store, peer = host.facade().get_peerstore(), ID.from_string(Identity.generate().peer_id)
        for number in range(1, 2_000):
            store.add_addrs(peer, [Multiaddr(f"/ip4/192.0.2.1/tcp/{number}")], 60)
        assert len(store.peer_data_map[peer].get_addrs()) <= ADDRS_PER_PEER_MAX
        assert Multiaddr("/ip4/192.0.2.1/tcp/1999") in store.peer_data_map[peer].get_addrs()
