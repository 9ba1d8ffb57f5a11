"""Take messages of a queue by calls (node).

Shows: QueueHandle.simple_consumer, SimpleConsumer.receive, SimpleConsumer.ack, SimpleConsumer.change_invisible,
QueueHandle.publish_many, Queues.create, Queues.publish_many, Queues.simple_consumer, SimpleConsumer,
ReceivedMessage, NotInFlightError
"""

import trio

from dep2p import NotInFlightError
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(1) as (node,):
        jobs = await node.queues.create("jobs")
        await jobs.publish_many([b"a", b"b"])
        consumer = jobs.simple_consumer("workers")
        first, second = await consumer.receive(10, wait_s=5, invisible_s=60)
        await consumer.ack(first)  # durable on return
        await consumer.change_invisible(second, 0)  # give it back at once
        (again,) = await consumer.receive()
        print(again.body, again.attempts)  # b'b' 2
        try:
            await consumer.ack(second)
        except NotInFlightError as error:
            print(error.handles == (second.handle,))  # True


trio.run(main)
