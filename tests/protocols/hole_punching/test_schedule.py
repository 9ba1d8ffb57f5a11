"""When a direct path is looked for, and how often a peer may ask for it."""

import random

from dep2p.protocols.hole_punching.bounds import AT_ONCE_MAX, PER_PEER_BURST, UNPROVEN_BURST, PunchBounds
from dep2p.protocols.hole_punching.schedule import LATER, TRIES, Schedule, TryKind
from dep2p.types import PeerId


def rounds(count: int) -> list[tuple[list[TryKind], float]]:
    """The tries of each round, and the wait before it."""
    schedule = Schedule(random.Random(1))
    made: list[tuple[list[TryKind], float]] = []
    for _ in range(count):
        steps = [schedule.next() for _ in range(TRIES + 1)]
        assert all(not step.wait_s for step in steps[1:])
        made.append(([step.kind for step in steps], steps[0].wait_s))
    return made


def test_each_round_reverses_once_and_punches_three_times() -> None:
    for kinds, _ in rounds(3):
        assert kinds == [TryKind.REVERSE] + [TryKind.PUNCH] * 3


def test_rounds_come_at_once_then_ever_more_seldom_and_never_end() -> None:
    waits = [wait_s for _, wait_s in rounds(30)]
    assert waits[0] == 0.0
    assert 0.0 < waits[1] < waits[2] < waits[3] < waits[5]
    assert all(LATER.max_s / 2 <= wait_s <= LATER.max_s for wait_s in waits[10:])


def test_what_was_not_ready_is_no_try() -> None:
    schedule = Schedule(random.Random(1))
    assert schedule.next().kind is TryKind.REVERSE
    assert schedule.next().kind is TryKind.PUNCH
    waits = [schedule.unready() for _ in range(12)]
    assert all(step.kind is TryKind.PUNCH for step in waits)
    assert 0.0 < waits[0].wait_s < waits[1].wait_s < waits[-1].wait_s == waits[-2].wait_s
    assert [schedule.next().kind for _ in range(TRIES)] == [TryKind.PUNCH] * (TRIES - 1) + [TryKind.REVERSE]


def peer(number: int) -> PeerId:
    return PeerId(f"peer-{number}")


def test_a_peer_punches_once_at_a_time() -> None:
    bounds = PunchBounds()
    assert bounds.begin(peer(1), is_member=True, now_s=0.0) is None
    assert bounds.begin(peer(1), is_member=True, now_s=0.0) == "busy"
    bounds.end(peer(1))
    assert bounds.begin(peer(1), is_member=True, now_s=0.0) is None


def test_few_punches_are_under_way() -> None:
    bounds = PunchBounds()
    for number in range(AT_ONCE_MAX):
        assert bounds.begin(peer(number), is_member=True, now_s=0.0) is None
    assert bounds.begin(peer(99), is_member=True, now_s=0.0) == "total"
    bounds.end(peer(3))
    bounds.end(peer(3))
    assert bounds.begin(peer(99), is_member=True, now_s=0.0) is None


def test_a_peer_has_a_rate() -> None:
    bounds = PunchBounds()
    for _ in range(int(PER_PEER_BURST)):
        assert bounds.begin(peer(1), is_member=True, now_s=5.0) is None
        bounds.end(peer(1))
    assert bounds.begin(peer(1), is_member=True, now_s=5.0) == "rate"
    assert bounds.begin(peer(2), is_member=True, now_s=5.0) is None
    assert bounds.begin(peer(1), is_member=True, now_s=3_600.0) is None


def test_new_names_give_strangers_no_more_and_take_nothing_from_members() -> None:
    bounds = PunchBounds()
    for number in range(int(UNPROVEN_BURST)):
        assert bounds.begin(peer(number), is_member=False, now_s=5.0) is None
        bounds.end(peer(number))
    assert bounds.begin(peer(1_000), is_member=False, now_s=5.0) == "rate_unproven"
    assert bounds.begin(peer(1_001), is_member=True, now_s=5.0) is None
    assert bounds.begin(peer(1_000), is_member=False, now_s=60.0) is None


def test_the_table_of_peers_is_bounded() -> None:
    bounds = PunchBounds()
    for number in range(3_000):
        bounds.begin(peer(number), is_member=True, now_s=0.0)
        bounds.end(peer(number))
    assert len(bounds._buckets) < 3_000  # pyright: ignore[reportPrivateUsage]
