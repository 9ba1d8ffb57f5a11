"""``dep2p queue expand``, ``route``, ``consumers`` and ``locks``: partitions, the routes of keys, and their holders."""

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dep2p.cli.commands.queue.options import (
    ChannelArgument,
    QueueArgument,
    QueueTarget,
    nodes_of,
    reply_fields,
    with_target,
)
from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.render import byte_count, duration, table
from dep2p.control_api.errors import DaemonUnreachableError
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.protocols.queues.admin import (
        ChannelConsumers,
        ChannelLocks,
        PartitionInfo,
        QueueExpanded,
        QueueRoute,
    )

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


@with_target
def expand(
    run: Invocation,
    queue: QueueArgument,
    partitions: PartitionsArgument,
    node: NodesOption = None,
    *,
    at: QueueTarget,
) -> None:
    """Give a queue more partitions. The order of each key holds."""

    async def body(client: "Client") -> "QueueExpanded":
        queues = await at.queues(client)
        return await queues.expand(queue, partitions, nodes=await nodes_of(client, node))

    found = run.with_client(body)
    if run.json:
        run.emit(reply_fields(found))
    elif found.added:
        run.say(f"{len(found.added)} partitions more; route table {found.version}")
    else:
        run.say(f"the queue has {partitions} partitions already")


@with_target
def route(run: Invocation, queue: QueueArgument, *, at: QueueTarget) -> None:
    """Show which partition has which keys, and what each holds."""

    async def body(client: "Client") -> "QueueRoute":
        return await (await at.queues(client)).route(queue)

    found = run.with_client(body)
    if run.json:
        run.emit(reply_fields(found))
        return
    partitions = {each.partition: each for each in found.partitions}
    is_distributed = any(each.node for each in found.partitions)
    rows: list[list[str]] = []
    for each in found.routes:
        log = partitions.get(each.partition)
        after = ", ".join(f"{one.partition} up to {one.up_to}" for one in each.after)
        rows.append(
            [
                f"{each.low}-{each.high - 1}",
                str(each.partition),
                "-" if log is None else str(log.messages),
                byte_count(0 if log is None else log.bytes),
                after or "-",
                *([] if log is None or not log.node else [f"{log.node[-8:]} {_up(log)}", log.shard]),
            ]
        )
    run.say(f"route table {found.version}: of the 1,024 ranges of keys")
    heads = ["KEYS", "PARTITION", "MESSAGES", "SIZE", "AFTER", *(["NODE", "NAME THERE"] if is_distributed else [])]
    run.print(table(heads, rows, right=[1, 2, 3]))


def _up(partition: "PartitionInfo") -> str:
    return "up" if partition.is_up else "AWAY"


@with_target
def consumers(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    *,
    at: QueueTarget,
) -> None:
    """List the consumers of a channel with the partitions that are theirs."""

    async def body(client: "Client") -> "ChannelConsumers":
        return await (await at.queues(client)).consumers(queue, channel)

    found = run.with_client(body)
    if run.json:
        run.emit(reply_fields(found))
    elif not found.consumers:
        run.say("no consumers")
    else:
        rows = [
            [
                printable(each.consumer),
                ",".join(map(str, each.partitions)) or "-",
                str(each.in_flight),
                "-" if each.lease_left_s is None else f"{duration(each.lease_left_s)} left",
            ]
            for each in found.consumers
        ]
        run.print(table(["CONSUMER", "PARTITIONS", "IN FLIGHT", "LEASE"], rows, right=[2]))


@with_target
def locks(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, and show every change; Ctrl-C ends.")] = False,
    *,
    at: QueueTarget,
) -> None:
    """Show who holds which partition of an exclusive channel, and since when."""

    async def body(client: "Client") -> None:
        from anyio import sleep

        queues = await at.queues(client)
        before: object = None
        is_away = False
        while True:
            try:
                found = await queues.locks(queue, channel)
            except DaemonUnreachableError as error:
                if before is None or not run.reconnect:
                    raise
                if not is_away:
                    run.warn(f"interrupted: {printable(error.detail)}; waiting to go on")
                is_away = True
                await sleep(_WATCH_S)
                continue
            is_away = False
            if found != before:
                _show_locks(run, found, with_time=watch)
                before = found
            if not watch:
                return
            await sleep(_WATCH_S)

    run.with_client(body)


def _show_locks(run: Invocation, found: "ChannelLocks", *, with_time: bool) -> None:
    if run.json:
        run.emit(reply_fields(found))
        return
    if with_time:
        run.say(time.strftime("%H:%M:%S"))
    if not found.exclusive:
        run.say("the channel is shared: its consumers take from all partitions")
        return
    if not found.locks:
        run.say("no partition is held")
        return
    now_s = time.time()
    rows = [
        [
            str(each.partition),
            printable(each.consumer) or each.member[:8],
            str(each.epoch),
            duration(max(0.0, now_s - each.since_s)),
            each.node[-8:],
        ]
        for each in found.locks
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
        waits=True,
        examples=[
            ("dep2p queue locks orders billing", ""),
            ("dep2p queue locks orders billing --watch", "a table with every change"),
        ],
    )(locks)
