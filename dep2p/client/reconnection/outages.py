"""How a client goes on over a restart of its daemon: what it waits for, how long, and who learns of it."""

import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypedDict, TypeVar, Unpack

import anyio

from dep2p.client.models import FeedInterrupted, FeedResumed
from dep2p.control_api.errors import DaemonUnreachableError, FeedEndedError, code_of, unexpected_answer
from dep2p.errors import Dep2pError
from dep2p.outside_text import one_line
from dep2p.protocols.timing.backoff import Backoff

T = TypeVar("T")

_logger = logging.getLogger("dep2p.client")
_BACKOFF: Final = Backoff(first_s=0.1, max_s=5.0)
_STEADY_S: Final = 5.0
"""Seconds for which a feed stays open before its next loss is the first one again."""

NOT_NOW: Final = frozenset(
    {
        "D1009",  # a body came too slowly
        "D3001",  # no daemon
        "D3006",  # it stops
        "D3008",  # too many connections or subscriptions: those of the cut one may still count
        "D4001",  # the peer is not found: a daemon that has just started knows few
        "D4002",  # nor is it a verified member yet
        "D5001",  # no answer in time
        "D5003",  # the program that serves a session may be starting, too
        "D5005",
        "D5006",
        "D5012",  # another program has the name: this one takes its turn when that one ends
        "D5213",  # another node is the broker for now
        "D5301",  # the store does not answer
        "D5303",  # the store is locked by the daemon that is ending
        "D5304",
        "D6001",  # a connection between nodes ended
    }
)
"""Codes of the errors after which a feed that was open waits. Any other ends it: the same call would fail again."""


@dataclass(frozen=True, slots=True)
class ReconnectBounds:
    """How long a client goes on without its daemon. Raises ValueError."""

    feed_s: float = math.inf
    """Seconds for which a subscription, handler, consumer or session waits; 0: it ends at once."""
    call_s: float = 0.0
    """Seconds for which a call that is safe to repeat is made again; 0: it fails at once."""

    def __post_init__(self) -> None:
        if not (self.feed_s >= 0 and self.call_s >= 0):
            raise ValueError(f"seconds to reconnect are 0 or more, not {self.feed_s} and {self.call_s}")


class ReconnectOptions(TypedDict, total=False):
    """How long a client goes on without its daemon, as keyword arguments."""

    reconnect_s: float
    """As `ReconnectBounds.feed_s`."""
    call_reconnect_s: float
    """As `ReconnectBounds.call_s`."""


def reconnect_bounds(**options: Unpack[ReconnectOptions]) -> ReconnectBounds:
    """Return the bounds of these options. Raises ValueError, and TypeError for other options."""
    if unknown := options.keys() - ReconnectOptions.__annotations__.keys():
        known = " and ".join(ReconnectOptions.__annotations__)
        raise TypeError(f"Client.open() takes no {', '.join(sorted(unknown))}: its further options are {known}")
    return ReconnectBounds(options.get("reconnect_s", math.inf), options.get("call_reconnect_s", 0.0))


class DaemonWatch:
    """The state of the daemon, as the client knows it: one line of the log when it goes away, one when it is back."""

    def __init__(self, where: str, bounds: ReconnectBounds) -> None:
        self.bounds = bounds
        self.was_reached: bool = False
        """Whether a connection to it was ever made. A wrong address is an error at once."""
        self.callbacks: list[Callable[[FeedInterrupted | FeedResumed], None]] = []
        self._where = where
        self._lost_s: float | None = None
        self._back: anyio.Event | None = None

    def answers(self) -> None:
        """Note that the daemon answers."""
        if self._lost_s is not None:
            away_s, self._lost_s = anyio.current_time() - self._lost_s, None
            _logger.warning("the daemon at %s answers again, after %.1f s", one_line(self._where), away_s)
            if self._back is not None:
                self._back.set()
                self._back = None

    def lost(self, reason: str) -> None:
        """Note that the daemon is gone, and that the client waits for it."""
        if self._lost_s is None:
            self._lost_s = anyio.current_time()
            _logger.warning("waiting for the daemon at %s: %s", one_line(self._where), one_line(reason))

    async def pause(self, seconds: float) -> None:
        """Sleep, at most until another call finds that the daemon is back."""
        if self._lost_s is None:
            await anyio.sleep(seconds)
            return
        self._back = self._back or anyio.Event()
        with anyio.move_on_after(seconds):
            await self._back.wait()

    def report(self, change: FeedInterrupted | FeedResumed) -> None:
        """Call the callbacks."""
        for callback in list(self.callbacks):
            callback(change)


