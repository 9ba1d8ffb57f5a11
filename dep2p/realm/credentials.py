"""A realm's secret as people handle it: files, passphrases and invites (docs/spec/realm.md §2, §7)."""

import base64
import binascii
import glob
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from dep2p.encoding.decoded import are_texts, is_array, is_map
from dep2p.errors import ProtocolError, RealmFileError, RealmSecretError
from dep2p.protocols.realm.keys import PSK_BYTES, RealmKeys, derive_keys, stretch_passphrase
from dep2p.protocols.realm.member_record import ADDRS_MAX, fitting_addrs
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical
from dep2p.types import RealmId

NAME_CHARACTERS_MAX: Final = 64
PASSPHRASE_CHARACTERS_MIN: Final = 12
INVITE_PREFIX: Final = "dep2p-invite-v1:"

_FILE_FORMAT: Final = "dep2p-realm-v1"
_FILE_BYTES_MAX: Final = 65_536
_INVITE_CHARACTERS_MAX: Final = 8_192
_CHECKSUM_BYTES: Final = 8
LEFTOVER_S: Final = 60.0
"""A temporary file of this age has no writer any more: writing one takes milliseconds."""
_NAME, _PSK, _ADDRS = 1, 2, 3

_logger = logging.getLogger("dep2p.realm")


