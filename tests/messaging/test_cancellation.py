"""Every public call, cancelled at every one of its awaits, leaves the link usable."""

from collections.abc import Awaitable, Callable

import pytest
import trio

from dep2p.errors import Dep2pError
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream, Notification, Request
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.checkpoints import cancelled_at_step, every_cancellation
from tests.messaging.nodes import Side, settled, sides


async def test_the_tool_cancels_at_each_await_in_turn(autojump_clock: trio.abc.Clock) -> None:
    reached: list[int] = []

    async def three_awaits() -> None:
        for index in range(3):
            await trio.sleep(1)
            reached.append(index)

    lengths: list[int] = []
    for step in range(6):
        reached.clear()
        await cancelled_at_step(three_awaits, step)
        lengths.append(len(reached))
    assert lengths[0] == 0
    assert sorted(lengths) == lengths
    assert set(lengths) == {0, 1, 2, 3}


async def _serve(b: Side) -> list[str]:
    events: list[str] = []

    async def slow_echo(request: Request) -> bytes:
        events.append("began")
        try:
            await trio.sleep(0.003)
            return request.body
        finally:
            events.append("ended")

    async def note(notification: Notification) -> None:
        await trio.sleep(0.001)

    async def echo(stream: MessageStream) -> None:
        async for item in stream:
            await stream.send(item)

    b.messaging.on_request("echo", slow_echo)
    b.messaging.on_notify("note", note)
    b.messaging.on_stream("echo", echo)
    return events


async def _check_health(a: Side, b: Side) -> None:
    with trio.fail_after(5):
        assert await a.messaging.request(b.peer, "echo", b"well?") == b"well?"
        await a.messaging.notify(b.peer, "note", b"")
        async with a.messaging.stream(b.peer, "echo") as stream:
            await stream.send(b"x")
            assert await stream.receive() == b"x"
    await settled()
    for side in (a, b):
        for stats in side.messaging.stats():
            assert stats.requests_in == stats.requests_out == stats.queued_out_items == stats.queued_in_items == 0
        assert side.open_streams == 0


Call = Callable[[Side, Side], Awaitable[object]]


async def _request(a: Side, b: Side) -> None:
    assert await a.messaging.request(b.peer, "echo", b"x") == b"x"


async def _large_request(a: Side, b: Side) -> None:
    assert await a.messaging.request(b.peer, "echo", bytes(500_000), idempotent=True) == bytes(500_000)


async def _notify(a: Side, b: Side) -> None:
    await a.messaging.notify(b.peer, "note", b"x")


async def _many_notifies(a: Side, b: Side) -> None:
    for _ in range(40):
        await a.messaging.notify(b.peer, "note", bytes(5_000))


async def _broadcast(a: Side, b: Side) -> None:
    await a.messaging.broadcast_request([b.peer, a.peer], "echo", b"x", timeout_s=1)


async def _stream(a: Side, b: Side) -> None:
    async with a.messaging.stream(b.peer, "echo") as stream:
        await stream.send(b"x")
        await stream.send(bytes(600_000))
        await stream.send_eof()
        assert [len(item) async for item in stream] == [1, 600_000]


async def _stream_left_early(a: Side, b: Side) -> None:
    async with a.messaging.stream(b.peer, "echo") as stream:
        await stream.send(b"x")


@pytest.mark.parametrize(
    "call", [_request, _large_request, _notify, _many_notifies, _broadcast, _stream, _stream_left_early]
)
@pytest.mark.parametrize("linked", [True, False])
async def test_cancelled_anywhere_the_link_stays_usable(
    call: Call, linked: bool, autojump_clock: trio.abc.Clock
) -> None:
    limits = Limits(compress_bytes_min=0, link_out_items_max=8, link_in_items_max=8)
    async with sides(limits=limits, network=MemoryNetwork(latency_s=0.001)) as (a, b):
        events = await _serve(b)
        if linked:
            await _check_health(a, b)

        async def once() -> None:
            if not linked:
                await a.host.disconnect(b.peer)
            try:
                await call(a, b)
            except Dep2pError as error:
                if linked:
                    raise AssertionError("only a lost link may fail") from error

        cancelled = 0
        async for how in every_cancellation(once):
            cancelled += "cancelled" in how
            await settled()
            assert events.count("began") == events.count("ended"), how
            await _check_health(a, b)
        assert cancelled >= 2
        if linked:
            assert a.count("links_opened") == 1
            assert b.count("handlers_failed") == 0


async def test_cancelled_while_it_waits_for_a_full_link(autojump_clock: trio.abc.Clock) -> None:
    limits = Limits(link_out_items_max=2, link_in_items_max=2, requests_in_flight_per_peer_max=3, compress_bytes_min=0)
    async with sides(limits=limits) as (a, b):
        await _serve(b)
        await _check_health(a, b)
        link = a.link_to(b)
        twin_paused = trio.Event()

        async def stuck(notification: Notification) -> None:
            await twin_paused.wait()

        b.messaging.on_notify("stuck", stuck)
        outcomes: list[str] = []

        async def notify() -> None:
            with trio.move_on_after(2) as scope:
                await a.messaging.notify(b.peer, "stuck", bytes(300_000))
            outcomes.append("cancelled" if scope.cancelled_caught else "sent")

        async def request() -> None:
            with trio.move_on_after(2) as scope:
                await a.messaging.request(b.peer, "echo", bytes(300_000))
            outcomes.append("cancelled" if scope.cancelled_caught else "answered")

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(notify)
                nursery.start_soon(request)
        assert len(outcomes) == 20
        assert outcomes.count("cancelled") >= 5
        twin_paused.set()
        await trio.sleep(1)
        assert a.link_to(b) is link
        await _check_health(a, b)


async def test_the_handler_cancelled_at_every_await_by_its_caller(autojump_clock: trio.abc.Clock) -> None:
    async with sides(network=MemoryNetwork(latency_s=0.001)) as (a, b):
        await _serve(b)
        await a.messaging.request(b.peer, "echo", b"")
        completed = 0
        for microseconds in range(0, 9_000, 250):
            with trio.move_on_after(microseconds / 1e6):
                await a.messaging.request(b.peer, "echo", b"x")
                completed += 1
            assert await a.messaging.request(b.peer, "echo", b"y") == b"y"
        assert completed >= 5
        await _check_health(a, b)
        assert a.count("links_opened") == 1
