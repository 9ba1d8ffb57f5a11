"""Push to a client in order, over reconnects (node).

Shows: Node.sessions, Sessions.serve, Sessions.open, Sessions.start, Sessions.find, Sessions.served,
Sessions.opened, Sessions.stats, Sessions.push_all, Session.push, Session.push_nowait, OpenSession.receive,
OpenSession.receive_many, OpenSession.handled, OpenSession.token, OpenSession.detach, OpenSession.aclose,
Session.wait_closed, Sessions, Session, OpenSession, Push
"""

import trio

from dep2p import Session
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):

        async def feed(session: Session) -> None:  # runs once for each session, as long as it lives
            await session.push(b"snapshot")
            session.push_nowait(b"first change")
            await session.wait_closed()

        end = ann.sessions.serve("prices", feed)
        async with bob.sessions.open(ann.peer_id, "prices") as session:
            first = await session.receive()
            print(first and (first.seq, first.body))  # (1, b'snapshot')
            print([push.body for push in await session.receive_many()])  # [b'first change']
            session.handled()
            token = await session.detach()  # a text: keep it with the result of your work

        again = await bob.sessions.start(ann.peer_id, "prices", token=token)
        print(await ann.sessions.push_all("prices", b"second change"))  # (1, [])
        async for push in again:
            print(push.seq, push.body)  # 3 b'second change'
            break
        (served,) = ann.sessions.served("prices")
        print(ann.sessions.find(served.id) is served, len(bob.sessions.opened()))  # True 1
        print(len(ann.sessions.stats()))  # 1
        await again.aclose()
        end()


trio.run(main)
