"""Order by key over real processes: consumers are killed and paused, partitions are added; every key keeps its order.

A keeper, a producer in strict order and consumers in FIFO mode, each a process with a node of its own, over loopback.
With ``--nodes`` the partitions are on nodes of their own, one of which is killed and started again, too. With
``--takeover`` two keepers share a PostgreSQL store and take over from each other (bench/order_takeover.py).
Each handler appends a line to one file; the lines of a key must be its numbers from 0 on, in order, and only the
current one may be repeated. ``python -m bench.order_crash --help``; the report is one JSON object.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import trio

from dep2p.daemon.gc import collect_seldom
from dep2p.errors import Dep2pError
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
"""On a machine that has much else to do, eight nodes start slowly."""


@dataclass(slots=True)
class Order:
    """What the lines of handlers say. Feed them in the order of the file."""

    keys: int
    per_key: int
    next: dict[int, int] = field(default_factory=dict[int, int])
    """By key, the number that comes next."""
    handled: int = 0
    repeats: int = 0
    """Of the current message of a key."""
    wrong: list[str] = field(default_factory=list[str])
    """Lines that are out of order."""
    by_process: dict[int, int] = field(default_factory=lambda: defaultdict[int, int](int))

    def take(self, line: str) -> None:
        """One line: key, number, process."""
        key, number, process = (int(part) for part in line.split())
        expected = self.next.get(key, 0)
        self.by_process[process] += 1
        if number == expected:
            self.next[key] = number + 1
            self.handled += 1
        elif number == expected - 1:
            self.repeats += 1
        else:
            self.wrong.append(f"key {key}: {number} came where {expected} was next (process {process})")

    @property
    def is_complete(self) -> bool:
        """Every message was handled."""
        return self.handled == self.keys * self.per_key


class Lines:
    """The whole lines of a file that others append to; the rest of one that was read in part comes with the next."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def take(self) -> list[str]:
        """What came since the last time."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line.decode() for line in lines]

    def close(self) -> None:
        """No more."""
        self._file.close()


# Roles


async def keep(arguments: argparse.Namespace) -> None:
    """The node with the queue: says its address, and expands when it is told to."""
    hosts = [each for each in arguments.hosts.split(",") if each]
    if arguments.store:
        await _keep_in_turn(arguments, hosts)
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
        _say({"address": node.listen_addrs()[0]})
        source = trio.lowlevel.FdStream(os.dup(0))
        while line := await source.receive_some(1_024):
            await queues.ask("expand", {"queue": _QUEUE, "partitions": int(line)})
            _say({"partitions": int(line)})


async def _keep_in_turn(arguments: argparse.Namespace, hosts: list[str]) -> None:
    """One of the nodes that share a store: says who it is to each line that it is told."""
    async with Node.open(
        _realm(arguments.secret),
        data_dir=arguments.directory,
        listen=[f"/ip4/127.0.0.1/tcp/{arguments.port}"],
        bootstrap=hosts,
        queues=QueueSettings(store=arguments.store, standby=True),
    ) as node:
        queues = node.queues.of(_REALM)
        if node.queues.keeper()["role"] == "owner":
            await queues.create(_QUEUE, json.loads(arguments.options))
        _say({"address": node.listen_addrs()[0]})
        source = trio.lowlevel.FdStream(os.dup(0))
        while await source.receive_some(1_024):
            status = node.queues.keeper()
            if status["role"] == "owner":
                with contextlib.suppress(Dep2pError):
                    status["messages"] = (await queues.info(_QUEUE))["messages"]
            _say(status)


async def host(arguments: argparse.Namespace) -> None:
    """A node that keeps partitions."""
    listen = [f"/ip4/127.0.0.1/tcp/{arguments.port}"]
    async with Node.open(_realm(arguments.secret), data_dir=arguments.directory, listen=listen) as node:
        _say({"address": node.listen_addrs()[0]})
        await trio.sleep_forever()


async def produce(arguments: argparse.Namespace) -> None:
    """All messages, round by round over the keys."""
    async with Node.open(_realm(arguments.secret), bootstrap=_known(arguments)) as node:
        place = await _place(node, arguments.address)
        async with place.producer(_QUEUE, order="strict", items_max=2_000, close_timeout_s=3_600.0) as producer:
            _say({"ready": True})
            for number in range(arguments.per_key):
                for key in range(arguments.keys):
                    await producer.send(b"%d %d" % (key, number), order_key=f"key {key}")
        _say({"done": producer.statistics()})


async def consume(arguments: argparse.Namespace) -> None:
    """A line in the file for each message, until SIGTERM."""
    log = os.open(arguments.log, os.O_WRONLY | os.O_APPEND)
    process = os.getpid()

    async def handle(message: PushedMessage) -> None:
        await trio.lowlevel.checkpoint()  # one that was paused for longer than its lease ends here
        os.write(log, message.body + b" %d\n" % process)

    async with Node.open(_realm(arguments.secret), bootstrap=_known(arguments)) as node:
        place = await _place(node, arguments.address)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async with place.consumer(_QUEUE, _GROUP, handle, mode="fifo", concurrency=64) as consumer:
                _say({"ready": process})
                async for _ in signals:
                    break
        _say({"done": consumer.statistics()})


def _known(arguments: argparse.Namespace) -> list[str]:
    return [arguments.address, *(each for each in arguments.hosts.split(",") if each)]


def _realm(secret: str) -> Realm:
    return Realm.from_psk(bytes.fromhex(secret), _REALM)


async def _place(node: Node, address: str) -> Queues:
    place = node.queues.at(PeerId(address.rpartition("/p2p/")[2]))
    with trio.fail_after(_START_S):
        while True:
            try:
                await place.info(_QUEUE)
            except Exception:
                await trio.sleep(0.1)
            else:
                return place


def _say(fields: dict[str, Any]) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


# The run


class Process:
    """One role at work."""

    def __init__(self, role: str, **arguments: object) -> None:
        command = [sys.executable, "-m", "bench.order_crash", "--role", role]
        for name, value in arguments.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> dict[str, Any]:
        """Its next line. Raises ``RuntimeError`` when it has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the run ended with status {self.popen.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, text: str) -> None:
        """A line for it."""
        stdin: IO[str] | None = self.popen.stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()

    def end(self) -> None:
        """At once."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run; its report."""
    secret = os.urandom(32).hex()
    order = Order(arguments.keys, arguments.per_key)
    events: list[dict[str, Any]] = []
    processes: list[Process] = []
    consumers: list[Process] = []
    hosts: list[tuple[Process, dict[str, object]]] = []
    paused: Process | None = None
    host_until_s = 0.0
    began_s = time.monotonic()

    def start(role: str, **more: object) -> Process:
        processes.append(Process(role, secret=secret, **more))
        return processes[-1]

    def busiest(but: Process | None = None) -> Process:
        """Whoever has handled most has a partition."""
        others = [each for each in consumers if each is not but]
        return max(others, key=lambda each: order.by_process.get(each.popen.pid, 0))

    def note(what: str) -> None:
        events.append({"what": what, "at_s": round(time.monotonic() - began_s, 2), "handled": order.handled})

    with tempfile.TemporaryDirectory(prefix="dep2p-order-") as directory:
        log = Path(directory) / "log"
        log.touch()
        options = {"partitions": arguments.partitions, "max_attempts": 0} | json.loads(arguments.options)
        try:
            addresses: list[str] = []
            for index in range(arguments.nodes):
                where: dict[str, object] = {"directory": f"{directory}/host{index}", "port": free_port()}
                hosts.append((start("host", **where), where))
                addresses.append(hosts[-1][0].hear()["address"])
            known = ",".join(addresses)
            keeper = start("keep", directory=f"{directory}/keeper", options=json.dumps(options), hosts=known)
            address = keeper.hear()["address"]
            consumers += [start("consume", address=address, log=log, hosts=known) for _ in range(arguments.consumers)]
            for each in consumers:
                each.hear()
            producer = start("produce", address=address, hosts=known, keys=arguments.keys, per_key=arguments.per_key)
            producer.hear()
            began_s = time.monotonic()
            paused_at_s = 0.0
            todo = {"host": 0.6} if hosts else {}
            todo |= {"pause": 0.2} if arguments.pause_s else {}
            todo |= {"kill": 0.3} if arguments.kill else {}
            todo |= {"expand": 0.4} if arguments.expand_to else {}
            with contextlib.closing(Lines(log)) as lines:
                # Also what comes late, since this process was slow to look: each event says how much was handled then.
                while not order.is_complete or todo or host_until_s:
                    for line in lines.take():
                        order.take(line)
                    now_s = time.monotonic()
                    share = order.handled / (arguments.keys * arguments.per_key)
                    if share >= todo.get("pause", 2.0):
                        del todo["pause"]
                        paused = busiest()
                        paused.popen.send_signal(signal.SIGSTOP)
                        paused_at_s = now_s
                        note("paused a consumer")
                    if share >= todo.get("kill", 2.0):
                        del todo["kill"]
                        killed = busiest(but=paused)
                        killed.popen.kill()
                        consumers.remove(killed)
                        consumers.append(start("consume", address=address, log=log, hosts=known))
                        note("killed a consumer with -9, and started another one")
                    if share >= todo.get("expand", 2.0):
                        del todo["expand"]
                        keeper.tell(str(arguments.expand_to))
                        keeper.hear()
                        note(f"expanded to {arguments.expand_to} partitions")
                    if share >= todo.get("host", 2.0):
                        del todo["host"]
                        hosts[0][0].end()
                        processes.remove(hosts[0][0])
                        host_until_s = now_s + arguments.host_away_s
                        note("killed a node with partitions with -9")
                    if host_until_s and now_s >= host_until_s:
                        host_until_s = 0.0
                        hosts[0] = (start("host", **hosts[0][1]), hosts[0][1])
                        hosts[0][0].hear()
                        note("started it again")
                    if paused is not None and paused_at_s and now_s - paused_at_s >= arguments.pause_s:
                        paused_at_s = 0.0
                        paused.popen.send_signal(signal.SIGCONT)
                        note("let the paused consumer go on")
                    if order.wrong or now_s - began_s > arguments.timeout_s:
                        break
                    time.sleep(arguments.look_s)
                elapsed_s = time.monotonic() - began_s
                if (
                    paused is not None and paused_at_s
                ):  # also what it does when it wakes after everything is done counts
                    time.sleep(max(0.0, arguments.pause_s - (time.monotonic() - paused_at_s)))
                    paused.popen.send_signal(signal.SIGCONT)
                    note("let the paused consumer go on")
                time.sleep(arguments.settle_s)
                for line in lines.take():
                    order.take(line)
        finally:
            for process in reversed(processes):
                process.end()
    return {
        "messages": arguments.keys * arguments.per_key,
        "keys": arguments.keys,
        "consumers": arguments.consumers,
        "nodes": arguments.nodes,
        "handled": order.handled,
        "repeats_of_the_current_message": order.repeats,
        "out_of_order": order.wrong[:20],
        "is_complete": order.is_complete,
        "elapsed_s": round(elapsed_s, 2),
        "handled_by_process": dict(order.by_process),
        "events": events,
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def main() -> int:
    """The exit status is 0 when every message was handled and every key kept its order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--per-key", type=int, default=400)
    parser.add_argument("--consumers", type=int, default=4)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--expand-to", type=int, default=6, help="partitions, in the middle of the run; 0: none")
    parser.add_argument("--pause-s", type=float, default=40.0, help="one consumer is stopped for so long; 0: none")
    parser.add_argument("--kill", type=int, default=1, help="1: one consumer is killed with -9")
    parser.add_argument("--nodes", type=int, default=0, help="nodes that keep the partitions; 0: the keeper alone")
    parser.add_argument("--host-away-s", type=float, default=5.0, help="one of them is killed with -9 for so long")
    parser.add_argument(
        "--takeover", type=int, default=0, help="so often a second keeper on the same PostgreSQL takes over"
    )
    parser.add_argument("--stop-s", type=float, default=25.0, help="an owner is stopped for so long, every other time")
    parser.add_argument("--settle-s", type=float, default=2.0, help="what comes so long after the end still counts")
    parser.add_argument("--look-s", type=float, default=0.2, help="how often it looks what was handled")
    parser.add_argument("--timeout-s", type=float, default=1_800.0)
    parser.add_argument("--options", default="{}", help="of the queue, a JSON object")
    for name in ("role", "secret", "address", "directory", "log", "hosts", "port", "store"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        collect_seldom()
        trio.run({"keep": keep, "host": host, "produce": produce, "consume": consume}[arguments.role], arguments)
        return 0
    if arguments.takeover:
        from bench.order_takeover import run as run_takeover  # it builds on this module

        report = run_takeover(arguments)
    else:
        report = run(arguments)
    print(json.dumps(report, indent=2))
    return 0 if report["is_complete"] and not report["out_of_order"] else 1


if __name__ == "__main__":
    sys.exit(main())
