"""Answer requests in a loop (node).

Shows: Node.reply, IncomingRequest.respond, IncomingRequest.fail, IncomingRequest.body, Node.request,
IncomingRequest, HandlerError
"""

import trio

from dep2p import HandlerError
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob), ann.reply("half") as requests, trio.open_nursery() as nursery:

        async def answer() -> None:
            async for request in requests:
                if request.body.isdigit():
                    await request.respond(b"%d" % (int(request.body) // 2))
                else:
                    await request.fail("not a number")

        nursery.start_soon(answer)
        print(await bob.request(ann.peer_id, "half", b"84"))  # b'42'
        try:
            await bob.request(ann.peer_id, "half", b"much")
        except HandlerError as error:
            print(error)  # not a number
        nursery.cancel_scope.cancel()


trio.run(main)
