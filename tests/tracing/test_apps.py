"""Sessions, queues and streams in the traces of nodes: what each end writes, how it is joined, and sampling."""

import base64
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dep2p import MessageStream, Notification
from dep2p.errors import SessionGapError
from dep2p.queues.trace_events import queue_message_id
from dep2p.sessions.service import Session
from dep2p.tracing.settings import TraceSettings
from tests.pubsub.nodes import joined, pubsub_nodes, take, until
from tests.tracing.test_tracing import BARE, events_in, of_kind

MESSAGES = 40


def states(events: Iterable[dict[str, Any]]) -> Counter[str]:
    return Counter(event["state"] for event in events)


def base64_crc(event: dict[str, Any]) -> int:
    return zlib.crc32(base64.b64decode(event["msg"]))


async def test_a_queue_reports_what_becomes_of_each_message(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with pubsub_nodes(1) as (node,):
        await node.queues.create("jobs", {"max_attempts": 2})
        early = await node.queues.publish("jobs", b"before the trace")
        await node.tracer.start(tmp_path, BARE)
        ids = [await node.queues.publish("jobs", b"%d" % n, key=f"k{n % 3}") for n in range(4)]
        async with node.queues.consume("jobs", "work", max_in_flight=10) as messages:
            got = [await messages.__anext__() for _ in range(5)]
            assert [message.id for message in got] == [early, *ids]
            await trio.sleep(2)
            await got[0].finish()
            await got[1].finish()
            await got[2].requeue(0.5, "not now")
            await got[3].reject("never")
            await trio.sleep(1)
            again = await messages.__anext__()
            assert again.id == ids[1] and again.attempts == 2
            await again.requeue(0, "no use")
            await got[4].finish()
        await node.tracer.stop("enough")
        await node.queues.publish("jobs", b"after the trace")
    events = of_kind(events_in(tmp_path, node), "queue")
    assert states(events) == {
        **{"published": 4, "handed_out": 6, "finished": 3, "requeued": 2, "rejected": 1, "dead": 2},
    }
    assert all(event["queue"] == "jobs" and event["namespace"] == "" for event in events)
    assert all(("channel" in event) is (event["state"] != "published") for event in events)
    by_message: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_message.setdefault(event["msg"], []).append(event)
    assert len(by_message) == 5
    assert [[event["state"] for event in each] for each in by_message.values()].count(
        ["published", "handed_out", "requeued", "handed_out", "requeued", "dead"]
    ) == 1
    out = of_state(events, "handed_out")
    assert [event.get("attempt") for event in out] == [1, 1, 1, 1, 1, 2]
    assert len({event["consumer"] for event in out}) == 1
    finished = of_state(events, "finished")
    assert all(event["duration_us"] >= 2_000_000 for event in finished)
    assert of_state(events, "requeued")[0]["reason"] == "not now"
    assert of_state(events, "rejected")[0]["reason"] == "never"
    keyed = [event for event in events if event["state"] == "published"]
    assert len({event["key"] for event in keyed}) == 3
    for event in events:  # the same at each change of a message
        assert event.get("key") == by_message[event["msg"]][0].get("key")


def of_state(events: Iterable[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    return [event for event in events if event["state"] == state]


async def test_both_ends_of_a_session_report_what_they_know(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with pubsub_nodes(2, trace_dir=tmp_path, trace_settings=BARE) as (server, client):

        async def ticks(session: Session) -> None:
            for number in range(MESSAGES):
                await session.push(b"%d" % number)
            reserved = await session.reserve()
            reserved.skip("there is none")
            for number in range(MESSAGES):
                await session.push(b"%d" % number)
                await trio.sleep(0.1)

        server.sessions.serve("ticks", ticks)
        await until(lambda: bool(client.membership().verified_connection(server.peer_id)))
        got: list[int] = []
        gaps = 0
        async with client.sessions.open(server.peer_id, "ticks") as session:
            while True:
                try:
                    push = await session.receive()
                except SessionGapError:
                    gaps += 1
                    continue
                if push is None:
                    break
                got.append(push.seq)
                if len(got) == MESSAGES + 5:
                    await client.host.disconnect(server.peer_id)
        assert gaps == 1 and len(got) == 2 * MESSAGES
        last = 2 * MESSAGES + 2  # with the skipped one and the end
    at_server, at_client = (of_kind(events_in(tmp_path, node), "session") for node in (server, client))
    assert {event["session"] for event in at_server} == {event["session"] for event in at_client}
    assert {event["side"] for event in at_server} == {"in"} and {event["side"] for event in at_client} == {"out"}
    assert {event["peer"] for event in at_server} == {client.peer_id}
    for events in (at_server, at_client):
        counts = states(events)
        assert counts["opened"] == counts["resumed"] == counts["lost"] == counts["closed"] == 1, counts
        assert not counts["failed"] and not counts["reset"]
        assert events[0]["state"] == "opened" and events[-1]["state"] == "closed"
    sent = of_state(at_server, "sent")
    assert sum(event["count"] for event in sent) == last == max(event["position"] for event in sent)
    # The end itself need not be acknowledged: the client may be gone before.
    assert last - 1 <= sum(event["count"] for event in of_state(at_server, "acknowledged")) <= last
    received = of_state(at_client, "received")
    assert sum(event["count"] for event in received) == last == max(event["position"] for event in received)
    (skipped,) = of_state(at_client, "skipped")
    assert skipped["position"] == MESSAGES + 1 and skipped["count"] == 1 and "there is none" in skipped["reason"]


async def test_a_trace_that_begins_in_a_session_reports_what_comes_then(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with pubsub_nodes(2) as (server, client):
        go = trio.Event()

        async def ticks(session: Session) -> None:
            for number in range(10):
                await session.push(b"%d" % number)
            await go.wait()
            for number in range(7):
                await session.push(b"%d" % number)

        server.sessions.serve("ticks", ticks)
        await until(lambda: bool(client.membership().verified_connection(server.peer_id)))
        async with client.sessions.open(server.peer_id, "ticks") as session:
            for _ in range(10):
                await session.receive()
            await until(lambda: server.sessions.served()[0].core.sender.last_sent == 10)
            for node in (server, client):
                await node.tracer.start(tmp_path, BARE)
            go.set()
            async for _ in session:
                pass
        for node in (server, client):
            await node.tracer.stop("enough")
    at_server, at_client = (of_kind(events_in(tmp_path, node), "session") for node in (server, client))
    assert not states(at_server)["opened"] and not states(at_client)["opened"]
    assert sum(event["count"] for event in of_state(at_server, "sent")) == 8  # and the end
    assert sum(event["count"] for event in of_state(at_client, "received")) == 8


async def test_reliable_messages_and_streams_have_the_same_ids_and_bytes_at_both_ends(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with pubsub_nodes(2, trace_dir=tmp_path, trace_settings=BARE) as (ann, bob):
        taken: list[bytes] = []

        @bob.on_notify("note")
        async def note(notification: Notification) -> None:
            taken.append(notification.body)

        @bob.on_stream("echo")
        async def echo(stream: MessageStream) -> None:
            async for item in stream:
                await stream.send(item * 2)

        del note, echo
        await until(lambda: bool(ann.membership().verified_connection(bob.peer_id)))
        for number in range(5):
            receipt = await ann.send(bob.peer_id, "note", b"%d" % number, reliable=True)
            assert receipt is not None
            await receipt.wait()
        async with ann.stream(bob.peer_id, "echo") as stream:
            for number in range(1, 4):
                await stream.send(bytes(number * 1_000))
                assert await stream.receive() == bytes(number * 2_000)
    at_ann, at_bob = (events_in(tmp_path, node) for node in (ann, bob))
    sent = {event["msg"]: event["position"] for event in of_kind(at_ann, "delivery")}
    received = {event["msg"]: event["position"] for event in of_kind(at_bob, "delivery")}
    assert sent == received and sorted(sent.values()) == [1, 2, 3, 4, 5]
    ends = [of_kind(events, "stream")[-1] for events in (at_ann, at_bob)]
    assert [(end["bytes_in"], end["bytes_out"]) for end in ends] == [(12_000, 6_000), (6_000, 12_000)]


@pytest.mark.parametrize("rpcs", [False, True])
async def test_a_sample_is_of_the_same_messages_at_every_node_and_whole(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, rpcs: bool
) -> None:
    settings = TraceSettings(sample=0.4, rpcs=rpcs, snapshot_s=0, clock_s=0)
    async with pubsub_nodes(3, trace_dir=tmp_path, trace_settings=settings) as nodes:
        topics = await joined(nodes)
        async with topics[1].subscribe() as one, topics[2].subscribe() as other:
            for number in range(100):
                await topics[0].publish(b"message %d" % number)
            for messages in (one, other):
                await take(messages, 100)
        await nodes[0].queues.create("jobs")
        for number in range(100):
            await nodes[0].queues.publish("jobs", b"%d" % number)
        async with nodes[0].queues.consume("jobs", "work", max_in_flight=100) as jobs:
            for _ in range(100):
                await (await jobs.__anext__()).finish()
        await trio.sleep(3)
    below = round(0.4 * 2**32)
    found = [events_in(tmp_path, node) for node in nodes]
    assert {event["sample"] for events in found for event in of_kind(events, "node_start")} == {0.4}
    published = {event["msg"] for event in of_kind(found[0], "publish")}
    assert 15 <= len(published) <= 65
    for events in found[1:]:
        assert {event["msg"] for event in of_kind(events, "deliver")} == published
    for events in found:
        assert all(base64_crc(event) < below for event in of_kind(events, "publish", "deliver", "duplicate", "queue"))
        refs = [ref for event in of_kind(events, "send_rpc", "recv_rpc") for ref in event.get("messages", ())]
        assert bool(refs) is rpcs and {ref["msg"] for ref in refs} <= published
        assert of_kind(events, "join") and of_kind(events, "graft")
    queued = of_kind(found[0], "queue")
    for_each = Counter(event["msg"] for event in queued)
    assert set(for_each.values()) == {3} and 15 <= len(for_each) <= 65
    expected = [
        seq for seq in range(1, 101) if zlib.crc32(queue_message_id(nodes[0].peer_id, _only(queued), seq)) < below
    ]
    assert [event["position"] for event in of_state(queued, "finished")] == expected


def _only(events: Iterable[dict[str, Any]]) -> int:
    (partition,) = {int(event["partition"]) for event in events}
    return partition
