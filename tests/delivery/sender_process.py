"""A sender that is killed: sends numbers reliably from many tasks, and tells each one that was accepted.

Arguments: data directory, realm secret in hex, address of the receiver, first number, how many. When all were accepted
it waits until all are acknowledged, and says so.
"""

import sys
from pathlib import Path

import trio

from dep2p import Node, Realm
from dep2p.node.validation import split_addr

TASKS = 32


async def main(directory: str, secret: str, address: str, first: int, count: int) -> None:
    peer, addr = split_addr(address)
    realm = Realm.from_psk(bytes.fromhex(secret), "crash")
    numbers = iter(range(first, first + count))
    async with Node.open(realm, data_dir=Path(directory)) as node:
        node.remember(peer, [addr])

        async def send_some() -> None:
            for number in numbers:
                await node.send(peer, "numbers", b"%d" % number, reliable=True)
                sys.stdout.write(f"{number}\n")
                sys.stdout.flush()

        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(send_some)
        await node.delivery().flush()
        print("done", flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
