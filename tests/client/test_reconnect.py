"""What a program of a restarting daemon sees: each kind of feed, calls, sessions, streams, on both event loops."""

import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest

from dep2p.client import (
    Client,
    ClientServedSession,
    ControlError,
    DaemonUnreachableError,
    FeedEndedError,
    FeedInterrupted,
    FeedResumed,
    IncomingRequest,
    Lagged,
    Notification,
    Request,
)
from dep2p.errors import HandlerError, NotInFlightError, NotInRealmError, StreamClosedError, TopicNotFoundError
from dep2p.protocols.sessions.resume_token import SessionToken, encode_token
from dep2p.types import PeerId, peer_id_bytes
from tests.client.scripted_daemon import Answer, Call, Ending, ScriptedDaemon, refused, scripted_daemon
from tests.daemon.api.fake_node import ANN

Body = Callable[[ScriptedDaemon, Client], Awaitable[None]]
Run = Callable[..., None]
Opener = Callable[[Client], AbstractAsyncContextManager[AsyncIterator[object]]]
Fields = dict[str, object]
Lines = Callable[[int], list[Fields]]

REALM = "3f" * 32
HEAD: Fields = {"peer": ANN, "name": "x", "realm_id": REALM, "encoding": "base64"}


def text(body: bytes) -> str:
    return b64encode(body).decode()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dep2p.client"]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    def runner(body: Body, **bounds: float) -> None:
        options: dict[str, Any] = {**bounds}

        async def main() -> None:
            with anyio.fail_after(20):
                async with scripted_daemon(tmp_path / "s") as daemon, Client.open(tmp_path / "s", **options) as client:
                    await body(daemon, client)

        anyio.run(main, backend=request.param)

    return runner


def _message(number: int) -> Fields:
    mine: Fields = {"data": text(b"%d" % number), "headers": {}}
    return HEAD | mine


def _status(number: int) -> Fields:
    head: Fields = {"id": f"{number}", "realm": "r", "realm_id": REALM, "peer": ANN, "name": "x"}
    return head | {"state": "sending", "tries": 1, "reason": ""}


def _topic(number: int) -> list[Fields]:
    head: Fields = {"topic": "t", "sender": ANN, "seqno": number, "id": f"{number:032x}", "received_from": None}
    return [head | {"data": text(b"%d" % number), "encoding": "base64"}]


def _delivery(number: int) -> Fields:
    fields: Fields = {"id": f"{number:016}", "attempts": 1, "published_s": 1.0, "timeout_s": 60.0, "body": text(b"x")}
    rest: Fields = {"encoding": "base64", "key": "", "tags": [], "priority": 0, "headers": {}}
    return fields | rest


def _queue(number: int) -> list[Fields]:
    return [{"consumer": f"c{number}", "queue": "jobs", "channel": "w"}, _delivery(number)]


def _session(number: int) -> list[Fields]:
    return [{"event": "opened", "session": f"s{number}", "peer": ANN, "name": "x", "data": "", "encoding": "base64"}]


FEEDS: dict[str, tuple[Opener, Lines]] = {
    "subscribe": (lambda c: c.subscribe("t"), _topic),
    "listen": (lambda c: c.listen("x"), lambda n: [_message(n)]),
    "events": (lambda c: c.events(), lambda n: [{"id": n, "kind": "member_up", "time_s": 1.0, "peer": ANN}]),
    "watch_members": (
        lambda c: c.watch_members(),
        lambda n: [
            {"id": n, "kind": "member_up", "time_s": n, "peer": ANN, "realm_id": REALM, "fields": {"n": str(n)}}
        ],
    ),
    "outbox.statuses": (
        lambda c: c.outbox.statuses(),
        lambda n: [_status(n)],
    ),
    "reply": (lambda c: c.reply("x"), lambda n: [_message(n) | {"id": f"r{n}", "deadline_ms": 1_000}]),
    "accept": (lambda c: c.accept("x"), lambda n: [_message(n) | {"id": f"{n}"}]),
    "sessions.accept": (lambda c: c.sessions.accept("x"), _session),
    "queues.consume": (lambda c: c.queues.consume("jobs", "w"), _queue),
}
LOSSY = ("subscribe", "listen", "events", "watch_members", "outbox.statuses")
SILENT = ("reply", "accept", "queues.consume", "sessions.accept")
"""Feeds without items for interruptions."""


