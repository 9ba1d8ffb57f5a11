"""Messages in a queues' file: those with numbers in a row that were published together are one row, a segment. A row
for each message costs three times as much to write, and again to remove.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import zstandard

from dep2p.protocols.queues.records import MessageRow
from dep2p.storage.sqlite.schema import DAMAGED_META

SEQ_BITS: Final = 40
"""The id of a segment is its partition and, in these bits, the number of its first message."""
SEQ_MASK: Final = (1 << SEQ_BITS) - 1
SEGMENT_ITEMS: Final = 64
_SEGMENT_BYTES: Final = 131_072
"""Bytes of a segment at most, or one message. Larger ones save little, and each look at a message reads a whole one."""
_COMPRESSED: Final = 1
_BODY_BYTES_MAX: Final = 1 << 30
_NUMBERS: Final = struct.Struct(">QIQ")
_HEAD: Final = struct.Struct(">I")
_ENTRY: Final = struct.Struct(">5I")
_ENTRIES: Final = [struct.Struct(f">{5 * items}I") for items in range(SEGMENT_ITEMS + 1)]
_FIELDS: Final = 5

INSERT: Final = "insert into segments values(?,?,?,?,?)"
NUMBERS_OF: Final = "select id, items, bytes, sum from segments where id between ? and ? order by id limit ?"
"""The query of `span` and `last_of`; it reads no data."""


class Segment(NamedTuple):
    """A row of the table. ``data``: CRC-32 of ``sum`` and the index; the index: for each message the lengths of its
    meta and its stored body, the size of the body itself, 1 when it is compressed, the CRC-32 of both; then meta and
    body of each."""

    id: int
    items: int
    body_bytes: int
    """Bytes of the bodies before compression."""
    sum: int
    """The CRC-32 of the numbers before it."""
    data: bytes


def segment_id(partition: int, seq: int) -> int:
    """Return the key of a segment that begins with this message."""
    return partition << SEQ_BITS | min(seq, SEQ_MASK)


def segment_ids(partition: int, from_seq: int, to_seq: int) -> tuple[int, int]:
    """Return the lowest and the highest key of segments that begin in a range of numbers."""
    return segment_id(partition, from_seq), segment_id(partition, to_seq)


def last_of(row: Sequence[int]) -> int:
    """Return the last number of a segment; of a damaged one the last that it may have."""
    known = span(*row)
    return (row[0] & SEQ_MASK) + (SEGMENT_ITEMS if known is None else known[0]) - 1


def span(row_id: object, items: object, size: object, total: object) -> tuple[int, int] | None:
    """Return messages and their bytes of a row with these numbers; None when they are damaged."""
    if not isinstance(row_id, int) or not isinstance(items, int) or not isinstance(size, int):
        return None
    if not 0 < items <= SEGMENT_ITEMS or not 0 <= size < 1 << 63 or total != _sum(row_id, items, size):
        return None
    return items, size


def _sum(row_id: int, items: int, size: int) -> int:
    return zlib.crc32(_NUMBERS.pack(row_id, items, size))


Kept = tuple[int, int, int, int, int, int, bytes]
"""A message in its stored form: its number, the five numbers of its index entry, and meta and stored body joined."""


def segments_of(partition: int, messages: Iterable[Kept]) -> Iterator[Segment]:
    """Yield rows for messages in rising order."""
    index: list[int] = []
    parts: list[bytes] = []
    first = expected = total = kept = 0
    for seq, meta_bytes, kept_bytes, size, flags, crc, joined in messages:
        if parts and (seq != expected or len(parts) == SEGMENT_ITEMS or kept + kept_bytes > _SEGMENT_BYTES):
            yield _segment(partition, first, total, index, parts)
            index, parts = [], []
            total = kept = 0
        if not parts:
            first = seq
        expected = seq + 1
        index += (meta_bytes, kept_bytes, size, flags, crc)
        parts.append(joined)
        total += size
        kept += kept_bytes
    if parts:
        yield _segment(partition, first, total, index, parts)


def _segment(partition: int, first: int, size: int, index: list[int], parts: list[bytes]) -> Segment:
    row_id, items = partition << SEQ_BITS | first, len(parts)
    total = _sum(row_id, items, size)
    packed = _ENTRIES[items].pack(*index)
    return Segment(row_id, items, size, total, b"".join([_HEAD.pack(zlib.crc32(packed, total)), packed, *parts]))


class Bodies:
    """Compresses bodies from a size on (0: none), and counts them."""

    def __init__(self, compress_bytes_min: int) -> None:
        self._least = compress_bytes_min
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self.compressed: int = 0
        self.from_bytes: int = 0
        self.to_bytes: int = 0

    def pack(self, partition: int, messages: Sequence[MessageRow]) -> Iterator[Segment]:
        """Yield rows for new messages of a partition."""
        return segments_of(partition, self._keep(messages))

    def _keep(self, messages: Sequence[MessageRow]) -> Iterator[Kept]:
        crc32, least = zlib.crc32, self._least
        for _partition, seq, meta, body in messages:
            size = kept_bytes = len(body)
            flags = 0
            if least and size >= least:
                smaller = self._compressor.compress(body)
                if len(smaller) < size:
                    self.compressed += 1
                    self.from_bytes += size
                    self.to_bytes += len(smaller)
                    body, flags, kept_bytes = smaller, _COMPRESSED, len(smaller)
            joined = meta + body
            yield seq, len(meta), kept_bytes, size, flags, crc32(joined), joined

    def unpack(self, row: Sequence[object], from_seq: int, end_seq: int) -> Iterator[MessageRow]:
        """Yield the messages of a row from one number on; each damaged one with `DAMAGED_META`, and all up to
        ``end_seq`` (not included) when it cannot be known which there are."""
        row_id, items, size, total, data = row
        assert isinstance(row_id, int)
        partition, first = row_id >> SEQ_BITS, row_id & SEQ_MASK
        index = index_of(row)
        if index is None or not isinstance(data, bytes) or not isinstance(total, int):
            known = span(row_id, items, size, total)
            most = SEGMENT_ITEMS if known is None else known[0]
            for seq in range(max(first, from_seq), min(end_seq, first + most)):
                yield MessageRow(partition, seq, DAMAGED_META, b"")
            return
        at = _HEAD.size + _ENTRY.size * (len(index) // _FIELDS)
        fields = iter(index)
        for seq, (meta_bytes, kept_bytes, _of, flags, crc) in enumerate(
            zip(fields, fields, fields, fields, fields, strict=True), first
        ):
            middle = at + meta_bytes
            end = middle + kept_bytes
            if seq >= from_seq:
                meta, body = data[at:middle], data[middle:end]
                if crc == zlib.crc32(body, zlib.crc32(meta)):
                    yield self._whole(partition, seq, meta, body, flags)
                else:
                    yield MessageRow(partition, seq, DAMAGED_META, b"")
            at = end

    def _whole(self, partition: int, seq: int, meta: bytes, body: bytes, flags: int) -> MessageRow:
        if flags & _COMPRESSED:
            try:
                body = self._decompressor.decompress(body, max_output_size=_BODY_BYTES_MAX)
            except zstandard.ZstdError:
                return MessageRow(partition, seq, DAMAGED_META, b"")
        return _new(MessageRow, (partition, seq, meta, body))


def index_of(row: Sequence[object]) -> tuple[int, ...] | None:
    """Return the index of a row, five numbers for each message; None when it is damaged."""
    row_id, items, size, total, data = row
    known = span(row_id, items, size, total)
    if known is None or not isinstance(data, bytes) or not isinstance(total, int):
        return None
    entries = _ENTRIES[known[0]]
    end = _HEAD.size + entries.size
    if len(data) < end or _HEAD.unpack_from(data)[0] != zlib.crc32(data[_HEAD.size : end], total):
        return None
    return entries.unpack_from(data, _HEAD.size)


def size_up_to(row: Sequence[object], seq: int) -> tuple[int, int]:
    """Count the messages of a row with numbers up to ``seq``, and the bytes of their bodies."""
    row_id, index = row[0], index_of(row)
    assert isinstance(row_id, int)
    if index is None:
        return 0, 0
    count = max(0, min(len(index) // _FIELDS, seq - (row_id & SEQ_MASK) + 1))
    return count, sum(index[2 : _FIELDS * count : _FIELDS])


def old_message(row_id: int, form: object, meta: object, body: object) -> Kept:
    """Convert a row of a file before schema 4. ``form``: 1 when compressed, 2 when it has a checksum, that above
    them."""
    kept_meta = meta if isinstance(meta, bytes) else b""
    kept_body = body if isinstance(body, bytes) else b""
    number = form if isinstance(form, int) else 0
    crc = zlib.crc32(kept_body, zlib.crc32(kept_meta))
    if not isinstance(meta, bytes) or not isinstance(body, bytes) or not isinstance(form, int):
        crc ^= 1  # damaged, and marked as damaged
    elif number & 2:
        crc = number >> 2 & 0xFFFFFFFF
    size = len(kept_body)
    if number & _COMPRESSED:
        try:
            size = max(0, zstandard.frame_content_size(kept_body[:18])) & 0xFFFFFFFF
        except zstandard.ZstdError:
            size = 0
    flags = number & _COMPRESSED
    return row_id & SEQ_MASK, len(kept_meta), len(kept_body), size, flags, crc, kept_meta + kept_body


_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""
