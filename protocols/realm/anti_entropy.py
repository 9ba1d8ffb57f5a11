"""How members bring each other's records up to date (docs/spec/realm.md §5): links, gossip, and anti-entropy. Pure.

A link is the members stream of one verified connection, by the connection's number. New records are gossiped to a few
neighbours; whatever gossip missed is found by comparing sums (SUMMARY), then lists (DIGEST), and pulled (WANT).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.protocols.realm.messages import (
    Digest,
    Want,
    encode_digest,
    encode_records,
    encode_summary,
    encode_want,
)
from dep2p.protocols.realm.record_store import RecordStore
from dep2p.types import PeerId, Rng

FANOUT: Final = 8
"""Neighbours that a foreign record is forwarded to; own records go to all."""
DIGEST_INTERVAL_S: Final = 5.0
"""A link's peer gets our list at most this often."""
WANT_TIMEOUT_S: Final = 10.0
WANTED_PER_LINK_MAX: Final = 4_096
INVALID_PER_LINK_MAX: Final = 32
"""Bad records after which a link is closed."""
SUMMARY_INTERVAL_S: Final = 60.0
SUMMARY_DELAY_S: Final = 1.0
"""After records were pulled: time to gather more before neighbours are asked to compare."""


@dataclass(frozen=True, slots=True)
class SendFrames:
    """Write these frames to a link's stream. Replies wait for the stream, gossip is dropped when it is full."""

    link: int
    frames: tuple[bytes, ...]
    is_reply: bool


@dataclass(slots=True)
class _Link:
    peer: PeerId
    digest_sent_at: float | None = None
    wanted: dict[PeerId, float] = field(default_factory=dict[PeerId, float])
    invalid: int = 0


class MemberSync:
    """The links of one realm's members and what is said on them."""

    def __init__(self, store: RecordStore, rng: Rng, counts: Counter[str]) -> None:
        self._store = store
        self._rng = rng
        self._counts = counts
        self._links: dict[int, _Link] = {}
        self._wanted: dict[PeerId, float] = {}
        self._summary_due: float | None = None

    def peer(self, link: int) -> PeerId | None:
        """Who is at the other end; None when the link is not open."""
        entry = self._links.get(link)
        return None if entry is None else entry.peer

    def opened(self, link: int, peer: PeerId, own: bytes | None, now: float) -> list[SendFrames]:
        """A link opened: say who we are, then compare."""
        self._links[link] = _Link(peer)
        if self._summary_due is None:
            self._summary_due = now + self._jittered(SUMMARY_INTERVAL_S)
        frames = [] if own is None else encode_records([own])
        return [SendFrames(link, (*frames, encode_summary(self._store.summary())), is_reply=False)]

    def closed(self, link: int) -> None:
        """A link ended."""
        entry = self._links.pop(link, None)
        if entry is not None:
            for peer in entry.wanted:
                self._wanted.pop(peer, None)

    def invalid_record(self, link: int) -> bool:
        """A bad record came in; True when the link is to be closed."""
        entry = self._links.get(link)
        if entry is None:
            return False
        entry.invalid += 1
        return entry.invalid >= INVALID_PER_LINK_MAX

    def was_wanted(self, link: int, peer: PeerId) -> bool:
        """Whether a record that came in on the link had been asked for there; it is not any more."""
        entry = self._links.get(link)
        if entry is None or entry.wanted.pop(peer, None) is None:
            return False
        self._wanted.pop(peer, None)
        return True

    def pulled(self, now: float) -> None:
        """Records that we had asked for were taken: soon tell neighbours that there is something to compare."""
        due = now + SUMMARY_DELAY_S
        if self._summary_due is None or self._summary_due > due:
            self._summary_due = due

    def broadcast(self, envelopes: Sequence[bytes]) -> list[SendFrames]:
        """Own records: to every neighbour."""
        frames = tuple(encode_records(envelopes))
        return [SendFrames(link, frames, is_reply=False) for link in self._one_link_per_peer()]

    def gossip(self, envelopes: Sequence[bytes], *, without: Sequence[PeerId]) -> list[SendFrames]:
        """Foreign records: to a few random neighbours, never back to ``without``."""
        if not envelopes:
            return []
        links = [link for link in self._one_link_per_peer() if self._links[link].peer not in without]
        frames = tuple(encode_records(envelopes))
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
        """Ask for what the peer has newer, unless it was just asked for elsewhere."""
        entry = self._links.get(link)
        if entry is None:
            return []
        missing: list[PeerId] = []
        for peer, seq in digest.entries:
            if seq <= self._store.seq(peer):
                continue
            asked_until = self._wanted.get(peer)
            if asked_until is not None and asked_until > now:
                continue
            if len(entry.wanted) >= WANTED_PER_LINK_MAX:
                self._forget_unanswered(entry, now)
                if len(entry.wanted) >= WANTED_PER_LINK_MAX:
                    self._counts["want_full"] += 1
                    break
            entry.wanted[peer] = self._wanted[peer] = now + WANT_TIMEOUT_S
            missing.append(peer)
        return [SendFrames(link, tuple(encode_want(missing)), is_reply=True)] if missing else []

    def on_want(self, link: int, want: Want) -> list[SendFrames]:
        """Send the records that were asked for; what we do not have is left out."""
        if link not in self._links:
            return []
        found = [self._store.get(peer) for peer in dict.fromkeys(want.peers)]
        frames = tuple(encode_records([sealed.envelope for sealed in found if sealed is not None]))
        return [SendFrames(link, frames, is_reply=True)] if frames else []

    def next_deadline(self) -> float | None:
        """When neighbours are asked to compare."""
        return self._summary_due if self._links else None

    def on_deadline(self, now: float) -> list[SendFrames]:
        """Ask a few neighbours to compare."""
        if self._summary_due is None or self._summary_due > now:
            return []
        self._summary_due = now + self._jittered(SUMMARY_INTERVAL_S)
        frame = encode_summary(self._store.summary())
        return [SendFrames(link, (frame,), is_reply=False) for link in self._sample(self._one_link_per_peer())]

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

    def _forget_unanswered(self, entry: _Link, now: float) -> None:
        for peer in [peer for peer, until in entry.wanted.items() if until <= now]:
            del entry.wanted[peer]
            if self._wanted.get(peer, now + 1.0) <= now:
                del self._wanted[peer]
