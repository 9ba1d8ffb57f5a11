"""The wait before the next try: exponential back-off. Pure."""

from dataclasses import dataclass

from dep2p.types import Rng


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow by ``factor`` from ``first_s`` to ``max_s`` seconds. Raises ``ValueError``.

    A loop counts its failures, and sets the count to 0 when a try succeeds:

        failures += 1
        await trio.sleep(backoff.after(failures))
    """

    first_s: float
    max_s: float
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.max_s or self.factor < 1:
            raise ValueError(
                f"a back-off from {self.first_s} s to {self.max_s} s by {self.factor}: the first wait is at least 0 "
                "and at most the longest, and the factor at least 1"
            )

    def after(self, tries: int) -> float:
        """Return the seconds to wait after so many failed tries (1: the first has just failed)."""
        wait_s = self.first_s
        for _ in range(min(tries, 64) - 1):
            wait_s *= self.factor
            if wait_s >= self.max_s:
                return self.max_s
        return min(wait_s, self.max_s)

    def jittered(self, tries: int, rng: Rng) -> float:
        """Return the same, drawn from the upper half: nodes that failed together do not try again together."""
        return self.after(tries) * (0.5 + 0.5 * rng.random())
