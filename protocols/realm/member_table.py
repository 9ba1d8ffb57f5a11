"""The members of one realm: verified records, who is connected, what to tell whom (docs/spec/realm.md §4 to §6). Pure.

`now` is a monotonic clock; record times are Unix milliseconds, for which a `ClockObserved` event tells the difference.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dep2p.errors import ProtocolError
from dep2p.protocols.realm.anti_entropy import MemberSync, SendFrames
from dep2p.protocols.realm.keys import RealmKeys
from dep2p.protocols.realm.member_record import MemberRecord, SealedRecord, State
from dep2p.protocols.realm.messages import Digest, MembersMessage, Records, Want
from dep2p.protocols.realm.own_record import OwnRecord
from dep2p.protocols.realm.peer_selection import KEPT_MAX, KeepChoice
from dep2p.protocols.realm.presence import MemberPresence, PresenceChanged
from dep2p.protocols.realm.record_store import Applied, OwnRecordSeen, RecordStore
from dep2p.types import PeerId, Rng

MemberState = Literal["up", "down", "left"]
ChangeKind = Literal["joined", "up", "down", "left", "expired"]


@dataclass(frozen=True, slots=True)
class Member:
    """What a node knows of another member. Times are Unix seconds."""

    peer: PeerId
    addrs: tuple[str, ...]
    state: MemberState
    """"up": verified on a live connection, or lost for less than 15 s; "down": a member that is not connected."""
    seq: int
    """Of its record; 0 while none has arrived."""
    issued_s: float
    expires_s: float
    last_seen_s: float | None
    """When it was last connected; None when never."""


@dataclass(frozen=True, slots=True)
class ClockObserved:
    """The wall clock at `now`, Unix seconds. Due before anything else, and from time to time."""

    wall_s: float


@dataclass(frozen=True, slots=True)
class AddrsChanged:
    """This node listens on these addresses."""

    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordsLoaded:
    """Envelopes of an earlier run, from disk; verified like any other."""

    envelopes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PeerVerified:
    """A peer proved itself on a connection."""

    connection: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerUnverified:
    """That connection ended, or does not count any more."""

    connection: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The members stream of a verified connection is open."""

    link: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """It ended."""

    link: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A members message came in on a link."""

    link: int
    message: MembersMessage


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """This node leaves the realm."""


TableEvent = (
    ClockObserved
    | AddrsChanged
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
    """Tell subscribers."""

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
class KeepConnected:
    """Stay connected to this member."""

    peer: PeerId
    addrs: tuple[str, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class LetGo:
    """No need to stay connected to this peer."""

    peer: PeerId


TableEffect = SendFrames | MemberChanged | MembershipEnded | CloseLink | KeepConnected | LetGo


@dataclass(slots=True)
class _Standing:
    """What is known of a peer beyond its record."""

    is_member: bool = False
    connections: dict[int, None] = field(default_factory=dict[int, None])
    last_seen_s: float | None = None


class MemberTable:
    """All that one node knows of one realm's members."""

    def __init__(
        self,
        own: PeerId,
        keys: RealmKeys,
        sign: Callable[[bytes], bytes],
        *,
        members_max: int,
        rng: Rng,
        features: Sequence[str] = (),
        kept_max: int = KEPT_MAX,
        presence: MemberPresence | None = None,
        store: RecordStore | None = None,
    ) -> None:
        """``sign`` makes Ed25519 signatures with the key of ``own``."""
        self.counts: Counter[str] = Counter()
        self.version = 0
        """Rises when a foreign record was added or dropped: there is something new to save."""
        self._own = own
        self._members_max = members_max
        self._own_record = OwnRecord(own, keys, sign, features=features)
        self._store = store or RecordStore(own, keys, records_max=members_max)
        self._presence = presence or MemberPresence()
        self._sync = MemberSync(self._store, rng, self.counts)
        self._keep = KeepChoice(own, kept_max=kept_max)
        self._standing: dict[PeerId, _Standing] = {}
        self._wall_offset_s = 0.0

    # What is asked

    def member(self, peer: PeerId) -> Member | None:
        """One member as known now."""
        standing = self._standing.get(peer)
        sealed = self._store.get(peer)
        if peer == self._own or (standing is None and sealed is None):
            return None
        record = None if sealed is None else sealed.record
        is_member = standing is not None and standing.is_member
        state: MemberState = "down" if is_member else "left"
        if is_member and self._presence.is_up(peer):
            state = "up"
        return Member(
            peer=peer,
            addrs=() if record is None else record.addrs,
            state=state,
            seq=0 if record is None else record.seq,
            issued_s=0.0 if record is None else record.issued_ms / 1000,
            expires_s=0.0 if record is None else record.expires_ms / 1000,
            last_seen_s=None if standing is None else standing.last_seen_s,
        )

    def members(self) -> list[Member]:
        """All other members, also those that left lately, in the order in which they became known."""
        views = (self.member(peer) for peer in self._standing)
        return [view for view in views if view is not None]

    @property
    def own_record(self) -> MemberRecord | None:
        """What this node says of itself now."""
        current = self._own_record.current
        return None if current is None else current.record

    @property
    def own_envelope(self) -> bytes:
        """The same, as it is sent. Raises ``LookupError`` before the first one."""
        if self._own_record.current is None:
            raise LookupError("no own record was issued yet")
        return self._own_record.current.envelope

    def envelopes(self) -> list[bytes]:
        """All foreign records, for keeping on disk."""
        return [sealed.envelope for sealed in self._store.all() if sealed.record.peer != self._own]

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due."""
        times = [
            self._presence.next_deadline(),
            self._sync.next_deadline(),
            self._own_record.next_deadline(self._wall_offset_s),
        ]
        expiry_ms = self._store.next_expiry_ms()
        if expiry_ms is not None:
            times.append(expiry_ms / 1000 - self._wall_offset_s)
        return min((time for time in times if time is not None), default=None)

    # What happens

    def handle(self, event: TableEvent, now: float) -> list[TableEffect]:
        """Take one event, give what is to be done."""
        match event:
            case MessageReceived():
                return self._on_message(event.link, event.message, now)
            case PeerVerified():
                return self._on_verified(event.peer, event.connection, now)
            case PeerUnverified():
                return self._on_unverified(event.peer, event.connection, now)
            case LinkOpened():
                current = self._own_record.current
                own = None if current is None else current.envelope
                return list(self._sync.opened(event.link, event.peer, own, now))
            case LinkClosed():
                self._sync.closed(event.link)
                return []
            case ClockObserved():
                self._wall_offset_s = event.wall_s - now
                return []
            case AddrsChanged():
                self._own_record.set_addrs(event.addrs)
                return self._issue("active", now)
            case RecordsLoaded():
                return self._on_records(None, event.envelopes, now)
            case LeaveRequested():
                return self._issue("left", now)

    def on_deadline(self, now: float) -> list[TableEffect]:
        """Expire records, end grace periods, refresh the own record, ask neighbours to compare."""
        effects: list[TableEffect] = []
        for sealed in self._store.expire(self._now_ms(now)):
            self.version += 1
            effects += self._on_expired(sealed, now)
        effects += self._told(self._presence.on_deadline(now))
        own_due = self._own_record.next_deadline(self._wall_offset_s)
        if own_due is not None and own_due <= now:
            effects += self._issue("active", now)
        effects += self._sync.on_deadline(now)
        return effects

    def _on_message(self, link: int, message: MembersMessage, now: float) -> list[TableEffect]:
        match message:
            case Records():
                return self._on_records(link, message.envelopes, now)
            case Digest():
                return list(self._sync.on_digest(link, message, now))
            case Want():
                return list(self._sync.on_want(link, message))
            case _:
                return list(self._sync.on_summary(link, message.digest, now))

    def _on_records(self, link: int | None, envelopes: Sequence[bytes], now: float) -> list[TableEffect]:
        effects: list[TableEffect] = []
        news: list[bytes] = []
        owners: list[PeerId] = []
        now_ms = self._now_ms(now)
        for envelope in envelopes:
            outcome = self._store.offer(envelope, now_ms, now)
            match outcome:
                case Applied():
                    peer = outcome.sealed.record.peer
                    effects += self._on_applied(outcome, now)
                    if link is None:
                        continue
                    if self._sync.was_wanted(link, peer):
                        self._sync.pulled(now)
                    else:
                        news.append(envelope)
                        owners.append(peer)
                case OwnRecordSeen():
                    self.counts["own_record_ahead"] += 1
                    self._own_record.seen(outcome.sealed.record, now)
                case _:
                    self.counts[f"record_{outcome.reason}"] += 1
                    if outcome.reason == "invalid" and link is not None and self._sync.invalid_record(link):
                        effects.append(CloseLink(link, ProtocolError("too many invalid member records")))
                        return effects
        if link is not None and news:
            sender = self._sync.peer(link)
            # With one record the owner is left out, too: it knows its own. With more, it is not worth a frame each.
            without = owners if len(owners) == 1 else []
            effects += self._sync.gossip(news, without=[*without, sender] if sender else without)
        return effects

    def _on_applied(self, applied: Applied, now: float) -> list[TableEffect]:
        self.version += 1
        self.counts["record_applied"] += 1
        record = applied.sealed.record
        standing = self._standing.setdefault(record.peer, _Standing())
        if record.state == "left":
            ended = self._end(record.peer, standing, "left") if standing.is_member else []
            return [*ended, *self._kept_changes(self._keep.discard(record.peer), now)]
        effects: list[TableEffect] = []
        if not standing.is_member:
            standing.is_member = True
            effects.append(MemberChanged(record.peer, "joined"))
        if not record.addrs:
            return [*effects, *self._kept_changes(self._keep.discard(record.peer), now)]
        previous = applied.previous
        if record.peer in self._keep and (previous is None or previous.record.addrs != record.addrs):
            effects += self._kept_changes(([record.peer], []), now)
        return [*effects, *self._kept_changes(self._keep.add(record.peer), now)]

    def _on_verified(self, peer: PeerId, connection: int, now: float) -> list[TableEffect]:
        standing = self._standing.get(peer)
        if standing is None:
            if len(self._standing) >= self._members_max:
                # It may talk: it holds the secret. It is only not listed.
                self.counts["member_full"] += 1
                return []
            standing = self._standing[peer] = _Standing()
        effects: list[TableEffect] = []
        if not standing.is_member:
            standing.is_member = True
            effects.append(MemberChanged(peer, "joined"))
        standing.connections[connection] = None
        standing.last_seen_s = now + self._wall_offset_s
        return [*effects, *self._told(self._presence.connected(peer, now))]

    def _on_unverified(self, peer: PeerId, connection: int, now: float) -> list[TableEffect]:
        standing = self._standing.get(peer)
        if standing is None or connection not in standing.connections:
            return []
        del standing.connections[connection]
        standing.last_seen_s = now + self._wall_offset_s
        if standing.connections:
            return []
        return self._told(self._presence.disconnected(peer, now))

    def _on_expired(self, sealed: SealedRecord, now: float) -> list[TableEffect]:
        peer = sealed.record.peer
        standing = self._standing.get(peer)
        if standing is None:
            return []
        if sealed.record.state == "left":
            # Its tombstone. A peer that proved itself again since then stays while it is up; `_told` ends it later.
            if not standing.is_member:
                del self._standing[peer]
                return []
            if self._presence.is_up(peer):
                return []
        effects = self._end(peer, standing, "expired")
        del self._standing[peer]
        return [*effects, *self._kept_changes(self._keep.discard(peer), now)]

    def _end(self, peer: PeerId, standing: _Standing, reason: Literal["left", "expired"]) -> list[TableEffect]:
        standing.is_member = False
        standing.connections.clear()
        self._presence.forget(peer)
        return [MembershipEnded(peer, reason), MemberChanged(peer, reason)]

    def _told(self, changes: Sequence[PresenceChanged]) -> list[TableEffect]:
        effects: list[TableEffect] = []
        for change in changes:
            effects.append(MemberChanged(change.peer, change.kind))
            if change.kind == "down" and change.peer not in self._store:
                # It proved itself once but never sent a record: nothing else would ever end it.
                self._presence.forget(change.peer)
                del self._standing[change.peer]
                effects.append(MemberChanged(change.peer, "expired"))
        return effects

    def _kept_changes(self, changes: tuple[list[PeerId], list[PeerId]], now: float) -> list[TableEffect]:
        effects: list[TableEffect] = [LetGo(peer) for peer in changes[1]]
        for peer in changes[0]:
            sealed = self._store.get(peer)
            if sealed is not None:
                ttl_s = max(0.0, (sealed.record.expires_ms - self._now_ms(now)) / 1000)
                effects.append(KeepConnected(peer, sealed.record.addrs, ttl_s))
        return effects

    def _issue(self, state: State, now: float) -> list[TableEffect]:
        sealed = self._own_record.issue(state, now, self._now_ms(now))
        self._store.put_own(sealed)
        return list(self._sync.broadcast([sealed.envelope]))

    def _now_ms(self, now: float) -> int:
        return int((now + self._wall_offset_s) * 1000)
