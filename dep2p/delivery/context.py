"""The context that the parts of one realm's reliable delivery share."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from dep2p.concurrency.contained import run_contained
from dep2p.concurrency.deadline_heap import DueTimes
from dep2p.delivery.journal import Journal
from dep2p.delivery.quota import OutboxQuota
from dep2p.host.interface import ByteStream, Connection
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.links.pull_link import LinkCalls, SessionLink
from dep2p.messaging.handlers import NotifyEntry
from dep2p.protocols.delivery.wire import BATCH_BYTES_MAX, delivery_protocol
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.payload import payload_bytes_max
from dep2p.realm.interface import RealmGate
from dep2p.token_bucket import TokenBucket
from dep2p.tracing.event_log import TraceLog
from dep2p.types import RealmId, Rng

_WAITING_LINES_PER_S: Final = 0.1


class DeliveryGate(RealmGate, Protocol):
    """The membership, which also reports that a peer has proved to be a member."""

    def subscribe_verified(self, on_verified: Callable[[Connection], None]) -> Callable[[], None]: ...


@dataclass(slots=True, eq=False)
class DeliveryContext:
    """The parts that `ReliableDelivery` makes and its helpers share."""

    realm_id: RealmId
    limits: Limits
    gate: DeliveryGate
    journal: Journal
    rng: Rng
    notify_entries: Mapping[str, NotifyEntry]
    """The handlers of notifies by name: reliable messages use the same."""
    fairness: Fairness
    """The turns and quotas of the node."""
    quota: OutboxQuota = field(init=False)
    zstd: Zstd = field(init=False)
    due: DueTimes = field(default_factory=DueTimes)
    counts: Counter[str] = field(default_factory=Counter[str])
    nursery: trio.Nursery | None = None
    """The nursery of its tasks, while the service runs."""
    trace_log: TraceLog | None = None
    """The log of the trace, while one is on."""
    is_draining: bool = False
    waiting_lines: TokenBucket = field(default_factory=lambda: TokenBucket(_WAITING_LINES_PER_S, burst=16))
    """Lines of the log about messages that wait for an app: members choose the names in them."""

    def __post_init__(self) -> None:
        limits = self.limits
        self.quota = OutboxQuota(limits.delivery_queue_items_max, limits.delivery_queue_bytes_max)
        self.zstd = Zstd(limits.message_bytes_max)

    @property
    def protocol(self) -> str:
        """The id of the realm's delivery protocol."""
        return delivery_protocol(self.realm_id)

    def start(self, task: Callable[[], Awaitable[None]]) -> bool:
        """Run a task of a part until the service ends; False if it has ended."""
        if self.nursery is None:
            return False
        self.nursery.start_soon(run_contained, task, "a task of reliable delivery")
        return True

    def make_link(
        self,
        stream: ByteStream,
        calls: LinkCalls,
    ) -> SessionLink:
        """Make one end of a stream of this protocol."""
        return SessionLink(
            stream,
            self.gate,
            self.limits,
            self.counts,
            calls,
            payload_bytes_max=max(payload_bytes_max(self.limits), BATCH_BYTES_MAX),
            fairness=self.fairness,
        )

    def zstd_for(self, connection: Connection) -> Zstd | None:
        """The compressor, if the peer offered to take compressed bodies."""
        return self.zstd if "zstd" in self.gate.features(connection) else None
