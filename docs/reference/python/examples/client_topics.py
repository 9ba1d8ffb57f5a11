"""Publish and subscribe (client).

Shows: Client.join, Client.subscribe, Client.publish, Client.publish_from, Client.topics, Client.topic_peers,
ClientTopic.publish, ClientTopic.subscribe, ClientTopic.leave, ClientTopic, ClientSubscription, PublishedMany,
OnFull, OnNoPeers
"""

import asyncio
from collections.abc import AsyncIterator

from dep2p.client import Client, TopicMessage


async def readings() -> AsyncIterator[bytes]:
    for value in (b"20.5", b"21.0"):
        yield value


async def main() -> None:
    async with Client.open() as client, client.subscribe("sensors.*.temp") as messages:
        result = await client.publish("sensors.hall.temp", b"20.0", headers={"unit": "C"})
        print(result.sent_to, result.local_subscriptions)  # () 1
        done = await client.publish_from("sensors.hall.temp", readings())
        print(done.messages)  # 2
        for _ in range(3):
            message = await anext(messages)
            if isinstance(message, TopicMessage):
                print(message.body)  # b'20.0' | b'20.5' | b'21.0'

        topic = await client.join("chat")
        async with topic.subscribe() as chat:
            await client.publish("chat", b"hello")
            await topic.publish(b"not for this handle itself", on_no_peers="ok")
            said = await anext(chat)
            if isinstance(said, TopicMessage):
                print(said.body)  # b'hello'
        print("chat" in [each.topic for each in await client.topics()])  # True
        print((await client.topic_peers("chat")).joined)  # True
        await topic.leave()


asyncio.run(main())