def feed_answers(daemon: ScriptedDaemon, lines: Lines) -> None:
    """Each opening of the feed gets the lines of its number, from 1."""
    opened = 0

    def answer(call: Call) -> Answer:
        nonlocal opened
        if call.method == "DELETE":
            return refused("D6002")
        opened += 1
        return Answer(lines=lines(opened))

    daemon.answer = answer


def is_entry(item: object) -> bool:
    """Whether the daemon sent it."""
    return not isinstance(item, Lagged)


@pytest.mark.parametrize("ending", ["cut", "stop", "end"])
@pytest.mark.parametrize("kind", FEEDS)
def test_every_feed_goes_on_over_a_restart(
    run: Run, kind: str, ending: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    opener, lines = FEEDS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, lines)
        changes: list[Lagged] = []
        client.watch_feeds(changes.append)
        async with opener(client) as feed:
            items = [await anext(feed)]
            await daemon.restart(ending)
            while len(items) == 1 or not is_entry(items[-1]):
                items.append(await anext(feed))
        lost, back = changes
        assert isinstance(lost, FeedInterrupted) and isinstance(back, FeedResumed)
        assert (lost.count, back.count, back.loses, back.feed) == (0, 0, kind in LOSSY, lost.feed)
        assert back.away_s > 0 and lost.reason
        shown = [item for item in items if isinstance(item, Lagged)]
        assert shown == ([] if kind in SILENT else changes)
        entries = [item for item in items if not isinstance(item, Lagged)]
        if isinstance(entries[0], ClientServedSession):
            assert entries[0].close_reason == "the daemon that served it went away"
        assert len(entries) == 2 and type(entries[0]) is type(entries[1]) and entries[0] != entries[1]

    with caplog.at_level(logging.INFO, "dep2p.client"):
        run(body)
    lost, back = lines_of(caplog)
    assert lost.startswith("waiting for the daemon at ") and "answers again, after " in back


NEVER = ("D1006", "D1008", "D3007", "D4003", "D5201")


@pytest.mark.parametrize(
    ("kind", "code"), [*((kind, "D4003") for kind in FEEDS), *(("listen", code) for code in NEVER)]
)
def test_what_can_never_succeed_ends_a_feed_with_one_exception(run: Run, kind: str, code: str) -> None:
    opener, lines = FEEDS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, lines)
        async with opener(client) as feed:
            await anext(feed)
            daemon.answer = lambda call: refused(code)
            await daemon.restart()
            for _ in range(2):  # an iterator that has ended stays so
                with pytest.raises(FeedEndedError) as ended:
                    while True:
                        await anext(feed)
                assert ended.value.code == "D3009"
                assert getattr(ended.value.reason, "code", code) == code

    run(body)


@pytest.mark.parametrize("ending", ["cut", "stop"])
@pytest.mark.parametrize("kind", FEEDS)
def test_without_reconnecting_both_ends_of_a_daemon_are_the_same_exception(
    run: Run, kind: str, ending: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    opener, lines = FEEDS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, lines)
        async with opener(client) as feed:
            await anext(feed)
            await daemon.go_away(ending)
            with pytest.raises(DaemonUnreachableError) as lost:
                await anext(feed)
            assert lost.value.code == ("D3001" if ending == "cut" else "D3006")

    run(body, reconnect_s=0)
    assert not lines_of(caplog)


@pytest.mark.parametrize("kind", FEEDS)
def test_a_feed_waits_no_longer_than_its_bound(run: Run, kind: str) -> None:
    opener, lines = FEEDS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, lines)
        async with opener(client) as feed:
            await anext(feed)
            await daemon.go_away()
            for _ in range(2):
                with pytest.raises(DaemonUnreachableError, match=r"waited for 0\.2 s: cannot reach the daemon"):
                    while True:
                        await anext(feed)

    run(body, reconnect_s=0.2)


@pytest.mark.parametrize("kind", FEEDS)
def test_a_first_opening_fails_at_once(run: Run, kind: str) -> None:
    opener, _lines = FEEDS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        await daemon.go_away()
        with pytest.raises(DaemonUnreachableError, match="no such socket"):
            async with opener(client):
                pass
        await daemon.start()
        daemon.answer = lambda call: refused("D4003")
        with pytest.raises(NotInRealmError):
            async with opener(client):
                pass

    run(body, call_reconnect_s=3_600.0)


