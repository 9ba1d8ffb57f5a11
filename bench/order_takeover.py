"""Order by key while the keeper changes: ``python -m bench.order_crash --takeover 4``.

Two keepers on one PostgreSQL store ([queues] standby), a producer in strict order and consumers in FIFO mode, each a
process of its own. In turn the owner is killed with -9 and started again, and stopped (SIGSTOP) for longer than its
lease, so that it wakes up as one that has been replaced. The members name the first keeper all the time.
"""

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.order_crash import Lines, Order, Process, free_port
from bench.servers import postgres

_LOOK_S: Final = 0.1
_TAKEOVER_S: Final = 120.0


class _Keeper:
    """One of the two, over its lives."""

    def __init__(self, secret: str, directory: str, store: str, options: str) -> None:
        self.arguments: dict[str, object] = {
            "secret": secret,
            "directory": directory,
            "port": free_port(),
            "store": store,
            "options": options,
        }
        self.address = ""
        self.is_stopped = False
        self.start(hosts="")

    def start(self, hosts: str) -> None:
        self.process = Process("keep", **self.arguments, hosts=hosts)
        self.address = self.process.hear()["address"]

    def status(self) -> dict[str, Any]:
        """Its role and term."""
        self.process.tell("who")
        return self.process.hear()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run; its report."""
    server = postgres()
    server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="dep2p-takeover-") as directory:
            return _run(arguments, server.url, directory)
    finally:
        server.remove()


def _run(arguments: argparse.Namespace, store: str, directory: str) -> dict[str, Any]:
    secret = os.urandom(32).hex()
    order = Order(arguments.keys, arguments.per_key)
    total = arguments.keys * arguments.per_key
    events: list[dict[str, Any]] = []
    others: list[Process] = []
    keepers: list[_Keeper] = []
    log = Path(directory) / "log"
    log.touch()
    options = json.dumps({"partitions": arguments.partitions, "max_attempts": 0} | json.loads(arguments.options))
    began_s = time.monotonic()

    def note(what: str, **more: object) -> None:
        events.append({"what": what, "at_s": round(time.monotonic() - began_s, 2), "handled": order.handled, **more})

    def owner() -> _Keeper | None:
        found = [each for each in keepers if not each.is_stopped and each.status()["role"] == "owner"]
        return found[0] if found else None

    def take() -> None:
        for line in lines.take():
            order.take(line)

    def until_next(before: _Keeper) -> float:
        """Until the other one has taken over; after how many seconds."""
        since_s = time.monotonic()
        (other,) = [each for each in keepers if each is not before]
        while other.status()["role"] != "owner":
            take()
            if time.monotonic() - since_s > _TAKEOVER_S:
                raise RuntimeError("nobody took over")
            time.sleep(_LOOK_S)
        return round(time.monotonic() - since_s, 2)

    with contextlib.closing(Lines(log)) as lines:
        try:
            for name in ("a", "b"):
                keepers.append(_Keeper(secret, f"{directory}/{name}", store, options))
            hosts = ",".join(each.address for each in keepers)
            named: dict[str, object] = {"secret": secret, "address": keepers[0].address, "hosts": hosts}
            others += [Process("consume", **named, log=log) for _ in range(arguments.consumers)]
            for each in others:
                each.hear()
            producer = Process("produce", **named, keys=arguments.keys, per_key=arguments.per_key)
            others.append(producer)
            producer.hear()
            began_s = time.monotonic()
            rounds = [
                ((index + 1) / (arguments.takeover + 1), "kill" if index % 2 == 0 else "stop")
                for index in range(arguments.takeover)
            ]
            while rounds or not order.is_complete:  # each of them happens, however fast the messages were
                take()
                if rounds and order.handled >= rounds[0][0] * total:
                    _share, how = rounds.pop(0)
                    before = owner()
                    if before is None:
                        raise RuntimeError("nobody keeps the queue")
                    if how == "kill":
                        before.process.end()
                        before.is_stopped = True
                        note("killed the owner with -9")
                        took_s = until_next(before)
                        note("the other one took over", took_s=took_s)
                        before.start(hosts)
                        before.is_stopped = False
                        note("started it again", status=before.status())
                    else:
                        before.process.popen.send_signal(signal.SIGSTOP)
                        before.is_stopped = True
                        stopped_s = time.monotonic()
                        note("stopped the owner (SIGSTOP)")
                        took_s = until_next(before)
                        note("the other one took over", took_s=took_s)
                        while time.monotonic() - stopped_s < arguments.stop_s:
                            take()
                            time.sleep(_LOOK_S)
                        before.process.popen.send_signal(signal.SIGCONT)
                        before.is_stopped = False
                        while (status := before.status())["role"] == "owner":
                            take()
                            time.sleep(_LOOK_S)
                        note("let it go on; it stands by", status=status)
                if order.wrong or time.monotonic() - began_s > arguments.timeout_s:
                    break
                time.sleep(_LOOK_S)
            elapsed_s = time.monotonic() - began_s
            sent: dict[str, Any] = producer.hear()["done"] if order.is_complete else {}
            time.sleep(arguments.settle_s)
            take()
            left = owner()
            status = left.status() if left is not None else {}
        finally:
            for process in [*others, *(each.process for each in keepers)]:
                process.end()
    return {
        "messages": total,
        "keys": arguments.keys,
        "consumers": arguments.consumers,
        "takeovers": arguments.takeover,
        "handled": order.handled,
        "repeats_of_the_current_message": order.repeats,
        "out_of_order": order.wrong[:20],
        "is_complete": order.is_complete,
        "acknowledged": sent.get("taken"),
        "left_in_the_queue": status.get("messages"),
        "term": status.get("term"),
        "elapsed_s": round(elapsed_s, 2),
        "events": events,
    }
