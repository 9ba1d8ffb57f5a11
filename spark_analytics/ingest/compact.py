"""Silver as Parquet files, written by the workers themselves: a fifth of what Spark's writer takes.

This file imports of dep2p only what travels to workers by value with it: they need pyarrow and numpy.
"""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dep2p.spark_analytics.ingest.decode import Layout, batches_of, filled

GROUP_ROWS = 1 << 17
"""Events in a row group of a Parquet file; a worker holds so many of each part."""
WRITTEN_DDL = "file STRING, events BIGINT"


def writer(layout: Layout, scratch: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for ``mapInArrow``: rows (path[, content]) of files become silver below ``scratch``, a directory for
    each part. Gives the files that were written (`WRITTEN_DDL`), relative to it; others there are of failed attempts.
    """

    def write(files: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = layout.schema(encoded=True)
        repeated = _repeated(schema)
        name = f"{uuid.uuid4().hex}.parquet"
        held: dict[str, list[pa.RecordBatch]] = {}
        opened: dict[str, pq.ParquetWriter] = {}
        written: dict[str, int] = {}

        def flush(part: str) -> None:
            tables = [pa.Table.from_batches([batch]) for batch in held.pop(part)]
            table = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
            if part not in opened:
                directory = os.path.join(scratch, f"part={part}")
                os.makedirs(directory, exist_ok=True)
                opened[part] = pq.ParquetWriter(
                    os.path.join(directory, name),
                    schema,
                    compression="zstd",
                    use_dictionary=repeated,
                    store_schema=False,  # so that dictionaries are plain texts to those who read the file
                )
            opened[part].write_table(filled(table, schema))
            written[part] = written.get(part, 0) + table.num_rows

        for part, batch in batches_of(files, layout):
            held.setdefault(part, []).append(batch)
            if sum(map(len, held[part])) >= GROUP_ROWS:
                flush(part)
        for part in list(held):
            flush(part)
        for file in opened.values():
            file.close()
        names = [f"part={part}/{name}" for part in written]
        yield pa.RecordBatch.from_pydict({"file": pa.array(names, pa.string()), "events": pa.array(written.values())})

    return write


def _repeated(schema: pa.Schema) -> list[str]:
    """Return the columns to write with dictionaries: half the time and two thirds of the bytes of trying them for
    all."""
    found = [field.name for field in schema if field.name not in ("seq", "t", "msg_id", "validation_us")]
    for field in schema:
        if pa.types.is_struct(field.type):
            found += [f"{field.name}.{inner.name}" for inner in field.type if pa.types.is_string(inner.type)]
    return found


def finisher(
    scratch: str, place: str, written: set[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for ``mapInArrow`` over a single row: the files below ``scratch`` replace those in ``place``.

    It runs where the writers ran, so that no other process needs to reach the place. Yields the files that it found.
    """

    def finish(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in rows:
            foreign = foreign_in(place)
            if foreign:
                shutil.rmtree(scratch, ignore_errors=True)
                raise FileExistsError(foreign)
            found: list[str] = []
            for path in Path(scratch).glob("part=*/*"):
                name = f"{path.parent.name}/{path.name}"
                if name in written:
                    found.append(name)
                else:
                    path.unlink()
            if len(found) == len(written):
                os.makedirs(scratch, exist_ok=True)
                shutil.rmtree(place, ignore_errors=True)
                os.rename(scratch, place)
                for stale in Path(place).parent.glob(f"{hidden(place)}*"):
                    shutil.rmtree(stale, ignore_errors=True)
            yield pa.RecordBatch.from_pydict({"file": pa.array(found, pa.string())})

    return finish


def foreign_in(place: str) -> str:
    """Name in words the foreign files at a place for silver, which would be lost; "" when there are none."""
    if not os.path.isdir(place):
        return f"{place} is no directory: silver needs one of its own" if os.path.lexists(place) else ""
    return foreign_of(place, [name for name in os.listdir(place) if not _OWN.fullmatch(name)])


def foreign_of(place: str, names: list[str]) -> str:
    """Name in words the foreign files among names that were found; "" when there are none."""
    shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    return f"{place} holds what is no silver ({shown}), which would be lost: give another place" if names else ""


_OWN = re.compile(r"part=\w+|\.?_SUCCESS(\.crc)?")


def hidden(place: str) -> str:
    """Return the prefix of directories beside a place that are to replace it."""
    return f".{os.path.basename(place)}-new-"


def scratch_of(place: str) -> str:
    """Return the path of a new directory beside a place that is to replace it."""
    return os.path.join(os.path.dirname(place), hidden(place) + uuid.uuid4().hex)
