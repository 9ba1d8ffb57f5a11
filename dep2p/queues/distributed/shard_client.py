"""How the home of a placed queue asks the nodes of its partitions: few requests at once, errors that name the node."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import trio

from dep2p.errors import (
    ChannelNotFoundError,
    NotMemberError,
    PeerNotFoundError,
    ProtocolError,
    QueueNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.protocols.queues.ordering.placement import Place
from dep2p.protocols.queues.queue import Queue
from dep2p.types import PeerId

LOOK_S: Final = 2.0
"""A node that does not answer within it counts as away, for people."""
_ASKS_PER_NODE: Final = 8
"""At once; a link takes 16 of them, and others use it, too."""
_WHOLE_MAX: Final = 2**53
AWAY: Final = (NotMemberError, PeerNotFoundError, RequestTimeoutError, StreamClosedError)


class Asker(Protocol):
    """The queues of a node, for administration."""

    async def ask(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request."""
        ...


class Shares:
    """The nodes that have partitions of this node's queues."""

    def __init__(self, at: Callable[[str], Asker]) -> None:
        self._at = at
        self._limiters: dict[str, trio.CapacityLimiter] = {}
        self.away: dict[str, None] = {}
        """Those that did not answer the last time."""

    async def ask(self, node: str, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """At most 8 at once of one node. When it is away, the error says which one."""
        limiter = self._limiters.setdefault(node, trio.CapacityLimiter(_ASKS_PER_NODE))
        try:
            async with limiter:
                answer = await self._at(node).ask(op, fields)
            self.away.pop(node, None)
            return answer
        except AWAY as error:
            self.away[node] = None
            raise type(error)(f"the node {node}: {error}") from error
        finally:
            if not limiter.borrowed_tokens and self._limiters.get(node) is limiter:
                del self._limiters[node]

    async def reach(self, shares: Mapping[str, str]) -> None:
        """Raises unless each node answers. ``shares``: by node, the name of a share, which need not be there."""
        for node, share in shares.items():
            try:
                await self.ask(node, "info", {"queue": share})
            except QueueNotFoundError:
                continue

    async def may_create(self, shares: Mapping[str, str], asker: PeerId | None) -> None:
        """Raises unless each node is there, and lets this one make such a queue, for ``asker``: what a member may not
        do at a node, it does not do through a home that may."""
        for node, share in shares.items():
            await self.ask(node, "may_create", {"queue": share} | ({} if asker is None else {"for": asker}))

    async def ask_all(
        self, queue: Queue, op: str, fields: Callable[[Place], Mapping[str, object]], *, is_needed: bool = True
    ) -> dict[int, dict[str, Any]]:
        """Ask every share, also those that an expansion has not completed. Gives the answers by partition.

        Raises the first error, as it is, when all are needed; else gives what could be had within `LOOK_S`.
        """
        found: dict[int, dict[str, Any]] = {}
        errors: list[Exception] = []

        async def ask(partition: int, place: Place) -> None:
            try:
                with trio.move_on_after(float("inf") if is_needed else LOOK_S):
                    found[partition] = await self.ask(place.node, op, {**fields(place), "queue": place.share})
            except QueueNotFoundError:
                found[partition] = {"messages": 0}  # deleted there already
            except ChannelNotFoundError as error:
                if op == "delete_channel":
                    found[partition] = {}  # an earlier try was interrupted
                else:
                    errors.append(error)
            except Exception as error:  # raised as it is, not in the nursery's group
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for partition, place in all_places(queue).items():
                nursery.start_soon(ask, partition, place)
        if errors and is_needed:
            raise errors[0]
        return found


def all_places(queue: Queue) -> dict[int, Place]:
    """Also those of an expansion that is not complete."""
    return {**queue.places, **queue.growing}


def no_fields(_place: Place) -> Mapping[str, object]:
    """For requests that need none."""
    return {}


def whole(answer: Mapping[str, Any], name: str) -> int:
    """A count that another node says. Raises ProtocolError."""
    value: object = answer.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _WHOLE_MAX:
        raise ProtocolError(f"a node answered with a {name} that is no whole number from 0 to {_WHOLE_MAX}")
    return value
