"""The processes of :mod:`bench.ordering.crash`: broker, nodes with shards, producer, consumers; each has a node.

Each writes JSON objects to its output, and reads commands from its input, a line each.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from typing import Any, Final

import trio

from dep2p.daemon.gc import tune_gc
from dep2p.errors import Dep2pError, RetryMessage
from dep2p.node.node import Node
from dep2p.queues.api.push_consumer import PushedMessage
from dep2p.queues.api.queues import Queues
from dep2p.queues.settings import QueueSettings
from dep2p.realm.credentials import Realm
from dep2p.types import PeerId

_QUEUE: Final = "orders"
_GROUP: Final = "billing"
_REALM: Final = "order-crash"
_START_S: Final = 300.0
"""Eight nodes start slowly on a busy machine."""


async def serve(arguments: argparse.Namespace) -> None:
    """The node with the queue: writes its address, and expands the queue to the number in each line that it reads."""
    hosts = [each for each in arguments.hosts.split(",") if each]
    if arguments.store:
        await _serve_in_turn(arguments, hosts)
        return
    async with Node.open(_realm(arguments.secret), data_dir=arguments.directory, bootstrap=hosts) as node:
        queues = node.queues.of(_REALM)
        nodes = [each.rpartition("/p2p/")[2] for each in hosts]
        with trio.fail_after(_START_S):
            while True:
                try:
                    await queues.create(_QUEUE, json.loads(arguments.options), nodes=nodes)
                    break
                except Dep2pError:  # the hosts are not all known yet
                    await trio.sleep(0.2)
        _write({"address": node.listen_addrs()[0]})
        source = trio.lowlevel.FdStream(os.dup(0))
        while line := await source.receive_some(1_024):
            await queues.expand(_QUEUE, int(line))
            _write({"partitions": int(line)})


async def _serve_in_turn(arguments: argparse.Namespace, hosts: list[str]) -> None:
    """One node of a failover group: answers each line with its role and term."""
    async with Node.open(
        _realm(arguments.secret),
        data_dir=arguments.directory,
        listen=[f"/ip4/127.0.0.1/tcp/{arguments.port}"],
        bootstrap=hosts,
        queues=QueueSettings(store=arguments.store, standby=True),
    ) as node:
        queues = node.queues.of(_REALM)
        if node.queues.ownership.status()["role"] == "owner":
            await queues.create(_QUEUE, json.loads(arguments.options))
        _write({"address": node.listen_addrs()[0]})
        source = trio.lowlevel.FdStream(os.dup(0))
        while await source.receive_some(1_024):
            status = node.queues.ownership.status()
            if status["role"] == "owner":
                with contextlib.suppress(Dep2pError):
                    status["messages"] = (await queues.info(_QUEUE)).messages
            _write(status)


async def host(arguments: argparse.Namespace) -> None:
    """A node with shards."""
    listen = [f"/ip4/127.0.0.1/tcp/{arguments.port}"]
    async with Node.open(_realm(arguments.secret), data_dir=arguments.directory, listen=listen) as node:
        _write({"address": node.listen_addrs()[0]})
        await trio.sleep_forever()


async def produce(arguments: argparse.Namespace) -> None:
    """Publishes all messages, round by round over the keys."""
    async with Node.open(_realm(arguments.secret), bootstrap=_known(arguments)) as node:
        queues = await _queues_at(node, arguments.address)
        async with queues.producer(_QUEUE, order="strict", items_max=2_000, close_timeout_s=3_600.0) as producer:
            _write({"ready": True})
            for number in range(arguments.per_key):
                for key in range(arguments.keys):
                    await producer.send(b"%d %d" % (key, number), key=f"key {key}")
        _write({"done": producer.statistics()})


async def consume(arguments: argparse.Namespace) -> None:
    """Appends a line to the log for each message, until SIGTERM."""
    log = os.open(arguments.log, os.O_WRONLY | os.O_APPEND)
    process = os.getpid()

    async def handle(message: PushedMessage) -> None:
        await trio.lowlevel.checkpoint()  # one that was paused for longer than its lease ends here
        if message.expired:  # or was paused behind its checkpoint, while others of the same turn wrote
            raise RetryMessage("its lease is over")
        os.write(log, message.body + b" %d\n" % process)

    async with Node.open(_realm(arguments.secret), bootstrap=_known(arguments)) as node:
        queues = await _queues_at(node, arguments.address)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async with queues.consumer(_QUEUE, _GROUP, handle, mode="fifo", concurrency=64) as consumer:
                _write({"ready": process})
                async for _ in signals:
                    break
        _write({"done": consumer.statistics()})


def _known(arguments: argparse.Namespace) -> list[str]:
    return [arguments.address, *(each for each in arguments.hosts.split(",") if each)]


def _realm(secret: str) -> Realm:
    return Realm.from_psk(bytes.fromhex(secret), _REALM)


async def _queues_at(node: Node, address: str) -> Queues:
    queues = node.queues.at(PeerId(address.rpartition("/p2p/")[2]))
    with trio.fail_after(_START_S):
        while True:
            try:
                await queues.info(_QUEUE)
            except Exception:
                await trio.sleep(0.1)
            else:
                return queues


def _write(fields: dict[str, Any]) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def main() -> int:
    """Play one role until the end of the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("serve", "host", "produce", "consume"), required=True)
    parser.add_argument("--keys", type=int, default=0)
    parser.add_argument("--per-key", type=int, default=0)
    parser.add_argument("--options", default="{}")
    for name in ("secret", "address", "directory", "log", "hosts", "port", "store"):
        parser.add_argument(f"--{name}", default="")
    arguments = parser.parse_args()
    tune_gc()
    trio.run({"serve": serve, "host": host, "produce": produce, "consume": consume}[arguments.role], arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
