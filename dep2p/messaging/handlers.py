"""Handlers by name, with their limits; and what they are called with."""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio
from outcome import Value

from dep2p.protocols.messaging.admission import HandlerQueue
from dep2p.protocols.messaging.request import RequestPolicy
from dep2p.protocols.wire.payload import check_name
from dep2p.types import Headers, PeerId

if TYPE_CHECKING:
    from dep2p.messaging.message_stream import MessageStream
    from dep2p.messaging.responder import RequestWork


@dataclass(frozen=True, slots=True)
class Request:
    """A request to answer."""

    peer: PeerId
    """The transport-authenticated caller, a verified member of the realm."""
    name: str
    data: bytes
    headers: Headers
    deadline_s: float
    """Trio time at which the caller stops waiting; the handler is cancelled then."""
    idempotent: bool
    """Whether the caller may send it again, so that it may be handled more than once."""


class Notice(msgspec.Struct):
    """A notify that came in. A Struct: it is made in half the time of a dataclass."""

    peer: PeerId
    """The transport-authenticated sender, a verified member of the realm."""
    name: str
    data: bytes
    headers: Headers


RequestHandler = Callable[[Request], Awaitable[bytes]]
NotifyHandler = Callable[[Notice], Awaitable[None]]
StreamHandler = Callable[["MessageStream"], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class RequestEntry:
    """A handler of requests."""

    name: str
    fn: RequestHandler
    queue: "HandlerQueue[RequestWork]"


@dataclass(slots=True, eq=False)
class NotifyEntry:
    """A handler of notifies; ``concurrency`` counts across peers, each peer's notifies come one after the other."""

    name: str
    fn: NotifyHandler
    concurrency: int
    rate_per_s: float
    running: int = 0
    waiters: deque[trio.lowlevel.Task] = field(default_factory=deque[trio.lowlevel.Task])

    async def take_place(self) -> None:
        """Wait for one of the ``concurrency`` places, in line."""
        if self.running < self.concurrency and not self.waiters:
            self.running += 1
            return
        task = trio.lowlevel.current_task()
        self.waiters.append(task)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self.waiters.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)  # the place is handed over: `running` has it counted

    def give_place(self) -> None:
        """Leave the place to the next in line."""
        if self.waiters:
            trio.lowlevel.reschedule(self.waiters.popleft(), Value(None))
        else:
            self.running -= 1


@dataclass(slots=True, eq=False)
class StreamEntry:
    """A handler of streams."""

    name: str
    fn: StreamHandler
    concurrency: int
    rate_per_s: float
    running: int = 0


Entry = TypeVar("Entry", RequestEntry, NotifyEntry, StreamEntry)


class Registry:
    """The handlers of one realm."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestEntry] = {}
        self.request_policies: dict[str, RequestPolicy] = {}
        self.notifies: dict[str, NotifyEntry] = {}
        self.streams: dict[str, StreamEntry] = {}

    def on_request(
        self, name: str, fn: RequestHandler, *, concurrency: int, rate_per_s: float, waiting_max: int
    ) -> Callable[[], None]:
        """Register; gives a function that undoes it. Raises ``ValueError``."""
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
        """Register; gives a function that undoes it. Raises ``ValueError``."""
        _check(name, fn, concurrency, rate_per_s)
        return _add(self.notifies, NotifyEntry(name, fn, concurrency, rate_per_s))

    def on_stream(self, name: str, fn: StreamHandler, *, concurrency: int, rate_per_s: float) -> Callable[[], None]:
        """Register; gives a function that undoes it. Raises ``ValueError``."""
        _check(name, fn, concurrency, rate_per_s)
        return _add(self.streams, StreamEntry(name, fn, concurrency, rate_per_s))


def _check(name: str, fn: Callable[[Any], Awaitable[Any]], concurrency: int, rate_per_s: float) -> None:
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
