"""Requests over links in memory, under the virtual clock."""

import gc
import logging
import tracemalloc

import pytest
import trio

from dep2p.errors import (
    Dep2pError,
    HandlerError,
    MessageTooLargeError,
    NoHandlerError,
    NotMemberError,
    OverloadedError,
    PeerNotFoundError,
    RateLimitedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.identity import Identity
from dep2p.io.messaging import Request
from dep2p.limits import Limits
from dep2p.testing.memory import MemoryNetwork
from tests.io.support import Side, settled, sides


async def echo(request: Request) -> bytes:
    return request.data


async def test_a_request_is_answered_with_all_that_the_handler_sees(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        seen: list[Request] = []

        async def handler(request: Request) -> bytes:
            seen.append(request)
            return b"hello " + request.data

        b.messaging.on_request("greet", handler)
        now = trio.current_time()
        reply = await a.messaging.request(b.peer, "greet", b"ann", timeout_s=5, headers={"lang": "en", "n": 3})
        assert reply == b"hello ann"
        (request,) = seen
        assert (request.peer, request.name, request.headers) == (a.peer, "greet", {"lang": "en", "n": 3})
        assert now + 4.9 < request.deadline_s <= now + 5.1
        assert not request.idempotent


async def test_many_requests_share_one_link_and_few_writes(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_request("echo", echo, concurrency=1_000)
        replies: dict[int, bytes] = {}

        async def one(index: int) -> None:
            replies[index] = await a.messaging.request(b.peer, "echo", str(index).encode())

        await a.messaging.request(b.peer, "echo", b"")
        link = a.link_to(b)
        writes = link.out.writes
        async with trio.open_nursery() as nursery:
            for index in range(500):
                nursery.start_soon(one, index)
        assert replies == {index: str(index).encode() for index in range(500)}
        assert a.count("links_opened") == 1
        assert link.out.writes - writes <= 5
        assert b.messaging.stats()[0].requests_in == 0


async def test_both_sides_ask_each_other_at_once(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def ask_back(request: Request) -> bytes:
            return b"<" + await b.messaging.request(request.peer, "echo", request.data) + b">"

        a.messaging.on_request("echo", echo)
        b.messaging.on_request("ask_back", ask_back)
        assert await a.messaging.request(b.peer, "ask_back", b"x") == b"<x>"


@pytest.mark.parametrize("size", [0, 1, 1_000, 70_000, 1_048_576])
async def test_messages_of_every_size_come_through(size: int, autojump_clock: trio.abc.Clock) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    async with sides() as (a, b):
        b.messaging.on_request("echo", echo)
        assert await a.messaging.request(b.peer, "echo", data[:size]) == data[:size]
        assert await a.messaging.request(b.peer, "echo", bytearray(data[:size])) == data[:size]  # type: ignore[arg-type]


async def test_too_large_a_request_is_refused_before_anything_is_sent(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(message_bytes_max=1_000)) as (a, b):
        with pytest.raises(MessageTooLargeError, match="1001 bytes"):
            await a.messaging.request(b.peer, "echo", bytes(1_001))
        assert a.count("links_opened") == 0


async def test_too_large_a_response_is_an_error_for_its_caller_only(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(message_bytes_max=1_000)) as (a, b):

        async def large(request: Request) -> bytes:
            return bytes(1_001)

        b.messaging.on_request("large", large)
        b.messaging.on_request("echo", echo)
        with pytest.raises(MessageTooLargeError):
            await a.messaging.request(b.peer, "large", b"")
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"
        assert a.count("links_opened") == 1


async def test_a_peer_with_a_smaller_cap_names_the_message_that_was_too_large(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=[Limits(compress_bytes_min=0), Limits(message_bytes_max=1_000, headers_bytes_max=100)]) as (
        a,
        b,
    ):
        b.messaging.on_request("echo", echo)
        with pytest.raises(MessageTooLargeError):
            await a.messaging.request(b.peer, "echo", bytes(5_000))
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"
        assert b.count("links_refused_message_too_large") == 1


async def test_a_name_without_a_handler(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        with pytest.raises(NoHandlerError, match="'nobody'"):
            await a.messaging.request(b.peer, "nobody", b"")
        remove = b.messaging.on_request("nobody", echo)
        assert await a.messaging.request(b.peer, "nobody", b"x") == b"x"
        remove()
        remove()
        with pytest.raises(NoHandlerError):
            await a.messaging.request(b.peer, "nobody", b"")


async def test_a_handler_s_exception_is_logged_and_stops_nothing(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with sides() as (a, b):

        async def broken(request: Request) -> bytes:
            raise KeyError("secret detail")

        async def outspoken(request: Request) -> bytes:
            raise HandlerError("no such article")

        async def wrong(request: Request) -> bytes:
            return "text"  # type: ignore[return-value]

        b.messaging.on_request("broken", broken)
        b.messaging.on_request("outspoken", outspoken)
        b.messaging.on_request("wrong", wrong)
        b.messaging.on_request("echo", echo)
        with caplog.at_level(logging.ERROR, "dep2p.io"):
            with pytest.raises(HandlerError) as failed:
                await a.messaging.request(b.peer, "broken", b"")
            assert str(failed.value) == "the handler failed"
            assert "secret detail" in caplog.text and "Traceback" in caplog.text
            caplog.clear()
            with pytest.raises(HandlerError, match="no such article"):
                await a.messaging.request(b.peer, "outspoken", b"")
            assert not caplog.records
            with pytest.raises(HandlerError):
                await a.messaging.request(b.peer, "wrong", b"")
            assert "must give bytes" in caplog.text
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"
        assert b.count("handlers_failed") == 3


async def test_deadlines_travel_and_the_handler_stops_then(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        stopped_at: list[float] = []

        async def slow(request: Request) -> bytes:
            try:
                await trio.sleep_forever()
            finally:
                stopped_at.append(trio.current_time())
            raise AssertionError

        b.messaging.on_request("slow", slow)
        began = trio.current_time()
        with pytest.raises(RequestTimeoutError):
            await a.messaging.request(b.peer, "slow", b"", timeout_s=2.5)
        assert trio.current_time() - began == pytest.approx(2.5, abs=0.01)
        await settled()
        assert stopped_at[0] - began == pytest.approx(2.5, abs=0.05)
        assert a.count("requests_timed_out") == 1
        # Requests with a later deadline are not touched by an earlier one.
        b.messaging.on_request("echo", echo)
        async with trio.open_nursery() as nursery:

            async def short() -> None:
                with pytest.raises(RequestTimeoutError):
                    await a.messaging.request(b.peer, "slow", b"", timeout_s=0.5)

            nursery.start_soon(short)
            assert await a.messaging.request(b.peer, "echo", b"x", timeout_s=60) == b"x"


async def test_a_deadline_passes_even_when_the_peer_is_silent(autojump_clock: trio.abc.Clock) -> None:
    network = MemoryNetwork()
    async with sides(network=network) as (a, b):
        b.messaging.on_request("echo", echo)
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"
        network.partition(a.peer, b.peer)
        began = trio.current_time()
        with pytest.raises(RequestTimeoutError):
            await a.messaging.request(b.peer, "echo", b"y", timeout_s=3)
        assert trio.current_time() - began == pytest.approx(3)
        network.heal()
        assert await a.messaging.request(b.peer, "echo", b"z") == b"z"
        await settled()
        assert a.count("responses_unmatched") <= 1


async def test_cancelling_the_caller_cancels_the_handler(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        events: list[str] = []

        async def slow(request: Request) -> bytes:
            events.append("began")
            try:
                await trio.sleep_forever()
            finally:
                events.append("stopped")
            raise AssertionError

        b.messaging.on_request("slow", slow)
        with trio.move_on_after(1):
            await a.messaging.request(b.peer, "slow", b"")
        await settled()
        assert events == ["began", "stopped"]
        assert a.count("requests_cancelled") == 1
        assert b.messaging.stats()[0].requests_in == 0


async def test_a_handler_that_resists_cancellation_hurts_nobody_else(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def stubborn(request: Request) -> bytes:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            return b"too late"

        b.messaging.on_request("stubborn", stubborn)
        b.messaging.on_request("echo", echo)
        with trio.move_on_after(1):
            await a.messaging.request(b.peer, "stubborn", b"")
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"
        await trio.sleep(10)
        assert a.count("responses_unmatched") == 0
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"


async def test_a_worker_is_reused_and_no_context_leaks_between_requests(autojump_clock: trio.abc.Clock) -> None:
    import contextvars

    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")
    async with sides() as (a, b):
        seen: list[str] = []

        async def handler(request: Request) -> bytes:
            seen.append(user.get())
            user.set(request.data.decode())
            await trio.lowlevel.checkpoint()
            assert user.get() == request.data.decode()
            return b""

        b.messaging.on_request("who", handler)
        for name in (b"ann", b"bob", b"cy"):
            await a.messaging.request(b.peer, "who", name)
        assert seen == ["nobody"] * 3
        assert b.messaging._workers.spawned == 1  # pyright: ignore[reportPrivateUsage]


async def test_a_worker_survives_cancelled_and_failing_nurseries(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def messy(request: Request) -> bytes:
            async def child() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError("while being cancelled")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
            raise AssertionError

        b.messaging.on_request("messy", messy)
        b.messaging.on_request("echo", echo)
        for _ in range(3):
            with trio.move_on_after(1):
                await a.messaging.request(b.peer, "messy", b"")
            await settled()
            assert await a.messaging.request(b.peer, "echo", b"x") == b"x"


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


async def test_a_waiting_request_that_is_given_up_never_runs(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        ran: list[bytes] = []

        async def slow(request: Request) -> bytes:
            ran.append(request.data)
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
                nursery.start_soon(_quietly, flood, b, "slow")
            await trio.sleep(0.5)
            began = trio.current_time()
            await gentle.messaging.request(b.peer, "slow", b"")
            assert trio.current_time() - began < 2.6
            nursery.cancel_scope.cancel()


async def _quietly(a: Side, b: Side, name: str) -> None:
    try:
        await a.messaging.request(b.peer, name, b"")
    except Dep2pError:
        pass


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


async def test_a_peer_over_its_rate_is_told_when_to_come_back(autojump_clock: trio.abc.Clock) -> None:
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


# Back-pressure


async def test_over_the_requests_in_flight_callers_wait(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(requests_in_flight_per_peer_max=5)) as (a, b):
        most = 0

        async def slow(request: Request) -> bytes:
            nonlocal most
            most = max(most, a.link_to(b).requester.in_flight)
            await trio.sleep(1)
            return request.data

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
                    nursery.start_soon(_quietly, a, b, "x" * 200)
                await trio.sleep(0.1)
                assert b.messaging.stats()[0].queued_out_items <= 50 + 3_000
            link.stream.resume_receiving()
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"


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


async def test_draining_does_not_wait_for_ever(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(drain_timeout_s=4)) as (a, b):

        async def hang(request: Request) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        b.messaging.on_request("hang", hang)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_quietly, a, b, "hang")
            await trio.sleep(1)
            began = trio.current_time()
            await b.messaging.drain()
            assert trio.current_time() - began == pytest.approx(4)
            assert b.count("drain_abandoned") == 1
            nursery.cancel_scope.cancel()


async def test_a_stranger_s_requests_reach_no_handler(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        ran: list[bytes] = []

        async def handler(request: Request) -> bytes:
            ran.append(request.data)
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


# Compression


@pytest.mark.parametrize("offered", [True, False])
async def test_large_messages_travel_compressed_when_both_sides_offer_it(
    offered: bool, autojump_clock: trio.abc.Clock
) -> None:
    async with sides(features=frozenset({"zstd"} if offered else ())) as (a, b):
        b.messaging.on_request("echo", echo)
        await a.messaging.request(b.peer, "echo", b"")
        link = a.link_to(b)
        sent: list[int] = []
        write = link.stream.write_nowait

        def measure(data: bytes, *, urgent: bool = False) -> None:
            sent.append(len(data))
            write(data, urgent=urgent)

        link.stream.write_nowait = measure  # type: ignore[method-assign,assignment]
        data = b"abcd" * 50_000
        assert await a.messaging.request(b.peer, "echo", data) == data
        assert (sum(sent) < 10_000) == offered


async def test_a_few_compressed_bytes_do_not_fill_the_memory(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=[Limits(), Limits(link_in_bytes_max=3_000_000)]) as (a, b):

        async def slow(request: Request) -> bytes:
            await trio.sleep(1)
            return b"ok"

        b.messaging.on_request("slow", slow)
        results: list[object] = []

        async def one() -> None:
            try:
                results.append(await a.messaging.request(b.peer, "slow", bytes(1_000_000)))
            except OverloadedError:
                results.append("overloaded")

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(one)
        assert results.count(b"ok") == 3
        assert results.count("overloaded") == 47


async def test_idle_workers_and_links_keep_no_message_in_memory(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(compress_bytes_min=0)) as (a, b):

        async def sized(request: Request) -> bytes:
            await trio.sleep(1)
            return bytes(len(request.data))

        b.messaging.on_request("sized", sized)
        await a.messaging.request(b.peer, "sized", b"")
        tracemalloc.start()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(a.messaging.request, b.peer, "sized", bytes(200_000))
            await settled()
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 600_000
        finally:
            tracemalloc.stop()
