"""The scopes of a host: unproven connections hold little, alone and together, and a proof frees them from that."""

import pytest

from dep2p.host.resources.ledger import (
    CIRCUIT_BYTES_MAX,
    CIRCUIT_UNSENT_BYTES,
    CIRCUITS_BYTES_MAX,
    RELAYED_UNPROVEN_MAX,
    ConnectionResources,
    Ledger,
    address_block,
)
from dep2p.limits import Limits
from dep2p.types import PeerId

RELAY = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWRelay/p2p-circuit"


class Host:
    """A ledger, and the connections that it ended."""

    def __init__(self, **limits: int) -> None:
        self.events: list[str] = []
        self.ended: list[str] = []
        self.ledger = Ledger(Limits(**limits), lambda name, _text: self.events.append(name))

    def open(self, peer: str, addr: str = "/ip4/192.0.2.7/tcp/1", *, is_inbound: bool = True) -> ConnectionResources:
        def end(_reason: str) -> None:
            self.ended.append(peer)
            self.ledger.close_connection(held)

        held = self.ledger.open_connection(PeerId(peer), addr, is_inbound=is_inbound, end=end)
        return held


@pytest.mark.parametrize(
    ("addr", "block"),
    [
        ("/ip4/192.0.2.7/tcp/4001", "192.0.2.0/24"),
        ("/ip4/192.0.2.255/udp/4001/quic-v1", "192.0.2.0/24"),
        ("/ip6/2001:db8:1:2ff::1/tcp/4001/ws", "2001:db8:1:200::/56"),
        ("/ip6/::ffff:192.0.2.9/tcp/4001", "192.0.2.0/24"),
        ("/ip6/::1/tcp/1", "::/56"),
        (RELAY, "relay 12D3KooWRelay"),
        ("", "unknown"),
        ("/dns4/example.org/tcp/1", "unknown"),
        ("/ip4/999.0.2.7/tcp/1", "unknown"),
    ],
)
def test_the_block_of_an_address(addr: str, block: str) -> None:
    assert address_block(addr) == block


def test_an_unproven_connection_that_holds_too_much_ends_and_a_proven_one_may_hold_more() -> None:
    host = Host(memory_bytes_per_unproven_connection_max=100, memory_bytes_per_peer_max=1_000)
    stranger, member = host.open("stranger"), host.open("member")
    host.ledger.prove(member)
    assert member.account.reserve(1_000)
    assert not member.account.reserve(1)
    assert not stranger.account.reserve(101)
    assert host.ended == ["stranger"]
    assert host.ledger.values()["memory_bytes"] == 1_000


def test_the_connections_of_one_peer_share_its_bound() -> None:
    host = Host(memory_bytes_per_peer_max=1_000)
    first, second = host.open("member"), host.open("member")
    host.ledger.prove(first)
    host.ledger.prove(second)
    assert first.account.reserve(700)
    assert not second.account.reserve(400)
    assert "resources_refused_peer" in host.events
    host.ledger.close_connection(first)
    assert second.account.reserve(400)


def test_all_unproven_connections_together_hold_no_more_than_their_bound() -> None:
    """Twelve connections that filled their windows took 900 MiB."""
    host = Host()
    for number in range(448):
        held = host.open(f"p{number}", f"/ip4/10.{number % 200}.{number // 200}.1/tcp/1")
        while held.account.reserve(65_536):
            assert host.ledger.values()["memory_bytes_unproven"] <= 64 * 1_048_576
    assert host.ended
    newcomer = host.open("newcomer", "/ip4/203.0.113.1/tcp/1")
    assert newcomer.account.reserve(8_192), "what strangers hold shuts out the next one"


def test_one_address_block_cannot_take_what_all_strangers_may_hold() -> None:
    host = Host(memory_bytes_per_address_block_max=1_000, memory_bytes_unproven_max=2_000)
    other = host.open("other", "/ip4/203.0.113.1/tcp/1")
    assert other.account.reserve(900)
    for number in range(10):
        assert host.open(f"p{number}").account.reserve(300)
    assert "other" not in host.ended
    assert host.ledger.values()["memory_bytes_largest_address_block"] <= 1_000


