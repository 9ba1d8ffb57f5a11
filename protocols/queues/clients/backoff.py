"""How long to wait before the next try. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow by ``factor`` from ``first_s`` to ``max_s`` seconds. Raises ``ValueError``."""

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
        """Seconds to wait after so many failed tries (1: the first has just failed)."""
        wait_s = self.first_s
        for _ in range(min(tries, 64) - 1):
            wait_s *= self.factor
            if wait_s >= self.max_s:
                return self.max_s
        return min(wait_s, self.max_s)
