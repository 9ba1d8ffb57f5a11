"""Messaging of one joined realm: request, notify, stream, broadcast, and the handlers of all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from dep2p.arguments import checks_arguments, unchecked
from dep2p.concurrency.contained import run_contained
from dep2p.concurrency.deadlines import DeadlineTimer
from dep2p.errors import Dep2pError, RequestTimeoutError
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import HANDLER_CONCURRENCY, Limits
from dep2p.links.fairness import Fairness
from dep2p.links.link import LinkPool
from dep2p.messaging.broadcast import to_each
from dep2p.messaging.caller import Caller, OutboundLink
from dep2p.messaging.context import MessageCall, MessagingContext
from dep2p.messaging.handlers import (
    NotifyEntry,
    NotifyHandler,
    Registry,
    RequestHandler,
    StreamHandler,
)
from dep2p.messaging.message_stream import MessageStream
from dep2p.messaging.offered_services import OfferedService, OfferedServices, ServiceHandler
from dep2p.messaging.responder import InboundLink
from dep2p.messaging.stream_service import StreamService
from dep2p.messaging.trace_events import TracedCall, outcome_of, trace_notify, trace_request
from dep2p.messaging.worker_pool import Workers
from dep2p.protocols.messaging.admission import PeerLoad
from dep2p.protocols.messaging.incoming import Notification, Request
from dep2p.protocols.wire.payload import check_name
from dep2p.realm.interface import RealmGate
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId, Rng

__all__ = [
    "MessageStream",
    "Messaging",
    "MessagingPeerStats",
    "Notification",
    "NotifyHandler",
    "Request",
    "RequestHandler",
    "StreamHandler",
    "message_protocol",
]

logger: logging.Logger = logging.getLogger("dep2p.io")

_INBOUND_LINKS_PER_PEER_MAX: Final = 4
"""A peer needs one; more appear for a moment when it reconnects."""


def message_protocol(realm_id: RealmId) -> str:
    """The libp2p protocol id of requests and notifies."""
    return f"/dep2p/app/{realm_id}/msg/1.0.0"


@dataclass(frozen=True, slots=True)
class MessagingPeerStats:
    """One peer's share of messaging at this moment."""

    peer: PeerId
    links_out: int
    links_in: int
    requests_out: int
    """Requests of ours that wait for this peer's answer."""
    requests_in: int
    """Requests of this peer at work here."""
    queued_out_items: int
    queued_out_bytes: int
    queued_in_items: int
    """Notifies of this peer that wait for their handlers."""
    queued_in_bytes: int


