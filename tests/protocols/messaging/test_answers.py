"""The collector of answers: one of each peer, until the quorum or the deadline, in bounded memory."""

import pytest

from dep2p.errors import OverloadedError
from dep2p.protocols.messaging.answers import (
    GATHER_BYTES_MAX,
    QUORUM_MAX,
    AnswerCollector,
    TopicAnswer,
    read_outcome,
)
from dep2p.types import PeerId

TOKEN = bytes(16)


def answer(peer: int | str, body: bytes = b"x", error: str | None = None) -> TopicAnswer:
    return TopicAnswer(PeerId(str(peer)), body, {}, error)


def test_answers_are_taken_until_the_quorum_and_given_in_their_order() -> None:
    collector = AnswerCollector()
    gather = collector.open(TOKEN, 2, 10.0)
    assert collector.take(TOKEN, answer(1), 0, 1.0) == "taken"
    assert not gather.has_quorum and not gather.is_over(1.0)
    assert collector.take(TOKEN, answer(2), 0, 2.0) == "taken"
    assert gather.has_quorum and gather.is_over(2.0)
    assert collector.take(TOKEN, answer(3), 0, 2.0) == "late"
    assert [collector.next_answer(gather), collector.next_answer(gather)] == [answer(1), answer(2)]
    assert collector.next_answer(gather) is None
    assert dict(gather.refused) == {"late": 1}


def test_an_error_is_given_and_does_not_count_for_the_quorum() -> None:
    collector = AnswerCollector()
    gather = collector.open(TOKEN, 1, 10.0)
    assert collector.take(TOKEN, answer(1, b"", "no stock"), 0, 1.0) == "taken"
    assert not gather.is_over(1.0)
    assert collector.take(TOKEN, answer(1), 0, 1.0) == "duplicate"
    assert collector.take(TOKEN, answer(2), 0, 1.0) == "taken"
    assert gather.has_quorum and gather.answered == {PeerId("1"): "no stock", PeerId("2"): None}


def test_late_duplicate_and_unasked_answers_are_told_apart() -> None:
    collector = AnswerCollector()
    gather = collector.open(TOKEN, None, 10.0)
    assert collector.take(b"y" * 16, answer(1), 0, 1.0) == "unknown"
    assert collector.take(TOKEN, answer(1), 0, 1.0) == "taken"
    assert collector.take(TOKEN, answer(1, b"other"), 0, 1.0) == "duplicate"
    assert collector.take(TOKEN, answer(2), 0, 10.0) == "late"
    assert gather.has_quorum, "no number was asked for"
    collector.close(gather)
    collector.close(gather)
    assert collector.take(TOKEN, answer(3), 0, 1.0) == "late"
    assert len(collector) == 0 and collector.waiting_bytes == 0


def test_answers_that_are_not_read_have_a_bound_in_bytes_of_one_gather_and_of_all() -> None:
    collector = AnswerCollector(bytes_max=GATHER_BYTES_MAX + 5_000_000)
    first = collector.open(TOKEN, None, 10.0)
    second = collector.open(b"y" * 16, None, 10.0)
    body = bytes(1_000_000)
    outcomes = [collector.take(TOKEN, answer(n, body), 0, 1.0) for n in range(20)]
    assert outcomes == ["taken"] * 16 + ["full"] * 4
    others = [collector.take(second.token, answer(n, body), 0, 1.0) for n in range(8)]
    assert others == ["taken"] * 5 + ["full"] * 3
    assert collector.take(second.token, answer(9, b""), 1_000_000, 1.0) == "full", "headers count"
    collector.next_answer(first)
    assert collector.take(TOKEN, answer(19, body), 0, 1.0) == "taken", "a refused peer may try again"
    collector.close(first)
    collector.close(second)
    assert collector.waiting_bytes == 0


def test_empty_answers_have_a_bound_in_number() -> None:
    collector = AnswerCollector()
    gather = collector.open(TOKEN, None, 10.0)
    outcomes = [collector.take(TOKEN, answer(n, b""), 0, 1.0) for n in range(QUORUM_MAX + 1)]
    assert outcomes == ["taken"] * QUORUM_MAX + ["late"]
    assert gather.is_over(1.0)


def test_gathers_have_a_bound_in_number() -> None:
    collector = AnswerCollector(gathers_max=2)
    gathers = [collector.open(bytes([n]) * 16, None, 10.0) for n in range(2)]
    with pytest.raises(OverloadedError, match="2 gathers wait"):
        collector.open(b"z" * 16, None, 10.0)
    collector.close(gathers[0])
    collector.open(b"z" * 16, None, 10.0)


def test_a_word_of_the_author_that_is_not_known_is_none() -> None:
    assert read_outcome(b"taken") == "taken"
    assert read_outcome(b"taken?") is None
