"""Both sides of an exchange, alone and with each other."""

import pytest

from dep2p.errors import ProtocolError
from dep2p.protocols.hole_punching.exchange import RTT_MAX_S, Answering, Asking, DialTogether
from dep2p.protocols.hole_punching.messages import HolePunch, MessageType

CONNECT, SYNC = MessageType.CONNECT, MessageType.SYNC


@pytest.mark.parametrize("one_way_s", [0.0, 0.001, 0.1, 1.5])
def test_both_dial_at_the_same_time(one_way_s: float) -> None:
    """A dials when SYNC arrives, B half a round trip after it was sent."""
    asking, answering = Asking([b"b"], now_s=10.0), Answering([b"a"])
    answer = answering.receive(asking.connect)
    assert isinstance(answer, HolePunch)
    sync_sent_s = 10.0 + 2 * one_way_s
    of_b = asking.answered(answer, now_s=sync_sent_s)
    of_a = answering.receive(asking.sync)
    assert isinstance(of_a, DialTogether)
    assert (of_a.addrs, of_b.addrs) == ((b"b",), (b"a",))
    assert sync_sent_s + of_b.wait_s == pytest.approx(sync_sent_s + one_way_s + of_a.wait_s)


@pytest.mark.parametrize(
    ("answer", "after_s"),
    [
        (HolePunch(SYNC, (b"a",)), 0.1),
        (HolePunch(CONNECT), 0.1),
        (HolePunch(CONNECT, (b"a",)), RTT_MAX_S + 0.1),
    ],
)
def test_an_answer_that_is_of_no_use_is_an_error(answer: HolePunch, after_s: float) -> None:
    with pytest.raises(ProtocolError):
        Asking([b"b"], now_s=1.0).answered(answer, now_s=1.0 + after_s)


@pytest.mark.parametrize(
    "messages",
    [
        [HolePunch(SYNC)],
        [HolePunch(CONNECT)],
        [HolePunch(CONNECT, (b"b",)), HolePunch(CONNECT, (b"b",))],
    ],
)
def test_messages_out_of_order_are_an_error(messages: list[HolePunch]) -> None:
    answering = Answering([])
    for message in messages[:-1]:
        answering.receive(message)
    with pytest.raises(ProtocolError):
        answering.receive(messages[-1])


def test_a_side_without_addresses_of_its_own_answers_and_dials() -> None:
    answering = Answering([])
    assert answering.receive(HolePunch(CONNECT, (b"b",))) == HolePunch(CONNECT)
    assert answering.receive(HolePunch(SYNC)) == DialTogether((b"b",), 0.0)
