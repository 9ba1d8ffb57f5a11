"""Publish and subscribe (node).

Shows: Node.join, Node.subscribe, Node.publish, Node.topics, Node.topic_peers, Topic.publish, Topic.subscribe,
Topic.peers, Topic.leave, Topic.name, Topic, Subscription, TopicMessage, PublishResult, TopicSummary, TopicPeers
"""

import trio

from dep2p import TopicMessage
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob), bob.subscribe("chat") as messages:
        topic = await ann.join("chat")
        result = await topic.publish(b"hello", on_no_peers="queue", headers={"lang": "en"})
        print(result.sent_to == (bob.peer_id,) or result.queued)  # True
        message = await anext(messages)
        if isinstance(message, TopicMessage):
            print(message.topic, message.body, message.headers["lang"])  # chat b'hello' en

        async with topic.subscribe() as mine:
            await bob.publish("chat", b"hi")
            reply = await anext(mine)
            if isinstance(reply, TopicMessage):
                print(reply.body, reply.sender == bob.peer_id)  # b'hi' True

        print(topic.name, topic.peers() == [bob.peer_id])  # chat True
        print([each.topic for each in ann.topics()])  # ['chat']
        print(ann.topic_peers("chat").peers == (bob.peer_id,))  # True
        await topic.leave()


trio.run(main)
