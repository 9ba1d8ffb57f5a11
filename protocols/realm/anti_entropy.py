"""How members bring each other's records up to date (docs/spec/realm.md §5): links, gossip, and anti-entropy. Pure.

A link is the members stream of one verified connection, by the connection's number. New records are gossiped to a few
neighbours; whatever gossip missed is found by comparing sums (SUMMARY), then lists (DIGEST), and pulled (WANT).

A list is a claim that nothing proves before the record has come. So a claim keeps other neighbours from being asked for
two seconds, no longer: those that claim the same record meanwhile wait in line.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.protocols.addresses.dialable import AddressScope
from dep2p.protocols.realm.messages import (
    Digest,
    Want,
    encode_digest,
    encode_records,
    encode_summary,
    encode_want,
)
from dep2p.protocols.realm.record_store import RecordStore
from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId, Rng

FANOUT: Final = 8
"""Neighbours that a foreign record is forwarded to; own records go to all."""
PASSED_ON_PER_S: Final = 32.0
"""Records of others, unasked, that are passed on for one member in a second, averaged. Neighbours learn the rest when
they compare, and then each asks for it once: passed on, it comes from each of their neighbours."""
PASSED_ON_BURST: Final = 128
"""Such records that may come at once: many members begin or move at the same time."""
DIGEST_INTERVAL_S: Final = 5.0
"""Seconds between two of our lists to the peer of a link at least."""
WANT_TIMEOUT_S: Final = 10.0
"""Seconds until a neighbour may be asked for the same record again."""
NEXT_CLAIMANT_S: Final = 2.0
"""Seconds that a neighbour has to send a record that it claimed; then the next one in line is asked, too."""
CLAIMANTS_WAITING_MAX: Final = 4
"""Neighbours in line for one record; further ones are asked at once."""
CLAIMS_MAX: Final = 65_536
"""Records for which there is a line; further ones are asked for at every neighbour that claims them."""
WANTED_PER_LINK_MAX: Final = 4_096
INVALID_PER_LINK_MAX: Final = 32
"""Bad records after which a link is closed."""
SUMMARY_INTERVAL_S: Final = 60.0
SUMMARY_DELAY_S: Final = 1.0
"""Seconds after records were pulled until neighbours are asked to compare: time to gather more."""


@dataclass(frozen=True, slots=True)
class SendFrames:
    """Write these frames to a link's stream. Replies wait for the stream, gossip is dropped when it is full."""

    link: int
    frames: tuple[bytes, ...]
    is_reply: bool