@pytest.mark.parametrize("kind", FEEDS)
def test_a_reader_that_stops_waiting_may_wait_again(run: Run, kind: str) -> None:
    opener, lines = FEEDS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, lines)
        async with opener(client) as feed:
            await anext(feed)
            await daemon.go_away()
            with anyio.move_on_after(0.3) as waiting:
                while True:
                    await anext(feed)
            assert waiting.cancelled_caught
            await daemon.start()
            while not is_entry(await anext(feed)):
                pass

    run(body)


@pytest.mark.parametrize("kind", FEEDS)
def test_a_taken_name_is_waited_for_and_said_once(run: Run, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    opener, lines = FEEDS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, lines)
        async with opener(client) as feed:
            await anext(feed)
            again = daemon.answer
            refusals = iter([refused("D5012"), refused("D5012")])
            daemon.answer = lambda call: next(refusals, None) or again(call)
            await daemon.restart()
            while not is_entry(await anext(feed)):
                pass

    run(body)
    assert sum("waits: as the test says (D5012)" in line for line in lines_of(caplog)) == 1
    assert sum(line.endswith(" goes on") for line in lines_of(caplog)) == 1


def test_a_late_result_of_a_lost_delivery_settles_nothing(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, lambda number: [_queue(number)[0], _delivery(7)])  # the same message again
        async with client.queues.consume("jobs", "w", count=5) as consumer:
            before = await anext(consumer)
            await daemon.restart()
            after = await anext(consumer)
            assert (before.id, daemon.calls[-1].params["count"]) == (after.id, "4")
            daemon.answer = lambda call: Answer(fields={"refused": {}, "timeouts_s": {}})
            done = len(daemon.calls)
            for late in (before.finish, before.release, before.reject, before.requeue, before.touch):
                with pytest.raises(NotInFlightError, match="the connection to the daemon was lost"):
                    await late()
            assert len(daemon.calls) == done
            await after.finish(durable=True)
            assert daemon.calls[-1].path == "/v1/queue-consumers/c2/results"

    run(body)


@pytest.mark.parametrize("lost", [Answer(cut=True), refused("D3006"), refused("D5208")])
def test_a_result_whose_call_is_lost_says_that_the_message_is_not_held(run: Run, lost: Answer) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, _queue)
        async with client.queues.consume("jobs", "w") as consumer:
            message = await anext(consumer)
            daemon.answer = lambda call: lost
            with pytest.raises(NotInFlightError, match="the connection to the daemon was lost"):
                await message.finish()

    run(body)


def test_an_answer_to_a_request_that_went_with_the_daemon_is_too_late(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, FEEDS["reply"][1])
        async with client.reply("x") as requests:
            request = await anext(requests)
            assert isinstance(request, IncomingRequest)
            await daemon.go_away()
            for answer in (request.respond(b"x"), request.fail("x")):
                with pytest.raises(ControlError) as late:
                    await answer
                assert late.value.code == "D5011"

    run(body)


