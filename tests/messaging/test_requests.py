"""Requests over links in memory, under the virtual clock."""

import gc
import logging
import tracemalloc

import pytest
import trio
import trio.testing

from dep2p.errors import (
    Dep2pError,
    HandlerError,
    MessageTooLargeError,
    NoHandlerError,
    NotMemberError,
    OverloadedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.messaging.service import Request
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.nodes import settled, sides


async def echo(request: Request) -> bytes:
    return request.body


async def test_a_request_is_answered_with_all_that_the_handler_sees(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        seen: list[Request] = []

        async def handler(request: Request) -> bytes:
            seen.append(request)
            return b"hello " + request.body

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
            return b"<" + await b.messaging.request(request.peer, "echo", request.body) + b">"

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


async def test_a_handler_that_resists_cancellation_hurts_no_one_else(autojump_clock: trio.abc.Clock) -> None:
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
            user.set(request.body.decode())
            await trio.lowlevel.checkpoint()
            assert user.get() == request.body.decode()
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
            return bytes(len(request.body))

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


@pytest.mark.parametrize("who", ["caller", "answerer"])
async def test_only_an_error_before_the_request_was_sent_says_that_it_was_not(
    who: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with sides(2) as (a, b):
        begun = trio.Event()
        errors: list[Dep2pError] = []

        async def slow(request: Request) -> bytes:
            begun.set()
            await trio.sleep(5)
            return b""

        async def ask() -> None:
            with pytest.raises((NotMemberError, StreamClosedError)) as caught:
                await a.messaging.request(b.peer, "slow", b"")
            errors.append(caught.value)

        b.messaging.on_request("slow", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await begun.wait()
            expeller, expelled = (b, a) if who == "caller" else (a, b)
            expeller.gate.expel(expelled.peer)
        a.gate.expel(b.peer)
        await ask()
        assert [error.is_unsent for error in errors] == [False, True]


async def test_a_request_to_a_peer_that_cannot_be_reached_was_not_sent(autojump_clock: trio.testing.MockClock) -> None:
    stranger = MemoryNetwork().host().peer_id
    async with sides(1) as (a,):
        with pytest.raises(Dep2pError) as caught:
            await a.messaging.request(stranger, "echo", b"", timeout_s=3)
        assert caught.value.is_unsent
