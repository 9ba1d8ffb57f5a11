"""The client's relay of an app's outbox: what commits becomes one message, over lost answers and a daemon's restart."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dep2p.client import Client, ClientOutboxRelay, StoreLockedError, StreamClosedError, create_outbox, publish_in
from tests.client.queues.running import Run, ScriptedRun
from tests.client.queues.test_producer import Broker
from tests.client.scripted_daemon import Answer, Call, ScriptedDaemon, refused


class App:
    """An app's database: a table of orders, and the outbox."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = sqlite3.connect(path)
        self.db.execute("pragma journal_mode=wal")
        self.db.execute("create table orders (number integer primary key)")
        create_outbox(self.db)
        self.db.commit()

    def order(self, *numbers: int, key: str = "k", commit: bool = True, queue: str = "jobs") -> None:
        """In one transaction."""
        for number in numbers:
            self.db.execute("insert into orders values (?)", (number,))
            headers = {"n": number, "raw": b"\x00\xff", "many": [1, 2]}
            publish_in(self.db, queue, b"%d" % number, key=key, headers=headers, tags=["t"], priority=3)
        if commit:
            self.db.commit()
        else:
            self.db.rollback()

    def left(self) -> list[tuple[int, str, str | None]]:
        found: list[tuple[int, str, str | None]] = self.db.execute(
            "select id, queue, error from dep2p_outbox order by id"
        ).fetchall()
        return found


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = App(tmp_path / "app.db")
    yield made
    made.db.close()


def test_what_commits_becomes_a_message_with_its_attributes_and_what_is_rolled_back_none(run: Run, app: App) -> None:
    async def body(client: Client) -> None:
        jobs = await client.queues.create("jobs")
        app.order(1, 2)
        app.order(3, commit=False)
        async with client.queues.relay(app.path, poll_s=3_600) as relay:
            await relay.flush()
            jobs.publish_in(app.db, b"4", key="k")
            app.db.commit()
            await relay.flush()
            assert (relay.counts["published"], relay.problem) == (3, "")
        found = await jobs_of(client)
        assert found == [b"1", b"2", b"4"]
        first = (await client.queues.peek("jobs", count=1))[0]
        assert (first.key, first.tags, first.priority) == ("k", ("t",), 3)
        assert dict(first.headers) == {"n": 1, "raw": b"\x00\xff", "many": [1, 2]}
        assert app.left() == []

    run(body)


async def jobs_of(client: Client) -> list[bytes]:
    async with client.queues.export("jobs") as messages:
        return [message.body async for message in messages]


def test_the_relay_finds_out_by_itself_and_by_a_wake(run: Run, app: App) -> None:
    async def body(client: Client) -> None:
        await client.queues.create("jobs")
        async with client.queues.relay(app.path, poll_s=0.01), client.queues.consume("jobs", "w") as messages:
            app.order(1)
            await (await anext(messages)).finish()
        async with client.queues.relay(app.path, poll_s=3_600) as relay, client.queues.consume("jobs", "w") as messages:
            await relay.flush()
            app.order(2)
            relay.wake()
            await (await anext(messages)).finish()

    run(body)


def test_a_refused_message_stays_with_its_error_and_the_others_go_on(run: Run, app: App) -> None:
    async def body(client: Client) -> None:
        await client.queues.create("jobs")
        app.order(1)
        app.order(2, queue="nothing")
        app.order(3)
        async with client.queues.relay(app.path) as relay:
            await relay.flush()
            assert (relay.counts["published"], relay.counts["refused"]) == (2, 1)
        assert await jobs_of(client) == [b"1", b"3"]
        ((_id, queue, error),) = app.left()
        assert queue == "nothing" and error is not None and error.startswith("QueueNotFoundError")

    run(body)