@checks_arguments
class Messaging:
    """The app messages of one realm. Everything but `run` may be called while `run` runs in another task."""

    def __init__(
        self,
        host: Host,
        gate: RealmGate,
        realm_id: RealmId,
        limits: Limits,
        *,
        rng: Rng,
        fairness: Fairness | None = None,
    ) -> None:
        """``fairness``: that of the node, which all its realms share."""
        self._host = host
        self._gate = gate
        self._limits = limits
        self._protocol = message_protocol(realm_id)
        self._timer = DeadlineTimer(self._on_time)
        self.fairness: Fairness = fairness or Fairness()
        self._context = context = MessagingContext(gate, limits, self._timer, self.fairness)
        self._counters = context.counters
        self._registry = Registry()
        self.offered: OfferedServices = OfferedServices(self._registry)
        """The services that this node offers in the realm."""
        self._workers = Workers()
        self._pool: LinkPool[OutboundLink] = LinkPool(gate, self._protocol, limits, self._counters, self._outbound_link)
        self._caller = Caller(self._pool, context, rng)
        self._inbound: dict[InboundLink, None] = {}
        self._loads: dict[PeerId, PeerLoad] = {}
        self._streams = StreamService(context, realm_id, self._registry, self._load)
        self._nursery: trio.Nursery | None = None
        self._idle_check_at = float("inf")
        self._is_draining = False
        self._trace_log: TraceLog | None = None

    def trace_to(self, log: TraceLog | None) -> None:
        """Write events to this trace from now on; None ends that."""
        self._trace_log = self._streams.trace_log = log
        for link in self._inbound:
            link.trace_log = log

    @property
    def realm_id(self) -> RealmId:
        """The realm whose members it talks to."""
        return self._gate.realm_id

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. ``task_status.started`` is called when peers can reach the handlers."""
        unsubscribe = self._gate.subscribe_unverified(self._on_unverified)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._pool.serve_in(nursery)
                self._workers.serve_in(nursery)
                self._streams.serve_in(nursery)
                self._host.set_stream_handler(self._protocol, self._accept_link)
                self._host.set_stream_handler(self._streams.protocol, self._accept_stream)
                if self._limits.link_idle_timeout_s > 0:
                    self._idle_check_at = trio.current_time() + self._limits.link_idle_timeout_s
                    self._timer.schedule(self._idle_check_at)
                task_status.started()
                await self._timer.run()
        finally:
            self._nursery = None
            self._pool.serve_in(None)
            self._streams.serve_in(None)
            unsubscribe()
            self._host.remove_stream_handler(self._protocol)
            self._host.remove_stream_handler(self._streams.protocol)
            for stream in self._streams.streams:
                stream.reset()

    def _on_time(self, now: float) -> float:
        following = self._idle_check_at
        if now >= following:
            self._pool.close_idle()
            following = self._idle_check_at = now + self._limits.link_idle_timeout_s
        parts: list[OutboundLink | InboundLink | MessageStream] = [
            *self._pool.links.values(),
            *self._inbound,
            *self._streams.streams,
        ]
        for part in parts:
            part.on_deadline(now)
            deadline = part.next_deadline()
            if deadline is not None:
                following = min(following, deadline)
        return following

    def _on_unverified(self, connection: Connection) -> None:
        for link in [*self._pool.links.values(), *self._inbound]:
            if link.connection.id == connection.id:
                link.lose_membership()
        for stream in self._streams.streams:
            if stream.is_on(connection):
                stream.lose_membership()

    async def drain(self) -> None:
        """Refuse new inbound work from now on (OVERLOADED), and wait for work in flight and for sent messages.

        Waits at most ``Limits.drain_timeout_s``; the rest is counted as ``drain_abandoned``.
        """
        self._is_draining = self._streams.is_draining = True
        for inbound in self._inbound:
            inbound.drain()
        try:
            with trio.move_on_after(self._limits.drain_timeout_s):
                while self._work_left():  # noqa: ASYNC110  (many parts end work, and this happens once in a life)
                    await trio.sleep(0.02)
                for link in [*self._inbound, *self._pool.links.values()]:
                    await link.flush()
        finally:  # also when the caller has the same timeout, and cancels this first
            self._counters["drain_abandoned"] += self._work_left()

    def _work_left(self) -> int:
        jobs = sum(load.jobs + load.streams for load in self._loads.values())
        return jobs + self._streams.lingering + sum(link.notifies_pending for link in self._inbound)

    # Links

    def _outbound_link(self, stream: ByteStream) -> OutboundLink:
        return OutboundLink(stream, self._context)

    async def _accept_link(self, stream: ByteStream) -> None:
        if self._nursery is None:
            stream.reset()
            return
        # In our own nursery: received messages are still handled when the connection is gone.
        self._nursery.start_soon(run_contained, partial(self._serve_link, stream), "a served link")

    async def _accept_stream(self, stream: ByteStream) -> None:
        if self._nursery is None:
            stream.reset()
            return
        self._nursery.start_soon(run_contained, partial(self._streams.serve, stream), "a served stream")

    async def _serve_link(self, stream: ByteStream) -> None:
        load = self._load(stream.connection.peer)
        if load.links >= _INBOUND_LINKS_PER_PEER_MAX:
            self._counters["links_refused_per_peer_max"] += 1
            stream.reset()
            return
        load.links += 1
        link: InboundLink | None = None
        try:
            async with trio.open_nursery() as nursery:
                link = InboundLink(
                    stream,
                    self._context,
                    registry=self._registry,
                    workers=self._workers,
                    load=load,
                    nursery=nursery,
                )
                self._inbound[link] = None
                link.trace_log = self._trace_log
                if self._is_draining:
                    link.drain()
                if self._gate.is_verified(stream.connection):
                    link.start()
                else:
                    link.lose_membership()
                await link.run()
        finally:
            load.links -= 1
            if link is not None:
                self._inbound.pop(link, None)

    def _load(self, peer: PeerId) -> PeerLoad:
        load = self._loads.get(peer)
        if load is None:
            if len(self._loads) >= self._limits.peers_known_max:
                for idle in [known for known, its in self._loads.items() if its.is_idle]:
                    del self._loads[idle]
            load = self._loads[peer] = PeerLoad(self._limits, peer, self.fairness.ledger)
        return load

    # Handlers

    def on_request(
        self,
        name: str,
        handler: RequestHandler,
        *,
        concurrency: int = HANDLER_CONCURRENCY,
        rate_per_s: float = 0.0,
        waiting_max: int = 1024,
        service: OfferedService | None = None,
    ) -> Callable[[], None]:
        """Answer requests ``name`` by ``handler``; returns a function that ends it.

        ``concurrency``: how many run at a time, all peers together, of which one peer may have seven eighths; up to
        ``waiting_max`` more of each peer wait, in turns; further ones get OVERLOADED. ``rate_per_s``: requests of one
        peer per second, 0 for no limit; those over it get RATE_LIMITED. The handler is cancelled when the caller gave
        up, its deadline passed or its link ended. Raises ``ValueError`` when the name is taken or a value is wrong.

        ``service``: offer it to all members; other handlers of this node that say the same share the requests.
        """
        if service is not None:
            return self.offered.add(service, ServiceHandler(handler, concurrency, rate_per_s, waiting_max))
        return self._registry.on_request(
            name, handler, concurrency=concurrency, rate_per_s=rate_per_s, waiting_max=waiting_max
        )

    def on_notify(
        self, name: str, handler: NotifyHandler, *, concurrency: int = 64, rate_per_s: float = 0.0
    ) -> Callable[[], None]:
        """Handle notifies ``name`` by ``handler``; returns a function that ends it.

        One peer's notifies are handled one after the other in the order sent; ``concurrency`` counts across peers.
        A peer over ``rate_per_s`` is slowed down, and so is one whose queue here is full; nothing is dropped for it.
        Raises ``ValueError`` when the name is taken or a value is wrong.
        """
        return self._registry.on_notify(name, handler, concurrency=concurrency, rate_per_s=rate_per_s)

    def on_stream(
        self, name: str, handler: StreamHandler, *, concurrency: int = HANDLER_CONCURRENCY, rate_per_s: float = 0.0
    ) -> Callable[[], None]:
        """Serve streams ``name`` by ``handler``; returns a function that ends it.

        The stream ends when the handler returns; an exception aborts it, and the opener gets HandlerError, with its
        text only when it is a HandlerError. Above ``concurrency`` open streams of this name, openers get OVERLOADED;
        a peer that opens more than ``rate_per_s`` of them gets RATE_LIMITED. A handler that does not notice the
        stream's early end is cancelled after ``Limits.close_timeout_s``. Raises ``ValueError`` as the others do.
        """
        return self._registry.on_stream(name, handler, concurrency=concurrency, rate_per_s=rate_per_s)

    @property
    def notify_entries(self) -> Mapping[str, NotifyEntry]:
        """The handlers of notifies by name, for messages that come another way; it changes as they come and go."""
        return self._registry.notifies

    def watch_notify_handlers(self, on_added: Callable[[str], None]) -> Callable[[], None]:
        """Call ``on_added`` with the name of each handler of notifies that comes; return a function that ends it."""
        return self._registry.watch_notifies(on_added)

    # Verbs

    @unchecked
    async def request(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
        headers: Mapping[str, object] | None = None,
    ) -> bytes:
        """Ask ``peer`` and wait for its answer.

        ``timeout_s`` (``Limits.request_timeout_s`` by default; ``math.inf`` for no limit) bounds the whole call:
        finding the peer, and all tries. Only an ``idempotent`` request is tried again: after TIMEOUT, OVERLOADED,
        RATE_LIMITED or a lost link.
        Cancelling the call cancels the handler on the other side.

        Raises the :class:`~dep2p.errors.WireError` that the peer answered, RequestTimeoutError, StreamClosedError
        (the link ended; the request may or may not have been handled), PeerNotFoundError, NotMemberError,
        ProtocolNotSupportedError, MessageTooLargeError (nothing was sent), or ``ValueError`` for bad headers.
        """
        return await self._request(peer, MessageCall(name, body, timeout_s, idempotent, headers))

    async def request_once(self, peer: PeerId, call: MessageCall) -> bytes:
        """As `request`, for a caller that tries again itself: ``call`` says so."""
        return await self._request(peer, call)

    def _request(self, peer: PeerId, call: MessageCall) -> Coroutine[object, object, bytes]:
        log = self._trace_log
        return self._caller.request(peer, call) if log is None else self._traced_request(log, peer, call)

    async def _traced_request(self, log: TraceLog, peer: PeerId, call: MessageCall) -> bytes:
        began, outcome, reply_size = trio.current_time(), "ok", None
        try:
            reply = await self._caller.request(peer, call)
            reply_size = len(reply)
            return reply
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            traced = TracedCall(peer, call.name, "out", len(call.body))
            trace_request(log, traced, outcome, trio.current_time() - began, reply_size)

    @unchecked
    async def notify(
        self, peer: PeerId, name: str, body: bytes, *, headers: Mapping[str, object] | None = None
    ) -> None:
        """Send a message that is not answered. Notifies to one peer arrive in the order of the calls, or not at all.

        Returns when the message is in the bounded buffer of the link; waits while that is full. Raises
        PeerNotFoundError, NotMemberError, ProtocolNotSupportedError, StreamClosedError, RequestTimeoutError (no link
        within ``Limits.request_timeout_s``), MessageTooLargeError or ``ValueError``; nothing was sent then.
        """
        await self._caller.notify(peer, name, body, headers)
        if self._trace_log is not None:
            trace_notify(self._trace_log, TracedCall(peer, name, "out", len(body)), "ok")

    def stream(
        self, peer: PeerId, name: str, body: bytes = b"", *, headers: Mapping[str, object] | None = None
    ) -> AbstractAsyncContextManager[MessageStream]:
        """Open a stream of items both ways, with ``body`` as the first word: ``async with … as stream``.

        Entering waits until the peer's handler takes it, and raises what `request` raises. Leaving the block ends
        this side, waits a moment for the peer's end (see `MessageStream.aclose`), and raises the error by which it
        aborted the stream if no other call has; leaving it by an exception resets the stream.
        """
        return self._streams.stream(peer, name, body, headers)

    async def broadcast_request(
        self,
        peers: Iterable[PeerId],
        name: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
        concurrency: int = 16,
        headers: Mapping[str, object] | None = None,
    ) -> dict[PeerId, bytes | Dep2pError]:
        """Send a `request` to each peer, at most ``concurrency`` at a time; return each one's answer or error, in their
        order."""
        check_name(name)
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}: it cannot be negative")

        call = MessageCall(name, body, timeout_s, idempotent, headers)
        return await to_each(peers, lambda peer: self._request(peer, call), concurrency)

    async def broadcast_notify(
        self,
        peers: Iterable[PeerId],
        name: str,
        body: bytes,
        *,
        concurrency: int = 16,
        headers: Mapping[str, object] | None = None,
    ) -> dict[PeerId, Dep2pError | None]:
        """Send a `notify` to each peer; return None or the error of each, in their order.

        A peer whose link stays full for ``Limits.request_timeout_s`` has RequestTimeoutError: it holds up no other.
        """

        check_name(name)

        async def one(peer: PeerId) -> None:
            with trio.move_on_after(self._limits.request_timeout_s):
                await self.notify(peer, name, body, headers=headers)
                return
            raise RequestTimeoutError(f"{peer} takes no notifies at present")

        return await to_each(peers, one, concurrency)

    # Watching

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name; each drop and refusal has its reason in its name."""
        for link in [*self._pool.links.values(), *self._inbound]:
            link.collect_counts()
        return dict(self._counters)

    def stats(self) -> list[MessagingPeerStats]:
        """Return for each peer with a link the counts in flight and queued at this moment."""
        out = dict(self._pool.links)
        into: dict[PeerId, list[InboundLink]] = {}
        for link in self._inbound:
            into.setdefault(link.peer, []).append(link)
        return [_peer_stats(peer, out.get(peer), into.get(peer, []), self._loads.get(peer)) for peer in {**out, **into}]


def _peer_stats(
    peer: PeerId, out: OutboundLink | None, into: list[InboundLink], load: PeerLoad | None
) -> MessagingPeerStats:
    outputs = [link.out for link in into] + ([out.out] if out is not None else [])
    return MessagingPeerStats(
        peer=peer,
        links_out=int(out is not None),
        links_in=len(into),
        requests_out=out.requester.in_flight if out is not None else 0,
        requests_in=load.jobs if load is not None else 0,
        queued_out_items=sum(output.items for output in outputs),
        queued_out_bytes=sum(output.waiting_bytes for output in outputs),
        queued_in_items=sum(len(link.inbox) for link in into),
        queued_in_bytes=sum(link.inbox.queued_bytes for link in into),
    )
