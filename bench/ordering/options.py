"""The size and the faults of a run of :mod:`bench.ordering.crash`."""

import json
from dataclasses import dataclass

ROLES = "bench.ordering.roles"
"""The module of the processes of a run."""


@dataclass(frozen=True, kw_only=True)
class OrderRun:
    """One run: ``keys`` × ``per_key`` messages, and the faults while they pass."""

    keys: int = 500
    per_key: int = 400
    consumers: int = 4
    partitions: int = 2
    options: str = "{}"
    """More options of the queue, a JSON object."""
    expand_to: int = 6
    """The number of partitions from the middle of the run on; 0: no expansion."""
    pause_s: float = 40.0
    """For how long one consumer is paused; 0: not at all."""
    kill: bool = True
    """Kill one consumer with -9."""
    nodes: int = 0
    """Other nodes that have the partitions; 0: the broker has them."""
    host_away_s: float = 5.0
    """For how long one of those nodes is away after it was killed with -9."""
    failovers: int = 0
    """How often the broker is killed or paused, so that another one on the same PostgreSQL store takes over."""
    stop_s: float = 25.0
    """For how long an owner is paused, every other time."""
    settle_s: float = 2.0
    """Messages that come within this time after the end still count."""
    check_s: float = 0.2
    """The time between two looks at the handlers' log."""
    timeout_s: float = 1_800.0

    def queue_options(self) -> str:
        """The options of the queue, as JSON."""
        return json.dumps({"partitions": self.partitions, "max_attempts": 0} | json.loads(self.options))
