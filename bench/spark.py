"""spark/warm, spark/cold, spark/session: reports over a synthetic trace, against DuckDB on the same files.

Ours is the whole analysis as `dep2p trace analyze` runs it on local[2], which finds more than the SQL of the peer
(islands, the tree of a message, names, findings). Warm: from silver, in a session that has run it before; cold: a
process from the raw files to the report, JVM start and compaction included, against a process of DuckDB that reads the
same raw files. Session: from nothing to a Spark session, against Spark's own builder, where it can start this Java.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.compare import FULL, QUICK, Run
from bench.processes import WorkerError
from bench.report import Result, Sample

PEER: Final = "DuckDB, the same metrics in SQL"
_ROOT: Final = Path(__file__).parent.parent

_OURS: Final = """
import time; begun = time.perf_counter()
from dep2p.spark_analytics.session import SessionOptions, open_session
open_session(SessionOptions(master="local[2]", memory="2g"{cache}))
print(time.perf_counter() - begun, flush=True)
import os; os._exit(0)
"""
_STOCK: Final = """
import time; begun = time.perf_counter()
from pyspark.sql import SparkSession
SparkSession.builder.master("local[2]").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
print(time.perf_counter() - begun, flush=True)
import os; os._exit(0)
"""


async def spark(run: Run) -> list[Result]:
    """The three results; DEP2P_BENCH_EVENTS says another number of events. Raises WorkerError."""
    missing = [name for name in ("pyspark", "duckdb") if find_spec(name) is None]
    if missing:
        raise WorkerError(f"needs {', '.join(missing)}: make spark")
    events = int(os.environ.get("DEP2P_BENCH_EVENTS", 0))
    events = events or {FULL: 10_000_000, QUICK: 50_000}.get(run.effort, 20_000)
    with tempfile.TemporaryDirectory(prefix="dep2p-bench-") as scratch:
        return _measure(run, Path(scratch), events)


def _measure(run: Run, scratch: Path, events: int) -> list[Result]:
    from bench.spark_peers import duckdb_metrics
    from bench.spark_trace import write_trace
    from dep2p.spark_analytics.analysis import analyse
    from dep2p.spark_analytics.load import read_raw, to_silver, write_silver
    from dep2p.spark_analytics.session import SessionOptions, close_session, open_session

    raw, silver = scratch / "raw", str(scratch / "silver")
    begun = time.perf_counter()
    written = write_trace(raw, events)
    _say(f"{written:,} events written in {time.perf_counter() - begun:.0f} s")

    session = open_session(SessionOptions(master="local[2]", memory="6g" if events > 2_000_000 else "2g", quick=False))
    begun = time.perf_counter()
    write_silver(to_silver(read_raw(session, [str(raw)])), silver)
    _say(f"silver in {time.perf_counter() - begun:.1f} s")
    found = analyse(session, silver)  # warms the JVM up
    fine = min(5_000_000, max(1_000_000, (found.last_t - found.first_t) // 720))

    def ours() -> Any:
        return analyse(session, silver)

    def theirs() -> Any:
        return duckdb_metrics(silver, raw=False, bucket_us=found.bucket_us, fine_us=fine)

    rounds = 3 if run.effort is FULL else 1
    if run.effort is FULL:
        ours()
    warm_ours, warm_theirs = [], []
    for _ in range(rounds):
        warm_ours.append(_timed(run, ours))
        warm_theirs.append(_timed(run, theirs))
    agree(found, theirs())
    close_session(session)
    results = [Result("spark/warm", "ms", PEER, warm_ours, warm_theirs)]

    cold_ours, cold_theirs = [], []
    out, memory = str(scratch / "report"), "6g" if events > 2_000_000 else "2g"
    for _ in range(2 if run.effort is FULL else 1):
        command = ["-m", "dep2p.spark_analytics", str(raw), "--out", out, "--master", "local[2]", "--memory", memory]
        cold_ours.append(_timed(run, partial(_python, command)))
        command = ["-m", "bench.spark_peers", "duckdb-raw", str(raw), str(found.bucket_us), str(fine)]
        cold_theirs.append(_timed(run, partial(_python, command)))
    results.append(Result("spark/cold", "ms", PEER + ", from raw", cold_ours, cold_theirs))

    session_ours, session_theirs = [], []
    for _ in range(5 if run.effort is FULL else 1):
        session_ours.append(Sample(float(_python(["-c", _OURS.format(cache="")])) * 1000))
        stock = _python(["-c", _STOCK], may_fail=True)
        session_theirs.append(Sample(float(stock) * 1000 if stock else 0.0))
    results.append(Result("spark/session", "ms", "Spark's own builder", session_ours, session_theirs))
    return results


def agree(found: Any, connection: Any) -> None:
    """Raise WorkerError when Spark and DuckDB found different numbers in the same silver."""
    if found.offsets:
        raise WorkerError(f"Spark corrected {len(found.offsets)} clocks of a trace whose clocks are all right")
    checks = {
        "spread": ("msg_id, eligible, reached, coalesce(t50,-1), coalesce(t90,-1), coalesce(t99,-1), coalesce(t100,-1)",
                   ["msg_id", "eligible", "reached", "t50", "t90", "t99", "t100"]),
        "ends": ("msg_id, delivered, last_us, latency_sum, parents",
                 ["msg_id", "delivered", "last_us", "latency_sum", "parents"]),
    }  # fmt: skip
    for table, (selected, names) in checks.items():
        theirs = sorted(connection.execute(f"SELECT {selected} FROM {table}").fetchall())
        spread = found.tables["spread"]
        spread = spread[spread["eligible" if table == "spread" else "delivered"] > 0]
        ours = sorted(spread[names].itertuples(index=False, name=None))
        if [tuple(map(int, row)) for row in theirs] != [tuple(map(int, row)) for row in ours]:
            raise WorkerError(f"Spark and DuckDB disagree about {table}")
    counted = (
        ("hops", found.tables["hops"].groupby("hops")["deliveries"].sum().to_dict(), "hops, sum(n)"),
        ("latency", found.tables["latency"].groupby("latency_us")["deliveries"].sum().to_dict(), "lower, sum(n)"),
    )
    for table, mine, query in counted:
        other = dict(connection.execute(f"SELECT {query} FROM {table} GROUP BY 1").fetchall())
        if {int(k): int(v) for k, v in other.items()} != {int(k): int(v) for k, v in mine.items() if k >= 0}:
            raise WorkerError(f"Spark and DuckDB disagree about {table}")
    sums: tuple[tuple[str, str, tuple[str | None, ...]], ...] = (
        ("copies", "sum(firsts), sum(duplicates)", ("firsts", "duplicates")),
        ("links", "sum(firsts), sum(delay_sum), count(*)", ("firsts", "delay_sum", None)),
        ("node_coverage", "sum(eligible), sum(reached), sum(late_sum)", ("eligible", "reached", "late_sum")),
        ("degree", "sum(nodes), sum(highest), count(*)", ("nodes", "highest", None)),
        ("symmetry", "sum(links), sum(one_way)", ("links", "one_way")),
    )
    for table, query, columns in sums:
        expected = [int(value) for value in connection.execute(f"SELECT {query} FROM {table}").fetchone()]
        rows = found.tables[table]
        totals = [len(rows) if name is None else int(rows[name].sum()) for name in columns]
        if totals != expected:
            raise WorkerError(f"Spark and DuckDB disagree about {table}: {totals}, {expected}")


def _timed(run: Run, call: Callable[[], Any]) -> Sample:
    run.load.begin(())
    begun = time.perf_counter()
    call()
    seconds = time.perf_counter() - begun
    run.load.end(())
    _say(f"{seconds:.2f} s")
    return Sample(seconds * 1000)


def _python(arguments: list[str], *, may_fail: bool = False) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if may_fail:
            return ""
        raise WorkerError(f"{arguments[:2]} failed: {done.stderr[-1500:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def _say(text: str) -> None:
    print(f"spark: {text}", file=sys.stderr, flush=True)
