"""Selection of the members that a node stays connected to, and of those that it tries to meet (docs/spec/realm.md §6).
Pure.

Each node prefers others by a hash of both ids: every node has other favourites, so a large realm becomes a random graph
and no member is the hub, and the choice survives restarts.

Only members that have proved themselves to this node are kept connected. A record proves nothing but that some member
made up an identity: the members of such records are *probed*, a few at a time, by one dial each. So a member that
invents others cannot take the places of real ones, nor make the realm knock at a third party's door for long.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.protocols.addresses.dialable import DialTarget, dial_target
from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import PeerId

KEPT_MAX: Final = 64
PROBES_MAX: Final = 16
"""Unproved members that are tried at a time."""
PROBE_S: Final = 30.0
"""Seconds that a probe holds its place unless it succeeds: the pace at which one member's inventions are dialed."""
PROBES_PER_HOST_MAX: Final = 4
"""Probes at a time that knock at one host, unless a member has been met there; also addresses of it in one probe."""
PROBE_ADDRS_MAX: Final = 8
"""Addresses of one probe."""
PROBE_BACKOFF: Final = Backoff(first_s=PROBE_S, max_s=300.0)
"""Waits before a peer, or a socket that several peers name, is tried again."""
GOOD_TARGET_FAILURES_MAX: Final = 3
"""Failures in a row that a socket may have where a member was met before: a relay also has members that are away."""
REFILL_INTERVAL_S: Final = 0.2
"""Seconds between two looks at all candidates."""
TARGETS_MAX: Final = 1_024
"""Sockets whose failures are remembered; the least recent is forgotten."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Dial this peer once at these addresses."""

    peer: PeerId
    addrs: tuple[str, ...]


@dataclass(slots=True)
class SelectionChange:
    """Peers to keep connected from now on, peers to release, and dials to make."""

    keep: list[PeerId] = field(default_factory=list[PeerId])
    release: list[PeerId] = field(default_factory=list[PeerId])
    probes: list[Probe] = field(default_factory=list[Probe])


@dataclass(slots=True)
class _Candidate:
    rank: bytes
    is_proved: bool
    addrs: tuple[str, ...] = ()
    targets: tuple[tuple[str, DialTarget], ...] = ()
    """The addresses with their sockets."""
    failures: int = 0
    not_before: float = 0.0

    def set_addrs(self, addrs: tuple[str, ...]) -> None:
        self.addrs = addrs
        pairs = [(addr, dial_target(addr)) for addr in addrs]
        self.targets = tuple((addr, target) for addr, target in pairs if target is not None)


@dataclass(slots=True)
class _ActiveProbe:
    until: float
    targets: tuple[DialTarget, ...]


@dataclass(slots=True)
class _TargetHistory:
    failures: int = 0
    """Failures since a member proved itself after a dial there."""
    not_before: float = 0.0
    was_good: bool = False

    @property
    def is_good(self) -> bool:
        return self.was_good and self.failures <= GOOD_TARGET_FAILURES_MAX


