"""A queue's memory of its producers: a producer that sends a publish again gets the answer of the first time."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from dep2p.protocols.queues.partition_log import PartitionLog
from dep2p.protocols.queues.records import MessageRow, Run

_PUBLISHERS_MAX: Final = 1_024
"""Producers whose last publishes a queue remembers."""
_PUBLISHES_REMEMBERED: Final = 64
"""Publishes that a queue remembers of one producer: more than a producer has in flight."""


class PublishedQueue(Protocol):
    """The queue, as a publish uses it when the publish is committed, or fails."""

    namespace: str
    name: str
    is_deleted: bool

    @property
    def logs(self) -> Mapping[int, PartitionLog]: ...

    def hidden(self, publish: "PendingPublish") -> None:
        """Act on a failed commit: the publish's numbers stay unused."""
        ...

    @property
    def producers(self) -> "ProducerDeduplication": ...


OnDone = Callable[["PendingPublish"], None]
"""Called with a publish whose outcome is known, or in doubt."""


class PendingPublish:
    """One publish: all of it, or nothing. Done when it is committed."""

    __slots__ = ("error", "is_done", "on_done", "publisher", "queue", "replaces", "rows", "runs")

    queue: PublishedQueue
    """Set when the queue takes the publish."""

    def __init__(self, on_done: "OnDone") -> None:
        self.on_done: OnDone = on_done
        """Called with the publish when `is_done` is set; before that, too, each time that the outcome is in doubt."""
        self.runs: list[Run] = []
        self.rows: list[MessageRow] = []
        self.publisher: bytes = b""
        """The id of the producer, if the queue remembers it."""
        self.replaces: tuple[int, int] | None = None
        """A dead letter (channel, id) that the same step removes."""
        self.is_done: bool = False
        self.error: Exception | None = None

    def points(self) -> list[tuple[int, int]]:
        """(partition, seq) of each message, in the order given."""
        if len(self.runs) == 1:
            partition, first, items = self.runs[0]
            return [(partition, first)] if items == 1 else [(partition, first + n) for n in range(items)]
        return [(run.partition, run.first_seq + n) for run in self.runs for n in range(run.items)]

    def doubt(self, error: Exception) -> None:
        """Report that it is not known for now whether the publish is committed; `finish` comes later."""
        self.error = error
        self.on_done(self)

    def finish(self, error: Exception | None = None) -> None:
        """Report the outcome: committed, or the error."""
        self.is_done = True
        self.error = error
        self.on_done(self)


class _ProducerState:
    """The last publishes of one producer. Its first number identifies a publish that is sent again."""

    __slots__ = ("last", "recent")

    def __init__(self) -> None:
        self.last = 0
        self.recent: OrderedDict[int, PendingPublish | list[Run]] = OrderedDict()
        """Publishes by their first number. An empty list: it was not written, and counts as new when it is sent
        again."""


class ProducerDeduplication:
    """The last publishes to one queue, by producer."""

    def __init__(
        self, first_partition: int, counts: Counter[str], define: Callable[[str, object | None], None] | None
    ) -> None:
        """``define`` stores a definition, or removes it (None); None for an ephemeral queue."""
        self._first_partition = first_partition
        self._counts = counts
        self._define = define
        self._publishers: OrderedDict[bytes, _ProducerState] = OrderedDict()

    def known(self, publisher: tuple[bytes, int], on_done: OnDone) -> PendingPublish | None:
        """Return the earlier publish under that number, or one that is done alike; None for a new number.

        Raises ``ValueError`` for a number that came before and is not remembered any more.
        """
        name, number = publisher
        known = self._publishers.get(name)
        if known is None:
            return None
        before = known.recent.get(number)
        if before == []:  # it was not written then
            return None
        if before is None:
            if number > known.last:
                return None
            raise ValueError(f"publish {number} comes after {known.last} of the same publisher, and is not remembered")
        self._counts["deduplicated"] += 1
        if isinstance(before, PendingPublish) and not before.is_done:
            first_done = before.on_done

            def both(publish: PendingPublish) -> None:
                first_done(publish)
                on_done(publish)

            before.on_done = both
            return before
        again = PendingPublish(on_done)
        again.runs = list(before.runs if isinstance(before, PendingPublish) else before)
        again.finish()
        return again

    def remember(self, publisher: tuple[bytes, int], publish: PendingPublish, count: int) -> None:
        """Remember a publish of ``count`` messages."""
        name, number = publisher
        known = self._publishers.get(name)
        if known is None:
            if len(self._publishers) >= _PUBLISHERS_MAX:
                gone, _old = self._publishers.popitem(last=False)
                if self._define is not None:
                    self._define(self.key(gone), None)
            known = self._publishers[name] = _ProducerState()
        else:
            self._publishers.move_to_end(name)  # the producer that was silent for longest is forgotten first
        known.recent[number] = publish
        known.last = max(known.last, number + count - 1)
        publish.publisher = name
        while len(known.recent) > _PUBLISHES_REMEMBERED:
            known.recent.popitem(last=False)

    def remembered(self, name: bytes, written: Mapping[PendingPublish, None]) -> list[object] | None:
        """Return the value that the store keeps of a producer: only publishes that are written, or just being
        written."""
        known = self._publishers.get(name)
        if known is None:
            return None
        last = known.last
        runs: list[object] = []
        for number, each in known.recent.items():
            if isinstance(each, PendingPublish) and not each.is_done and each not in written:
                last = min(last, number - 1)
                runs.append((number, ()))
            else:
                of: list[Run] = each.runs if isinstance(each, PendingPublish) else each
                runs.append((number, tuple(tuple(run) for run in of)))
        return [last, runs]

    def forget(self, publish: PendingPublish) -> None:
        """Forget a publish that was not committed: the queue takes it when it is sent again."""
        for known in self._publishers.values():
            for number, each in list(known.recent.items()):
                if each is publish:
                    known.recent[number] = []

    def restore(self, name: bytes, last: int, recent: Mapping[int, list[Run]]) -> None:
        """Restore a producer from the store."""
        known = self._publishers[name] = _ProducerState()
        known.last = last
        known.recent.update(recent)

    def key(self, name: bytes) -> str:
        """Return the key of a producer's definition in the store."""
        return f"publisher/{self._first_partition}/{name.hex()}"

    def keys(self) -> list[str]:
        """Return the keys of all definitions about producers."""
        return [self.key(name) for name in self._publishers]
