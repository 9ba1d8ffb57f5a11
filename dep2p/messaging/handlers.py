"""Handlers by name, with their limits, and the arguments of their calls."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from dep2p.concurrency.wait_queue import WaitQueue
from dep2p.errors import ErrorCode, HandlerError, StreamClosedError
from dep2p.messaging.trace_events import TracedCall, trace_request
from dep2p.protocols.fairness.shares import MemberShares
from dep2p.protocols.messaging.admission import HandlerQueue
from dep2p.protocols.messaging.incoming import Notification, Request
from dep2p.protocols.messaging.request import Job, RequestPolicy
from dep2p.protocols.wire.headers import app_headers
from dep2p.protocols.wire.payload import check_name
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId

if TYPE_CHECKING:
    from dep2p.messaging.message_stream import MessageStream


logger: logging.Logger = logging.getLogger("dep2p.io")


class HandlerAwayError(Exception):
    """A handler of reliable messages has no app behind it any more: the message waits as if there were no handler."""


class HandlerGoneError(HandlerError):
    """The program that answers went away. Another one may answer: of this node, or of another member."""

    def __init__(self, text: str, *, has_begun: bool) -> None:
        super().__init__(text)
        self.has_begun = has_begun
        """Whether the program may have had the request."""


RequestHandler = Callable[[Request], Awaitable[bytes]]
NotifyHandler = Callable[[Notification], Awaitable[None]]
StreamHandler = Callable[["MessageStream"], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class RequestEntry:
    """A handler of requests."""

    name: str
    fn: RequestHandler
    queue: "HandlerQueue[RequestWork]"


class AnsweringLink(Protocol):
    """The link on which a request came and on which its answer goes."""

    counters: Counter[str]
    trace_log: TraceLog | None

    @property
    def peer(self) -> PeerId: ...

    @property
    def realm_id(self) -> RealmId: ...

    def start_work(self, work: "RequestWork") -> bool:
        """Run a work that has a place; False: the peer does not read its answers, and the place is for others."""
        ...

    def handler_ended(self, work: "RequestWork") -> None:
        """The place of a work goes to the next one."""
        ...

    async def answer(self, job: Job, data: bytes) -> None: ...

    async def answer_error(self, job: Job, code: ErrorCode, text: str) -> None: ...

    def work_ended(self, work: "RequestWork") -> None: ...


class RequestWork:
    """One request: it waits for a place, or runs in a worker. Its place is free when its handler has returned: the
    answer may wait until the peer reads."""

    __slots__ = ("entry", "has_place", "is_cancelled", "is_started", "job", "link", "outcome", "scope")

    def __init__(self, link: AnsweringLink, entry: RequestEntry, job: Job) -> None:
        self.link: AnsweringLink = link
        self.has_place: bool = False
        self.entry: RequestEntry = entry
        self.job: Job = job
        self.scope: trio.CancelScope | None = None
        self.is_started: bool = False
        self.is_cancelled: bool = False

    async def run(self) -> None:
        """Call the handler and send its result."""
        link, job = self.link, self.job
        log = link.trace_log
        began = 0.0 if log is None else trio.current_time()
        self.outcome: str = "cancelled"
        try:
            if not self.is_cancelled:
                await self._answer(link, job)
        except StreamClosedError:
            link.counters["responses_dropped_link_ended"] += 1
        finally:
            link.work_ended(self)
            if log is not None:
                took_s = trio.current_time() - began
                trace_request(log, TracedCall(link.peer, job.name, "in", len(job.data)), self.outcome, took_s, None)

    async def _answer(self, link: AnsweringLink, job: Job) -> None:
        try:
            headers = app_headers(job.headers)
            data = await self.entry.fn(
                Request(link.peer, job.name, job.data, headers, job.deadline, job.idempotent, link.realm_id)
            )
            if type(data) is not bytes:
                raise TypeError(f"the handler {job.name!r} gave {type(data).__name__}: it must give bytes")
        except HandlerGoneError as error:
            # NO_HANDLER: the caller may ask another member, since nothing was done or doing it twice does no harm.
            is_safe = job.idempotent or not error.has_begun
            await self._answer_failure(link, str(error), ErrorCode.NO_HANDLER if is_safe else ErrorCode.HANDLER_FAILED)
        except HandlerError as error:
            await self._answer_failure(link, str(error))
        except Exception:
            logger.exception("the handler of requests %r failed", job.name)
            await self._answer_failure(link, "the handler failed")
        else:
            self.outcome = "ok"
            link.handler_ended(self)
            await link.answer(job, data)

    async def _answer_failure(self, link: AnsweringLink, text: str, code: ErrorCode = ErrorCode.HANDLER_FAILED) -> None:
        self.outcome = "handler_failed"
        link.counters["handlers_failed"] += 1
        link.handler_ended(self)
        await link.answer_error(self.job, code, text)


def start_waiting(queue: "HandlerQueue[RequestWork]") -> None:
    """Places are free: they go to the works that wait."""
    while (work := queue.next()) is not None:
        work.has_place = True
        if not work.link.start_work(work):
            work.has_place = False
            queue.done(work.link.peer)


@dataclass(slots=True, eq=False)
class NotifyEntry:
    """A handler of notifies; ``concurrency`` counts across peers, each peer's notifies come one after the other."""

    name: str
    fn: NotifyHandler
    concurrency: int
    rate_per_s: float
    running: int = 0
    waiters: WaitQueue = field(default_factory=WaitQueue)

    async def acquire(self) -> None:
        """Wait for one of the ``concurrency`` places, in line."""
        if self.running < self.concurrency:  # tasks wait only while all places are taken: see `release`
            self.running += 1
            return
        await self.waiters.wait()  # `release` hands its place over: `running` counts it already

    def release(self) -> None:
        """Leave the place to the next in line."""
        if self.running >= self.concurrency and self.waiters:
            self.waiters.wake()
        else:
            self.running -= 1