class PeerSelection:
    """The favourites among the members that have addresses, and the probes of those that were never met."""

    def __init__(self, own: PeerId, *, kept_max: int = KEPT_MAX) -> None:
        self._own = own
        self._kept_max = kept_max
        self._candidates: dict[PeerId, _Candidate] = {}
        self._kept: dict[PeerId, None] = {}
        self._probes: dict[PeerId, _ActiveProbe] = {}
        self._targets: dict[DialTarget, _TargetHistory] = {}
        self._next_check: float | None = None
        """When to look for candidates to probe; None when none waits."""
        self._checked_at = 0.0

    def __contains__(self, peer: PeerId) -> bool:
        """Whether the peer is kept connected."""
        return peer in self._kept

    def offer(self, peer: PeerId, addrs: Sequence[str], *, is_proved: bool, now: float) -> SelectionChange:
        """Take the record of a member that arrived. ``addrs``: its plausible addresses; without any it is no
        candidate."""
        if not addrs:
            return self.discard(peer, now)
        change = SelectionChange()
        candidate = self._candidates.get(peer)
        if candidate is None:
            rank = hashlib.sha256(f"{self._own}|{peer}".encode()).digest()
            candidate = self._candidates[peer] = _Candidate(rank, is_proved)
            candidate.set_addrs(tuple(addrs))
            if is_proved:
                self._consider(peer, change)
        else:
            if peer in self._kept and candidate.addrs != tuple(addrs):
                change.keep.append(peer)  # again, for the new addresses
            candidate.set_addrs(tuple(addrs))
            candidate.failures, candidate.not_before = 0, now  # it was alive when it issued the record
        if not candidate.is_proved and peer not in self._probes:
            if len(self._probes) >= PROBES_MAX or not self._is_favourite(candidate, self._worst_rank()):
                self._check_at(now + PROBE_S)
            elif not self._probe(peer, candidate, now, change):
                self._check_at(now + PROBE_S)
        return change

    def proved(self, peer: PeerId, now: float) -> SelectionChange:
        """Note that the peer proved its membership to this node."""
        change = SelectionChange()
        candidate = self._candidates.get(peer)
        if candidate is None or candidate.is_proved:
            return change
        candidate.is_proved = True
        probe = self._probes.pop(peer, None)
        for target in () if probe is None else probe.targets:
            self._targets[target] = _TargetHistory(was_good=True)
        self._consider(peer, change)
        self._check_soon(now)
        return change

    def discard(self, peer: PeerId, now: float) -> SelectionChange:
        """Drop a member that left, expired or lost its addresses."""
        change = SelectionChange()
        self._candidates.pop(peer, None)
        was_probed = self._probes.pop(peer, None) is not None
        if peer in self._kept:
            del self._kept[peer]
            change.release.append(peer)
            waiting = [one for one, candidate in self._candidates.items() if candidate.is_proved]
            waiting = [one for one in waiting if one not in self._kept]
            if waiting:
                best = min(waiting, key=self._rank)
                self._kept[best] = None
                change.keep.append(best)
        if was_probed or change.release:
            self._check_soon(now)
        return change

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due."""
        times = [probe.until for probe in self._probes.values()]
        if self._next_check is not None and len(self._probes) < PROBES_MAX:
            times.append(self._next_check)
        return min(times, default=None)

    def on_deadline(self, now: float) -> SelectionChange:
        """End the probes whose time is over, and begin others."""
        change = SelectionChange()
        ended = [peer for peer, probe in self._probes.items() if probe.until <= now]
        for peer in ended:
            del self._probes[peer]
        if ended or (self._next_check is not None and self._next_check <= now):
            self._refill(now, change)
        return change

    def _rank(self, peer: PeerId) -> bytes:
        return self._candidates[peer].rank

    def _consider(self, peer: PeerId, change: SelectionChange) -> None:
        """Keep a proved candidate if it is among the favourites."""
        if len(self._kept) >= self._kept_max:
            if not self._kept:
                return
            worst = max(self._kept, key=self._rank)
            if self._rank(peer) >= self._rank(worst):
                return
            del self._kept[worst]
            change.release.append(worst)
        self._kept[peer] = None
        change.keep.append(peer)

    def _refill(self, now: float, change: SelectionChange) -> None:
        """Begin probes while there are places, with the favourites first."""
        self._next_check, self._checked_at = None, now
        worst = self._worst_rank()
        waiting = [
            peer
            for peer, one in self._candidates.items()
            if not one.is_proved and peer not in self._probes and self._is_favourite(one, worst)
        ]
        for peer in sorted(waiting, key=self._rank):
            if len(self._probes) >= PROBES_MAX:
                self._check_at(now + PROBE_S)
                return
            candidate = self._candidates[peer]
            if candidate.not_before > now:
                self._check_at(candidate.not_before)
            elif not self._probe(peer, candidate, now, change):
                self._check_at(now + PROBE_S)

    def _check_at(self, when: float) -> None:
        self._next_check = when if self._next_check is None else min(self._next_check, when)

    def _check_soon(self, now: float) -> None:
        if len(self._candidates) > len(self._kept) + len(self._probes):
            self._check_at(max(now, self._checked_at + REFILL_INTERVAL_S))

    def _worst_rank(self) -> bytes | None:
        """The rank that a candidate has to beat; None while there are places."""
        return None if len(self._kept) < self._kept_max else max(map(self._rank, self._kept), default=b"")

    def _is_favourite(self, candidate: _Candidate, worst: bytes | None) -> bool:
        return worst is None or candidate.rank < worst

    def _probe(self, peer: PeerId, candidate: _Candidate, now: float, change: SelectionChange) -> bool:
        """Begin a probe unless none of its addresses may be dialed now."""
        free = self._free_targets(candidate.targets, now)
        if not free:
            return False
        candidate.failures += 1
        candidate.not_before = now + PROBE_BACKOFF.after(candidate.failures)
        self._check_at(candidate.not_before)
        targets = tuple(dict.fromkeys(target for _, target in free))
        for target in targets:
            self._note_dial(target, now)
        self._probes[peer] = _ActiveProbe(now + PROBE_S, targets)
        change.probes.append(Probe(peer, tuple(addr for addr, _ in free)))
        return True

    def _free_targets(self, pairs: Sequence[tuple[str, DialTarget]], now: float) -> list[tuple[str, DialTarget]]:
        """Return the addresses that may be dialed now, with their sockets."""
        free: list[tuple[str, DialTarget]] = []
        for addr, target in pairs:
            history = self._targets.get(target)
            if history is None or not history.is_good:
                if history is not None and history.not_before > now:
                    continue
                host = target.host
                in_others = sum(any(one.host == host for one in probe.targets) for probe in self._probes.values())
                in_this = sum(one.host == host for _, one in free)
                if max(in_others, in_this) >= PROBES_PER_HOST_MAX:
                    continue
            free.append((addr, target))
            if len(free) == PROBE_ADDRS_MAX:
                break
        return free

    def _note_dial(self, target: DialTarget, now: float) -> None:
        """Count a dial as failed until a member proves itself there."""
        history = self._targets.pop(target, None) or _TargetHistory()
        self._targets[target] = history
        if len(self._targets) > TARGETS_MAX:
            del self._targets[next(iter(self._targets))]
        history.failures += 1
        excess = history.failures - (GOOD_TARGET_FAILURES_MAX if history.was_good else 0)
        if excess > 0:
            history.not_before = now + PROBE_BACKOFF.after(excess)
