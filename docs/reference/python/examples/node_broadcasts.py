"""Ask or notify all members that are up (node).

Shows: Node.broadcast_request, Node.broadcast_notify, Node.on_notify, Node.on_request, RequestOptions, Dep2pError
"""

import trio

from dep2p import Notification, Request
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(3) as (ann, bob, eve):
        for node in (ann, bob):

            @node.on_request("load")
            async def load(request: Request) -> bytes:
                return b"0.5"

            @node.on_notify("stop")
            async def stop(notification: Notification) -> None:
                pass

        answers = await eve.broadcast_request("load", b"", timeout_s=2)
        print(sorted(answers) == sorted([ann.peer_id, bob.peer_id]), set(answers.values()))  # True {b'0.5'}
        outcomes = await eve.broadcast_notify("stop", b"now", peers=[ann.peer_id])
        print(outcomes[ann.peer_id])  # None


trio.run(main)
