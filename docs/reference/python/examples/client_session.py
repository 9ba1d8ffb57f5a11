"""Push to a client in order, over reconnects (client).

Shows: Client.sessions, ClientSessions.serve, ClientSessions.open, ClientSessions.served, ClientSessions.stats,
ClientServedSession.push, ClientServedSession.push_nowait, ClientServedSession.wait_closed,
ClientOpenSession.receive, ClientOpenSession.request, ClientSessionRequest.before, ClientSessions,
ClientServedSession, ClientOpenSession, ClientSessionRequest
"""

import asyncio

from dep2p.client import Client, ClientServedSession, ClientSessionRequest


async def feed(session: ClientServedSession) -> None:  # runs once for each session, as long as it lives
    await session.push(b"snapshot")
    await session.push_nowait(b"first change")
    await session.wait_closed()


async def answer(request: ClientSessionRequest) -> bytes:
    await request.before(b"you are subscribed")
    return b"ok"


async def main() -> None:
    async with Client.open() as client:
        client.sessions.serve("prices", feed, on_request=answer)
        await client.handlers_ready()
        async with client.sessions.open(await client.peer_id(), "prices") as session:
            for _ in range(2):
                push = await session.receive()
                print(push and (push.seq, push.body))  # (1, b'snapshot') | (2, b'first change')
            print(await session.request(b"gold", timeout_s=5))  # b'ok'
            push = await session.receive()
            print(push and push.body)  # b'you are subscribed'
            print(len(client.sessions.served("prices")), len(await client.sessions.stats()))  # 1 2


asyncio.run(main())
