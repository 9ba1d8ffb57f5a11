"""A finding: a sentence about something that deserves a look, with the evidence."""

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Final

_MOST: Final = 20
"""Findings of one kind at most; further ones are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``level``: ``bad`` (something was lost or broken), ``look`` (suspicious), ``note`` (about the trace itself).

    ``kind`` is a fixed word for programs; ``evidence`` holds the numbers behind the text.
    """

    level: str
    kind: str
    text: str
    subject: str = ""
    at_us: int | None = None
    evidence: dict[str, object] = field(default_factory=dict[str, object])

    def as_object(self) -> dict[str, object]:
        """Return the finding as an object for JSON."""
        return asdict(self)


def short(name: object) -> str:
    """Shorten a peer id for reading."""
    text = str(name)
    return f"{text[:8]}…{text[-6:]}" if len(text) > 20 else text


def clock_time(t_us: float) -> str:
    """Write a time as ``2026-11-28 06:12:03.4`` in UTC."""
    at = datetime.fromtimestamp(t_us / 1e6, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 100_000}"


def capped(items: list[Finding], what: str) -> list[Finding]:
    if len(items) <= _MOST:
        return items
    rest = len(items) - _MOST
    return [*items[:_MOST], Finding(items[0].level, items[0].kind, f"… and {rest:,} more {what}", evidence={"n": rest})]
