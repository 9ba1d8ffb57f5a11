"""The producer: where each message goes, and what happens when that fails. Pure.

Seed 004's flow: the route is fetched once and kept; a message goes to the next candidate in turn, and after a failure
to the one after it, at most ``attempts_max`` times. A transactional message has one attempt. A place that says 'flow
control' gets nothing for as long as it says.

Messages with an order key stand in a line per key, of which one batch is on its way at a time. In strict order that is
one message, since a batch whose outcome is not known would repeat more than its current message; one that failed stays
at the head of its line and goes to the same place again, after the back-off, for ever (until its sender withdraws it).
In best-effort order it may go to another place, and after ``attempts_max`` tries it leaves the line, which goes on
without it; both are counted.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from itertools import count
from typing import Any, Final, Literal, NamedTuple

from dep2p.protocols.queues.clients.backoff import Backoff
from dep2p.protocols.queues.clients.destinations import Candidate, Kind, RouteCache
from dep2p.protocols.queues.ordering.route_table import RouteTable

Order = Literal["strict", "best_effort"]

BATCH_ITEMS: Final = 64
BATCH_BYTES: Final = 262_144
"""So much of one key's line goes together."""
FLOW_CONTROL_MIN_S: Final = 0.01
"""For a place that says 'flow control' and no time."""


class Send:
    """A message on its way. ``item`` is the shell's."""

    __slots__ = ("in_flight", "is_over", "is_withdrawn", "item", "key", "kind", "line", "size", "tries")

    def __init__(self, key: str, kind: Kind, size: int, item: Any) -> None:
        self.key = key
        self.kind = kind
        self.size = size
        self.item = item
        self.tries = 0
        self.line: SendLine | None = None
        self.in_flight = False
        self.is_withdrawn = False
        self.is_over = False


class SendLine:
    """Of a key, or of one message without a key."""

    __slots__ = ("in_flight", "is_queued", "is_single", "key", "not_before", "sends")

    def __init__(self, key: str) -> None:
        self.key = key
        self.sends: deque[Send] = deque()
        self.in_flight = False
        self.not_before = 0.0
        self.is_queued = False
        self.is_single = False
        """A batch was refused: its messages go one by one, so that only the bad one fails."""


class Failure(Enum):
    """Why a batch was not taken."""

    RETRY = auto()
    """Unreachable, no answer, a failing store: another try may work. Whether it was taken may not be known."""
    FLOW_CONTROL = auto()
    """Too much waits there."""
    STALE_ROUTE = auto()
    """The place has not got this partition any more."""
    REFUSED = auto()
    """Another try would meet the same: too large, not allowed, no such queue."""


class FetchRoute(NamedTuple):
    """Ask for the route table; `ProducerCore.route` or `ProducerCore.route_failed` then."""


class Dispatch(NamedTuple):
    """Send these together, all or none, in this order; `ProducerCore.sent` or `ProducerCore.failed` then."""

    line: SendLine
    sends: list[Send]
    candidate: int


class Taken(NamedTuple):
    """It is durable. ``where`` is what the shell gave."""

    send: Send
    where: Any


class GivenUp(NamedTuple):
    """It failed for good."""

    send: Send
    error: Any


ProducerEffect = FetchRoute | Dispatch | Taken | GivenUp


class KindRefusedError(Exception):
    """The place does not take messages of this kind."""


