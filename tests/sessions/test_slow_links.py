"""Sessions over links so slow that a push or a request takes longer than the ack timeout."""

import random

import trio
import trio.testing

from dep2p.sessions.server_session import SessionRequest
from dep2p.sessions.service import Session
from dep2p.testing import MemoryNetwork
from tests.sessions.nodes import session_sides

LARGE = random.Random(7).randbytes(1_000_000)


async def test_a_push_that_flows_slowly_is_sent_once(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork(bytes_per_s=16_000)  # 62 s for one; the ack timeout is 15 s

    async def push(session: Session) -> None:
        for _ in range(3):
            await session.push(LARGE)

    async with session_sides(network=network) as [server, client]:
        server.serve(push)
        async with client.service.open(server.peer, "x") as session:
            assert [len(each.body) async for each in session] == [len(LARGE)] * 3
            assert session.stats()["duplicates"] == 0


async def test_a_request_that_flows_slowly_is_sent_once(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork(bytes_per_s=16_000)

    async def answer(request: SessionRequest) -> bytes:
        return b"%d" % len(request.body)

    async def idle(session: Session) -> None:
        await session.wait_closed()

    async with session_sides(network=network) as [server, client]:
        server.serve(idle, on_request=answer)
        async with client.service.open(server.peer, "x") as session:
            assert await session.request(LARGE, timeout_s=600) == b"1000000"
            assert session.stats().get("requests_repeated", 0) == 0
