"""Spark's errors in words, with what to do: the reason may be anywhere between the lines of two stacks."""

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from dep2p.spark_analytics.runtime.java import spark_home

_CAUSE_LENGTH_MAX: Final = 600
_CONNECT_PORT: Final = 15002
_REACH_TIMEOUT_S: Final = 10.0


class UnreachableError(Exception):
    """No server answers at the address of Spark, which the text names."""


@dataclass(frozen=True, slots=True)
class SparkError:
    """``what`` happened, Spark's own words as the ``cause``, and what to do (empty when unknown)."""

    what: str
    cause: str
    advice: str = ""


def explained(error: BaseException) -> SparkError:
    """An error of Spark's in words."""
    text = str(error)
    for pattern, what, advice in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            advice = advice.replace("HADOOP", _hadoop()) if "HADOOP" in advice else advice
            return SparkError(what(found), _shortened(text[found.start() :]), advice)
    return SparkError("Spark could not finish the job", _shortened(text))


def is_of_spark(error: BaseException) -> bool:
    """Whether Spark, or what carries it, raised this."""
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j", "grpc")


def reach(url: str) -> None:
    """Raise `UnreachableError` unless a server listens at a Spark Connect URL: PySpark would try again and again for a
    quarter of an hour, without a word. ``ValueError`` when it is none.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port or _CONNECT_PORT
    except ValueError:  # of the port
        host, port = "", 0
    if parts.scheme != "sc" or not host:
        raise ValueError(f"a Spark Connect URL is like sc://server:{_CONNECT_PORT}, not {url}")
    try:
        socket.create_connection((host, port), timeout=_REACH_TIMEOUT_S).close()
    except OSError as error:
        raise UnreachableError(f"no Spark Connect server at {host}:{port}: {error.strerror or error}") from None


def _shortened(text: str) -> str:
    text = re.sub(r"An error occurred while calling \S+\s*:\s*", "", text).partition("JVM stacktrace:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.match(r"\s+at \S+\(", line)]
    return " ".join(lines[:3])[:_CAUSE_LENGTH_MAX]


def _hadoop() -> str:
    names = [path.stem for path in (spark_home() / "jars").glob("hadoop-client-api-*.jar")]
    return names[0].removeprefix("hadoop-client-api-") if names else "VERSION"


_PYTHON: Final = "set PYSPARK_PYTHON to a Python that all workers have, of this version, with numpy and pyarrow"
_KNOWN: Final[tuple[tuple[str, Callable[[re.Match[str]], str], str], ...]] = (
    (
        r"Class org\.apache\.hadoop\.fs\.(\w+)\.\S+ not found|No FileSystem for scheme \"([^\"]+)\"",
        lambda found: f"Spark lacks the jars for {found[1] or found[2]}:// places",
        "give them with --conf spark.jars.packages=… or --conf spark.jars=… (for s3a:// on PySpark's Hadoop: "
        "org.apache.hadoop:hadoop-aws:HADOOP), or to spark-submit or the Spark Connect server when it starts",
    ),
    (
        r"PATH_NOT_FOUND\][^\n]*",
        lambda found: "Spark does not find a place",
        "check the path, as workers see it",
    ),
    (r"PACKAGE_NOT_INSTALLED\][^\n]*", lambda found: "a library is missing", "pip install 'pyspark[connect]'"),
    (r"No module named '([^']+)'", lambda found: f"the workers' Python has no {found[1]}", _PYTHON),
    (r"Cannot run program \"([^\"]+)\"", lambda found: f"workers have no {found[1]}", _PYTHON),
    (r"PYTHON_VERSION_MISMATCH", lambda found: "the workers' Python is of another version", _PYTHON),
    (
        r"All masters are unresponsive|Invalid master URL|Could not parse Master URL|"
        "Cannot call methods on a stopped SparkContext",
        lambda found: "no Spark master answers",
        "check --master, and that its port can be reached from here",
    ),
    (
        r"Java heap space|OutOfMemoryError|maxResultSize",
        lambda found: "Spark ran out of memory",
        "give more --memory; on a cluster also --conf spark.executor.memory=…",
    ),
)
