"""Which addresses are understood, and what is said of the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from dep2p.host.addresses import ADDR_BYTES_MAX, dial_rank, expand_wildcard, expect_peer, parse_address, socket_address
from dep2p.identity import Identity

PEER = Identity(bytes(32)).peer_id
RELAY = Identity(bytes([1] * 32)).peer_id


@pytest.mark.parametrize(
    ("text", "transport", "host", "port"),
    [
        ("/ip4/127.0.0.1/tcp/4001", "tcp", "127.0.0.1", 4001),
        ("/ip6/::1/tcp/4001", "tcp", "::1", 4001),
        ("/dns4/node.example/tcp/4001", "tcp", "node.example", 4001),
        ("/ip4/127.0.0.1/tcp/80/ws", "ws", "127.0.0.1", 80),
        ("/ip4/127.0.0.1/udp/4001/quic-v1", "quic", "127.0.0.1", 4001),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{RELAY}/p2p-circuit", "circuit", "127.0.0.1", 4001),
    ],
)
def test_address_is_distinguished_with_and_without_a_peer(text: str, transport: str, host: str, port: int) -> None:
    for peer, full in ((None, text), (PEER, f"{text}/p2p/{PEER}")):
        address = parse_address(full)
        assert (address.transport, address.host, address.port, address.peer) == (transport, host, port, peer)
        assert address.text == text
        assert address.with_peer == full
        assert str(Multiaddr(address.text)) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must start with"),
        ("localhost:4001", "not a multiaddr"),
        ("/ip4/127.0.0.1", "not spoken here"),
        ("/ip4/127.0.0.1/tcp/4001/wss", "not spoken here"),
        ("/ip4/127.0.0.1/udp/4001", "not spoken here"),
        ("/ip4/127.0.0.1/tcp/4001/p2p-circuit", "names no relay"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/nobody", "not a multiaddr"),
        ("/unix/a", "must start with"),
        ("/" + "a" * ADDR_BYTES_MAX, "too long"),
    ],
)
def test_other_addresses_are_refused_with_a_sentence(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_address(text)


@given(st.text(max_size=80))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        parse_address(text)
    except ValueError as error:
        assert str(error)


def test_address_of_someone_else_is_refused() -> None:
    assert expect_peer(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", PEER).peer == PEER
    with pytest.raises(ValueError, match="not of"):
        expect_peer(f"/ip4/127.0.0.1/tcp/1/p2p/{RELAY}", PEER)


def test_wildcard_is_one_address_per_interface() -> None:
    found = expand_wildcard(parse_address("/ip4/0.0.0.0/tcp/4001/ws"))
    assert "/ip4/127.0.0.1/tcp/4001/ws" in found
    assert expand_wildcard(parse_address("/ip4/127.0.0.1/tcp/1")) == ["/ip4/127.0.0.1/tcp/1"]


def test_direct_and_cheap_addresses_come_first() -> None:
    texts = [
        f"/ip4/1.1.1.1/tcp/1/p2p/{RELAY}/p2p-circuit",
        "/ip4/1.1.1.1/udp/1/quic-v1",
        "/ip4/1.1.1.1/tcp/1/ws",
        "/dns4/a.example/tcp/1",
        "/ip4/1.1.1.1/tcp/1",
    ]
    assert sorted(texts, key=lambda text: dial_rank(parse_address(text))) == texts[::-1]


def test_socket_addresses_become_multiaddrs() -> None:
    assert socket_address("1.2.3.4", 5) == "/ip4/1.2.3.4/tcp/5"
    assert socket_address("::ffff:1.2.3.4", 5, "udp/quic-v1") == "/ip4/1.2.3.4/udp/5/quic-v1"
    assert socket_address("fe80::1%eth0", 5, "tcp/ws") == "/ip6/fe80::1/tcp/5/ws"
