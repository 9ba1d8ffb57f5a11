"""The members of one realm: verified records, who is connected, what to tell whom (docs/spec/realm.md §4 to §6). Pure.

`now` is a monotonic clock; record times are Unix milliseconds, for which a `ClockObserved` event tells the difference.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from dep2p.errors import ProtocolError
from dep2p.protocols.addresses.dialable import AddressScope, plausible_addrs
from dep2p.protocols.realm.anti_entropy import MemberSync, SendFrames
from dep2p.protocols.realm.member_record import MemberRecord, SealedRecord, State
from dep2p.protocols.realm.messages import Digest, MembersMessage, Records, Want
from dep2p.protocols.realm.offer_index import OfferIndex
from dep2p.protocols.realm.own_record import OwnRecord
from dep2p.protocols.realm.peer_selection import KEPT_MAX, PeerSelection, SelectionChange
from dep2p.protocols.realm.presence import MemberPresence, PresenceChanged
from dep2p.protocols.realm.record_store import Applied, OwnRecordSeen, RecordSource, RecordStore, StoredRecord
from dep2p.protocols.realm.statement import MemberStatement, ServiceOffer
from dep2p.types import PeerId, Rng

MemberState = Literal["up", "down", "left"]
ChangeKind = Literal["joined", "up", "down", "left", "expired", "changed"]
"""The change of a member. "changed": its fields, services or groups are others now."""


@dataclass(frozen=True, slots=True)
class RealmMember:
    """Another member, as this node knows it. Times are Unix seconds."""

    peer: PeerId
    addrs: tuple[str, ...]
    state: MemberState
    """"up": verified on a live connection, or lost for less than 15 s; "down": a member that is not connected."""
    seq: int
    """The number of its record; 0 while none has arrived."""
    issued_s: float
    expires_s: float
    last_seen_s: float | None
    """When it was last connected; None when never."""
    statement: MemberStatement = field(default_factory=MemberStatement)
    """Its words about itself: texts of the member, to be shown through `dep2p.outside_text`."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Its fields, by key."""
        return self.statement.fields

    @property
    def services(self) -> tuple[ServiceOffer, ...]:
        """The services that it offers."""
        return self.statement.services


@dataclass(frozen=True, slots=True)
class ClockObserved:
    """The wall clock at `now`, Unix seconds. Due before anything else, and from time to time."""

    wall_s: float


@dataclass(frozen=True, slots=True)
class AddrsChanged:
    """This node listens on these addresses."""

    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatementChanged:
    """This node says this about itself from now on."""

    statement: MemberStatement


@dataclass(frozen=True, slots=True)
class RecordsLoaded:
    """Records of an earlier run, from disk; verified like any other."""

    records: tuple[StoredRecord, ...]


@dataclass(frozen=True, slots=True)
class PeerVerified:
    """A peer proved itself on a connection."""

    connection: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerUnverified:
    """A connection ended on which the peer had proved itself, or it does not count any more."""

    connection: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The members stream of a verified connection is open."""

    link: int
    peer: PeerId
    scope: AddressScope = AddressScope.PUBLIC
    """How far the connection's addresses reach."""


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """A members stream ended."""

    link: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A members message came in on a link."""

    link: int
    message: MembersMessage
    has_more: bool = False
    """This is a part of a message, and more of it follows."""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """This node leaves the realm."""


TableEvent = (
    ClockObserved
    | AddrsChanged
    | StatementChanged
    | RecordsLoaded
    | PeerVerified
    | PeerUnverified
    | LinkOpened
    | LinkClosed
    | MessageReceived
    | LeaveRequested
)


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """Tell subscribers that a member came, went or changed."""

    peer: PeerId
    kind: ChangeKind


@dataclass(frozen=True, slots=True)
class MembershipEnded:
    """The peer left or its record expired: its connections are not verified from now on."""

    peer: PeerId
    reason: Literal["left", "expired"]


@dataclass(frozen=True, slots=True)
class CloseLink:
    """The peer broke the protocol on this link."""

    link: int
    error: ProtocolError


@dataclass(frozen=True, slots=True)
class RetainPeer:
    """Stay connected to this member."""

    peer: PeerId
    addrs: tuple[str, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ReleasePeer:
    """This node need not stay connected to the peer any more."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class ProbePeer:
    """Dial this peer once, at these addresses and no others, for a handshake: it never proved itself to this node."""

    peer: PeerId
    addrs: tuple[str, ...]


