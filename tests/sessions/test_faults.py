"""Ordered sessions where handlers fail and blocks are left at the wrong moment: each test was a fault once."""

import pytest
import trio
import trio.testing

from dep2p.errors import HandlerError, SessionClosedError, SessionFailedError
from dep2p.sessions.server_session import SessionRequest
from dep2p.sessions.service import OpenSession, Session
from tests.sessions.nodes import session_sides


async def answer(request: SessionRequest) -> bytes:
    return request.body


async def test_a_handler_beside_a_request_handler_says_why_it_fails(autojump_clock: trio.testing.MockClock) -> None:
    async def refuse(session: Session) -> None:
        await session.push(b"first")
        raise HandlerError("out of stock")

    async with session_sides() as [server, client]:
        server.serve(refuse, on_request=answer)
        async with client.service.open(server.peer, "x") as session:
            got: list[bytes] = []
            with pytest.raises(SessionFailedError, match="out of stock"):
                async for push in session:
                    got.append(push.body)
            assert got == [b"first"]


async def test_a_handler_beside_a_request_handler_that_meets_the_end_has_not_failed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ended = trio.Event()

    async def push_forever(session: Session) -> None:
        try:
            while True:
                await session.push(b"x")
                await trio.sleep(1)
        finally:
            ended.set()

    async with session_sides() as [server, client]:
        server.serve(push_forever, on_request=answer)
        async with client.service.open(server.peer, "x") as session:
            await session.receive()
        with trio.fail_after(100):
            await ended.wait()
        await trio.sleep(1)
        assert server.count("handlers_failed") == 0


@pytest.mark.parametrize("waits_for", ["push", "answer"])
async def test_leaving_a_session_by_an_error_lets_go_of_who_waits_elsewhere(
    autojump_clock: trio.testing.MockClock, waits_for: str
) -> None:
    opened: list[OpenSession] = []
    ended = trio.Event()

    async def elsewhere() -> None:
        [session] = opened
        if waits_for == "push":
            assert await session.receive() is None
        else:
            with pytest.raises(SessionClosedError):
                await session.request(b"x", timeout_s=1_000_000)
        ended.set()

    async def forever(session: Session) -> None:
        await trio.sleep_forever()

    async with session_sides() as [server, client], trio.open_nursery() as nursery:
        server.serve(forever)
        with pytest.raises(KeyError):
            async with client.service.open(server.peer, "x") as session:
                opened.append(session)
                nursery.start_soon(elsewhere)
                await trio.sleep(1)
                raise KeyError
        with trio.fail_after(10):
            await ended.wait()
