"""Realm files, passphrases and invites: they carry the secret, never show it, and say what is wrong."""

import base64
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import Dep2pError, RealmFileError, RealmSecretError
from dep2p.protocols.addresses.dialable import AddressScope
from dep2p.protocols.realm.record_store import StoredRecord
from dep2p.realm.credentials import INVITE_PREFIX, Realm
from dep2p.realm.records_file import load_records, save_records

PSK = bytes(range(32))
TEAM = Realm.from_psk(PSK, "team")
ADDRS = ("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5",)
INVITE = (
    "dep2p-invite-v1:owFkdGVhbQJYIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4fA4F4UC9pcDQvMTkyLj"
    "AuMi4xL3RjcC80MDAxL3AycC8xMkQzS29vV0s5OVZvVnhORTdYenlCd1hFelc3eGhLN0dwdjg1cjlGM1YzZnlLU1VL"
    "UEg1AnQpDnvlhLU"
)


def shows_the_secret(text: str) -> bool:
    return any(form in text for form in (PSK.hex(), repr(PSK)[2:20], base64.b64encode(PSK).decode()[:12], "\\x00\\x01"))


def test_a_realm_has_the_id_of_its_secret_and_never_shows_it() -> None:
    assert TEAM.realm_id == "24ce373b1aa775394207392be0df98d0fdc7abdf3a327ec74f4a9907cd1f7c16"
    for text in (repr(TEAM), str(TEAM), repr(Realm.from_invite(TEAM.invite(ADDRS))), repr(TEAM.keys)):
        assert not shows_the_secret(text)


def test_realms_are_equal_when_their_secrets_are() -> None:
    assert TEAM == Realm.from_psk(PSK, "another label") and hash(TEAM) == hash(Realm.from_psk(PSK, "x"))
    assert TEAM != Realm.generate("team") and TEAM != "team"
    assert Realm.generate("a").psk != Realm.generate("a").psk


@pytest.mark.parametrize("name", ["", " team", "team\n", "a\x00b", "x" * 65])
def test_an_unusable_name_is_refused(name: str) -> None:
    with pytest.raises(RealmSecretError, match="realm name"):
        Realm.generate(name)


def test_a_secret_of_the_wrong_length_is_refused_without_showing_it() -> None:
    with pytest.raises(RealmSecretError, match="32 bytes, not 31") as caught:
        Realm.from_psk(PSK[:31], "team")
    assert not shows_the_secret(str(caught.value)) and isinstance(caught.value, Dep2pError)


def test_a_passphrase_gives_the_same_realm_everywhere_and_a_short_one_none() -> None:
    assert Realm.from_passphrase("correct horse battery staple", "team").psk.hex() == (
        "9a2f7ecf4ccf3e60a8d02cb55d683246a426b314fd90e36dacaad736845c542e"
    )
    for passphrase in ("", "hunter2", " " * 20, "eleven char"):
        with pytest.raises(RealmSecretError, match="too short: at least 12"):
            Realm.from_passphrase(passphrase, "team")


