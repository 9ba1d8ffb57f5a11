"""Raw trace files → silver: typed Parquet with int64 keys, in five parts; and silver → DataFrames for the metrics."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd
import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from dep2p.spark_analytics.ingest.compact import WRITTEN_DDL, finisher, foreign_in, foreign_of, scratch_of, writer
from dep2p.spark_analytics.ingest.decode import Layout, decoder
from dep2p.traces.schema import KINDS, SCHEMA_VERSION, columns

PARTS: Final[dict[str, tuple[str, ...]]] = {
    "messages": ("publish", "reject", "duplicate", "deliver", "deliver_local"),
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


def code(kind: str) -> Column:
    """Return the number of a kind, as a literal."""
    return F.lit(KIND_CODES[kind]).cast("tinyint")


def layout() -> Layout:
    """Return the layout that the workers make of the files. Fields that no metric reads are left out."""
    types = {**columns(), **_COUNTED}

    def fields(names: Sequence[str]) -> list[pa.Field]:
        return [pa.field(name, _arrow_type(types[name])) for name in names]

    return Layout(
        fields=fields([name for name in COMMON if name in types]),
        order=COMMON,
        nested={part: fields(names) for part, names in NESTED.items()},
        counted=frozenset({"messages", "grafts", "prunes"}),
        hashed=frozenset({"iwant", "idontwant"}),
        summed={"ihave": "count"},
        codes=KIND_CODES,
        parts=[part for kind in KINDS for part, kinds in PARTS.items() if kind in kinds],
        # the id is most of such an event: the publish has it
        textless=("reject", "duplicate", "deliver", "deliver_local"),
    )


_COUNTED: Final = {"messages": "ARRAY<STRUCT<size: BIGINT>>", "ihave": "ARRAY<STRUCT<count: BIGINT>>"}
"""Lists of which silver keeps counts only: read with the summed fields alone, since each field of each item costs."""


def _arrow_type(sql: str) -> pa.DataType:
    if sql.startswith("ARRAY<"):
        return pa.list_(_arrow_type(sql[6:-1]))
    if sql.startswith("STRUCT<"):
        named = (field.partition(": ") for field in sql[7:-1].split(", "))
        return pa.struct([(name, _arrow_type(of)) for name, _, of in named])
    return {"BIGINT": pa.int64(), "DOUBLE": pa.float64(), "STRING": pa.string()}[sql]


_READ_OPTIONS: Final = {"pathGlobFilter": GLOB, "recursiveFileLookup": "true"}
_FILES_DDL: Final = "path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY"
_HERE: Final = ("path",)
_THERE: Final = ("path", "content")
"""Workers read local files themselves, piece by piece; what Spark alone reaches comes to them through Spark, whole."""


def raw_files(spark: SparkSession, places: Sequence[str]) -> DataFrame:
    """Return the trace files in these directories, for `write_silver`."""
    here = [place for place in places if is_local(place)]
    there = [place for place in places if not is_local(place)]
    files = [
        spark.read.format("binaryFile").options(**_READ_OPTIONS).load([*map(pattern_of, given)]).select(*wanted)
        for given, wanted in ((here, _HERE), (there, _THERE))
        if given
    ]
    return files[0] if len(files) == 1 else files[0].withColumn("content", F.lit(None)).unionByName(files[1])


def follow_files(spark: SparkSession, place: str, *, files_per_batch: int = 200) -> DataFrame:
    """Return the trace files of a directory as a stream that follows it."""
    reader = spark.readStream.format("binaryFile").schema(_FILES_DDL).options(**_READ_OPTIONS)
    files = reader.option("maxFilesPerTrigger", files_per_batch).load(pattern_of(place))
    return files.select(*(_HERE if is_local(place) else _THERE))


def is_local(place: str) -> bool:
    """Whether a place is a path that all workers have rather than a URL for Spark (``s3a://…``)."""
    return "://" not in place


def place_url(place: str) -> str:
    """Return a place as Spark takes it, whatever its default file system."""
    return f"file:{os.path.abspath(place)}" if is_local(place) else place


def pattern_of(place: str) -> str:
    """Return a place as Spark takes it to read. URLs may be patterns; in a path, brackets and stars are themselves."""
    return re.sub(r"[][{}*?\\]", r"\\\g<0>", place_url(place)) if is_local(place) else place


def write_silver(files: DataFrame, place: str) -> None:
    """Decode trace files and write (or write anew) silver below ``place``, a directory for each part. One pass.

    Raises what Spark raises, ``FileExistsError`` when there is something else, and ``OSError`` when workers do not
    share a local place.
    """
    foreign = foreign_in(os.path.abspath(place)) if is_local(place) else _foreign_behind(files.sparkSession, place)
    if foreign:
        raise FileExistsError(foreign)
    if not is_local(place):
        silver = files.mapInArrow(decoder(layout()), silver_ddl())
        silver.write.mode("overwrite").partitionBy("part").option("compression", "zstd").parquet(place)
        return
    place = os.path.abspath(place)
    scratch = scratch_of(place)
    written = {row["file"] for row in files.mapInArrow(writer(layout(), scratch), WRITTEN_DDL).collect()}
    finish = files.sparkSession.range(1).repartition(1).mapInArrow(finisher(scratch, place, written), "file STRING")
    missing = written - {row["file"] for row in finish.collect()}
    if missing:
        raise OSError(
            f"workers wrote {len(missing)} files below {place} that others do not see: give one that all reach"
        )


def _foreign_behind(spark: SparkSession, place: str) -> str:
    """`foreign_in` of a URL: Spark lists its files, and would remove them all."""
    there = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
    try:
        paths = there.load(place).select("path").where(~F.col("path").rlike(_PART.pattern))
        return foreign_of(place, [row["path"] for row in paths.limit(4).collect()])
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return ""
        raise


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
        whole = reader.parquet(pattern_of(place))
    else:
        base = place_url(place[0].rpartition("/")[0])
        whole = reader.option("basePath", base).parquet(*map(pattern_of, place))
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


_PART: Final = re.compile(r"/part=(\w+)/[^/]*$")


def silver_ddl() -> str:
    """Return the schema of silver."""
    typed = {
        **columns(),
        "k": "TINYINT",
        **dict.fromkeys(("node_id", "peer_id", "topic_id", "msg_id", "run", "source_id", "ihave"), "BIGINT"),
        **dict.fromkeys(("iwant", "idontwant"), "ARRAY<BIGINT>"),
        **dict.fromkeys(("messages", "grafts", "prunes"), "INT"),
        **dict.fromkeys(("source", CORRUPT, "part"), "STRING"),
    }
    nested = {
        f"of_{part}": "STRUCT<" + ", ".join(f"`{name}`: {typed[name]}" for name in names) + ">"
        for part, names in NESTED.items()
    }
    order = ("part", *COMMON, *nested, CORRUPT)
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
