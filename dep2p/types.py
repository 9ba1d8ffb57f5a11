"""Names shared by every layer; imports nothing of the project and no I/O library."""

import base64
import contextlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, Literal, NewType, Protocol

import base58

PeerId = NewType("PeerId", str)
"""A libp2p peer id as base58 text, for example ``12D3KooW…``."""

RealmId = NewType("RealmId", str)
"""64 lower-case hex digits derived from a realm's PSK."""

Headers = Mapping[str, object]
"""Message headers: text keys; values are text, bytes, integers, booleans or flat lists of these."""

_PEER_ID_CHARACTERS_MAX = 128
_PEER_IDS_CACHED_MAX: Final = 8_192
"""Peer ids whose other form is remembered: base58 takes 15 µs each way, and one member record needs it six times."""
_CID_LIBP2P_KEY = b"\x01\x72"
"""CID version 1, multicodec libp2p-key."""

Clock = Callable[[], float]
"""A source of seconds; the caller decides which zero it counts from."""


class Rng(Protocol):
    """The part of :class:`random.Random` that cores use, so that they need not import ``random``."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...

    def randbytes(self, n: int, /) -> bytes:
        """``n`` random bytes."""
        ...


def peer_id_bytes(peer: PeerId) -> bytes:
    """The multihash bytes of a peer id.

    Raises ``ValueError`` when the text is no base58.
    """
    return _decoded(peer) if len(peer) <= _PEER_ID_CHARACTERS_MAX else base58.b58decode(peer)


def peer_id_from_bytes(multihash: bytes) -> PeerId:
    """The base58 text of a peer id given as multihash bytes."""
    return _encoded(multihash) if len(multihash) <= _PEER_ID_CHARACTERS_MAX else _encoded.__wrapped__(multihash)


@lru_cache(_PEER_IDS_CACHED_MAX)
def _decoded(peer: PeerId) -> bytes:
    return base58.b58decode(peer)


@lru_cache(_PEER_IDS_CACHED_MAX)
def _encoded(multihash: bytes) -> PeerId:
    return PeerId(base58.b58encode(multihash).decode("ascii"))


def parse_peer_id(text: str) -> PeerId:
    """Read a peer id in one of its texts and return the base58 one, by which peers are compared.

    The texts: a base58 multihash (``12D3KooW…``, ``Qm…``), or a CIDv1 of the multicodec libp2p-key in base32, base36,
    base58 or base16 (``bafz…``, ``k51…``). Only the identity and sha2-256 multihashes that libp2p uses for keys are
    taken. Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#string-representation.

    >>> parse_peer_id("bafzaajaiaejca55hyp4myenuydxdk2zc6t5ybdbgiyviiouqqm6j2dhmhfaxea77") == parse_peer_id(
    ...     "12D3KooWHsT4Hji8AnAEnPGJoJjWBcKXVNe9x4AaqbQvAWA8Ngia")
    True

    Raises ``ValueError`` with a sentence for the user.
    """
    if len(text) > _PEER_ID_CHARACTERS_MAX:  # decoding takes time by the square of the length
        raise ValueError(f"{text[:40]!r}… of {len(text)} characters is not a peer id: one has 46 to 73")
    if text.startswith(("1", "Qm")):
        try:
            raw = base58.b58decode(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a peer id: it holds characters outside base58") from None
    else:
        raw = _cid_multihash(text)
    identity = len(raw) >= 2 and raw[0] == 0x00 and raw[1] == len(raw) - 2 and len(raw) > 2
    sha256 = len(raw) == 34 and raw[0] == 0x12 and raw[1] == 32
    if not identity and not sha256:
        raise ValueError(
            f"{text!r} is not a peer id: copy the whole id that `dep2p id` prints (it starts with 12D3KooW)"
        )
    return peer_id_from_bytes(raw)


def with_base58_peers(addr: str) -> str:
    """A multiaddr whose ``/p2p/…`` parts are base58, whichever text they had; malformed ones stay as they are."""
    parts = addr.split("/")
    for index in range(1, len(parts)):
        if parts[index - 1] == "p2p" and not parts[index].startswith(("1", "Qm")):
            with contextlib.suppress(ValueError):
                parts[index] = parse_peer_id(parts[index])
    return "/".join(parts)


def _cid_multihash(text: str) -> bytes:
    """The multihash inside a CIDv1 of a key; b"" for any other text. Multibase: one character names the base."""
    digits, lower = text[1:], text[1:].lower()
    try:
        match text[:1]:
            case "b" | "B":
                raw = base64.b32decode(lower.upper() + "=" * (-len(lower) % 8))
            case "k" | "K":
                raw = _base36(lower)
            case "z":
                raw = base58.b58decode(digits)
            case "f" | "F":
                raw = bytes.fromhex(lower)
            case _:
                return b""
    except ValueError:
        return b""
    return raw[len(_CID_LIBP2P_KEY) :] if raw.startswith(_CID_LIBP2P_KEY) else b""


def _base36(digits: str) -> bytes:
    """Raises ``ValueError``."""
    zeros = len(digits) - len(digits.lstrip("0"))
    number = int(digits or "0", 36)
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


AnswerOutcome = Literal["taken", "late", "duplicate", "unknown", "full"]
"""The reception of an answer by its author. "late": it has enough, or waits no more. "duplicate": it has one of this
node. "unknown": it asked for none, or has restarted. "full": it has no room now, and may take another try."""