class Outages:
    """The losses of one feed: whether it waits, for how long, and what its reader learns."""

    def __init__(self, watch: DaemonWatch, feed: str, *, loses: bool, ends_with: frozenset[str] = frozenset()) -> None:
        """``ends_with``: codes of `NOT_NOW` that mean the end for this feed."""
        self.feed = feed
        self._watch = watch
        self._loses = loses
        self._not_now = NOT_NOW - ends_with
        self._lost_s: float | None = None
        self._opened_s = -math.inf
        self._tries = 0
        self._said = ""
        self._end: Exception | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the feed waits."""
        return self._lost_s is not None

    def lost(self, error: Exception) -> FeedInterrupted:
        """Note a loss. Raises ``error`` when the client does not wait, FeedEndedError when waiting is useless."""
        self._raise_if_never(error)
        if not self._watch.bounds.feed_s:
            self._end = error
            raise error
        self._lost_s = anyio.current_time()
        if self._lost_s - self._opened_s >= _STEADY_S:
            self._tries = 0
        self._said = ""
        self._say(error)
        change = FeedInterrupted(0, self.feed, str(error))
        self._watch.report(change)
        return change

    def _raise_if_never(self, error: Exception) -> None:
        if not isinstance(error, Dep2pError) or code_of(error) not in self._not_now:
            cause = error if isinstance(error, Dep2pError) else unexpected_answer(str(error))
            self._end = FeedEndedError(self.feed, cause)
            raise self._end from error

    def _say(self, error: Exception) -> None:
        """Write one line about each kind of reason."""
        code = code_of(error)
        if isinstance(error, DaemonUnreachableError):
            self._watch.lost(str(error))
        elif code != self._said:
            _logger.warning("%s waits: %s (%s)", one_line(self.feed), one_line(str(error)), code)
            self._said = code

    async def over(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``attempt`` with growing pauses until it succeeds, and return what it returns.

        A cancelled call may be made again. Raises DaemonUnreachableError when ``feed_s`` have passed since the loss,
        FeedEndedError.
        """
        if self._end is not None:
            raise self._end
        assert self._lost_s is not None
        error: Exception | None = None
        with anyio.CancelScope(deadline=self._lost_s + self._watch.bounds.feed_s):
            while True:
                self._tries += 1
                await self._watch.pause(_BACKOFF.jittered(self._tries, random))
                try:
                    return await attempt()
                except Dep2pError as raised:
                    error = raised
                self._raise_if_never(error)
                self._say(error)
        waited = f"{self.feed} waited for {self._watch.bounds.feed_s:g} s"
        self._end = DaemonUnreachableError(f"{waited}: {error or 'the daemon did not answer'}")
        raise self._end from error

    def resumed(self) -> FeedResumed:
        """Note that the feed is open again."""
        assert self._lost_s is not None
        self._opened_s = anyio.current_time()
        change = FeedResumed(0, self.feed, self._opened_s - self._lost_s, self._loses)
        self._lost_s = None
        if self._said:
            _logger.warning("%s goes on", one_line(self.feed))
        self._watch.report(change)
        return change


async def repeated(
    watch: DaemonWatch, attempt: Callable[[], Awaitable[T]], may_repeat: Callable[[DaemonUnreachableError], bool]
) -> T:
    """Make a call, and make it again for ``call_s`` while the daemon is away, if that is safe."""
    until_s = -math.inf
    tries = 0
    while True:
        try:
            return await attempt()
        except DaemonUnreachableError as error:
            if not watch.bounds.call_s or not watch.was_reached or not may_repeat(error):
                raise
            now = anyio.current_time()
            until_s = until_s if tries else now + watch.bounds.call_s
            tries += 1
            pause_s = _BACKOFF.jittered(tries, random)
            if now + pause_s > until_s:
                raise
            watch.lost(str(error))
        await watch.pause(pause_s)
