"""Send items both ways (client).

Shows: Client.on_stream, Client.stream, Client.accept, ClientStream.send, ClientStream.send_eof, ClientStream
"""

import asyncio

from dep2p.client import Client, ClientStream


async def main() -> None:
    async with Client.open() as client:

        @client.on_stream("double")
        async def double(stream: ClientStream) -> None:
            async for item in stream:
                await stream.send(item * 2)

        await client.handlers_ready()
        me = await client.peer_id()
        async with client.stream(me, "double") as stream:
            await stream.send(b"ab")
            await stream.send_eof()
            print([item async for item in stream])  # [b'abab']

        async with client.accept("upload") as streams, client.stream(me, "upload", b"a.txt") as upload:
            await upload.send(b"content")
            await upload.send_eof()
            async with await anext(streams) as received:
                print(received.body, [item async for item in received])  # b'a.txt' [b'content']


asyncio.run(main())
