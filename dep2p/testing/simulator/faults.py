"""Faults of a simulated network: partitions, nodes that leave and come back, nodes that crash."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from dep2p.testing.simulator.world import World

CRASH_NOTICED_S: Final = 3.0
"""Seconds that neighbours take to notice that a node or a path is gone without a word."""


@dataclass(frozen=True, slots=True)
class Partition:
    """From ``start_s`` to ``end_s`` (seconds after the first publish) a share of the nodes hears nothing of the others.

    Links between the two parts are silent at once, noticed as gone after 3 s, and dialed again at the end.
    """

    start_s: float
    end_s: float
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:
            raise ValueError("a partition starts at 0 s or later and ends after it starts")
        if not 0 < self.share < 1:
            raise ValueError("a partition's share is between 0 and 1")

    @classmethod
    def parse(cls, text: str) -> "Partition":
        """Parse ``2:8`` or ``2:8:0.3``. Raises ``ValueError`` with a sentence for the user."""
        try:
            numbers = [float(part) for part in text.split(":")]
            if len(numbers) not in (2, 3):
                raise ValueError("two or three numbers are wanted")
            return cls(*numbers)
        except ValueError as error:
            raise ValueError(f"no partition {text!r} ({error}): write START:END or START:END:SHARE") from None


@dataclass(frozen=True, slots=True)
class Churn:
    """Nodes go and come back with a new router, at random while messages are published.

    ``leaves_per_s`` say goodbye (their connections close at once), ``crashes_per_s`` do not (neighbours notice after
    3 s). Each is down for ``down_s``.
    """

    leaves_per_s: float = 0.0
    crashes_per_s: float = 0.0
    down_s: float = 5.0

    def __post_init__(self) -> None:
        if self.leaves_per_s < 0 or self.crashes_per_s < 0:
            raise ValueError("churn cannot be negative")
        if self.down_s < 1:
            raise ValueError("a node is down for 1 s at least")


class Faults:
    """Puts faults on the world's agenda. ``restart(number)`` starts a node anew."""

    def __init__(self, world: World, honest: int, rng: Random, restart: Callable[[int], None]) -> None:
        self._world = world
        self._honest = honest
        self._rng = rng
        self._restart = restart
        self._parted: list[tuple[int, int]] = []

    def schedule_partition(self, partition: Partition, start: float) -> None:
        """Put a partition on the agenda. ``start``: the virtual time of the first publish."""
        self._world.call(start + partition.start_s, partial(self._part, partition.share))
        self._world.call(start + partition.end_s, self._heal)

    def schedule_churn(self, churn: Churn, start: float, end: float) -> None:
        """Put departures at random times between ``start`` and ``end`` on the agenda."""
        for per_s, crash in ((churn.leaves_per_s, False), (churn.crashes_per_s, True)):
            at = start
            while per_s:
                at += self._rng.expovariate(per_s)
                if at >= end:
                    break
                self._world.call(at, partial(self._go, churn.down_s, crash))

    def _part(self, share: float, now: float) -> None:
        world = self._world
        count = max(1, int(share * self._honest))
        numbers = list(range(self._honest))
        self._rng.shuffle(numbers)
        inside = bytearray(len(world.nodes))
        for number in numbers[:count]:
            inside[number] = 1
        for dialer, other in list(world.dialed):
            if inside[dialer] != inside[other] and world.peers[other] in world.links[dialer]:
                world.cut(dialer, other, noticed_s=CRASH_NOTICED_S)
                self._parted.append((dialer, other))

    def _heal(self, now: float) -> None:
        """Let each pair dial again within a second."""
        parted, self._parted = self._parted, []
        for dialer, other in parted:
            self._world.call(now + self._rng.random(), partial(self._redial, dialer, other))

    def _redial(self, dialer: int, other: int, now: float) -> None:
        # The end of a short partition may come before its start was noticed; a new connection then replaces the old.
        self._world.dial(dialer, other)

    def _go(self, down_s: float, crash: bool, now: float) -> None:
        world = self._world
        number = self._rng.randrange(self._honest)
        if not world.is_up(number):
            return
        world.stop(number, crash=crash)
        neighbours = [link[1] for link in world.links[number].values()]
        for other in neighbours:
            world.cut(number, other, noticed_s=CRASH_NOTICED_S if crash else 0.0)
        world.metrics.downs.setdefault(number, []).append((now, now + down_s))
        world.call(now + down_s, partial(self._come_back, number, neighbours))

    def _come_back(self, number: int, neighbours: list[int], now: float) -> None:
        world = self._world
        self._restart(number)
        world.metrics.up_since[number] = now
        for other in neighbours:
            dialer, dialed = (number, other) if (number, other) in world.dialed else (other, number)
            world.call(now + self._rng.random(), partial(self._redial, dialer, dialed))
