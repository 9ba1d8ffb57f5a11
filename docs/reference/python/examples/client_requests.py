"""Ask a member, and answer (client).

Shows: Client.open, Client.on_request, Client.handlers_ready, Client.request, Client.reply, Client.peer_id,
Client.broadcast_request, IncomingRequest.respond, IncomingRequest.body, Client
"""

import asyncio

from dep2p.client import Client, Request


async def main() -> None:
    async with Client.open() as client:  # the daemon of DEP2P_DATA_DIR, or as `dep2p status` finds it

        @client.on_request("greet")
        async def greet(request: Request) -> bytes:
            return b"hello " + request.body

        await client.handlers_ready()
        me = await client.peer_id()  # any member; here the daemon's own node
        print(await client.request(me, "greet", b"bob", timeout_s=5))  # b'hello bob'
        print(await client.broadcast_request("greet", b"all", peers=[me]) == {me: b"hello all"})  # True

        async with client.reply("half") as requests:
            asking = asyncio.create_task(client.request(me, "half", b"84"))
            request = await anext(requests)
            await request.respond(b"%d" % (int(request.body) // 2))
            print(await asking)  # b'42'


asyncio.run(main())
