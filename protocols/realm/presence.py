"""The decision when a member counts as up or down, without flapping (docs/spec/realm.md §6). Pure.

A lost connection counts only after a grace period. A member that drops three times in a minute is *damped*: it is
not reported until it has stayed the same for five minutes; then its state is reported if it differs from the last one.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from dep2p.types import PeerId

GRACE_S: Final = 15.0
FLAPS_MAX: Final = 3
FLAP_WINDOW_S: Final = 60.0
STABLE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class PresenceChanged:
    """The event for subscribers."""

    peer: PeerId
    kind: Literal["up", "down"]


@dataclass(slots=True)
class _Presence:
    is_connected: bool = False
    reported_up: bool = False
    grace_until: float | None = None
    damped_until: float | None = None
    drops: list[float] = field(default_factory=list[float])

    @property
    def is_up(self) -> bool:
        return self.is_connected or self.grace_until is not None

    def next_deadline(self) -> float | None:
        times = [time for time in (self.grace_until, self.damped_until) if time is not None]
        return min(times, default=None)


class MemberPresence:
    """The presence of all members of one realm."""

    def __init__(
        self,
        *,
        grace_s: float = GRACE_S,
        flaps_max: int = FLAPS_MAX,
        flap_window_s: float = FLAP_WINDOW_S,
        stable_s: float = STABLE_S,
    ) -> None:
        self._grace_s = grace_s
        self._flaps_max = flaps_max
        self._flap_window_s = flap_window_s
        self._stable_s = stable_s
        self._members: dict[PeerId, _Presence] = {}
        self._timed: dict[PeerId, None] = {}

    def is_up(self, peer: PeerId) -> bool:
        """Whether the member is connected and verified now, or within the grace period. True also while events are
        damped."""
        presence = self._members.get(peer)
        return presence is not None and presence.is_up

    def connected(self, peer: PeerId, now: float) -> list[PresenceChanged]:
        """Note that the member's first verified connection came up."""
        presence = self._members.setdefault(peer, _Presence())
        if presence.is_connected:
            return []
        presence.is_connected = True
        presence.grace_until = None
        if presence.damped_until is not None:
            presence.damped_until = now + self._stable_s
            self._note_timers(peer, presence)
            return []
        self._note_timers(peer, presence)
        return self._report(peer, presence)

    def disconnected(self, peer: PeerId, now: float) -> list[PresenceChanged]:
        """Note that the member's last verified connection ended. Never returns an event at once: the grace period comes
        first."""
        presence = self._members.get(peer)
        if presence is None or not presence.is_connected:
            return []
        presence.is_connected = False
        presence.grace_until = now + self._grace_s
        presence.drops = [*presence.drops, now][-self._flaps_max :]
        flapping = len(presence.drops) == self._flaps_max and now - presence.drops[0] <= self._flap_window_s
        if flapping or presence.damped_until is not None:
            presence.damped_until = now + self._stable_s
        self._note_timers(peer, presence)
        return []

    def forget(self, peer: PeerId) -> None:
        """Forget a member that left or expired."""
        self._members.pop(peer, None)
        self._timed.pop(peer, None)

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due."""
        times = [self._members[peer].next_deadline() for peer in self._timed]
        return min((time for time in times if time is not None), default=None)

    def on_deadline(self, now: float) -> list[PresenceChanged]:
        """End grace periods and damping whose time is over."""
        changes: list[PresenceChanged] = []
        for peer in list(self._timed):
            presence = self._members[peer]
            if presence.grace_until is not None and presence.grace_until <= now:
                presence.grace_until = None
            if presence.damped_until is not None and presence.damped_until <= now:
                presence.damped_until = None
                presence.drops = []
            if presence.damped_until is None:
                changes += self._report(peer, presence)
            self._note_timers(peer, presence)
        return changes

    def _report(self, peer: PeerId, presence: _Presence) -> list[PresenceChanged]:
        if presence.is_up == presence.reported_up:
            return []
        presence.reported_up = presence.is_up
        return [PresenceChanged(peer, "up" if presence.is_up else "down")]

    def _note_timers(self, peer: PeerId, presence: _Presence) -> None:
        if presence.next_deadline() is None:
            self._timed.pop(peer, None)
        else:
            self._timed[peer] = None
