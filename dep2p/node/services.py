"""The services of a node on top of messaging and pub/sub: made here, run and drained by the node, one set per realm."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import trio

from dep2p.delivery.journal import Journal
from dep2p.delivery.service import ReliableDelivery
from dep2p.delivery.topic_delivery import DeliveryTopics
from dep2p.host.interface import Host
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.messaging.service import Messaging
from dep2p.pubsub.service import PubSub
from dep2p.queues.access import Rights
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import LeasedStoreOwnership, StoreOwnership
from dep2p.queues.service.service import QueueService
from dep2p.queues.settings import QueueSettings
from dep2p.realm.credentials import Realm
from dep2p.realm.membership import Membership
from dep2p.services.gathers import TopicGathers
from dep2p.services.service import MemberServices
from dep2p.services.topic_groups import TopicGroups
from dep2p.sessions.service import SessionHandlers, SessionService
from dep2p.storage.delivery_store import MemoryDeliveryStore, SqliteDeliveryStore
from dep2p.storage.queue_store import QueueStore
from dep2p.tracing.clock_sync import Clocks

OutboxKind = Literal["auto", "memory", "disk"]
"""The place of reliable messages that wait: "auto" is on disk when there is a data directory."""


class RealmService(Protocol):
    """A part of a joined realm that runs until the realm is left."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; ``task_status.started`` is called when peers can reach it."""
        ...

    async def drain(self) -> None:
        """Take no new work and finish what is in flight; bounded by the caller's own deadline."""
        ...

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name; each drop and refusal has its reason in its name."""
        ...

    def stats(self) -> object:
        """Return counts of this moment, human-readable; plain values."""
        ...


@dataclass(frozen=True, slots=True)
class RealmParts:
    """The parts of a realm that its services are made from."""

    realm: Realm
    membership: Membership
    messaging: Messaging
    pubsub: PubSub


@dataclass(frozen=True, slots=True)
class RealmServices:
    """The services of one joined realm; the name of each field is the prefix of its counters."""

    delivery: ReliableDelivery
    sessions: SessionService
    queues: QueueService
    clocks: Clocks
    services: MemberServices
    gathers: TopicGathers
    topic_groups: TopicGroups

    def each(self) -> Iterator[tuple[str, RealmService]]:
        """Name and service, in the order of starting."""
        yield "delivery", self.delivery
        yield "sessions", self.sessions
        yield "queues", self.queues
        yield "clocks", self.clocks
        yield "services", self.services
        yield "gathers", self.gathers
        yield "topic_groups", self.topic_groups

    def stats(self) -> dict[str, object]:
        """Return the counts of each service."""
        return {name: service.stats() for name, service in self.each()}


class NodeServices:
    """Makes the services of each realm with the same settings, and holds the parts that all realms share."""

    def __init__(
        self,
        host: Host,
        identity: Identity,
        limits: Limits,
        data_dir: Path | None,
        outbox: OutboxKind = "auto",
        queues: QueueSettings | None = None,
    ) -> None:
        """Raises ``ValueError`` for an outbox on disk without a data directory, or a malformed store of queues."""
        if outbox not in ("auto", "memory", "disk"):
            raise ValueError(f'outbox is {outbox!r}: it must be "auto", "memory" or "disk"')
        if outbox == "disk" and data_dir is None:
            raise ValueError("an outbox on disk needs a data_dir")
        self._host = host
        self._identity = identity
        self._limits = limits
        self._data_dir = data_dir
        self._rng = random.SystemRandom()
        self.fairness: Fairness = Fairness()
        """Turns and quotas of members, over all realms."""
        self.session_registry: SessionHandlers = SessionHandlers()
        self._outbox_on_disk = outbox != "memory" and data_dir is not None
        self._journal = Journal(MemoryDeliveryStore())
        queues = queues or QueueSettings()
        self.queue_rights: Rights = Rights(queues.access, queues.create)
        self.queue_ownership: StoreOwnership = self._ownership(queues)
        self.queue_ownership.fairness = self.fairness

    def _ownership(self, queues: QueueSettings) -> StoreOwnership:
        def make(store: QueueStore) -> QueueEngine:
            return QueueEngine(store, defaults=queues.defaults, rights=self.queue_rights)

        if queues.standby:
            return LeasedStoreOwnership(
                queues.shared_stores(self._host.peer_id), self._host.peer_id, make, queues.defaults
            )
        return StoreOwnership(make(queues.make_store(self._data_dir)))

    async def start(self, nursery: trio.Nursery) -> None:
        """Start the parts that all realms share, before the first one is joined. Raises StoreError."""
        if self._outbox_on_disk and self._data_dir is not None:
            path = self._data_dir / "delivery.sqlite"
            self._journal = Journal(await trio.to_thread.run_sync(SqliteDeliveryStore, path))
        await nursery.start(self.fairness.run)
        await nursery.start(self._journal.run)
        await self.queue_ownership.open()
        await nursery.start(self.queue_ownership.run)

    async def aclose(self) -> None:
        """Close files and threads, after the last realm was left. A cancelled caller does not stop this step."""
        await self._journal.aclose()
        await self.queue_ownership.aclose()

    def of_realm(self, parts: RealmParts) -> RealmServices:
        """Make the services of a realm that the node is joining."""
        realm_id = parts.realm.realm_id
        delivery = ReliableDelivery(
            self._host, parts.membership, realm_id, self._limits, parts.messaging, self._journal, rng=self._rng
        )
        DeliveryTopics(delivery, parts.pubsub)
        return RealmServices(
            delivery=delivery,
            sessions=SessionService(
                self._host,
                parts.membership,
                realm_id,
                self._limits,
                self.session_registry,
                rng=self._rng,
                fairness=self.fairness,
            ),
            queues=QueueService(
                self._host,
                parts.membership,
                realm_id,
                self._limits,
                self.queue_ownership,
                self.queue_rights,
                rng=self._rng,
            ),
            clocks=Clocks(self._host, parts.membership, realm_id, self._limits),
            services=MemberServices(parts.messaging, parts.membership, self._limits, self._host.peer_id, rng=self._rng),
            gathers=TopicGathers(parts.messaging, parts.pubsub, self._limits, self._host.peer_id),
            topic_groups=TopicGroups(self._host, parts.pubsub, parts.membership),
        )
