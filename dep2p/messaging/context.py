"""The context that the parts of one realm's messaging share."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dep2p.concurrency.deadlines import DeadlineTimer
from dep2p.host.interface import Connection
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.protocols.wire.compression import FEATURE, Zstd
from dep2p.protocols.wire.payload import HeaderEncoder
from dep2p.realm.interface import RealmGate


class MessageCall(msgspec.Struct, frozen=True, gc=False):
    """One request, whichever peer it is for. A Struct: it is made in a third of the time of a frozen dataclass."""

    name: str
    body: bytes
    timeout_s: float | None = None
    """Seconds for all tries together; None for ``Limits.request_timeout_s``."""
    idempotent: bool = False
    headers: Mapping[str, object] | None = None
    is_one_try: bool = False
    """Whether the caller itself tries an idempotent request again, somewhere else."""


@dataclass(slots=True, eq=False)
class MessagingContext:
    """The parts that `Messaging` makes and its helpers share."""

    gate: RealmGate
    limits: Limits
    timer: DeadlineTimer
    fairness: Fairness = field(default_factory=Fairness)
    """That of the node."""
    counters: Counter[str] = field(default_factory=Counter[str])
    encoder: HeaderEncoder = field(init=False)
    zstd: Zstd = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = HeaderEncoder(self.limits)
        self.zstd = Zstd(self.limits.message_bytes_max)

    def zstd_for(self, connection: Connection) -> Zstd | None:
        """The compressor, if the peer offered to take compressed bodies."""
        return self.zstd if FEATURE in self.gate.features(connection) else None
