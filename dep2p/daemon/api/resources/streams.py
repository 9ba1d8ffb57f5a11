"""The streams that control clients drive: their senders and receivers, and their end without either."""

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from dep2p.control_api.encoding import encode_headers, encode_line
from dep2p.control_api.replies import StreamLine
from dep2p.daemon.api.resources.exclusive_names import ExclusiveNames
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.lifecycle import Lifecycle
from dep2p.daemon.node_interface import MessagingInterface, NodeInterface, StreamInterface
from dep2p.daemon.problems import Problem
from dep2p.errors import Dep2pError, HandlerError, StreamClosedError
from dep2p.types import Headers, PeerId, RealmId

_REAP_INTERVAL_S = 5.0
_logger = logging.getLogger("dep2p.daemon.control")


class ControlStream:
    """One stream. ``scopes`` are the control calls that are attached to it, by direction."""

    def __init__(self, stream: StreamInterface, realm_id: RealmId) -> None:
        self.id: str = secrets.token_hex(8)
        self.stream = stream
        self.realm_id = realm_id
        self.done: trio.Event = trio.Event()
        self.error: Dep2pError | None = None
        self.scopes: dict[str, trio.CancelScope] = {}
        self.ended: dict[str, None] = {}
        self.unattached_since_s: float = trio.current_time()

    def end_direction(self, direction: str) -> None:
        """End "send" or "receive" in order; when both have ended, the stream is done."""
        self.ended[direction] = None
        if len(self.ended) == 2:
            self.done.set()

    def abort(self, error: Dep2pError) -> None:
        """Reset the stream; the attached calls end with ``error``. Idempotent."""
        if not self.done.is_set():
            self.stream.reset()
            self._finish(error)

    def leave(self, error: Dep2pError) -> None:
        """Act on a client that has left. A whole upload still reaches the peer. A partial one is reset, so that the
        peer does not take it for the whole."""
        if "send" not in self.ended:
            self.abort(error)
        elif not self.done.is_set():
            self._finish(error)  # the stream's owner closes it in good order

    def _finish(self, error: Dep2pError) -> None:
        self.error = error
        self.done.set()
        for scope in list(self.scopes.values()):
            scope.cancel()


@dataclass(slots=True, eq=False)
class StreamOpening:
    """The outcome of opening a stream."""

    decided: trio.Event
    entry: ControlStream | None = None
    error: Exception | None = None
    scope: trio.CancelScope = field(default_factory=lambda: trio.CancelScope())