@dataclass(slots=True)
class _Claim:
    """A record that a neighbour was asked for."""

    next_at: float
    """When the next one in line is asked."""
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Links in line, and the sequence number that each claims."""


@dataclass(slots=True)
class _SyncLink:
    peer: PeerId
    scope: AddressScope
    digest_sent_at: float | None = None
    wanted: dict[PeerId, float] = field(default_factory=dict[PeerId, float])
    invalid: int = 0
    news: list[tuple[PeerId, bytes]] = field(default_factory=list[tuple[PeerId, bytes]])
    """Records of the present message to pass on, and whose they are; at most those of one message."""


class MemberSync:
    """The links of one realm's members and the messages on them."""

    def __init__(self, store: RecordStore, rng: Rng, counts: Counter[str]) -> None:
        self._store = store
        self._rng = rng
        self._counts = counts
        self._links: dict[int, _SyncLink] = {}
        self._claims: dict[PeerId, _Claim] = {}
        self._claims_due: deque[tuple[float, PeerId]] = deque()
        """`next_at` of the claims, in order; what does not match its claim any more is skipped."""
        self._summary_due: float | None = None
        self._pass_on: dict[PeerId, TokenBucket] = {}
        """Rates of records to pass on, by linked member."""

    def peer(self, link: int) -> PeerId | None:
        """Return the peer at the other end; None when the link is not open."""
        entry = self._links.get(link)
        return None if entry is None else entry.peer

    def scope(self, link: int) -> AddressScope:
        """How far the addresses reach that the link can speak of."""
        entry = self._links.get(link)
        return AddressScope.PUBLIC if entry is None else entry.scope

    def opened(
        self, link: int, peer: PeerId, own: bytes | None, now: float, *, scope: AddressScope = AddressScope.PUBLIC
    ) -> list[SendFrames]:
        """Greet a link's peer with our own record, then compare. ``scope``: how far the connection's addresses
        reach."""
        self._links[link] = _SyncLink(peer, scope)
        if self._summary_due is None:
            self._summary_due = now + self._jittered(SUMMARY_INTERVAL_S)
        frames = [] if own is None else encode_records([own])
        return [SendFrames(link, (*frames, encode_summary(self._store.summary())), is_reply=False)]

    def closed(self, link: int) -> None:
        """Forget a link that ended."""
        entry = self._links.pop(link, None)
        if entry is not None and all(other.peer != entry.peer for other in self._links.values()):
            self._pass_on.pop(entry.peer, None)

    def invalid_record(self, link: int) -> bool:
        """Count a bad record; return True when the link is to be closed."""
        entry = self._links.get(link)
        if entry is None:
            return False
        entry.invalid += 1
        return entry.invalid >= INVALID_PER_LINK_MAX

    def was_wanted(self, link: int, peer: PeerId) -> bool:
        """Whether a record that came in on the link had been asked for there; forgets that it was."""
        entry = self._links.get(link)
        if entry is None or entry.wanted.pop(peer, None) is None:
            return False
        self._claims.pop(peer, None)
        return True

    def pulled(self, now: float) -> None:
        """Note that records that we had asked for were taken: neighbours are soon asked to compare."""
        due = now + SUMMARY_DELAY_S
        if self._summary_due is None or self._summary_due > due:
            self._summary_due = due

    def broadcast(self, envelopes: Sequence[bytes]) -> list[SendFrames]:
        """Send own records to every neighbour."""
        frames = tuple(encode_records(envelopes))
        return [SendFrames(link, frames, is_reply=False) for link in self._one_link_per_peer()]

    def is_news(self, link: int, owner: PeerId, envelope: bytes, now: float) -> None:
        """Keep a record that the link's peer sent unasked until `pass_on`, within the peer's rate.

        Above it, neighbours are soon asked to compare: they learn the record then.
        """
        entry = self._links.get(link)
        if entry is None:
            return
        if owner != entry.peer:
            bucket = self._pass_on.get(entry.peer)
            if bucket is None:
                bucket = self._pass_on[entry.peer] = TokenBucket(PASSED_ON_PER_S, PASSED_ON_BURST)
            if bucket.take(now):
                self._counts["record_not_passed_on_rate"] += 1
                self.pulled(now)
                return
        entry.news.append((owner, envelope))

    def pass_on(self, link: int, now: float) -> list[SendFrames]:
        """Send the records of a whole message that are news to a few random neighbours, never back to their sender.

        With one record its owner is left out, too: it knows its own. With more, it is not worth a frame each.
        """
        entry = self._links.get(link)
        if entry is None or not entry.news:
            return []
        news, entry.news = entry.news, []
        without = {entry.peer, news[0][0]} if len(news) == 1 else {entry.peer}
        links = [link for link in self._one_link_per_peer() if self._links[link].peer not in without]
        frames = tuple(encode_records([envelope for _, envelope in news]))
        return [SendFrames(link, frames, is_reply=False) for link in self._sample(links)]

    def on_summary(self, link: int, digest: bytes, now: float) -> list[SendFrames]:
        """Answer with our own sum and list when the sums differ and the peer has not just got our list."""
        entry = self._links.get(link)
        if entry is None or digest == self._store.summary():
            return []
        if entry.digest_sent_at is not None and now - entry.digest_sent_at < DIGEST_INTERVAL_S:
            self._counts["digest_held_back"] += 1
            return []
        entry.digest_sent_at = now
        frames = (encode_summary(self._store.summary()), *encode_digest(self._store.entries()))
        return [SendFrames(link, frames, is_reply=True)]

    def on_digest(self, link: int, digest: Digest, now: float) -> list[SendFrames]:
        """Ask for the records that the peer has newer; one that another neighbour was just asked for waits in line."""
        entry = self._links.get(link)
        if entry is None:
            return []
        missing: list[PeerId] = []
        room = self._store.room_for_introduced(entry.peer)
        for peer, seq in digest.entries:
            known_seq = self._store.seq(peer)
            if seq <= known_seq:
                continue
            is_introduced = known_seq < 0 and not self._store.is_proved(peer)
            if is_introduced and room == 0:
                self._counts["want_introducer_full"] += 1
                continue
            if entry.wanted.get(peer, now) > now or self._waits_in_line(link, peer, seq, now):
                continue
            if not self._has_room(entry, now):
                break
            self._ask(entry, peer, now)
            missing.append(peer)
            room -= is_introduced
        return [SendFrames(link, tuple(encode_want(missing)), is_reply=True)] if missing else []

    def _waits_in_line(self, link: int, peer: PeerId, seq: int, now: float) -> bool:
        """Whether another neighbour was just asked, so that this one waits for its turn."""
        claim = self._claims.get(peer)
        if claim is None or (claim.next_at <= now and not claim.waiting):
            return False
        if any(waiting == link for waiting, _ in claim.waiting):
            return True
        if len(claim.waiting) >= CLAIMANTS_WAITING_MAX:
            return False
        claim.waiting.append((link, seq))
        return True

    def _has_room(self, entry: _SyncLink, now: float) -> bool:
        if len(entry.wanted) >= WANTED_PER_LINK_MAX:
            for peer in [peer for peer, until in entry.wanted.items() if until <= now]:
                del entry.wanted[peer]
            if len(entry.wanted) >= WANTED_PER_LINK_MAX:
                self._counts["want_full"] += 1
                return False
        return True

    def _ask(self, entry: _SyncLink, peer: PeerId, now: float) -> None:
        entry.wanted[peer] = now + WANT_TIMEOUT_S
        claim = self._claims.get(peer)
        if claim is None:
            if len(self._claims) >= CLAIMS_MAX:
                self._counts["claims_full"] += 1
                return
            claim = self._claims[peer] = _Claim(0.0)
        claim.next_at = now + NEXT_CLAIMANT_S
        self._claims_due.append((claim.next_at, peer))

    def _ask_next_claimants(self, now: float) -> list[SendFrames]:
        asked: dict[int, list[PeerId]] = {}
        while self._claims_due and self._claims_due[0][0] <= now:
            due, peer = self._claims_due.popleft()
            claim = self._claims.get(peer)
            if claim is None or claim.next_at != due:
                continue
            link = self._next_claimant(claim, peer, now)
            if link is None:
                del self._claims[peer]
                continue
            self._counts["want_next_claimant"] += 1
            self._ask(self._links[link], peer, now)
            asked.setdefault(link, []).append(peer)
        return [SendFrames(link, tuple(encode_want(peers)), is_reply=False) for link, peers in asked.items()]

    def _next_claimant(self, claim: _Claim, peer: PeerId, now: float) -> int | None:
        while claim.waiting:
            link, seq = claim.waiting.pop(0)
            entry = self._links.get(link)
            if entry is not None and seq > self._store.seq(peer) and self._has_room(entry, now):
                return link
        return None

    def on_want(self, link: int, want: Want) -> list[SendFrames]:
        """Send the records that were asked for; what we do not have is left out."""
        if link not in self._links:
            return []
        found = [self._store.get(peer) for peer in dict.fromkeys(want.peers)]
        frames = tuple(encode_records([sealed.envelope for sealed in found if sealed is not None]))
        return [SendFrames(link, frames, is_reply=True)] if frames else []

    def next_deadline(self) -> float | None:
        """Return when neighbours are asked to compare, or the next one in line for a record."""
        times = [self._summary_due if self._links else None, self._claims_due[0][0] if self._claims_due else None]
        return min((time for time in times if time is not None), default=None)

    def on_deadline(self, now: float) -> list[SendFrames]:
        """Ask those in line for records that have not come, and a few neighbours to compare."""
        effects = self._ask_next_claimants(now)
        if self._summary_due is None or self._summary_due > now:
            return effects
        self._summary_due = now + self._jittered(SUMMARY_INTERVAL_S)
        frame = encode_summary(self._store.summary())
        links = self._sample(self._one_link_per_peer())
        return [*effects, *(SendFrames(link, (frame,), is_reply=False) for link in links)]

    def _one_link_per_peer(self) -> list[int]:
        chosen: dict[PeerId, int] = {}
        for link, entry in self._links.items():
            chosen[entry.peer] = link
        return list(chosen.values())

    def _sample(self, links: list[int]) -> list[int]:
        for at in range(min(FANOUT, len(links))):
            other = at + int(self._rng.random() * (len(links) - at))
            links[at], links[other] = links[other], links[at]
        return links[:FANOUT]

    def _jittered(self, interval_s: float) -> float:
        return interval_s * (0.75 + 0.5 * self._rng.random())
