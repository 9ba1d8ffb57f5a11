"""The pure core of reconnecting."""

import random

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
