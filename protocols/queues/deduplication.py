"""What a queue remembers of its publishers: who sends again what was not answered gets the answer of the first time."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from dep2p.protocols.queues.records import MessageRow

_PUBLISHERS_MAX: Final = 1_024
"""Of a queue, whose last publishes are remembered."""
_PUBLISHES_REMEMBERED: Final = 64
"""Of one publisher: more than it has in flight."""


class Run(NamedTuple):
    """Messages of one publish with numbers in a row."""

    partition: int
    first_seq: int
    items: int


class Publish:
    """One publish: all of it, or nothing. Done when it is committed."""

    __slots__ = ("error", "is_done", "on_done", "publisher", "queue", "replaces", "rows", "runs")

    def __init__(self, on_done: "Callable[[Any], None]") -> None:
        self.on_done = on_done
        """Called with it when `is_done` is set; before, too, for each time that the outcome is in doubt."""
        self.queue: Any = None
        """The `Queue`, once it is taken; untyped, as `Queue.book` is."""
        self.runs: list[Run] = []
        self.rows: list[MessageRow] = []
        self.publisher = b""
        """Who has published it, if that is remembered."""
        self.replaces: tuple[int, int] | None = None
        """A dead letter (channel, id) that goes when this comes: in the same step."""
        self.is_done = False
        self.error: Exception | None = None

    def points(self) -> list[tuple[int, int]]:
        """(partition, seq) of each message, in the order given."""
        if len(self.runs) == 1:
            partition, first, items = self.runs[0]
            return [(partition, first)] if items == 1 else [(partition, first + n) for n in range(items)]
        return [(run.partition, run.first_seq + n) for run in self.runs for n in range(run.items)]

    def doubt(self, error: Exception) -> None:
        """Whether it is committed is not known for now; `finish` comes later."""
        self.error = error
        self.on_done(self)

    def finish(self, error: Exception | None = None) -> None:
        """It is committed, or not."""
        self.is_done = True
        self.error = error
        self.on_done(self)


class _Publisher:
    """What a publisher has published lately: a publish that is sent again is known by its first number."""

    __slots__ = ("last", "recent")

    def __init__(self) -> None:
        self.last = 0
        self.recent: OrderedDict[int, Publish | list[Run]] = OrderedDict()
        """By the first number. An empty list: it was not written, and is taken when it is sent again."""


class Publishers:
    """The part of a `Queue` that knows who has published what lately."""

    book: Any
    counts: Counter[str]
    is_ephemeral: bool
    partition_ids: tuple[int, ...]

    def __init__(self) -> None:
        self._publishers: OrderedDict[bytes, _Publisher] = OrderedDict()

    def _known(self, publisher: tuple[bytes, int], on_done: Callable[[Any], None]) -> Publish | None:
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
        self.counts["deduplicated"] += 1
        if isinstance(before, Publish) and not before.is_done:
            first_done = before.on_done

            def both(publish: Publish) -> None:
                first_done(publish)
                on_done(publish)

            before.on_done = both
            return before
        again = Publish(on_done)
        again.runs = list(before.runs if isinstance(before, Publish) else before)
        again.finish()
        return again

    def _remember(self, publisher: tuple[bytes, int], publish: Publish, count: int) -> None:
        name, number = publisher
        known = self._publishers.get(name)
        if known is None:
            if len(self._publishers) >= _PUBLISHERS_MAX:
                gone, _old = self._publishers.popitem(last=False)
                if not self.is_ephemeral:
                    self.book.define(self.publisher_key(gone), None)
            known = self._publishers[name] = _Publisher()
        else:
            self._publishers.move_to_end(name)  # the quietest one is forgotten first
        known.recent[number] = publish
        known.last = max(known.last, number + count - 1)
        publish.publisher = name
        while len(known.recent) > _PUBLISHES_REMEMBERED:
            known.recent.popitem(last=False)

    def remembered(self, name: bytes, written: Mapping[Publish, None]) -> list[object] | None:
        """What the store shall keep of a publisher: only what is written, or just being written."""
        known = self._publishers.get(name)
        if known is None:
            return None
        last = known.last
        runs: list[object] = []
        for number, each in known.recent.items():
            if isinstance(each, Publish) and not each.is_done and each not in written:
                last = min(last, number - 1)
                runs.append((number, ()))
            else:
                of: list[Run] = each.runs if isinstance(each, Publish) else each
                runs.append((number, tuple(tuple(run) for run in of)))
        return [last, runs]

    def forget_publish(self, publish: Publish) -> None:
        """It was not committed: sent again, it is taken again."""
        for known in self._publishers.values():
            for number, each in list(known.recent.items()):
                if each is publish:
                    known.recent[number] = []

    def restore_publisher(self, name: bytes, last: int, recent: Mapping[int, list[Run]]) -> None:
        """What the store has of a publisher."""
        known = self._publishers[name] = _Publisher()
        known.last = last
        known.recent.update(recent)

    def publisher_key(self, name: bytes) -> str:
        """Of the definition that tells of a publisher."""
        return f"publisher/{self.partition_ids[0]}/{name.hex()}"

    def publisher_keys(self) -> list[str]:
        """The keys of all definitions about publishers."""
        return [self.publisher_key(name) for name in self._publishers]
