"""Identities: key files that cannot be lost or misread, and ids that libp2p agrees with."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import IdentityError
from dep2p.identity import Identity, peer_id_from_public_key, public_key_from_peer_id, verify
from dep2p.types import PeerId, parse_peer_id


def test_the_peer_id_is_the_one_that_libp2p_derives() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    for seed in (bytes(32), bytes(range(32)), b"\xff" * 32):
        assert Identity(seed).peer_id == str(ID.from_pubkey(create_new_key_pair(seed).public_key))


def test_a_key_file_is_private_and_gives_the_same_identity(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert os.listdir(path.parent) == ["node.key"]


def test_an_identity_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    first = Identity.load_or_create(path)
    with pytest.raises(IdentityError, match="never overwritten"):
        Identity.generate().save(path)
    assert Identity.load(path).peer_id == first.peer_id


@pytest.mark.parametrize(
    "content", [b"", b"dep2p-ed25519-seed-v1:", b"dep2p-ed25519-seed-v1:zz", b"\xff\xfe", b"other:" + b"00" * 32]
)
def test_a_damaged_key_file_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"node\.key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_missing_or_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no key file"):
        Identity.load(tmp_path / "none.key")
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="cannot write"):
        Identity.generate().save(tmp_path / "file" / "node.key")


@given(data=st.binary(max_size=200), other=st.binary(max_size=200), flip=st.integers(0, 511))
def test_only_the_right_signature_verifies(data: bytes, other: bytes, flip: int) -> None:
    identity = Identity(bytes(range(32)))
    signature = identity.sign(data)
    assert verify(identity.peer_id, data, signature)
    assert verify(identity.peer_id, other, signature) == (other == data)
    bent = bytearray(signature)
    bent[flip // 8] ^= 1 << flip % 8
    assert not verify(identity.peer_id, data, bytes(bent))
    assert not verify(Identity(bytes(32)).peer_id, data, signature)
    assert not verify(identity.peer_id, data, signature[:-1])


def test_ids_of_other_key_types_hold_no_ed25519_key() -> None:
    rsa_id = PeerId("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")
    assert parse_peer_id(rsa_id) == rsa_id
    assert public_key_from_peer_id(rsa_id) is None
    assert public_key_from_peer_id(PeerId("0OIl")) is None
    assert not verify(rsa_id, b"x", bytes(64))
    key = bytes(range(32))
    assert public_key_from_peer_id(peer_id_from_public_key(key)) == key


@pytest.mark.parametrize("text", ["", "0", "not an id", "12D3KooW", "Qm" + "1" * 44, "/ip4/127.0.0.1"])
def test_what_is_no_peer_id_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not a peer id"):
        parse_peer_id(text)


def test_a_full_disk_leaves_nothing_of_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IdentityError, match="No space left"):
        Identity.generate().save(tmp_path / "node.key")
    assert list(tmp_path.iterdir()) == []


def test_a_key_file_that_others_may_read_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity.generate()
    identity.save(tmp_path / "node.key")
    (tmp_path / "node.key").chmod(0o644)
    assert Identity.load(tmp_path / "node.key").peer_id == identity.peer_id
    assert "mode 0644" in caplog.text and "chmod 600" in caplog.text
