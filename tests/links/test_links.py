"""The life of links: they die, idle, drain, and lose their members."""

import math
from typing import Any

import pytest
import trio

from dep2p.errors import (
    Dep2pError,
    NotMemberError,
    OverloadedError,
    PeerNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.messaging.service import Notification, Request
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.nodes import quietly, settled, sides


async def echo(request: Request) -> bytes:
    return request.body


# Links that die


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_link_that_dies_fails_what_is_not_safe_to_repeat(
    idempotent: bool, autojump_clock: trio.abc.Clock
) -> None:
    async with sides() as (a, b):
        calls = 0

        async def handler(request: Request) -> bytes:
            nonlocal calls
            calls += 1
            if calls == 1:
                await trio.sleep(1)
                await a.host.disconnect(b.peer)
                await trio.sleep_forever()
            return b"ok"

        b.messaging.on_request("h", handler)
        if idempotent:
            assert await a.messaging.request(b.peer, "h", b"", idempotent=True) == b"ok"
            assert calls == 2
        else:
            with pytest.raises(StreamClosedError):
                await a.messaging.request(b.peer, "h", b"")
        assert await a.messaging.request(b.peer, "h", b"") == b"ok"
        assert a.count("links_opened") == 2
        await settled()
        assert b.messaging.stats()[0].requests_in == 0


async def test_a_peer_that_crashes_and_comes_back_is_reached_again(autojump_clock: trio.abc.Clock) -> None:
    network = MemoryNetwork()
    async with sides(network=network) as (a, b):

        async def hang(request: Request) -> bytes:
            await trio.sleep(1)
            b.host.kill()
            await trio.sleep_forever()
            return b""

        b.messaging.on_request("hang", hang)
        with pytest.raises(StreamClosedError):
            await a.messaging.request(b.peer, "hang", b"")
        with pytest.raises((PeerNotFoundError, RequestTimeoutError)):
            await a.messaging.request(b.peer, "hang", b"", timeout_s=5)
        assert a.messaging.stats() == []


async def test_an_unknown_peer_is_not_found(autojump_clock: trio.abc.Clock) -> None:
    async with sides(1) as (a,):
        stranger = Identity.generate().peer_id
        with pytest.raises(PeerNotFoundError):
            await a.messaging.request(stranger, "x", b"")
        with pytest.raises(PeerNotFoundError):
            await a.messaging.notify(stranger, "x", b"")


async def test_callers_that_wait_for_the_same_link_open_it_once_and_one_s_end_does_not_stop_the_others(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with sides(network=MemoryNetwork(latency_s=0.5)) as (a, b):
        b.messaging.on_request("echo", echo)
        results: list[bytes] = []

        async def one(timeout_s: float) -> None:
            with trio.move_on_after(timeout_s):
                results.append(await a.messaging.request(b.peer, "echo", b"x"))

        async with trio.open_nursery() as nursery:
            for timeout_s in (0.1, 0.2, 60, 60):
                nursery.start_soon(one, timeout_s)
        assert results == [b"x", b"x"]
        assert a.count("links_opened") == 1


async def test_an_idle_link_is_closed_and_opened_again_when_needed(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(link_idle_timeout_s=30)) as (a, b):
        b.messaging.on_request("echo", echo)
        await a.messaging.request(b.peer, "echo", b"x")
        await trio.sleep(70)
        assert a.messaging.stats() == b.messaging.stats() == []
        assert a.count("links_closed_idle") == 1
        assert await a.messaging.request(b.peer, "echo", b"y") == b"y"
        for _ in range(10):
            await trio.sleep(20)
            await a.messaging.request(b.peer, "echo", b"z")
        assert a.count("links_opened") == 2


async def test_a_long_request_keeps_its_link_from_being_idle(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(link_idle_timeout_s=30)) as (a, b):

        async def slow(request: Request) -> bytes:
            await trio.sleep(300)
            return b"done"

        b.messaging.on_request("slow", slow)
        assert await a.messaging.request(b.peer, "slow", b"", timeout_s=1_000) == b"done"


# Draining and membership


async def test_draining_refuses_new_requests_and_finishes_those_in_flight(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def slow(request: Request) -> bytes:
            await trio.sleep(3)
            return b"done"

        b.messaging.on_request("slow", slow)
        results: list[bytes] = []

        async def one() -> None:
            results.append(await a.messaging.request(b.peer, "slow", b""))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(1)
            began = trio.current_time()
            nursery.start_soon(b.messaging.drain)
            await trio.sleep(0.1)
            with pytest.raises(OverloadedError):
                await a.messaging.request(b.peer, "slow", b"")
        assert results == [b"done"]
        assert trio.current_time() - began < 2.5
        assert b.count("drain_abandoned") == 0


async def test_draining_does_not_wait_forever(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(drain_timeout_s=4)) as (a, b):

        async def hang(request: Request) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        b.messaging.on_request("hang", hang)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, a, b, "hang")
            await trio.sleep(1)
            began = trio.current_time()
            await b.messaging.drain()
            assert trio.current_time() - began == pytest.approx(4)
            assert b.count("drain_abandoned") == 1
            nursery.cancel_scope.cancel()


async def test_an_unknown_peer_s_requests_reach_no_handler(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        ran: list[bytes] = []

        async def handler(request: Request) -> bytes:
            ran.append(request.body)
            return b""

        b.messaging.on_request("h", handler)
        b.gate.expel(a.peer)
        with pytest.raises((NotMemberError, StreamClosedError)):
            await a.messaging.request(b.peer, "h", b"x")
        assert ran == []
        assert b.count("links_refused_not_member") == 1


@pytest.mark.parametrize("tell", [True, False])
async def test_a_member_that_is_expelled_with_a_request_at_work(tell: bool, autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        events: list[str] = []

        async def slow(request: Request) -> bytes:
            events.append("began")
            try:
                await trio.sleep(5)
            finally:
                events.append("ended")
            return b"x"

        b.messaging.on_request("slow", slow)
        async with trio.open_nursery() as nursery:

            async def one() -> None:
                with pytest.raises(NotMemberError):
                    await a.messaging.request(b.peer, "slow", b"")

            nursery.start_soon(one)
            await trio.sleep(1)
            b.gate.expel(a.peer, tell=tell)
            if not tell:  # then the next frame shows it
                nursery.start_soon(one)
        await settled()
        assert events == ["began", "ended"]


async def test_we_do_not_ask_a_peer_that_is_no_member_any_more(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_request("echo", echo)
        await a.messaging.request(b.peer, "echo", b"")
        a.gate.expel(b.peer, tell=False)
        with pytest.raises(NotMemberError):
            await a.messaging.request(b.peer, "echo", b"secret")
        with pytest.raises(NotMemberError):
            await a.messaging.notify(b.peer, "echo", b"secret")
        await settled()
        assert b.count("requests_received") == 1


async def test_draining_waits_until_what_was_sent_is_with_the_transport(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(compress_bytes_min=0)) as (a, b):
        got = 0

        async def slow(notification: Notification) -> None:
            nonlocal got
            await trio.sleep(0.01)
            got += 1

        b.messaging.on_notify("n", slow)
        for _ in range(100):
            await a.messaging.notify(b.peer, "n", bytes(10_000))
        await a.messaging.drain()
        a.stop()
        await trio.sleep(5)
        assert got == 100


async def test_calls_before_and_after_it_runs_are_refused(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        a.messaging.on_request("echo", echo)
        b.messaging.on_request("echo", echo)
        assert await a.messaging.request(b.peer, "echo", b"x", timeout_s=math.inf) == b"x"
        with pytest.raises(ValueError, match="timeout_s"):
            await a.messaging.request(b.peer, "echo", b"x", timeout_s=-1)
        a.stop()
        await settled()
        with pytest.raises(StreamClosedError, match="not running"):
            await a.messaging.request(b.peer, "echo", b"x")
        with pytest.raises(StreamClosedError, match="not running"):
            await a.messaging.notify(b.peer, "echo", b"x")
        with pytest.raises(StreamClosedError, match="not running"):
            async with a.messaging.stream(b.peer, "echo"):
                pass
        with pytest.raises(Dep2pError):
            await b.messaging.request(a.peer, "echo", b"x", timeout_s=2)


async def test_a_frame_that_cannot_be_written_ends_its_link_and_no_other(autojump_clock: trio.abc.Clock) -> None:
    async with sides(3) as [one, two, three]:
        for side in (two, three):
            side.messaging.on_request("echo", echo)
            assert await one.messaging.request(side.peer, "echo", b"1") == b"1"
        pieces: Any = ("not bytes",)
        one.link_to(two).out.put(pieces, 9)
        await trio.sleep(1)
        assert await one.messaging.request(three.peer, "echo", b"2") == b"2"
        assert await one.messaging.request(two.peer, "echo", b"3") == b"3"  # over another link
        assert one.messaging.counters()["links_failed_internally"] == 1