class ProducerCore:
    """Events in, effects out; ``now`` is monotonic seconds.

    ``attempts_max``: tries of a message that is not in a strict line. ``in_flight_max``: batches on their way at once.
    ``items_max``, ``bytes_max``: of what has not been taken yet.
    """

    def __init__(
        self,
        order: Order,
        *,
        attempts_max: int,
        backoff: Backoff,
        in_flight_max: int = 64,
        items_max: int = 10_000,
        bytes_max: int = 67_108_864,
    ) -> None:
        if attempts_max < 1 or in_flight_max < 1 or items_max < 1 or bytes_max < 1:
            raise ValueError("attempts_max, in_flight_max, items_max and bytes_max are at least 1")
        self.order = order
        self.is_strict = order == "strict"
        self.attempts_max = attempts_max
        self.backoff = backoff
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.routes = RouteCache()
        self.counts: Counter[str] = Counter()
        self.items = 0
        self.bytes = 0
        self._batch_items = 1 if self.is_strict else BATCH_ITEMS
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._open: dict[Send, None] = {}
        self._lines: dict[str, SendLine] = {}
        self._ready: deque[SendLine] = deque()
        self._routeless: deque[SendLine] = deque()
        """Lines that wait for the first route table."""
        self._timers: list[tuple[float, int, SendLine]] = []
        self._number = count()
        self._is_fetching = False
        self._fetch_failures = 0
        self._fetch_at: float | None = None

    @property
    def has_room(self) -> bool:
        """Whether another message is taken."""
        return self.items < self.items_max and self.bytes < self.bytes_max

    @property
    def keys(self) -> int:
        """Order keys that have messages here."""
        return len(self._lines)

    @property
    def waiting_lines(self) -> int:
        """Keys whose head has failed and waits for its next try."""
        return sum(bool(line.sends and line.sends[0].tries and not line.in_flight) for line in self._lines.values())

    def open_sends(self) -> list[Send]:
        """What was neither taken nor given up nor withdrawn, in the order of submitting."""
        return list(self._open)

    def next_deadline(self) -> float | None:
        """When `on_time` has something to do."""
        timers = self._timers
        while timers and timers[0][2].not_before != timers[0][0]:
            heapq.heappop(timers)
        first = timers[0][0] if timers else None
        if self._fetch_at is not None:
            return self._fetch_at if first is None else min(first, self._fetch_at)
        return first

    # Messages

    def submit(self, send: Send, now: float) -> list[ProducerEffect]:
        """Take a message. The caller looks at `has_room` before."""
        line = self._lines.get(send.key) if send.key else None
        if line is None:
            line = SendLine(send.key)
            if send.key:
                self._lines[send.key] = line
        send.line = line
        line.sends.append(send)
        self._open[send] = None
        self.items += 1
        self.bytes += send.size
        self.counts["submitted"] += 1
        self._offer(line, now)
        return self._go_on(now)

    def withdraw(self, send: Send, now: float) -> list[ProducerEffect]:
        """Its sender waits no more. What is on its way may still be taken; it is not tried again."""
        if send.is_over:
            return []
        send.is_withdrawn = True
        self._open.pop(send, None)
        self.counts["withdrawn"] += 1
        if not send.in_flight:
            line = _line_of(send)
            was_head = line.sends[0] is send
            self._remove(send)
            if was_head:
                line.not_before = 0.0  # the next one has not failed
            self._offer(line, now)
        return self._go_on(now)

    def sent(self, dispatch: Dispatch, where: Iterable[Any], now: float) -> list[ProducerEffect]:
        """It is durable there; ``where``: one for each message."""
        effects: list[ProducerEffect] = []
        line = self._landed(dispatch)
        candidate = self.routes.candidates.get(dispatch.candidate)
        if candidate is not None:
            candidate.failures, candidate.avoided_until = 0, 0.0
        for send, place in zip(dispatch.sends, where, strict=True):
            self._remove(send)
            self.counts["taken"] += 1
            effects.append(Taken(send, place))
        self._offer(line, now)
        return self._go_on(now, effects)

    def failed(
        self, dispatch: Dispatch, failure: Failure, now: float, *, error: Any, retry_after_s: float = 0.0
    ) -> list[ProducerEffect]:
        """It was not taken, or that is not known. ``retry_after_s``: what the place asked for (flow control)."""
        effects: list[ProducerEffect] = []
        line = self._landed(dispatch)
        candidate = self.routes.candidates.get(dispatch.candidate)
        self.counts[f"failed_{failure.name.lower()}"] += 1
        if failure is Failure.FLOW_CONTROL and candidate is not None:
            candidate.paused_until = max(candidate.paused_until, now + max(retry_after_s, FLOW_CONTROL_MIN_S))
        elif failure is Failure.RETRY and candidate is not None:
            candidate.failures += 1
            candidate.avoided_until = now + self.backoff.after(candidate.failures)
        elif failure is Failure.STALE_ROUTE:
            self._fetch(now, effects)
        if failure is Failure.REFUSED and len(dispatch.sends) > 1:
            line.is_single = True
        else:
            self._count_try(dispatch, line, failure, error, now, effects)
        for send in dispatch.sends:
            if send.is_withdrawn and not send.is_over:
                self._remove(send)
        self._offer(line, now)
        return self._go_on(now, effects)

    def _count_try(
        self,
        dispatch: Dispatch,
        line: SendLine,
        failure: Failure,
        error: Any,
        now: float,
        effects: list[ProducerEffect],
    ) -> None:
        stays = self.is_strict and bool(line.key)
        for send in dispatch.sends:
            send.tries += 1
            has_one = send.kind is Kind.TRANSACTIONAL
            if failure is Failure.REFUSED or has_one or (not stays and send.tries >= self.attempts_max):
                if line.key and not send.is_withdrawn:
                    self.counts["left_their_line"] += 1
                self._give_up(send, error, effects)
        if not line.sends or failure is Failure.REFUSED:
            return
        tries = line.sends[0].tries
        # At once while there is a place that was not tried, as the seed says; then after a wait. A place that says
        # 'flow control' decides the wait itself.
        if failure is Failure.FLOW_CONTROL:
            return
        if stays or failure is Failure.STALE_ROUTE or tries >= len(self.routes.candidates):
            self._wait(line, now + self.backoff.after(tries))

    def _give_up(self, send: Send, error: Any, effects: list[ProducerEffect]) -> None:
        self._remove(send)
        if not send.is_withdrawn:
            self.counts["given_up"] += 1
            effects.append(GivenUp(send, error))

    def _landed(self, dispatch: Dispatch) -> SendLine:
        self._in_flight -= 1
        dispatch.line.in_flight = False
        for send in dispatch.sends:
            send.in_flight = False
        return dispatch.line

    def _remove(self, send: Send) -> None:
        line = _line_of(send)
        line.sends.remove(send)
        self._open.pop(send, None)
        send.is_over = True
        self.items -= 1
        self.bytes -= send.size
        if not line.sends and not line.in_flight and self._lines.get(line.key) is line:
            del self._lines[line.key]

    # Routes

    def route(
        self, table: RouteTable, now: float, accepts: Mapping[int, Iterable[Kind]] | None = None
    ) -> list[ProducerEffect]:
        """A route table has come: asked for, or told by a place."""
        self._is_fetching = False
        self._fetch_at = None
        self._fetch_failures = 0
        if self.routes.take(table, accepts):
            self.counts["routes_taken"] += 1
        self._release_routeless(now)
        return self._go_on(now)

    def route_failed(self, error: Any, now: float) -> list[ProducerEffect]:
        """No route table: what cannot wait fails; strict lines wait."""
        effects: list[ProducerEffect] = []
        self._is_fetching = False
        self._fetch_failures += 1
        if not self.routes.version:
            for line in list(self._routeless):
                for send in list(line.sends):
                    if not (self.is_strict and line.key and send.kind is not Kind.TRANSACTIONAL):
                        self._give_up(send, error, effects)
            self._routeless = deque(line for line in self._routeless if line.sends)
        if self._routeless or self.routes.version:
            self._fetch_at = now + self.backoff.after(self._fetch_failures)
        return self._go_on(now, effects)

    def _fetch(self, now: float, effects: list[ProducerEffect]) -> None:
        if not self._is_fetching and (self._fetch_at is None or self._fetch_at <= now):
            self._is_fetching = True
            self._fetch_at = None
            effects.append(FetchRoute())

    def _release_routeless(self, now: float) -> None:
        waiting, self._routeless = self._routeless, deque()
        for line in waiting:
            line.is_queued = False
            self._offer(line, now)

    # Going on

    def on_time(self, now: float) -> list[ProducerEffect]:
        """What is due."""
        effects: list[ProducerEffect] = []
        if self._fetch_at is not None and self._fetch_at <= now:
            self._fetch(now, effects)
        timers = self._timers
        while timers and timers[0][0] <= now:
            at, _number, line = heapq.heappop(timers)
            if line.not_before == at:
                self._offer(line, now)
        return self._go_on(now, effects)

    def _wait(self, line: SendLine, until: float) -> None:
        line.not_before = until
        heapq.heappush(self._timers, (until, next(self._number), line))

    def _offer(self, line: SendLine, now: float) -> None:
        if line.sends and not line.in_flight and not line.is_queued and line.not_before <= now:
            line.is_queued = True
            self._ready.append(line)

    def _go_on(self, now: float, effects: list[ProducerEffect] | None = None) -> list[ProducerEffect]:
        effects = [] if effects is None else effects
        ready = self._ready
        while ready and self._in_flight < self._in_flight_max:
            line = ready.popleft()
            line.is_queued = False
            if not line.sends or line.in_flight or line.not_before > now:
                continue
            if not self.routes.version:
                line.is_queued = True
                self._routeless.append(line)
                self._fetch(now, effects)
                continue
            self._dispatch(line, now, effects)
        return effects

    def _dispatch(self, line: SendLine, now: float, effects: list[ProducerEffect]) -> None:
        head = line.sends[0]
        candidate = self._choose(head, now)
        if candidate.paused_until > now:
            self.counts["held_back"] += 1
            self._wait(line, candidate.paused_until)
            return
        if head.kind not in candidate.accepts:
            error = KindRefusedError(f"place {candidate.id} takes no {head.kind.name.lower()} messages")
            self._give_up(head, error, effects)
            self._offer(line, now)
            return
        sends = self._batch(line, head)
        line.in_flight = True
        self._in_flight += 1
        for send in sends:
            send.in_flight = True
        effects.append(Dispatch(line, sends, candidate.id))

    def _batch(self, line: SendLine, head: Send) -> list[Send]:
        if line.is_single or head.kind is not Kind.ORDERED:
            line.is_single = line.is_single and len(line.sends) > 1
            return [head]
        sends: list[Send] = []
        size = 0
        for send in line.sends:
            # One that has failed goes with those that were in its batch, or alone: tries stay its own.
            if sends and (
                len(sends) >= self._batch_items
                or size + send.size > BATCH_BYTES
                or send.kind is not head.kind
                or send.tries != head.tries
            ):
                break
            sends.append(send)
            size += send.size
        return sends

    def _choose(self, send: Send, now: float) -> Candidate:
        """The place of the next try; one that is paused only when all are that may be used."""
        home = self.routes.home(send.key) if send.key else None
        if home is not None and self.is_strict:
            return home
        rotation = self.routes.rotation(now, home)
        free = [each for each in rotation if each.paused_until <= now]
        chosen = free[0] if free else min(rotation, key=lambda each: each.paused_until)
        if home is not None and chosen is not home:
            self.counts["moved"] += 1
        return chosen


def _line_of(send: Send) -> SendLine:
    assert send.line is not None
    return send.line
