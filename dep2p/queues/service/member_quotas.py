"""Quotas of one member in the queues of this node: how many it makes, what they hold, how fast it changes them."""

from collections.abc import Sequence
from typing import Final

import trio

from dep2p.errors import OverloadedError, QueueFullError
from dep2p.limits import Limits
from dep2p.protocols.fairness.rates import MemberRates
from dep2p.protocols.queues.admin import (
    AdminReply,
    AdminRequest,
    CreateChannel,
    CreateQueue,
    DeleteChannel,
    DeleteDeadLetters,
    DeleteQueue,
    EmptyQueue,
    ExpandQueue,
    PauseQueue,
    ReplayDeadLetters,
    ResumeQueue,
)
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.types import PeerId, RealmId

CHANGES_BURST: Final = 200
"""Changes that may come at once: a program makes its queues when it starts."""
_CHANGES: Final = (
    CreateQueue,
    CreateChannel,
    DeleteQueue,
    DeleteChannel,
    PauseQueue,
    ResumeQueue,
    EmptyQueue,
    ReplayDeadLetters,
    DeleteDeadLetters,
    ExpandQueue,
)
"""Each of them writes a definition, or reads a whole queue."""
_MESSAGES_BURST_S: Final = 10.0


class QueueQuotas:
    """The quotas of one realm. Raises QueueFullError and OverloadedError; each refusal is in the node's ledger."""

    def __init__(self, limits: Limits, ownership: StoreOwnership) -> None:
        self._limits = limits
        self._ownership = ownership
        self._changes = MemberRates(limits.queue_changes_per_peer_per_s, CHANGES_BURST)
        messages_per_s = limits.queue_messages_per_peer_per_s
        self._messages = MemberRates(messages_per_s, messages_per_s * _MESSAGES_BURST_S)
        self._engine: QueueEngine | None = None
        self._known: dict[str, None] = {}
        """Members whose queues are loaded in this engine, or are being loaded."""

    def admit_change(self, peer: PeerId, realm_id: RealmId, request: AdminRequest[AdminReply]) -> None:
        """Admit a change of queues that this node keeps. A request that changes nothing has no rate."""
        if not isinstance(request, _CHANGES):
            return
        wait_s = self._changes.wait_s(peer, 1, trio.current_time())
        if wait_s:
            self._refuse(peer, "queue_changes")
            retry_ms = int(wait_s * 1000) + 1
            raise OverloadedError(
                f"{peer} makes, changes and deletes more than {self._limits.queue_changes_per_peer_per_s:g} queues and "
                f"channels a second (queue_changes_per_peer_per_s): try again after {retry_ms} ms"
            )
        if isinstance(request, CreateQueue):
            self._admit_queue(peer, realm_id, request.queue)

    def _admit_queue(self, peer: PeerId, realm_id: RealmId, name: str) -> None:
        registry = self._ownership.engine.registry
        most = self._limits.queues_per_peer_max
        if registry.makers.count(peer) >= most and (realm_id, name) not in registry.queues:
            self._refuse(peer, "queues")
            raise QueueFullError(
                f"{peer} has made {registry.makers.count(peer)} queues on this node, the most allowed for one member: "
                "delete some, or ask the node's owner to raise queues_per_peer_max in [limits]"
            )

    def admit_publish(self, peer: PeerId, realm_id: RealmId, name: str, messages: Sequence[WireMessage]) -> None:
        """Admit a publish to a queue that this node keeps."""
        wait_s = self._messages.wait_s(peer, len(messages), trio.current_time())
        if wait_s:
            self._refuse(peer, "queue_messages")
            raise QueueFullError(
                f"{peer} publishes faster than {self._limits.queue_messages_per_peer_per_s:g} messages a second "
                f"(queue_messages_per_peer_per_s): publish again after {int(wait_s * 1000) + 1} ms"
            )
        engine = self._ownership.engine
        queue = engine.registry.queues.get((realm_id, name))
        if queue is None or not queue.made_by:
            return
        if engine is not self._engine or queue.made_by not in self._known:
            self._know(engine, queue.made_by)
        size = sum([len(body) for _, body in messages])
        most = self._limits.queue_bytes_per_peer_max
        if not engine.registry.makers.has_room(queue.made_by, size, most=most):
            self._refuse(peer, "queue_bytes")
            raise QueueFullError(
                f"the queues that {queue.made_by} made on this node hold "
                f"{engine.registry.makers.stored_bytes(queue.made_by)} bytes, the most allowed for one member: consume "
                "or delete some, or ask the node's owner to raise queue_bytes_per_peer_max in [limits]"
            )

    def _know(self, engine: QueueEngine, maker: str) -> None:
        """Load the other queues of a member, once: those that were not used since the start hold bytes, too."""
        if engine is not self._engine:
            self._engine = engine
            self._known.clear()
        self._known[maker] = None
        engine.load_soon(engine.registry.makers.names(maker))

    def _refuse(self, peer: PeerId, quota: str) -> None:
        self._ownership.fairness.ledger.refuse(peer, quota)
