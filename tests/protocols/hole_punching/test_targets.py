"""Which of a peer's addresses are dialed."""

import pytest

from dep2p.protocols.hole_punching.targets import HOSTS_PER_FAMILY_MAX, TARGETS_MAX, is_punchable, punch_targets

PEER = "12D3KooWJWEKvSFbben74C7H4YtKjhPMTDxd7gP7zxWSUEeF27st"


@pytest.mark.parametrize(
    "addr",
    [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/192.168.1.10/tcp/4001",
        "/ip4/100.64.0.1/udp/4001/quic-v1",
        "/ip4/198.51.100.1/tcp/0",
        "/ip4/224.0.0.1/udp/4001/quic-v1",
        "/ip6/fd00::1/tcp/4001",
        "/ip6/fe80::1/tcp/4001",
        "/dns4/example.com/tcp/4001",
        "/ip4/198.51.100.1/tcp/4001/ws",
        "/ip4/198.51.100.1/udp/4001",
        f"/ip4/198.51.100.1/tcp/4001/p2p/{PEER}/p2p-circuit",
        "/ip4/198.51.100.1",
        "nonsense",
        "",
    ],
)
def test_addresses_that_are_not_dialed(addr: str) -> None:
    assert not is_punchable(addr)
    assert punch_targets([addr], []) == ()


def test_each_public_address_once_in_order_without_the_peer_id() -> None:
    addrs = [
        f"/ip4/198.51.100.1/udp/4001/quic-v1/p2p/{PEER}",
        "/ip6/2001:db8::1/tcp/4001",
        "/ip4/198.51.100.1/tcp/4001",
        "/ip4/198.51.100.1/tcp/4001",
    ]
    assert punch_targets(addrs, []) == (
        "/ip4/198.51.100.1/udp/4001/quic-v1",
        "/ip6/2001:db8::1/tcp/4001",
        "/ip4/198.51.100.1/tcp/4001",
    )


def test_own_addresses_are_left_out_and_the_same_router_is_not() -> None:
    own = [f"/ip4/198.51.100.1/tcp/4001/p2p/{PEER}"]
    addrs = ["/ip4/198.51.100.1/tcp/4001", "/ip4/198.51.100.1/tcp/20000"]
    assert punch_targets(addrs, own) == ("/ip4/198.51.100.1/tcp/20000",)


def test_one_machine_has_a_bounded_count_of_addresses() -> None:
    addrs = [f"/ip4/198.51.100.1/tcp/{port}" for port in range(1, 100)]
    assert punch_targets(addrs, []) == tuple(addrs[:TARGETS_MAX])


def test_few_machines_of_each_family_are_dialed() -> None:
    addrs = [f"/ip4/198.51.100.{host}/tcp/4001" for host in range(1, 50)]
    addrs += [f"/ip6/2001:db8::{host}/tcp/4001" for host in range(1, 50)]
    chosen = punch_targets(addrs, [])
    assert sum(addr.startswith("/ip4/") for addr in chosen) == HOSTS_PER_FAMILY_MAX
    assert sum(addr.startswith("/ip6/") for addr in chosen) == HOSTS_PER_FAMILY_MAX
