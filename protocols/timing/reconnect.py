"""When to dial which wanted peer again: exponential back-off with jitter. Pure."""

import heapq
from dataclasses import dataclass

from dep2p.types import PeerId, Rng


@dataclass(slots=True)
class _Wanted:
    failures: int = 0
    state: str = "waiting"
    """waiting (for ``due_s``), trying, or connected."""
    due_s: float = 0.0
    connected_s: float = 0.0


class ReconnectPolicy:
    """The wanted peers of one host and their next attempts.

    Times are seconds of the caller's clock. The delay after the n-th failure in a row is ``initial_s * 2**(n-1)``, at
    most ``max_s``, times a random factor between 0.5 and 1, so that peers which lost each other together do not dial at
    the same moment. A connection that lasted ``stable_s`` forgives earlier failures; a shorter one counts as a failure,
    so that a peer that accepts and hangs up is not dialled in a tight loop.
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
        self._initial_s = initial_s
        self._max_s = max_s
        self._stable_s = stable_s
        self._peers_max = peers_max
        self._wanted: dict[PeerId, _Wanted] = {}
        self._heap: list[tuple[float, PeerId]] = []

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._wanted

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, peer: PeerId, now: float, *, connected: bool) -> bool:
        """Keep this peer connected from now on, dialling at once if it is not. False when ``peers_max`` are wanted."""
        if peer in self._wanted:
            return True
        if len(self._wanted) >= self._peers_max:
            return False
        wanted = self._wanted[peer] = _Wanted()
        if connected:
            wanted.state, wanted.connected_s = "connected", now
        else:
            self._schedule(peer, wanted, now)
        return True

    def forget(self, peer: PeerId) -> None:
        """Want it no more."""
        self._wanted.pop(peer, None)

    def connected(self, peer: PeerId, now: float) -> None:
        """A connection to the peer exists, whoever dialled it."""
        wanted = self._wanted.get(peer)
        if wanted is not None and wanted.state != "connected":
            wanted.state, wanted.connected_s = "connected", now

    def disconnected(self, peer: PeerId, now: float) -> None:
        """The last connection to the peer ended."""
        wanted = self._wanted.get(peer)
        if wanted is None or wanted.state != "connected":
            return
        if now - wanted.connected_s >= self._stable_s:
            wanted.failures = 0
        self._back_off(peer, wanted, now)

    def failed(self, peer: PeerId, now: float) -> None:
        """An attempt from `due` did not connect."""
        wanted = self._wanted.get(peer)
        if wanted is not None and wanted.state == "trying":
            self._back_off(peer, wanted, now)

    def hint(self, peer: PeerId, now: float) -> None:
        """Something new is known of where the peer is: a waiting attempt need not wait longer than the first delay."""
        wanted = self._wanted.get(peer)
        if wanted is not None and wanted.state == "waiting":
            soon_s = now + self._initial_s * (0.5 + 0.5 * self._rng.random())
            if soon_s < wanted.due_s:
                self._schedule(peer, wanted, soon_s)

    def due(self, now: float) -> list[PeerId]:
        """The peers to dial now; each counts as being tried until `connected` or `failed`."""
        found: list[PeerId] = []
        while self._heap and self._heap[0][0] <= now:
            due_s, peer = heapq.heappop(self._heap)
            wanted = self._wanted.get(peer)
            if wanted is not None and wanted.state == "waiting" and wanted.due_s == due_s:
                wanted.state = "trying"
                found.append(peer)
        return found

    def next_deadline(self) -> float | None:
        """When `due` should be asked next; None when nothing waits."""
        while self._heap:
            due_s, peer = self._heap[0]
            wanted = self._wanted.get(peer)
            if wanted is not None and wanted.state == "waiting" and wanted.due_s == due_s:
                return due_s
            heapq.heappop(self._heap)
        return None

    def _back_off(self, peer: PeerId, wanted: _Wanted, now: float) -> None:
        # 2**40 initial delays are over any max_s; a larger exponent would overflow a float in time.
        delay_s = min(self._max_s, self._initial_s * 2.0 ** min(wanted.failures, 40))
        wanted.failures += 1
        self._schedule(peer, wanted, now + delay_s * (0.5 + 0.5 * self._rng.random()))

    def _schedule(self, peer: PeerId, wanted: _Wanted, due_s: float) -> None:
        wanted.state, wanted.due_s = "waiting", due_s
        heapq.heappush(self._heap, (due_s, peer))
        if len(self._heap) > 64 + 4 * len(self._wanted):  # entries that were rescheduled or forgotten
            self._heap = [(w.due_s, p) for p, w in self._wanted.items() if w.state == "waiting"]
            heapq.heapify(self._heap)
