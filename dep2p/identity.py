"""A node's Ed25519 identity and its key file."""

import glob
import logging
import os
import stat
from pathlib import Path
from typing import Final, Self

import nacl.bindings
import nacl.exceptions

from dep2p.errors import IdentityError
from dep2p.types import PeerId, peer_id_bytes, peer_id_from_bytes

_logger = logging.getLogger("dep2p.identity")
_SEED_BYTES: Final = 32
_LEFTOVER_S: Final = 60.0
"""A temporary key file of this age has no writer any more."""
# protobuf PublicKey{Type: Ed25519 (1), Data: 32 bytes} inside an identity multihash: libp2p's Ed25519 peer ids.
_KEY_PREFIX: Final = bytes([0x08, 0x01, 0x12, 0x20])
_MULTIHASH_PREFIX: Final = bytes([0x00, len(_KEY_PREFIX) + 32])
_FILE_HEADER: Final = "dep2p-ed25519-seed-v1:"


class Identity:
    """An Ed25519 key pair and the libp2p peer id that follows from it."""

    __slots__ = ("_secret_key", "peer_id", "private_seed", "public_key")

    def __init__(self, private_seed: bytes) -> None:
        """``private_seed``: 32 secret bytes. Raises ``ValueError`` for another length."""
        if len(private_seed) != _SEED_BYTES:
            raise ValueError(f"an Ed25519 seed has {_SEED_BYTES} bytes, not {len(private_seed)}")
        public_key, self._secret_key = nacl.bindings.crypto_sign_seed_keypair(private_seed)
        self.public_key: bytes = public_key
        self.private_seed: bytes = private_seed
        self.peer_id: PeerId = peer_id_from_public_key(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Self:
        """A new random identity."""
        return cls(os.urandom(_SEED_BYTES))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key file; warns when others may read it. Raises :class:`IdentityError` that says what to do."""
        try:
            text = path.read_text("ascii")
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            raise IdentityError(f"no key file at {path}: `dep2p id --new` makes one") from None
        except (OSError, UnicodeDecodeError) as error:
            raise IdentityError(
                f"cannot read the key file {path}: {error}. Check its owner and mode (0600)."
            ) from error
        if mode & 0o077:
            _logger.warning("the key file %s can be read by others (mode %04o): chmod 600 it", path, mode)
        header, _, digits = text.strip().partition(":")
        try:
            if header + ":" != _FILE_HEADER:
                raise ValueError("wrong first line")
            return cls(bytes.fromhex(digits))
        except ValueError as error:
            raise IdentityError(
                f"{path} is not a dep2p key file ({error}): "
                "restore it from a backup, or move it away to get a new identity"
            ) from None

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Read the key file, or write a new one (mode 0600, complete or not at all). Raises :class:`IdentityError`."""
        if path.exists():
            return cls.load(path)
        identity = cls.generate()
        identity.save(path)
        return identity

    def save(self, path: Path) -> None:
        """Write the key file with mode 0600; never over an existing one. Raises :class:`IdentityError`."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise IdentityError(f"cannot write the key file {path}: {error}") from error
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:  # a full disk must not leave a part of the secret behind
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(f"{_FILE_HEADER}{self.private_seed.hex()}\n")
                    file.flush()
                    os.fsync(file.fileno())
                _remove_leftovers(temporary, f".{glob.escape(path.name)}.*.tmp")
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
        except FileExistsError:
            raise IdentityError(f"{path} exists already: an identity is never overwritten") from None
        except OSError as error:
            raise IdentityError(f"cannot write the key file {path}: {error}") from error

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``data``."""
        return nacl.bindings.crypto_sign(data, self._secret_key)[:64]


def _remove_leftovers(temporary: Path, pattern: str) -> None:
    """Delete what killed writers left beside ``temporary``, which was written just now: each file holds a secret."""
    now_s = temporary.stat().st_mtime
    for leftover in temporary.parent.glob(pattern):
        if now_s - leftover.stat(follow_symlinks=False).st_mtime >= _LEFTOVER_S:
            leftover.unlink(missing_ok=True)


def peer_id_from_public_key(public_key: bytes) -> PeerId:
    """The libp2p peer id of a 32-byte Ed25519 public key."""
    return peer_id_from_bytes(_MULTIHASH_PREFIX + _KEY_PREFIX + public_key)


def public_key_from_peer_id(peer: PeerId) -> bytes | None:
    """The Ed25519 public key that the peer id holds; None for ids of other key types."""
    try:
        raw = peer_id_bytes(peer)
    except ValueError:
        return None
    prefix = _MULTIHASH_PREFIX + _KEY_PREFIX
    if len(raw) != len(prefix) + 32 or not raw.startswith(prefix):
        return None
    return raw[len(prefix) :]


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` over ``data`` was made by the key inside the peer id."""
    public_key = public_key_from_peer_id(peer)
    if public_key is None or len(signature) != 64:
        return False
    try:
        nacl.bindings.crypto_sign_open(signature + data, public_key)
    except nacl.exceptions.BadSignatureError:
        return False
    return True
