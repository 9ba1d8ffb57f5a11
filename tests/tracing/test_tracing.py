"""The trace of nodes: what comes into the files, and what of it is left when disks, processes and readers are bad."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dep2p import HandlerError, MessageStream, Node, NoHandlerError, Notification, Realm, Request
from dep2p.errors import TraceError, TraceRunningError
from dep2p.traces.files import parse_file_name, read_events, trace_files
from dep2p.traces.schema import SCHEMA_VERSION, JoinEvent
from dep2p.tracing.event_log import TraceLog
from dep2p.tracing.settings import TraceSettings
from dep2p.types import PeerId
from tests.pubsub.nodes import joined, pubsub_nodes, take, until

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
        assert kinds["deliver"] == counted.get("messages_delivered", 0) == 50 - kinds["publish"]
        assert kinds["duplicate"] == counted["router_duplicates"]
        assert kinds["join"] == kinds["leave"] + 1 == 1
        assert kinds["graft"] >= 1
        assert kinds["recv_rpc"] and kinds["send_rpc"]
        assert min(kinds["mesh"], kinds["scores"], kinds["depths"]) >= 2
    published = [event["msg"] for event in of_kind(events_in(tmp_path, nodes[0]), "publish")]
    assert len(published) == len({*published}) == len(sent)


@pytest.mark.parametrize("rpcs", [False, True])
@pytest.mark.parametrize("sample", [1.0, 0.4])
async def test_a_message_for_other_programs_of_its_node_is_in_the_trace_of_its_node_alone(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, sample: float, rpcs: bool
) -> None:
    settings = TraceSettings(snapshot_s=0, clock_s=0, sample=sample, rpcs=rpcs)
    async with pubsub_nodes(2, trace_dir=tmp_path, trace_settings=settings) as nodes:
        topics = await joined(nodes)
        here, second = await nodes[0].join("chat"), await nodes[0].join("chat")
        async with topics[0].subscribe(), here.subscribe() as one, second.subscribe() as two, topics[1].subscribe():
            for number in range(100):
                result = await topics[0].publish(b"message %d" % number)
                assert result.local_subscriptions == 2
            assert len(one) == len(two) == 100
        await topics[0].publish(b"nobody here reads it")
        await trio.sleep(1)
    at_author, at_other = events_in(tmp_path, nodes[0]), events_in(tmp_path, nodes[1])
    published = {event["msg"]: event for event in of_kind(at_author, "publish")}
    local = of_kind(at_author, "deliver_local")
    assert len({event["msg"] for event in local} & set(published)) == len(local) >= len(published) - 1
    assert len(local) == 100 if sample == 1.0 else 10 < len(local) < 70  # 40 are expected: six standard deviations
    for event in local:
        of_message = published[event["msg"]]
        assert (event["readers"], event["topic"], event["size"]) == (2, "chat", of_message["size"])
        assert event["t"] >= of_message["t"] and event["seq"] > of_message["seq"]
    assert not of_kind(at_author, "deliver") and not of_kind(at_other, "deliver_local")


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
    assert kinds["publish"] == 1 and kinds["deliver"] == 1
    assert not kinds["send_rpc"] and not kinds["recv_rpc"]


async def test_a_full_buffer_drops_counts_and_says_so(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    log = TraceLog(PeerId("me"), 10)
    woken: list[int] = []
    log.wake = lambda: woken.append(len(log))
    log.start(rpcs=True)
    for number in range(25):
        log.put(JoinEvent(SCHEMA_VERSION, "me", 0, number, f"topic {number}"))
    assert len(log) == 10 and log.dropped == {"buffer full": 15}
    assert [event.t for event in log.take()] == list(range(10))
    log.put(JoinEvent(SCHEMA_VERSION, "me", 0, 25, "topic"))
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


async def test_a_directory_that_cannot_be_written_is_reported_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with pubsub_nodes(1) as (node,):
        with pytest.raises(TraceError, match="file"):
            await node.tracer.start(file / "trace", BARE)
        assert not node.tracer.is_on
        await node.tracer.start(tmp_path / "trace", BARE)
        assert node.tracer.is_on, "a failure leaves nothing behind"
    with pytest.raises(TraceError):
        async with pubsub_nodes(1, trace_dir=file / "trace"):
            pass


async def test_a_node_that_fails_still_ends_its_trace(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the app"):
        async with pubsub_nodes(1, trace_dir=tmp_path, trace_settings=BARE):
            raise RuntimeError("the app")
    (events,) = runs_in(tmp_path)
    assert_whole(events)


async def test_what_apps_send_each_other_is_in_the_trace(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with pubsub_nodes(2, trace_dir=tmp_path, trace_settings=BARE) as (ann, bob):
        taken: list[bytes] = []

        @bob.on_request("double")
        async def double(request: Request) -> bytes:
            await trio.sleep(0.25)
            return request.body * 2

        @bob.on_request("fail")
        async def fail(_request: Request) -> bytes:
            raise HandlerError("no")

        @bob.on_notify("note")
        async def note(notification: Notification) -> None:
            if notification.body == b"bad":
                raise ValueError("bad")
            taken.append(notification.body)

        @bob.on_stream("items")
        async def items(stream: MessageStream) -> None:
            async for _ in stream:
                pass

        del double, fail, note, items
        await until(lambda: bool(ann.membership().verified_connection(bob.peer_id)))
        assert await ann.request(bob.peer_id, "double", b"abc") == b"abcabc"
        with pytest.raises(HandlerError):
            await ann.request(bob.peer_id, "fail", b"")
        with pytest.raises(NoHandlerError):
            await ann.request(bob.peer_id, "nothing", b"")
        await ann.notify(bob.peer_id, "note", b"12345")
        await ann.notify(bob.peer_id, "note", b"bad")
        await until(lambda: taken == [b"12345"])
        async with ann.stream(bob.peer_id, "items") as stream:
            await stream.send(b"x")
        receipt = await ann.send(bob.peer_id, "note", b"surely", reliable=True)
        assert receipt is not None
        await receipt.wait()
        await until(lambda: taken == [b"12345", b"surely"])
    at_ann, at_bob = events_in(tmp_path, ann), events_in(tmp_path, bob)
    asked = {event["name"]: event for event in of_kind(at_ann, "request")}
    assert {name: event["outcome"] for name, event in asked.items()} == {
        "double": "ok",
        "fail": "handler_failed",
        "nothing": "no_handler",
    }
    assert all(event["side"] == "out" and event["peer"] == bob.peer_id for event in asked.values())
    assert asked["double"]["duration_us"] >= 250_000
    assert (asked["double"]["size"], asked["double"]["reply_size"]) == (3, 6)
    answered = {event["name"]: event for event in of_kind(at_bob, "request")}
    assert {name: event["outcome"] for name, event in answered.items()} == {"double": "ok", "fail": "handler_failed"}
    assert 250_000 <= answered["double"]["duration_us"] <= asked["double"]["duration_us"]
    assert [event["outcome"] for event in of_kind(at_bob, "notify")] == ["ok", "handler_failed"]
    assert [event["size"] for event in of_kind(at_ann, "notify")] == [5, 3]
    for node_events, side in ((at_ann, "out"), (at_bob, "in")):
        assert [(event["side"], event["state"]) for event in of_kind(node_events, "stream")] == [
            (side, "open"),
            (side, "closed"),
        ]
    states = [event["state"] for event in of_kind(at_ann, "delivery")]
    assert states[0] == "created" and states[-1] == "acknowledged" and states.count("sending") == 1
    assert len({event["msg"] for event in of_kind(at_ann, "delivery")}) == 1
    (received,) = of_kind(at_bob, "delivery")
    assert received["state"] == "received" and received["position"] == 1 and received["peer"] == ann.peer_id


async def test_after_its_end_nothing_of_apps_comes_into_a_trace(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with pubsub_nodes(2) as (ann, bob):

        @bob.on_request("slow")
        async def slow(_request: Request) -> bytes:
            await trio.sleep(5)
            return b""

        del slow
        await until(lambda: bool(ann.membership().verified_connection(bob.peer_id)))
        await ann.tracer.start(tmp_path, BARE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ann.request, bob.peer_id, "slow", b"")
            await trio.sleep(1)
            await ann.tracer.stop("in the middle")
        assert len(ann.tracer.log) == 0
        await ann.tracer.start(tmp_path, BARE)
        await ann.tracer.stop("again")
    for events in runs_in(tmp_path):
        assert_whole(events)
        assert not of_kind(events, "request")
