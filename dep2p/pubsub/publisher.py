"""Own publishes: their waits, and their results."""

import logging
from collections import Counter
from dataclasses import replace
from typing import Final, Literal, Protocol

import trio

from dep2p.arguments import as_bytes
from dep2p.errors import NoPeersSubscribedError, RateLimitedError
from dep2p.gossipsub.effects import Effect, PublishAccepted
from dep2p.gossipsub.events import Publish
from dep2p.gossipsub.headers import NO_HEADERS, MessageHeaders
from dep2p.gossipsub.params import RPC_OVERHEAD_BYTES, GossipParams
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import RpcMessage
from dep2p.gossipsub.topic_types import OnNoPeers, PublishResult
from dep2p.limits import Limits
from dep2p.pubsub.peer_links import PubSubLinks
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_YIELD_BYTES: Final = 65_536
"""Queued bytes after which a task that only publishes lets the writers run."""
_SPACE_CHECK_S: Final = 0.25
_SAY_AGAIN_S: Final = 60.0
_STALLED_S: Final = 10.0
"""Seconds. A peer that took no byte for so long while others wait for it is slow, even if it is the only one."""
_IF_NO_PEERS: Final[dict[str, Literal["error", "queue", "ignore"]]] = {
    "error": "error",
    "queue": "queue",
    "ok": "ignore",
}


class Performer(Protocol):
    """The pub/sub that publishes."""

    def perform(self, effects: list[Effect], now: float) -> None: ...

    def has_local_readers(self, topic: str, origin: object | None) -> bool: ...

    def deliver_local(self, message: RpcMessage, origin: object | None) -> int:
        """Give a publish to subscriptions of this node; return their number."""
        ...

    def schedule_deadline(self) -> None: ...


class Publishing:
    """Publishes messages of this node."""

    def __init__(
        self,
        performer: Performer,
        router: Router,
        links: PubSubLinks,
        limits: Limits,
        params: GossipParams,
        counters: Counter[str],
    ) -> None:
        self._performer = performer
        self._router = router
        self._links = links
        self._limits = limits
        self._params = params
        self._counters = counters
        self._room = trio.Event()
        self._say_again_s = float("-inf")
        self.published: PublishAccepted | None = None
        """The router's result of the publish that is being performed; the performer sets it."""
        self.dropping: dict[PeerId, None] | None = None
        """While a publish is performed: peers whose queues refused it."""

    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        origin: object | None = None,
        headers: MessageHeaders = NO_HEADERS,
    ) -> PublishResult:
        """See :meth:`dep2p.pubsub.topic.Topic.publish`; the topic need not be joined.

        ``origin``: the handle that publishes, whose own subscriptions do not get it.
        """
        if type(body) is not bytes:
            body = as_bytes(body, "the message")
        try:
            if_no_peers = _IF_NO_PEERS[on_no_peers]
        except (KeyError, TypeError):
            raise ValueError(f'on_no_peers is {on_no_peers!r}: it must be "error", "queue" or "ok"') from None
        if wait and self._links.pressed:
            await self._wait_for_space(topic, len(body) + headers.size_bytes)
        event = Publish(topic, body, 0, if_no_peers, headers)
        while True:
            now = trio.current_time()
            try:
                effects = self._router.handle(event, now)
                break
            except RateLimitedError as error:
                if not wait:
                    self._counters["publishes_refused_rate"] += 1
                    raise
                self._counters["publishes_delayed_rate"] += 1
                self._say_held_back(now)
                await trio.sleep(error.retry_after_ms / 1000)
            except NoPeersSubscribedError:
                if self._performer.has_local_readers(topic, origin):
                    event = replace(event, if_no_peers="ignore")
                    continue
                self._counters["publishes_refused_no_peers"] += 1
                raise
        self.published = None
        self.dropping = dropping = dict[PeerId, None]()
        self._performer.perform(effects, now)
        self.dropping = None
        published: PublishAccepted | None = self.published
        assert published is not None  # the router either refuses a publish or performs it
        local = self._performer.deliver_local(published.message, origin)
        if published.queued:
            self._performer.schedule_deadline()
        sent_to = published.peers if not dropping else tuple(p for p in published.peers if p not in dropping)
        if self._links.bytes_since_yield >= _YIELD_BYTES:
            self._links.bytes_since_yield = 0
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        seqno = published.message.seqno
        return PublishResult(
            published.message.id,
            sent_to,
            published.queued,
            tuple(dropping),
            int.from_bytes(seqno, "big") if seqno else None,
            local,
        )

    def _say_held_back(self, now: float) -> None:
        """Log once in a while that publishes are held back, for users of a long publish that is slow."""
        if now >= self._say_again_s:
            self._say_again_s = now + _SAY_AGAIN_S
            logger.info(
                "publishes are held to %g a second: pubsub_publish_per_s in [limits] raises that",
                self._params.publish_rate_per_s,
            )

    async def _wait_for_space(self, topic: str, size: int) -> None:
        """Wait until every peer that would get the message has room, except peers that are too slow."""
        counted = False
        while self._links.is_running and self._blocking(topic, size + RPC_OVERHEAD_BYTES):
            if not counted:
                counted = True
                self._counters["publishes_delayed_full_queue"] += 1
            if self._room.is_set():
                self._room = trio.Event()
            with trio.move_on_after(_SPACE_CHECK_S):
                await self._room.wait()

    def _blocking(self, topic: str, size: int) -> bool:
        targets = self._router.mesh(topic)
        if len(targets) < self._params.d_lo:
            targets = self._router.peers(topic)
        now = trio.current_time()
        waiting = False
        for peer in targets:
            queue = self._links.queue_of(peer)
            if queue is None or queue.is_slow or queue.fits(size):
                continue
            if queue.full_since_s is None:
                queue.full_since_s = now
            is_stalled = now - queue.progress_s > _STALLED_S and now - queue.full_since_s > _STALLED_S
            if is_stalled or (
                now - queue.full_since_s > self._limits.pubsub_slow_peer_s
                and any(
                    other is not None and not other.is_slow and not other.items
                    for other in map(self._links.queue_of, targets)
                )
            ):
                queue.is_slow = True
                self._counters["peers_found_slow"] += 1
                logger.info("%s takes messages too slowly: publishes do not wait for it any more", peer)
                continue
            waiting = True
        return waiting

    def space_found(self) -> None:
        """Wake waiting publishes: a queue has shrunk."""
        self._room.set()
