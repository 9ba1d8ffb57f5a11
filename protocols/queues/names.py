"""Names of queues and channels (as NSQ's), ids of messages, and the logical partition of a key."""

import hashlib
import re
from typing import Final

EPHEMERAL: Final = "#ephemeral"
LOGICAL_PARTITIONS: Final = 1_024
KEY_BYTES_MAX: Final = 255

_SEQ_BITS: Final = 40
_SEQ_MASK: Final = (1 << _SEQ_BITS) - 1
_NAME: Final = re.compile(r"[.a-zA-Z0-9_-]{1,64}(#ephemeral)?")


def check_name(name: str, what: str = "queue") -> None:
    """Check the name of a queue or channel. Raises ``ValueError``."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the {what} name {name[:80]!r} is not allowed: 1 to 64 letters, digits, dots, dashes and underscores, "
            f"and {EPHEMERAL} behind them for one that lives in memory"
        )


def is_ephemeral(name: str) -> bool:
    """Whether a queue or channel of that name lives in memory only, and ends with its last consumer."""
    return name.endswith(EPHEMERAL)


def message_id(partition: int, seq: int) -> str:
    """Return the public id of a message: 16 hex digits."""
    return f"{(partition << _SEQ_BITS) | seq:016x}"


def parse_message_id(text: str) -> tuple[int, int]:
    """Partition and sequence number of an id. Raises ``ValueError``."""
    if len(text) != 16:
        raise ValueError(f"{text[:40]!r} is no message id: it has 16 hex digits")
    number = int(text, 16)
    return number >> _SEQ_BITS, number & _SEQ_MASK


def logical_partition(key: str) -> int:
    """Return the logical partition of an order key, among 1,024: stable across processes and versions.

    The first 8 bytes of BLAKE2b-64 of the key in UTF-8, as a big-endian number, modulo 1,024.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % LOGICAL_PARTITIONS


def ranges(count: int) -> list[range]:
    """Return the logical partitions of each of ``count`` partitions: ``[i*1024//k, (i+1)*1024//k)``, covering all of
    them.

    Raises ``ValueError`` for a count that is not from 1 to 1,024.
    """
    if not 1 <= count <= LOGICAL_PARTITIONS:
        raise ValueError(f"a queue has between 1 and {LOGICAL_PARTITIONS} partitions, not {count}")
    found = [
        range(index * LOGICAL_PARTITIONS // count, (index + 1) * LOGICAL_PARTITIONS // count) for index in range(count)
    ]
    assert [lp for each in found for lp in each] == list(range(LOGICAL_PARTITIONS)), "the ranges do not cover all"
    return found
