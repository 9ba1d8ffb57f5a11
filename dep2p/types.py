"""Names shared by every layer; imports nothing of the project and no I/O library."""

from collections.abc import Callable
from typing import NewType, Protocol

import base58

PeerId = NewType("PeerId", str)
"""A libp2p peer id as base58 text, for example ``12D3KooW…``."""

RealmId = NewType("RealmId", str)
"""64 lower-case hex digits derived from a realm's PSK."""

Headers = dict[str, object]
"""Message headers: text keys; values are text, bytes, integers, booleans or flat lists of these."""

Clock = Callable[[], float]
"""A source of seconds; which zero it counts from is the caller's affair."""


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
    return base58.b58decode(peer)


def peer_id_from_bytes(multihash: bytes) -> PeerId:
    """The base58 text of a peer id given as multihash bytes."""
    return PeerId(base58.b58encode(multihash).decode("ascii"))


def parse_peer_id(text: str) -> PeerId:
    """Check that ``text`` is a peer id and return it.

    Raises ``ValueError`` with a sentence for the user otherwise. Only the identity and sha2-256 multihashes that
    libp2p uses for keys are taken.
    """
    try:
        raw = base58.b58decode(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a peer id: it holds characters outside base58") from None
    identity = len(raw) >= 2 and raw[0] == 0x00 and raw[1] == len(raw) - 2 and len(raw) > 2
    sha256 = len(raw) == 34 and raw[0] == 0x12 and raw[1] == 32
    if not identity and not sha256:
        raise ValueError(
            f"{text!r} is not a peer id: copy the whole id that `dep2p id` prints (it starts with 12D3KooW)"
        )
    return PeerId(text)