def test_a_realm_file_is_private_and_survives(tmp_path: Path) -> None:
    path = tmp_path / "new" / "team.realm"
    realm = TEAM.with_bootstrap(ADDRS)
    realm.save(path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    loaded = Realm.from_psk_file(path)
    assert (loaded.name, loaded.psk, loaded.bootstrap) == ("team", PSK, ADDRS)
    assert json.loads(path.read_text()) == {
        "format": "dep2p-realm-v1",
        "name": "team",
        "psk": base64.b64encode(PSK).decode(),
        "bootstrap": list(ADDRS),
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["team.realm"]


def test_another_realms_file_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "team.realm"
    other = Realm.generate("other")
    other.save(path)
    with pytest.raises(RealmFileError, match="its secret would be lost"):
        TEAM.save(path)
    assert Realm.from_psk_file(path) == other
    other.with_bootstrap(ADDRS).save(path)
    assert Realm.from_psk_file(path).bootstrap == ADDRS
    TEAM.save(path, overwrite=True)
    assert Realm.from_psk_file(path) == TEAM


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "team.realm"
    TEAM.save(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING, "dep2p.realm"):
        Realm.from_psk_file(path)
    assert "chmod 600" in caplog.text and not shows_the_secret(caplog.text)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "format None"),
        (b'{"format": "dep2p-realm-v9"}', "Upgrade"),
        (b'{"format": "dep2p-realm-v1", "name": "x"}', "lacks"),
        (b'{"format": "dep2p-realm-v1", "name": "x", "psk": "AAAA"}', "malformed name or psk"),
        (b'{"format": "dep2p-realm-v1", "name": "x", "psk": "!!"}', "malformed name or psk"),
        (b'{"format": "dep2p-realm-v1", "name": "x", "psk": "AAAA", "bootstrap": [1]}', "bootstrap"),
        (b" " * 70_000, "that large"),
    ],
)
def test_a_broken_file_is_reported_with_its_path_and_what_to_do(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "team.realm"
    path.write_bytes(content)
    with pytest.raises(RealmFileError, match=says) as caught:
        Realm.from_psk_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_unusable_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RealmFileError, match="dep2p realm new"):
        Realm.from_psk_file(tmp_path / "none")
    with pytest.raises(RealmFileError, match="cannot read"):
        Realm.from_psk_file(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RealmFileError, match="cannot write"):
        TEAM.save(tmp_path / "file" / "team.realm")


def test_an_invite_equals_its_vector_and_brings_secret_and_addresses() -> None:
    assert TEAM.invite(ADDRS) == INVITE
    invite = Realm.from_invite(INVITE)
    assert (invite.realm.name, invite.realm.psk, invite.addrs, invite.realm.bootstrap) == ("team", PSK, ADDRS, ADDRS)
    assert TEAM.with_bootstrap(ADDRS).invite() == INVITE


def test_an_invite_survives_being_broken_into_lines() -> None:
    broken = "  " + "\r\n\t".join(INVITE[at : at + 40] for at in range(0, len(INVITE), 40)) + "\n"
    assert Realm.from_invite(broken).realm == TEAM


@given(st.integers(0, 400), st.sampled_from("ABCxyz019-_"))
def test_any_typo_in_an_invite_is_reported_as_a_typo(position: int, character: str) -> None:
    start = len(INVITE_PREFIX)
    at = start + position % (len(INVITE) - start)
    if INVITE[at] != character:
        for typo in (
            INVITE[:at] + character + INVITE[at + 1 :],
            INVITE[:at] + INVITE[at + 1 :],
            INVITE[:at] + character + INVITE[at:],
        ):
            if typo != INVITE:
                with pytest.raises(RealmFileError, match="damaged"):
                    Realm.from_invite(typo)


@given(st.text(max_size=200))
def test_any_text_is_an_invite_or_an_error(text: str) -> None:
    for candidate in (text, INVITE_PREFIX + text):
        with pytest.raises(RealmFileError):
            Realm.from_invite(candidate)


def test_what_is_no_invite_is_reported_from_a_damaged_one() -> None:
    with pytest.raises(RealmFileError, match="no invite"):
        Realm.from_invite("hello")
    with pytest.raises(RealmFileError, match="that long"):
        Realm.from_invite(INVITE_PREFIX + "A" * 9000)


def test_member_records_on_disk_are_complete_or_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "members"
    assert load_records(path, records_max=10) == []
    records = [
        StoredRecord(envelope, is_proved, scope)
        for envelope, is_proved, scope in zip((b"one", b"", b"three"), (True, False, True), AddressScope, strict=True)
    ]
    save_records(path, records)
    assert load_records(path, records_max=10) == records
    good = path.read_bytes()
    for bad in (good[:-1], good[:-3] + b"xxx", b"", good + b"more", b"other format" + good):
        path.write_bytes(bad)
        assert load_records(path, records_max=10) == []
        assert not path.exists() and (tmp_path / "members.corrupt").read_bytes() == bad
    save_records(path, records[:1] * 11)
    assert load_records(path, records_max=10) == []
    path.mkdir()
    assert load_records(path, records_max=10) == []
