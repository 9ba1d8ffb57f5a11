"""Order by key while the broker changes: ``python -m bench.ordering.crash --failovers 4``.

Two brokers on one PostgreSQL store ([queues] standby), a producer in strict order and consumers in FIFO mode, each a
process of its own. In turn the owner is killed with -9 and started again, and paused (SIGSTOP) for longer than its
lease, so that it wakes up as one that has been replaced. The members name the first broker all the time.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.harness.order_log import Order, OrderLog
from bench.harness.roles import RoleProcess, free_port
from bench.harness.servers import postgres
from bench.ordering.options import ROLES, OrderRun

_CHECK_S: Final = 0.1
_FAILOVER_S: Final = 120.0


class _Broker:
    """One of the two, over its lives."""

    def __init__(self, secret: str, directory: Path, store: str, options: str) -> None:
        self._arguments: dict[str, object] = {
            "secret": secret,
            "directory": directory,
            "port": free_port(),
            "store": store,
            "options": options,
        }
        self.is_stopped = False
        """Killed or paused."""
        self.start(hosts="")

    def start(self, hosts: str) -> None:
        self.process = RoleProcess(ROLES, "serve", **self._arguments, hosts=hosts)
        self.address: str = self.process.read()["address"]
        self.is_stopped = False

    def status(self) -> dict[str, Any]:
        """Its role and term."""
        return self.process.ask("status")

    @property
    def is_owner(self) -> bool:
        return not self.is_stopped and self.status()["role"] == "owner"


class FailoverRun:
    """One run: two brokers, the members, and the faults of the owner."""

    def __init__(self, options: OrderRun, store: str, directory: Path) -> None:
        self._options = options
        self._store = store
        self._directory = directory
        self.order = Order(options.keys, options.per_key)
        self.events: list[dict[str, Any]] = []
        self.elapsed_s = 0.0
        self.sent: dict[str, Any] = {}
        """The producer's statistics, when every message was handled."""
        self.status: dict[str, Any] = {}
        """The owner's status at the end."""
        self._brokers: list[_Broker] = []
        self._members: list[RoleProcess] = []
        self._began_s = time.monotonic()

    def run(self) -> None:
        """Start all processes, make the faults, and end when every message was handled."""
        log_path = self._directory / "log"
        log_path.touch()
        try:
            with contextlib.closing(OrderLog(log_path, self.order)) as self._log:
                producer = self._start_all(log_path)
                self._began_s = time.monotonic()
                self._drive()
                self.elapsed_s = time.monotonic() - self._began_s
                self.sent = producer.read()["done"] if self.order.is_complete else {}
                time.sleep(self._options.settle_s)
                self._log.read()
                owners = [broker for broker in self._brokers if broker.is_owner]
                self.status = owners[0].status() if owners else {}
        finally:
            for process in [*self._members, *(broker.process for broker in self._brokers)]:
                process.kill()

    def _start_all(self, log_path: Path) -> RoleProcess:
        """Start the brokers and the members; the producer."""
        options, secret = self._options, os.urandom(32).hex()
        for name in ("a", "b"):
            self._brokers.append(_Broker(secret, self._directory / name, self._store, options.queue_options()))
        self._hosts = ",".join(broker.address for broker in self._brokers)
        named: dict[str, object] = {"secret": secret, "address": self._brokers[0].address, "hosts": self._hosts}
        self._members += [RoleProcess(ROLES, "consume", **named, log=log_path) for _ in range(options.consumers)]
        for consumer in self._members:
            consumer.read()
        producer = RoleProcess(ROLES, "produce", **named, keys=options.keys, per_key=options.per_key)
        self._members.append(producer)
        producer.read()
        return producer

    def _drive(self) -> None:
        """Make each fault when its share of the messages was handled, however fast the messages are."""
        count = self._options.failovers
        faults = [((index + 1) / (count + 1), index % 2 == 0) for index in range(count)]
        while faults or not self.order.is_complete:
            self._log.read()
            if faults and self.order.handled >= faults[0][0] * self.order.total:
                _, is_kill = faults.pop(0)
                owners = [broker for broker in self._brokers if broker.is_owner]
                if not owners:
                    raise RuntimeError("no node is the broker of the queue")
                if is_kill:
                    self._kill(owners[0])
                else:
                    self._pause(owners[0])
            if self.order.wrong or time.monotonic() - self._began_s > self._options.timeout_s:
                break
            time.sleep(_CHECK_S)

    def _kill(self, owner: _Broker) -> None:
        owner.process.kill()
        owner.is_stopped = True
        self._note("killed the owner with -9")
        self._note("the other one took over", took_s=self._wait_for_other(owner))
        owner.start(self._hosts)
        self._note("started it again", status=owner.status())

    def _pause(self, owner: _Broker) -> None:
        owner.process.stop()
        owner.is_stopped = True
        until_s = time.monotonic() + self._options.stop_s
        self._note("stopped the owner (SIGSTOP)")
        self._note("the other one took over", took_s=self._wait_for_other(owner))
        while time.monotonic() < until_s:
            self._rest()
        owner.process.go_on()
        owner.is_stopped = False
        while (status := owner.status())["role"] == "owner":
            self._rest()
        self._note("let it go on; it is on standby", status=status)

    def _wait_for_other(self, before: _Broker) -> float:
        """Wait until the other broker has taken over; the seconds that it took."""
        since_s = time.monotonic()
        (other,) = [broker for broker in self._brokers if broker is not before]
        while not other.is_owner:
            if time.monotonic() - since_s > _FAILOVER_S:
                raise RuntimeError(f"no broker took over within {_FAILOVER_S:g} s")
            self._rest()
        return round(time.monotonic() - since_s, 2)

    def _rest(self) -> None:
        self._log.read()
        time.sleep(_CHECK_S)

    def _note(self, event: str, **more: object) -> None:
        at_s = round(time.monotonic() - self._began_s, 2)
        self.events.append({"what": event, "at_s": at_s, "handled": self.order.handled, **more})


def run(options: OrderRun) -> dict[str, Any]:
    """One run; its report. Raises ``NotInstalledError`` without a PostgreSQL server."""
    server = postgres()
    server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="dep2p-failover-") as directory:
            failover_run = FailoverRun(options, server.url, Path(directory))
            failover_run.run()
    finally:
        server.remove()
    order = failover_run.order
    return {
        "messages": order.total,
        "keys": options.keys,
        "consumers": options.consumers,
        "failovers": options.failovers,
        "handled": order.handled,
        "repeats_of_the_current_message": order.repeats,
        "out_of_order": order.wrong[:20],
        "is_complete": order.is_complete,
        "acknowledged": failover_run.sent.get("taken"),
        "left_in_the_queue": failover_run.status.get("messages"),
        "term": failover_run.status.get("term"),
        "elapsed_s": round(failover_run.elapsed_s, 2),
        "events": failover_run.events,
    }
