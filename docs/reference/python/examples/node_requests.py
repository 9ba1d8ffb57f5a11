"""Ask a peer, and answer (node).

Shows: Node.on_request, Node.request, Node.peer_id, Request
"""

import trio

from dep2p import Request
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):

        @ann.on_request("greet")
        async def greet(request: Request) -> bytes:
            return b"hello " + request.body

        answer = await bob.request(ann.peer_id, "greet", b"bob", timeout_s=5, headers={"lang": "en"})
        print(answer)  # b'hello bob'


trio.run(main)
