"""The trace of nodes: what comes into the files, and what of it is left when disks, processes and readers are bad."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dep2p import Node, Realm
from dep2p.errors import TraceError, TraceRunningError
from dep2p.io.trace_log import TraceLog
from dep2p.io.trace_settings import TraceSettings
from dep2p.traces.files import parse_file_name, read_events, trace_files
from dep2p.traces.schema import SCHEMA_VERSION, Join
from dep2p.types import PeerId
from tests.io.pubsub_support import joined, pubsub_nodes, take, until

BARE = TraceSettings(snapshot_s=0, clock_s=0)


def events_in(directory: Path, node: Node | None = None) -> list[dict[str, Any]]:
    """All events of the complete files, of one node or of all."""
    return [
        event
        for path in trace_files([directory])
        for event in read_events(path)
        if node is None or event["node"] == node.peer_id
    ]


def of_kind(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] in kinds]


def runs_in(directory: Path) -> Iterator[list[dict[str, Any]]]:
    """The events of each run, in the order of its files."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in trace_files([directory]):
        name = parse_file_name(path.name)
        assert name is not None
        runs.setdefault((name.node, name.start_ns), []).extend(read_events(path))
    yield from runs.values()


def assert_whole(events: list[dict[str, Any]]) -> None:
    """One run, from its start to its end in order, with no number missing."""
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert [event["kind"] for event in (events[0], events[-1])] == ["node_start", "node_stop"]
    assert len({event["node"] for event in events}) == 1


