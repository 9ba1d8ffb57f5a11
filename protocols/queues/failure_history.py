"""Why a message failed before: a bounded list, kept with it and in its dead letter."""

from typing import Final, NamedTuple, cast

import cbor2

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical

_FAILURES_MAX: Final = 16
"""The first one and the latest ones are kept."""
_REASON_CHARS_MAX: Final = 200


class Failure(NamedTuple):
    """One delivery that did not end well."""

    at_us: int
    """Unix microseconds."""
    attempt: int
    reason: str


def add_failure(history: bytes, at_us: int, attempt: int, reason: str) -> bytes:
    """The history with one failure more. One in the middle goes when there are too many."""
    failures = [list(each) for each in failures_of(history)]
    failures.append([at_us, attempt, reason[:_REASON_CHARS_MAX]])
    if len(failures) > _FAILURES_MAX:
        del failures[1]
    return encode_canonical(failures)


def failures_of(history: bytes) -> list[Failure]:
    """Oldest first; nothing for what cannot be read."""
    if not history:
        return []
    try:
        decoded = decode_bounded(history, "a history", depth_max=3, entries_max=_FAILURES_MAX + 1)
    except (ProtocolError, cbor2.CBORDecodeError):
        return []
    found: list[Failure] = []
    for each in cast(list[object], decoded) if isinstance(decoded, list) else []:
        match each:
            case [int(at_us), int(attempt), str(reason)]:
                found.append(Failure(at_us, attempt, reason))
            case _:  # pyright: ignore[reportUnknownVariableType]
                pass
    return found
