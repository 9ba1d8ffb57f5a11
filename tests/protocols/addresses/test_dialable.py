"""Which addresses of another node can be right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.protocols.addresses.dialable import (
    AddressScope,
    address_scope,
    addrs_for_others,
    dial_target,
    link_scope,
    plausible_addrs,
    widest_scope,
)

LOOPBACK, PRIVATE, PUBLIC = AddressScope


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("ip4/127.0.0.1", LOOPBACK),
        ("ip4/127.9.9.9", LOOPBACK),
        ("ip6/::1", LOOPBACK),
        ("ip6/::ffff:127.0.0.1", LOOPBACK),
        ("dns4/localhost", LOOPBACK),
        ("dns/a.LOCALHOST.", LOOPBACK),
        ("ip4/10.1.2.3", PRIVATE),
        ("ip4/172.31.0.1", PRIVATE),
        ("ip4/192.168.0.1", PRIVATE),
        ("ip4/100.64.0.1", PRIVATE),
        ("ip4/169.254.169.254", PRIVATE),
        ("ip6/fd00::1", PRIVATE),
        ("ip6/::ffff:192.168.0.1", PRIVATE),
        ("ip4/172.32.0.1", PUBLIC),
        ("ip4/8.8.8.8", PUBLIC),
        ("ip6/2001:db8::1", PUBLIC),
        ("dns4/example.org", PUBLIC),
        ("ip4/0.0.0.0", None),
        ("ip4/0.1.2.3", None),
        ("ip4/224.0.0.251", None),
        ("ip4/255.255.255.255", None),
        ("ip4/240.0.0.1", None),
        ("ip6/::", None),
        ("ip6/ff02::1", None),
        ("ip6/fe80::1", None),
        ("ip4/1.2.3", None),
        ("ip4/::1", LOOPBACK),
        ("dns4/", None),
        ("unix/x", None),
    ],
)
def test_the_scope_of_an_address(host: str, scope: AddressScope | None) -> None:
    for rest in ("tcp/4001", "udp/4001/quic-v1", "tcp/4001/ws/p2p/QmX", "tcp/4001/p2p/QmRelay/p2p-circuit/p2p/QmX"):
        assert address_scope(f"/{host}/{rest}") is scope


@pytest.mark.parametrize("port", ["0", "00", "65536", "99999999", "-1", "x", "", "٣"])
def test_a_port_that_nobody_can_listen_on_is_none(port: str) -> None:
    assert dial_target(f"/ip4/192.0.2.1/tcp/{port}") is None


@pytest.mark.parametrize(
    ("heard_over", "own", "taken"),
    [
        (LOOPBACK, (), "lpu"),
        (PRIVATE, (), "pu"),
        (PUBLIC, (), "u"),
        (PUBLIC, ("/ip4/192.168.7.2/tcp/9",), "pu"),
        (PUBLIC, ("/ip4/192.168.8.2/tcp/9",), "u"),
        (PUBLIC, ("/ip4/127.0.0.1/tcp/9",), "u"),
        (LOOPBACK, ("/ip4/127.0.0.1/tcp/1",), "pu"),
        (LOOPBACK, ("/ip6/::ffff:127.0.0.1/tcp/1",), "pu"),
    ],
)
def test_addresses_are_taken_when_the_link_can_know_them(
    heard_over: AddressScope, own: tuple[str, ...], taken: str
) -> None:
    addrs = {"l": "/ip4/127.0.0.1/tcp/1", "p": "/ip4/192.168.7.7/tcp/1", "u": "/ip4/198.51.100.1/tcp/1"}
    assert plausible_addrs(list(addrs.values()), heard_over=heard_over, own=own) == tuple(addrs[kind] for kind in taken)


def test_a_relay_on_this_node_is_no_own_address() -> None:
    own = ("/ip4/198.51.100.1/tcp/1/p2p/QmOwn",)
    circuit = "/ip4/198.51.100.1/tcp/1/p2p/QmOwn/p2p-circuit"
    assert plausible_addrs([circuit, "/ip4/198.51.100.1/tcp/1"], heard_over=PUBLIC, own=own) == (circuit,)


def test_a_link_of_unknown_scope_brings_public_addresses_only() -> None:
    assert link_scope("") is PUBLIC and link_scope("/ip4/127.0.0.1/tcp/1") is LOOPBACK


@given(st.text(max_size=80) | st.lists(st.sampled_from(["ip4", "ip6", "tcp", "1", "::", "", "0"])).map("/".join))
def test_any_text_is_an_address_or_none(text: str) -> None:
    for one in (text, "/" + text):
        assert (address_scope(one) is None) or dial_target(one) is not None
        plausible_addrs([one], heard_over=PUBLIC, own=[one])


def test_others_are_given_what_can_be_of_use_to_them_the_widest_first() -> None:
    here, home, world = "/ip4/127.0.0.1/tcp/1", "/ip6/fd00::1/tcp/1", "/ip4/198.51.100.1/udp/1/quic-v1"
    nowhere = "/ip4/0.0.0.0/tcp/1"
    assert addrs_for_others([here, home, nowhere, world, home]) == (world, home)
    assert addrs_for_others([here, nowhere]) == (here,)
    assert addrs_for_others([nowhere]) == addrs_for_others([]) == ()
    assert widest_scope([here, world, home]) is PUBLIC
    assert widest_scope([here]) is AddressScope.LOOPBACK
    assert widest_scope([nowhere, "no address"]) is None
