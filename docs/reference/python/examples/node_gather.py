"""Ask the subscribers of a topic, wait for a quorum (node).

Shows: Node.gather, Gathering.result, TopicMessage.wants_answer, TopicMessage.reply, Node.subscribe,
Topic.subscribe, Gathering, GatherResult, GatherOptions, TopicAnswer
"""

import trio

from dep2p import TopicMessage
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob), bob.subscribe("stock") as messages, trio.open_nursery() as nursery:

        async def answer() -> None:
            async for message in messages:
                if isinstance(message, TopicMessage) and message.wants_answer:
                    await message.reply(b"1200")

        nursery.start_soon(answer)
        await trio.sleep(1)  # bob's subscription reaches ann meanwhile
        async with ann.gather("stock", b"screws", quorum=1, timeout_s=2) as answers:
            async for each in answers:
                print(each.peer == bob.peer_id, each.body)  # True b'1200'
        print(answers.result().has_quorum)  # True
        nursery.cancel_scope.cancel()


trio.run(main)
