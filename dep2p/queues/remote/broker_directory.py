"""The way to another member's queues: a link to whichever of the nodes that share its store keeps them now."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

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
from dep2p.protocols.queues import wire
from dep2p.protocols.queues.failover_group import Keepers
from dep2p.protocols.wire.frame import encode_frame
from dep2p.queues.remote.link import Answer, QueueLink
from dep2p.types import PeerId, parse_peer_id

logger = logging.getLogger("dep2p.queues")

_WATCH_S: Final = 2.0
"""So often the owner of a set is asked whether it still is."""
_ANSWER_S: Final = 3.0
"""One that does not answer for so long: the others are asked."""
_LINK_S: Final = 5.0
"""For a link to one of several nodes; then another one is tried."""
_USED_S: Final = 60.0
"""Who was not asked for anything for so long is not watched."""
_WAYS_MAX: Final = 4_096
_PAUSE_MIN_S: Final = 0.05


class Way:
    """To the queues of one member, named by it."""

    def __init__(
        self,
        pool: LinkPool[QueueLink],
        own: PeerId,
        peer: PeerId,
        counters: Counter[str],
        keeps: Callable[[], bool],
    ) -> None:
        self.peer = peer
        """As it was named."""
        self.keepers = Keepers(peer)
        self.used_s = float("-inf")
        self.asked: QueueLink | None = None
        """The link over which it was asked who else is there."""
        self._pool = pool
        self._own = own
        self._counters = counters
        self._keeps = keeps

    @property
    def is_here(self) -> bool:
        """Whether this node, one of them, keeps the queues itself now."""
        return self._own in self.keepers.nodes and self._keeps()

    @property
    def is_set(self) -> bool:
        """Whether there are several nodes."""
        return self.keepers.is_set

    @property
    def is_shared(self) -> bool:
        """Whether there may be others, now or later."""
        return self.keepers.is_set or self.keepers.epoch > 0

    @property
    def at(self) -> PeerId:
        """Who is asked now."""
        return PeerId(self.keepers.at(trio.current_time()))

    @property
    def pause_s(self) -> float:
        """Before another try makes sense."""
        return max(_PAUSE_MIN_S, self.keepers.pause_s(trio.current_time())) if self.is_set else 0.0

    async def get(self, deadline_s: float) -> QueueLink:
        """A link to that one. Raises what `LinkPool.get` raises, and NotOwnerError when it is this node itself."""
        self.used_s = trio.current_time()
        if self.is_here:
            raise NotOwnerError("this node keeps these queues itself now: ask for its own", self._own)
        if self.at == self._own:  # it stands by
            self.keepers.failed(self._own, trio.current_time())
        peer = self.at
        if peer == self._own:
            raise StreamClosedError("the other nodes that share the store cannot be reached just now")
        if self.is_set:
            deadline_s = min(deadline_s, trio.current_time() + _LINK_S)
        try:
            return await self._pool.get(peer, deadline_s)
        except Dep2pError:
            self.keepers.failed(peer, trio.current_time())
            raise

    def refused(self, link: QueueLink, error: NotOwnerError) -> None:
        """The node at that link is not the owner."""
        self._counters["redirects"] += 1
        self.keepers.refused(link.peer, error.owner, error.epoch, _known(error.nodes), trio.current_time())

    async def request(self, frame: Callable[[int], bytes], timeout_s: float) -> Answer:
        """Ask the owner. While nobody is, or it cannot be reached, and there are others, it is tried again until the
        time is over; what was sent to an owner is not sent again."""
        deadline_s = trio.current_time() + timeout_s
        while True:
            answer = Answer()
            try:
                link = await self.get(deadline_s)
            except Dep2pError as error:
                answer.error = error
            else:
                answer = await exchange(link, frame, deadline_s, timeout_s)
                if isinstance(answer.error, NotOwnerError):
                    self.refused(link, answer.error)
                else:
                    self.keepers.worked(link.peer)
                    return answer
            if not self.is_set or self.is_here or trio.current_time() + self.pause_s >= deadline_s:
                raise answer.error
            await trio.sleep(self.pause_s)


class Ways:
    """To all members whose queues are used here."""

    def __init__(
        self, pool: LinkPool[QueueLink], own: PeerId, counters: Counter[str], keeps: Callable[[], bool]
    ) -> None:
        """``keeps``: whether this node keeps queues that it shares with others."""
        self._pool = pool
        self._own = own
        self._counters = counters
        self._keeps = keeps
        self._ways: dict[PeerId, Way] = {}
        self._wake = trio.Event()

    def to(self, peer: PeerId) -> Way:
        """The one that is named so."""
        way = self._ways.get(peer)
        if way is None:
            if len(self._ways) >= _WAYS_MAX:
                del self._ways[next(iter(self._ways))]
            way = self._ways[peer] = Way(self._pool, self._own, peer, self._counters, self._keeps)
        return way

    def linked(self) -> None:
        """There is a new link."""
        self._wake.set()

    async def run(self) -> None:
        """Know who keeps the queues that are in use, until cancelled."""
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            used = [way for way in self._ways.values() if now - way.used_s < _USED_S]
            async with trio.open_nursery() as nursery:
                for way in used:
                    link = self._pool.ready(way.at) if way.at != self._own else None
                    if way.is_shared or (link is not None and way.asked is not link):
                        nursery.start_soon(self._watch, way, link)
            with trio.move_on_after(_WATCH_S if any(way.is_shared for way in used) else float("inf")):
                await self._wake.wait()

    async def _watch(self, way: Way, link: QueueLink | None) -> None:
        is_owner, is_unsure = False, True
        if link is not None:
            way.asked = link
            is_owner, is_unsure = await self._ask(way, link)
        if not way.is_set or is_owner:
            return
        # Those who stand by know it from the store, whatever the owner is about.
        async with trio.open_nursery() as nursery:
            for node in way.keepers.nodes:
                if node != self._own and (link is None or node != link.peer):
                    nursery.start_soon(self._ask_other, way, PeerId(node))
        owner = way.keepers.owner
        if link is not None and link.error is None and is_unsure and owner not in ("", link.peer):
            logger.warning("the node %s keeps the queues that %s kept; members go there", owner, link.peer)
            self._counters["keepers_left"] += 1
            # What waits for its answer goes to the new one, with the same numbers.
            link.end(StreamClosedError(f"the node {owner} keeps the queues that {link.peer} kept"), abort=True)

    async def _ask_other(self, way: Way, node: PeerId) -> None:
        try:
            link = await self._pool.get(node, trio.current_time() + _ANSWER_S)
        except Dep2pError:
            return
        await self._ask(way, link)

    async def _ask(self, way: Way, link: QueueLink) -> tuple[bool, bool]:
        """Whether it is the owner, or of no set; and whether it does not know who is, or does not answer."""
        payload = json.dumps({"op": "keepers"}).encode()

        def frame(req_id: int) -> bytes:
            return encode_frame(wire.ADMIN, payload, req_id=req_id)

        try:
            deadline_s = trio.current_time() + _ANSWER_S
            fields = answer_of(await exchange(link, frame, deadline_s, _ANSWER_S))
            owner, epoch, nodes = fields.get("owner"), fields.get("epoch"), fields.get("nodes")
            if not isinstance(owner, str) or not isinstance(epoch, int) or not isinstance(nodes, list):
                raise ProtocolError("the keepers are malformed")
        except RequestTimeoutError:
            if way.is_set:
                way.keepers.failed(link.peer, trio.current_time())
            return False, True
        except Dep2pError:
            return not way.is_set, False  # it is of a version that knows of no such sets, or the link is over
        known = _known([str(each) for each in cast(list[object], nodes)])
        way.keepers.told(owner if owner in known else "", epoch, known)
        return owner == link.peer or not known, bool(known) and not owner


def _known(nodes: Sequence[str]) -> tuple[str, ...]:
    """Those that are peer ids."""
    found: list[str] = []
    for node in nodes:
        try:
            found.append(parse_peer_id(node))
        except ValueError:
            continue
    return tuple(found)


async def exchange(link: QueueLink, frame: Callable[[int], bytes], deadline_s: float, timeout_s: float) -> Answer:
    """One request over that link, and its answer. Raises RequestTimeoutError, StreamClosedError."""
    req_id = link.new_id()
    answered = trio.Event()
    answers: list[Answer] = []

    def on_answer(answer: Answer) -> None:
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


def answer_of(answer: Answer) -> dict[str, Any]:
    """The object of an ANSWER. Raises what refused it, ProtocolError."""
    if answer.error is not None:
        raise answer.error
    try:
        value: object = json.loads(answer.payload)
    except (ValueError, RecursionError):
        value = None
    if answer.type != wire.ANSWER or not isinstance(value, dict):
        raise ProtocolError("the answer is no object", ErrorCode.INVALID_REQUEST)
    return cast(dict[str, Any], value)
