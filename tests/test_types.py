"""Peer ids in all their texts."""

import base64

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.daemon.api.fields import as_peer
from dep2p.host.addresses import parse_address
from dep2p.identity import Identity
from dep2p.node.validation import split_addr
from dep2p.queues.access import parse_who
from dep2p.types import PeerId, parse_peer_id, peer_id_bytes, with_base58_peers

ED25519 = Identity(bytes(range(32))).peer_id
RSA = PeerId("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")


def texts(peer: PeerId) -> list[str]:
    """The peer id in each text that a CID may have."""
    raw = b"\x01\x72" + peer_id_bytes(peer)
    lower = base64.b32encode(raw).decode().rstrip("=").lower()
    number, digits = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return ["b" + lower, "B" + lower.upper(), "z" + base58.b58encode(raw).decode(), "k" + digits, "f" + raw.hex()]


def test_the_examples_of_the_specification() -> None:
    """https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#string-representation"""
    cid = "bafzbeie5745rpv2m6tjyuugywy4d5ewrqgqqhfnf445he3omzpjbx5xqxe"
    assert parse_peer_id(cid) == RSA == parse_peer_id(RSA)


@pytest.mark.parametrize("peer", [ED25519, RSA])
def test_each_text_means_the_same_peer_wherever_one_is_read(peer: PeerId) -> None:
    addr = f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"
    for text in texts(peer):
        assert parse_peer_id(text) == peer == as_peer(text)
        written = f"/ip4/127.0.0.1/tcp/4001/p2p/{text}"
        assert split_addr(written) == (peer, addr) and parse_address(written).peer == peer
        relayed = parse_address(f"{written}/p2p-circuit/p2p/{text}")
        assert relayed.relay == relayed.peer == peer
        assert with_base58_peers(written) == addr and parse_who(text) == (peer,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b",
        "bafk",
        "z",
        "k",
        "k!",
        "f0172",
        "f01721220" + "00" * 31,  # a byte is missing
        "f01551220" + "00" * 32,  # the multicodec of raw data
        "f00721220" + "00" * 32,  # CID version 0
        "f01721120" + "00" * 32,  # SHA-1
        "m" + "A" * 48,
        "b" + "a" * 200,
        ED25519[:-1],
        "b" + ED25519[1:],
        "1" * 46 + "\n",
    ],
)
def test_other_texts_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not a peer id"):
        parse_peer_id(text)


@given(st.text(max_size=140))
def test_any_text_is_a_peer_id_or_refused(text: str) -> None:
    try:
        assert parse_peer_id(parse_peer_id(text)) == parse_peer_id(text)
    except ValueError as error:
        assert "peer id" in str(error)
    assert isinstance(with_base58_peers(text), str)
