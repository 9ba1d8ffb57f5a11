"""Send without an answer (client).

Shows: Client.on_notify, Client.notify, Client.listen, Client.send, Client.broadcast_notify
"""

import asyncio

from dep2p.client import Client, Notification


async def main() -> None:
    async with Client.open() as client, client.listen("news") as notifications:
        logged = asyncio.Event()

        @client.on_notify("log")
        async def log(notification: Notification) -> None:
            print(notification.body)  # b'started'
            logged.set()

        await client.handlers_ready()
        me = await client.peer_id()
        await client.notify(me, "log", b"started")
        await logged.wait()
        await client.send(me, "news", b"lunch is ready")  # the same as notify, unless it is reliable
        print(await client.broadcast_notify("news", b"coffee, too", peers=[me]) == {me: None})  # True
        async for news in notifications:
            if isinstance(news, Notification):
                print(news.body)  # b'lunch is ready' | b'coffee, too'
                if news.body.startswith(b"coffee"):
                    break


asyncio.run(main())
