"""What a host takes from the observed addresses of identify."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from multiaddr import Multiaddr

from dep2p.host.counters import Counters
from dep2p.host.host import LibP2PHost
from dep2p.host.interface import Direction, PeerDisconnected
from dep2p.host.reachability.observations import Observations
from dep2p.protocols.reachability.model import NatKind
from dep2p.types import PeerId

HERE = "/ip4/198.51.100.7/tcp/4001"
ID = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"
TwoHosts = Callable[..., AbstractAsyncContextManager[tuple[LibP2PHost, LibP2PHost]]]


@dataclass
class Link:
    """A connection, for what an observation asks of it."""

    id: int
    peer: PeerId
    remote_addr: str
    direction: Direction
    is_closed: bool


def observations(counters: Counters, *members: str, own: str = "/ip4/192.168.1.7/tcp/4001") -> Observations:
    return Observations(counters, is_member=lambda peer: peer in members, listen_addrs=lambda: [own])


def link(
    number: int, remote_addr: str | None = None, *, direction: Direction = "inbound", is_closed: bool = False
) -> Any:
    remote_addr = f"/ip4/192.0.{number}.1/tcp/9" if remote_addr is None else remote_addr
    return Link(number, PeerId(f"p{number}"), remote_addr, direction, is_closed)


def wire(addr: str) -> bytes:
    return bytes(Multiaddr(addr).to_bytes())


def test_addresses_are_taken_and_forgotten_with_the_connection() -> None:
    counters = Counters()
    seen = observations(counters)
    for number in (1, 2):
        seen.take(link(number), wire(HERE))
    assert seen.addrs() == seen.confirmed() == [HERE]
    assert seen.hosts() == ["198.51.100.7"]
    assert seen.values() == {"observed_addresses_held": 2}
    seen.on_event(PeerDisconnected(link(1), True, "test"))
    assert seen.confirmed() == []
    assert counters.snapshot() == {"observed_addresses": 2}


def test_the_peer_id_of_an_address_is_left_out() -> None:
    seen = observations(Counters(), "p1")
    seen.take(link(1, remote_addr=f"/ip4/192.0.1.1/tcp/9/p2p/{ID}"), wire(f"{HERE}/p2p/{ID}"))
    assert seen.addrs() == [HERE]


def test_an_address_of_this_machine_says_that_nothing_is_translated() -> None:
    seen = observations(Counters(), own=HERE)
    assert seen.nat_kind("tcp") is NatKind.UNKNOWN
    seen.take(link(1, direction="outbound"), wire("/ip4/198.51.100.7/tcp/50000"))
    assert (seen.nat_kind("tcp"), seen.addrs()) == (NatKind.NONE, [])


@pytest.mark.parametrize(
    ("observed", "why"),
    [
        (b"\xff\xff", "malformed"),
        (wire(HERE) * 100, "malformed"),
        (wire("/ip4/198.51.100.7/udp/1"), "malformed"),  # a transport that is not spoken here
        (wire("/dns4/example.org/tcp/1"), "transport"),
        (wire(f"/ip4/198.51.100.7/tcp/1/p2p/{ID}/p2p-circuit"), "transport"),
        (wire("/ip4/198.51.100.7/udp/1/quic-v1"), "transport"),
        (wire("/ip4/10.0.0.1/tcp/1"), "scope"),
    ],
)
def test_what_does_not_count_is_counted_with_its_reason(observed: bytes, why: str) -> None:
    counters = Counters()
    seen = observations(counters, "p1")
    seen.take(link(1), observed)
    assert (seen.addrs(), counters.snapshot()) == ([], {f"observed_addresses_dropped_{why}": 1})


def test_a_relay_s_address_is_not_taken_for_this_node_s() -> None:
    counters = Counters()
    seen = observations(counters, "p1")
    seen.take(link(1, remote_addr=f"/ip4/192.0.2.1/tcp/9/p2p/{ID}/p2p-circuit"), wire(HERE))
    assert (seen.addrs(), counters.snapshot()) == ([], {"observed_addresses_dropped_relayed": 1})


@pytest.mark.parametrize(("is_closed", "observed"), [(True, wire(HERE)), (False, b"")])
def test_a_closed_connection_and_a_peer_that_says_nothing_leave_no_trace(is_closed: bool, observed: bytes) -> None:
    counters = Counters()
    seen = observations(counters, "p1")
    seen.take(link(1, is_closed=is_closed), observed)
    assert (seen.addrs(), counters.snapshot()) == ([], {})


def was_dropped(host: LibP2PHost) -> bool:
    return host.counters().get("observed_addresses_dropped_scope", 0) == 1


@pytest.mark.real
async def test_a_real_host_hands_over_what_identify_says(
    two_hosts: TwoHosts, eventually: Callable[[Callable[[], bool]], Any]
) -> None:
    async with two_hosts() as (one, other):
        await one.dial(other.peer_id, other.listen_addrs())
        # On loopback: what both sides see is dropped, and counted.
        for host in (one, other):
            await eventually(partial(was_dropped, host))
            assert host.observed_addrs() == []
            assert host.nat_kind("tcp") is NatKind.UNKNOWN
