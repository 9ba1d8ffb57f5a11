"""The reasons of a message's earlier failures: a bounded list, kept with it and in its dead letter."""

from typing import Final, NamedTuple

import cbor2

from dep2p.encoding.shapes import is_list
from dep2p.errors import ProtocolError
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical

_FAILURES_MAX: Final = 16
"""Failures that are kept: the first one and the latest ones."""
_REASON_CHARS_MAX: Final = 200


class DeliveryFailure(NamedTuple):
    """One delivery that failed."""

    at_us: int
    """Unix microseconds."""
    attempt: int
    reason: str


def add_failure(history: bytes, at_us: int, attempt: int, reason: str) -> bytes:
    """Add a failure to the history. When there are too many, one in the middle goes."""
    failures = [list(each) for each in failures_of(history)]
    failures.append([at_us, attempt, reason[:_REASON_CHARS_MAX]])
    if len(failures) > _FAILURES_MAX:
        del failures[1]
    return encode_canonical(failures)


def failures_of(history: bytes) -> list[DeliveryFailure]:
    """Decode a history, oldest first; empty for bytes that cannot be read."""
    if not history:
        return []
    try:
        decoded = decode_bounded(history, "a history", depth_max=3, entries_max=_FAILURES_MAX + 1)
    except (ProtocolError, cbor2.CBORDecodeError):
        return []
    found: list[DeliveryFailure] = []
    for each in decoded if is_list(decoded) else []:
        match each:
            case [int(at_us), int(attempt), str(reason)]:
                found.append(DeliveryFailure(at_us, attempt, reason))
            case _:  # pyright: ignore[reportUnknownVariableType]
                pass
    return found
