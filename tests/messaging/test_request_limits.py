"""Limits of requests: slots, waiting lines, rates, retries, back-pressure."""

import pytest
import trio

from dep2p.errors import (
    HandlerError,
    OverloadedError,
    RateLimitedError,
    RequestTimeoutError,
)
from dep2p.limits import Limits
from dep2p.messaging.service import Request
from tests.messaging.nodes import Side, quietly, settled, sides


async def echo(request: Request) -> bytes:
    return request.body


# Limits of the answering side


async def test_over_the_concurrency_requests_wait_and_over_the_line_they_are_refused(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with sides() as (a, b):
        running = most = 0

        async def slow(request: Request) -> bytes:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await trio.sleep(1)
            running -= 1
            return b"ok"

        b.messaging.on_request("slow", slow, concurrency=2, waiting_max=3)
        results: list[object] = []

        async def one() -> None:
            try:
                results.append(await a.messaging.request(b.peer, "slow", b""))
            except OverloadedError:
                results.append("overloaded")

        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(one)
        assert most == 2
        assert results.count(b"ok") == 5
        assert results.count("overloaded") == 4
        assert b.count("requests_refused_overloaded") == 4


async def test_a_waiting_request_that_is_given_up_never_runs(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        ran: list[bytes] = []

        async def slow(request: Request) -> bytes:
            ran.append(request.body)
            await trio.sleep(5)
            return b""

        b.messaging.on_request("slow", slow, concurrency=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.messaging.request, b.peer, "slow", b"1")
            await trio.sleep(0.5)
            with trio.move_on_after(1):
                await a.messaging.request(b.peer, "slow", b"2")
            with pytest.raises(RequestTimeoutError):
                await a.messaging.request(b.peer, "slow", b"3", timeout_s=1)
        await settled()
        assert ran == [b"1"]
        await a.messaging.request(b.peer, "slow", b"4")
        assert ran == [b"1", b"4"]


async def test_one_peer_s_flood_delays_another_peer_by_one_turn_only(autojump_clock: trio.abc.Clock) -> None:
    async with sides(3) as (flood, b, gentle):

        async def slow(request: Request) -> bytes:
            await trio.sleep(1)
            return b""

        b.messaging.on_request("slow", slow, concurrency=2)
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(quietly, flood, b, "slow")
            await trio.sleep(0.5)
            began = trio.current_time()
            await gentle.messaging.request(b.peer, "slow", b"")
            assert trio.current_time() - began < 2.6
            nursery.cancel_scope.cancel()


async def test_a_peer_may_not_have_more_than_its_share_at_work_even_by_cancelling(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with sides(limits=Limits(handlers_per_peer_max=3)) as (a, b):

        async def stubborn(request: Request) -> bytes:
            with trio.CancelScope(shield=True):
                await trio.sleep(100)
            return b""

        b.messaging.on_request("stubborn", stubborn)
        for _ in range(3):
            with trio.move_on_after(0.1):
                await a.messaging.request(b.peer, "stubborn", b"")
        with pytest.raises(OverloadedError):
            await a.messaging.request(b.peer, "stubborn", b"")


async def test_a_peer_over_its_rate_is_reported_when_to_come_back(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_request("echo", echo, rate_per_s=2)
        for _ in range(2):
            await a.messaging.request(b.peer, "echo", b"")
        with pytest.raises(RateLimitedError) as limited:
            await a.messaging.request(b.peer, "echo", b"")
        assert 400 <= limited.value.retry_after_ms <= 501
        await trio.sleep(limited.value.retry_after_ms / 1000)
        await a.messaging.request(b.peer, "echo", b"")
        # An idempotent request waits by itself.
        began = trio.current_time()
        await a.messaging.request(b.peer, "echo", b"", idempotent=True)
        assert 0.4 < trio.current_time() - began < 0.8


# Retries


async def test_an_idempotent_request_is_tried_again_and_another_is_not(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        calls = 0
        blocking = trio.Event()

        async def busy(request: Request) -> bytes:
            nonlocal calls
            calls += 1
            await blocking.wait()
            return b"ok"

        b.messaging.on_request("busy", busy, concurrency=1, waiting_max=0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.messaging.request, b.peer, "busy", b"")
            await trio.sleep(0.1)
            with pytest.raises(OverloadedError):
                await a.messaging.request(b.peer, "busy", b"")
            began = trio.current_time()
            with pytest.raises(OverloadedError):
                await a.messaging.request(b.peer, "busy", b"", idempotent=True)
            # 100 + 200 + 400 + 800 ms, each from its upper half.
            assert 0.75 <= trio.current_time() - began <= 1.6
            assert a.count("requests_retried") == 4
            nursery.start_soon(_set_later, blocking)
            assert await a.messaging.request(b.peer, "busy", b"", idempotent=True) == b"ok"


async def _set_later(event: trio.Event) -> None:
    await trio.sleep(0.25)
    event.set()


async def test_handler_errors_are_not_tried_again(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        calls = 0

        async def broken(request: Request) -> bytes:
            nonlocal calls
            calls += 1
            raise HandlerError("no")

        b.messaging.on_request("broken", broken)
        with pytest.raises(HandlerError):
            await a.messaging.request(b.peer, "broken", b"", idempotent=True)
        assert calls == 1


async def test_the_deadline_bounds_all_tries_together(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_request("echo", echo, rate_per_s=0.01)
        await a.messaging.request(b.peer, "echo", b"")
        began = trio.current_time()
        with pytest.raises(RateLimitedError):
            await a.messaging.request(b.peer, "echo", b"", idempotent=True, timeout_s=3)
        assert trio.current_time() - began <= 3


# Back-pressure


async def test_over_the_requests_in_flight_callers_wait(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(requests_in_flight_per_peer_max=5)) as (a, b):
        most = 0

        async def slow(request: Request) -> bytes:
            nonlocal most
            most = max(most, a.link_to(b).requester.in_flight)
            await trio.sleep(1)
            return request.body

        b.messaging.on_request("slow", slow)
        done = 0

        async def one() -> None:
            nonlocal done
            await a.messaging.request(b.peer, "slow", b"")
            done += 1

        async with trio.open_nursery() as nursery:
            for _ in range(23):
                nursery.start_soon(one)
        assert done == 23
        assert most == 5


async def test_a_peer_that_asks_but_does_not_read_the_answers_costs_bounded_memory(
    autojump_clock: trio.abc.Clock,
) -> None:
    limits = Limits(link_out_bytes_max=300_000, link_out_items_max=100, compress_bytes_min=0)
    async with sides(3, limits=limits) as (deaf, b, fast):

        async def large(request: Request) -> bytes:
            return bytes(50_000)

        b.messaging.on_request("large", large, concurrency=1_000)
        b.messaging.on_request("echo", echo)
        await deaf.messaging.request(b.peer, "large", b"")
        link = deaf.link_to(b)
        link.stream.pause_receiving()
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(_quietly_for, deaf, b, 20.0)
            for _ in range(30):
                await trio.sleep(0.5)
                (stats,) = [each for each in b.messaging.stats() if each.peer == deaf.peer]
                assert stats.queued_out_bytes <= limits.link_out_bytes_max + 60_000
                began = trio.current_time()
                assert await fast.messaging.request(b.peer, "echo", b"x") == b"x"
                assert trio.current_time() - began < 0.1
        # Past their deadlines the answers are dropped, and the peer is served again when it reads.
        link.stream.resume_receiving()
        assert await deaf.messaging.request(b.peer, "large", b"") == bytes(50_000)


async def _quietly_for(a: Side, b: Side, timeout_s: float) -> None:
    try:
        await a.messaging.request(b.peer, "large", b"", timeout_s=timeout_s)
    except RequestTimeoutError:
        pass


async def test_a_flood_of_refused_requests_whose_errors_are_not_read_is_held_back(
    autojump_clock: trio.abc.Clock,
) -> None:
    limits = Limits(link_out_items_max=50)
    async with sides(limits=[Limits(), limits]) as (a, b):
        b.messaging.on_request("echo", echo)
        await a.messaging.request(b.peer, "echo", b"")
        link = a.link_to(b)
        link.stream.pause_receiving()
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                for _ in range(100):
                    nursery.start_soon(quietly, a, b, "x" * 200)
                await trio.sleep(0.1)
                assert b.messaging.stats()[0].queued_out_items <= 50 + 3_000
            link.stream.resume_receiving()
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"
