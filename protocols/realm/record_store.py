"""The verified member records of one realm, bounded in number, each until it expires. Pure.

A record is *proved* when its member has proved its membership to this node. Any member can make up others and sign
their records, so records that nothing proves are bounded for each member that brings them, and a proved one takes the
place of one of them when there is no room.
"""

import hashlib
import heapq
from dataclasses import dataclass
from typing import Final, Literal

from dep2p.errors import ProtocolError
from dep2p.protocols.addresses.dialable import AddressScope
from dep2p.protocols.realm.keys import RealmKeys
from dep2p.protocols.realm.member_record import SKEW_MS, SealedRecord, check_signature, check_times, open_envelope
from dep2p.protocols.realm.offer_index import OfferIndex
from dep2p.protocols.realm.statement import MemberStatement
from dep2p.types import PeerId, peer_id_bytes

_NO_STATEMENT: Final = MemberStatement()

OWNER_BURST: Final = 8.0
OWNER_RECORDS_PER_S: Final = 0.5
"""Changes of its record a second that one member may make; more are dropped, and the next sync brings the last one."""

UNPROVED_PER_INTRODUCER_MAX: Final = 1_024
"""Records of members that this node never met, for each member that brought them first: so a newcomer learns a realm of
a thousand members from its first neighbour, and a tenth of the largest realm from each."""

Refusal = Literal["invalid", "times", "stale", "conflict", "owner_rate", "full", "introducer_full"]


@dataclass(frozen=True, slots=True)
class Applied:
    """The record counts from now on."""

    sealed: SealedRecord
    previous: SealedRecord | None
    evicted: SealedRecord | None = None
    """The unproved record that made room for it."""


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Where a record came from: the member at the other end of the link (None: from disk), and the link's scope."""

    introducer: PeerId | None = None
    scope: AddressScope = AddressScope.PUBLIC


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record with what this node knows of it, as it is kept between runs."""

    envelope: bytes
    is_proved: bool
    scope: AddressScope
    """The narrowest scope of the links that brought the member's records."""


