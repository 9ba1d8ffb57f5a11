"""Random traces of apps: reliable messages, queues, requests, sessions, scores. Written as node files."""

from pathlib import Path
from random import Random

import zstandard

from dep2p.traces import schema
from dep2p.traces.files import FileName, GrowingFile
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.traces.schema import TraceEvent

START_US = 1_577_836_800_000_000
NODES = ("app-0", "app-1", "app-2")


def write_node(directory: Path, node: str, events: list[TraceEvent], *, start_us: int | None = None) -> Path:
    """Sort, number and write the events of a run, with its start and its stop."""
    start = events[0].t if start_us is None and events else start_us or START_US
    events = sorted(events, key=lambda event: event.t)
    first, last = min([start, *(e.t for e in events)]), max([start, *(e.t for e in events)])
    events = [schema.NodeStartEvent(V, node, 0, first), *events, schema.NodeStopEvent(V, node, 0, last, "done")]
    for seq, event in enumerate(events):
        event.seq = seq
    growing = GrowingFile(directory, FileName(node, first * 1000, 0), first)
    for begin in range(0, len(events), 256):
        growing.append(events[begin : begin + 256], zstandard.ZstdCompressor())
    return growing.finish()


def write_apps(directory: Path, seed: int) -> None:
    """Files of three nodes."""
    rng = Random(seed)
    events: dict[str, list[TraceEvent]] = {node: [] for node in NODES}
    for number in range(150):
        _reliable(rng, events, number)
    for number in range(200):
        _queued(rng, events, number)
    for number in range(120):
        _asked(rng, events, number)
    for node in NODES:
        for step in range(8):
            readings = [schema.PeerScore(peer, round(rng.gauss(3, 4), 3)) for peer in NODES if peer != node]
            events[node].append(
                schema.ScoresEvent(V, node, 0, START_US + step * 2_000_000 + rng.randrange(1000), readings)
            )
    for _ in range(60):
        node, peer = rng.sample(NODES, 2)
        t = START_US + rng.randrange(20_000_000)
        side, name = rng.choice(("in", "out")), rng.choice(("file", "echo"))
        events[node].append(schema.StreamEvent(V, node, 0, t, peer, name, side, "open"))
        counts = rng.randrange(10), rng.randrange(10_000), rng.randrange(10_000)
        state = rng.choice(("closed", "reset"))
        events[node].append(schema.StreamEvent(V, node, 0, t + counts[0], peer, name, side, state, *counts))
    for number in range(12):
        _pushed(rng, events, number)
    for node in NODES:
        write_node(directory, node, events[node], start_us=START_US)


def _reliable(rng: Random, events: dict[str, list[TraceEvent]], number: int) -> None:
    node, peer = rng.sample(NODES, 2)
    msg, t = b"reliable-%d" % number, START_US + rng.randrange(18_000_000)

    def add(at: int, state: str, attempt: int | None = None) -> None:
        events[node].append(schema.DeliveryEvent(V, node, 0, at, msg, peer, state, attempt=attempt, size=100))

    add(t, "created")
    end = rng.choices(("acknowledged", "failed", "expired", "dropped", None), (80, 6, 5, 4, 5))[0]
    if end != "dropped":
        for attempt in range(1, rng.choices((2, 3, 4), (75, 15, 10))[0]):
            add(t + 10 + (attempt - 1) * 500_000, "sending", attempt)
    if end is not None:
        add(t + rng.randrange(1_000, 2_000_000), end)
    if end == "acknowledged":
        position = number if rng.random() < 0.8 else max(0, number - rng.randrange(20))
        for copy in range(rng.choices((1, 2), (90, 10))[0]):
            state = "received" if not copy else "repeated"
            at = t + rng.randrange(500, 900_000)
            events[peer].append(schema.DeliveryEvent(V, peer, 0, at, msg, node, state, position=position))


def _pushed(rng: Random, events: dict[str, list[TraceEvent]], number: int) -> None:
    """A session with runs of pushes, some sent again, some never received; half of them go over to another epoch."""
    server, client = rng.sample(NODES, 2)
    session, t = f"s{number}", START_US + rng.randrange(10_000_000)

    def add(node: str, at: int, state: str, position: int, count: int | None = None, epoch: int | None = None) -> None:
        peer, side = (client, "in") if node == server else (server, "out")
        events[node].append(
            schema.SessionTraceEvent(
                V, node, 0, at, session, peer, side, state, epoch=epoch, position=position, count=count
            )
        )

    for epoch in range(1, rng.choice((2, 3))):
        add(server, t, "opened", 0, epoch=epoch)
        add(client, t + 7, "opened" if epoch == 1 else "reset", 0, epoch=epoch)
        sent = received = 0
        at = t
        for _ in range(rng.randrange(1, 12)):
            t += rng.randrange(10, 90_000)
            sent += (count := rng.randrange(1, 9))
            add(server, t, "sent", sent, count)
            if rng.random() < 0.2:
                add(server, t + 1, "resent", sent, count)
            at = max(at, t) + rng.randrange(1, 40_000)
            if rng.random() < 0.7 and (more := rng.randrange(sent - received + 1)):
                received += more
                add(client, at, "received", received, more)
                add(server, at + 5, "acknowledged", received, more)
        t = at + 100_000
    for node, state in ((client, "lost"), (client, "resumed"), (client, "skipped"), (server, "closed")):
        add(node, t + rng.randrange(9), state, 0, count=1 if state == "skipped" else None)


def _queued(rng: Random, events: dict[str, list[TraceEvent]], number: int) -> None:
    node = rng.choice(NODES[:2])
    queue, msg = rng.choice(("jobs", "mail")), b"queued-%d" % number
    key = f"k{rng.randrange(5)}" if rng.random() < 0.7 else None
    t = START_US + rng.randrange(15_000_000)

    def add(
        at: int, state: str, channel: str | None = None, attempt: int | None = None, duration_us: int | None = None
    ) -> None:
        events[node].append(
            schema.QueueEvent(
                *(V, node, 0, at, "", queue, state, msg, channel),
                partition=0,
                position=number,
                attempt=attempt,
                key=key,
                consumer="c1" if state == "handed_out" else None,
                duration_us=duration_us,
            )
        )

    if rng.random() < 0.9:  # else before the trace began
        add(t, "published")
    for channel in ("one", "two") if rng.random() < 0.5 else ("one",):
        at = t + rng.randrange(100, 3_000_000)
        for attempt in range(1, 6):
            if rng.random() < 0.1:  # given back untried
                add(at, "handed_out", channel, attempt, at - t + 3)
                add(at + 5, "released", channel, attempt, 5)
                at += rng.randrange(10, 1_000)
            add(at, "handed_out", channel, attempt, at - t + 3)
            at += rng.randrange(200, 400_000)
            ending = rng.choices(("finished", "requeued", "timed_out", "dead"), (80, 8, 8, 4))[0]
            add(at, ending, channel)
            if ending in ("finished", "dead"):
                break
            at += rng.randrange(10, 1_000)


def _asked(rng: Random, events: dict[str, list[TraceEvent]], number: int) -> None:
    node, peer = rng.sample(NODES, 2)
    t, duration = START_US + rng.randrange(19_000_000), rng.randrange(300, 90_000)
    outcome = "ok" if rng.random() < 0.9 else "HANDLER_FAILED"
    name = rng.choice(("time", "quote"))
    events[node].append(schema.RequestEvent(V, node, 0, t, peer, name, "out", outcome, duration, 10, 20))
    events[peer].append(schema.RequestEvent(V, peer, 0, t, node, name, "in", outcome, duration - 100, 10, 20))
