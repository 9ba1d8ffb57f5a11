"""Lines of peers: served in turns, each in order, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.protocols.fairness.lines import PeerLines
from dep2p.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_peers_are_served_in_turns_however_many_items_one_has() -> None:
    lines = PeerLines[str]()
    for number in range(50):
        lines.put(A, A, f"a{number}")
    for peer, items in ((B, 2), (C, 1)):
        for number in range(items):
            lines.put(peer, peer, f"{peer}{number}")
    assert [lines.take() for _ in range(7)] == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert len(lines) == lines.waiting(A) == 46 and lines.waiting(B) == 0


def test_nothing_waits_in_empty_lines() -> None:
    lines = PeerLines[str]()
    with pytest.raises(IndexError):
        lines.take()
    lines.put(A, A, "a")
    assert lines.take() == "a" and len(lines) == 0
    with pytest.raises(IndexError):
        lines.take()


@given(st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=300))
def test_nothing_is_lost_and_each_line_keeps_its_order(script: list[str]) -> None:
    lines = PeerLines[tuple[str, int]]()
    put: list[tuple[str, int]] = []
    taken: list[tuple[str, int]] = []
    for number, name in enumerate(script):
        if name:
            lines.put(PeerId(name), name, (name, number))
            put.append((name, number))
        elif len(lines):
            taken.append(lines.take())
        assert len(lines) == len(put) - len(taken) == sum(lines.waiting(PeerId(name)) for name in "abc")
    taken += [lines.take() for _ in range(len(lines))]
    for name in "abc":
        assert [one for one in taken if one[0] == name] == [one for one in put if one[0] == name]


def test_items_of_one_author_keep_their_order_whichever_peers_bring_them() -> None:
    lines = PeerLines[int]()
    for number in range(40):
        lines.put((A, B, C)[number % 7 % 3], "author", number)
    for number in range(100, 110):
        lines.put(A, "another", number)
    taken = [lines.take() for _ in range(50)]
    assert [number for number in taken if number < 100] == list(range(40))
    assert [number for number in taken if number >= 100] == list(range(100, 110))
    assert lines.waiting(A) == lines.waiting(B) == lines.waiting(C) == len(lines) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")) | st.none(), max_size=400))
def test_order_of_authors_counts_and_bounds_hold(script: list[tuple[str, str] | None]) -> None:
    lines = PeerLines[tuple[str, str, int]]()
    waiting: list[tuple[str, str, int]] = []
    for number, step in enumerate(script):
        if step is not None:
            item = (*step, number)
            lines.put(PeerId(step[0]), step[1], item)
            waiting.append(item)
        elif waiting:
            item = lines.take()
            assert item == next(each for each in waiting if each[1] == item[1]), "the oldest of its author"
            waiting.remove(item)
        assert len(lines) == len(waiting)
        for name in "abc":
            left = sum(each[0] == name for each in waiting)
            assert lines.waiting(PeerId(name)) == left
            assert len(lines._lines.get(PeerId(name), ())) <= 2 * left + 65  # pyright: ignore[reportPrivateUsage]


def test_a_line_whose_items_others_serve_does_not_grow() -> None:
    lines = PeerLines[int]()
    lines.put(B, "slow", -1)
    for number in range(5_000):
        lines.put(A, "author", number)
        lines.put(B, "author", number)
        lines.take()
        lines.take()
        assert len(lines._lines.get(B, ())) <= 200  # pyright: ignore[reportPrivateUsage]
