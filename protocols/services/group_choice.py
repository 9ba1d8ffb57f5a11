"""The reader of a group that gets a message. Pure.

Every reader has each message by pub/sub, and makes the same choice for itself: rendezvous hashing (Thaler and
Ravishankar, 1998). When a reader comes or goes, only the messages of its share change hands.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from dep2p.types import PeerId

_WEIGHT_BYTES: Final = 8


def chosen_reader(readers: Iterable[PeerId], message_id: bytes) -> PeerId | None:
    """Return the reader whose hash with the message is the highest; None when there is none.

    >>> chosen_reader((PeerId("a"), PeerId("b")), b"1") == chosen_reader((PeerId("b"), PeerId("a")), b"1")
    True
    >>> chosen_reader((), b"1") is None
    True
    """
    seed = blake2b(message_id, digest_size=_WEIGHT_BYTES)
    best: PeerId | None = None
    highest = b""
    for reader in readers:
        hashed = seed.copy()
        hashed.update(reader.encode())
        weight = hashed.digest()
        if best is None or (weight, reader) > (highest, best):
            best, highest = reader, weight
    return best
