"""Two programs of one node, and the same between two nodes: the same calls, with and without a network between them."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from bench.sides.interface import Arrivals, Send
from bench.sides.node import NodeClient, NodeServer, NodeSide
from dep2p.gossipsub.topic_types import TopicMessage
from dep2p.limits import Limits
from dep2p.node.node import Node
from dep2p.pubsub.topic import Topic

_TOPIC = "bench"
_LIMITS = Limits(pubsub_publish_per_s=0)


class LocalSide(NodeSide):
    """One node in one process: what it sends goes to its own handlers."""

    def __init__(self) -> None:
        self._server: NodeServer | None = None

    @asynccontextmanager
    async def serve(self, secret: str) -> AsyncGenerator[NodeServer, None]:
        """A node that answers itself."""
        async with super().serve(secret) as server:
            self._server = server
            yield server

    @asynccontextmanager
    async def connect(self, secret: str, address: str, *, listen: bool = True) -> AsyncGenerator[NodeClient, None]:
        """A second program of the node that serves in this process."""
        del secret, address, listen
        assert self._server is not None
        await trio.lowlevel.checkpoint()
        yield NodeClient(self._server.node, self._server.node.peer_id)


class TopicClient(NodeClient):
    """A program that publishes in place of notifies."""

    @asynccontextmanager
    async def open_notify(self) -> AsyncGenerator[Send, None]:
        """One ``publish`` for a message, when another program or node is subscribed."""
        async with await self.node.join(_TOPIC) as topic:
            if self.peer != self.node.peer_id:
                await _subscribed(topic)

            async def send(data: bytes) -> None:
                await topic.publish(data)

            yield send


class TopicSide(NodeSide):
    """Two nodes: what the one publishes, a subscription of the other counts."""

    limits = _LIMITS

    @asynccontextmanager
    async def serve(self, secret: str) -> AsyncGenerator[NodeServer, None]:
        """A node with a subscription that counts."""
        async with super().serve(secret) as server, trio.open_nursery() as nursery:
            await nursery.start(_count, server.node, server.arrivals)
            yield server
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def connect(self, secret: str, address: str, *, listen: bool = True) -> AsyncGenerator[NodeClient, None]:
        """A program that publishes."""
        async with super().connect(secret, address, listen=listen) as client:
            yield TopicClient(client.node, client.peer)


class LocalTopicSide(TopicSide, LocalSide):
    """One node: what one handle of a topic publishes, a subscription of another handle counts."""


async def _subscribed(topic: Topic) -> None:
    with trio.fail_after(10):
        while not topic.peers():  # noqa: ASYNC110 - once
            await trio.sleep(0.01)


async def _count(
    node: Node, arrivals: Arrivals, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with node.subscribe(_TOPIC, on_full="pause") as messages:
        task_status.started()
        async for message in messages:
            if isinstance(message, TopicMessage):
                arrivals.add(1, len(message.body))
