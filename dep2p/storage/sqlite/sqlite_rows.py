"""Checksums of the small rows of a queues' file. SQLite finds damage of its pages, not of what is in them."""

import zlib
from typing import Final

DAMAGED_META: Final = b""
"""What a damaged message or dead letter has in the place of its meta: the core drops it, and tells."""


def row_sum(numbers: tuple[object, ...], *blobs: object) -> int:
    """The checksum of a small row. Whatever damage has made of its fields, it gives a number."""
    total = zlib.crc32(repr(numbers).encode())
    for blob in blobs:
        total = zlib.crc32(blob if isinstance(blob, bytes) else repr(blob).encode(), total)
    return total
