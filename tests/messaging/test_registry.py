"""Registering handlers: what is refused, and what unregistering leaves."""

from collections.abc import Callable

import pytest
import trio

from dep2p.messaging.service import MessageStream, Messaging, Notification, Request
from tests.messaging.nodes import settled, sides


async def answer(request: Request) -> bytes:
    return b""


async def take(notification: Notification) -> None:
    return None


async def serve(stream: MessageStream) -> None:
    return None


def registrations(messaging: Messaging) -> list[Callable[..., Callable[[], None]]]:
    def on_request(name: str, concurrency: int = 64, rate_per_s: float = 0.0) -> Callable[[], None]:
        return messaging.on_request(name, answer, concurrency=concurrency, rate_per_s=rate_per_s)

    def on_notify(name: str, concurrency: int = 64, rate_per_s: float = 0.0) -> Callable[[], None]:
        return messaging.on_notify(name, take, concurrency=concurrency, rate_per_s=rate_per_s)

    def on_stream(name: str, concurrency: int = 64, rate_per_s: float = 0.0) -> Callable[[], None]:
        return messaging.on_stream(name, serve, concurrency=concurrency, rate_per_s=rate_per_s)

    return [on_request, on_notify, on_stream]


async def test_a_name_has_one_handler_of_each_kind(autojump_clock: trio.abc.Clock) -> None:
    async with sides(1) as (a,):
        for register in registrations(a.messaging):
            remove = register("same")
            with pytest.raises(ValueError, match="has a handler already"):
                register("same")
            remove()
            again = register("same")
            remove()  # the first registration's: no effect on the second
            with pytest.raises(ValueError, match="has a handler already"):
                register("same")
            again()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("", {}, "1 to 255 bytes"),
        ("x" * 256, {}, "1 to 255 bytes"),
        ("n", {"concurrency": 0}, "concurrency"),
        ("n", {"rate_per_s": -1.0}, "rate_per_s"),
    ],
)
async def test_impossible_values_are_refused(
    name: str, options: dict[str, float], message: str, autojump_clock: trio.abc.Clock
) -> None:
    async with sides(1) as (a,):
        for register in registrations(a.messaging):
            with pytest.raises(ValueError, match=message):
                register(name, **options)
        with pytest.raises(ValueError, match="must be a function"):
            a.messaging.on_request("n", None)  # type: ignore[arg-type]


async def test_requests_that_wait_when_their_handler_is_removed_are_still_answered(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with sides() as (a, b):

        async def slow(request: Request) -> bytes:
            await trio.sleep(1)
            return b"ok"

        remove = b.messaging.on_request("slow", slow, concurrency=1)
        results: list[bytes] = []

        async def one() -> None:
            results.append(await a.messaging.request(b.peer, "slow", b""))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
            await trio.sleep(0.5)
            remove()
        assert results == [b"ok"] * 3


async def test_a_fault_of_our_own_ends_one_link_and_is_logged(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with sides() as (a, b):

        async def echo(request: Request) -> bytes:
            return request.body

        b.messaging.on_request("echo", echo)
        await a.messaging.request(b.peer, "echo", b"")
        (link,) = b.messaging._inbound  # pyright: ignore[reportPrivateUsage]

        def broken(frames: object) -> None:
            raise RuntimeError("a fault")

        link.receive = broken  # type: ignore[method-assign]
        assert await a.messaging.request(b.peer, "echo", b"x", idempotent=True) == b"x"
        await settled()
        assert "a fault" in caplog.text
        assert b.count("links_failed_internally") == 1
