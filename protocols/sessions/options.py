"""The bounds and policies of ordered sessions."""

from dataclasses import dataclass, fields
from typing import Final, Literal

from dep2p.limits import Limits

REQUESTS_OPEN_MAX: Final = 1_024
BOUND_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How one end of a session behaves (docs/spec/session.md)."""

    items_max: int = 4_096
    """Server: pushes that wait or are not handled yet, together; with responses twice as many. Client: pushes that it
    takes in before they are handled, and as many responses."""
    bytes_max: int = 8_388_608
    """The same in bytes, framing included. One push always passes, however small the window is."""
    ack_timeout_s: float = 15.0
    """Seconds without a receipt, after which everything from the oldest push without one is sent again."""
    retries_max: int = 3
    """Times that pushes are sent again without a receipt; then the session fails."""
    gap_timeout_s: float = 30.0
    """Seconds for which a reserved number that is not filled, or one that does not arrive, holds up later ones at
    most."""
    gap: Literal["fail", "skip"] = "fail"
    """The end of a gap that is not filled in time: the session fails, or the client learns that these numbers are
    skipped."""
    resume_timeout_s: float = 300.0
    """Seconds for which a session without a client is kept."""
    binding_timeout_s: float = 30.0
    """Seconds for which a push bound to a request that does not come is kept."""
    binding_expired: Literal["drop", "deliver"] = "drop"
    """The end of a bound push whose request has not come in time. A drop is counted and logged."""
    bound_items_max: int = BOUND_MAX
    """Pushes bound to requests of one session that are not answered yet."""
    bound_bytes_max: int = 8_388_608
    """The same in bytes."""
    requests_max: int = REQUESTS_OPEN_MAX
    """Requests of one session that are not answered yet; further ones get OVERLOADED."""
    request_timeout_s: float = 30.0
    """Seconds for a request that names no timeout."""
    message_bytes_max: int = 1_048_576
    """Bytes of one push, request or response."""

    @classmethod
    def of(cls, limits: Limits) -> "SessionOptions":
        """Return the options of a node's limits."""
        return cls(
            items_max=limits.session_items_max,
            bytes_max=limits.session_bytes_max,
            ack_timeout_s=limits.session_ack_timeout_s,
            retries_max=limits.session_retries_max,
            resume_timeout_s=limits.session_resume_timeout_s,
            request_timeout_s=limits.request_timeout_s,
            message_bytes_max=limits.message_bytes_max,
        )

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value >= 0:  # nor NaN
                raise ValueError(f"{field.name} is {value}: it cannot be negative")
            if not value and field.name.endswith("_max") and field.name != "retries_max":
                raise ValueError(f"{field.name} is 0: nothing could ever pass")
        if self.gap not in ("fail", "skip"):
            raise ValueError(f"gap is {self.gap!r}: it must be 'fail' or 'skip'")
        if self.binding_expired not in ("drop", "deliver"):
            raise ValueError(f"binding_expired is {self.binding_expired!r}: it must be 'drop' or 'deliver'")
