"""Collect the readings of many sensors by one subscription to a pattern.

    python examples/sensors.py sensor hall                        # beside a daemon: publishes sensors.hall.temp
    python examples/sensors.py collect invite.txt ./collector     # on one machine; needs no daemon

The collector is a trio program that had its own loop before; the node runs in it. `dep2p realm invite team >invite.txt`
on a machine with a daemon makes the invite. A reading that is lost on its way stays lost: the next one comes soon. Send
what must arrive as examples/chat.py does.
"""

import math
import sys
from contextlib import suppress
from pathlib import Path

import trio

from dep2p import Dep2pError, Lagged, Node, Realm
from dep2p.client import (
    Client,
    DaemonUnreachableError,
)

PATTERN = "sensors.*.temp"
PERIOD_S = 0.2
Board = dict[str, float]
"""The newest reading of each place."""


def measure() -> float:
    """Return the temperature, as far as a machine without a thermometer knows it."""
    return 20 + 2 * math.sin(trio.current_time())


async def sensor(place: str) -> None:
    """Publish a reading each PERIOD_S. While the daemon is away, its readings are of no use to others."""
    async with Client.open() as client:
        await client.status()  # a wrong path is an error now, not a daemon that is away
        while True:
            with suppress(DaemonUnreachableError):
                await client.publish(
                    f"sensors.{place}.temp", b"%.2f" % measure(), on_no_peers="ok", headers={"unit": "C"}
                )
            await trio.sleep(PERIOD_S)


async def collect(board: Board, realm: Realm, directory: Path) -> None:
    """Write every reading on the board. The directory keeps this node's identity and the members that it knows."""
    async with Node.open(realm, data_dir=directory) as node, node.subscribe(PATTERN) as messages:
        async for message in messages:
            if isinstance(message, Lagged):
                if message.count:
                    print(f"{message.count} readings came too fast", file=sys.stderr)
                continue
            try:
                celsius = float(message.body)
            except ValueError:
                print(f"{message.topic}: no number, of {message.sender}", file=sys.stderr)
                continue
            board[message.topic.split(".")[1]] = celsius


async def show(board: Board) -> None:
    """Print the board each second and clear it: the loop that this program had before."""
    while True:
        await trio.sleep(1)
        print(", ".join(f"{place} {celsius:.1f} °C" for place, celsius in sorted(board.items())) or "-", flush=True)
        board.clear()


async def collect_and_show(realm: Realm, directory: Path) -> None:
    """Run the two side by side."""
    board: Board = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(show, board)
        nursery.start_soon(collect, board, realm, directory)


if __name__ == "__main__":
    if (sys.argv[1:2], len(sys.argv)) not in ((["sensor"], 3), (["collect"], 4)):
        sys.exit(__doc__)
    try:
        with suppress(KeyboardInterrupt):
            if sys.argv[1] == "sensor":
                trio.run(sensor, sys.argv[2])
            else:
                trio.run(collect_and_show, Realm.from_invite(Path(sys.argv[2]).read_text()).realm, Path(sys.argv[3]))
    except* Dep2pError as failed:
        sys.exit(f"sensors: {failed.exceptions[0]}")
