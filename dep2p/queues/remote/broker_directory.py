"""The route to another member's queues: a link to the broker among the nodes that share its store."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import trio

from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    NotOwnerError,
    ProtocolError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.links.link import LinkPool
from dep2p.protocols.queues.admin import AdminRequest, R, ReadFailoverGroup
from dep2p.protocols.queues.failover_group import FailoverGroup
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.admin import decode_answer, encode_admin
from dep2p.protocols.wire.frame import encode_frame
from dep2p.queues.remote.link import LinkAnswer, QueueLink
from dep2p.types import PeerId, parse_peer_id

logger: logging.Logger = logging.getLogger("dep2p.queues")

_WATCH_S: Final = 2.0
"""Seconds between two questions to the owner of a failover group whether it still is the broker."""
_ANSWER_S: Final = 3.0
"""An owner that does not answer within this time: ask the others."""
_LINK_S: Final = 5.0
"""The time for a link to one of several nodes; then another one is tried."""
_USED_S: Final = 60.0
"""A member that this node has not asked for so long is not watched."""
_ROUTES_MAX: Final = 4_096
_PAUSE_MIN_S: Final = 0.05


class BrokerRoute:
    """The route to the queues of one member, under the name that the user gave."""

    def __init__(
        self,
        pool: LinkPool[QueueLink],
        own: PeerId,
        peer: PeerId,
        counters: Counter[str],
        is_owner: Callable[[], bool],
    ) -> None:
        self.peer = peer
        """The member, as the user named it."""
        self.failover_group: FailoverGroup = FailoverGroup(peer)
        self.used_s: float = float("-inf")
        self.asked: QueueLink | None = None
        """The link over which the other nodes of the group were asked for."""
        self._pool = pool
        self._own = own
        self._counters = counters
        self._is_owner = is_owner

    @property
    def is_here(self) -> bool:
        """Whether this node is in the group, and is the broker of the queues itself now."""
        return self._own in self.failover_group.nodes and self._is_owner()

    @property
    def is_set(self) -> bool:
        """Whether the group has several known nodes."""
        return self.failover_group.is_set

    @property
    def is_shared(self) -> bool:
        """Whether there may be other nodes, now or later."""
        return self.failover_group.is_set or self.failover_group.term > 0

    @property
    def at(self) -> PeerId:
        """The node to ask now."""
        return PeerId(self.failover_group.at(trio.current_time()))

    @property
    def pause_s(self) -> float:
        """Seconds before another try makes sense."""
        return max(_PAUSE_MIN_S, self.failover_group.pause_s(trio.current_time())) if self.is_set else 0.0

    async def get(self, deadline_s: float) -> QueueLink:
        """Return a link to the node to ask. Raises what `LinkPool.get` raises, and NotOwnerError when it is this node
        itself."""
        self.used_s = trio.current_time()
        if self.is_here:
            raise NotOwnerError("this node is the broker of these queues itself now: ask for its own", self._own)
        if self.at == self._own:  # it is on standby
            self.failover_group.failed(self._own, trio.current_time())
        peer = self.at
        if peer == self._own:
            raise StreamClosedError("the other nodes that share the store cannot be reached just now")
        if self.is_set:
            deadline_s = min(deadline_s, trio.current_time() + _LINK_S)
        try:
            return await self._pool.get(peer, deadline_s)
        except Dep2pError:
            self.failover_group.failed(peer, trio.current_time())
            raise

    def refused(self, link: QueueLink, error: NotOwnerError) -> None:
        """Note that the node at a link is not the owner."""
        self._counters["redirects"] += 1
        self.failover_group.refused(link.peer, error.owner, error.term, _known(error.nodes), trio.current_time())

    async def request(self, frame: Callable[[int], bytes], timeout_s: float) -> LinkAnswer:
        """Ask the owner. While there is none, or it cannot be reached, and the group has other nodes, try again until
        the time is over. A request that was sent to an owner is not sent again."""
        deadline_s = trio.current_time() + timeout_s
        while True:
            answer = LinkAnswer()
            try:
                link = await self.get(deadline_s)
            except Dep2pError as error:
                answer.error = error
            else:
                answer = await exchange(link, frame, deadline_s, timeout_s)
                if isinstance(answer.error, NotOwnerError):
                    self.refused(link, answer.error)
                else:
                    self.failover_group.worked(link.peer)
                    return answer
            if not self.is_set or self.is_here or trio.current_time() + self.pause_s >= deadline_s:
                raise answer.error
            await trio.sleep(self.pause_s)


class BrokerDirectory:
    """The routes to all members whose queues are used here."""

    def __init__(
        self, pool: LinkPool[QueueLink], own: PeerId, counters: Counter[str], is_owner: Callable[[], bool]
    ) -> None:
        """``is_owner``: whether this node is the broker of queues that it shares with others."""
        self._pool = pool
        self._own = own
        self._counters = counters
        self._is_owner = is_owner
        self._broker_directory: dict[PeerId, BrokerRoute] = {}
        self._wake = trio.Event()

    def to(self, peer: PeerId) -> BrokerRoute:
        """Return the route to the member of that name."""
        broker_route = self._broker_directory.get(peer)
        if broker_route is None:
            if len(self._broker_directory) >= _ROUTES_MAX:
                del self._broker_directory[next(iter(self._broker_directory))]
            broker_route = self._broker_directory[peer] = BrokerRoute(
                self._pool, self._own, peer, self._counters, self._is_owner
            )
        return broker_route

    def linked(self) -> None:
        """Look at the routes: there is a new link."""
        self._wake.set()

    async def run(self) -> None:
        """Keep the brokers of queues in use up to date, until cancelled."""
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            used = [
                broker_route for broker_route in self._broker_directory.values() if now - broker_route.used_s < _USED_S
            ]
            async with trio.open_nursery() as nursery:
                for broker_route in used:
                    link = self._pool.ready(broker_route.at) if broker_route.at != self._own else None
                    if broker_route.is_shared or (link is not None and broker_route.asked is not link):
                        nursery.start_soon(self._watch, broker_route, link)
            with trio.move_on_after(_WATCH_S if any(broker_route.is_shared for broker_route in used) else float("inf")):
                await self._wake.wait()

    async def _watch(self, broker_route: BrokerRoute, link: QueueLink | None) -> None:
        is_owner, is_unsure = False, True
        if link is not None:
            broker_route.asked = link
            is_owner, is_unsure = await self._ask(broker_route, link)
        if not broker_route.is_set or is_owner:
            return
        # Nodes on standby know the owner from the store, even when the owner hangs.
        async with trio.open_nursery() as nursery:
            for node in broker_route.failover_group.nodes:
                if node != self._own and (link is None or node != link.peer):
                    nursery.start_soon(self._ask_other, broker_route, PeerId(node))
        owner = broker_route.failover_group.owner
        if link is not None and link.error is None and is_unsure and owner not in ("", link.peer):
            logger.warning("the node %s is the broker of the queues that %s kept; members go there", owner, link.peer)
            self._counters["brokers_replaced"] += 1
            # Requests that wait for answers go to the new owner, with the same numbers.
            link.end(
                StreamClosedError(f"the node {owner} is the broker of the queues that {link.peer} kept"), abort=True
            )

    async def _ask_other(self, broker_route: BrokerRoute, node: PeerId) -> None:
        try:
            link = await self._pool.get(node, trio.current_time() + _ANSWER_S)
        except Dep2pError:
            return
        await self._ask(broker_route, link)

    async def _ask(self, broker_route: BrokerRoute, link: QueueLink) -> tuple[bool, bool]:
        """Ask a node. Return whether it is the owner, or of no group; and whether it does not know the owner, or does
        not answer."""
        request = ReadFailoverGroup()
        payload = encode_admin(request)

        def frame(req_id: int) -> bytes:
            return encode_frame(wire.ADMIN, payload, req_id=req_id)

        try:
            deadline_s = trio.current_time() + _ANSWER_S
            found = reply_of(request, await exchange(link, frame, deadline_s, _ANSWER_S))
        except RequestTimeoutError:
            if broker_route.is_set:
                broker_route.failover_group.failed(link.peer, trio.current_time())
            return False, True
        except Dep2pError:
            return not broker_route.is_set, False  # its version has no failover groups, or the link is over
        known = _known(found.nodes)
        broker_route.failover_group.notified(found.owner if found.owner in known else "", found.term, known)
        return found.owner == link.peer or not known, bool(known) and not found.owner


def _known(nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the texts that are peer ids."""
    found: list[str] = []
    for node in nodes:
        try:
            found.append(parse_peer_id(node))
        except ValueError:
            continue
    return tuple(found)


async def exchange(link: QueueLink, frame: Callable[[int], bytes], deadline_s: float, timeout_s: float) -> LinkAnswer:
    """Send one request over a link and return its answer. Raises RequestTimeoutError, StreamClosedError."""
    req_id = link.new_id()
    answered = trio.Event()
    answers: list[LinkAnswer] = []

    def on_answer(answer: LinkAnswer) -> None:
        answers.append(answer)
        answered.set()

    link.expect(req_id, on_answer)
    try:
        with trio.move_on_at(deadline_s) as scope:
            await link.send(frame(req_id))
            await answered.wait()
    finally:
        link.forget(req_id)
    if scope.cancelled_caught:
        raise RequestTimeoutError(f"{link.peer} did not answer within {timeout_s:g} s")
    return answers[0]


def reply_of(request: AdminRequest[R], answer: LinkAnswer) -> R:
    """Decode the reply of an ANSWER to a request. Raises the refusal, ProtocolError."""
    if answer.error is not None:
        raise answer.error
    if answer.type != wire.ANSWER:
        raise ProtocolError(f"a frame of type 0x{answer.type:02x} answers a request", ErrorCode.INVALID_REQUEST)
    return decode_answer(request, answer.payload)
