"""dep2p's ordered sessions: what the other sides send as one-way messages is pushed, in order, to a session."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from bench.sides.interface import Arrivals, Send
from bench.sides.node import NodeClient, NodeServer, NodeSide
from dep2p.node.node import Node
from dep2p.protocols.messaging.incoming import Request
from dep2p.sessions.service import Session
from dep2p.types import PeerId

_SESSION = "bench/session"
_OPEN = "bench/open"


class SessionClient(NodeClient):
    """The sending end: it serves a session that the counting end has opened."""

    def __init__(self, node: Node, peer: PeerId, opened: trio.MemoryReceiveChannel[Session]) -> None:
        super().__init__(node, peer)
        self._opened = opened
        self._session: Session | None = None

    @asynccontextmanager
    async def open_notify(self) -> AsyncGenerator[Send, None]:
        """One ``push`` for a message, all of them into one session."""
        if self._session is None:
            await self.node.request(self.peer, _OPEN, b"")
            self._session = await self._opened.receive()
        session = self._session

        async def send(data: bytes) -> None:
            await session.push(data)

        yield send


class SessionSide(NodeSide):
    """Two nodes; the one that connects pushes, the one that listens takes the pushes and counts them."""

    @asynccontextmanager
    async def serve(self, secret: str) -> AsyncGenerator[NodeServer, None]:
        """A node that opens a session back to each peer that asks for one."""
        async with super().serve(secret) as server, trio.open_nursery() as nursery:
            node, arrivals = server.node, server.arrivals

            @node.on_request(_OPEN)
            async def open_session(request: Request) -> bytes:
                await nursery.start(_count, node, request.peer, arrivals)
                return b""

            del open_session
            yield server
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def connect(self, secret: str, address: str, *, listen: bool = True) -> AsyncGenerator[NodeClient, None]:
        """A new node that serves sessions."""
        async with super().connect(secret, address, listen=listen) as client:
            send, receive = trio.open_memory_channel[Session](8)

            async def keep(session: Session) -> None:
                send.send_nowait(session)
                await session.wait_closed()

            client.node.sessions.serve(_SESSION, keep)
            yield SessionClient(client.node, client.peer, receive)


async def _count(
    node: Node, peer: PeerId, arrivals: Arrivals, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with node.sessions.open(peer, _SESSION) as session:
        task_status.started()
        following = 1
        async for push in session:
            if push.seq != following:
                raise ValueError(f"push {push.seq} came instead of {following}")
            following += 1
            arrivals.add(1, len(push.body))
