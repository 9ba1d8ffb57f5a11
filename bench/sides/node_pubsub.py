"""dep2p's pub/sub as an application uses it: `Node.join`, `Topic.publish` and `Topic.subscribe`."""

import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from bench.sides.pubsub import Received
from dep2p.gossipsub.topic_types import Lagged
from dep2p.limits import Limits
from dep2p.node.node import Node
from dep2p.node.validation import split_addr
from dep2p.pubsub.topic import Topic
from dep2p.realm.credentials import Realm
from dep2p.tracing.settings import TraceSettings

_TOPIC = "bench"


class NodeSubscriber:
    """A node in the realm of the run, or on the public network."""

    def __init__(self, node: Node, topic: Topic) -> None:
        self._node = node
        self._topic = topic
        self.address = node.listen_addrs()[0]
        self.received = Received()

    @property
    def mesh(self) -> Sequence[object]:
        return self._topic.mesh()

    async def connect(self, address: str) -> None:
        """To a verified member, or to any peer."""
        peer, addr = split_addr(address)
        if self._topic.realm_id is None:
            await self._node.host.dial(peer, [addr])
            return
        await self._node.membership().connect(peer, [addr])

    async def publish(self, data: bytes) -> None:
        """With the default options: it waits while a neighbour's queue is full."""
        await self._topic.publish(data)


class NodePubSubSide:
    """Nodes in a realm made of the shared secret, on the realm's wire; or on libp2p's. Defaults everywhere."""

    def __init__(self, *, is_public: bool = False, is_traced: bool = False, rpcs: bool = False) -> None:
        """``is_traced``: write a trace, with an event for each RPC or without."""
        self._is_public = is_public
        self._is_traced = is_traced
        self._settings = TraceSettings(rpcs=rpcs)

    @asynccontextmanager
    async def subscribe(self, secret: str, *, is_limited: bool) -> AsyncGenerator[NodeSubscriber, None]:
        """A node, joined, with one subscription that is read all the time."""
        limits = Limits() if is_limited else Limits(pubsub_publish_per_s=0.0)
        realm = None if self._is_public else Realm.from_psk(bytes.fromhex(secret), "bench")
        directory = tempfile.TemporaryDirectory(prefix="dep2p-bench-trace-")
        with directory:
            async with self._open(realm, limits, Path(directory.name) if self._is_traced else None) as subscriber:
                yield subscriber

    @asynccontextmanager
    async def _open(
        self, realm: Realm | None, limits: Limits, trace_dir: Path | None
    ) -> AsyncGenerator[NodeSubscriber, None]:
        async with (
            Node.open(
                realm,
                listen=("/ip4/127.0.0.1/tcp/0",),
                limits=limits,
                public_pubsub=self._is_public,
                trace_dir=trace_dir,
                trace_settings=self._settings,
            ) as node,
            await node.join(_TOPIC, public=self._is_public) as topic,
            trio.open_nursery() as nursery,
        ):
            subscriber = NodeSubscriber(node, topic)

            async def read() -> None:
                add = subscriber.received.add
                async with topic.subscribe() as messages:
                    async for message in messages:
                        if isinstance(message, Lagged):
                            raise ValueError(f"{message.count} messages were dropped in the subscription's buffer")
                        add(message.body)

            nursery.start_soon(read)
            yield subscriber
            nursery.cancel_scope.cancel()
