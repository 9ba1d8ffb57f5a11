"""The verified member records of one realm: which one counts, how many there may be, when they expire. Pure."""

import hashlib
import heapq
from dataclasses import dataclass
from typing import Final, Literal

from dep2p.errors import ProtocolError
from dep2p.protocols.realm.keys import RealmKeys
from dep2p.protocols.realm.member_record import SKEW_MS, SealedRecord, check_signature, check_times, open_envelope
from dep2p.types import PeerId, peer_id_bytes

OWNER_BURST: Final = 8.0
OWNER_RECORDS_PER_S: Final = 0.5
"""How often one member may change its record; more is dropped, and the next sync brings the last one."""

Refusal = Literal["invalid", "times", "stale", "conflict", "owner_rate", "full"]


@dataclass(frozen=True, slots=True)
class Applied:
    """The record counts from now on."""

    sealed: SealedRecord
    previous: SealedRecord | None


@dataclass(frozen=True, slots=True)
class OwnRecordSeen:
    """Somebody has a record that this node signed, ahead of the current one: of an earlier run, by another clock."""

    sealed: SealedRecord


@dataclass(frozen=True, slots=True)
class Refused:
    """The record does not count. ``reason`` is a counter's name; only "invalid" is the sender's fault."""

    reason: Refusal


Outcome = Applied | OwnRecordSeen | Refused


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class RecordStore:
    """Records by peer, own one included."""

    def __init__(
        self,
        own: PeerId,
        keys: RealmKeys,
        *,
        records_max: int,
        owner_burst: float = OWNER_BURST,
        owner_records_per_s: float = OWNER_RECORDS_PER_S,
    ) -> None:
        """``records_max`` bounds foreign records, left ones included."""
        self._own = own
        self._keys = keys
        self._records_max = records_max
        self._owner_burst = owner_burst
        self._owner_records_per_s = owner_records_per_s
        self._records: dict[PeerId, SealedRecord] = {}
        self._buckets: dict[PeerId, _Bucket] = {}
        self._expiries: list[tuple[int, PeerId, int]] = []
        self._sum = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._records

    def get(self, peer: PeerId) -> SealedRecord | None:
        """The record that counts."""
        return self._records.get(peer)

    def seq(self, peer: PeerId) -> int:
        """The sequence number of the record that counts; -1 without one."""
        sealed = self._records.get(peer)
        return -1 if sealed is None else sealed.record.seq

    def all(self) -> list[SealedRecord]:
        """Every record, in the order of their arrival."""
        return list(self._records.values())

    def entries(self) -> list[tuple[PeerId, int]]:
        """Peers and sequence numbers."""
        return [(peer, sealed.record.seq) for peer, sealed in self._records.items()]

    def summary(self) -> bytes:
        """The same 32 bytes on every node that has the same records: a sum, so that it costs one hash per change."""
        return self._sum.to_bytes(32, "big")

    @property
    def is_full(self) -> bool:
        """Whether a record of an unknown member would be refused."""
        return len(self._records) - (self._own in self._records) >= self._records_max

    def put_own(self, sealed: SealedRecord) -> None:
        """Set this node's own record."""
        self._put(sealed)

    def offer(self, envelope: bytes, now_ms: int, now: float) -> Outcome:
        """Take a record from anywhere: cheap checks first, the signature last."""
        try:
            sealed, signature = open_envelope(envelope, self._keys)
        except ProtocolError:
            return Refused("invalid")
        record = sealed.record
        current = self._records.get(record.peer)
        if current is not None and record.seq <= current.record.seq:
            if envelope == current.envelope or record.seq < current.record.seq:
                return Refused("stale")
            if record.peer != self._own:
                return Refused("conflict")
        try:
            check_times(record, now_ms)
        except ProtocolError:
            return Refused("times")
        if record.peer != self._own:
            if current is None and self.is_full:
                return Refused("full")
            leaves = record.state == "left" and current is not None and current.record.state != "left"
            if not leaves and not self._has_token(record.peer, now):
                return Refused("owner_rate")
        try:
            check_signature(sealed, signature, self._keys.realm_id)
        except ProtocolError:
            return Refused("invalid")
        if record.peer == self._own:
            return OwnRecordSeen(sealed)
        self._take_token(record.peer, now)
        self._put(sealed)
        return Applied(sealed, current)

    def next_expiry_ms(self) -> int | None:
        """When the next record expires, Unix milliseconds, skew included."""
        while self._expiries:
            expires_ms, peer, seq = self._expiries[0]
            if self.seq(peer) == seq:
                return expires_ms + SKEW_MS
            heapq.heappop(self._expiries)
        return None

    def expire(self, now_ms: int) -> list[SealedRecord]:
        """Drop and return the records whose time is over; never the own one."""
        expired: list[SealedRecord] = []
        while (due := self.next_expiry_ms()) is not None and due <= now_ms:
            _, peer, _ = heapq.heappop(self._expiries)
            sealed = self._records.pop(peer)
            self._buckets.pop(peer, None)
            self._sum = (self._sum - _weight(sealed)) % (1 << 256)
            expired.append(sealed)
        return expired

    def _put(self, sealed: SealedRecord) -> None:
        peer = sealed.record.peer
        previous = self._records.get(peer)
        if previous is not None:
            self._sum -= _weight(previous)
        self._records[peer] = sealed
        self._sum = (self._sum + _weight(sealed)) % (1 << 256)
        if peer == self._own:
            return
        heapq.heappush(self._expiries, (sealed.record.expires_ms, peer, sealed.record.seq))
        if len(self._expiries) > 2 * len(self._records) + 64:
            self._expiries = [
                (kept.record.expires_ms, kept.record.peer, kept.record.seq)
                for kept in self._records.values()
                if kept.record.peer != self._own
            ]
            heapq.heapify(self._expiries)

    def _has_token(self, peer: PeerId, now: float) -> bool:
        bucket = self._buckets.get(peer)
        if bucket is None:
            return True
        bucket.tokens = min(
            self._owner_burst, bucket.tokens + max(0.0, now - bucket.filled_at) * self._owner_records_per_s
        )
        bucket.filled_at = now
        return bucket.tokens >= 1.0

    def _take_token(self, peer: PeerId, now: float) -> None:
        # Only for records whose signature was good: nobody can use up somebody else's tokens.
        bucket = self._buckets.setdefault(peer, _Bucket(self._owner_burst, now))
        bucket.tokens = max(0.0, bucket.tokens - 1.0)


def _weight(sealed: SealedRecord) -> int:
    record = sealed.record
    return int.from_bytes(hashlib.sha256(peer_id_bytes(record.peer) + record.seq.to_bytes(8, "big")).digest(), "big")
