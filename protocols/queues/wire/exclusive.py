"""Frames of exclusive channels (docs/spec/queue.md): heartbeats, leases, and results that carry an epoch. Pure.

They belong to a subscription that named its member in SUBSCRIBE.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.wire.frames import (
    Delivered,
    DeliveryResult,
    decode_deliver,
    decode_settle,
    deliver_payload,
    settle_payload,
)
from dep2p.protocols.wire.frame import encode_frame

HEARTBEAT: Final = 0x50
LEASE: Final = 0x51
UNLOCK: Final = 0x52
FENCED_SETTLE: Final = 0x53
FENCED_DELIVER: Final = 0x54

MEMBER_BYTES: Final = 16
PARTITIONS_MAX: Final = 1_024

_COUNT = struct.Struct(">I")
_HELD = struct.Struct(">IQ")
_HEARTBEAT = struct.Struct(">QQ")
_LEASE = struct.Struct(">QIQQ")
_EPOCH = struct.Struct(">Q")


class WireHeartbeat(NamedTuple):
    """A heartbeat of a consumer of an exclusive channel."""

    beat: int
    seen: int
    """The serial of the last LEASE that came over this link."""
    held: tuple[tuple[int, int], ...]
    """Partition and epoch; epoch 0: wanted."""


class WireLease(NamedTuple):
    """A lease for a consumer."""

    beat: int
    """The heartbeat that it answers; 0: sent unasked."""
    lease_ms: int
    serial: int
    version: int
    assigned: tuple[tuple[int, int], ...]
    """Partition and the epoch under which it is held; 0: not yet."""


def encode_heartbeat(req_id: int, beat: int, seen: int, held: Sequence[tuple[int, int]]) -> bytes:
    """Encode a HEARTBEAT frame."""
    return encode_frame(HEARTBEAT, _HEARTBEAT.pack(beat, seen) + _encode_pairs(held), req_id=req_id)


def decode_heartbeat(payload: bytes) -> WireHeartbeat:
    """Decode the payload of a HEARTBEAT frame."""
    if len(payload) < _HEARTBEAT.size:
        raise ProtocolError("HEARTBEAT is cut off")
    beat, seen = _HEARTBEAT.unpack_from(payload)
    if not beat:
        raise ProtocolError("HEARTBEAT without a number")
    return WireHeartbeat(beat, seen, _decode_pairs(payload, _HEARTBEAT.size, "HEARTBEAT"))


def encode_lease(req_id: int, lease: WireLease) -> bytes:
    """Encode a LEASE frame."""
    head = _LEASE.pack(lease.beat, lease.lease_ms, lease.serial, lease.version)
    return encode_frame(LEASE, head + _encode_pairs(lease.assigned), req_id=req_id)


def decode_lease(payload: bytes) -> WireLease:
    """Decode the payload of a LEASE frame."""
    if len(payload) < _LEASE.size:
        raise ProtocolError("LEASE is cut off")
    beat, lease_ms, serial, version = _LEASE.unpack_from(payload)
    return WireLease(beat, lease_ms, serial, version, _decode_pairs(payload, _LEASE.size, "LEASE"))


def encode_unlock(req_id: int, partition: int, epoch: int) -> bytes:
    """Encode an UNLOCK frame: the sender works on nothing of the partition, and has sent every result before this."""
    return encode_frame(UNLOCK, _HELD.pack(partition, epoch), req_id=req_id)


def decode_unlock(payload: bytes) -> tuple[int, int]:
    """Decode partition and epoch of an UNLOCK frame."""
    if len(payload) != _HELD.size:
        raise ProtocolError("UNLOCK of a wrong length")
    partition, epoch = _HELD.unpack(payload)
    return partition, epoch


def encode_fenced_settle(req_id: int, epoch: int, ticket: int, results: Sequence[DeliveryResult]) -> bytes:
    """Encode a FENCED_SETTLE frame: a SETTLE of one partition, with the epoch under which its messages were
    delivered."""
    return encode_frame(FENCED_SETTLE, _EPOCH.pack(epoch) + settle_payload(ticket, results), req_id=req_id)


def decode_fenced_settle(payload: bytes) -> tuple[int, int, list[DeliveryResult]]:
    """Decode epoch, ticket and results of a FENCED_SETTLE frame, all of one partition."""
    epoch = _epoch(payload, "FENCED_SETTLE")
    ticket, results = decode_settle(payload[_EPOCH.size :])
    if any(result.partition != results[0].partition for result in results):
        raise ProtocolError("FENCED_SETTLE with results of several partitions")
    return epoch, ticket, results


def encode_fenced_deliver(req_id: int, epoch: int, messages: Sequence[Delivered]) -> bytes:
    """Encode a FENCED_DELIVER frame: a DELIVER of one partition, with the epoch that its results have to carry."""
    return encode_frame(FENCED_DELIVER, _EPOCH.pack(epoch) + deliver_payload(messages), req_id=req_id)


def decode_fenced_deliver(payload: bytes) -> tuple[int, list[Delivered]]:
    """Decode epoch and messages of a FENCED_DELIVER frame, all of one partition."""
    epoch = _epoch(payload, "FENCED_DELIVER")
    messages = decode_deliver(payload[_EPOCH.size :])
    if any(message.partition != messages[0].partition for message in messages):
        raise ProtocolError("FENCED_DELIVER with messages of several partitions")
    return epoch, messages


def _epoch(payload: bytes, what: str) -> int:
    if len(payload) < _EPOCH.size:
        raise ProtocolError(f"{what} is cut off")
    epoch = int(_EPOCH.unpack_from(payload)[0])
    if not epoch:
        raise ProtocolError(f"{what} without an epoch")
    return epoch


def _encode_pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    return _COUNT.pack(len(pairs)) + b"".join([_HELD.pack(*each) for each in pairs])


def _decode_pairs(payload: bytes, position: int, what: str) -> tuple[tuple[int, int], ...]:
    if position + _COUNT.size > len(payload):
        raise ProtocolError(f"{what} is cut off")
    count = int(_COUNT.unpack_from(payload, position)[0])
    position += _COUNT.size
    if count > PARTITIONS_MAX or len(payload) != position + count * _HELD.size:
        raise ProtocolError(f"{what} of {count} partitions in {len(payload)} bytes")
    pairs = tuple((partition, epoch) for partition, epoch in _HELD.iter_unpack(payload[position:]))
    if len(dict(pairs)) != count:
        raise ProtocolError(f"{what} names a partition twice")
    return pairs
