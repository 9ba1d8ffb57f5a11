"""Receives at other nodes that their callers gave up: the other node releases their messages without an attempt.

A request that is cancelled here goes on at the other end, which then holds messages without a receiver until their
invisible duration is over. So each receive has a name (its attempt id), and a receiver that leaves says so by that name
over the link of that time: a receive that waits is ended, and what it got goes to others at once.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from dep2p.errors import (
    Dep2pError,
    OverloadedError,
    ProtocolError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.protocols.queues.admin import AdminRequest, EndReceive, R, ReceivedMessages, ReceiveMessages
from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.types import UNREACHABLE_ERRORS
from dep2p.types import Rng

logger: logging.Logger = logging.getLogger("dep2p.queues")

_ENDING_MAX: Final = 1_024
"""Receives that are being ended at once."""
_ENDING_MAX_S: Final = 120.0
_BACKOFF: Final = Backoff(first_s=0.1, max_s=5.0)
_ATTEMPT_BYTES: Final = 12
_AGAIN: Final = (*UNREACHABLE_ERRORS, OverloadedError)

Start = Callable[[Callable[[], Awaitable[None]]], None]
"""Runs a function beside the caller; the function raises nothing. Raises StreamClosedError when the queues are not
running."""


class Ask(Protocol):
    """A request to the queues of one node."""

    async def __call__(self, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        """Carry out a request. ``on_sent`` is called when it goes to another node."""
        ...


class Receivings:
    """The receives of one realm at other nodes."""

    def __init__(self, counters: Counter[str], start: Start, rng: Rng) -> None:
        self._counters = counters
        self._start = start
        self._rng = rng
        self._ending = 0

    def new_attempt_id(self) -> str:
        """Return the id of a receive that is not asked again."""
        return self._rng.randbytes(_ATTEMPT_BYTES).hex()

    async def receive(self, ask: Ask, request: ReceiveMessages) -> ReceivedMessages:
        """Ask for messages, with an ``attempt_id`` of `new_attempt_id`. When the caller gives it up, end it at the
        other node, unless it was never sent.

        Raises what ``ask`` raises.
        """
        sent = trio.Event()
        try:
            return await ask(request, on_sent=sent.set)
        except (trio.Cancelled, RequestTimeoutError, StreamClosedError):
            if sent.is_set():
                self.end_soon(ask, request)
            raise

    def end_soon(self, ask: Ask, request: ReceiveMessages) -> None:
        """End a receive at the other node soon: it releases the messages that the receive took, or takes yet.

        It is tried again while the node is away, as long as messages could be held; a node that has started anew
        holds none.
        """
        if self._ending >= _ENDING_MAX:
            self._counters["receives_not_ended"] += 1
            return
        for_s = min(_ENDING_MAX_S, request.invisible_s)
        wanted = EndReceive(queue=request.queue, channel=request.channel, attempt_id=request.attempt_id)
        try:
            self._start(lambda: self._end(ask, wanted, trio.current_time() + for_s))
        except StreamClosedError:
            return  # this node ends, and with its links the receives at other nodes
        self._ending += 1
        self._counters["receives_ended"] += 1

    async def _end(self, ask: Ask, wanted: EndReceive, until_s: float) -> None:
        failures = 0
        try:
            while True:
                try:
                    await ask(wanted)
                    return
                except _AGAIN:
                    failures += 1
                    if trio.current_time() + _BACKOFF.after(failures) >= until_s:
                        self._counters["receives_not_ended"] += 1
                        return
                except (Dep2pError, ValueError) as error:  # queue or channel are gone
                    if isinstance(error, ProtocolError):
                        logger.info("a receive could not be ended: %s", error)
                    return
                await trio.sleep(_BACKOFF.after(failures))
        except Exception:  # no error here ends the realm's queues
            logger.exception("a receive could not be ended")
        finally:
            self._ending -= 1
