"""``dep2p queue expand``, ``route``, ``consumers`` and ``locks``: partitions, where keys go, and who has what."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dep2p.cli.commands.queue.options import (
    ChannelArgument,
    QueueArgument,
    QueuePeerOption,
    QueueRealmOption,
    nodes_of,
    place,
)
from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.render import byte_count, duration, printable, table

if TYPE_CHECKING:
    from dep2p.client.client import Client

PartitionsArgument = Annotated[
    int, typer.Argument(help="How many there shall be in all.", metavar="N", min=1, max=1_024)
]

NodesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node", help="For a queue on several nodes: where new partitions are; again for more.", metavar="PEER"
    ),
]

_WATCH_S: Final = 1.0


def expand(
    run: Invocation,
    queue: QueueArgument,
    partitions: PartitionsArgument,
    node: NodesOption = None,
    realm: QueueRealmOption = None,
    peer: QueuePeerOption = None,
) -> None:
    """Give a queue more partitions. The order of each key holds."""

    async def body(client: "Client") -> dict[str, Any]:
        return await client.queue_expand(
            queue, partitions, nodes=await nodes_of(client, node), **await place(client, realm, peer)
        )

    found = run.with_client(body)
    if run.json:
        run.emit(found)
    elif found["added"]:
        run.say(f"{len(found['added'])} partitions more; route table {found['version']}")
    else:
        run.say(f"the queue has {partitions} partitions already")


def route(run: Invocation, queue: QueueArgument, realm: QueueRealmOption = None, peer: QueuePeerOption = None) -> None:
    """Show which partition has which keys, and what each holds."""

    async def body(client: "Client") -> dict[str, Any]:
        return await client.queue_route(queue, **await place(client, realm, peer))

    found = run.with_client(body)
    if run.json:
        run.emit(found)
        return
    held = {each["partition"]: each for each in found["partitions"]}
    is_placed = "placement" in found
    rows: list[list[str]] = []
    for each in found["routes"]:
        log = held.get(each["partition"], {})
        after = ", ".join(f"{one['partition']} up to {one['up_to']}" for one in each["after"])
        rows.append(
            [
                f"{each['low']}-{each['high'] - 1}",
                str(each["partition"]),
                str(log.get("messages", "-")),
                byte_count(int(log.get("bytes", 0))),
                after or "-",
                *([f"{log['node'][-8:]} {'up' if log['is_up'] else 'AWAY'}", log["share"]] if is_placed else []),
            ]
        )
    run.say(f"route table {found['version']}: of the 1,024 ranges of keys")
    heads = ["KEYS", "PARTITION", "MESSAGES", "SIZE", "AFTER", *(["NODE", "NAME THERE"] if is_placed else [])]
    run.print(table(heads, rows, right=[1, 2, 3]))


def consumers(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    realm: QueueRealmOption = None,
    peer: QueuePeerOption = None,
) -> None:
    """List the consumers of a channel with the partitions that are theirs."""

    async def body(client: "Client") -> dict[str, Any]:
        return await client.queue_consumers(queue, channel, **await place(client, realm, peer))

    found = run.with_client(body)
    if run.json:
        run.emit(found)
    elif not found["consumers"]:
        run.say("nobody consumes")
    else:
        rows = [
            [
                printable(str(each["consumer"])),
                ",".join(str(one) for one in each["partitions"]) or "-",
                str(each["in_flight"]),
                f"{duration(float(each['lease_left_s']))} left" if "lease_left_s" in each else "-",
            ]
            for each in found["consumers"]
        ]
        run.print(table(["CONSUMER", "PARTITIONS", "IN FLIGHT", "LEASE"], rows, right=[2]))


def locks(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, and show every change; Ctrl-C ends.")] = False,
    realm: QueueRealmOption = None,
    peer: QueuePeerOption = None,
) -> None:
    """Show who holds which partition of an exclusive channel, and since when."""

    async def body(client: "Client") -> None:
        from anyio import sleep

        where = await place(client, realm, peer)
        before: object = None
        while True:
            found = await client.queue_locks(queue, channel, **where)
            if found != before:
                _show_locks(run, found, with_time=watch)
                before = found
            if not watch:
                return
            await sleep(_WATCH_S)

    run.with_client(body)


def _show_locks(run: Invocation, found: dict[str, Any], *, with_time: bool) -> None:
    if run.json:
        run.emit(found)
        return
    if with_time:
        run.say(time.strftime("%H:%M:%S"))
    if not found["exclusive"]:
        run.say("the channel is shared: its consumers take from all partitions")
        return
    if not found["locks"]:
        run.say("nobody holds a partition")
        return
    now_s = time.time()
    rows = [
        [
            str(each["partition"]),
            printable(str(each["consumer"])) or str(each["member"])[:8],
            str(each["epoch"]),
            duration(max(0.0, now_s - float(each["since_s"]))),
            str(each.get("node", ""))[-8:],
        ]
        for each in found["locks"]
    ]
    heads = ["PARTITION", "CONSUMER", "EPOCH", "SINCE", "NODE" if any(each[-1] for each in rows) else ""]
    run.print(table(heads, rows, right=[0, 2]))


def register_order(queue: typer.Typer) -> None:
    """Add the four commands to the ``queue`` group."""
    command(
        queue,
        "expand",
        examples=[
            ("dep2p queue expand orders 6", "from 2 or 4 partitions to 6, while it is used"),
            ("dep2p queue expand orders 6 --realm team --node f3Qa", "of a queue on several nodes: new ones there"),
        ],
        notes="Keys that move to a new partition are read there when everything that they had in the old one is done. "
        "There is no way back to fewer partitions.",
    )(expand)
    command(queue, "route", examples=[("dep2p queue route orders", "")])(route)
    command(queue, "consumers", examples=[("dep2p queue consumers orders billing", "")])(consumers)
    command(
        queue,
        "locks",
        examples=[
            ("dep2p queue locks orders billing", ""),
            ("dep2p queue locks orders billing --watch", "a table with every change"),
        ],
    )(locks)
