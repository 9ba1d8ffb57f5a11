"""Observed addresses: strangers of one address block have one vote, members one each; ports tell the kind of NAT."""

from itertools import count

import pytest

from dep2p.protocols.reachability.model import NatKind
from dep2p.protocols.reachability.observed import (
    ADDRS_MAX,
    VOTES_MAX,
    VOTES_PER_BLOCK_MAX,
    Observation,
    ObservedAddresses,
    ObservedTransport,
    PortUse,
    transport_of,
)
from dep2p.types import PeerId

HERE, OTHER = "/ip4/198.51.100.7/tcp/4001", "/ip4/198.51.100.7/tcp/4002"


class Node:
    """A node and those who see it. A peer's name begins with its block, "a" is 192.0.1.0/24; members are capitals."""

    def __init__(self) -> None:
        self.observed = ObservedAddresses(lambda peer: peer[0].isupper())
        self.connections = count(1)

    def note(
        self, name: str, addr: str, use: PortUse = "inbound", *, port: int | None = None, remote: str | None = None
    ) -> str | None:
        """The answer for what the peer sees; its connection has the next number."""
        block = ord(name[0].lower()) - ord("a") + 1
        transport: ObservedTransport = "quic" if "/udp/" in addr else "tcp"
        socket = "udp/9/quic-v1" if transport == "quic" else "tcp/9"
        return self.observed.note(
            Observation(
                connection=next(self.connections),
                observer=PeerId(name),
                observer_addr=f"/ip4/192.0.{block}.{int(name[1:])}/{socket}" if remote is None else remote,
                block=f"192.0.{block}.0/24",
                transport=transport,
                port_use=use,
                listening_port=port,
                addr=addr,
            )
        )

    def dialed(self, name: str, addr: str, port: int = 4001) -> None:
        """The node has dialed the peer from a port that it listens on."""
        assert self.note(name, addr, "listening", port=port) is None


def test_two_blocks_confirm_an_address_and_one_does_not() -> None:
    node = Node()
    node.note("a1", HERE)
    node.note("a2", HERE)
    assert (node.observed.confirmed(), node.observed.addrs()) == ((), ())
    node.note("b1", HERE)
    assert node.observed.confirmed() == node.observed.addrs() == (HERE,)


def test_one_member_is_enough_for_a_candidate_and_two_of_one_block_for_a_confirmed_one() -> None:
    node = Node()
    node.note("A1", HERE)
    assert (node.observed.confirmed(), node.observed.addrs()) == ((), (HERE,))
    node.note("A2", HERE)
    assert node.observed.confirmed() == (HERE,)


def test_identities_of_a_member_at_one_ip_address_have_one_vote() -> None:
    node = Node()
    for name in ("A1", "B1"):
        node.note(name, HERE, remote="/ip4/192.0.1.1/tcp/9")
    assert node.observed.confirmed() == ()


def test_the_address_that_most_have_seen_comes_first_and_then_those_of_one_member() -> None:
    node = Node()
    node.note("A1", "/ip4/198.51.100.9/tcp/4001")
    for name in ("b1", "c1"):
        node.note(name, OTHER)
    for name in ("d1", "e1", "f1"):
        node.note(name, HERE)
    assert node.observed.addrs() == (HERE, OTHER, "/ip4/198.51.100.9/tcp/4001")


def test_an_observation_ends_with_its_connection() -> None:
    node = Node()
    node.note("a1", HERE)
    node.note("b1", HERE)
    node.observed.forget(1)
    assert node.observed.confirmed() == ()
    assert len(node.observed) == 1
    node.observed.forget(99)
    assert len(node.observed) == 1


def test_the_latest_observation_of_a_peer_counts_and_the_end_of_its_earlier_connection_leaves_it() -> None:
    node = Node()
    node.note("A1", OTHER)
    node.note("A1", HERE)
    node.observed.forget(1)
    assert node.observed.addrs() == (HERE,)


def test_a_port_that_is_not_listened_on_tells_the_ip_address_only() -> None:
    node = Node()
    node.note("A1", "/ip4/198.51.100.7/tcp/50123", "other")
    assert node.observed.addrs() == ()
    assert node.observed.hosts() == ("198.51.100.7",)


def test_hosts_follow_the_rule_of_addresses() -> None:
    node = Node()
    node.note("a1", "/ip4/198.51.100.8/tcp/1", "other")
    node.note("a2", "/ip4/198.51.100.8/tcp/2", "other")
    assert node.observed.hosts() == ()
    node.note("b1", "/ip4/198.51.100.8/udp/3/quic-v1", "other")
    node.note("A1", HERE)
    assert node.observed.hosts() == ("198.51.100.8", "198.51.100.7")


