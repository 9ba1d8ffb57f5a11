"""The messages between members on `/dep2p/realm/<id>/members/1.0.0` (docs/spec/realm.md §5).

Each message is the payload of a GOSSIP frame: the CBOR array [kind, items].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dep2p.encoding.decoded import is_array, is_array_of
from dep2p.errors import ProtocolError
from dep2p.protocols.realm.member_record import RECORD_BYTES_MAX, SEQ_MAX
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical
from dep2p.protocols.wire.frame import Frame, FrameType, encode_frame
from dep2p.types import PeerId, RealmId, peer_id_bytes, peer_id_from_bytes

MEMBERS_PAYLOAD_BYTES_MAX: Final = 262_144
"""Cap of a members frame's payload."""
RECORDS_PER_MESSAGE_MAX: Final = 64
RECORD_BYTES_PER_MESSAGE_MAX: Final = 200_000
RECORDS_PER_TURN: Final = 8
"""Records that are checked at a time: about 2 ms, each with a MAC and a signature."""
ENTRIES_PER_MESSAGE_MAX: Final = 512
"""Entries of a DIGEST or a WANT at most."""
SUMMARY_BYTES: Final = 32

_RECORDS, _DIGEST, _WANT, _SUMMARY = range(1, 5)
_PEER_BYTES_MAX: Final = 64


def members_protocol(realm_id: RealmId) -> str:
    """The protocol id of a realm's member records."""
    return f"/dep2p/realm/{realm_id}/members/1.0.0"


@dataclass(frozen=True, slots=True)
class Records:
    """Envelopes of member records, not yet verified."""

    envelopes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Digest:
    """Names the records that the sender has: peers and sequence numbers; a part of all that it has."""

    entries: tuple[tuple[PeerId, int], ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Asks for the records of these peers."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """A sum over all that the sender has: equal sums mean that there is nothing to exchange."""

    digest: bytes


MembersMessage = Records | Digest | Want | Summary


def encode_records(envelopes: Iterable[bytes]) -> list[bytes]:
    """Encode these records as GOSSIP frames, as few as the bounds allow."""
    frames: list[bytes] = []
    batch: list[bytes] = []
    batch_bytes = 0
    for envelope in envelopes:
        if batch and (
            len(batch) == RECORDS_PER_MESSAGE_MAX or batch_bytes + len(envelope) > RECORD_BYTES_PER_MESSAGE_MAX
        ):
            frames.append(_frame(_RECORDS, batch))
            batch, batch_bytes = [], 0
        batch.append(envelope)
        batch_bytes += len(envelope)
    if batch:
        frames.append(_frame(_RECORDS, batch))
    return frames


def encode_digest(entries: Sequence[tuple[PeerId, int]]) -> list[bytes]:
    """Encode these entries as GOSSIP frames."""
    flat = [[peer_id_bytes(peer), seq] for peer, seq in entries]
    return [_frame(_DIGEST, part) for part in _parts(flat)]


def encode_want(peers: Sequence[PeerId]) -> list[bytes]:
    """Encode a request for these peers' records as GOSSIP frames."""
    return [_frame(_WANT, part) for part in _parts([peer_id_bytes(peer) for peer in peers])]


def encode_summary(digest: bytes) -> bytes:
    """Encode the sum over all records as a GOSSIP frame."""
    return _frame(_SUMMARY, digest)


def decode_members(frame: Frame) -> MembersMessage:
    """Decode the message in a frame. Raises :class:`ProtocolError`."""
    if frame.type != FrameType.GOSSIP or frame.flags or frame.req_id:
        raise ProtocolError(f"frame type 0x{frame.type:02x}, flags 0x{frame.flags:04x} on a members stream")
    decoded = decode_bounded(frame.payload, "members message", depth_max=3, entries_max=ENTRIES_PER_MESSAGE_MAX)
    if not is_array_of(decoded, 2):
        raise ProtocolError("a members message is not an array of two")
    kind, items = decoded
    if type(kind) is int and kind == _SUMMARY:
        if not isinstance(items, bytes) or len(items) != SUMMARY_BYTES:
            raise ProtocolError(f"a SUMMARY is not {SUMMARY_BYTES} bytes")
        return Summary(items)
    if type(kind) is not int or not is_array(items):
        raise ProtocolError("a members message has no kind or no items")
    if kind == _RECORDS:
        return _decode_records(items)
    if kind == _DIGEST:
        return Digest(tuple(_digest_entry(entry) for entry in items))
    if kind == _WANT:
        return Want(tuple(_peer(entry) for entry in items))
    raise ProtocolError(f"members message of kind {kind}")


def in_turns(message: MembersMessage) -> list[MembersMessage]:
    """Return the message in parts of which each costs a node about 2 ms, in order; most messages are one part."""
    if not isinstance(message, Records) or len(message.envelopes) <= RECORDS_PER_TURN:
        return [message]
    envelopes = message.envelopes
    return [Records(envelopes[at : at + RECORDS_PER_TURN]) for at in range(0, len(envelopes), RECORDS_PER_TURN)]


def _decode_records(entries: list[object]) -> Records:
    if len(entries) > RECORDS_PER_MESSAGE_MAX:
        raise ProtocolError(f"{len(entries)} records in one message: at most {RECORDS_PER_MESSAGE_MAX} are taken")
    records = tuple(entry for entry in entries if isinstance(entry, bytes) and len(entry) <= RECORD_BYTES_MAX)
    if len(records) < len(entries):
        raise ProtocolError("a record in a members message is no byte string or too long")
    return Records(records)


def _digest_entry(entry: object) -> tuple[PeerId, int]:
    if not is_array_of(entry, 2):
        raise ProtocolError("a digest's entry is not a pair")
    peer, seq = entry
    if type(seq) is not int or not 0 <= seq <= SEQ_MAX:
        raise ProtocolError("a digest's seq is out of range")
    return _peer(peer), seq


def _peer(value: object) -> PeerId:
    if not isinstance(value, bytes) or not 0 < len(value) <= _PEER_BYTES_MAX:
        raise ProtocolError("a members message names a malformed peer id")
    return peer_id_from_bytes(value)


def _parts(entries: Sequence[object]) -> list[object]:
    return [entries[at : at + ENTRIES_PER_MESSAGE_MAX] for at in range(0, len(entries), ENTRIES_PER_MESSAGE_MAX)]


def _frame(kind: int, items: object) -> bytes:
    return encode_frame(FrameType.GOSSIP, encode_canonical([kind, items]))
