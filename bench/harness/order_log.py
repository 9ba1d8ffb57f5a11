"""The lines that handlers of an ordered queue append to one file, and the check that each key kept its order."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Order:
    """The order that handlers report. Feed it their lines in the order of the file."""

    keys: int
    per_key: int
    next: dict[int, int] = field(default_factory=dict[int, int])
    """The number that comes next, by key."""
    handled: int = 0
    repeats: int = 0
    """Repeats of the current message of a key."""
    wrong: list[str] = field(default_factory=list[str])
    """Lines that are out of order."""
    by_process: dict[int, int] = field(default_factory=lambda: defaultdict[int, int](int))

    @property
    def total(self) -> int:
        """The number of messages of the run."""
        return self.keys * self.per_key

    @property
    def is_complete(self) -> bool:
        """Whether every message was handled."""
        return self.handled == self.total

    def take(self, line: str) -> None:
        """Count one line: key, number, process."""
        key, number, process = (int(part) for part in line.split())
        expected = self.next.get(key, 0)
        self.by_process[process] += 1
        if number == expected:
            self.next[key] = number + 1
            self.handled += 1
        elif number == expected - 1:
            self.repeats += 1
        else:
            self.wrong.append(f"key {key}: {number} came where {expected} was next (process {process})")


class OrderLog:
    """The whole lines of a file that handlers append to; a line that is half written comes with the next call."""

    def __init__(self, path: Path, order: Order) -> None:
        self._file = path.open("rb")
        self._rest = b""
        self._order = order

    def read(self) -> None:
        """Feed the lines that came since the last call to the order."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            self._order.take(line.decode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