_NO_STATEMENT: Final = MemberStatement()
TableEffect = SendFrames | MemberChanged | MembershipEnded | CloseLink | RetainPeer | ReleasePeer | ProbePeer


@dataclass(slots=True)
class _Standing:
    """The part of a peer's state that is not in its record."""

    is_member: bool = False
    connections: dict[int, None] = field(default_factory=dict[int, None])
    last_seen_s: float | None = None


class MemberTable:
    """One node's knowledge of the members of one realm."""

    def __init__(
        self,
        own_record: OwnRecord,
        store: RecordStore,
        *,
        members_max: int,
        rng: Rng,
        kept_max: int = KEPT_MAX,
        presence: MemberPresence | None = None,
    ) -> None:
        """``own_record`` and ``store`` belong to the same peer and realm."""
        own = own_record.peer
        self.counts: Counter[str] = Counter()
        self.version: int = 0
        """Rises when a foreign record was added, proved or dropped: there is something new to save."""
        self._own = own
        self._members_max = members_max
        self._own_record = own_record
        self._store = store
        self._presence = presence or MemberPresence()
        self._sync = MemberSync(self._store, rng, self.counts)
        self._keep = PeerSelection(own, kept_max=kept_max)
        self._standing: dict[PeerId, _Standing] = {}
        self._own_addrs: tuple[str, ...] = ()
        self._wall_offset_s = 0.0

    # Queries

    def member(self, peer: PeerId) -> RealmMember | None:
        """Return one member as known now."""
        standing = self._standing.get(peer)
        sealed = self._store.get(peer)
        if peer == self._own or (standing is None and sealed is None):
            return None
        record = None if sealed is None else sealed.record
        is_member = standing is not None and standing.is_member
        state: MemberState = "down" if is_member else "left"
        if is_member and self._presence.is_up(peer):
            state = "up"
        return RealmMember(
            peer=peer,
            addrs=() if record is None else record.addrs,
            state=state,
            seq=0 if record is None else record.seq,
            issued_s=0.0 if record is None else record.issued_ms / 1000,
            expires_s=0.0 if record is None else record.expires_ms / 1000,
            last_seen_s=None if standing is None else standing.last_seen_s,
            statement=_NO_STATEMENT if record is None else record.statement,
        )

    def members(self) -> list[RealmMember]:
        """Return all other members, also those that left lately, in the order in which they became known."""
        views = (self.member(peer) for peer in self._standing)
        return [view for view in views if view is not None]

    @property
    def index(self) -> OfferIndex:
        """The offers of members, this node included as far as its record says so."""
        return self._store.index

    @property
    def own_statement(self) -> MemberStatement:
        """The statement of this node, now or in its next record."""
        return self._own_record.statement

    @property
    def own_record(self) -> MemberRecord | None:
        """Return this node's own record; None before the first one."""
        current = self._own_record.current
        return None if current is None else current.record

    @property
    def own_envelope(self) -> bytes:
        """Return this node's own record as it is sent. Raises ``LookupError`` before the first one."""
        if self._own_record.current is None:
            raise LookupError("no own record was issued yet")
        return self._own_record.current.envelope

    def stored(self) -> list[StoredRecord]:
        """Return all foreign records, for keeping on disk."""
        return self._store.stored()

    def dialable_addrs(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses in the peer's record that can be right."""
        sealed = self._store.get(peer)
        if sealed is None:
            return ()
        return plausible_addrs(sealed.record.addrs, heard_over=self._store.scope(peer), own=self._own_addrs)

    def full_introducers(self) -> list[PeerId]:
        """Return the members that brought as many records of members that this node never met as it takes from one."""
        return self._store.full_introducers()

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due."""
        times = [
            self._presence.next_deadline(),
            self._sync.next_deadline(),
            self._keep.next_deadline(),
            self._own_record.next_deadline(self._wall_offset_s),
        ]
        expiry_ms = self._store.next_expiry_ms()
        if expiry_ms is not None:
            times.append(expiry_ms / 1000 - self._wall_offset_s)
        return min((time for time in times if time is not None), default=None)

    # Events

    def handle(self, event: TableEvent, now: float) -> list[TableEffect]:
        """Take one event and return the effects."""
        match event:
            case MessageReceived():
                return self._on_message(event, now)
            case PeerVerified():
                return self._on_verified(event.peer, event.connection, now)
            case PeerUnverified():
                return self._on_unverified(event.peer, event.connection, now)
            case LinkOpened():
                current = self._own_record.current
                own = None if current is None else current.envelope
                return list(self._sync.opened(event.link, event.peer, own, now, scope=event.scope))
            case LinkClosed():
                self._sync.closed(event.link)
                return []
            case ClockObserved():
                self._wall_offset_s = event.wall_s - now
                return []
            case AddrsChanged():
                self._own_addrs = event.addrs
                self._own_record.set_addrs(event.addrs)
                return self._issue("active", now)
            case StatementChanged():
                self._own_record.set_statement(event.statement, now, len(self._standing))
                return []
            case RecordsLoaded():
                return self._on_loaded(event.records, now)
            case LeaveRequested():
                return self._issue("left", now)

    def on_deadline(self, now: float) -> list[TableEffect]:
        """Expire records, end grace periods, refresh the own record, ask neighbours to compare."""
        effects: list[TableEffect] = []
        for sealed in self._store.expire(self._now_ms(now)):
            self.version += 1
            effects += self._on_expired(sealed, now)
        effects += self._presence_effects(self._presence.on_deadline(now))
        own_due = self._own_record.next_deadline(self._wall_offset_s)
        if own_due is not None and own_due <= now:
            effects += self._issue("active", now)
        effects += self._sync.on_deadline(now)
        effects += self._selected(self._keep.on_deadline(now), now)
        return effects

    def _on_message(self, event: MessageReceived, now: float) -> list[TableEffect]:
        link, message = event.link, event.message
        match message:
            case Records():
                effects = self._on_records(link, message.envelopes, now)
                return effects if event.has_more else [*effects, *self._sync.pass_on(link, now)]
            case Digest():
                return list(self._sync.on_digest(link, message, now))
            case Want():
                return list(self._sync.on_want(link, message))
            case _:
                return list(self._sync.on_summary(link, message.digest, now))

    def _on_loaded(self, records: Sequence[StoredRecord], now: float) -> list[TableEffect]:
        effects: list[TableEffect] = []
        for record in records:
            outcome = self._store.offer(record.envelope, self._now_ms(now), now, RecordSource(scope=record.scope))
            match outcome:
                case Applied():
                    if record.is_proved:
                        self._store.prove(outcome.sealed.record.peer)
                    effects += self._on_applied(outcome, now)
                case OwnRecordSeen():
                    self._own_record.seen(outcome.sealed.record, now)
                case _:
                    self.counts[f"record_{outcome.reason}"] += 1
        return effects

    def _on_records(self, link: int, envelopes: Sequence[bytes], now: float) -> list[TableEffect]:
        effects: list[TableEffect] = []
        now_ms = self._now_ms(now)
        source = RecordSource(self._sync.peer(link), self._sync.scope(link))
        for envelope in envelopes:
            outcome = self._store.offer(envelope, now_ms, now, source)
            match outcome:
                case Applied():
                    peer = outcome.sealed.record.peer
                    effects += self._on_applied(outcome, now)
                    if self._sync.was_wanted(link, peer):
                        self._sync.pulled(now)
                    else:
                        self._sync.is_news(link, peer, envelope, now)
                case OwnRecordSeen():
                    self.counts["own_record_ahead"] += 1
                    self._own_record.seen(outcome.sealed.record, now)
                case _:
                    self.counts[f"record_{outcome.reason}"] += 1
                    if outcome.reason == "invalid" and self._sync.invalid_record(link):
                        effects.append(CloseLink(link, ProtocolError("too many invalid member records")))
                        return effects
        return effects

    def _on_applied(self, applied: Applied, now: float) -> list[TableEffect]:
        self.version += 1
        self.counts["record_applied"] += 1
        record = applied.sealed.record
        effects = [] if applied.evicted is None else self._on_expired(applied.evicted, now)
        standing = self._standing.setdefault(record.peer, _Standing())
        if record.state == "left":
            effects += self._end(record.peer, standing, "left") if standing.is_member else []
            return [*effects, *self._selected(self._keep.discard(record.peer, now), now)]
        if not standing.is_member:
            standing.is_member = True
            effects.append(MemberChanged(record.peer, "joined"))
        elif record.statement != (_NO_STATEMENT if applied.previous is None else applied.previous.record.statement):
            effects.append(MemberChanged(record.peer, "changed"))
        change = self._keep.offer(
            record.peer, self.dialable_addrs(record.peer), is_proved=self._store.is_proved(record.peer), now=now
        )
        return [*effects, *self._selected(change, now)]

    def _on_verified(self, peer: PeerId, connection: int, now: float) -> list[TableEffect]:
        standing = self._standing.get(peer)
        effects: list[TableEffect] = []
        if standing is None:
            if len(self._standing) >= self._members_max and (evicted := self._store.evict_unproved()) is not None:
                effects += self._on_expired(evicted, now)
            if len(self._standing) >= self._members_max:
                # It may talk: it holds the secret. It is only not listed.
                self.counts["member_full"] += 1
                return effects
            standing = self._standing[peer] = _Standing()
        self.version += not self._store.is_proved(peer)
        self._store.prove(peer)
        effects += self._selected(self._keep.proved(peer, now), now)
        if not standing.is_member:
            standing.is_member = True
            effects.append(MemberChanged(peer, "joined"))
        standing.connections[connection] = None
        standing.last_seen_s = now + self._wall_offset_s
        return [*effects, *self._presence_effects(self._presence.connected(peer, now))]

    def _on_unverified(self, peer: PeerId, connection: int, now: float) -> list[TableEffect]:
        standing = self._standing.get(peer)
        if standing is None or connection not in standing.connections:
            return []
        del standing.connections[connection]
        standing.last_seen_s = now + self._wall_offset_s
        if standing.connections:
            return []
        return self._presence_effects(self._presence.disconnected(peer, now))

    def _on_expired(self, sealed: SealedRecord, now: float) -> list[TableEffect]:
        peer = sealed.record.peer
        standing = self._standing.get(peer)
        if standing is None:
            return []
        if sealed.record.state == "left":
            # Its tombstone. A peer that proved itself again since then stays while it is up; then
            # `_presence_effects` ends it.
            if not standing.is_member:
                del self._standing[peer]
                return []
            if self._presence.is_up(peer):
                self._store.prove(peer)
                return []
        effects = self._end(peer, standing, "expired")
        del self._standing[peer]
        return [*effects, *self._selected(self._keep.discard(peer, now), now)]

    def _end(self, peer: PeerId, standing: _Standing, reason: Literal["left", "expired"]) -> list[TableEffect]:
        standing.is_member = False
        standing.connections.clear()
        self._presence.forget(peer)
        return [MembershipEnded(peer, reason), MemberChanged(peer, reason)]

    def _presence_effects(self, changes: Sequence[PresenceChanged]) -> list[TableEffect]:
        effects: list[TableEffect] = []
        for change in changes:
            effects.append(MemberChanged(change.peer, change.kind))
            if change.kind == "down" and change.peer not in self._store:
                # It proved itself once but never sent a record: nothing else would ever end it.
                self._presence.forget(change.peer)
                self._store.forget_proof(change.peer)
                del self._standing[change.peer]
                effects.append(MemberChanged(change.peer, "expired"))
        return effects

    def _selected(self, change: SelectionChange, now: float) -> list[TableEffect]:
        effects: list[TableEffect] = [ReleasePeer(peer) for peer in change.release]
        for peer in change.keep:
            sealed = self._store.get(peer)
            if sealed is not None:
                ttl_s = max(0.0, (sealed.record.expires_ms - self._now_ms(now)) / 1000)
                effects.append(RetainPeer(peer, self.dialable_addrs(peer), ttl_s))
        effects += [ProbePeer(probe.peer, probe.addrs) for probe in change.probes]
        return effects

    def _issue(self, state: State, now: float) -> list[TableEffect]:
        sealed = self._own_record.issue(state, now, self._now_ms(now))
        self._store.put_own(sealed)
        return list(self._sync.broadcast([sealed.envelope]))

    def _now_ms(self, now: float) -> int:
        return int((now + self._wall_offset_s) * 1000)
