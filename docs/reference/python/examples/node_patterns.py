"""Subscribe to a pattern, publish many (node).

Shows: Node.subscribe, Node.publish_from, PublishedMany, Lagged, MatchedTopicsFull
"""

from collections.abc import AsyncIterator

import trio

from dep2p import Lagged
from dep2p.testing import open_nodes


async def readings() -> AsyncIterator[bytes]:
    for value in (b"20.5", b"21.0"):
        yield value


async def main() -> None:
    async with open_nodes(2) as (ann, bob), bob.subscribe("sensors.*.temp") as messages:
        done = await ann.publish_from("sensors.hall.temp", readings(), on_no_peers="queue")
        print(done.messages, done.bytes)  # 2 8
        for _ in range(done.messages):
            message = await anext(messages)
            if isinstance(message, Lagged):
                print(f"{message.count} messages were dropped: this reader was too slow")
            else:
                print(message.topic, message.body)  # sensors.hall.temp b'20.5' | sensors.hall.temp b'21.0'


trio.run(main)
