"""The limits that a relay sets for a circuit: read from its messages, and kept to by both ends."""

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

NARROW_BYTES: Final = 16_777_216
"""A circuit that carries less in a direction is for an exchange of addresses, not for the traffic of topics.
go-libp2p's relays carry 131,072 bytes by default, ours 268,435,456."""
NARROW_S: Final = 600.0
"""The same for its time. go-libp2p's relays: 120 s."""


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


@runtime_checkable
class LimitedTransport(Protocol):
    """A transport with a relay's limit."""

    circuit_limit: CircuitLimit


def circuit_limit_of(transport: object) -> CircuitLimit | None:
    """The limit of a transport; None for one that has none."""
    return transport.circuit_limit if isinstance(transport, LimitedTransport) else None
