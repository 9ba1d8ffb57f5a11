"""See, pause, empty and delete queues (node).

Shows: Queues.listing, Queues.info, Queues.queue, Queues.create_channel, Queues.delete_channel, Queues.pause,
Queues.resume, Queues.pause_all, Queues.resume_all, Queues.peek, Queues.export, Queues.empty, Queues.empty_all,
Queues.delete, Queues.expand, Queues.route, Queues.consumers, Queues.publish, NodeQueues.of, NodeQueues.at,
NodeQueues.select, QueueHandle.info, Queues.create, Queues, QueueInfo, QueueSummary, QueueRoute, QueueExpanded,
ChannelConsumers, MessageInfo
"""

import trio

from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):
        team = ann.queues.of()  # ann's queues for the members; ann.queues are those of her own programs
        await team.create("jobs", access={"administer": "members"})
        jobs = bob.queues.at(ann.peer_id)  # the same queues, from bob
        await jobs.publish("jobs", b"a", tags=("photo",))
        await jobs.create_channel("jobs", "photos", from_start=True, filter="tag = photo")
        print([queue.name for queue in await jobs.listing()], (await jobs.info("jobs")).messages)  # ['jobs'] 1
        print([message.body for message in await jobs.peek("jobs", "photos")])  # [b'a']
        async with jobs.export("jobs") as messages:
            print([message.tags async for message in messages])  # [('photo',)]

        await jobs.pause("jobs", "photos")
        await jobs.resume("jobs", "photos")
        await jobs.pause_all("jobs")
        print((await jobs.queue("jobs").info()).is_paused)  # True
        await jobs.resume_all("jobs")
        print(len((await jobs.expand("jobs", 2)).partitions), (await jobs.route("jobs")).version)  # 2 2
        print((await jobs.consumers("jobs", "photos")).consumers)  # ()

        print(await jobs.empty("jobs", "photos"), await jobs.empty_all("jobs"))  # 1 0
        await jobs.delete_channel("jobs", "photos")
        await jobs.delete("jobs")
        print(await ann.queues.select("test").listing())  # []


trio.run(main)
