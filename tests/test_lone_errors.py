"""What `Node.open` raises is what its documentation says, and what the block has raised."""

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node, Realm
from dep2p.concurrency.exception_groups import lone_errors
from dep2p.errors import ListenError
from tests.io.pubsub_support import pubsub_nodes


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
    with pytest.raises(ExceptionGroup) as caught, lone_errors():
        raise ExceptionGroup("both", [ValueError("a"), ExceptionGroup("deeper", [KeyError("b")])])
    assert len(caught.value.exceptions) == 2


def test_no_error_is_none() -> None:
    with lone_errors():
        pass
