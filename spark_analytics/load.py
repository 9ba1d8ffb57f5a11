"""Raw trace files → silver: typed Parquet with int64 keys, in five parts; and silver → DataFrames for the metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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


def code(kind: str) -> Column:
    """The number of a kind, as a literal."""
    return F.lit(KIND_CODES[kind]).cast("tinyint")


def key(column: str | Column) -> Column:
    """The int64 key of a text: a hash, so that it is the same in every batch, file and run."""
    return F.xxhash64(F.col(column) if isinstance(column, str) else column)


def raw_ddl() -> str:
    """The schema of the raw files, with a column for lines that are no JSON."""
    return ", ".join(f"`{name}` {sql}" for name, sql in {**columns(), CORRUPT: "STRING"}.items())


_READ_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    "ignoreCorruptFiles": "true",  # a damaged file keeps what was read before the damage; the rest is missed by `seq`
    "pathGlobFilter": GLOB,
    "recursiveFileLookup": "true",
}


def read_raw(spark: SparkSession, places: Sequence[str]) -> DataFrame:
    """All events of the trace files in these directories, with ``source``, the path of the file."""
    frame = spark.read.schema(raw_ddl()).options(**_READ_OPTIONS).json(list(places))
    return frame.withColumn("source", F.col("_metadata.file_path"))


def stream_raw(spark: SparkSession, place: str, *, files_per_batch: int = 200) -> DataFrame:
    """The same as a stream that follows a directory."""
    reader = spark.readStream.schema(raw_ddl()).options(**_READ_OPTIONS)
    frame = reader.option("maxFilesPerTrigger", files_per_batch).json(place)
    return frame.withColumn("source", F.col("_metadata.file_path"))


def to_silver(raw: DataFrame) -> DataFrame:
    """Raw events with keys, a part and the run; what no metric reads is left out. One pass, no shuffle."""
    kind = F.col("kind")
    part = F.when(F.col("node").isNull() | F.col("t").isNull(), F.lit("bad"))
    for name, kinds in PARTS.items():
        part = part.when(kind.isin(*kinds), F.lit(name))
    is_message = kind.isin(*PARTS["messages"])
    file_name = F.element_at(F.split("source", "/"), -1)
    ids = {name: key(name) for name in ("node", "peer", "topic", "msg")}
    return raw.select(
        part.otherwise(F.lit("bad")).alias("part"),
        _code(kind).alias("k"),
        F.coalesce(F.col("v"), F.lit(0)).alias("v"),
        *(F.when(F.col(name).isNotNull(), value).alias(f"{name}_id") for name, value in ids.items()),
        "seq",
        "t",
        F.coalesce(F.regexp_extract(file_name, r"-(\d+)-\d+\.ndjson\.zst$", 1).try_cast("bigint"), F.lit(0)).alias(
            "run"
        ),
        key("source").alias("source_id"),
        "source",
        "node",
        "peer",
        "topic",
        F.when(~is_message | (kind == "publish"), F.col("msg")).alias("msg"),
        *("kind", "size", "reason", "validation_us", "message_bytes", "control_bytes"),
        F.size(F.coalesce("messages", F.array())).alias("messages"),
        F.aggregate("ihave", F.lit(0).cast("bigint"), lambda total, item: total + item["count"]).alias("ihave"),
        F.transform("iwant", lambda msg: F.xxhash64(msg)).alias("iwant"),
        F.transform("idontwant", lambda msg: F.xxhash64(msg)).alias("idontwant"),
        F.size(F.coalesce("grafts", F.array())).alias("grafts"),
        F.size(F.coalesce("prunes", F.array())).alias("prunes"),
        *("name", "side", "outcome", "duration_us", "reply_size", "attempt", "state", "position"),
        *("session", "epoch", "count", "namespace", "queue", "channel", "consumer", "partition", "key"),
        *("peers", "scores", "depths", "rtts", "version", "offset_us", "error_us", CORRUPT),
    )


def _code(kind: Column) -> Column:
    names = F.create_map(*[part for name, value in KIND_CODES.items() for part in (F.lit(name), F.lit(value))])
    return F.coalesce(names[kind], F.lit(-1)).cast("tinyint")


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

    def parts(self) -> dict[str, DataFrame]:
        """All parts that hold events, by name."""
        return {name: getattr(self, name) for name in PARTS}


def read_silver(spark: SparkSession, place: str | Sequence[str], *, excluded_sources: Sequence[int] = ()) -> Silver:
    """Open silver (of several batches), without the events of some files (those that are there twice)."""
    reader = spark.read.schema(silver_ddl())
    if isinstance(place, str):
        whole = reader.parquet(place)
    else:
        whole = reader.option("basePath", place[0].rpartition("/")[0]).parquet(*place)
    if excluded_sources:
        whole = whole.where(~F.col("source_id").isin(*excluded_sources))
    events = whole.where(F.col("part") != "bad")
    return Silver(events, **{name: whole.where(F.col("part") == name) for name in (*PARTS, "bad")})


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
    order = (
        *("k", "v", "node_id", "peer_id", "topic_id", "msg_id", "seq", "t", "run", "source_id", "source"),
        *("node", "peer", "topic", "msg", "kind", "size", "reason", "validation_us", "message_bytes"),
        *("control_bytes", "messages", "ihave", "iwant", "idontwant", "grafts", "prunes", "name", "side", "outcome"),
        *("duration_us", "reply_size", "attempt", "state", "position", "session", "epoch", "count", "namespace"),
        *("queue", "channel", "consumer", "partition", "key", "peers", "scores", "depths", "rtts", "version"),
        *("offset_us", "error_us", CORRUPT, "part"),
    )
    return ", ".join(f"`{name}` {fixed.get(name) or types[name]}" for name in order)


def names_of(frames: Sequence[DataFrame]) -> DataFrame:
    """``id`` → ``name`` of the nodes, peers and topics in some parts. A key for two texts shows as two rows."""
    names = ("node", "peer", "topic")
    pair = F.explode(F.array(*(F.struct(F.col(f"{n}_id").alias("id"), F.col(n).alias("name")) for n in names)))
    union: DataFrame | None = None
    for frame in frames:
        ids = frame.select("node_id", "node", "peer_id", "peer", "topic_id", "topic").distinct()
        pairs = ids.select(pair.alias("pair")).select("pair.id", "pair.name")
        union = pairs if union is None else union.unionByName(pairs)
    assert union is not None
    return union.where(F.col("name").isNotNull()).distinct()


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
