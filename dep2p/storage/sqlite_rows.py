"""Checksums of the rows of a queues' file, and bodies as they are kept. SQLite finds damage of its pages, not of what
is in them."""

import zlib
from typing import Final

import zstandard

from dep2p.protocols.queue.records import MessageRow

COMPRESSED: Final = 1
SUMMED: Final = 2
"""Bits of a message's ``form``; its checksum, a CRC-32 of meta and kept body, is above them. Rows of a file that was
made before schema 3 have none."""
_SUM_SHIFT: Final = 2
_BODY_BYTES_MAX: Final = 1 << 30
_HEADER_BYTES: Final = 18
"""Of a zstd frame: what tells how large the body was."""

DAMAGED_META: Final = b""
"""What a damaged message or dead letter has in the place of its meta: the core drops it, and tells."""


def row_sum(numbers: tuple[object, ...], *blobs: object) -> int:
    """The checksum of a small row. Whatever damage has made of its fields, it gives a number."""
    total = zlib.crc32(repr(numbers).encode())
    for blob in blobs:
        total = zlib.crc32(blob if isinstance(blob, bytes) else repr(blob).encode(), total)
    return total


class Bodies:
    """Compresses bodies from a size on (0: none), and counts."""

    def __init__(self, compress_bytes_min: int) -> None:
        self._least = compress_bytes_min
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self.compressed = self.from_bytes = self.to_bytes = 0

    def pack(self, meta: bytes, body: bytes) -> tuple[int, bytes]:
        """``form`` and body of a row."""
        size = len(body)
        if self._least and size >= self._least:
            smaller = self._compressor.compress(body)
            if len(smaller) < size:
                self.compressed += 1
                self.from_bytes += size
                self.to_bytes += len(smaller)
                return zlib.crc32(smaller, zlib.crc32(meta)) << _SUM_SHIFT | SUMMED | COMPRESSED, smaller
        return zlib.crc32(body, zlib.crc32(meta)) << _SUM_SHIFT | SUMMED, body

    def unpack(self, partition: int, seq: int, form: object, meta: object, kept: object) -> MessageRow:
        """A row as it was, or with `DAMAGED_META`."""
        if isinstance(form, int) and isinstance(meta, bytes) and isinstance(kept, bytes):
            if not form & SUMMED or form >> _SUM_SHIFT == zlib.crc32(kept, zlib.crc32(meta)):
                if not form & COMPRESSED:
                    return MessageRow(partition, seq, meta, kept)
                try:
                    body = self._decompressor.decompress(kept, max_output_size=_BODY_BYTES_MAX)
                except zstandard.ZstdError:
                    pass
                else:
                    return MessageRow(partition, seq, meta, body)
        return MessageRow(partition, seq, DAMAGED_META, b"")


SIZE: Final = f"form, case form & {COMPRESSED} when 0 then length(body) else substr(body, 1, {_HEADER_BYTES}) end"
"""SQL: what `size_of` takes; it reads no body."""


def size_of(form: object, length_or_header: object) -> int:
    """How many bytes a row's body has for its queue; 0 for a damaged one."""
    if isinstance(length_or_header, int):
        return length_or_header
    if isinstance(length_or_header, bytes):
        try:
            return max(0, zstandard.frame_content_size(length_or_header))
        except zstandard.ZstdError:
            return 0
    return 0
