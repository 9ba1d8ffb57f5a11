"""The bytes by which the receive windows of distant peers may grow, over all connections of a host. Pure."""


class WindowBudget:
    """The bytes that peers may send beyond the windows that every stream gets.

    Example::

        budget = WindowBudget(128_000_000)
        growth = budget.take(1_048_576)  # less when little is left
        budget.give_back(growth)
    """

    __slots__ = ("_max_bytes", "taken_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.taken_bytes: int = 0

    def take(self, size_bytes: int) -> int:
        """Return how many of ``size_bytes`` there are, and count them as taken."""
        given = max(0, min(size_bytes, self._max_bytes - self.taken_bytes))
        self.taken_bytes += given
        return given

    def give_back(self, size_bytes: int) -> None:
        """Count bytes as free again."""
        self.taken_bytes -= size_bytes
