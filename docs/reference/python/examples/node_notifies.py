"""Send without an answer (node).

Shows: Node.on_notify, Node.notify, Node.listen, Node.handlers_ready, Node.send, Notification
"""

import trio

from dep2p import Notification
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):

        @ann.on_notify("log")
        async def log(notification: Notification) -> None:
            print(notification.body)  # b'started'

        await ann.handlers_ready()
        await bob.notify(ann.peer_id, "log", b"started")
        async with ann.listen("news") as notifications:
            await bob.send(ann.peer_id, "news", b"lunch is ready")  # the same as notify, unless it is reliable
            news = await anext(notifications)
            if isinstance(news, Notification):
                print(news.body, news.peer == bob.peer_id)  # b'lunch is ready' True


trio.run(main)
