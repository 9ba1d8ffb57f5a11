"""The one place where a Spark session is made: on a JVM that we start, on a cluster, or over Spark Connect."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dep2p.spark_analytics.runtime.errors import reach
from dep2p.spark_analytics.runtime.java import JvmOptions, archive_path, find_java, is_running, start_jvm, stop_jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How to get a session.

    - ``master``: Spark's, ``local[2]`` or ``spark://host:7077``, …; ``remote``: a Spark Connect URL instead, without
      a JVM here.
    - ``memory``: heap of the JVM here. ``shuffle_partitions``: None for twice the local cores.
    - ``quick``: compile quickly rather than well, for what runs once.
    - ``cache_dir``: where the class-data archive is, if any.
    - ``conf``: more of Spark's settings (jars, memory of executors, access to object stores), before ours.
    """

    master: str = "local[*]"
    remote: str | None = None
    memory: str = "4g"
    shuffle_partitions: int | None = None
    quick: bool = True
    cache_dir: Path | None = None
    verbose: bool = False
    conf: Mapping[str, str] = field(default_factory=dict[str, str])


_CONF: Final = {
    "spark.app.name": "dep2p traces",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
    # The default of 100 in four parts holds not even one report's generated classes: each report compiled all anew.
    "spark.sql.codegen.cache.maxEntries": "2000",
    "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
}
_SESSION_CONF: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.files.openCostInBytes": "262144",  # many small files: pack them into few tasks
    "spark.sql.maxConcurrentOutputFileWriters": "16",  # the parts of silver are written without sorting by part
    "spark.sql.ansi.enabled": "false",
    # Groups of one task that an aggregate keeps in its fast table (8 MB each); the default is 65,536.
    "spark.sql.codegen.aggregate.fastHashMap.capacityBit": "20",
    # A session a report: what is new is seen by listing, not by the default of a minute's cache.
    "spark.sql.parquet.filterPushdown": "true",
}


def default_cache_dir() -> Path:
    """Where archives of the user are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dep2p"


def open_session(options: SparkOptions = SparkOptions()) -> "SparkSession":
    """Open a Spark session. Raises `JavaError`, `UnreachableError` and ``ValueError`` for a Spark Connect URL, and what
    Spark raises."""
    if options.remote is not None:
        reach(options.remote)
        _imports()
        from pyspark.sql import SparkSession

        return _configured(SparkSession.builder.remote(options.remote).getOrCreate(), options)
    conf = {"spark.master": options.master, **_CONF, **_SESSION_CONF}
    local = options.master.startswith("local") or "127.0.0.1" in options.master or "localhost" in options.master
    if local:
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    conf["spark.sql.shuffle.partitions"] = str(options.shuffle_partitions or _partitions(options.master))
    conf |= options.conf
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit and an earlier session have a JVM already
        given = _given()
        conf = {key: value for key, value in conf.items() if key not in given or key == "spark.app.name"}
    else:
        java = find_java()
        archive = archive_path(java, options.cache_dir or default_cache_dir())
        conf["spark.sql.warehouse.dir"] = str(Path(os.environ.get("TMPDIR", "/tmp")) / "dep2p-no-warehouse")
        jvm = JvmOptions(options.memory, options.quick, archive, quiet=not options.verbose)
        start_jvm(java, jvm, conf, meanwhile=_imports)
    _imports()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _given() -> frozenset[str]:
    """Settings that spark-submit got: they override ours."""
    if is_running():
        return frozenset()
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return frozenset(key for key, _ in SparkConf().getAll())


def _imports() -> None:
    """Import the parts of a session, half a second of work, while the JVM starts. And register the modules that workers
    get by value with each job, so that a cluster needs no dep2p on its nodes.
    """
    import pyspark.sql  # noqa: F401
    from pyspark import cloudpickle

    from dep2p.spark_analytics.ingest import compact, decode, keys
    from dep2p.spark_analytics.metrics import delivery_trees, mesh_samples, session_pushes

    for module in (compact, decode, keys, mesh_samples, session_pushes, delivery_trees):
        cloudpickle.register_pickle_by_value(module)


def close_session(session: "SparkSession") -> None:
    """Stop a session, and the JVM that was started for it. Afterwards another one can be opened."""
    session.stop()
    with contextlib.suppress(ImportError):
        from pyspark import SparkContext

        gateway = SparkContext._gateway
        if gateway is not None:
            SparkContext._gateway = SparkContext._jvm = None
            gateway.shutdown()
    stop_jvm()


def _partitions(master: str) -> int:
    inner = master.partition("[")[2].rstrip("]").partition(",")[0]
    if not master.startswith("local"):
        return 64
    cores = int(inner) if inner.isdigit() else (1 if not inner else os.cpu_count() or 2)
    return max(2, cores)


def _configured(session: "SparkSession", options: SparkOptions) -> "SparkSession":
    for key, value in {**_SESSION_CONF, **options.conf}.items():
        with contextlib.suppress(Exception):  # servers refuse what they do not know
            session.conf.set(key, value)
    if options.shuffle_partitions is not None:
        session.conf.set("spark.sql.shuffle.partitions", str(options.shuffle_partitions))
    return session
