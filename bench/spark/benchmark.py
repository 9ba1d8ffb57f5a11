"""spark/warm, spark/cold, spark/session, spark/flat: reports over a synthetic trace, against DuckDB on the same files.

Ours is the whole analysis as `dep2p trace analyze` runs it on local[2], which finds more than the SQL of the peer
(islands, the tree of a message, names, findings). Warm: from silver (Parquet), in a session that has run it twice; both
sides end with their tables in memory; Polars, where it is installed, makes the same tables, too. Cold: a process from
the raw files to the report, start and end of the JVM and compaction included, against a process of DuckDB that reads
the same raw files. Session: from nothing to a Spark session, against Spark's own builder, where it can start this Java;
with the class-data archive as well. Flat: CPU time of a warm report for an event, at several sizes; marginal: of an
event more, from one size to the next. CPU times are of all processes of a side.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.harness.compare import FULL, QUICK, Run
from bench.harness.environment import FamilyMeter, family, family_cpu_s, machine_cpu_s
from bench.harness.processes import WorkerError
from bench.harness.report import Result, Sample

PEER: Final = "DuckDB, the same metrics in SQL"
_ROOT: Final = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER: Final = 36
_END_TIMEOUT_S: Final = 60.0
_LOOK_S: Final = 0.05

_OURS: Final = """
import time; begun = time.perf_counter()
import sys; from pathlib import Path
from dep2p.spark_analytics.runtime.session import SparkOptions, open_session
open_session(SparkOptions(master="local[2]", memory="2g", cache_dir=Path(sys.argv[1])))
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
    """The results; DEP2P_BENCH_EVENTS says another number of events, DEP2P_BENCH_FLAT_EVENTS other sizes
    (``1000000,50000000``) for ``spark/flat``. Raises WorkerError.
    """
    missing = [name for name in ("pyspark", "duckdb") if find_spec(name) is None]
    if missing:
        raise WorkerError(f"needs {', '.join(missing)}: make spark")
    events = int(os.environ.get("DEP2P_BENCH_EVENTS", 0))
    events = events or {FULL: 10_000_000, QUICK: 50_000}.get(run.effort, 20_000)
    sizes = os.environ.get("DEP2P_BENCH_FLAT_EVENTS", "1000000" if run.effort is FULL else "")
    with tempfile.TemporaryDirectory(prefix="dep2p-bench-") as scratch:
        return _measure(run, Path(scratch), events, [int(size) for size in sizes.split(",") if size])


def _measure(run: Run, scratch: Path, events: int, sizes: Sequence[int]) -> list[Result]:
    from dep2p.spark_analytics.runtime.session import SparkOptions, close_session, open_session

    os.environ["POLARS_MAX_THREADS"] = "2"
    full = run.effort is FULL
    memory = "6g" if events > 2_000_000 else "2g"
    # Spark compiles well what is to run often, as `dep2p trace analyze --follow` does; the short run compiles quickly.
    session = open_session(SparkOptions(master="local[2]", memory=memory, quick=not full))
    trace = _Trace.made(session, scratch / "trace", events)
    for _ in range(2 if full else 1):
        trace.ours()
    trace.theirs()
    warm = _rounds(run, trace.ours, trace.theirs, 3 if full else 1)
    agree(trace.ours(), trace.theirs())
    results = [_result("spark/warm", PEER, *warm, events=trace.events)]
    if find_spec("polars") is None:
        _say("spark/warm/polars is left out: polars is not installed (make spark)")
    else:
        agree(trace.ours(), registered(trace.by_polars()), "Polars")
        others = [_timed(run, "polars", trace.by_polars) for _ in warm[0]]
        results.append(_result("spark/warm/polars", "Polars, the same tables", warm[0], others, events=trace.events))
    if sizes:
        flat = [_flat(trace, warm[0][-1], warm[1][-1])]
        for size in sizes:
            other = _Trace.made(session, scratch / "other", size)
            other.ours()
            other.theirs()
            (ours,), (theirs,) = _rounds(run, other.ours, other.theirs, 1)
            agree(other.ours(), other.theirs())
            flat.append(_flat(other, ours, theirs))
            shutil.rmtree(scratch / "other")
        results += with_marginal(flat)
    close_session(session)

    reported = [*("-m", "dep2p.spark_analytics", str(trace.raw), "--out", str(scratch / "report"))]
    reported += ["--master", "local[2]", "--memory", memory]
    read = ["-m", "bench.spark.peers", "duckdb-raw", str(trace.raw), str(trace.bucket_us), str(trace.fine_us)]
    cold: tuple[list[Sample], list[Sample]] = ([], [])
    for _ in range(2 if full else 1):
        for side, samples, arguments in (("dep2p", cold[0], reported), ("peer", cold[1], read)):
            machine_s = machine_cpu_s()
            samples.append(_run(arguments)[1])
            seconds, cpu_s = samples[-1].value / 1000, (samples[-1].cpu_us or 0.0) / 1e6
            run.load.add(seconds, machine_cpu_s() - machine_s, cpu_s)
            _say(f"{side}, cold: {seconds:.2f} s, {cpu_s:.2f} s of CPU time")
    results.append(_result("spark/cold", PEER + ", from raw", *cold, events=trace.events))
    return results + _sessions(scratch, 5 if full else 1, archive=full)


