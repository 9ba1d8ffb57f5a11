"""The schedule of reconnects: exponential back-off with jitter. Pure."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import PeerId, Rng


@dataclass(slots=True)
class _Target:
    failures: int = 0
    state: str = "waiting"
    """waiting (for ``due_s``), trying, or connected."""
    due_s: float = 0.0
    connected_s: float = 0.0
    lost_s: float = float("-inf")
    """When a stable connection was lost."""


QUICK_S: Final = 2.0
"""The longest wait between two attempts at a peer that was lost not long ago: any moment may heal what parted both."""
QUICK_FOR_S: Final = 600.0
"""How long a peer counts as lost not long ago."""
QUICK_MAX: Final = 4
"""Peers that are tried so often at a time. They stand for the others: once one is back, all are tried."""
_WAKE_S: Final = 0.5
"""Time over which attempts are spread that one cause makes due together."""


class ReconnectPolicy:
    """The peers that one host stays connected to (targets), and the next attempt for each.

    Times are seconds of the caller's clock. The delay after the n-th failure in a row is ``initial_s * 2**(n-1)``, at
    most ``max_s``, times a random factor between 0.5 and 1, so that peers which lost each other together do not dial at
    the same moment. A connection that lasted ``stable_s`` forgives earlier failures; a shorter one counts as a failure,
    so that a peer that accepts and hangs up is not dialled in a tight loop.

    Of the peers whose stable connection was lost in the last `QUICK_FOR_S`, up to `QUICK_MAX` wait no longer than
    `QUICK_S`. When one of them is back, a network has probably healed: all that were lost are due at once.
    """

    def __init__(
        self,
        rng: Rng,
        *,
        initial_s: float = 1.0,
        max_s: float = 300.0,
        stable_s: float = 10.0,
        peers_max: int = 4_096,
    ) -> None:
        if not 0 < initial_s <= max_s:
            raise ValueError(f"initial_s {initial_s} must be over 0 and at most max_s {max_s}")
        self._rng = rng
        self._backoff = Backoff(initial_s, max_s)
        self._stable_s = stable_s
        self._peers_max = peers_max
        self._targets: dict[PeerId, _Target] = {}
        self._heap: list[tuple[float, PeerId]] = []
        self._quick: dict[PeerId, None] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._targets

    def __len__(self) -> int:
        return len(self._targets)

    def add(self, peer: PeerId, now: float, *, connected: bool) -> bool:
        """Keep this peer connected from now on, dialling at once if it is not. Returns False when ``peers_max`` are
        kept."""
        if peer in self._targets:
            return True
        if len(self._targets) >= self._peers_max:
            return False
        target = self._targets[peer] = _Target()
        if connected:
            target.state, target.connected_s = "connected", now
        else:
            self._schedule(peer, target, now)
        return True

    def forget(self, peer: PeerId) -> None:
        """Keep a peer connected no more."""
        self._targets.pop(peer, None)
        self._quick.pop(peer, None)

    def connected(self, peer: PeerId, now: float) -> None:
        """Note that a connection to the peer exists, dialled by either side."""
        target = self._targets.get(peer)
        if target is not None and target.state != "connected":
            target.state, target.connected_s = "connected", now
            self._quick.pop(peer, None)
            if self._was_lost(target, now):
                target.lost_s = float("-inf")
                self._wake([each for each, other in self._targets.items() if self._was_lost(other, now)], now)

    def disconnected(self, peer: PeerId, now: float) -> None:
        """Note that the last connection to the peer ended."""
        target = self._targets.get(peer)
        if target is None or target.state != "connected":
            return
        if now - target.connected_s >= self._stable_s:
            target.failures = 0
            target.lost_s = now
            if len(self._quick) < QUICK_MAX:
                self._quick[peer] = None
        self._back_off(peer, target, now)

    def failed(self, peer: PeerId, now: float) -> None:
        """Note that an attempt from `due` did not connect."""
        target = self._targets.get(peer)
        if target is not None and target.state == "trying":
            self._back_off(peer, target, now)

    def hint(self, peer: PeerId, now: float) -> None:
        """Note a new address of the peer: a waiting attempt need not wait longer than the first delay."""
        target = self._targets.get(peer)
        if target is not None and target.state == "waiting":
            soon_s = now + self._backoff.jittered(1, self._rng)
            if soon_s < target.due_s:
                self._schedule(peer, target, soon_s)

    def wake_all(self, now: float) -> None:
        """Note that this node's own network has changed: every waiting attempt is due soon."""
        self._wake(list(self._targets), now)

    def is_quick(self, peer: PeerId) -> bool:
        """Whether an attempt at the peer ends early so that the next one begins with a fresh connection: the system
        sends a lost first packet again after 1, 3, 7 and 15 s only. Every fourth attempt has its full time."""
        target = self._targets.get(peer)
        return target is not None and peer in self._quick and target.failures % 4 != 0

    def due(self, now: float) -> list[PeerId]:
        """Return the peers to dial now; each counts as being tried until `connected` or `failed`."""
        found: list[PeerId] = []
        while self._heap and self._heap[0][0] <= now:
            due_s, peer = heapq.heappop(self._heap)
            target = self._targets.get(peer)
            if target is not None and target.state == "waiting" and target.due_s == due_s:
                target.state = "trying"
                found.append(peer)
        return found

    def next_deadline(self) -> float | None:
        """Return when to ask `due` next; None when nothing waits."""
        while self._heap:
            due_s, peer = self._heap[0]
            target = self._targets.get(peer)
            if target is not None and target.state == "waiting" and target.due_s == due_s:
                return due_s
            heapq.heappop(self._heap)
        return None

    def _back_off(self, peer: PeerId, target: _Target, now: float) -> None:
        target.failures += 1
        wait_s = self._backoff.jittered(target.failures, self._rng)
        if peer in self._quick:
            if self._was_lost(target, now):
                wait_s = min(wait_s, QUICK_S * (1 + self._rng.random()) / 2)
            else:
                del self._quick[peer]
        self._schedule(peer, target, now + wait_s)

    def _was_lost(self, target: _Target, now: float) -> bool:
        return now - target.lost_s < QUICK_FOR_S

    def _wake(self, peers: Iterable[PeerId], now: float) -> None:
        for peer in peers:
            target = self._targets[peer]
            soon_s = now + _WAKE_S * self._rng.random()
            if target.state == "waiting" and soon_s < target.due_s:
                self._schedule(peer, target, soon_s)

    def _schedule(self, peer: PeerId, target: _Target, due_s: float) -> None:
        target.state, target.due_s = "waiting", due_s
        heapq.heappush(self._heap, (due_s, peer))
        if len(self._heap) > 64 + 4 * len(self._targets):  # entries that were rescheduled or forgotten
            self._heap = [(w.due_s, p) for p, w in self._targets.items() if w.state == "waiting"]
            heapq.heapify(self._heap)
