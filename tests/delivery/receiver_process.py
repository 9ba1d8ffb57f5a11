"""A receiver that is killed: its handler appends each number to a file, one write for each, before it returns.

Arguments: data directory, realm secret in hex, address of the sender, the file, and what to write in front of a number.
Says "ready" when it is connected and its handler is there.
"""

import os
import sys
from pathlib import Path

import trio

from dep2p import Node, Realm
from dep2p.node.validation import split_addr
from dep2p.protocols.messaging.incoming import Notification

PAUSE_EVERY = 7
"""A handler that never waits is never killed between two of its steps."""


async def main(directory: str, secret: str, address: str, file: str, life: str) -> None:
    realm = Realm.from_psk(bytes.fromhex(secret), "crash")
    handled = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    async with Node.open(realm, data_dir=Path(directory)) as node:

        @node.on_notify("numbers")
        async def take(notification: Notification) -> None:
            os.write(handled, b"%s %s\n" % (life.encode(), notification.body))
            if int(notification.body) % PAUSE_EVERY == 0:
                await trio.lowlevel.checkpoint()

        del take
        peer, _addr = split_addr(address)
        node.remember(peer, [address])
        await node.connect(address)
        print("ready", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5])
