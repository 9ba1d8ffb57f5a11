"""Why a message was not taken: libp2p's names, used in traces and as names of counters. And why a neighbour was not."""

from typing import Final

BLACKLISTED_SOURCE: Final = "blacklisted source"
MISSING_SIGNATURE: Final = "missing signature"
UNEXPECTED_SIGNATURE: Final = "unexpected signature"
UNEXPECTED_AUTH_INFO: Final = "unexpected auth info"
INVALID_SIGNATURE: Final = "invalid signature"
VALIDATION_QUEUE_FULL: Final = "validation queue full"
VALIDATION_THROTTLED: Final = "validation throttled"
VALIDATION_FAILED: Final = "validation failed"
VALIDATION_IGNORED: Final = "validation ignored"
SELF_ORIGIN: Final = "self originated message"
INVALID_MAC: Final = "invalid realm mac"
"""Ours: the author does not hold the realm's secret."""
TOO_LARGE: Final = "message too large"
"""Ours: over `message_bytes_max`."""

PUNISHED: Final = frozenset(
    {
        MISSING_SIGNATURE,
        UNEXPECTED_SIGNATURE,
        UNEXPECTED_AUTH_INFO,
        INVALID_SIGNATURE,
        INVALID_MAC,
        TOO_LARGE,
        VALIDATION_FAILED,
        SELF_ORIGIN,
    }
)
"""Reasons that count as invalid messages of the forwarder (P4). The others may be no peer's fault."""

GRAYLISTED: Final = "graylisted"
CONTROL_FLOOD: Final = "a flood of control messages"
MISUSES: Final = frozenset({GRAYLISTED, CONTROL_FLOOD})
"""Reasons for which a neighbour is not worth its connection, by what it did itself."""