class StreamTable:
    """All streams of control clients. ``nursery`` runs their owners."""

    def __init__(
        self,
        node: NodeInterface,
        subscriptions: SubscriptionRegistry,
        lifecycle: Lifecycle,
        bounds: ControlBounds,
        counts: Counter[str],
        nursery: trio.Nursery,
    ) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._lifecycle = lifecycle
        self._bounds = bounds
        self._counts = counts
        self._nursery = nursery
        self._entries: dict[str, ControlStream] = {}
        self._accepting = ExclusiveNames("accepts streams")
        self._accepted: Counter[PeerId] = Counter()
        # One peer must not take the slots of other peers, nor those of this node's own programs.
        self._accepted_per_peer_max = max(1, bounds.streams_max // 4)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, stream_id: str) -> ControlStream:
        """Return a stream. Raises :class:`Problem` D6002."""
        entry = self._entries.get(stream_id)
        if entry is None:
            raise Problem("D6002", f"there is no stream {stream_id[:40]!r}")
        return entry

    async def open(
        self, peer: PeerId, name: str, data: bytes, headers: Headers | None, realm: str | None
    ) -> ControlStream:
        """Open a stream to a member. Raises what messaging does, and :class:`Problem` D3008."""
        self._check_room()
        messaging = self._node.messaging(realm)
        opened: StreamOpening = StreamOpening(trio.Event())
        self._nursery.start_soon(partial(self._own, opened, messaging, peer, name, data, headers))
        try:
            await opened.decided.wait()
        except trio.Cancelled:
            opened.scope.cancel()
            raise
        if opened.entry is None:
            raise opened.error or StreamClosedError("the stream ended")
        return opened.entry

    async def _own(
        self,
        opened: "StreamOpening",
        messaging: MessagingInterface,
        peer: PeerId,
        name: str,
        data: bytes,
        headers: Headers | None,
    ) -> None:
        try:
            with opened.scope, self._lifecycle.work():
                async with messaging.stream(peer, name, data, headers=headers) as stream:
                    opened.entry = self._add(stream, messaging.realm_id)
                    opened.decided.set()
                    await self._until_done(opened.entry)
        except Exception as error:  # for the caller of `open`, if it still waits
            if opened.entry is None:
                opened.error = error
            elif not isinstance(error, Dep2pError):
                _logger.exception("a stream of a control client failed")
        finally:
            opened.decided.set()

    async def accept(self, name: str, realm: str | None) -> tuple[LineQueue, Callable[[], None]]:
        """Return a queue of streams ``name`` that members open, and a function that ends it. Raises :class:`Problem`
        D5012."""
        free = await self._accepting.claim(name)
        queue = self._subscriptions.open("streams")
        try:
            unregister = self._node.handle(realm, lambda messaging: self._register(messaging, name, queue))
        except BaseException:
            free()
            self._subscriptions.forget(queue)
            raise

        def end() -> None:
            self._subscriptions.forget(queue)
            if free():
                unregister()

        return queue, end

    def _register(self, messaging: MessagingInterface, name: str, queue: LineQueue) -> Callable[[], None]:
        realm_id = messaging.realm_id

        async def serve(stream: StreamInterface) -> None:
            peer = PeerId(stream.peer)
            if len(self._entries) >= self._bounds.streams_max or self._accepted[peer] >= self._accepted_per_peer_max:
                self._counts["streams_refused_streams_max"] += 1
                raise HandlerError("too many streams are open here")
            self._accepted[peer] += 1
            try:
                await hand_over(stream)
            finally:
                self._accepted[peer] -= 1
                if not self._accepted[peer]:
                    del self._accepted[peer]

        async def hand_over(stream: StreamInterface) -> None:
            with self._lifecycle.work():
                entry = self._add(stream, realm_id)
                line = encode_line(
                    StreamLine(
                        id=entry.id,
                        peer=stream.peer,
                        name=stream.name,
                        realm_id=realm_id,
                        data=bytes(stream.body),
                        headers=encode_headers(dict(stream.headers)),
                    )
                )
                if queue.has_room(line):
                    queue.put(line)
                else:
                    self._counts["streams_refused_acceptor_slow"] += 1
                    entry.abort(StreamClosedError("the program that accepts is too slow"))
                await self._until_done(entry)

        return messaging.on_stream(name, serve, concurrency=self._bounds.streams_max)

    def _check_room(self) -> None:
        if len(self._entries) >= self._bounds.streams_max:
            self._counts["streams_refused_streams_max"] += 1
            raise Problem("D3008", f"{len(self._entries)} streams of control clients are open, as many as there may be")

    def _add(self, stream: StreamInterface, realm_id: RealmId) -> ControlStream:
        entry = ControlStream(stream, realm_id)
        self._entries[entry.id] = entry
        return entry

    async def _until_done(self, entry: ControlStream) -> None:
        try:
            await entry.done.wait()
        finally:
            self._entries.pop(entry.id, None)
            entry.abort(StreamClosedError("the stream ended"))

    def attach(self, entry: ControlStream, direction: str) -> trio.CancelScope:
        """Take a direction for one call; its scope is cancelled when the stream fails. Raises Problem D6005."""
        if direction in entry.scopes or direction in entry.ended:
            state = "ended" if direction in entry.ended else "taken by another call"
            raise Problem("D6005", f"the {direction} direction of stream {entry.id} is {state}")
        scope = trio.CancelScope()
        entry.scopes[direction] = scope
        return scope

    def detach(self, entry: ControlStream, direction: str) -> None:
        """Detach a call that has ended."""
        entry.scopes.pop(direction, None)
        entry.unattached_since_s = trio.current_time()

    async def reap(self) -> None:
        """Reset streams without an attached client, until cancelled."""
        interval_s = min(_REAP_INTERVAL_S, self._bounds.stream_unattached_timeout_s / 4)
        while True:
            await trio.sleep(interval_s)
            latest = trio.current_time() - self._bounds.stream_unattached_timeout_s
            for entry in list(self._entries.values()):
                if not entry.scopes and entry.unattached_since_s < latest:
                    self._counts["streams_reset_unattached"] += 1
                    entry.leave(StreamClosedError("no client was attached to the stream for too long"))
