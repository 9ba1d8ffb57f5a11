"""Send items both ways (node).

Shows: Node.on_stream, Node.stream, Node.accept, MessageStream.send, MessageStream.send_eof, MessageStream
"""

import trio

from dep2p import MessageStream
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):

        @ann.on_stream("double")
        async def double(stream: MessageStream) -> None:
            async for item in stream:
                await stream.send(item * 2)

        async with bob.stream(ann.peer_id, "double") as stream:
            await stream.send(b"ab")
            await stream.send(b"c")
            await stream.send_eof()
            print([item async for item in stream])  # [b'abab', b'cc']

        async with ann.accept("upload") as streams, bob.stream(ann.peer_id, "upload", b"a.txt") as upload:
            await upload.send(b"content")
            await upload.send_eof()
            async with await anext(streams) as received:
                print(received.body, [item async for item in received])  # b'a.txt' [b'content']


trio.run(main)
