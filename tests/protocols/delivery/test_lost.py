"""The lost messages that a node keeps: bounded, in the order of their ends, and exact over a restart."""

from hypothesis import given
from hypothesis import strategies as st

from dep2p.protocols.delivery.lost import LostMessage, LostMessages


def lost_message(number: int, *, peer: str = "bob", body: bytes = b"", ended_us: int | None = None) -> LostMessage:
    return LostMessage(
        peer=peer,
        number=number,
        created_us=number,
        ended_us=number if ended_us is None else ended_us,
        name="orders",
        topic="",
        head=b"",
        flags=8,
        body=body,
        ttl_ms=0,
        state="failed",
        reason="",
        may_have_been_taken=True,
    )


def test_the_oldest_is_forgotten_for_a_new_one() -> None:
    lost = LostMessages(items_max=2, bytes_max=100)
    assert [lost.add(lost_message(number)) for number in (1, 2)] == [[], []]
    assert lost.add(lost_message(3)) == [lost_message(1)]
    assert [each.id for each in lost.all()] == ["bob:2", "bob:3"]


def test_a_message_that_is_larger_than_the_bound_is_not_kept() -> None:
    lost = LostMessages(items_max=5, bytes_max=100)
    lost.add(lost_message(1))
    large = lost_message(2, body=bytes(101))
    assert lost.add(large) == [lost_message(1), large] and len(lost) == 0


def test_a_number_that_is_lost_again_replaces_the_first_one() -> None:
    lost = LostMessages(items_max=5, bytes_max=100)
    lost.add(lost_message(1, body=bytes(60)))
    assert lost.add(lost_message(1, body=bytes(61))) == []
    assert [each.size_bytes for each in lost.all()] == [61]


def test_a_restart_keeps_the_latest_ones() -> None:
    lost = LostMessages(items_max=2, bytes_max=100)
    stored = [lost_message(number, ended_us=10 - number) for number in (1, 2, 3)]
    assert lost.restore(stored) == [stored[2]]
    assert [each.number for each in lost.all()] == [2, 1]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 40))))
def test_the_bounds_hold_and_nothing_is_forgotten_in_silence(steps: list[tuple[bool, int, int]]) -> None:
    lost = LostMessages(items_max=3, bytes_max=60)
    expected: dict[str, LostMessage] = {}
    for is_added, number, size in steps:
        if is_added:
            message = lost_message(number, body=bytes(size))
            expected.pop(message.id, None)
            expected[message.id] = message
            for forgotten in lost.add(message):
                assert expected.pop(forgotten.id) == forgotten
        else:
            assert lost.take(f"bob:{number}") == expected.pop(f"bob:{number}", None)
        assert lost.all() == list(expected.values())
        assert len(lost) <= 3 and sum(each.size_bytes for each in lost.all()) <= 60
