"""What the sender of a lost message knows: whether its receiver may have taken it all the same."""

import pytest

from dep2p.errors import DeliveryExpiredError, DeliveryFailedError
from dep2p.protocols.delivery.sender import DeliveryPolicy, Outgoing, SendWindow
from dep2p.protocols.delivery.states import DeliveryState, raise_unless_acknowledged
from dep2p.protocols.delivery.wire import Ack


def window() -> SendWindow[Outgoing]:
    return SendWindow(b"epoch", DeliveryPolicy(), lambda _message: None)


def sent(core: SendWindow[Outgoing], *, is_sent: bool = True) -> Outgoing:
    message = Outgoing(head=b"", flags=0, body=b"x", created_s=0.0)
    core.add_now(message)
    if is_sent:
        core.link_up(0.0)
        core.take(0.0, 1_000)
    return message


def test_one_whose_tries_are_used_up_may_have_been_taken() -> None:
    core = window()
    message = sent(core)
    for now in (5.0, 10.0, 15.0, 20.0):
        core.on_deadline(now)
        core.take(now, 1_000)
    assert message.state is DeliveryState.FAILED
    assert message.may_have_been_taken


def test_one_that_was_never_sent_was_not_taken() -> None:
    core = window()
    message = sent(core, is_sent=False)
    core.on_deadline(300.0)
    assert message.state is DeliveryState.EXPIRED
    assert not message.may_have_been_taken


def test_one_of_an_earlier_run_may_have_been_taken_by_then() -> None:
    core = window()
    message = Outgoing(head=b"", flags=0, body=b"x", created_s=0.0, is_restored=True, number=1)
    core.restore([message])
    core.on_deadline(300.0)
    assert message.state is DeliveryState.EXPIRED
    assert message.may_have_been_taken


def test_one_that_the_receiver_refused_was_not_taken() -> None:
    core = window()
    message = sent(core)
    core.on_ack(Ack(1, [], [(1, "no")]), 1.0)
    assert message.state is DeliveryState.FAILED
    assert not message.may_have_been_taken


def test_one_that_was_dropped_here_after_it_was_sent_may_have_been_taken() -> None:
    core = window()
    message = sent(core)
    assert not message.may_have_been_taken  # it is under way
    assert core.drop(1, "dropped")
    assert message.may_have_been_taken


def test_the_error_says_so() -> None:
    with pytest.raises(
        DeliveryFailedError, match="did not acknowledge the message: why; its handler may have taken it"
    ):
        raise_unless_acknowledged(DeliveryState.FAILED, "bob", "why", may_have_been_taken=True)
    with pytest.raises(DeliveryFailedError, match=r"bob did not take the message: why$"):
        raise_unless_acknowledged(DeliveryState.FAILED, "bob", "why", may_have_been_taken=False)
    with pytest.raises(DeliveryExpiredError, match="its handler may have taken it"):
        raise_unless_acknowledged(DeliveryState.EXPIRED, "bob", "why", may_have_been_taken=True)
