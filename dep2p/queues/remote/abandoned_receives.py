"""Receives at other nodes whose answer nobody waits for any more: what they took is given back there, untried.

A request that is cancelled here goes on at the other end, which then holds messages for nobody until their invisible
duration is over. So each receive has a name (its attempt id), and who leaves it says so with that name, over whatever
link there is by then: a receive that waits is ended, and what it got goes to others at once.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import trio

from dep2p.errors import (
    Dep2pError,
    OverloadedError,
    ProtocolError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.queues.distributed.shard_client import AWAY
from dep2p.types import Rng

logger = logging.getLogger("dep2p.queues")

_ENDING_MAX: Final = 1_024
"""Receives that are being ended at once."""
_ENDING_MAX_S: Final = 120.0
_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 5.0
_ATTEMPT_BYTES: Final = 12
_AGAIN: Final = (*AWAY, OverloadedError)

Start = Callable[[Callable[[], Awaitable[None]]], None]
"""Have it run beside the caller; it raises nothing. Raises StreamClosedError when the queues are not running."""


class Ask(Protocol):
    """A request to the queues of one place."""

    async def __call__(
        self, op: str, fields: Mapping[str, object], *, on_sent: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """``on_sent`` is called when it goes to another node."""
        ...


class Receivings:
    """Of one realm."""

    def __init__(self, counters: Counter[str], start: Start, rng: Rng) -> None:
        self._counters = counters
        self._start = start
        self._rng = rng
        self._ending = 0

    def new_attempt_id(self) -> str:
        """Of a receive that nobody will ask for again."""
        return self._rng.randbytes(_ATTEMPT_BYTES).hex()

    async def receive(self, ask: Ask, fields: Mapping[str, object]) -> dict[str, Any]:
        """Ask for messages, with an ``attempt_id`` of `new_attempt_id`; what nobody waits for is ended, unless it was
        never sent.

        Raises what ``ask`` raises.
        """
        sent = trio.Event()
        try:
            return await ask("receive", fields, on_sent=sent.set)
        except (trio.Cancelled, RequestTimeoutError, StreamClosedError):
            if sent.is_set():
                self.end_soon(ask, fields)
            raise

    def end_soon(self, ask: Ask, fields: Mapping[str, object]) -> None:
        """What that receive took, or takes yet, is given back untried.

        It is tried again while the node is away, as long as messages could be held; a node that has started anew
        holds none.
        """
        if self._ending >= _ENDING_MAX:
            self._counters["receives_not_ended"] += 1
            return
        invisible_s = fields.get("invisible_s")
        for_s = min(_ENDING_MAX_S, float(invisible_s) if isinstance(invisible_s, int | float) else _ENDING_MAX_S)
        wanted = {name: fields[name] for name in ("queue", "channel", "attempt_id")}
        try:
            self._start(lambda: self._end(ask, wanted, trio.current_time() + for_s))
        except StreamClosedError:
            return  # this node ends: its links do, and with them what waits
        self._ending += 1
        self._counters["receives_ended"] += 1

    async def _end(self, ask: Ask, wanted: Mapping[str, object], until_s: float) -> None:
        retry_s = _RETRY_FIRST_S
        try:
            while True:
                try:
                    await ask("end_receive", wanted)
                    return
                except _AGAIN:
                    if trio.current_time() + retry_s >= until_s:
                        self._counters["receives_not_ended"] += 1
                        return
                except (Dep2pError, ValueError) as error:  # queue or channel are gone
                    if isinstance(error, ProtocolError):
                        logger.info("a receive could not be ended: %s", error)
                    return
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
        except Exception:  # whatever it was, the realm's queues go on
            logger.exception("a receive could not be ended")
        finally:
            self._ending -= 1