@dataclass(frozen=True, slots=True, eq=False)
class Realm:
    """A private group: a human-readable name and a secret that all members hold. Never shows the secret.

    Two realms are equal when their secrets are; the name is only a label, and other members may use another one.
    """

    name: str
    psk: bytes = field(repr=False)
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs of members to begin with."""
    keys: RealmKeys = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises :class:`RealmSecretError` for an unusable name or a PSK that is not 32 bytes."""
        if (
            not 0 < len(self.name) <= NAME_CHARACTERS_MAX
            or not self.name.isprintable()
            or self.name != self.name.strip()
        ):
            raise RealmSecretError(
                f"{self.name!r} is no realm name: 1 to {NAME_CHARACTERS_MAX} printable characters, no space at the ends"
            )
        if len(self.psk) != PSK_BYTES:
            raise RealmSecretError(f"a realm's secret has {PSK_BYTES} bytes, not {len(self.psk)}")
        object.__setattr__(self, "bootstrap", fitting_addrs(self.bootstrap))
        object.__setattr__(self, "keys", derive_keys(self.psk))

    @property
    def realm_id(self) -> RealmId:
        """The public id, 64 hex digits. It shows in protocol ids, and gives nothing of the secret."""
        return self.keys.realm_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Realm) and other.realm_id == self.realm_id

    def __hash__(self) -> int:
        return hash(self.realm_id)

    @classmethod
    def generate(cls, name: str) -> Self:
        """A new realm with a random secret. Raises :class:`RealmSecretError` for an unusable name."""
        return cls(name, os.urandom(PSK_BYTES))

    @classmethod
    def from_psk(cls, psk: bytes, name: str) -> Self:
        """The realm of a 32-byte secret. Raises :class:`RealmSecretError`."""
        return cls(name, bytes(psk))

    @classmethod
    def from_passphrase(cls, passphrase: str, name: str) -> Self:
        """The realm of a passphrase: same passphrase and same name, same realm. Takes some 0.4 s and 128 MiB.

        The passphrase is stretched with scrypt (n 2^17, r 8, p 1), salted with the name. Anyone who learns the realm id
        can try guesses against it, so a short one is refused. Raises :class:`RealmSecretError`.
        """
        if len(passphrase.strip()) < PASSPHRASE_CHARACTERS_MIN:
            raise RealmSecretError(
                f"the passphrase is too short: at least {PASSPHRASE_CHARACTERS_MIN} characters, better five or more "
                "random words. `dep2p realm new` without a passphrase makes a random secret instead."
            )
        return cls(name, stretch_passphrase(passphrase, name))

    def with_bootstrap(self, addrs: Sequence[str]) -> "Realm":
        """The same realm with these addresses to begin with; malformed ones and more than 16 are left out."""
        return Realm(self.name, self.psk, tuple(addrs))

    # Files

    def to_file_bytes(self) -> bytes:
        """Return the contents of a realm file: JSON with name, secret and bootstrap addresses. Handle them like a
        password."""
        document = {
            "format": _FILE_FORMAT,
            "name": self.name,
            "psk": base64.b64encode(self.psk).decode("ascii"),
            "bootstrap": list(self.bootstrap),
        }
        return (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode("utf-8")

    @classmethod
    def from_file_bytes(cls, data: bytes, *, source: str = "the realm file") -> Self:
        """Read what `to_file_bytes` wrote; ``source`` names it in errors. Raises :class:`RealmFileError`."""
        advice = "Restore it from a copy, or join again with an invite (`dep2p realm join`)."
        if len(data) > _FILE_BYTES_MAX:
            raise RealmFileError(f"{source} has {len(data)} bytes: no realm file is that large. {advice}")
        try:
            document: object = json.loads(data)
        except (ValueError, RecursionError):
            raise RealmFileError(f"{source} is not JSON, so it is no realm file. {advice}") from None
        if not is_map(document):
            raise RealmFileError(f"{source} is not a JSON object, so it is no realm file. {advice}")
        fields = document
        if fields.get("format") != _FILE_FORMAT:
            raise RealmFileError(
                f"{source} has format {_shortened(fields.get('format'))}, not {_FILE_FORMAT!r}: it is no realm file, "
                "or one of a newer dep2p. Upgrade dep2p, or check that it is the right file."
            )
        name, psk, bootstrap = fields.get("name"), fields.get("psk"), fields.get("bootstrap", [])
        if not isinstance(name, str) or not isinstance(psk, str) or not is_array(bootstrap):
            raise RealmFileError(f"{source} lacks a name, a psk or a list bootstrap. {advice}")
        if not are_texts(bootstrap, ADDRS_MAX):
            raise RealmFileError(f"{source}: bootstrap is not a list of at most {ADDRS_MAX} multiaddrs. {advice}")
        try:
            return cls(name, base64.b64decode(psk, validate=True), tuple(bootstrap))
        except (binascii.Error, ValueError):
            # RealmSecretError, too. No detail: it could show a part of the secret.
            raise RealmFileError(f"{source} has a malformed name or psk. {advice}") from None

    @classmethod
    def from_psk_file(cls, path: Path | str) -> Self:
        """Read a realm file. Warns when others may read it. Raises :class:`RealmFileError`."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            raise RealmFileError(
                f"no realm file at {path}: make one with `dep2p realm new`, or join with an invite."
            ) from None
        except OSError as error:
            raise RealmFileError(
                f"cannot read the realm file {path} ({error.strerror}): check its owner and mode (0600)."
            ) from error
        if mode & 0o077:
            _logger.warning("the realm file %s can be read by others (mode %04o): chmod 600 it", path, mode)
        return cls.from_file_bytes(data, source=str(path))

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write a realm file, mode 0600, complete or not at all.

        A file with the same secret is replaced; another one only with ``overwrite``, since its secret would be lost.
        Raises :class:`RealmFileError`.
        """
        path = Path(path)
        if not overwrite and path.exists() and not self._is_in(path):
            raise RealmFileError(
                f"{path} exists and is not this realm's file: its secret would be lost. Choose another name or move it."
            )
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_leftovers(path.parent, path.name, older_than_s=LEFTOVER_S)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)  # 0600
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.to_file_bytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            raise RealmFileError(
                f"cannot write the realm file {path} ({error.strerror}): check the directory and the space left."
            ) from error

    def _is_in(self, path: Path) -> bool:
        try:
            return Realm.from_psk_file(path) == self
        except RealmFileError:
            return False

    # Invites

    def invite(self, addrs: Sequence[str] = ()) -> str:
        """One line that lets its reader join: it holds the secret, so send it only where you would send a password.

        ``addrs``: where members can be reached, the realm's bootstrap addresses when empty. Malformed ones and more
        than 16 are left out.
        """
        payload = encode_canonical(
            {_NAME: self.name, _PSK: self.psk, _ADDRS: list(fitting_addrs(addrs or self.bootstrap))}
        )
        return _invite_text(payload)

    @classmethod
    def from_invite(cls, text: str) -> "Invite":
        """Read an invite; white space around and inside (line breaks of a mail) does not matter.

        Raises :class:`RealmFileError`, which tells a typo from a wrong kind of text.
        """
        compact = "".join(text.split())
        if not compact.startswith(INVITE_PREFIX):
            raise RealmFileError(
                f"this is no invite: it does not start with {INVITE_PREFIX!r}. Paste the whole line that `dep2p realm "
                "invite` printed."
            )
        if len(compact) > _INVITE_CHARACTERS_MAX:
            raise RealmFileError(f"this invite has {len(compact)} characters: no invite is that long.")
        typo = "the invite is damaged (a character is missing, added or changed): copy and paste the whole line again."
        digits = compact[len(INVITE_PREFIX) :]
        try:
            raw = base64.b64decode(digits + "=" * (-len(digits) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raise RealmFileError(typo) from None
        payload, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
        # Also refuses a changed last character whose spare bits are not read: one invite has one text.
        if checksum != _checksum(payload) or _invite_text(payload) != compact:
            raise RealmFileError(typo)
        return _decode_invite(payload)


RealmChoice = Realm | RealmId | str | None
"""A realm, its id, a unique prefix of its id, its name, or None for the only one joined."""


def remove_leftovers(directory: Path, name: str | None = None, *, older_than_s: float = 0.0) -> None:
    """Delete the temporary files of killed writers: each holds a realm's secret.

    ``name``: of the realm file that they were to become; None for any. ``older_than_s`` spares the file of a writer
    that is at work. Raises ``OSError``.
    """
    for leftover in directory.glob(f".{'*.realm' if name is None else glob.escape(name)}.*.tmp"):
        try:
            if time.time() - leftover.stat(follow_symlinks=False).st_mtime >= older_than_s:
                leftover.unlink()
        except FileNotFoundError:
            continue  # its writer has finished


@dataclass(frozen=True, slots=True)
class Invite:
    """The content of an invite."""

    realm: Realm
    addrs: tuple[str, ...]
    """Multiaddrs of members, also the realm's bootstrap addresses."""


def _decode_invite(payload: bytes) -> Invite:
    unusable = "the invite is intact but not usable here: it was made by a newer or a foreign program. Upgrade dep2p."
    try:
        decoded = decode_bounded(payload, "invite", depth_max=2, entries_max=64)
    except ProtocolError:
        raise RealmFileError(unusable) from None
    if not is_map(decoded):
        raise RealmFileError(unusable)
    name, psk, addrs = decoded.get(_NAME), decoded.get(_PSK), decoded.get(_ADDRS)
    if not isinstance(name, str) or not isinstance(psk, bytes) or not is_array(addrs):
        raise RealmFileError(unusable)
    texts = [addr for addr in addrs if isinstance(addr, str)]
    try:
        realm = Realm(name, psk, fitting_addrs(texts))
    except RealmSecretError:
        raise RealmFileError(unusable) from None
    return Invite(realm, realm.bootstrap)


def _invite_text(payload: bytes) -> str:
    return INVITE_PREFIX + base64.urlsafe_b64encode(payload + _checksum(payload)).decode("ascii").rstrip("=")


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(INVITE_PREFIX.encode("ascii") + payload).digest()[:_CHECKSUM_BYTES]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
