"""The command line of the benchmarks."""

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio

from bench.harness.compare import FULL, QUICK, TINY, Run
from bench.harness.environment import describe
from bench.harness.processes import WorkerError
from bench.harness.report import Report, Result
from bench.hostile.benchmark import SCENARIOS, hostile
from bench.messaging.delivery import delivery
from bench.messaging.dialing import dial
from bench.messaging.memory import memory
from bench.messaging.messages import local, notify, request, stream
from bench.messaging.session import session
from bench.ordering.throughput import ordered
from bench.pubsub.benchmark import pubsub
from bench.pubsub.simulator import simulator
from bench.queues.benchmark import queue, queue_scale
from bench.queues.crash import STORES, crash
from bench.services.benchmark import services
from bench.spark.benchmark import spark
from bench.tracing.recording import trace
from dep2p.concurrency.exception_groups import leaves

BENCHES: Mapping[str, tuple[Callable[[Run], Awaitable[list[Result]]], str]] = {
    "request": (request, "100 B there and back, 1 and 64 in flight, against the py-libp2p helper and raw TCP"),
    "notify": (notify, "100 B one way, against an unbatched py-libp2p stream"),
    "local": (local, "100 B between two programs of one node, against two nodes over loopback"),
    "services": (
        services,
        "100 B to any of three members, also when one is killed, and to a group of readers",
    ),
    "stream": (stream, "bulk one way, against a py-libp2p stream"),
    "dial": (dial, "a fresh node to a usable connection, against py-libp2p host.connect"),
    "memory": (memory, "resident memory, idle and for each connected peer, against a py-libp2p host"),
    "pubsub": (pubsub, "1 KiB signed, among two and ten processes, and a burst, against js-libp2p and py-libp2p"),
    "delivery": (delivery, "100 B reliably, outbox in memory and on disk, and pushed in order, against notifies"),
    "queue": (queue, "durable queues, 1 KiB: publish, consume, fan out, over a connection, against other queues"),
    "ordered": (ordered, "1 KiB with keys over a connection, 4 partitions: in order, against shared; handing over"),
    "queue-scale": (queue_scale, "a backlog of a million messages, and 10,000 idle queues"),
    "crash": (crash, "kill -9 of a process with queues, many times: nothing acknowledged is lost, no id given twice"),
    "session": (session, "100 B pushed in order through a session and taken, against plain notifies"),
    "simulator": (simulator, "simulated events a second of one core, against a bare heapq loop with flooding nodes"),
    "trace": (trace, "what a trace costs: CPU and bytes an event, against libp2p's JSON; pub/sub with it and without"),
    "hostile": (hostile, "a member's requests while strangers, a member or a caller attack the node that answers"),
    "spark": (spark, "reports over a synthetic trace, warm and cold, against DuckDB; needs `make spark`"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options. Exits with 2 on a usage error, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Benchmarks of dep2p against its peers, in the same run. See docs/reference/benchmarks.md.",
    )
    parser.add_argument("name", metavar="NAME", choices=[*BENCHES, "all", "list"], help=", ".join(BENCHES))
    parser.add_argument(
        "--quick", action="store_true", help="a shorter run, within 25 seconds for each benchmark or attack"
    )
    parser.add_argument("--json", action="store_true", help="one object on the last line of the output")
    parser.add_argument("--store", choices=STORES, help="crash: only this store; else each that is installed")
    parser.add_argument("--rounds", type=int, metavar="N", help="crash: how often to kill, 100 by default")
    parser.add_argument("--attack", choices=SCENARIOS, help="hostile: only this attack; else each of them")
    parser.add_argument("--profile", metavar="DIR", type=Path, help="write a cProfile file for each process; slower")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ours", default="dep2p", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.name not in ("crash", "all") and (options.store is not None or options.rounds is not None):
        parser.error("--store and --rounds are options of crash")
    if options.name not in ("hostile", "all") and options.attack is not None:
        parser.error("--attack is an option of hostile")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: at least 1")
    return options


def main(arguments: list[str]) -> int:
    """Run what the arguments name; 0 when all of it ended with results, else 1."""
    options = parse(arguments)
    if options.name == "list":
        for name, (_, text) in BENCHES.items():
            print(f"{name:10} {text}")
        return 0
    effort = TINY if options.tiny else QUICK if options.quick else FULL
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    run = Run(effort, profile_dir=options.profile, ours=options.ours)
    run.store, run.crash_rounds = options.store or "", options.rounds or 0
    run.attack = options.attack or ""
    report = Report(options.name, describe())
    failed = False
    for name in BENCHES if options.name == "all" else [options.name]:
        try:
            report.results += trio.run(BENCHES[name][0], run)
        except* WorkerError as errors:
            failed = True
            for error in leaves(errors):
                print(f"bench {name}: {error}", file=sys.stderr)
    report.environment["other_processes_cores"] = run.load.other_cores
    print(json.dumps(report.as_object()) if options.json else report.as_table())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