def test_only_one_relay_at_a_time_publishes_and_errors_come_out_as_they_are(run: Run, app: App) -> None:
    async def body(client: Client) -> None:
        await client.queues.create("jobs")
        async with (
            client.queues.relay(app.path, poll_s=0.01) as first,
            client.queues.relay(app.path, poll_s=3_600) as second,
        ):
            await second.flush()  # it has found the outbox empty, and looks again when it is told to
            app.order(1)
            await until(first)
            async with anyio.create_task_group() as tasks:  # each call of flush ends
                tasks.start_soon(second.flush)
                tasks.start_soon(second.flush)
            with pytest.raises(StoreLockedError):
                await first.flush()
        assert await jobs_of(client) == [b"1"]
        with pytest.raises(StreamClosedError, match="mine"):
            async with client.queues.relay(app.path):
                raise StreamClosedError("mine")
        with pytest.raises(sqlite3.OperationalError):
            async with client.queues.relay(app.path / "nothing" / "app.db"):
                raise AssertionError
        with pytest.raises(ValueError, match="poll_s"):
            client.queues.relay(app.path, poll_s=0.0)

    run(body)


async def until(relay: ClientOutboxRelay) -> None:
    """Wait until the relay has found that another one has its outbox."""
    while not relay.problem:  # noqa: ASYNC110 - it has no event
        await anyio.sleep(0.005)
    assert "another relay" in relay.problem


def test_what_was_published_without_an_answer_is_published_once(scripted: ScriptedRun, app: App) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        broker.faults = [broker.lose_answer, lambda call: refused("D5205")]
        app.order(1, 2)
        async with client.queues.relay(app.path) as relay:
            await relay.flush()
            assert (relay.counts["failed"], relay.counts["published"]) == (2, 2)
        app.order(3)
        broker.faults = [broker.lose_answer]
        async with client.queues.relay(app.path) as relay:
            while not relay.problem:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.005)
        async with client.queues.relay(app.path) as relay:  # after a crash of the first one
            await relay.flush()
        assert len(broker.taken) == 3
        assert len({each["publisher"] for each in broker.batches}) == 1

    scripted(body)


@pytest.mark.parametrize("ids", [None, "all", [7], ["no id"]])
def test_an_answer_of_another_version_is_no_refusal(scripted: ScriptedRun, app: App, ids: object) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)

        def unreadable(call: Call) -> Answer:
            broker.take(call)
            return Answer(201, fields={"ids": ids})

        broker.faults = [unreadable]
        app.order(1, 2)
        async with client.queues.relay(app.path) as relay:
            await relay.flush()
            assert (relay.counts["failed"], relay.counts["published"], relay.counts["refused"]) == (1, 2, 0)
        assert len(broker.taken) == 2

    scripted(body)


def test_messages_wait_in_the_outbox_while_the_daemon_is_away(scripted: ScriptedRun, app: App) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        async with client.queues.relay(app.path) as relay:
            await daemon.go_away()
            app.order(1)
            relay.wake()
            while not relay.problem:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.005)
            assert "DaemonUnreachableError" in relay.problem
            await daemon.start()
            await relay.flush()
            assert relay.problem == ""
        assert len(broker.taken) == 1

    scripted(body)


def test_a_flush_ends_with_the_block_of_its_relay(scripted: ScriptedRun, app: App) -> None:
    async def flush(relay: ClientOutboxRelay) -> None:
        with pytest.raises(StreamClosedError, match="left in the outbox"):
            await relay.flush()

    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        await daemon.go_away()
        app.order(1)
        async with anyio.create_task_group() as tasks:
            async with client.queues.relay(app.path) as relay:
                tasks.start_soon(flush, relay)
                while not relay.problem:  # noqa: ASYNC110 - it has no event
                    await anyio.sleep(0.005)
            await flush(relay)
        assert len(app.left()) == 1

    scripted(body)


def test_a_batch_for_a_queue_on_several_nodes_has_a_destination(scripted: ScriptedRun, app: App) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)

        def answer(call: Call) -> Answer:
            if call.path.endswith("/publishes") and "destination" not in call.json:
                return refused("D5210")
            return broker.answer(call)

        daemon.answer = answer
        app.order(1)
        async with client.queues.relay(app.path) as relay:
            await relay.flush()
        assert [each["destination"] for each in broker.batches] == ["1 node shard"]
        (asked,) = [call.json for call in daemon.calls if call.path.endswith("/destinations")]
        assert asked == {"keys": ["k"]}

    scripted(body)
