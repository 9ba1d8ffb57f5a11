"""Nodes on a network in memory that all are in one topic."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from dep2p import Lagged, Node, Realm, Subscription, Topic, TopicMessage
from dep2p.testing import MemoryHost, MemoryNetwork


@asynccontextmanager
async def pubsub_nodes(
    count: int, *, network: MemoryNetwork | None = None, realm: Realm | None = None, **options: Any
) -> AsyncGenerator[list[Node], None]:
    """That many nodes of one realm, connected each to each."""
    network = network or MemoryNetwork()
    realm = realm or Realm.generate("team")
    async with AsyncExitStack() as stack:
        made: list[Node] = []
        for _ in range(count):
            host = network.host()
            known = [addr for node in made for addr in node.listen_addrs()]
            made.append(
                await stack.enter_async_context(
                    Node.open(realm, host=host, identity=host.identity, bootstrap=known, **options)
                )
            )
        yield made


def host_of(node: Node) -> MemoryHost:
    """The node's host, with what only a host in memory can do."""
    assert isinstance(node.host, MemoryHost)
    return node.host


async def until(is_true: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Look now and again, in virtual time."""
    with trio.fail_after(within_s):
        while not is_true():  # noqa: ASYNC110 - virtual time, and many things are looked at
            await trio.sleep(0.01)


async def joined(nodes: list[Node], name: str = "chat") -> list[Topic]:
    """Every node in the topic, and every one seeing every other one there."""
    topics = [await node.join(name) for node in nodes]
    await until(lambda: all(len(topic.peers()) == len(nodes) - 1 for topic in topics))
    await until(lambda: all(topic.mesh() for topic in topics))
    return topics


async def take(messages: Subscription, count: int, *, within_s: float = 60.0) -> list[bytes]:
    """The data of the next messages; a gap fails."""
    found: list[bytes] = []
    with trio.fail_after(within_s):
        while len(found) < count:
            item = await anext(messages)
            assert isinstance(item, TopicMessage), item
            found.append(item.body)
    return found


async def take_items(messages: Subscription, count: int) -> list[bytes | int]:
    """The next items: data of messages, and the sizes of gaps."""
    found: list[bytes | int] = []
    with trio.fail_after(60):
        while len(found) < count:
            item = await anext(messages)
            found.append(item.count if isinstance(item, Lagged) else item.body)
    return found