def test_the_callback_of_feeds_can_be_ended(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        feed_answers(daemon, _topic)
        changes: list[Lagged] = []
        end = client.watch_feeds(changes.append)
        async with client.subscribe("t") as messages:
            await anext(messages)
            end()
            end()
            await daemon.restart()
            assert isinstance(await anext(messages), FeedInterrupted)
        assert changes == []

    run(body)


# Calls


CALLS: dict[str, tuple[Callable[[Client], Awaitable[object]], Fields, bool]] = {
    "read": (lambda c: c.topics(), {"topics": []}, True),
    "idempotent request": (
        lambda c: c.request(ANN, "x", b"", idempotent=True),
        {"peer": ANN, "data": "", "encoding": "base64", "elapsed_ms": 1.0},
        True,
    ),
    "idempotent request to any member": (
        lambda c: c.request_any("x", b"", idempotent=True),
        {"peer": ANN, "data": "", "encoding": "base64", "elapsed_ms": 1.0},
        True,
    ),
    "set fields": (lambda c: c.set_fields({"name": "ann"}), {"realm": "team", "fields": {"name": "ann"}}, True),
    "receive with an attempt id": (
        lambda c: c.queues.simple_consumer("jobs", "w").receive(attempt_id="a1"),
        {"messages": []},
        True,
    ),
    "request": (
        lambda c: c.request(ANN, "x", b""),
        {"peer": ANN, "data": "", "encoding": "base64", "elapsed_ms": 1.0},
        False,
    ),
    "request to any member": (
        lambda c: c.request_any("x", b""),
        {"peer": ANN, "data": "", "encoding": "base64", "elapsed_ms": 1.0},
        False,
    ),
    "notify": (lambda c: c.notify(ANN, "x", b""), {"accepted": True}, False),
    "receive": (lambda c: c.queues.simple_consumer("jobs", "w").receive(), {"messages": []}, False),
    "delete": (lambda c: c.queues.delete_channel("jobs", "w"), {}, False),
}
"""A call, its answer, and whether it may be carried out twice."""


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_the_daemon_did_not_carry_out_is_made_again(run: Run, kind: str) -> None:
    call, fields, _twice = CALLS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        daemon.answer = lambda _call: Answer(fields=fields)
        await call(client)
        answers = iter([refused("D3006")])
        daemon.answer = lambda _call: next(answers, None) or Answer(fields=fields)
        await call(client)
        assert len(daemon.calls) == 3
        await daemon.go_away()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(daemon.start)
            await call(client)
        assert len(daemon.calls) == 4

    run(body, call_reconnect_s=10.0)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_may_have_been_carried_out_is_made_again_only_if_that_is_safe(run: Run, kind: str) -> None:
    call, fields, twice = CALLS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        answers = iter([Answer(cut=True)])
        daemon.answer = lambda _call: next(answers, None) or Answer(fields=fields)
        if twice:
            await call(client)
        else:
            with pytest.raises(DaemonUnreachableError, match="went away") as lost:
                await call(client)
            assert lost.value.was_sent
        assert len(daemon.calls) == (2 if twice else 1)

    run(body, call_reconnect_s=10.0)


@pytest.mark.parametrize("kind", CALLS)
def test_by_default_a_call_fails_at_once_and_says_whether_it_was_sent(run: Run, kind: str) -> None:
    call, _fields, _twice = CALLS[kind]

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        daemon.answer = lambda _call: Answer(cut=True)
        with pytest.raises(DaemonUnreachableError) as cut:
            await call(client)
        daemon.answer = lambda _call: refused("D3006")
        with pytest.raises(DaemonUnreachableError) as stopping:
            await call(client)
        await daemon.go_away()
        with pytest.raises(DaemonUnreachableError) as gone:
            await call(client)
        assert [each.value.was_sent for each in (cut, stopping, gone)] == [True, False, False]
        assert [each.value.code for each in (cut, stopping, gone)] == ["D3001", "D3006", "D3001"]
        assert len(daemon.calls) == 2

    run(body)


def test_a_call_is_made_again_no_longer_than_its_bound(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        daemon.answer = lambda _call: Answer(fields={"topics": []})
        await client.topics()
        await daemon.go_away()
        with pytest.raises(DaemonUnreachableError, match="no such socket"):
            await client.topics()

    run(body, call_reconnect_s=0.3)


@pytest.mark.parametrize("ends", ["cut", "D3006"])
def test_an_upload_is_never_made_again(run: Run, ends: str) -> None:
    async def some() -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        daemon.answer = lambda _call: Answer(cut=True) if ends == "cut" else refused("D3006")
        for upload in (client.publish_from("t", some()), client.queues.publish_from("jobs", some())):
            with pytest.raises(DaemonUnreachableError) as lost:
                await upload
            assert lost.value.was_sent
        assert len(daemon.calls) == 2

    run(body, call_reconnect_s=10.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
@pytest.mark.parametrize("option", ["reconnect_s", "call_reconnect_s"])
def test_a_wait_that_is_no_wait_is_refused(tmp_path: Path, option: str, seconds: float) -> None:
    async def main() -> None:
        options: dict[str, Any] = {option: seconds}
        with pytest.raises(ValueError):
            async with Client.open(tmp_path / "s", **options):
                pass

    anyio.run(main)


# Sessions


def token(handled: int) -> str:
    return encode_token(SessionToken(b"s" * 16, 1, handled, peer_id_bytes(PeerId(ANN)), "x"))


class SessionScript:
    """The daemon's side of an opened session with pushes 1 to 4."""

    def __init__(self, daemon: ScriptedDaemon) -> None:
        self.known = False
        self.openings: list[object] = []
        self.handled: list[object] = []
        daemon.answer = self.answer

    def answer(self, call: Call) -> Answer:
        if call.path == "/v1/sessions":
            self.known = True
            self.openings.append(call.json.get("token"))
            return Answer(201, {"id": "s1", "peer": ANN, "name": "x", "token": token(0)})
        if not self.known:
            return refused("D5105")
        if call.path.endswith("/take"):
            after = call.json.get("after", 0)
            assert isinstance(after, int)
            self.handled.append(after)
            if after == 4:
                return Answer(fields={"pushes": [], "token": None, "ended": True})
            pushes = [{"seq": n, "data": text(b"%d" % n), "encoding": "base64"} for n in range(after + 1, after + 3)]
            return Answer(fields={"pushes": pushes, "token": token(after + 2), "ended": False})
        if call.path.endswith("/requests"):
            return Answer(fields={"data": text(b"answer"), "encoding": "base64"})
        self.known = False
        return Answer(fields={"token": token(4)})


def test_an_opened_session_goes_on_at_its_place(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        script = SessionScript(daemon)
        changes: list[Lagged] = []
        client.watch_feeds(changes.append)
        seen: list[bytes] = []
        async with client.sessions.open(ANN, "x", b"first") as session:
            async for push in session:
                seen.append(push.body)
                if push.seq == 2:
                    await daemon.restart()
                    script.known = False
        assert seen == [b"1", b"2", b"3", b"4"]
        assert script.openings == [None, token(2)]
        assert "data" not in daemon.calls[-3].json or daemon.calls[-3].json["data"] == ""
        assert [type(each) for each in changes] == [FeedInterrupted, FeedResumed]

    run(body)


def test_a_request_in_a_session_that_the_daemon_forgot_attaches_first(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        script = SessionScript(daemon)
        async with client.sessions.open(ANN, "x") as session:
            script.known = False
            assert await session.request(b"?") == b"answer"
            assert script.openings == [None, token(0)]
            script.known = False
            await session.aclose()
        assert [call.method for call in daemon.calls[-3:]] == ["DELETE", "POST", "DELETE"]

    run(body)


@pytest.mark.parametrize("code", ["D5012", "D5106", "D4003"])
def test_a_session_that_cannot_be_continued_ends_with_the_one_exception(run: Run, code: str) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        SessionScript(daemon)
        with pytest.raises(FeedEndedError, match="cannot go on: as the test says"):
            async with client.sessions.open(ANN, "x") as session:
                daemon.answer = lambda call: refused("D5105" if call.path.endswith("/take") else code)
                await anext(session)

    run(body)


def test_a_session_without_reconnecting_ends_with_its_daemon(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        SessionScript(daemon)
        with pytest.raises(DaemonUnreachableError):
            async with client.sessions.open(ANN, "x") as session:
                await daemon.go_away()
                await anext(session)

    run(body, reconnect_s=0)


# Streams


@pytest.mark.parametrize("lost", [Answer(cut=True), refused("D6002"), refused("D3006")])
def test_a_stream_that_went_with_its_daemon_is_closed_both_ways(run: Run, lost: Answer) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        def answer(call: Call) -> Answer:
            if call.path != "/v1/streams":
                return lost
            return Answer(201, {"id": "1", "peer": ANN, "name": "x", "realm_id": REALM})

        daemon.answer = answer
        for use in ("send", "receive"):
            with pytest.raises(StreamClosedError, match="gone with the daemon"):
                async with client.stream(ANN, "x") as stream:
                    if use == "send":
                        await stream.send_eof()
                    else:
                        await anext(stream)

    run(body)


# Handles of topics


def handle_answers(daemon: ScriptedDaemon, on_hold: Callable[[], Answer]) -> None:
    published: Fields = {
        "id": "00",
        "sent_to": [ANN],
        "queued": False,
        "dropped": [],
        "seqno": 1,
        "local_subscriptions": 0,
    }

    def answer(call: Call) -> Answer:
        return on_hold() if call.path == "/v1/topics/t/handle" else Answer(fields=published)

    daemon.answer = answer


def joined() -> Answer:
    return Answer(lines=[{"topic": "t", "realm_id": REALM}])


@pytest.mark.parametrize("ending", ["cut", "stop", "end"])
def test_a_handle_of_a_topic_is_joined_again_under_its_name(run: Run, ending: Ending) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        handle_answers(daemon, joined)
        resumed = anyio.Event()
        client.watch_feeds(lambda change: resumed.set() if isinstance(change, FeedResumed) else None)
        topic = await client.join("t")
        await daemon.restart(ending)
        await resumed.wait()
        assert topic.is_joined and topic.realm_id == REALM
        await topic.publish(b"x")
        first, again, publish = daemon.calls
        assert first.params == again.params and publish.json["handle"] == first.params["handle"]
        await topic.leave()
        await topic.leave()
        assert not topic.is_joined
        with pytest.raises(TopicNotFoundError, match="'t' was left"):
            await topic.publish(b"x")

    run(body)


@pytest.mark.parametrize("code", NEVER)
def test_a_handle_that_can_never_be_joined_again_says_why_and_ends_nothing_else(
    run: Run, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        handle_answers(daemon, joined)
        topic = await client.join("t")
        handle_answers(daemon, lambda: refused(code))
        await daemon.restart()
        while topic.is_joined:  # noqa: ASYNC110 - a handle has no event of its own
            await anyio.sleep(0.01)
        with pytest.raises(
            TopicNotFoundError, match="no longer joined: the handle of topic 't' cannot go on: as the test says"
        ):
            await topic.publish(b"x")
        await topic.leave()
        assert await client.publish("t", b"x")

    run(body)
    assert any("the handle of topic 't' ends: " in line for line in lines_of(caplog))


def test_a_handle_without_reconnecting_ends_with_its_daemon(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        handle_answers(daemon, joined)
        topic = await client.join("t")
        await daemon.restart()
        while topic.is_joined:  # noqa: ASYNC110 - a handle has no event of its own
            await anyio.sleep(0.01)
        with pytest.raises(TopicNotFoundError, match="no longer joined"):
            topic.subscribe()

    run(body, reconnect_s=0)


def test_a_handle_that_is_refused_is_none(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        handle_answers(daemon, lambda: refused("D4003"))
        with pytest.raises(NotInRealmError):
            await client.join("t")
        handle_answers(daemon, lambda: Answer(lines=[]))  # the answer does not come
        with anyio.move_on_after(0.1) as waiting:
            await client.join("t")
        assert waiting.cancelled_caught
        handle_answers(daemon, joined)
        async with await client.join("t") as topic:
            assert topic.is_joined

    run(body)


# Confirmations


@pytest.mark.parametrize(
    ("refusals", "calls"),
    [
        ((), 1),
        ((refused("D3008"), refused("D3006"), Answer(cut=True)), 4),
        ((refused("D5011"),), 1),  # the daemon does not wait for it
    ],
)
def test_a_message_that_was_handled_is_confirmed_until_the_daemon_has_heard_it(
    run: Run, refusals: tuple[Answer, ...], calls: int
) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        left = list(refusals)

        def answer(call: Call) -> Answer:
            if call.method == "GET":
                return Answer(lines=[_message(1) | {"id": "m1"}, _message(2) | {"id": "m2"}])
            return left.pop(0) if left and call.path.endswith("m1") else Answer(202, {"accepted": True})

        daemon.answer = answer
        async with client.listen("x") as messages:
            await anext(messages)
            await anext(messages)
        confirmed = [call.path for call in daemon.calls if call.method == "POST"]
        assert confirmed == ["/v1/notifies/m1"] * calls + ["/v1/notifies/m2"]

    run(body)


def test_the_text_that_rejects_a_message_or_a_request_can_always_be_sent(run: Run) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        heard: list[str] = []

        def answer(call: Call) -> Answer:
            if call.method == "GET":
                return Answer(lines=[_message(1) | {"id": "m1"}])
            if call.path == "/v1/replies":
                return Answer(lines=[_message(1) | {"id": "r1", "deadline_ms": 10_000}])
            assert call.json == {"error": "a file named \\udcff " + "é" * 502}
            heard.append(call.path)
            return Answer(202, {"accepted": True})

        daemon.answer = answer

        @client.on_notify("x")
        async def orders(notification: Notification) -> None:
            raise HandlerError("a file named \udcff " + "é" * 1_000)

        @client.on_request("x")
        async def work(request: Request) -> bytes:
            raise HandlerError("a file named \udcff " + "é" * 1_000)

        while len(heard) < 2:  # noqa: ASYNC110 - the scripted daemon has no event for it
            await anyio.sleep(0.01)
        assert sorted(heard) == ["/v1/notifies/m1", "/v1/replies/r1"]
        assert orders is not None and work is not None

    run(body)
