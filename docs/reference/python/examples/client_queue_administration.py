"""Expand, export, pause and mend queues (client).

Shows: ClientQueues.at, ClientQueues.select, ClientQueues.publish, ClientQueues.publish_many, ClientQueues.queue,
ClientQueues.export, ClientQueues.expand, ClientQueues.route, ClientQueues.consumers, ClientQueues.replay_all,
ClientQueues.delete_all_dead_letters, ClientQueues.empty, ClientQueues.delete_channel, ClientQueues.consume,
ClientQueueMessage.reject, ClientQueueHandle.pause_all, ClientQueueHandle.resume_all, ClientQueueHandle.empty_all,
Client.open, Client.peer_id, ClientQueueHandle.publish, ClientQueues.create, ClientQueues.delete,
ClientQueues.empty_all, ClientQueues.pause_all, ClientQueues.resume_all, QueueNotFoundError
"""

import asyncio

from dep2p.client import Client, QueueNotFoundError


async def main() -> None:
    async with Client.open() as client:
        team = client.queues.select("team")  # the queues of the realm; client.queues are those of this machine
        await team.create("photos", {"partitions": 2})
        await team.publish("photos", b"a", key="a")
        await client.queues.at(await client.peer_id()).publish_many("photos", [b"b"])  # those that a member keeps

        async with team.consume("photos", "workers", count=2) as messages:
            async for message in messages:
                await message.reject("not a picture")
        print(await team.replay_all("photos", "workers"))  # 2
        print(await team.delete_all_dead_letters("photos", "workers"))  # 0
        async with team.export("photos") as kept:
            print(sorted([message.body async for message in kept]))  # [b'a', b'b']

        print(len((await team.expand("photos", 3)).partitions), (await team.route("photos")).version)  # 3 2
        print((await team.consumers("photos", "workers")).consumers)  # ()
        photos = team.queue("photos")
        await photos.pause_all()
        await photos.resume_all()
        print(await team.empty("photos", "workers"), await photos.empty_all())  # 2 0
        await team.delete_channel("photos", "workers")
        await team.delete("photos")
        try:
            await photos.publish(b"c")
        except QueueNotFoundError:
            print("no such queue")  # no such queue


asyncio.run(main())
