"""Judge the messages of a topic (node).

Shows: Topic.add_validator, Node.join, Topic.publish, Verdict, PublishRefusedError, NoPeersSubscribedError
"""

import trio

from dep2p import NoPeersSubscribedError, PublishRefusedError, TopicMessage, Verdict
from dep2p.testing import open_nodes


def small(message: TopicMessage) -> Verdict:
    return Verdict.ACCEPT if len(message.body) <= 8 else Verdict.REJECT


async def main() -> None:
    async with open_nodes(1) as (ann,):
        topic = await ann.join("short")
        end = topic.add_validator(small)
        try:
            await topic.publish(b"far too long", on_no_peers="ok")
        except PublishRefusedError:
            print("refused")  # refused
        end()
        try:
            await topic.publish(b"far too long")
        except NoPeersSubscribedError:
            print("no subscriber")  # no subscriber


trio.run(main)
