"""The D-codes of traces and their analysis."""

from typing import Final

from dep2p.error_codes.model import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_USAGE, ErrorInfo

TRACE_ROWS: Final = (
    ErrorInfo(
        "D7001",
        "no trace there",
        "The place holds no trace files (*.ndjson.zst), no readable event, or no report to compare.",
        "Check the path; nodes write files when [trace] says so or after `dep2p trace start`, and `dep2p simulate "
        "--trace DIR` and `dep2p trace import` do. Each appears when it is complete: `dep2p trace stop` completes that "
        "of a node, `dep2p trace salvage DIR` those of nodes that were killed.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D7002",
        "no Spark here",
        "The analysis runs on PySpark and a Java runtime, which dep2p installs only when asked for, or the Java "
        "runtime did not start.",
        "Install it with pip install 'dep2p[spark]'; a Java 17 or 21 is used when JAVA_HOME or PATH lead to it.",
        500,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D7003",
        "not a trace of that kind",
        "A file to import is neither JSON nor protobuf as the tracers of libp2p write them.",
        "The message names the file and the place in it; leave the file out, or make it anew.",
        400,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D7004",
        "the analysis failed in Spark",
        "Spark could not finish the job: memory, disk, a lost worker, or a file system that it cannot reach.",
        "The cause is Spark's own message; try again with more --memory, or with --verbose to see its log.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D7005",
        "the trace cannot be written",
        "The directory of the trace cannot be made or written, or a file in it that a killed run left cannot be "
        "completed.",
        "The message names the directory and the reason; choose another one in [trace] dir, or with "
        "`dep2p trace start DIR`.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D7006",
        "the node is tracing already",
        "A trace is running; a second one, or other settings, need its end first.",
        "See `dep2p trace status`; end it with `dep2p trace stop`.",
        409,
        EXIT_REFUSED,
    ),
)