@pytest.mark.parametrize(
    ("addr", "remote", "why"),
    [
        ("/ip4/192.168.1.7/tcp/1", None, "scope"),
        ("/ip4/100.64.0.7/tcp/1", None, "scope"),
        ("/ip4/127.0.0.1/tcp/1", None, "scope"),
        ("/ip4/0.0.0.0/tcp/1", None, "scope"),
        ("/ip4/198.51.100.7/tcp/0", None, "scope"),
        (HERE, "/ip4/192.168.1.9/tcp/9", "scope"),
        (HERE, "/ip4/127.0.0.1/tcp/9", "scope"),
        (HERE, "", "scope"),
        (HERE, "/ip4/192.0.1.1/tcp/9/p2p/x/p2p-circuit", "relayed"),
        ("/ip4/198.51.100.7/tcp/1/p2p/x/p2p-circuit", None, "relayed"),
        ("/ip4/198.51.100.7/tcp/1/ws", None, "transport"),
        ("/dns4/example.org/tcp/1", None, "transport"),
        ("/ip4/198.51.100.7/udp/1", None, "transport"),
    ],
)
def test_what_says_nothing_of_the_internet_does_not_count(addr: str, remote: str | None, why: str) -> None:
    node = Node()
    assert node.note("A1", addr, remote=remote) == why
    assert len(node.observed) == 0


def test_strangers_of_a_block_fill_a_part_and_strangers_take_no_place_of_a_member() -> None:
    node = Node()
    answers = [node.note(f"a{number}", HERE) for number in range(1, VOTES_PER_BLOCK_MAX + 2)]
    assert answers == [None] * VOTES_PER_BLOCK_MAX + ["block_full"]
    for number in range(1, VOTES_MAX):
        node.note(f"{'bcdefghijklmnopqrstuvwxyz'[number % 25]}{number}", OTHER)
    for number in range(1, 252):
        node.note(f"A{number}", HERE)
    assert len(node.observed) == VOTES_MAX
    assert [node.note(f"B{number}", HERE) for number in range(1, 252)] == [None] * 251
    assert len(node.observed) == VOTES_MAX
    assert node.note("z9", HERE) == "table_full"


def test_a_bounded_number_of_addresses_is_named() -> None:
    node = Node()
    for number in range(1, 20):
        node.note(f"A{number}", f"/ip4/198.51.100.{number}/tcp/4001")
    assert len(node.observed.addrs()) == len(node.observed.hosts()) == ADDRS_MAX


def kind(node: Node, transport: ObservedTransport = "tcp", *own: str) -> NatKind:
    return node.observed.nat_kind(transport, own or ("192.168.1.7",))


def test_one_socket_that_two_see_alike_is_behind_an_endpoint_independent_nat() -> None:
    node = Node()
    node.dialed("a1", HERE)
    assert kind(node) is NatKind.UNKNOWN
    node.dialed("b1", HERE)
    assert kind(node) is NatKind.ENDPOINT_INDEPENDENT
    assert kind(node, "quic") is NatKind.UNKNOWN


def test_one_socket_that_each_sees_with_another_port_is_behind_an_endpoint_dependent_nat() -> None:
    node = Node()
    node.dialed("A1", HERE)
    node.dialed("A2", OTHER)
    assert kind(node) is NatKind.ENDPOINT_DEPENDENT


def test_one_liar_beside_two_who_agree_does_not_change_the_kind() -> None:
    node = Node()
    for name, addr in (("a1", HERE), ("b1", OTHER), ("c1", HERE)):
        node.dialed(name, addr)
    assert kind(node) is NatKind.ENDPOINT_INDEPENDENT


@pytest.mark.parametrize("use", ["inbound", "other"])
def test_connections_from_other_sockets_tell_no_kind(use: PortUse) -> None:
    node = Node()
    node.note("A1", HERE, use)
    node.note("B1", OTHER, use)
    assert kind(node) is NatKind.UNKNOWN


def test_two_sockets_are_not_compared() -> None:
    node = Node()
    node.dialed("A1", HERE, port=4001)
    node.dialed("B1", OTHER, port=4002)
    assert kind(node) is NatKind.UNKNOWN


def test_strangers_of_one_block_tell_no_kind() -> None:
    node = Node()
    node.dialed("a1", HERE)
    node.dialed("a2", OTHER)
    assert kind(node) is NatKind.UNKNOWN


def test_an_address_of_this_machine_is_not_translated() -> None:
    node = Node()
    node.note("a1", HERE, "other")
    assert kind(node, "tcp", "198.51.100.7") is NatKind.NONE


def test_ipv4_tells_the_kind_where_ipv6_is_not_translated() -> None:
    node = Node()
    for name in ("a1", "b1", "c1"):
        node.note(name, "/ip6/2001:db8::7/tcp/4001")
    assert kind(node, "tcp", "2001:db8::7", "192.168.1.7") is NatKind.NONE
    node.dialed("d1", HERE)
    node.dialed("e1", OTHER)
    assert kind(node, "tcp", "2001:db8::7", "192.168.1.7") is NatKind.ENDPOINT_DEPENDENT


@pytest.mark.parametrize(
    ("addr", "transport"),
    [
        ("/ip4/192.0.2.1/tcp/1", "tcp"),
        ("/ip6/2001:db8::1/tcp/1/ws", "ws"),
        ("/ip4/192.0.2.1/udp/1/quic-v1", "quic"),
        ("/ip4/192.0.2.1/udp/1/quic", None),
        ("/ip4/192.0.2.1/tcp/1/wss", None),
        ("/dns/example.org/tcp/1", None),
        ("/ip4/192.0.2.1", None),
        ("", None),
    ],
)
def test_transports_are_told_by_the_form_of_an_address(addr: str, transport: str | None) -> None:
    assert transport_of(addr) == transport
