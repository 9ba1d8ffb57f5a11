"""A one-line progress display on a terminal; nothing at all anywhere else."""

import sys
import time
from typing import Final

from dep2p.cli.framework.render import byte_count, duration

_REDRAW_S: Final = 0.2
_BAR_CELLS: Final = 24


class Progress:
    """Bytes done out of a total, or things named ``unit``. ``shown`` False makes every call do nothing."""

    def __init__(self, label: str, total: int, *, shown: bool = True, unit: str = "") -> None:
        self._unit = unit
        self._label = label if len(label) <= 30 else label[:29] + "…"
        self._total = total
        self._done = 0
        self._at_start = 0
        self.started_s: float = time.monotonic()
        self._next_s = 0.0
        self._shown = shown and sys.stderr.isatty()
        self._drawn = False

    def add(self, count: int) -> None:
        """Count ``count`` more."""
        self._done += count
        if self._shown:
            now = time.monotonic()
            if now >= self._next_s:
                self._next_s = now + _REDRAW_S
                self._draw(now)

    def restart(self, done: int) -> None:
        """Count from ``done`` on: those were there before."""
        self._done = self._at_start = done
        self.started_s = time.monotonic()

    def line(self, now: float) -> str:
        """The line for the time ``now`` (monotonic seconds)."""
        share = 1.0 if not self._total else self._done / self._total
        passed = max(now - self.started_s, 1e-6)
        rate = (self._done - self._at_start) / passed
        left = duration((self._total - self._done) / rate) if rate > 0 else "?"
        bar = "#" * int(share * _BAR_CELLS)
        return (
            f"{self._label}  [{bar:<{_BAR_CELLS}}] {share:4.0%}  {self._text(self._done)} of {self._text(self._total)}"
            f"{' ' + self._unit if self._unit else ''}  {self._text(rate)}/s  {left} left"
        )

    def _text(self, count: float) -> str:
        return f"{count:,.0f}" if self._unit else byte_count(count)

    def _draw(self, now: float) -> None:
        self._drawn = True
        sys.stderr.write("\r\x1b[K" + self.line(now))
        sys.stderr.flush()

    def clear(self) -> None:
        """Wipe the line, so that other text can follow."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False
