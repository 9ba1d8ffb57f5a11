"""Up and down are told with a grace period, and a flapping member is not told of."""

from dep2p.identity import Identity
from dep2p.protocols.realm.presence import MemberPresence, PresenceChanged

PEER = Identity(bytes([1]) * 32).peer_id
OTHER = Identity(bytes([2]) * 32).peer_id
UP = PresenceChanged(PEER, "up")
DOWN = PresenceChanged(PEER, "down")


def is_damped(presence: MemberPresence) -> bool:
    """Whether events of PEER are held back since it flapped."""
    return presence._members[PEER].damped_until is not None  # pyright: ignore[reportPrivateUsage]


def test_a_member_is_down_only_after_the_grace_period() -> None:
    presence = MemberPresence()
    assert presence.connected(PEER, 0.0) == [UP]
    assert presence.disconnected(PEER, 10.0) == []
    assert presence.next_deadline() == 25.0
    assert presence.on_deadline(24.9) == [] and presence.is_up(PEER)
    assert presence.on_deadline(25.0) == [DOWN] and not presence.is_up(PEER)
    assert presence.next_deadline() is None
    assert presence.connected(PEER, 30.0) == [UP]


def test_a_short_absence_is_not_reported() -> None:
    presence = MemberPresence()
    presence.connected(PEER, 0.0)
    presence.disconnected(PEER, 10.0)
    assert presence.connected(PEER, 24.0) == []
    assert presence.next_deadline() is None and presence.on_deadline(100.0) == []


def test_a_flapping_member_is_notified_of_again_after_five_stable_minutes() -> None:
    presence = MemberPresence()
    told: list[PresenceChanged] = []
    for start in (0.0, 20.0, 40.0):  # each absence outlives the grace period
        told += presence.connected(PEER, start)
        told += presence.disconnected(PEER, start + 1.0)
        told += presence.on_deadline(start + 16.0)
    assert told == [UP, DOWN, UP, DOWN, UP] and is_damped(presence)
    assert not presence.is_up(PEER)  # what is, is not hidden
    assert presence.connected(PEER, 60.0) == [] and presence.is_up(PEER)
    assert presence.disconnected(PEER, 70.0) == []
    assert presence.on_deadline(86.0) == []
    assert presence.next_deadline() == 370.0
    assert presence.on_deadline(369.9) == []
    assert presence.on_deadline(370.0) == [DOWN] and not is_damped(presence)
    assert presence.connected(PEER, 371.0) == [UP]


def test_three_drops_in_more_than_a_minute_are_no_flapping() -> None:
    presence = MemberPresence()
    for start in (0.0, 31.0, 62.0):
        presence.connected(PEER, start)
        presence.disconnected(PEER, start)
    assert not is_damped(presence)


def test_a_damped_member_that_is_as_last_reported_is_not_reported_of() -> None:
    presence = MemberPresence()
    for start in (0.0, 1.0, 2.0):
        presence.connected(PEER, start)
        presence.disconnected(PEER, start)
    presence.connected(PEER, 3.0)
    assert presence.next_deadline() == 303.0
    assert presence.on_deadline(303.0) == [] and presence.is_up(PEER)


def test_a_million_flaps_leave_bounded_state() -> None:
    presence = MemberPresence()
    for number in range(10_000):
        presence.connected(PEER, number / 1000)
        presence.disconnected(PEER, number / 1000)
    (state,) = presence._members.values()  # pyright: ignore[reportPrivateUsage]
    assert len(state.drops) == 3
    presence.forget(PEER)
    assert presence.next_deadline() is None and not presence.is_up(PEER)


def test_nothing_is_reported_twice() -> None:
    presence = MemberPresence()
    assert presence.connected(PEER, 0.0) == [UP]
    assert presence.connected(PEER, 0.0) == []
    assert presence.disconnected(OTHER, 0.0) == []
