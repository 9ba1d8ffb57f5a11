"""Turns of the programs of one node that share the requests of a service, or the messages of a group. Pure."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Program = TypeVar("Program", bound=Hashable)


class ProgramTurns(Generic[Program]):
    """Gives each job to the program with the fewest jobs for its size; among equals, to the one that waited longest."""

    def __init__(self) -> None:
        self._places: dict[Program, int] = {}
        """Programs by the time of their last job, and how many jobs each takes at a time."""
        self._jobs: dict[Program, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def places(self) -> int:
        """Jobs that all programs take at a time."""
        return sum(self._places.values())

    @property
    def jobs(self) -> int:
        """Jobs at work."""
        return sum(self._jobs.values())

    def add(self, program: Program, places: int) -> None:
        """Add a program; jobs of it that are still at work from an earlier time count."""
        self._places[program] = places

    def remove(self, program: Program) -> None:
        """Take no more jobs for a program; those at work go on."""
        self._places.pop(program, None)

    def take(self) -> Program | None:
        """Return the program for one more job, which `done` ends; None when there is no program."""
        best: Program | None = None
        best_load = 0.0
        for program, places in self._places.items():
            load = self._jobs.get(program, 0) / places
            if best is None or load < best_load:
                best, best_load = program, load
        if best is None:
            return None
        self._places[best] = self._places.pop(best)
        self._jobs[best] = self._jobs.get(best, 0) + 1
        return best

    def done(self, program: Program) -> None:
        """End a job."""
        left = self._jobs.get(program, 0) - 1
        if left > 0:
            self._jobs[program] = left
        else:
            self._jobs.pop(program, None)
