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
        lines.put(A, f"a{number}")
    for peer, items in ((B, 2), (C, 1)):
        for number in range(items):
            lines.put(peer, f"{peer}{number}")
    assert [lines.take() for _ in range(7)] == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert len(lines) == lines.waiting(A) == 46 and lines.waiting(B) == 0


def test_nothing_waits_in_empty_lines() -> None:
    lines = PeerLines[str]()
    with pytest.raises(IndexError):
        lines.take()
    lines.put(A, "a")
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
            lines.put(PeerId(name), (name, number))
            put.append((name, number))
        elif len(lines):
            taken.append(lines.take())
        assert len(lines) == len(put) - len(taken) == sum(lines.waiting(PeerId(name)) for name in "abc")
    taken += [lines.take() for _ in range(len(lines))]
    for name in "abc":
        assert [one for one in taken if one[0] == name] == [one for one in put if one[0] == name]
