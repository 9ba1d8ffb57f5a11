"""Follow trace directories while they grow: raw files become silver exactly once, the report is made anew on top.

Each micro-batch is written to ``silver/batch=<id>/``, with overwrite: a batch that a crash interrupted is written again
under the same id, with the same files. Readers take the batches that the checkpoint lists as committed, nothing else.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dep2p.spark_analytics.ingest.silver import follow_files, is_local, place_url, write_silver
from dep2p.spark_analytics.job import InputError, JobResult, ReportOptions, check_out, check_places, report

CHECKPOINT: Final = "checkpoint"
SILVER: Final = "silver"
_POLL_S: Final = 1


def batch_place(out: Path, number: int) -> str:
    """Return the place of a batch of silver."""
    return str(out / SILVER / f"batch={number}")


def committed(out: Path) -> list[int]:
    """Return the batches that are done, by the checkpoint."""
    commits = out / CHECKPOINT / "commits"
    return sorted(int(path.name) for path in commits.iterdir() if path.name.isdigit()) if commits.is_dir() else []


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """``once``: read the files that are there, then end. Times in seconds."""

    once: bool = False
    files_per_batch: int = 200
    trigger_s: float = 2.0
    report_every_s: float = 30.0


def start(spark: SparkSession, places: Sequence[str], out: Path, options: FollowOptions) -> StreamingQuery:
    """Start the query that turns raw files into silver, and return it."""
    out.mkdir(parents=True, exist_ok=True)
    streams = [follow_files(spark, place, files_per_batch=options.files_per_batch) for place in places]
    files = reduce(partial(DataFrame.unionByName, allowMissingColumns=True), streams)
    silver_dir = str(out / SILVER)

    def write(batch: DataFrame, number: int) -> None:
        write_silver(batch, f"{silver_dir}/batch={number}")

    writer = files.writeStream.foreachBatch(write).option("checkpointLocation", place_url(str(out / CHECKPOINT)))
    trigger = (
        {"availableNow": True}
        if options.once
        else {"processingTime": f"{round(options.trigger_s * 1000)} milliseconds"}
    )
    return writer.trigger(**trigger).queryName("dep2p-traces").start()


def follow(
    spark: SparkSession,
    places: Sequence[str],
    out: Path,
    options: ReportOptions,
    following: FollowOptions = FollowOptions(),
    *,
    on_report: Callable[[JobResult], None] = lambda result: None,
) -> JobResult | None:
    """Run until interrupted (or, with ``once``, until all is read), and make the report anew when there is more.

    Started again with the same ``out``, it continues at its place, also after a crash. Raises `InputError` when a place
    does not exist, or when silver that was read is gone, and what Spark raises.
    """
    check_out(out)
    try:
        check_places(places)
    except InputError as error:
        if any(is_local(place) and not Path(place).is_dir() for place in places):
            raise
        options.say(f"{error}" + ("" if following.once else ": waiting for some"))
    query = start(spark, places, out, following)
    reported = -1
    result: JobResult | None = None
    next_s = 0.0
    try:
        while True:
            ended = query.awaitTermination(_POLL_S)
            done = committed(out)
            if done and done[-1] != reported and (ended or time.monotonic() >= next_s):
                reported = done[-1]
                options.say(f"{len(done)} batches read")
                result = report_committed(spark, out, options)
                on_report(result)
                next_s = time.monotonic() + following.report_every_s
            if ended:
                return result
    except KeyboardInterrupt:
        return result
    finally:
        query.stop()


def report_committed(spark: SparkSession, out: Path, options: ReportOptions) -> JobResult:
    """Make a report of the batches that are done."""
    places = [batch_place(out, number) for number in committed(out)]
    gone = [place for place in places if not os.path.isdir(place)]
    if gone:
        raise InputError(
            f"{gone[0]} is gone, though it was made by {out / CHECKPOINT}: remove {out / CHECKPOINT} and "
            f"{out / SILVER} to read all files again"
        )
    return report(spark, places, out, options)