async def test_the_files_hold_what_the_nodes_count(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with pubsub_nodes(3, trace_dir=tmp_path, trace_settings=TraceSettings(clock_s=5, rpcs=True)) as nodes:
        topics = await joined(nodes)
        async with topics[1].subscribe() as one, topics[2].subscribe() as other:
            sent = [await topics[0].publish(b"message %d" % number) for number in range(50)]
            for messages in (one, other):
                await take(messages, 50)
        await trio.sleep(30)
        counts = [node.pubsub().counters() for node in nodes]
    for events in runs_in(tmp_path):
        assert_whole(events)
    for node, counted in zip(nodes, counts, strict=True):
        kinds = Counter(event["kind"] for event in events_in(tmp_path, node))
        assert kinds["publish"] == counted.get("router_published", 0)
        assert kinds["deliver"] == counted.get("messages_delivered", 0) + kinds["publish"] == 50
        assert kinds["duplicate"] == counted["router_duplicates"]
        assert kinds["join"] == kinds["leave"] + 1 == 1
        assert kinds["graft"] >= 1
        assert kinds["recv_rpc"] and kinds["send_rpc"]
        assert min(kinds["mesh"], kinds["scores"], kinds["depths"]) >= 2
    published = [event["msg"] for event in of_kind(events_in(tmp_path, nodes[0]), "publish")]
    assert len(published) == len({*published}) == len(sent)


async def test_started_in_the_middle_it_begins_with_how_things_are(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with pubsub_nodes(2) as nodes:
        await joined(nodes)
        tracer = nodes[0].tracer
        assert not tracer.is_on and not tracer.status().directory
        started = await tracer.start(tmp_path, BARE)
        assert started.is_on and started.directory == str(tmp_path)
        with pytest.raises(TraceRunningError, match="already"):
            await tracer.start(tmp_path / "other", BARE)
        assert not (tmp_path / "other").exists()
        ended = await tracer.stop("enough")
        assert not ended.is_on and ended.files == 1 and not ended.growing
        assert await tracer.stop("again") == ended
        (events,) = runs_in(tmp_path)
        assert_whole(events)
        assert [event["kind"] for event in events] == ["node_start", "add_peer", "join", "graft", "node_stop"]
        assert events[1]["peer"] == events[3]["peer"] == nodes[1].peer_id
        assert events[-1]["reason"] == "enough"
        before = nodes[0].counters()["trace_events"]
        await nodes[0].publish("chat", b"unseen")
        await tracer.start(tmp_path, BARE)
        await nodes[0].publish("chat", b"seen")
        await tracer.stop("enough")
        assert nodes[0].counters()["trace_events"] > before
    runs = list(runs_in(tmp_path))
    assert len(runs) == 2
    assert len(of_kind(runs[1], "publish")) == 1 and not of_kind(runs[0], "publish")


async def test_a_realm_joined_later_is_traced_and_rpcs_can_be_left_out(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    later = Realm.generate("later")
    settings = TraceSettings(rpcs=False, snapshot_s=0, clock_s=0)
    async with pubsub_nodes(2, trace_dir=tmp_path, trace_settings=settings) as nodes:
        for node in nodes:
            await node.join_realm(later)
        topics = [await node.join("news", realm=later) for node in nodes]
        await until(lambda: all(topic.mesh() for topic in topics))
        await topics[0].publish(b"x")
        await until(lambda: nodes[1].pubsub(later).counters().get("router_published", 0) == 0)
        async with topics[0].subscribe() as messages:
            await topics[1].publish(b"y")
            await take(messages, 1)
        await nodes[0].leave_realm(later)
    kinds = Counter(event["kind"] for event in events_in(tmp_path, nodes[0]))
    assert kinds["join"] == kinds["leave"] == 1
    assert kinds["publish"] == 1 and kinds["deliver"] == 2
    assert not kinds["send_rpc"] and not kinds["recv_rpc"]


async def test_a_full_buffer_drops_counts_and_says_so(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    log = TraceLog(PeerId("me"), 10)
    woken: list[int] = []
    log.wake = lambda: woken.append(len(log))
    log.start(rpcs=True)
    for number in range(25):
        log.put(Join(SCHEMA_VERSION, "me", 0, number, f"topic {number}"))
    assert len(log) == 10 and log.dropped == {"buffer full": 15}
    assert [event.t for event in log.take()] == list(range(10))
    log.put(Join(SCHEMA_VERSION, "me", 0, 25, "topic"))
    assert len(log) == 1, "there is room again"


def _clock(ahead_s: float) -> float:
    return trio.current_time() + ahead_s


async def test_clocks_that_are_apart_are_read(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    settings = TraceSettings(snapshot_s=1, clock_s=2)
    async with pubsub_nodes(2, trace_dir=tmp_path, trace_settings=settings) as nodes:
        began = trio.current_time()
        for node, at_s in zip(nodes, (1e9, 1e9 + 7.5), strict=True):
            node.services().clocks.set_wall(partial(_clock, at_s - began))
        await until(lambda: all(node.counters().get("clocks_readings", 0) >= 2 for node in nodes))
        await trio.sleep(1.5)
    for node, expected in zip(nodes, (7_500_000, -7_500_000), strict=True):
        readings = of_kind(events_in(tmp_path, node), "clock")
        assert readings
        for reading in readings:
            assert abs(reading["offset_us"] - expected) <= reading["error_us"] <= 10_000
        rtts = of_kind(events_in(tmp_path, node), "rtts")
        assert rtts[-1]["rtts"][0]["rtt_us"] >= 2_000, "a millisecond each way"


async def test_a_directory_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with pubsub_nodes(1) as (node,):
        with pytest.raises(TraceError, match="file"):
            await node.tracer.start(file / "trace", BARE)
        assert not node.tracer.is_on
        await node.tracer.start(tmp_path / "trace", BARE)
        assert node.tracer.is_on, "a failure leaves nothing behind"
    with pytest.RaisesGroup(TraceError, flatten_subgroups=True):
        async with pubsub_nodes(1, trace_dir=file / "trace"):
            pass


async def test_a_node_that_fails_still_ends_its_trace(tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the app"), flatten_subgroups=True):
        async with pubsub_nodes(1, trace_dir=tmp_path, trace_settings=BARE):
            raise RuntimeError("the app")
    (events,) = runs_in(tmp_path)
    assert_whole(events)
