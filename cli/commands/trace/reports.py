"""``dep2p trace``: reports from traces, in Spark; imports of foreign traces; the events of trace files; live traces."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from dep2p.cli.commands.trace.live import register_live
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import byte_count, duration, table
from dep2p.error_codes import EXIT_OK
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.spark_analytics.job import JobResult

_SHOWN: Final = 20


PlacesArgument = Annotated[
    list[str], typer.Argument(help="Trace directories, or URLs that Spark reads (s3a://…).", metavar="DIR…")
]


def analyze(
    run: Invocation,
    places: PlacesArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the report goes.")] = Path("report"),
    master: Annotated[
        str, typer.Option("--master", help="Spark's master: local[2], spark://host:7077, …")
    ] = "local[*]",
    remote: Annotated[
        str | None, typer.Option("--remote", metavar="URL", help="A Spark Connect server (sc://…) instead.")
    ] = None,
    memory: Annotated[str, typer.Option("--memory", help="Heap of the JVM started here.", metavar="SIZE")] = "4g",
    settle: Annotated[
        float, typer.Option("--settle", help="Seconds a node must stay subscribed to count for a message.", min=0)
    ] = 3.0,
    message: Annotated[
        str | None, typer.Option("--message", metavar="ID", help="The message (base64) whose tree is drawn.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The title of the report.")] = None,
    silver: Annotated[
        str | None,
        typer.Option("--silver", metavar="PLACE", help="Keep the compacted tables here (on a cluster: shared)."),
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark's (again for more): jars, executors."),
    ] = None,
    no_clocks: Annotated[bool, typer.Option("--no-clocks", help="Do not correct clocks.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on while the directories grow; Ctrl-C ends, a restart goes on.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="With --follow: take what is new, then end.")] = False,
    every: Annotated[float, typer.Option("--every", help="With --follow: seconds between reports.", min=1)] = 30.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Spark's own log.")] = False,
) -> int:
    """Make a report of traces: how messages spread, what was lost, who is slow."""
    if once and not follow:
        raise CliError("--once goes with --follow", "D1001", tries=("dep2p trace analyze DIR --follow --once",))
    if follow and remote is not None:
        raise CliError(
            "--follow runs where Spark's driver is, not over Spark Connect",
            "D1001",
            tries=("--master spark://…", "dep2p trace analyze DIR --remote URL, now and then"),
        )
    if follow and silver is not None:
        raise CliError(
            "--silver does not go with --follow, which keeps silver in its --out", "D1001", tries=("leave it out",)
        )
    settings = {key: value for key, _, value in (item.partition("=") for item in conf or ())}
    if not all(key.startswith("spark.") and value for key, value in settings.items()):
        raise CliError("--conf wants spark.KEY=VALUE", "D1001", tries=("--conf spark.executor.memory=4g",))
    if "spark.master" in settings:
        raise CliError("--conf spark.master would say what --master says", "D1001", tries=("--master URL",))
    job, analysis, java, session = _spark_modules()
    from dep2p.spark_analytics.runtime.errors import UnreachableError, explained, is_of_spark

    analysed = analysis.AnalysisOptions(settle_s=settle, message=message, correct_clocks=not no_clocks)
    options = job.ReportOptions(analysed, title or f"Traces in {', '.join(places)}", run.say)
    try:
        if not follow:
            job.check_places(places)
        run.say(f"starting Spark ({remote or master})")
        spark = session.open_session(
            session.SparkOptions(
                master=master,
                remote=remote,
                memory=memory,
                quick=not follow and job.is_small(places),
                verbose=verbose,
                conf=settings,
            )
        )
        if follow:
            from dep2p.spark_analytics import follow as stream

            following = stream.FollowOptions(once=once, report_every_s=every)
            result = stream.follow(spark, places, out, options, following, on_report=lambda made: _show(run, made))
            if result is None:
                raise CliError(f"no report: no complete trace file appeared in {', '.join(places)}", "D7001")
            return EXIT_OK
        result = job.run(spark, places, out, options, silver=silver)
    except job.InputError as error:
        raise CliError(str(error), "D7001") from None
    except java.JavaError as error:
        tries = ("check --conf, --memory and --master: Spark's message is above",) if settings else ()
        raise CliError(str(error), "D7002", tries=tries) from None
    except ImportError as error:
        tries = ("pip install 'pyspark[connect]'",) if remote is not None else ()
        raise CliError(f"a library is missing: {error}", "D7002", tries=tries) from None
    except UnreachableError as error:
        tries = ("check --remote, and that the server runs: $SPARK_HOME/sbin/start-connect-server.sh",)
        raise CliError(str(error), "D7004", tries=tries) from None
    except Exception as error:
        if remote is not None and isinstance(error, ValueError) and "sc://" in str(error):
            raise CliError(str(error), "D1001") from None
        if not is_of_spark(error):
            raise
        found = explained(error)
        tries = (found.advice,) if found.advice else ()
        raise CliError(found.what, "D7004", cause=found.cause, tries=tries) from None
    _show(run, result)
    return EXIT_OK


def _spark_modules() -> tuple[Any, Any, Any, Any]:
    try:
        from dep2p.spark_analytics import job
        from dep2p.spark_analytics.metrics import analysis
        from dep2p.spark_analytics.runtime import java, session
    except ImportError as error:
        raise CliError(
            f"the analysis needs {error.name or 'a library'}, which is not installed",
            "D7002",
            tries=("pip install 'dep2p[spark]'",),
        ) from None
    return job, analysis, java, session


def _show(run: Invocation, result: "JobResult") -> None:
    figures = result.figures
    if run.json:
        run.emit(
            {
                "report": str(result.report),
                "seconds": result.seconds,
                "findings": [item.as_object() for item in result.findings],
                "summary": figures,
            }
        )
        return
    rows: list[tuple[str, ...]] = []
    for topic in figures["topics"][:_SHOWN]:
        latency = topic["latency_ms"] or {}
        rows.append(
            (
                printable(topic["topic"]),
                f"{topic['messages']:,}",
                _text(topic["reliability"], "{:.3%}"),
                _text(latency.get("p50"), "{:,.1f} ms"),
                _text(latency.get("p99"), "{:,.1f} ms"),
                _text(topic["hops_mean"], "{:.2f}"),
                _text(topic["duplicates_per_delivery"], "{:.2f}"),
            )
        )
    headings = ("TOPIC", "MESSAGES", "DELIVERED", "P50", "P99", "HOPS", "DUPLICATES")
    run.print(table(headings, rows, right=range(1, 7)))
    if len(figures["topics"]) > _SHOWN:
        run.print(f"… and {len(figures['topics']) - _SHOWN:,} more topics")
    run.print("")
    colours = {"bad": "red", "look": "yellow", "note": "dim"}
    for item in result.findings[:_SHOWN]:
        run.print(f"{run.paint(f'{item.level:<5}', colours[item.level])} {printable(item.text)}")
    if len(result.findings) > _SHOWN:
        run.print(f"… and {len(result.findings) - _SHOWN:,} more findings in the report")
    if not result.findings:
        run.print("nothing that needs a look")
    run.print("")
    run.print(f"report: {result.report}")
    run.say(
        f"{figures['events']:,} events of {figures['nodes']:,} nodes over {duration(figures['seconds'])}"
        + (f", in {duration(result.seconds['all'])}" if "all" in result.seconds else "")
    )


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def compare(
    run: Invocation,
    before: Annotated[Path, typer.Argument(help="A report directory, or its summary.json.", metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(help="The other one.", metavar="AFTER")],
    threshold: Annotated[
        float, typer.Option("--threshold", help="Percent; smaller changes are not shown.", min=0, max=1000)
    ] = 5.0,
) -> int:
    """Compare the figures of two reports."""
    from dep2p.spark_analytics.compare import changes, load_summary

    try:
        found = changes(load_summary(before), load_summary(after), threshold=threshold / 100)
    except FileNotFoundError as error:
        raise CliError(str(error), "D7001") from None
    except ValueError as error:
        raise CliError(str(error), "D7003") from None
    if run.json:
        run.emit(
            {
                "changes": [
                    {"figure": c.figure, "before": c.before, "after": c.after, "verdict": c.verdict} for c in found
                ]
            }
        )
        return EXIT_OK
    if not found:
        run.print(f"no figure changed by more than {threshold:g} %")
        return EXIT_OK
    rows = [
        (
            change.verdict,
            printable(change.figure),
            _text(change.before, "{:,.6g}"),
            _text(change.after, "{:,.6g}"),
            _text(change.relative, "{:+.1%}"),
        )
        for change in found
    ]
    run.print(table(("", "FIGURE", "BEFORE", "AFTER", "CHANGE"), rows, right=(2, 3, 4)))
    return EXIT_OK


def import_traces(
    run: Invocation,
    files: Annotated[
        list[Path], typer.Argument(help="Tracer files of libp2p: JSON or protobuf, also gzipped.", metavar="FILE…")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where our trace files go.")],
) -> None:
    """Take over traces of go-libp2p, js-libp2p or others, for `dep2p trace analyze`."""
    from dep2p.traces.libp2p import TraceFormatError, import_files

    try:
        report = import_files(files, out)
    except TraceFormatError as error:
        raise CliError(str(error), "D7003") from None
    for path in report.cut:
        run.warn(f"{path} ends in the middle of an event: taken up to there")
    if run.json:
        run.emit(
            {
                "events": report.events,
                "skipped": report.skipped,
                "nodes": report.nodes,
                "cut": report.cut,
                "files": [str(path) for path in report.paths],
            }
        )
        return
    skipped = f", {report.skipped:,} skipped" if report.skipped else ""
    run.print(f"{report.events:,} events of {report.nodes:,} nodes{skipped}: {out}")


def warm(run: Invocation) -> None:
    """Make Spark start twice as fast from now on: about a minute, 180 MB in the cache directory."""
    _, _, java, session = _spark_modules()
    try:
        found = java.find_java()
        run.say(f"training with Java {found.version} from {found.origin}; this takes a minute")
        training = (sys.executable, "-m", "dep2p.spark_analytics", "--train")
        path = java.make_archive(found, session.default_cache_dir(), training=training)
    except java.JavaError as error:
        raise CliError(str(error), "D7002") from None
    if run.json:
        run.emit({"archive": str(path), "bytes": path.stat().st_size})
    else:
        run.print(f"{path} ({byte_count(path.stat().st_size)})")


def cat(
    run: Invocation,
    places: Annotated[list[Path], typer.Argument(help="Trace files or directories.", metavar="FILE…")],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", "-k", metavar="KIND", help="Only these kinds (again for more).")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="TEXT", help="Only nodes whose id has this in it.")
    ] = None,
) -> None:
    """Print the events of trace files, in their order."""
    from dep2p.traces.files import ReadProblems, read_events, trace_files
    from dep2p.traces.schema import KINDS

    unknown = [name for name in kind or () if name not in KINDS]
    if unknown:
        raise CliError(f"no kind of event: {unknown[0]}", "D1001", tries=(f"one of: {', '.join(KINDS)}",))
    try:
        files = trace_files(places)
    except FileNotFoundError as error:
        raise CliError(str(error), "D7001") from None
    if not files:
        raise CliError(f"no trace files in {', '.join(map(str, places))}", "D7001")
    show = _as_json(run) if run.json else _as_line(run)
    for path in files:
        problems = ReadProblems()
        for event in read_events(path, problems):
            if (not kind or event.get("kind") in kind) and (node is None or node in str(event.get("node"))):
                show(event)
        if problems.cut_bytes:
            run.warn(f"{path} is cut: its last {problems.cut_bytes:,} bytes are no whole frame")
        if problems.bad_frames or problems.bad_lines:
            run.warn(f"{path}: {problems.bad_frames} damaged frames, {problems.bad_lines} lines that are no event")


def _as_json(run: Invocation) -> Callable[[dict[str, object]], None]:
    return run.emit


def _as_line(run: Invocation) -> Callable[[dict[str, object]], None]:
    def show(event: dict[str, object]) -> None:
        t = event.get("t")
        at = f"{datetime.fromtimestamp(t / 1e6, UTC):%Y-%m-%d %H:%M:%S.%f}" if isinstance(t, int) else "?"
        rest = " ".join(
            f"{name}={_short(value)}" for name, value in event.items() if name not in ("v", "node", "seq", "t", "kind")
        )
        node = str(event.get("node"))
        run.print(printable(f"{at}  {node[-8:]:>8}  {event.get('kind')!s:<12} {rest}"))

    return show


def _short(value: object) -> str:
    if isinstance(value, list):
        items = cast("list[object]", value)
        return f"[{len(items)}]" if len(items) > 3 else "[" + ", ".join(map(_short, items)) + "]"
    return str(value)


def register(app: typer.Typer) -> None:
    """Add the group ``trace``."""
    sub = group(app, "trace", "Traces: of the daemon, reports in Spark, imports, what a file holds.")
    command(
        sub,
        "analyze",
        examples=[
            ("dep2p trace analyze traces --out report", "report/report.html, and the numbers beside it"),
            ("dep2p trace analyze traces --follow --every 60", "while nodes write"),
            (
                "dep2p trace analyze s3a://bucket/traces --master spark://head:7077 --silver s3a://bucket/silver",
                "cluster",
            ),
        ],
        notes="""
        Needs the extra: pip install 'dep2p[spark]'. It brings a Java runtime; Java 17 or 21 is used when JAVA_HOME or
        PATH lead to one. Damaged files, gaps, clocks that are off and duplicates are findings in the report; all else
        is analysed. With --json one object is printed: the summary and the findings.
        """,
    )(analyze)
    command(
        sub, "compare", examples=[("dep2p trace compare report-before report-after", "what got better, what worse")]
    )(compare)
    command(sub, "import", examples=[("dep2p trace import trace.json --out traces", "then analyze traces")])(
        import_traces
    )
    command(sub, "warm", examples=[("dep2p trace warm", "once after an install")])(warm)
    register_live(sub)
    command(sub, "cat", examples=[("dep2p trace cat traces --kind publish --kind reject", "read along")])(cat)
