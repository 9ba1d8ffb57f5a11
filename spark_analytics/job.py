"""The job: trace directories in, a report directory out. The command line and ``spark-submit`` both run it."""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession

from dep2p.spark_analytics.findings.findings import findings
from dep2p.spark_analytics.findings.model import Finding
from dep2p.spark_analytics.ingest.check import FileError, file_errors
from dep2p.spark_analytics.ingest.silver import is_local, raw_files, write_silver
from dep2p.spark_analytics.metrics.analysis import Analysis, AnalysisOptions, NothingToAnalyse, analyse
from dep2p.spark_analytics.metrics.figures import Figures
from dep2p.spark_analytics.metrics.summary import summary
from dep2p.spark_analytics.report.page import page
from dep2p.traces.files import trace_files

REPORT: Final = "report.html"
COMPACTED: Final = "compacted"
"""Silver of one report, while it is made. Not that of `dep2p.spark_analytics.follow`, which may share the directory."""
SUMMARY: Final = "summary.json"
FINDINGS: Final = "findings.json"
_ERRORS: Final = 20
SMALL_BYTES_MAX: Final = 256 << 20
"""Bytes of a small input, about 18 million events. The JVM's second compiler takes some 15 seconds of a core for itself
in a report: that pays above this size."""


class InputError(Exception):
    """There is no input to analyse, or it cannot be found; the text says what to do."""


def _silent(text: str) -> None:
    """Print nothing."""


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """``say`` gets a line of text for each step of the work."""

    analysis: AnalysisOptions = AnalysisOptions()  # noqa: RUF009  frozen
    title: str = "Traces"
    say: Callable[[str], None] = _silent


@dataclass(frozen=True, slots=True)
class JobResult:
    """The files and figures of one report."""

    out: Path
    figures: Figures
    findings: list[Finding]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def report(self) -> Path:
        """The HTML file."""
        return self.out / REPORT


def is_small(places: Sequence[str]) -> bool:
    """Whether local input is so small that the JVM had better compile quickly than well (`SessionOptions.quick`)."""
    if not all(is_local(place) for place in places):
        return False
    with contextlib.suppress(FileNotFoundError):  # `check_places` says so
        return sum(path.stat().st_size for path in trace_files(map(Path, places))) <= SMALL_BYTES_MAX
    return True


def check_places(places: Sequence[str]) -> list[FileError]:
    """Look at local input. Raises `InputError` when there is none."""
    local = [Path(place) for place in places if is_local(place)]
    try:
        files = trace_files(local)
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    if not files and len(local) == len(places):
        names = ", ".join(map(str, local)) or "no directory"
        raise InputError(f"no trace files (*.ndjson.zst) in {names}")
    found = file_errors(files)
    if files and len(local) == len(places) and len([item for item in found if item.kind == "empty-file"]) == len(files):
        raise InputError(f"all {len(files)} trace files are empty, the first is {files[0]}")
    return found


def check_out(out: Path) -> None:
    """Check the directory for a report: it has to be on this machine. Raises `InputError` for URLs."""
    if _URL.match(str(out)):
        raise InputError(f"the report goes to a directory of this machine, not to {out}: copy it there afterwards")


_URL: Final = re.compile(r"\w[\w+.-]+:/")


def run(
    spark: SparkSession,
    places: Sequence[str],
    out: Path,
    options: ReportOptions = ReportOptions(),
    *,
    keep_silver: bool = False,
    silver: str | None = None,
) -> JobResult:
    """Compact, analyse, report. ``silver``: where its tables go; ``out/compacted`` else, which is removed afterwards
    unless kept. Raises `InputError`, ``OSError``, and what Spark raises.
    """
    started = time.perf_counter()
    found = check_places(places)
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    place = silver or str(out / COMPACTED)
    options.say("compacting")
    write_silver(raw_files(spark, places), place)
    compacted = time.perf_counter() - started
    result = report(spark, place, out, options, file_errors=found)
    if not keep_silver and silver is None:
        shutil.rmtree(place, ignore_errors=True)
    result.seconds["compact"] = round(compacted, 3)
    result.seconds["all"] = round(time.perf_counter() - started, 3)
    return result


def report(
    spark: SparkSession,
    silver: str | Sequence[str],
    out: Path,
    options: ReportOptions,
    *,
    file_errors: Sequence[FileError] = (),
) -> JobResult:
    """Turn silver into the files of a report."""
    try:
        found = analyse(spark, silver, options.analysis, options.say)
    except NothingToAnalyse:
        first = f": {file_errors[0].text}" if file_errors else ""
        raise InputError(f"the trace files hold no event that can be read{first}") from None
    figures = summary(found)
    listed = findings(found, figures) + of_files(file_errors)
    options.say("writing the report")
    write_out(out, found, figures, listed, options.title)
    return JobResult(out, figures, listed, dict(found.seconds))


def of_files(items: Sequence[FileError]) -> list[Finding]:
    """Return faults of files as findings; many of a kind are counted together."""
    result: list[Finding] = []
    for kind in dict.fromkeys(item.kind for item in items):
        of_kind = [item for item in items if item.kind == kind]
        result += [Finding("note", kind, item.text, str(item.path)) for item in of_kind[:_ERRORS]]
        if len(of_kind) > _ERRORS:
            result.append(Finding("note", kind, f"… and {len(of_kind) - _ERRORS:,} more such files"))
    return result


def write_out(out: Path, found: Analysis, figures: Figures, listed: list[Finding], title: str) -> None:
    """Write report, JSON and tables, each under a hidden name first, so that none is ever half there."""
    tables = out / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    for name, table in found.tables.items():
        hidden = tables / f".{name}.parquet"
        table.to_parquet(hidden, index=False, compression="zstd")
        os.replace(hidden, tables / f"{name}.parquet")
    _write(out / SUMMARY, json.dumps(figures, indent=1, default=_plain))
    _write(out / FINDINGS, json.dumps([item.as_object() for item in listed], indent=1, default=_plain))
    made_by = f"Made by dep2p trace analyze at {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"
    _write(out / REPORT, page(found, figures, listed, title=title, made_by=made_by))


def _write(path: Path, text: str) -> None:
    hidden = path.with_name("." + path.name)
    hidden.write_text(text, encoding="utf-8")
    os.replace(hidden, path)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if value is pd.NA:
        return None
    raise TypeError(f"not JSON: {type(value).__name__}")
