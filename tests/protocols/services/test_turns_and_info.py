"""Turns of programs, and the answers about services: even, bounded, and strict about what members send."""

import pytest

from dep2p.errors import ProtocolError
from dep2p.protocols.services.info import (
    INFO_BYTES_MAX,
    METADATA_MAX,
    ServiceInfo,
    ServiceInfos,
    ServiceTimes,
    check_metadata,
    decode_infos,
    encode_infos,
)
from dep2p.protocols.services.turns import ProgramTurns


def test_programs_take_turns_and_the_larger_one_takes_more() -> None:
    turns: ProgramTurns[str] = ProgramTurns()
    assert turns.take() is None
    turns.add("a", 2)
    turns.add("b", 1)
    assert (turns.places, len(turns)) == (3, 2)
    assert sorted(filter(None, (turns.take() for _ in range(6)))) == ["a", "a", "a", "a", "b", "b"]
    assert turns.jobs == 6
    for program in "aaaabb":
        turns.done(program)
    assert [turns.take() for _ in range(2)] in (["a", "b"], ["b", "a"])


def test_a_program_that_went_away_gets_nothing_and_its_jobs_still_end() -> None:
    turns: ProgramTurns[str] = ProgramTurns()
    turns.add("a", 1)
    assert turns.take() == "a"
    turns.remove("a")
    assert turns.take() is None and turns.jobs == 1
    turns.add("b", 1)
    assert [turns.take() for _ in range(3)] == ["b"] * 3
    turns.done("a")
    assert turns.jobs == 3


def test_jobs_that_end_at_once_go_round() -> None:
    turns: ProgramTurns[str] = ProgramTurns()
    for name in "abc":
        turns.add(name, 4)
    seen = ""
    for _ in range(9):
        program = turns.take()
        assert program is not None
        turns.done(program)
        seen += program
    assert seen == "abcabcabc"


def test_infos_survive_their_encoding() -> None:
    info = ServiceInfo(name="resize", group="workers", version="1.2", metadata={"a": "ü"}, programs=2, requests=7)
    assert decode_infos(encode_infos(ServiceInfos(services=(info,)))) == ServiceInfos(services=(info,))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"services": 5}',
        b'{"services": [{"name": "x"}]}',
        b'{"services": [{"name": "", "group": "g"}]}',
        b'{"services": [{"name": "x", "group": "g", "requests": -1}]}',
        b'{"services": [{"name": "x", "group": "g", "mean_ms": 1e999}]}',
        b'{"services": [{"name": "x", "group": "g", "surprise": 1}]}',
        b'{"services": [{"name": "' + b"x" * 256 + b'", "group": "g"}]}',
        b'{"services": [' + b",".join([b'{"name": "x", "group": "g"}'] * 65) + b"]}",
        b"[" * 100_000,
        b" " * (INFO_BYTES_MAX + 1),
    ],
)
def test_a_malformed_answer_of_a_member_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="the member's list of services"):
        decode_infos(data)


def test_metadata_is_bounded() -> None:
    check_metadata({str(number): "" for number in range(METADATA_MAX)})
    for wrong in ({str(number): "" for number in range(METADATA_MAX + 1)}, {"a": "x" * 2_048}):
        with pytest.raises(ValueError, match="at most"):
            check_metadata(wrong)


def test_times_are_of_the_last_answers() -> None:
    times = ServiceTimes()
    assert (times.mean_ms, times.p99_ms) == (0.0, 0.0)
    for _ in range(10_000):
        times.answered(5.0)
    for _ in range(512):
        times.answered(0.001)
    assert times.mean_ms == pytest.approx(1.0) and times.p99_ms == pytest.approx(1.0)
