"""``spark-submit … dep2p/spark_analytics/__main__.py DIR… --out DIR``: the documented entry point on a cluster.

``python -m dep2p.spark_analytics`` is the same; ``dep2p trace analyze`` says more.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from dep2p.spark_analytics.follow import FollowOptions, follow
from dep2p.spark_analytics.job import InputError, ReportOptions, is_small, run
from dep2p.spark_analytics.metrics.analysis import AnalysisOptions
from dep2p.spark_analytics.runtime.errors import UnreachableError, explained, is_of_spark
from dep2p.spark_analytics.runtime.java import JavaError
from dep2p.spark_analytics.runtime.session import SparkOptions, open_session


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dep2p.spark_analytics", description="A report of dep2p traces.")
    parser.add_argument("places", nargs="*", help="trace directories, or URLs that Spark reads (s3a://…)")
    parser.add_argument("--out", type=Path, help="where the report goes")
    parser.add_argument("--silver", help="where the compacted tables go; on a cluster a place that all workers reach")
    parser.add_argument("--master", default=os.environ.get("MASTER", "local[*]"))
    parser.add_argument("--remote", help="a Spark Connect URL")
    parser.add_argument("--memory", default="4g")
    parser.add_argument("--follow", action="store_true", help="go on while the directories grow")
    parser.add_argument("--once", action="store_true", help="with --follow: read what is there, then end")
    parser.add_argument("--files-per-batch", type=int, default=200)
    parser.add_argument("--settle", type=float, default=3.0)
    parser.add_argument("--title", default="Traces")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _wrong(given: argparse.Namespace) -> str:
    if not given.places or given.out is None:
        return "give trace directories and --out"
    if given.follow and given.remote:
        return "--follow runs where Spark's driver is, not over Spark Connect: use --master or spark-submit"
    return "--follow keeps silver in its --out: leave out --silver" if given.follow and given.silver else ""


def main(arguments: list[str]) -> int:
    """Run the job that the arguments name; return 1 when the input is at fault."""
    given = _arguments(arguments)
    if given.train:
        return _train()
    wrong = _wrong(given)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    try:
        quick = not given.follow and is_small(given.places)
        spark = open_session(SparkOptions(master=given.master, remote=given.remote, memory=given.memory, quick=quick))
        options = ReportOptions(AnalysisOptions(settle_s=given.settle), given.title, _say)
        if given.follow:
            following = FollowOptions(once=given.once, files_per_batch=given.files_per_batch)
            follow(spark, given.places, given.out, options, following)
        else:
            run(spark, given.places, given.out, options, silver=given.silver)
    except (InputError, JavaError, OSError, UnreachableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if given.remote and isinstance(error, ValueError) and "sc://" in str(error):
            print(f"error: {error}", file=sys.stderr)
            return 1
        if not is_of_spark(error):
            raise
        found = explained(error)
        advice = f"\n  try:   {found.advice}" if found.advice else ""
        print(f"error: {found.what}\n  cause: {found.cause}{advice}", file=sys.stderr)
        return 1
    _say(f"report: {given.out / 'report.html'}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _train() -> int:
    """Make a small report, so that the JVM lists the classes that reports load."""
    from dep2p.spark_analytics.ingest.sample import write_sample

    with tempfile.TemporaryDirectory(prefix="dep2p-train-") as scratch:
        write_sample(Path(scratch) / "traces")
        spark = open_session(SparkOptions(master="local[2]", memory="1g"))
        run(spark, [str(Path(scratch) / "traces")], Path(scratch) / "report")
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
