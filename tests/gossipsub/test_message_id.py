"""Message ids: golden values of each profile."""

import base58
import pytest

from dep2p.gossipsub.messages.message_id import MessageIds, message_id_profile
from dep2p.identity import Identity
from dep2p.types import peer_id_bytes

IDENTITY = Identity(bytes(range(32)))
AUTHOR = peer_id_bytes(IDENTITY.peer_id)
SEQNO = (0x0102030405060708).to_bytes(8, "big")
KEY_HEX = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"

GOLDEN = {
    "go": "002408011220" + KEY_HEX + "0102030405060708",
    "js": "08011220" + KEY_HEX + "0102030405060708",
    "rust": base58.b58encode(bytes.fromhex("002408011220" + KEY_HEX)).hex() + b"72623859790382856".hex(),
    "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
}


@pytest.mark.parametrize("profile", ["go", "js", "rust", "sha256"])
def test_ids_are_those_of_the_other_implementations(profile: str) -> None:
    function = message_id_profile(profile)
    assert function(AUTHOR, SEQNO, "t", b"hello", b"").hex() == GOLDEN[profile]


def test_lengths_are_those_that_were_measured() -> None:
    lengths = [len(message_id_profile(name)(AUTHOR, SEQNO, "t", b"", b"")) for name in ("go", "js", "realm")]
    assert lengths == [46, 44, 16]


def test_the_realm_s_id_is_sixteen_bytes_of_a_hash_of_author_and_seqno() -> None:
    function = message_id_profile("realm")
    assert function(AUTHOR, SEQNO, "t", b"a", b"") == function(AUTHOR, SEQNO, "u", b"b", b"")
    assert function(AUTHOR, SEQNO, "t", b"a", b"") != function(AUTHOR, SEQNO[::-1], "t", b"a", b"")


def test_js_takes_the_key_of_the_message_when_the_author_does_not_hold_it() -> None:
    assert message_id_profile("js")(b"\x12\x20" + bytes(32), SEQNO, "t", b"", b"rsa key") == b"rsa key" + SEQNO


def own_id(author: bytes, seqno: bytes, topic: str, data: bytes, key: bytes) -> bytes:
    return b"own"


def test_each_topic_has_its_profile() -> None:
    ids = MessageIds("go", {"content": "sha256", "own": own_id})
    assert ids(AUTHOR, SEQNO, "t", b"hello", b"") == AUTHOR + SEQNO
    assert ids(AUTHOR, SEQNO, "content", b"hello", b"").hex() == GOLDEN["sha256"]
    assert ids(AUTHOR, SEQNO, "own", b"hello", b"") == b"own"


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="go, js, rust, sha256, realm"):
        message_id_profile("golang")


def test_hostile_authors_cost_the_rust_profile_nothing() -> None:
    function = message_id_profile("rust")
    for number in range(3_000):
        function(number.to_bytes(4, "big"), b"x" * 1000, "t", b"", b"")
    function(bytes(1_000_000), b"", "t", b"", b"")
