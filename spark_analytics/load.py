"""Raw trace files → silver: typed Parquet with int64 keys, in five parts; and silver → DataFrames for the metrics."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from dep2p.traces.schema import KINDS, SCHEMA_VERSION, columns

PARTS: Final[dict[str, tuple[str, ...]]] = {
    "messages": ("publish", "reject", "duplicate", "deliver"),
    "rpcs": ("recv_rpc", "send_rpc", "drop_rpc"),
    "mesh": ("add_peer", "remove_peer", "join", "leave", "graft", "prune", "mesh"),
    "app": ("request", "notify", "stream", "delivery", "session", "queue"),
    "node": ("scores", "depths", "rtts", "node_start", "node_stop", "dropped", "clock"),
}
"""Kinds of events that are read together; all else goes to the part ``bad``."""

KIND_CODES: Final[dict[str, int]] = {name: number for number, name in enumerate(KINDS)}
"""Small numbers of the kinds, as silver holds them in ``k``."""

CORRUPT: Final = "_corrupt"
GLOB: Final = "*.ndjson.zst"

COMMON: Final = (
    *("k", "v", "node_id", "peer_id", "topic_id", "msg_id", "seq", "t", "run", "source_id", "source"),
    *("node", "peer", "topic", "msg", "kind", "size", "reason", "validation_us"),
)
"""Columns of silver that all parts have."""
NESTED: Final[dict[str, tuple[str, ...]]] = {
    "rpcs": (*("message_bytes", "control_bytes", "messages", "ihave", "iwant", "idontwant", "grafts", "prunes"),),
    "app": (
        *("name", "side", "outcome", "duration_us", "reply_size", "attempt", "state", "position", "session", "epoch"),
        *("count", "namespace", "queue", "channel", "consumer", "partition", "key", "bytes_in", "bytes_out"),
    ),
    "node": ("count", "peers", "scores", "depths", "rtts", "version", "offset_us", "error_us", "sample"),
}
"""Columns of one part only: a struct ``of_<part>`` in silver, so that the other parts pay for one null only."""

_OFTEN: Final = ("duplicate", "deliver", "recv_rpc", "send_rpc", "publish")
"""Kinds that most events are of: they are looked for first."""


def code(kind: str) -> Column:
    """The number of a kind, as a literal."""
    return F.lit(KIND_CODES[kind]).cast("tinyint")


def key(column: str | Column) -> Column:
    """The int64 key of a text: a hash, so that it is the same in every batch, file and run."""
    return F.xxhash64(F.col(column) if isinstance(column, str) else column)


_COUNTED: Final = {"messages": "ARRAY<STRUCT<size: BIGINT>>", "ihave": "ARRAY<STRUCT<count: BIGINT>>"}
"""What silver counts only is read with the fields that are summed: each field of each item costs."""


def raw_ddl() -> str:
    """The schema of the raw files, with a column for lines that are no JSON."""
    return ", ".join(f"`{name}` {sql}" for name, sql in {**columns(), **_COUNTED, CORRUPT: "STRING"}.items())


_READ_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    "ignoreCorruptFiles": "true",  # a damaged file keeps what was read before the damage; the rest is missed by `seq`
    "pathGlobFilter": GLOB,
    "recursiveFileLookup": "true",
}


def read_raw(spark: SparkSession, places: Sequence[str]) -> DataFrame:
    """All events of the trace files in these directories, with ``source``, the path of the file, and ``file``."""
    return _with_files(spark.read.schema(raw_ddl()).options(**_READ_OPTIONS).json(list(places)))


def stream_raw(spark: SparkSession, place: str, *, files_per_batch: int = 200) -> DataFrame:
    """The same as a stream that follows a directory."""
    reader = spark.readStream.schema(raw_ddl()).options(**_READ_OPTIONS)
    return _with_files(reader.option("maxFilesPerTrigger", files_per_batch).json(place))


def _with_files(frame: DataFrame) -> DataFrame:
    return frame.withColumns({"source": F.col("_metadata.file_path"), "file": F.col("_metadata.file_name")})


def to_silver(raw: DataFrame) -> DataFrame:
    """Raw events with keys, a part and the run; what no metric reads is left out. One pass, no shuffle.

    The text of ``kind`` stays for kinds that are unknown here; ``k`` has its number for all others.
    """
    k = F.col("k")
    part = F.when(F.col("node").isNull() | F.col("t").isNull(), F.lit("bad"))
    for name, kinds in PARTS.items():
        part = part.when(_any_of(k, kinds), F.lit(name))
    ids = {name: key(name) for name in ("node", "peer", "topic", "msg")}
    known = k >= 0
    fields = {
        "message_bytes": F.col("message_bytes"),
        "messages": F.size(F.coalesce("messages", F.array())),
        "ihave": F.aggregate("ihave", F.lit(0).cast("bigint"), lambda total, item: total + item["count"]),
        "iwant": F.transform("iwant", lambda msg: F.xxhash64(msg)),
        "idontwant": F.transform("idontwant", lambda msg: F.xxhash64(msg)),
        "grafts": F.size(F.coalesce("grafts", F.array())),
        "prunes": F.size(F.coalesce("prunes", F.array())),
    }
    nested = {
        f"of_{name}": F.when(_any_of(k, PARTS[name]), F.struct(*(fields.get(n, F.col(n)).alias(n) for n in names)))
        for name, names in NESTED.items()
    }
    return raw.withColumn("k", _code(F.col("kind"))).select(
        part.otherwise(F.lit("bad")).alias("part"),
        "k",
        F.coalesce(F.col("v"), F.lit(0)).alias("v"),
        *(F.when(F.col(name).isNotNull(), value).alias(f"{name}_id") for name, value in ids.items()),
        "seq",
        "t",
        run_of(F.col("file")).alias("run"),
        key("source").alias("source_id"),
        "source",
        "node",
        "peer",
        "topic",
        F.when(~_any_of(k, ("reject", "duplicate", "deliver")), F.col("msg")).alias("msg"),
        F.when(~known, F.col("kind")).alias("kind"),
        *("size", "reason", "validation_us"),
        *(column.alias(name) for name, column in nested.items()),
        CORRUPT,
    )


def run_of(file: Column) -> Column:
    """``start_ns`` of ``<node>-<start_ns>-<number>.ndjson.zst``, 0 for others. Without regular expression: cheaper."""
    number = F.substring_index(F.substring_index(file, "-", -1), ".", 1).try_cast("bigint")
    start = F.substring_index(F.substring_index(file, "-", -2), "-", 1).try_cast("bigint")
    return F.when(number.isNotNull(), F.greatest(F.coalesce(start, F.lit(0)), F.lit(0))).otherwise(F.lit(0))


def _any_of(k: Column, kinds: Sequence[str]) -> Column:
    return k.isin(*(KIND_CODES[kind] for kind in kinds))


def _code(kind: Column) -> Column:
    often = [*_OFTEN, *(name for name in KIND_CODES if name not in _OFTEN)]
    known = F.when(kind == often[0], code(often[0]))
    for name in often[1:]:
        known = known.when(kind == name, code(name))
    return known.otherwise(F.lit(-1).cast("tinyint"))


def write_silver(silver: DataFrame, place: str) -> None:
    """Write (or write anew) silver below ``place``, a directory for each part."""
    silver.write.mode("overwrite").partitionBy("part").option("compression", "zstd").parquet(place)


@dataclass(frozen=True, slots=True)
class Silver:
    """The parts of silver, ready for the metrics."""

    events: DataFrame
    messages: DataFrame
    rpcs: DataFrame
    mesh: DataFrame
    app: DataFrame
    node: DataFrame
    bad: DataFrame
    filled: frozenset[str]
    """The parts that have files."""


def read_silver(spark: SparkSession, place: str | Sequence[str], *, excluded_sources: Sequence[int] = ()) -> Silver:
    """Open silver (of several batches), without the events of some files (those that are there twice)."""
    reader = spark.read.schema(silver_ddl())
    if isinstance(place, str):
        whole = reader.parquet(place)
    else:
        whole = reader.option("basePath", place[0].rpartition("/")[0]).parquet(*place)
    if excluded_sources:
        whole = whole.where(~F.col("source_id").isin(*excluded_sources))
    events = whole.where(F.col("part") != "bad").select("part", *COMMON)
    parts = {
        name: whole.where(F.col("part") == name).select(
            *COMMON, *(F.col(f"of_{name}.{n}") for n in NESTED.get(name, ()))
        )
        for name in PARTS
    }
    filled = {found[1] for found in map(_PART.search, whole.inputFiles()) if found is not None}
    return Silver(events, **parts, bad=whole.where(F.col("part") == "bad"), filled=frozenset(filled))


_PART: Final = re.compile(r"/part=(\w+)/")


def silver_ddl() -> str:
    """The schema of silver."""
    types = {name: sql for name, sql in columns().items()}
    fixed = {
        "k": "TINYINT",
        **dict.fromkeys(("node_id", "peer_id", "topic_id", "msg_id", "run", "source_id", "ihave"), "BIGINT"),
        **dict.fromkeys(("iwant", "idontwant"), "ARRAY<BIGINT>"),
        **dict.fromkeys(("messages", "grafts", "prunes"), "INT"),
        **dict.fromkeys(("source", CORRUPT, "part"), "STRING"),
    }
    typed = {**types, **fixed}
    nested = {
        f"of_{part}": "STRUCT<" + ", ".join(f"`{name}`: {typed[name]}" for name in names) + ">"
        for part, names in NESTED.items()
    }
    order = (*COMMON, *nested, CORRUPT, "part")
    return ", ".join(f"`{name}` {nested.get(name) or typed[name]}" for name in order)


def names_of(events: DataFrame) -> pd.DataFrame:
    """``id`` → ``name`` of the nodes, peers and topics in events. A key for two texts shows as two rows."""
    names = ("node", "peer", "topic")
    found = events.select("node_id", "node", "peer_id", "peer", "topic_id", "topic").distinct().toArrow()
    pairs = pa.concat_tables(found.select([f"{n}_id", n]).rename_columns(["id", "name"]) for n in names)
    known = pairs.drop_null().group_by(["id", "name"]).aggregate([]).to_pandas()
    return known.sort_values(["id", "name"]).reset_index(drop=True)


def corrected(frame: DataFrame, offsets: dict[int, int]) -> DataFrame:
    """``t`` by one common clock: the node's offset (µs that its clock is ahead) is taken off."""
    if not offsets:
        return frame
    table = frame.sparkSession.createDataFrame(list(offsets.items()), "node_id BIGINT, ahead_us BIGINT")
    joined = frame.join(F.broadcast(table), "node_id", "left")
    return joined.withColumn("t", F.col("t") - F.coalesce("ahead_us", F.lit(0))).drop("ahead_us")


def known_version(version: int) -> bool:
    """Whether events of this schema version are understood fully."""
    return 1 <= version <= SCHEMA_VERSION
