"""Lines of peers: served in turns, and no peer fills the space of the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.protocols.fairness.lines import ITEMS_PER_PEER_MIN, PeerLines
from dep2p.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_peers_are_served_in_turns_however_many_items_one_has() -> None:
    lines = PeerLines[str](1_000)
    for number in range(50):
        lines.put(A, f"a{number}")
    for peer, items in ((B, 2), (C, 1)):
        for number in range(items):
            lines.put(peer, f"{peer}{number}")
    assert [lines.take()[0] for _ in range(7)] == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert len(lines) == lines.waiting(A) == 46


def test_a_peer_alone_gets_half_of_the_space_and_is_free_again_when_its_line_has_shrunk() -> None:
    lines = PeerLines[int](100)
    held_at = next(number for number in range(1, 101) if lines.put(A, number))
    assert held_at == 51 and list(lines.held) == [A]
    freed = [peer for _, peer in (lines.take() for _ in range(held_at)) if peer is not None]
    assert freed == [A] and not lines.held and len(lines) == 0


def test_items_at_work_use_space() -> None:
    lines = PeerLines[int](100)
    assert next(number for number in range(1, 101) if lines.put(A, number, at_work=80)) == 11


@pytest.mark.parametrize("flooders", [1, 4, 30])
def test_a_peer_that_comes_while_others_flood_is_not_held_back(flooders: int) -> None:
    lines = PeerLines[int](1_000)
    for number in range(2_000):
        peer = PeerId(str(number % flooders))
        if peer not in lines.held:
            lines.put(peer, number)
    assert len(lines) <= 1_000 and len(lines.held) == flooders
    assert not any(lines.put(A, number) for number in range(ITEMS_PER_PEER_MIN))
    taken = [lines.take()[0] for _ in range(2 * (flooders + 1))]
    assert {0, 1} <= set(taken[: 2 * (flooders + 1)]), "its first two items are among the next two rounds"


@given(st.lists(st.one_of(st.sampled_from("abc"), st.just("")), max_size=300), st.integers(0, 40))
def test_nothing_is_lost_and_a_held_peer_has_items_waiting(script: list[str], space: int) -> None:
    lines = PeerLines[tuple[str, int]](space)
    put: list[tuple[str, int]] = []
    taken: list[tuple[str, int]] = []
    for number, name in enumerate(script):
        if name:
            lines.put(PeerId(name), (name, number))
            put.append((name, number))
        elif len(lines):
            item, freed = lines.take()
            taken.append(item)
            assert freed is None or freed == item[0]
        assert all(lines.waiting(peer) for peer in lines.held)
    while len(lines):
        taken.append(lines.take()[0])
    assert not lines.held
    for name in "abc":
        assert [one for one in taken if one[0] == name] == [one for one in put if one[0] == name], "in order"
