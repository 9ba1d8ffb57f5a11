"""A subscriber in a process of its own: ``python -m tests.pubsub.subscriber_process PSK TOPIC COUNT ADDR…``.

Prints its address, then, after COUNT messages or gaps, what it got, as JSON lines.
"""

import json
import sys
from collections.abc import Sequence

import trio

from dep2p import Lagged, Limits, Node, Realm


async def main(psk: str, topic: str, count: int, addrs: Sequence[str]) -> None:
    realm = Realm.from_psk(bytes.fromhex(psk), "burst")
    async with Node.open(realm, bootstrap=addrs, limits=Limits(pubsub_publish_per_s=0)) as node:
        joined = await node.join(topic)
        async with joined.subscribe() as messages:
            print(json.dumps({"addr": node.listen_addrs()[0]}), flush=True)
            numbers: dict[int, None] = {}
            lagged = received = 0
            async for item in messages:
                if isinstance(item, Lagged):
                    lagged += item.count
                else:
                    received += 1
                    numbers[int.from_bytes(item.body[:4], "big")] = None
                if received + lagged >= count:
                    break
            print(json.dumps({"received": received, "different": len(numbers), "lagged": lagged}), flush=True)
            await trio.sleep_forever()  # until killed: the others may still need it


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
