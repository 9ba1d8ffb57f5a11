"""How receives that nobody waits for are ended at the other end."""

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import cast

import pytest
import trio
import trio.testing

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    NotMemberError,
    OverloadedError,
    PeerNotFoundError,
    ProtocolError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.protocols.queues.admin import AdminReply, AdminRequest, EndReceive, R, ReceivedMessages, ReceiveMessages
from dep2p.queues.remote import abandoned_receives as queue_receiving
from dep2p.queues.remote.abandoned_receives import Receivings

Clock = trio.testing.MockClock
REQUEST = ReceiveMessages(queue="q", channel="c", attempt_id="a", count=1, invisible_s=60.0)
NOTHING = ReceivedMessages(messages=())


class Far:
    """The other end."""

    def __init__(self) -> None:
        self.asked: list[AdminRequest[AdminReply]] = []
        self.errors: list[Exception] = []
        self.hangs = False
        self.is_reached = True

    async def ask(self, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        self.asked.append(request)
        if on_sent is not None and self.is_reached:
            on_sent()
        if self.hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)
        return cast(R, NOTHING)

    @property
    def ends(self) -> list[EndReceive]:
        return [request for request in self.asked if isinstance(request, EndReceive)]


@asynccontextmanager
async def receivings() -> AsyncGenerator[tuple[Receivings, Counter[str]], None]:
    counters: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:

        def start(run: Callable[[], Awaitable[None]]) -> None:
            nursery.start_soon(run)

        yield Receivings(counters, start, Random(1)), counters
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "is_reached", "ends"),
    [
        (RequestTimeoutError("late"), True, 1),
        (StreamClosedError("cut"), True, 1),
        (RequestTimeoutError("it could not be dialed"), False, 0),  # nothing was asked
        (PeerNotFoundError("nowhere"), True, 0),
        (ChannelNotFoundError("none"), True, 0),
        (OverloadedError("busy"), True, 0),
        (ValueError("wrong"), True, 0),
    ],
)
async def test_what_may_have_taken_something_is_ended(
    autojump_clock: Clock, error: Exception, is_reached: bool, ends: int
) -> None:
    far = Far()
    far.errors, far.is_reached = [error], is_reached
    async with receivings() as (some, counters):
        with pytest.raises(type(error)):
            await some.receive(far.ask, REQUEST)
        await trio.sleep(1)
        assert far.ends == [EndReceive(queue="q", channel="c", attempt_id="a")] * ends
        assert counters == Counter({"receives_ended": ends} if ends else {})
        assert await some.receive(far.ask, REQUEST) == NOTHING
        await trio.sleep(1)
        assert len(far.ends) == ends


@pytest.mark.parametrize(
    "error", [OverloadedError, PeerNotFoundError, NotMemberError, RequestTimeoutError, StreamClosedError]
)
async def test_it_is_tried_again_while_messages_could_be_held(autojump_clock: Clock, error: type[Dep2pError]) -> None:
    far = Far()
    far.errors = [error("not now") for _ in range(5)]
    async with receivings() as (some, counters):
        some.end_soon(far.ask, REQUEST)
        await trio.sleep(59)
        assert len(far.ends) == 6
        assert counters["receives_not_ended"] == 0
        far.errors = [error("never") for _ in range(1_000)]
        some.end_soon(far.ask, REQUEST)
        await trio.sleep(61)
        assert counters["receives_not_ended"] == 1
        count = len(far.ends)
        await trio.sleep(600)
        assert len(far.ends) == count


@pytest.mark.parametrize(
    "error", [ChannelNotFoundError("none"), ProtocolError("what?"), ValueError("x"), KeyError("bug")]
)
async def test_what_cannot_be_ended_ends_nothing_else(autojump_clock: Clock, error: Exception) -> None:
    far = Far()
    far.errors = [error]
    async with receivings() as (some, counters):
        some.end_soon(far.ask, REQUEST)
        await trio.sleep(60)
        assert len(far.ends) == 1
        some.end_soon(far.ask, REQUEST)
        await trio.sleep(1)
        assert len(far.ends) == 2
        assert counters == Counter({"receives_ended": 2})


async def test_so_many_at_once_and_what_is_more_is_counted(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_receiving, "_ENDING_MAX", 3)
    far = Far()
    far.hangs = True
    async with receivings() as (some, counters):
        for _ in range(5):
            some.end_soon(far.ask, REQUEST)
        await trio.sleep(1)
        assert len(far.ends) == 3
        assert counters == Counter({"receives_ended": 3, "receives_not_ended": 2})


async def test_a_node_that_ends_leaves_it(autojump_clock: Clock) -> None:
    def start(_run: Callable[[], Awaitable[None]]) -> None:
        raise StreamClosedError("queues are not running")

    counters: Counter[str] = Counter()
    some = Receivings(counters, start, Random(1))
    far = Far()
    for _ in range(2_000):
        some.end_soon(far.ask, REQUEST)
    assert not counters
    await trio.lowlevel.checkpoint()