def _sessions(scratch: Path, rounds: int, *, archive: bool) -> list[Result]:
    from dep2p.spark_analytics.runtime.java import find_java, make_archive

    kinds = {"spark/session": scratch / "no-archive"}
    if archive:
        kinds["spark/session/archive"] = scratch / "archive"
        training = [sys.executable, "-m", "dep2p.spark_analytics", "--train"]
        make_archive(find_java(), scratch / "archive", training=training)
        _say("class-data archive made")
    ours: dict[str, list[Sample]] = {name: [] for name in kinds}
    stock: list[Sample] = []
    for _ in range(rounds):
        for name, place in kinds.items():
            ours[name].append(_session(["-c", _OURS, str(place)]))
        stock.append(_session(["-c", _STOCK], may_fail=True))
    return [_result(name, "Spark's own builder", samples, stock) for name, samples in ours.items()]


def _session(arguments: list[str], *, may_fail: bool = False) -> Sample:
    said, sample = _run(arguments, may_fail=may_fail)
    return Sample(float(said) * 1000 if said else 0.0, cpu_us=sample.cpu_us)


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace of about so many events, raw and as silver, and the report of it by either side."""

    session: Any
    raw: Path
    silver: str
    events: int
    bucket_us: int
    fine_us: int

    @staticmethod
    def made(session: Any, place: Path, events: int) -> "_Trace":
        """Write and compact a trace; the first report of ours is made, too."""
        from bench.spark.synthetic_trace import write_trace
        from dep2p.spark_analytics.ingest.silver import raw_files, write_silver
        from dep2p.spark_analytics.metrics.analysis import analyse

        begun = time.perf_counter()
        written = write_trace(place / "raw", events)
        _say(f"{written:,} events written in {time.perf_counter() - begun:.0f} s")
        begun, used = time.perf_counter(), family_cpu_s()
        write_silver(raw_files(session, [str(place / "raw")]), str(place / "silver"))
        _say(f"silver in {time.perf_counter() - begun:.1f} s, {family_cpu_s() - used:.1f} s of CPU time")
        found = analyse(session, str(place / "silver"))
        fine = min(5_000_000, max(1_000_000, (found.last_t - found.first_t) // 720))
        return _Trace(session, place / "raw", str(place / "silver"), written, found.bucket_us, fine)

    def ours(self) -> Any:
        """The report by Spark, its tables in memory."""
        from dep2p.spark_analytics.metrics.analysis import analyse

        return analyse(self.session, self.silver)

    def theirs(self) -> Any:
        """The same metrics by DuckDB."""
        from bench.spark.peers import duckdb_metrics

        return duckdb_metrics(self.silver, raw=False, bucket_us=self.bucket_us, fine_us=self.fine_us)

    def by_polars(self) -> Any:
        """The same tables by Polars."""
        from bench.spark.polars_peer import polars_metrics

        return polars_metrics(self.silver, bucket_us=self.bucket_us, fine_us=self.fine_us)


def registered(tables: Any) -> Any:
    """Data frames as the tables that `agree` asks."""
    import duckdb

    connection = duckdb.connect()
    for name, table in tables.items():
        connection.register(name, table.to_arrow())
    return connection


def _rounds(
    run: Run, ours: Callable[[], Any], theirs: Callable[[], Any], count: int
) -> tuple[list[Sample], list[Sample]]:
    mine: list[Sample] = []
    others: list[Sample] = []
    for _ in range(count):
        mine.append(_timed(run, "dep2p", ours))
        others.append(_timed(run, "peer", theirs))
    return mine, others


def _result(name: str, peer: str, ours: Sequence[Sample], theirs: Sequence[Sample], **counts: int) -> Result:
    cpu_ms, peer_cpu_ms = (round(median(sample.cpu_us or 0.0 for sample in side) / 1000) for side in (ours, theirs))
    return Result(name, "ms", peer, ours, theirs, {**counts, "cpu_ms": cpu_ms, "peer_cpu_ms": peer_cpu_ms})


def _flat(trace: _Trace, ours: Sample, theirs: Sample) -> Result:
    mine, other = ([Sample((side.cpu_us or 0.0) / trace.events)] for side in (ours, theirs))
    wall_ms = {"wall_ms": round(ours.value), "peer_wall_ms": round(theirs.value)}
    name = f"spark/flat/{round(trace.events / 1e6)}"
    return Result(name, "us", PEER, mine, other, {"events": trace.events, **wall_ms})


def with_marginal(flat: Sequence[Result]) -> list[Result]:
    """Costs of an event at several sizes, the smallest first, each followed by what an event more costs on the way to
    the next size: the same everywhere when only a constant makes small reports dearer.
    """
    flat = sorted(flat, key=lambda result: result.counts["events"])
    found = [*flat[:1]]
    for small, large in pairwise(flat):
        sizes = [result.counts["events"] for result in (small, large)]
        mine, other = (
            [Sample((sides[1][0].value * sizes[1] - sides[0][0].value * sizes[0]) / (sizes[1] - sizes[0]))]
            for sides in ((small.ours, large.ours), (small.theirs, large.theirs))
        )
        name = "-".join(str(round(size / 1e6)) for size in sizes)
        found += [Result(f"spark/marginal/{name}", "us", PEER, mine, other, {"events": sizes[1] - sizes[0]}), large]
    return found


def agree(found: Any, connection: Any, peer: str = "DuckDB") -> None:
    """Raise WorkerError when Spark and a peer found different numbers in the same silver."""
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
            raise WorkerError(f"Spark and {peer} disagree about {table}")
    counted = (
        ("hops", found.tables["hops"].groupby("hops")["deliveries"].sum().to_dict(), "hops, sum(n)"),
        ("latency", found.tables["latency"].groupby("latency_us")["deliveries"].sum().to_dict(), "lower, sum(n)"),
    )
    for table, mine, query in counted:
        other = dict(connection.execute(f"SELECT {query} FROM {table} GROUP BY 1").fetchall())
        if {int(k): int(v) for k, v in other.items()} != {int(k): int(v) for k, v in mine.items() if k >= 0}:
            raise WorkerError(f"Spark and {peer} disagree about {table}")
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
            raise WorkerError(f"Spark and {peer} disagree about {table}: {totals}, {expected}")


def _timed(run: Run, side: str, call: Callable[[], Any]) -> Sample:
    machine_s, begun, used = machine_cpu_s(), time.perf_counter(), family_cpu_s()
    call()
    seconds, cpu_s = time.perf_counter() - begun, family_cpu_s() - used
    run.load.add(seconds, machine_cpu_s() - machine_s, cpu_s)
    _say(f"{side}: {seconds:.2f} s, {cpu_s:.2f} s of CPU time")
    return Sample(seconds * 1000, cpu_us=cpu_s * 1e6)


def _run(arguments: list[str], *, may_fail: bool = False) -> tuple[str, Sample]:
    """Run Python until all that it started has ended: the last line that it wrote, and what all of it took."""
    _adopt_orphans()
    before, begun, meter = family().keys(), time.perf_counter(), FamilyMeter()
    child = subprocess.Popen(
        [sys.executable, *arguments], cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while True:
        try:
            stdout, stderr = child.communicate(timeout=_LOOK_S)
            break
        except subprocess.TimeoutExpired:
            meter.look()
    end = time.monotonic() + _END_TIMEOUT_S
    while more := family().keys() - before:  # the JVM outlives the process that started it; what it used counts
        for pid in more:
            with contextlib.suppress(ChildProcessError):  # below another one that must end first
                meter.look()
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > end:
            raise WorkerError(f"processes of {arguments[:2]} did not end: {sorted(more)}")
        time.sleep(0.01)
    if child.returncode != 0 and not may_fail:
        raise WorkerError(f"{arguments[:2]} failed: {stderr[-1500:]}")
    said = stdout.strip().splitlines()[-1] if stdout.strip() and child.returncode == 0 else ""
    return said, Sample((time.perf_counter() - begun) * 1000, cpu_us=meter.used_s * 1e6)


def _adopt_orphans() -> None:
    """On Linux: processes whose parent ended become ours, so that their CPU time can be asked for."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _say(text: str) -> None:
    print(f"spark: {text}", file=sys.stderr, flush=True)
