"""Bind pushes to requests, answer by iterating, end a session (node).

Shows: Session.bind, Session.respond, Session.fail, Session.end, Session.close_reason, Session.is_attached,
Session.stats, Session.reserve, OpenSession.next_request_id, OpenSession.give_back, OpenSession.token_behind,
OpenSession.is_attached, OpenSession.stats, MemoryNetwork.find, Node.open, Node.peer_id, OpenSession.receive,
OpenSession.request, Session.fill, Sessions.find, Sessions.open, Sessions.serve, HandlerError, SessionNotFoundError
"""

import trio

from dep2p import HandlerError, Session, SessionNotFoundError
from dep2p.testing import open_nodes


async def serve(session: Session) -> None:
    number = await session.reserve()  # the first place, filled later
    await session.bind(1, b"for request 1", "after")
    number.fill(b"first")
    async for request in session:
        if request.request_id == 1:
            await session.respond(1, b"yes")
        else:
            await session.fail(request.request_id, "no more questions")
            session.end("enough")
            print(session.is_attached, session.close_reason, len(session.stats()) > 5)  # True None True


async def main() -> None:
    async with open_nodes(2) as (ann, bob):
        ann.sessions.serve("ask", serve)
        async with bob.sessions.open(ann.peer_id, "ask") as session:
            print(session.next_request_id, session.is_attached)  # 1 True
            print(await session.request(b"?"))  # b'yes'
            first = await session.receive()
            print(first and first.body, len(session.token_behind(1)) > 20)  # b'first' True
            second = await session.receive()
            print(second and (second.body, second.request_id))  # (b'for request 1', 1)
            session.give_back()  # not handled: a token of this moment does not count it
            try:
                await session.request(b"??")
            except HandlerError as error:
                print(error, len(session.stats()) > 5)  # no more questions True
        try:
            ann.sessions.find("gone")
        except SessionNotFoundError:
            print("no such session")  # no such session


trio.run(main)
