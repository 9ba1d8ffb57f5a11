"""dep2p as an application uses it: `dep2p.Node` in a realm, verified members, its messaging verbs."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.sides.interface import Arrivals, DialTimes, Send
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream, Notification, Request
from dep2p.node.node import Node
from dep2p.node.validation import split_addr
from dep2p.realm.credentials import Realm
from dep2p.types import PeerId

_REQUEST = "bench/request"
_NOTIFY = "bench/notify"
_BULK = "bench/bulk"
_LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True, slots=True)
class NodeServer:
    """The listening node."""

    address: str
    arrivals: Arrivals
    node: Node


class NodeClient:
    """A node that has the server as a verified member."""

    def __init__(self, node: Node, peer: PeerId) -> None:
        self.node = node
        self.peer = peer

    async def request(self, data: bytes) -> bytes:
        """One request over the pooled link."""
        return await self.node.request(self.peer, _REQUEST, data)

    @asynccontextmanager
    async def open_notify(self) -> AsyncGenerator[Send, None]:
        """One ``notify`` for a message."""
        node, peer = self.node, self.peer

        async def send(data: bytes) -> None:
            await node.notify(peer, _NOTIFY, data)

        yield send

    @asynccontextmanager
    async def open_bulk(self) -> AsyncGenerator[Send, None]:
        """One message stream, one item for a piece."""
        async with self.node.stream(self.peer, _BULK) as stream:
            yield stream.send
            await stream.send_eof()


class NodeSide:
    """Two nodes in a realm made of the shared secret."""

    limits = Limits()

    @asynccontextmanager
    async def serve(self, secret: str) -> AsyncGenerator[NodeServer, None]:
        """A node that answers, counts notifies in an async handler, and counts the items of streams."""
        async with self._serve(secret) as server:
            yield server

    @asynccontextmanager
    async def _serve(self, secret: str, *, data_dir: Path | None = None) -> AsyncGenerator[NodeServer, None]:
        arrivals = Arrivals()
        async with Node.open(realm_of(secret), listen=_LISTEN, data_dir=data_dir, limits=self.limits) as node:

            @node.on_request(_REQUEST, concurrency=256)
            async def echo(request: Request) -> bytes:
                return request.body

            @node.on_notify(_NOTIFY)
            async def count(notification: Notification) -> None:
                arrivals.add(1, len(notification.body))

            @node.on_stream(_BULK)
            async def count_items(stream: MessageStream) -> None:
                async for item in stream:
                    arrivals.add(1, len(item))

            del echo, count, count_items
            yield NodeServer(node.listen_addrs()[0], arrivals, node)

    @asynccontextmanager
    async def connect(self, secret: str, address: str, *, listen: bool = True) -> AsyncGenerator[NodeClient, None]:
        """A new node, connected and verified."""
        async with Node.open(realm_of(secret), listen=_LISTEN if listen else (), limits=self.limits) as node:
            peer = await dial(node, address)
            yield NodeClient(node, peer)

    async def dial_fresh(self, secret: str, address: str) -> DialTimes:
        """From a node that is up already to a verified member, then one request."""
        async with Node.open(realm_of(secret), listen=_LISTEN) as node:
            began_s = time.monotonic()
            peer = await dial(node, address)
            usable_s = time.monotonic()
            await NodeClient(node, peer).request(b"first")
            times = DialTimes((usable_s - began_s) * 1_000, (time.monotonic() - began_s) * 1_000)
            await node.leave_realm(None)  # else the server would look for a member that is gone
            return times


async def dial(node: Node, address: str) -> PeerId:
    """Connect and prove membership."""
    peer, addr = split_addr(address)
    await node.membership().connect(peer, [addr])
    return peer


def realm_of(secret: str) -> Realm:
    """The realm of a benchmark."""
    return Realm.from_psk(bytes.fromhex(secret), "bench")
