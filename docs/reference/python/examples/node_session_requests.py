"""Answer requests inside a session, with pushes around the answer (node).

Shows: Sessions.accept, Session.serve_requests, Session.end, OpenSession.request, SessionRequest.before,
SessionRequest.after, OpenSession.receive, Sessions.open, SessionRequest, SessionOptions, SessionClosedError
"""

import trio

from dep2p import SessionRequest
from dep2p.testing import open_nodes


async def answer(request: SessionRequest) -> bytes:
    await request.before(b"you are subscribed")
    await request.after(b"first value")
    return b"ok: " + request.body


async def main() -> None:
    async with open_nodes(2) as (ann, bob), ann.sessions.accept("prices") as sessions, trio.open_nursery() as nursery:

        async def serve() -> None:
            async for session in sessions:
                nursery.start_soon(session.serve_requests, answer)

        nursery.start_soon(serve)
        async with bob.sessions.open(ann.peer_id, "prices") as session:
            print(await session.request(b"gold", timeout_s=5))  # b'ok: gold'
            for _ in range(2):
                push = await session.receive()
                print(push and push.body)  # b'you are subscribed' | b'first value'
        nursery.cancel_scope.cancel()


trio.run(main)
