"""Serve sessions in a loop, go on with a token (client).

Shows: ClientSessions.accept, ClientSessions.start, ClientSessions.find, ClientSessions.push_all,
ClientOpenSession.receive_many, ClientOpenSession.handled, ClientOpenSession.token, ClientOpenSession.detach,
ClientOpenSession.aclose, ClientServedSession.serve_requests, ClientServedSession.end, ClientServedSession.stats,
ClientSessionRequest.after, Client.open, Client.peer_id, ClientOpenSession.request
"""

import asyncio

from dep2p.client import Client, ClientSessionRequest


async def answer(request: ClientSessionRequest) -> bytes:
    await request.after(b"first value")
    return b"ok"


async def main() -> None:
    async with Client.open() as client, client.sessions.accept("gold") as sessions:
        session = await client.sessions.start(await client.peer_id(), "gold")
        served = await anext(sessions)
        answering = asyncio.create_task(served.serve_requests(answer))
        print(await session.request(b"?", timeout_s=5))  # b'ok'
        print([push.body for push in await session.receive_many()])  # [b'first value']
        session.handled()
        token = await session.detach()  # a text: keep it with the result of your work

        print(await client.sessions.push_all("gold", b"second value"))  # (1, [])
        again = await client.sessions.start(await client.peer_id(), "gold", token=token)
        print([push.body for push in await again.receive_many()])  # [b'second value']
        again.handled()
        print(again.token != token, len(await served.stats()) > 5)  # True True
        print(client.sessions.find(served.id) is served)  # True
        await served.end("enough")
        await again.aclose()
        answering.cancel()


asyncio.run(main())