@dataclass(slots=True, eq=False)
class StreamEntry:
    """A handler of streams."""

    name: str
    fn: StreamHandler
    places: MemberShares[PeerId]
    """Streams that are open, by their openers."""
    rate_per_s: float


Entry = TypeVar("Entry", RequestEntry, NotifyEntry, StreamEntry)


class Registry:
    """The handlers of one realm."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestEntry] = {}
        self.request_policies: dict[str, RequestPolicy] = {}
        self.notifies: dict[str, NotifyEntry] = {}
        self.streams: dict[str, StreamEntry] = {}
        self._on_notify_added: dict[object, Callable[[str], None]] = {}

    def watch_notifies(self, on_added: Callable[[str], None]) -> Callable[[], None]:
        """Call ``on_added`` with the name of each handler of notifies that comes; return a function that ends it."""
        key = object()
        self._on_notify_added[key] = on_added

        def unwatch() -> None:
            self._on_notify_added.pop(key, None)

        return unwatch

    def on_request(
        self, name: str, fn: RequestHandler, *, concurrency: int, rate_per_s: float, waiting_max: int
    ) -> Callable[[], None]:
        """Register a handler; return a function that removes it. Raises ``ValueError``."""
        _check(name, fn, concurrency, rate_per_s)
        entry = RequestEntry(name, fn, HandlerQueue(concurrency, waiting_max))
        remove = _add(self.requests, entry)
        self.request_policies[name] = RequestPolicy(rate_per_s)

        def unregister() -> None:
            if self.requests.get(name) is entry:
                del self.request_policies[name]
            remove()

        return unregister

    def on_notify(self, name: str, fn: NotifyHandler, *, concurrency: int, rate_per_s: float) -> Callable[[], None]:
        """Register a handler; return a function that removes it. Raises ``ValueError``."""
        _check(name, fn, concurrency, rate_per_s)
        unregister = _add(self.notifies, NotifyEntry(name, fn, concurrency, rate_per_s))
        for on_added in list(self._on_notify_added.values()):
            on_added(name)
        return unregister

    def on_stream(self, name: str, fn: StreamHandler, *, concurrency: int, rate_per_s: float) -> Callable[[], None]:
        """Register a handler; return a function that removes it. Raises ``ValueError``."""
        _check(name, fn, concurrency, rate_per_s)
        return _add(self.streams, StreamEntry(name, fn, MemberShares(concurrency), rate_per_s))


def _check(name: str, fn: Callable[..., Awaitable[object]], concurrency: int, rate_per_s: float) -> None:
    check_name(name)
    if not callable(fn):
        raise ValueError(f"the handler {name!r} is not callable: {fn!r}")
    if concurrency < 1:
        raise ValueError(f"concurrency of {name!r} is {concurrency}: it must be at least 1")
    if rate_per_s < 0:
        raise ValueError(f"rate_per_s of {name!r} is {rate_per_s}: it cannot be negative")


def _add(table: dict[str, Entry], entry: Entry) -> Callable[[], None]:
    if entry.name in table:
        raise ValueError(f"{entry.name!r} has a handler already: unregister that one first")
    table[entry.name] = entry

    def unregister() -> None:
        if table.get(entry.name) is entry:
            del table[entry.name]

    return unregister
