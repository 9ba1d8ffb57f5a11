"""Which message ids came already: bounded in time and items, one dict look-up in the hot path."""


class SeenCache:
    """Ids in the order of their time. `times` and `rejected` are read in the hot path; change them only here."""

    __slots__ = ("_items_max", "_refresh", "_ttl_s", "evicted", "rejected", "times")

    def __init__(self, ttl_s: float, items_max: int, *, refresh: bool) -> None:
        self.times: dict[bytes, float] = {}
        self.rejected: dict[bytes, None] = {}
        """The remembered ids whose message was invalid: a peer that sends a copy is punished as well."""
        self._ttl_s = ttl_s
        self._items_max = items_max
        self._refresh = refresh
        self.evicted: int = 0
        """Ids forgotten before their time."""

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self.times

    def __len__(self) -> int:
        return len(self.times)

    @property
    def refreshes(self) -> bool:
        """Whether `touch` is to be called for duplicates."""
        return self._refresh

    def add(self, message_id: bytes, now: float, *, rejected: bool = False) -> None:
        """Remember an id that is not there yet."""
        times = self.times
        if len(times) >= self._items_max:
            self._evict()
        times[message_id] = now
        if rejected:
            self.rejected[message_id] = None

    def touch(self, message_id: bytes, now: float) -> None:
        """Start the time of an id anew, since a duplicate came."""
        del self.times[message_id]
        self.times[message_id] = now

    def sweep(self, now: float) -> None:
        """Forget the ids whose time is over."""
        horizon = now - self._ttl_s
        times = self.times
        expired: list[bytes] = []
        for message_id, at in times.items():
            if at > horizon:
                break
            expired.append(message_id)
        self._forget(expired)

    def _evict(self) -> None:
        """Make room, a sixteenth at once: taking ids from a dict's front one by one would be quadratic."""
        count = max(1, self._items_max // 16)
        oldest: list[bytes] = []
        for message_id in self.times:
            oldest.append(message_id)
            if len(oldest) >= count:
                break
        self.evicted += len(oldest)
        self._forget(oldest)

    def _forget(self, message_ids: list[bytes]) -> None:
        times, rejected = self.times, self.rejected
        for message_id in message_ids:
            del times[message_id]
        if message_ids and not times:
            times.clear()  # an emptied dict is still walked hole by hole; a cleared one is not
        if rejected:
            for message_id in message_ids:
                rejected.pop(message_id, None)