def test_the_newest_connections_of_a_block_replace_its_oldest_unproven_ones() -> None:
    host = Host(connections_unproven_per_address_block_max=3)
    member = host.open("member")
    host.ledger.prove(member)
    own = host.open("own", is_inbound=False)
    for number in range(5):
        host.open(f"p{number}")
    assert host.ended == ["p0", "p1"]
    assert not member.account.is_closed
    assert not own.account.is_closed


def test_of_the_circuits_through_one_relay_strangers_get_a_few() -> None:
    host = Host()
    for number in range(RELAYED_UNPROVEN_MAX + 2):
        host.open(f"p{number}", RELAY)
    assert host.ended == ["p0", "p1"]


def test_a_connection_whose_protection_ends_is_unproven_again() -> None:
    host = Host(memory_bytes_per_unproven_connection_max=100)
    held = host.open("member")
    host.ledger.prove(held)
    assert held.account.reserve(500)
    host.ledger.unprove(held)
    assert host.ledger.values()["memory_bytes_unproven"] == 500
    assert not held.account.reserve(1)
    assert host.ended == ["member"]


def test_nothing_is_left_of_connections_that_have_ended() -> None:
    host = Host()
    for number in range(50):
        held = host.open(f"p{number}", f"/ip4/10.0.{number}.1/tcp/1")
        held.account.reserve(1_000)
        if number % 2:
            host.ledger.prove(held)
        host.ledger.close_connection(held)
        host.ledger.close_connection(held)
        host.ledger.prove(held)
        host.ledger.unprove(held)
    assert not any(host.ledger.values().values())
    assert host.ledger.scopes == 4


def test_streams_of_one_protocol_that_strangers_hold_are_bounded() -> None:
    host = Host(streams_unproven_per_protocol_max=2)
    stranger, member = host.open("stranger"), host.open("member")
    host.ledger.prove(member)
    assert host.ledger.enter_protocol(stranger, "/a")
    assert host.ledger.enter_protocol(stranger, "/a")
    assert not host.ledger.enter_protocol(stranger, "/a")
    assert host.ledger.enter_protocol(stranger, "/b")
    assert host.ledger.enter_protocol(member, "/a")
    host.ledger.leave_protocol("/a")
    assert host.ledger.enter_protocol(stranger, "/a")


def test_circuits_of_a_relay_are_bounded_and_the_largest_ends() -> None:
    ledger, ended = Ledger(Limits()), list[str]()
    circuits = [ledger.open_circuit(ended.append) for _ in range(256)]
    assert ended == []
    assert circuits[0].reserve(CIRCUIT_BYTES_MAX - CIRCUIT_UNSENT_BYTES)
    for circuit in circuits[1:]:
        circuit.reserve(CIRCUIT_UNSENT_BYTES)
    assert ended and circuits[0].is_closed
    assert ledger.values()["memory_bytes_circuits"] <= CIRCUITS_BYTES_MAX


def test_a_connection_that_keeps_its_place_gives_way_after_all_others_of_its_block() -> None:
    host = Host(connections_unproven_per_address_block_max=3)
    host.open("client of a relay").account.keeps_place = True
    for number in range(6):
        host.open(f"stranger {number}")
    assert host.ended == [f"stranger {number}" for number in range(4)]


def test_a_full_block_of_connections_that_keep_their_places_still_lets_the_next_one_in() -> None:
    host = Host(connections_unproven_per_address_block_max=2)
    for number in range(3):
        host.open(f"client {number}").account.keeps_place = True
    assert host.ended == ["client 0"]


def test_circuits_of_strangers_leave_memory_for_those_of_members() -> None:
    host = Host()
    ended: list[str] = []
    member = host.ledger.open_circuit(lambda _reason: ended.append("member"), is_proven=True)
    assert member.reserve(CIRCUIT_BYTES_MAX - CIRCUIT_UNSENT_BYTES), "it holds as much as any"
    for _ in range(2 * CIRCUITS_BYTES_MAX // CIRCUIT_BYTES_MAX):
        host.ledger.open_circuit(lambda _reason: ended.append("stranger")).reserve(
            CIRCUIT_BYTES_MAX - CIRCUIT_UNSENT_BYTES
        )
    assert "stranger" in ended and "member" not in ended
    assert not member.is_closed
