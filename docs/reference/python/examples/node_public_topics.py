"""Publish on libp2p's public network, with parameters of your own (node).

Shows: Node.open, Node.join, Topic.add_validator, Topic.mesh, Topic.scores, Topic.is_joined, Topic.realm_id,
MemoryNetwork.host, Topic.publish, PublicPubSub, GossipParams, ScoreParams, SeqnoValidator, QueueSettings
"""

import trio

from dep2p import GossipParams, Node, PublicPubSub, QueueSettings, ScoreParams, SeqnoValidator
from dep2p.testing import MemoryNetwork


async def main() -> None:
    host = MemoryNetwork().host()
    async with Node.open(
        host=host,
        identity=host.identity,
        public_pubsub=PublicPubSub(message_ids="go", params=GossipParams(d=8), scores=ScoreParams()),
        queues=QueueSettings(store="memory"),
    ) as node:
        topic = await node.join("news", public=True)
        topic.add_validator(SeqnoValidator())  # nothing that is replayed passes
        print(topic.realm_id, topic.is_joined, topic.mesh(), topic.scores())  # None True [] {}
        result = await topic.publish(b"hello", on_no_peers="ok")
        print(result.sent_to)  # ()


trio.run(main)
