"""Results of a benchmark, as the object of the benchmark contract and as a human-readable table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import cast

TIME_AND_SIZE_UNITS = ("ms", "us", "MB", "KB", "B")
"""Units of which less is better, so that the ratio is the peer's value over ours."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one side. ``value`` is in the result's unit."""

    value: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    cpu_us: float | None = None
    """User and system time of both ends for one operation, microseconds."""
    fsyncs: float | None = None
    """Calls of fsync for one operation."""


@dataclass(frozen=True, slots=True)
class Result:
    """One name of the contract: our rounds and the other side's, measured in the same run."""

    name: str
    unit: str
    peer: str
    ours: Sequence[Sample]
    theirs: Sequence[Sample]
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Further counts of the same run."""

    @property
    def value(self) -> float:
        """The median of our rounds."""
        return median(sample.value for sample in self.ours)

    @property
    def peer_value(self) -> float:
        """The median of the peer's rounds."""
        return median(sample.value for sample in self.theirs)

    @property
    def ratio(self) -> float:
        """Our value over the peer's for rates, the peer's over ours for times and sizes: more is better."""
        above, below = self.value, self.peer_value
        if self.unit in TIME_AND_SIZE_UNITS:
            above, below = below, above
        return above / below if below else 0.0

    def as_object(self) -> dict[str, object]:
        """Return the result as the contract defines it; without latencies where none were taken."""
        made: dict[str, object] = {"name": self.name, "value": _round(self.value), "unit": self.unit}
        for key in ("p50_ms", "p99_ms", "cpu_us", "fsyncs"):
            value = _of(self.ours, key)
            if value is not None:
                made[key] = _round(value)
        made |= {"peer": self.peer, "peer_value": _round(self.peer_value), "ratio": _round(self.ratio)}
        return made | dict(self.counts)


@dataclass(slots=True)
class Report:
    """The run of one benchmark."""

    bench: str
    environment: dict[str, object]
    results: list[Result] = field(default_factory=list[Result])

    def as_object(self) -> dict[str, object]:
        """Return the object of the contract."""
        return {
            "bench": self.bench,
            "environment": self.environment,
            "results": [result.as_object() for result in self.results],
        }

    def as_table(self) -> str:
        """Return a table for a terminal, also with the spread of the rounds and the peer's latencies and CPU time."""
        head = ("result", "", "median", "min", "max", "unit", "p50 ms", "p99 ms", "CPU us/op", "fsyncs/op", "ratio")
        rows: list[tuple[str, ...]] = [head]
        for result in self.results:
            for label, samples, ratio in (
                ("dep2p", result.ours, f"{result.ratio:.2f}"),
                (result.peer, result.theirs, ""),
            ):
                values = [sample.value for sample in samples]
                rows.append(
                    (
                        result.name if ratio else "",
                        label,
                        *(_text(value) for value in (median(values), min(values), max(values))),
                        result.unit if ratio else "",
                        *(_text(_of(samples, key)) for key in ("p50_ms", "p99_ms", "cpu_us", "fsyncs")),
                        ratio,
                    )
                )
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 1, 5) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        counted = [f"{result.name}: {_flat(result.counts)}" for result in self.results if result.counts]
        about = [f"{key}: {_flat(value)}" for key, value in self.environment.items()]
        return "\n".join([*about, "", *lines, *counted])


def _of(samples: Sequence[Sample], key: str) -> float | None:
    values = [value for value in (getattr(sample, key) for sample in samples) if value is not None]
    return median(values) if values else None


def _round(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 1_000 else round(value, 1)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in cast("Mapping[str, object]", value).items())
    return str(value)
