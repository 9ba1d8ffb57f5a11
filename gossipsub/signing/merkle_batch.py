"""One signature for several messages of one author: a Merkle tree over them, its root signed, a proof in each message.

Every message stays verifiable on its own, by every receiver and in any order, as with a signature of its own.
A receiver of several messages of one batch verifies their signature once. Why: docs/decisions/0011-batch-signatures.md.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

BATCH_MAX: Final = 256
"""Messages under one signature."""
STEPS_MAX: Final = 8
"""Steps of a proof: enough for `BATCH_MAX` leaves."""
HASH_BYTES: Final = 32
PROOF_BYTES_MAX: Final = 1 + STEPS_MAX * HASH_BYTES

_INNER: Final = b"\x01"
"""A byte put before two hashes that are hashed together. A leaf is the hash of the covered bytes, which begin with a
letter: it cannot be mistaken for such a pair."""


def make_proofs(covered: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
    """Return the root over these byte strings and the proof of each, in their order.

    A proof is one byte of directions (bit i set: the sibling of step i is on the left), then the siblings, from the
    leaf upwards. Raises ``ValueError`` for less than 2 or more than `BATCH_MAX`.
    """
    if not 2 <= len(covered) <= BATCH_MAX:
        raise ValueError(f"a batch has between 2 and {BATCH_MAX} messages, not {len(covered)}")
    sha256 = hashlib.sha256
    level = [sha256(one).digest() for one in covered]
    directions = [0] * len(level)
    siblings: list[list[bytes]] = [[] for _ in level]
    members = [[number] for number in range(len(level))]
    while len(level) > 1:
        above: list[bytes] = []
        members_above: list[list[int]] = []
        for left in range(0, len(level) - 1, 2):
            right = left + 1
            for number in members[left]:
                siblings[number].append(level[right])
            for number in members[right]:
                directions[number] |= 1 << len(siblings[number])
                siblings[number].append(level[left])
            above.append(sha256(_INNER + level[left] + level[right]).digest())
            members_above.append(members[left] + members[right])
        if len(level) % 2:
            above.append(level[-1])
            members_above.append(members[-1])
        level, members = above, members_above
    return level[0], [
        bytes((direction,)) + b"".join(steps) for direction, steps in zip(directions, siblings, strict=True)
    ]


def is_proof(proof: bytes) -> bool:
    """Whether these bytes have the form of a proof: 1 to `STEPS_MAX` steps, no direction for a step that is not
    there."""
    steps, rest = divmod(len(proof) - 1, HASH_BYTES)
    return 1 <= steps <= STEPS_MAX and not rest and not proof[0] >> steps


def root_of(covered: bytes, proof: bytes) -> bytes:
    """Return the root to which a proof leads from the covered bytes. ``proof`` passes `is_proof`."""
    sha256 = hashlib.sha256
    found = sha256(covered).digest()
    directions = proof[0]
    for start in range(1, len(proof), HASH_BYTES):
        sibling = proof[start : start + HASH_BYTES]
        found = sha256(_INNER + sibling + found if directions & 1 else _INNER + found + sibling).digest()
        directions >>= 1
    return found


class VerifiedBatches:
    """Signatures of batches that were verified lately, so that each is verified once. Bounded."""

    __slots__ = ("_items_max", "_known")

    def __init__(self, items_max: int = 4_096) -> None:
        self._items_max = items_max
        self._known: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, batch: bytes) -> bool:
        """Whether a batch was verified lately. ``batch``: author, signature and root, joined."""
        return batch in self._known

    def add(self, batch: bytes) -> None:
        """Remember a batch; the oldest one goes when there is no room."""
        known = self._known
        if len(known) >= self._items_max:
            # From a dict's front one by one would be quadratic.
            for old in list(known)[: max(1, self._items_max // 16)]:
                del known[old]
        known[batch] = None
