"""Compares the figures of two reports. Needs no Spark."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LESS_IS_BETTER: Final = (
    *(
        "latency",
        "coverage",
        "hops",
        "duplicates",
        "rmr",
        "drop",
        "lost",
        "loss",
        "retr",
        "reject",
        "one_way",
        "islands",
    ),
    *("missing", "wait", "service", "dead", "violations", "redelivered", "failed", "expired", "duration", "overhead"),
    *("timeouts", "requeues", "repeated", "reordered", "ack_ms", "late_copies", "duplicate_bytes"),
)
_MORE_IS_BETTER: Final = ("reliability", "worst_message", "acknowledged", "obeyed", "finished")
_SIZES: Final = ("from_us", "to_us", "schema")

Json = dict[str, "Json"] | list["Json"] | str | float | bool | None
"""A value of JSON."""


@dataclass(frozen=True, slots=True)
class Change:
    """``figure`` in both runs. ``verdict``: ``better``, ``worse``, ``new``, ``gone`` or ``other``."""

    figure: str
    before: float | None
    after: float | None
    verdict: str

    @property
    def relative(self) -> float | None:
        """``after / before − 1``; None when ``before`` is 0 or a value is missing."""
        if self.before is None or self.after is None or not self.before:
            return None
        return self.after / self.before - 1


def load_summary(place: Path) -> Json:
    """Read the figures of a report directory, or of a ``summary.json``. Raises ``OSError``, ``ValueError``."""
    path = place / "summary.json" if place.is_dir() else place
    if not path.exists():
        raise FileNotFoundError(f"no report in {place}: {path.name} is missing (make one with `dep2p trace analyze`)")
    try:
        value: Json = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is no summary of a trace report: it is nested too deeply") from None
    if not isinstance(value, dict) or "topics" not in value:
        raise ValueError(f"{path} is no summary of a trace report")
    return value


def changes(before: Json, after: Json, *, threshold: float = 0.05) -> list[Change]:
    """Return the figures that differ by more than ``threshold`` of the earlier value, the worse first."""
    one, two = dict(_flat(before)), dict(_flat(after))
    found: list[Change] = []
    for figure in one | two:
        a, b = one.get(figure), two.get(figure)
        if a is None or b is None:
            found.append(Change(figure, a, b, "new" if a is None else "gone"))
        elif a != b and abs(b - a) > threshold * abs(a):
            found.append(Change(figure, a, b, _verdict(figure, b - a)))
        elif any(word in figure for word in _MORE_IS_BETTER) and a != b:
            found.append(Change(figure, a, b, _verdict(figure, b - a)))  # a thousandth of loss is worth a line
    order = {"worse": 0, "better": 1, "other": 2, "new": 3, "gone": 4}
    return sorted(found, key=lambda change: (order[change.verdict], -abs(change.relative or 0.0), change.figure))


def _verdict(figure: str, difference: float) -> str:
    last = figure.rpartition("/")[2]
    if any(word in last for word in _MORE_IS_BETTER):
        return "better" if difference > 0 else "worse"
    if any(word in figure for word in _LESS_IS_BETTER) and last != "n":
        return "better" if difference < 0 else "worse"
    return "other"


def _flat(value: Json, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        if path not in _SIZES:
            yield path, float(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}/{name}" if path else name)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                name = "/".join(str(item[key]) for key in ("topic", "queue", "channel", "name", "side") if key in item)
                yield from _flat({key: inner for key, inner in item.items() if key != "namespace"}, f"{path}/{name}")