@dataclass(frozen=True, slots=True)
class OwnRecordSeen:
    """A member has a record that this node signed and that is ahead of the current one: it is of an earlier run, by
    another clock."""

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
    """Records by peer, this node's own included."""

    def __init__(
        self,
        own: PeerId,
        keys: RealmKeys,
        *,
        records_max: int,
        owner_burst: float = OWNER_BURST,
        owner_records_per_s: float = OWNER_RECORDS_PER_S,
        unproved_per_introducer_max: int = UNPROVED_PER_INTRODUCER_MAX,
    ) -> None:
        """``records_max`` bounds foreign records, left ones included."""
        self._own = own
        self._keys = keys
        self._records_max = records_max
        self._owner_burst = owner_burst
        self._owner_records_per_s = owner_records_per_s
        self._records: dict[PeerId, SealedRecord] = {}
        self.index: OfferIndex = OfferIndex()
        """Services and groups of the records, this node's own included."""
        self._owners: dict[bytes, PeerId] = {}
        """The peer of each envelope that counts: neighbours pass on most records several times."""
        self._buckets: dict[PeerId, _Bucket] = {}
        self._expiries: list[tuple[int, PeerId, int]] = []
        self._sum = 0
        self._unproved_max = unproved_per_introducer_max
        self._proved: dict[PeerId, None] = {}
        self._introducers: dict[PeerId, PeerId | None] = {}
        """The member that brought each unproved record first."""
        self._introduced: dict[PeerId | None, dict[PeerId, None]] = {}
        """Peers of unproved records, by the member that brought them first."""
        self._scopes: dict[PeerId, AddressScope] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._records

    def get(self, peer: PeerId) -> SealedRecord | None:
        """Return the record that counts for a peer."""
        return self._records.get(peer)

    def seq(self, peer: PeerId) -> int:
        """Return the sequence number of the record that counts; -1 without one."""
        sealed = self._records.get(peer)
        return -1 if sealed is None else sealed.record.seq

    def all(self) -> list[SealedRecord]:
        """Return every record, in the order of their arrival."""
        return list(self._records.values())

    def stored(self) -> list[StoredRecord]:
        """Return every foreign record, for keeping on disk."""
        return [
            StoredRecord(sealed.envelope, peer in self._proved, self.scope(peer))
            for peer, sealed in self._records.items()
            if peer != self._own
        ]

    def entries(self) -> list[tuple[PeerId, int]]:
        """Return peers and sequence numbers, proved ones first: a node that takes only a part of them takes the real
        ones."""
        entries = [(peer, sealed.record.seq) for peer, sealed in self._records.items()]
        return sorted(entries, key=lambda entry: entry[0] in self._introducers)

    def is_proved(self, peer: PeerId) -> bool:
        """Whether the peer has proved its membership to this node since its record is known, or is about to send it."""
        return peer in self._proved

    def prove(self, peer: PeerId) -> None:
        """Note that the peer proved its membership to this node."""
        self._proved[peer] = None
        self._forget_introducer(peer)

    def forget_proof(self, peer: PeerId) -> None:
        """Forget that a peer proved itself when no record of it is known any more."""
        if peer not in self._records:
            self._proved.pop(peer, None)

    def scope(self, peer: PeerId) -> AddressScope:
        """Return the narrowest scope of the links that brought the peer's records."""
        return self._scopes.get(peer, AddressScope.PUBLIC)

    def room_for_introduced(self, introducer: PeerId) -> int:
        """Count the records of unknown members that this node still takes from one member."""
        return max(0, self._unproved_max - len(self._introduced.get(introducer, ())))

    def full_introducers(self) -> list[PeerId]:
        """Return the members that brought as many records as are taken from one."""
        return [
            introducer
            for introducer, introduced in self._introduced.items()
            if introducer is not None and len(introduced) >= self._unproved_max
        ]

    def evict_unproved(self) -> SealedRecord | None:
        """Make room: drop the oldest unproved record of the member that brought most. None when all are proved."""
        most = max(self._introduced.values(), key=len, default=None)
        if not most:
            return None
        return self._drop(next(iter(most)))

    def summary(self) -> bytes:
        """Return 32 bytes that are the same on every node with the same records: a sum, so that it costs one hash per
        change."""
        return self._sum.to_bytes(32, "big")

    @property
    def is_full(self) -> bool:
        """Whether a record of an unknown member would be refused."""
        return len(self._records) - (self._own in self._records) >= self._records_max

    def put_own(self, sealed: SealedRecord) -> None:
        """Set this node's own record."""
        self._put(sealed)

    def offer(self, envelope: bytes, now_ms: int, now: float, source: RecordSource = RecordSource()) -> Outcome:
        """Take a record from anywhere: cheap checks first, the signature last."""
        owner = self._owners.get(envelope)
        if owner is not None:
            self._note_scope(owner, source.scope)
            return Refused("stale")
        try:
            sealed, signature = open_envelope(envelope, self._keys)
        except ProtocolError:
            return Refused("invalid")
        record = sealed.record
        current = self._records.get(record.peer)
        if current is not None and record.seq <= current.record.seq:
            if record.seq < current.record.seq:
                return Refused("stale")
            if record.peer != self._own:
                return Refused("conflict")
        try:
            check_times(record, now_ms)
        except ProtocolError:
            return Refused("times")
        if record.peer != self._own:
            if current is None and (refusal := self._no_room(record.peer, source.introducer)) is not None:
                return Refused(refusal)
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
        evicted = self.evict_unproved() if current is None and self.is_full else None
        self._put(sealed)
        self._note_scope(record.peer, source.scope)
        if record.peer not in self._proved and current is None:
            self._introducers[record.peer] = source.introducer
            self._introduced.setdefault(source.introducer, {})[record.peer] = None
        return Applied(sealed, current, evicted)

    def _no_room(self, peer: PeerId, introducer: PeerId | None) -> Literal["full", "introducer_full"] | None:
        if peer in self._proved:
            return "full" if self.is_full and not self._introducers else None
        if introducer is not None and self.room_for_introduced(introducer) == 0:
            return "introducer_full"
        return "full" if self.is_full else None

    def _note_scope(self, peer: PeerId, scope: AddressScope) -> None:
        if peer != self._own:
            self._scopes[peer] = min(scope, self._scopes.get(peer, scope))

    def _forget_introducer(self, peer: PeerId) -> None:
        introducer = self._introducers.pop(peer, None)
        introduced = self._introduced.get(introducer)
        if introduced is not None and introduced.pop(peer, peer) is None and not introduced:
            del self._introduced[introducer]

    def _drop(self, peer: PeerId) -> SealedRecord:
        sealed = self._records.pop(peer)
        self.index.replace(peer, sealed.record.statement, _NO_STATEMENT)
        self._owners.pop(sealed.envelope, None)
        self._buckets.pop(peer, None)
        self._scopes.pop(peer, None)
        self._proved.pop(peer, None)
        self._forget_introducer(peer)
        self._sum = (self._sum - _weight(sealed)) % (1 << 256)
        return sealed

    def next_expiry_ms(self) -> int | None:
        """Return when the next record expires, Unix milliseconds, skew included."""
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
            expired.append(self._drop(peer))
        return expired

    def _put(self, sealed: SealedRecord) -> None:
        peer = sealed.record.peer
        previous = self._records.get(peer)
        if previous is not None:
            self._sum -= _weight(previous)
            self._owners.pop(previous.envelope, None)
        self.index.replace(
            peer, _NO_STATEMENT if previous is None else previous.record.statement, sealed.record.statement
        )
        self._records[peer] = sealed
        self._owners[sealed.envelope] = peer
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
        # Only for records whose signature was good: no member can use up another one's tokens.
        bucket = self._buckets.setdefault(peer, _Bucket(self._owner_burst, now))
        bucket.tokens = max(0.0, bucket.tokens - 1.0)


def _weight(sealed: SealedRecord) -> int:
    record = sealed.record
    return int.from_bytes(hashlib.sha256(peer_id_bytes(record.peer) + record.seq.to_bytes(8, "big")).digest(), "big")
