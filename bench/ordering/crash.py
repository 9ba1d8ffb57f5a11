"""Order by key over real processes: consumers are killed and paused, partitions are added; every key keeps its order.

A broker, a producer in strict order and consumers in FIFO mode, each a process with a node of its own, over loopback.
With ``--nodes`` the partitions are on nodes of their own, one of which is killed and started again, too. With
``--failovers`` two brokers share a PostgreSQL store and take over from each other (bench/ordering/failover.py).
Each handler appends a line to one file; the lines of a key must be its numbers from 0 on, in order, and only the
current one may be repeated. ``python -m bench.ordering.crash --help``; the report is one JSON object.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.harness.order_log import Order, OrderLog
from bench.harness.roles import RoleProcess, free_port
from bench.ordering.failover import run as run_failovers
from bench.ordering.options import ROLES, OrderRun


class CrashRun:
    """One run: its processes, and the faults that it makes."""

    def __init__(self, options: OrderRun, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._secret = os.urandom(32).hex()
        self.order = Order(options.keys, options.per_key)
        self.events: list[dict[str, Any]] = []
        self.elapsed_s = 0.0
        self._began_s = time.monotonic()
        self._processes: list[RoleProcess] = []
        self._consumers: list[RoleProcess] = []
        self._hosts: list[tuple[RoleProcess, dict[str, object]]] = []
        self._known = ""
        """The addresses of the nodes with shards."""
        self._paused: RoleProcess | None = None
        self._go_on_s = 0.0
        """When the paused consumer goes on; 0: none is paused."""
        self._host_back_s = 0.0
        """When the killed node starts again; 0: none is away."""

    def run(self) -> None:
        """Start all processes, make the faults, and end when every message was handled."""
        log_path = self._directory / "log"
        log_path.touch()
        try:
            with contextlib.closing(OrderLog(log_path, self.order)) as log:
                self._start_all(log_path)
                self._began_s = time.monotonic()
                self._drive(log)
                self.elapsed_s = time.monotonic() - self._began_s
                if self._go_on_s:  # the work of a consumer that wakes up after the end counts
                    time.sleep(max(0.0, self._go_on_s - time.monotonic()))
                    self._continue_paused()
                time.sleep(self._options.settle_s)
                log.read()
        finally:
            for process in reversed(self._processes):
                process.kill()

    @property
    def paused_process(self) -> int | None:
        """The id of the consumer that was paused; None: none was."""
        return None if self._paused is None else self._paused.pid

    def _start_all(self, log_path: Path) -> None:
        options = self._options
        addresses: list[str] = []
        for index in range(options.nodes):
            where: dict[str, object] = {"directory": self._directory / f"host{index}", "port": free_port()}
            self._hosts.append((self._start("host", **where), where))
            addresses.append(self._hosts[-1][0].read()["address"])
        self._known = ",".join(addresses)
        self._broker = self._start(
            "serve", directory=self._directory / "broker", options=options.queue_options(), hosts=self._known
        )
        named: dict[str, object] = {"address": self._broker.read()["address"], "hosts": self._known}
        self._consumer_arguments = {**named, "log": log_path}
        self._consumers += [self._start("consume", **self._consumer_arguments) for _ in range(options.consumers)]
        for consumer in self._consumers:
            consumer.read()
        self._start("produce", **named, keys=options.keys, per_key=options.per_key).read()

    def _start(self, role: str, **arguments: object) -> RoleProcess:
        self._processes.append(RoleProcess(ROLES, role, secret=self._secret, **arguments))
        return self._processes[-1]

    def _drive(self, log: OrderLog) -> None:
        """Make each fault when its share of the messages was handled. A fault also comes when this process is late."""
        due = self._faults()
        while not self.order.is_complete or due or self._host_back_s:
            log.read()
            for fault, share in list(due.items()):
                if self.order.handled >= share * self.order.total:
                    del due[fault]
                    fault()
            now_s = time.monotonic()
            if self._host_back_s and now_s >= self._host_back_s:
                self._start_host_again()
            if self._go_on_s and now_s >= self._go_on_s:
                self._continue_paused()
            if self.order.wrong or now_s - self._began_s > self._options.timeout_s:
                break
            time.sleep(self._options.check_s)

    def _faults(self) -> dict[Callable[[], None], float]:
        """Each fault with the share of the messages after which it comes."""
        options = self._options
        faults: dict[Callable[[], None], float] = {}
        if options.pause_s:
            faults[self._pause_consumer] = 0.2
        if options.kill:
            faults[self._kill_consumer] = 0.3
        if options.expand_to:
            faults[self._expand] = 0.4
        if self._hosts:
            faults[self._kill_host] = 0.6
        return faults

    def _pause_consumer(self) -> None:
        self._paused = self._busiest()
        self._paused.stop()
        self._go_on_s = time.monotonic() + self._options.pause_s
        self._note("paused a consumer")

    def _continue_paused(self) -> None:
        assert self._paused is not None
        self._go_on_s = 0.0
        self._paused.go_on()
        self._note("let the paused consumer go on")

    def _kill_consumer(self) -> None:
        killed = self._busiest(but=self._paused)
        killed.popen.kill()
        self._consumers.remove(killed)
        self._consumers.append(self._start("consume", **self._consumer_arguments))
        self._note("killed a consumer with -9, and started another one")

    def _expand(self) -> None:
        self._broker.ask(str(self._options.expand_to))
        self._note(f"expanded to {self._options.expand_to} partitions")

    def _kill_host(self) -> None:
        process = self._hosts[0][0]
        process.kill()
        self._processes.remove(process)
        self._host_back_s = time.monotonic() + self._options.host_away_s
        self._note("killed a node with partitions with -9")

    def _start_host_again(self) -> None:
        where = self._hosts[0][1]
        self._host_back_s = 0.0
        self._hosts[0] = (self._start("host", **where), where)
        self._hosts[0][0].read()
        self._note("started it again")

    def _busiest(self, but: RoleProcess | None = None) -> RoleProcess:
        """The consumer that has handled most: it has a partition."""
        others = [each for each in self._consumers if each is not but]
        return max(others, key=lambda each: self.order.by_process.get(each.pid, 0))

    def _note(self, event: str) -> None:
        at_s = round(time.monotonic() - self._began_s, 2)
        self.events.append({"what": event, "at_s": at_s, "handled": self.order.handled})


def run(options: OrderRun) -> dict[str, Any]:
    """One run; its report."""
    with tempfile.TemporaryDirectory(prefix="dep2p-order-") as directory:
        crash_run = CrashRun(options, Path(directory))
        crash_run.run()
    order = crash_run.order
    return {
        "messages": order.total,
        "keys": options.keys,
        "consumers": options.consumers,
        "nodes": options.nodes,
        "handled": order.handled,
        "repeats_of_the_current_message": order.repeats,
        "out_of_order": order.wrong[:20],
        "is_complete": order.is_complete,
        "elapsed_s": round(crash_run.elapsed_s, 2),
        "handled_by_process": dict(order.by_process),
        "paused_process": crash_run.paused_process,
        "events": crash_run.events,
    }


_HELP = {
    "options": "of the queue, a JSON object",
    "expand_to": "partitions, in the middle of the run; 0: none",
    "pause_s": "one consumer is paused for so long; 0: none",
    "kill": "kill one consumer with -9",
    "nodes": "nodes that have the partitions; 0: the broker alone",
    "host_away_s": "one of them is killed with -9 for so long",
    "failovers": "so often a second broker on the same PostgreSQL store takes over",
    "stop_s": "an owner is paused for so long, every other time",
    "settle_s": "messages that come so long after the end still count",
    "check_s": "time between two looks at what was handled",
}


def main() -> int:
    """The exit status is 0 when every message was handled and every key kept its order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in fields(OrderRun):
        kind: dict[str, Any] = {"type": type(option.default)}
        if isinstance(option.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        flag = f"--{option.name.replace('_', '-')}"
        parser.add_argument(flag, default=option.default, help=_HELP.get(option.name), **kind)
    options = OrderRun(**vars(parser.parse_args()))
    report = run_failovers(options) if options.failovers else run(options)
    print(json.dumps(report, indent=2))
    return 0 if report["is_complete"] and not report["out_of_order"] else 1


if __name__ == "__main__":
    sys.exit(main())
