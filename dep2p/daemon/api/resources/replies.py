"""Requests of members that a control client answers."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from dep2p.control_api.encoding import encode_headers, encode_line
from dep2p.control_api.replies import RequestLine
from dep2p.daemon.api.resources.exclusive_names import ExclusiveNames
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.node_interface import IncomingCall, MessagingInterface, NodeInterface
from dep2p.daemon.problems import Problem
from dep2p.errors import HandlerError
from dep2p.messaging.handlers import HandlerGoneError
from dep2p.messaging.offered_services import OfferedService

_DEADLINE_MS_MAX = 86_400_000
_GRACE_S = 1.0
"""Seconds behind its deadline after which a request that has not ended is given up."""
_GONE = "the program that answers went away"


@dataclass(slots=True, eq=False)
class _PendingReply:
    answered: trio.Event = field(default_factory=trio.Event)
    data: bytes = b""
    error: str | None = None
    is_gone: bool = False
    """Whether the program went away without an answer."""

    def answer(self, data: bytes, error: str | None) -> None:
        self.data, self.error = data, error
        self.answered.set()


@dataclass(slots=True, eq=False)
class _Answering:
    """The one program that answers a name."""

    queue: LineQueue
    pending: dict[str, _PendingReply] = field(default_factory=dict[str, _PendingReply])
    ended: bool = False


class PendingReplies:
    """Hands requests to the one client that answers their name, and its answers back.

    The concurrency of a name bounds its requests in flight; messaging keeps waiting, or refuses, those above it.
    """

    def __init__(self, node: NodeInterface, subscriptions: SubscriptionRegistry, bounds: ControlBounds) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._bounds = bounds
        self._names = ExclusiveNames("answers requests")
        self._pending: dict[str, _PendingReply] = {}

    @property
    def pending_count(self) -> int:
        """The number of requests that wait for an answer."""
        return len(self._pending)

    async def subscribe(
        self,
        name: str,
        realm: str | None,
        concurrency: int,
        rate_per_s: float = 0.0,
        service: OfferedService | None = None,
    ) -> tuple[LineQueue, Callable[[], None]]:
        """Return a queue of requests ``name``, and a function that ends it; those of a ``service`` are shared with
        other programs. Raises :class:`Problem` D5012, NotInRealmError."""
        free = await self._names.claim(name) if service is None else lambda: True
        mine = _Answering(self._subscriptions.open("replies"))
        try:
            unregister = self._node.handle(
                realm, lambda m: self._register(m, name, mine, concurrency, rate_per_s, service)
            )
        except ValueError as error:  # the name has a handler of another kind
            free()
            self._subscriptions.forget(mine.queue)
            raise Problem("D5012", str(error)) from None
        except BaseException:
            free()
            self._subscriptions.forget(mine.queue)
            raise

        def end() -> None:
            mine.ended = True
            self._subscriptions.forget(mine.queue)
            if free():
                unregister()
            for pending in list(mine.pending.values()):
                pending.is_gone = True
                pending.answered.set()

        return mine.queue, end

    def _register(
        self,
        messaging: MessagingInterface,
        name: str,
        mine: _Answering,
        concurrency: int,
        rate_per_s: float,
        service: OfferedService | None,
    ) -> Callable[[], None]:
        realm_id = messaging.realm_id

        async def serve(request: IncomingCall) -> bytes:
            if mine.ended:  # the request waited for its turn meanwhile
                raise HandlerGoneError(_GONE, has_begun=False)
            left_ms = (request.deadline_s - trio.current_time()) * 1000
            request_id = secrets.token_hex(8)
            line = encode_line(
                RequestLine(
                    id=request_id,
                    peer=request.peer,
                    name=request.name,
                    realm_id=realm_id,
                    data=bytes(request.body),
                    headers=encode_headers(dict(request.headers)),
                    deadline_ms=int(max(0, min(left_ms, _DEADLINE_MS_MAX))),
                    idempotent=request.idempotent,
                )
            )
            if not mine.queue.has_room(line):
                # Unlike notifies, no request may be dropped in silence: its caller waits.
                raise HandlerError("the program that answers is too slow")
            pending = _PendingReply()
            self._pending[request_id] = mine.pending[request_id] = pending
            mine.queue.put(line)
            try:
                # The node ends a request at its deadline, by a TIMEOUT: a second timer here would race it.
                with trio.move_on_at(request.deadline_s + _GRACE_S):
                    await pending.answered.wait()
            finally:
                self._pending.pop(request_id, None)
                mine.pending.pop(request_id, None)
            if not pending.answered.is_set():
                raise HandlerError("the program that answers gave none in time")
            if pending.is_gone:
                raise HandlerGoneError(_GONE, has_begun=True)
            if pending.error is not None:
                raise HandlerError(pending.error)
            return pending.data

        return messaging.on_request(name, serve, concurrency=concurrency, rate_per_s=rate_per_s, service=service)

    def answer(self, request_id: str, data: bytes, error: str | None) -> None:
        """Give the answer of a request, or the text of an error. Raises :class:`Problem` D5011."""
        pending = self._pending.pop(request_id, None)
        if pending is None or pending.answered.is_set():
            raise Problem("D5011", f"no request {request_id[:40]!r} waits for an answer")
        pending.answer(data, error)
