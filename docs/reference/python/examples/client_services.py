"""Ask any member that offers a service, and all subscribers of a topic (client).

Shows: Client.request_any, Client.offered_services, Client.service_info, Client.gather, ClientGathering.result,
Client.on_request, Client.subscribe, TopicMessage.reply, TopicMessage.wants_answer, ClientGathering, ServiceSummary,
ServiceDetails, ServiceAnswer
"""

import asyncio

from dep2p.client import Client, Request, TopicMessage


async def main() -> None:
    async with Client.open() as client, client.subscribe("stock") as messages:

        @client.on_request("resize", group="workers", version="1.2")
        async def resize(request: Request) -> bytes:
            return request.body[:4]

        await client.handlers_ready()
        print(await client.request_any("resize", b"large photo", version="1.2", idempotent=True))  # b'larg'
        print(list(await client.offered_services()), len(await client.service_info("resize")))  # ['resize'] 1

        async def answer() -> None:
            async for message in messages:
                if isinstance(message, TopicMessage) and message.wants_answer:
                    await message.reply(b"1200")

        answering = asyncio.create_task(answer())
        async with client.gather("stock", b"screws", quorum=1, timeout_s=5) as answers:
            async for each in answers:
                print(each.body)  # b'1200'
        print(answers.result().has_quorum)  # True
        answering.cancel()


asyncio.run(main())
