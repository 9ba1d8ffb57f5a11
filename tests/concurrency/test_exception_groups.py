"""`Node.open` raises the errors of its documentation, and those of its block."""

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node, Realm
from dep2p.concurrency.exception_groups import first_error, leaves, one_line, open_nursery_unwrapped, unwrap_single
from dep2p.errors import ListenError
from tests.pubsub.nodes import pubsub_nodes


async def test_an_error_of_the_block_comes_out_as_it_is(autojump_clock: MockClock) -> None:
    mine = ValueError("mine")
    mine.__context__ = before = KeyError("before")
    with pytest.raises(ValueError) as caught:
        async with pubsub_nodes(1):
            raise mine
    assert caught.value is mine
    assert mine.__context__ is before


async def test_an_address_that_is_taken_is_a_listen_error() -> None:
    async with Node.open(Realm.generate("team"), listen=("/ip4/127.0.0.1/tcp/0",)) as node:
        taken = node.listen_addrs()[0].split("/p2p/")[0]
        with pytest.raises(ListenError, match="is taken"):
            async with Node.open(Realm.generate("team"), listen=(taken,)):
                pass


async def test_a_cancellation_is_none(autojump_clock: MockClock) -> None:
    with trio.move_on_after(5) as scope:
        async with pubsub_nodes(1):
            await trio.sleep_forever()
    assert scope.cancelled_caught


def test_several_errors_stay_a_group() -> None:
    with pytest.raises(ExceptionGroup) as caught, unwrap_single():
        raise ExceptionGroup("both", [ValueError("a"), ExceptionGroup("deeper", [KeyError("b")])])
    assert len(caught.value.exceptions) == 2


def test_no_error_is_none() -> None:
    with unwrap_single():
        pass


async def test_a_nursery_raises_its_only_error_as_it_is() -> None:
    async def fail() -> None:
        raise ValueError("of a task")

    with pytest.raises(ValueError, match="of a task"):
        async with open_nursery_unwrapped() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()


def test_the_errors_inside_a_group_are_given_in_their_order() -> None:
    a, b, c = ValueError("a"), KeyError("b"), OSError("c")
    group = ExceptionGroup("all", [ExceptionGroup("deeper", [a, b]), c])
    assert leaves(group) == [a, b, c]
    assert first_error(group) is a
    assert first_error(b) is b


def test_one_line_leaves_out_groups_of_one() -> None:
    assert one_line(ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("a")])])) == "ValueError('a')"
    assert one_line(ExceptionGroup("both", [ValueError("a"), ValueError("b")])).startswith("ExceptionGroup('both'")
