"""The limits that a relay sets for a circuit: both ends read them, keep to them, and know what is left."""

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from dep2p.host.interface import CircuitUse
from dep2p.types import PeerId

NARROW_BYTES: Final = 16_777_216
"""A circuit that carries less in a direction is for an exchange of addresses, not for the traffic of topics.
go-libp2p's relays carry 131,072 bytes by default, ours 268,435,456."""
NARROW_S: Final = 600.0
"""The same for its time. go-libp2p's relays: 120 s."""
_SPENT_BYTES: Final = 1_024
"""A circuit that has less left carries no further frame of most kinds."""
_SPENT_S: Final = 1.0
"""The clocks of both ends and of the relay started within this time."""


@dataclass(frozen=True, slots=True)
class CircuitLimit:
    """Bytes in each direction, and seconds, that a relay carries on one circuit; 0 for no limit."""

    data_bytes: int
    duration_s: float

    @property
    def is_narrow(self) -> bool:
        """Whether it is too little for traffic that no app has asked for, as that of pub/sub."""
        return 0 < self.data_bytes < NARROW_BYTES or 0 < self.duration_s < NARROW_S

    def __str__(self) -> str:
        parts = [f"{self.data_bytes} bytes in each direction"] if self.data_bytes else []
        parts += [f"{self.duration_s:g} s"] if self.duration_s else []
        return " and ".join(parts) or "no limit"


@dataclass(slots=True)
class CircuitMeter:
    """Counts the use of one circuit against the limit of its relay.

    ``opened_s``: the time at which the relay opened it, by the clock of `left`. Example::

        meter = CircuitMeter(relay, CircuitLimit(131_072, 120.0), opened_s=now)
        meter.sent_bytes += 1_000
        meter.left(now + 20.0)  # CircuitUse(relay, True, data_left_bytes=130_072, time_left_s=100.0)
    """

    relay: PeerId
    limit: CircuitLimit
    opened_s: float
    sent_bytes: int = 0
    received_bytes: int = 0
    is_over: bool = False
    """This end had more to send than the relay carries."""

    @property
    def end_s(self) -> float:
        """The time at which the relay ends it."""
        return self.opened_s + self.limit.duration_s if self.limit.duration_s else float("inf")

    def may_send(self, size_bytes: int) -> bool:
        """Whether the relay carries so many bytes more; a False is noted for `spent`."""
        if self.limit.data_bytes and self.sent_bytes + size_bytes > self.limit.data_bytes:
            self.is_over = True
        return not self.is_over

    def left(self, now_s: float) -> CircuitUse:
        """Return what the relay still carries; of the direction that has carried more."""
        used = max(self.sent_bytes, self.received_bytes)
        return CircuitUse(
            self.relay,
            self.limit.is_narrow,
            max(0, self.limit.data_bytes - used) if self.limit.data_bytes else None,
            max(0.0, self.end_s - now_s) if self.limit.duration_s else None,
        )

    def spent(self, now_s: float) -> str:
        """Return which limit is used up, for the log; "" when none is."""
        left = self.left(now_s)
        if left.time_left_s is not None and left.time_left_s < _SPENT_S:
            return f"the relay carries a connection for {self.limit.duration_s:g} s"
        if self.is_over or (left.data_left_bytes is not None and left.data_left_bytes < _SPENT_BYTES):
            return f"the relay carries {self.limit.data_bytes} bytes in each direction of a connection"
        return ""


@runtime_checkable
class MeteredTransport(Protocol):
    """A transport with a relay's limit."""

    meter: CircuitMeter


def meter_of(transport: object) -> CircuitMeter | None:
    """The meter of a transport through a relay; None for another one."""
    return transport.meter if isinstance(transport, MeteredTransport) else None
