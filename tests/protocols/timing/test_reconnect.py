"""The pure core of reconnecting."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.protocols.timing.reconnect import ReconnectPolicy
from dep2p.types import PeerId

PEER, OTHER = PeerId("peer"), PeerId("other")


def policy(**options: float) -> ReconnectPolicy:
    return ReconnectPolicy(random.Random(7), **options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_target_is_dialled_at_once_and_once() -> None:
    core = policy()
    assert core.add(PEER, 10.0, connected=False)
    assert core.next_deadline() == 10.0
    assert core.due(10.0) == [PEER]
    assert core.due(1e9) == []
    assert core.next_deadline() is None


def test_delays_double_up_to_the_maximum_with_jitter() -> None:
    core = policy(initial_s=1.0, max_s=300.0)
    core.add(PEER, 0.0, connected=False)
    now = 0.0
    for failures in range(30):
        assert core.due(now) == [PEER]
        core.failed(PEER, now)
        full_s = min(300.0, 2.0**failures)
        deadline = core.next_deadline()
        assert deadline is not None
        assert full_s / 2 <= deadline - now <= full_s
        now = deadline


def test_stable_connection_forgives_failures() -> None:
    core = policy(initial_s=1.0, stable_s=10.0)
    core.add(PEER, 0.0, connected=False)
    for now in (0.0, 10.0, 20.0, 30.0):
        assert core.due(now) == [PEER]
        core.failed(PEER, now)
    core.connected(PEER, 50.0)
    assert core.next_deadline() is None
    core.disconnected(PEER, 60.0)
    deadline = core.next_deadline()
    assert deadline is not None and deadline - 60.0 <= 1.0


def lost(core: ReconnectPolicy, *peers: PeerId, now: float) -> None:
    for peer in peers:
        core.add(peer, now - 20.0, connected=True)
        core.disconnected(peer, now)


def attempts(core: ReconnectPolicy, end_s: float) -> list[tuple[float, PeerId]]:
    """Each attempt until ``end_s``; all fail at once."""
    found: list[tuple[float, PeerId]] = []
    while (deadline := core.next_deadline()) is not None and deadline <= end_s:
        for peer in core.due(deadline):
            found.append((deadline, peer))
            core.failed(peer, deadline)
    return found


def test_a_peer_that_was_lost_is_tried_every_two_seconds_for_ten_minutes() -> None:
    core = policy(initial_s=1.0, max_s=60.0)
    lost(core, PEER, now=100.0)
    times = [at for at, _ in attempts(core, 2_000.0)]
    early = [at for at in times if at < 700.0]
    assert len(early) > 250 and all(b - a <= 2.001 for a, b in pairwise(early))
    late = [at for at in times if at > 800.0]
    assert late and all(b - a >= 30.0 for a, b in pairwise(late))


def test_few_of_many_lost_peers_are_tried_often_and_the_others_come_with_them() -> None:
    core = policy(initial_s=1.0, max_s=60.0)
    peers = [PeerId(f"peer{number}") for number in range(50)]
    lost(core, *peers, now=100.0)
    often = Counter(peer for _, peer in attempts(core, 400.0))
    assert sum(count > 100 for count in often.values()) == 4
    assert sum(count < 20 for count in often.values()) == 46
    core.connected(often.most_common(1)[0][0], 403.0)
    assert len({peer for _, peer in attempts(core, 403.5)}) == 49


def test_an_unstable_connection_of_a_peer_makes_no_others_due() -> None:
    core = policy(initial_s=1.0, max_s=60.0, stable_s=10.0)
    lost(core, PEER, OTHER, now=100.0)
    attempts(core, 800.0)  # from here on the other one waits for 30 s and more
    core.connected(PEER, 801.0)
    before = core.next_deadline()
    core.disconnected(PEER, 802.0)
    core.connected(PEER, 803.0)
    assert core.next_deadline() == before


def test_all_that_wait_are_due_soon_when_the_own_network_has_changed() -> None:
    core = policy(initial_s=30.0, max_s=60.0)
    for peer in (PEER, OTHER):
        core.add(peer, 0.0, connected=False)
    for peer in core.due(0.0):
        core.failed(peer, 0.0)
    core.wake_all(1.0)
    assert sorted(core.due(1.5)) == [OTHER, PEER]


def test_attempts_at_a_lost_peer_end_early_but_for_every_fourth() -> None:
    core = policy(initial_s=1.0, max_s=60.0)
    lost(core, PEER, now=100.0)
    quick: list[bool] = []
    for _ in range(8):
        assert core.due(core.next_deadline() or 0.0) == [PEER]
        quick.append(core.is_quick(PEER))
        core.failed(PEER, 110.0)
    assert quick == [True, True, True, False] * 2
    core.add(OTHER, 0.0, connected=False)
    assert not core.is_quick(OTHER), "nobody has ever reached it: it may be slow"


def test_connection_that_drops_at_once_backs_off() -> None:
    core = policy(initial_s=1.0, stable_s=10.0)
    core.add(PEER, 0.0, connected=True)
    now, waits = 0.0, []
    for _ in range(6):
        core.disconnected(PEER, now)
        deadline = core.next_deadline()
        assert deadline is not None
        waits.append(deadline - now)
        now = deadline
        assert core.due(now) == [PEER]
        core.connected(PEER, now)
    assert waits[-1] > 8 * waits[0]


def test_forgotten_peer_is_not_dialled() -> None:
    core = policy()
    core.add(PEER, 0.0, connected=False)
    core.forget(PEER)
    assert core.due(10.0) == []
    core.failed(PEER, 0.0)
    core.connected(PEER, 0.0)
    core.disconnected(PEER, 0.0)
    assert PEER not in core and len(core) == 0


def test_hint_shortens_a_long_wait_but_not_a_short_one() -> None:
    core = policy(initial_s=1.0)
    core.add(PEER, 0.0, connected=False)
    now = 0.0
    for _ in range(8):
        core.due(now)
        core.failed(PEER, now)
        now = core.next_deadline() or 0.0
    core.due(now)
    core.failed(PEER, now)
    core.hint(PEER, now)
    deadline = core.next_deadline()
    assert deadline is not None and 0.5 <= deadline - now <= 1.0
    core.hint(PEER, now)
    assert core.next_deadline() == deadline or core.next_deadline() <= deadline  # type: ignore[operator]


def test_number_of_targets_is_bounded() -> None:
    core = policy(peers_max=1)
    assert core.add(PEER, 0.0, connected=False)
    assert core.add(PEER, 0.0, connected=False)
    assert not core.add(OTHER, 0.0, connected=False)


def test_delays_must_make_sense() -> None:
    with pytest.raises(ValueError, match="initial_s"):
        policy(initial_s=2.0, max_s=1.0)


@given(st.lists(st.tuples(st.sampled_from(["add", "forget", "up", "down", "fail", "due", "hint"]), st.integers(0, 3))))
def test_any_order_of_events_keeps_the_heap_bounded_and_tries_only_what_waits(steps: list[tuple[str, int]]) -> None:
    core = policy()
    trying: set[PeerId] = set()
    for now, (step, number) in enumerate(steps * 20):
        peer = PeerId(str(number))
        match step:
            case "add":
                core.add(peer, now, connected=False)
            case "forget":
                core.forget(peer)
                trying.discard(peer)
            case "up":
                core.connected(peer, now)
                trying.discard(peer)
            case "down":
                core.disconnected(peer, now)
            case "fail":
                core.failed(peer, now)
                trying.discard(peer)
            case "due":
                for found in core.due(now):
                    assert found not in trying
                    trying.add(found)
            case _:
                core.hint(peer, now)
    assert len(core._heap) <= 64 + 4 * 4 + 1  # pyright: ignore[reportPrivateUsage]
