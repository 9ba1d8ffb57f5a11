"""A wait ends when nothing, or too little, moves."""

from dep2p.protocols.timing.stall import StallTimer


def test_a_wait_goes_on_while_something_moves() -> None:
    timer = StallTimer(60.0, now=0.0, progress=0)
    assert not any(timer.is_stalled(30.0 * look, look) for look in range(1, 100))
    assert not timer.is_stalled(30.0 * 100, 99)
    assert timer.is_stalled(30.0 * 101, 99)


def test_a_byte_now_and_then_is_not_enough_where_more_is_asked_for() -> None:
    timer = StallTimer(60.0, now=0.0, progress=0, least=4_096)
    assert not timer.is_stalled(30.0, 1)
    assert timer.is_stalled(60.0, 2)


def test_little_by_little_is_enough_when_a_timeout_brings_it() -> None:
    timer = StallTimer(60.0, now=0.0, progress=0, least=100)
    assert not any(timer.is_stalled(30.0 * look, 50 * look) for look in range(1, 100))
    slower = StallTimer(60.0, now=0.0, progress=0, least=100)
    assert [slower.is_stalled(30.0 * look, 30 * look) for look in (1, 2)] == [False, True]
