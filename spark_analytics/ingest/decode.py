"""Trace files → silver, in the workers: frames unpacked and lines decoded by pyarrow, in C++; keys made by numpy.

This file imports of dep2p only what travels to workers by value with it: they need pyarrow and numpy.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from dep2p.spark_analytics.ingest.keys import keys_of

BLOCK_BYTES = 4 << 20
"""Bytes of JSON that are decoded at once, about: some 16,000 events."""
LINE_BYTES_MAX = 64 << 20
"""Bytes of a line; a longer one is cut, and counts as a line that is not JSON."""
UNREADABLE = "cannot be read:"
"""The beginning of the reason in a row that stands for a file."""
_READ_BYTES = 1 << 20
_SHOWN = 1_000
_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"
_KEYED = ("node", "peer", "topic")
_BAD = "bad"


@dataclass(frozen=True)
class Layout:
    """The fields to decode, and their order in silver. Fields are Arrow's.

    - ``fields``: of all parts, as they are in the files. ``order``: the columns that are made of them.
    - ``nested``: part → the fields only it has, which go into a struct ``of_<part>``. Of ``counted`` ones only the
      length of the list is kept, of ``hashed`` ones the keys; ``summed``: field → what is summed over its structs.
    - ``codes``: the number of each kind; ``parts``: the part of each kind, by its number; ``textless``: kinds whose
      text of ``msg`` is not kept.
    """

    fields: Sequence[pa.Field]
    order: Sequence[str]
    nested: Mapping[str, Sequence[pa.Field]]
    counted: frozenset[str]
    hashed: frozenset[str]
    summed: Mapping[str, str]
    codes: Mapping[str, int]
    parts: Sequence[str]
    textless: Sequence[str]

    def struct(self, part: str) -> pa.StructType:
        """Return the type of ``of_<part>``."""
        types = {**dict.fromkeys(self.counted, pa.int32()), **dict.fromkeys(self.summed, pa.int64())}
        types |= dict.fromkeys(self.hashed, pa.list_(pa.int64()))
        return pa.struct([(field.name, types.get(field.name, field.type)) for field in self.nested[part]])

    def schema(self, *, encoded: bool = False) -> pa.Schema:
        """Return the schema of silver, without ``part``. ``encoded``: texts that repeat are dictionaries."""
        types = {field.name: field.type for field in self.fields}
        types |= {"k": pa.int8(), "run": pa.int64(), "source_id": pa.int64()}
        types |= dict.fromkeys((*_KEYED, "source"), pa.dictionary(pa.int32(), pa.string()) if encoded else pa.string())
        types |= {f"{name}_id": pa.int64() for name in (*_KEYED, "msg")}
        nested = [(f"of_{part}", self.struct(part)) for part in self.nested]
        return pa.schema([*((name, types[name]) for name in self.order), *nested, ("_corrupt", pa.string())])


def decoder(layout: Layout) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for ``mapInArrow``: makes silver, with ``part`` as the first column, of the rows of `batches_of`."""

    def decode(files: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = layout.schema()
        for part, batch in batches_of(files, layout):
            whole = filled(pa.Table.from_batches([batch]), schema)
            of_part = pa.repeat(pa.scalar(part, pa.string()), whole.num_rows)
            yield from whole.add_column(0, "part", of_part).to_batches()

    return decode


def filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema; nulls for those that the table lacks."""
    have = set(table.column_names)
    columns = [
        table[field.name].cast(field.type) if field.name in have else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def batches_of(files: Iterator[pa.RecordBatch], layout: Layout) -> Iterator[tuple[str, pa.RecordBatch]]:
    """(part, batch of its events) of rows (path[, content]) of files, whose bytes are in ``content`` or are read here.

    A batch lacks the columns that are null; texts that repeat are dictionaries. A file that cannot be read is one row
    of the part ``bad``, with the ``reason``.
    """
    blocks = Blocks(layout)
    for batch in files:
        held = batch.schema.get_field_index("content") >= 0
        for row in range(batch.num_rows):
            path = batch.column("path")[row].as_py()
            try:
                content = batch.column("content")[row].as_buffer() if held else None
                if content is not None:
                    yield from blocks.of_file(pa.BufferReader(content), path)
                else:
                    path = local_path(path)
                    with open(path, "rb") as file:
                        yield from blocks.of_file(file, path)
            except OSError as error:
                yield blocks.unreadable(path, str(error.strerror or error))


def local_path(path: str) -> str:
    """Return the path of a ``file:`` URL, as Spark writes it: not percent-encoded."""
    path = path.removeprefix("file:")
    return path[2:] if path.startswith("//") else path


def run_of(path: str) -> int:
    """Return ``start_ns`` of ``<node>-<start_ns>-<number>.ndjson.zst``, 0 for other names."""
    words = path.rpartition("/")[2].rsplit("-", 2)
    number = words[-1].partition(".")[0]
    if len(words) < 2 or not _is_int64(number):
        return 0
    return max(0, int(words[-2])) if _is_int64(words[-2]) else 0


def _is_int64(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 63


# Bytes → lines --------------------------------------------------------------------------------------------------------


def frames(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """(start, end) of the whole zstd frames (RFC 8878) up to the first bytes that are none; skippable ones left out."""
    size = file.seek(0, io.SEEK_END)
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(18)
        if len(head) >= 8 and head[1:4] == _SKIPPABLE and head[0] >> 4 == 5:
            at += 8 + int.from_bytes(head[4:8], "little")
            continue
        if head[:4] != _MAGIC or len(head) < 5:
            return
        start, flags = at, head[4]
        single = flags >> 5 & 1
        at += 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
        last = False
        while not last:
            file.seek(at)
            block = file.read(3)
            header = int.from_bytes(block, "little")
            last, kind = bool(header & 1), header >> 1 & 3
            if len(block) < 3 or kind == 3:
                return
            at += 3 + (1 if kind == 1 else header >> 3)
        at += 4 if flags >> 2 & 1 else 0
        if at > size:
            return
        yield start, at


class _Range(io.RawIOBase):
    """A range of bytes of a file, from ``at`` to ``end``, however large."""

    def __init__(self, file: BinaryIO, at: int, end: int) -> None:
        super().__init__()
        self._file, self._at, self._end = file, at, end

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        left = self._end - self._at
        self._file.seek(self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def lines(file: BinaryIO, block_bytes: int = BLOCK_BYTES, line_bytes_max: int = LINE_BYTES_MAX) -> Iterator[bytes]:
    """Blocks of whole lines, each ending in a newline. What a damaged frame held before the damage counts.

    A line may go on in the next frame, but not over a damaged one.
    """
    held: list[bytes] = []
    held_bytes = 0
    for start, end in frames(file):
        try:
            stream = pa.CompressedInputStream(pa.PythonFile(_Range(file, start, end), "r"), "zstd")
            while data := stream.read(_READ_BYTES):
                held.append(data)
                held_bytes += len(data)
                if held_bytes < block_bytes:
                    continue
                whole = b"".join(held)
                cut = whole.rfind(b"\n") + 1
                if not cut and len(whole) > line_bytes_max:
                    whole, cut = whole + b"\n", len(whole) + 1
                if cut:
                    yield whole[:cut]
                held, held_bytes = [whole[cut:]], len(whole) - cut
        except OSError:  # a damaged frame: those that follow are read
            if held_bytes:
                yield b"".join([*held, b"\n"])
            held, held_bytes = [], 0
    if held_bytes:
        yield b"".join(held) if held[-1].endswith(b"\n") else b"".join([*held, b"\n"])


# Lines → columns ------------------------------------------------------------------------------------------------------


class Blocks:
    """Turns blocks of lines into batches of a layout, one for each part that has events in the block."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._fields = pa.schema([*layout.fields])
        self._nested = {part: pa.schema([*fields]) for part, fields in layout.nested.items()}
        self._all = {field.name: field.type for schema in (self._fields, *self._nested.values()) for field in schema}
        self._kinds = pa.array(sorted(layout.codes, key=lambda kind: layout.codes[kind]))
        self._textless = pa.array([layout.codes[kind] for kind in layout.textless], pa.int8())
        self._names = sorted({*layout.parts, _BAD})
        # By the number of a kind; the last, which -1 stands for, is of unknown ones.
        self._part_of = np.array([self._names.index(part) for part in (*layout.parts, _BAD)])

    def of_file(self, file: BinaryIO, path: str) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Return the batches of a file. Raises ``OSError`` when it cannot be read."""
        run = run_of(path)
        for block in lines(file):
            yield from self.of_block(block, path, run)

    def of_block(self, block: bytes, path: str, run: int) -> list[tuple[str, pa.RecordBatch]]:
        """Return the batches of a block of whole lines."""
        try:
            return self._of_objects(block, path, run)
        except _Unsure:
            block, corrupt = self._cleaned(block)
            bad = [self._bad(path, run, _corrupt=corrupt)] if corrupt else []
            return bad + self._of_objects(block, path, run)

    def unreadable(self, path: str, why: str) -> tuple[str, pa.RecordBatch]:
        """Return the row that stands for a file that cannot be read."""
        return self._bad(path, run_of(path), reason=[f"{UNREADABLE} {why}"])

    def _of_objects(self, block: bytes, path: str, run: int) -> list[tuple[str, pa.RecordBatch]]:
        """Return the batches of a block. Raises `_Unsure` when it is not surely one JSON object a line, of which all
        known fields have their types."""
        if not block:
            return []
        octets = np.frombuffer(block, dtype=np.uint8)
        ends = np.flatnonzero(octets == 10)
        starts = np.concatenate([[0], ends + 1])
        # No line is blank, each begins an object and ends one: with as many objects as lines, each line is one.
        if not ((octets[starts[:-1]] == 123).all() and (octets[ends - 1] == 125).all()):
            raise _Unsure
        if not block.isascii():
            try:
                block.decode()
            except UnicodeDecodeError:
                raise _Unsure from None
        table = _read(block, self._fields, len(ends))
        codes = pc.fill_null(pc.index_in(table["kind"], self._kinds), -1).to_numpy()
        part = self._part_of[codes]
        lacking = pc.or_(pc.is_null(table["node"]), pc.is_null(table["t"])).to_numpy()
        part[lacking] = self._names.index(_BAD)
        columns = self._columns(table, pa.array(codes.astype(np.int8)))
        batches: list[tuple[str, pa.RecordBatch]] = []
        for number in np.unique(part):
            name, rows = self._names[number], np.flatnonzero(part == number)
            every = len(rows) == len(ends)
            taken = columns if every else columns.take(pa.array(rows))
            mine = dict(zip(taken.schema.names, taken.columns, strict=True))
            if name != _BAD:
                del mine["kind"]
            if name in self._nested:
                theirs = block if every else b"".join([block[starts[row] : starts[row + 1]] for row in rows])
                mine[f"of_{name}"] = self._struct(name, _read(theirs, self._nested[name], len(rows)))
            batches.append((name, self._batch(mine, path, run, len(rows))))
        return batches

    def _columns(self, table: pa.Table, k: pa.Array) -> pa.RecordBatch:
        """Return the columns that silver has of all events; ``kind`` is null for known kinds."""
        made = {name: table[name].combine_chunks() for name in table.column_names}
        for name in _KEYED:
            encoded = made[name].dictionary_encode()
            made[name] = encoded
            made[f"{name}_id"] = keys_of(encoded.dictionary).take(encoded.indices)
        made["msg_id"] = keys_of(made["msg"])
        made["msg"] = pc.if_else(pc.is_in(k, self._textless), None, made["msg"])
        made["kind"] = pc.if_else(pc.equal(k, -1), made["kind"], None)
        made["v"] = pc.fill_null(made["v"], 0)
        made["k"] = k
        return pa.RecordBatch.from_pydict(made)

    def _struct(self, part: str, table: pa.Table) -> pa.StructArray:
        values = []
        for field in self._layout.nested[part]:
            value = table[field.name].combine_chunks()
            if field.name in self._layout.counted:
                value = pc.fill_null(pc.list_value_length(value), 0)
            elif field.name in self._layout.summed:
                value = _sums(value, self._layout.summed[field.name])
            elif field.name in self._layout.hashed:
                mask = value.is_null() if value.null_count else None
                value = pa.ListArray.from_arrays(value.offsets, keys_of(value.values), mask=mask)
            values.append(value)
        return pa.StructArray.from_arrays(values, fields=list(self._layout.struct(part)))

    def _bad(self, path: str, run: int, **columns: list[str]) -> tuple[str, pa.RecordBatch]:
        count = len(next(iter(columns.values())))
        made = {name: pa.array(values, pa.string()) for name, values in columns.items()}
        made |= {"k": pa.array([-1] * count, pa.int8()), "v": pa.array([0] * count, pa.int64())}
        return _BAD, self._batch(made, path, run, count)

    def _batch(self, columns: dict[str, pa.Array], path: str, run: int, count: int) -> pa.RecordBatch:
        source = pa.array([path])
        columns["source"] = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, dtype=np.int32)), source)
        columns["source_id"] = pa.array(np.full(count, keys_of(source)[0].as_py(), dtype=np.int64))
        columns["run"] = pa.array(np.full(count, run, dtype=np.int64))
        return pa.RecordBatch.from_pydict(columns)

    def _cleaned(self, block: bytes) -> tuple[bytes, list[str]]:
        """Return the lines that are objects, with known fields of the right types only; and those that are not."""
        good: list[str] = []
        corrupt: list[str] = []
        for line in block.split(b"\n"):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict):
                good.append(json.dumps(_fitting_fields(event, self._all)))
            else:
                corrupt.append(line[:_SHOWN].decode("utf-8", "replace"))
        return "".join(line + "\n" for line in good).encode(), corrupt


class _Unsure(Exception):
    """The lines of a block have to be read one by one."""


def _read(block: bytes, schema: pa.Schema, count: int) -> pa.Table:
    """Read the known fields of ``count`` objects. Raises `_Unsure`."""
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowException:
        raise _Unsure from None
    if table.num_rows != count:
        raise _Unsure
    return table


def _sums(lists: pa.ListArray, name: str) -> pa.Array:
    """Return the sum of a field over the structs of each list; null where there is no list."""
    counts = pc.fill_null(pc.struct_field(pc.list_flatten(lists), name), 0).to_numpy()
    sums = np.zeros(len(lists), dtype=np.int64)
    np.add.at(sums, pc.list_parent_indices(lists).to_numpy(), counts)
    return pa.array(sums, mask=pc.is_null(lists).to_numpy(zero_copy_only=False))


def _fitting_fields(event: Mapping[str, object], types: Mapping[str, pa.DataType]) -> dict[str, object]:
    found = {name: _fitting(event[name], of) for name, of in types.items() if name in event}
    return {name: value for name, value in found.items() if value is not None}


def _fitting(value: object, of: pa.DataType) -> object:
    """Return the value as JSON of the type, or None when it is of another one."""
    if pa.types.is_string(of):
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None
    if pa.types.is_list(of):
        return [_fitting(item, of.value_type) for item in value] if isinstance(value, list) else None
    if pa.types.is_struct(of):
        return _fitting_fields(value, {field.name: field.type for field in of}) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if pa.types.is_floating(of):
        return float(value) if abs(value) < 1 << 1023 else None
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else None
