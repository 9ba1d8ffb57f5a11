"""Publishing inside the app's own transaction: what commits becomes one message, what does not becomes none."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from dep2p.errors import QueueFullError, StoreError, StoreLockedError, StreamClosedError
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.access import Rights
from dep2p.queues.api.outbox import OutboxRelay
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.service.realm_queues import LocalQueues
from dep2p.storage.app_outbox import OutboxDatabase, create_outbox, publish_in
from tests.messaging.nodes import REALM
from tests.queues.nodes import exported, queue_sides, running_engine


class Shaky(LocalQueues):
    """Fails as told: before or after a batch was taken."""

    def __init__(self, engine: QueueEngine, rights: Rights) -> None:
        super().__init__(StoreOwnership(engine), rights, REALM)
        self.before: list[Exception] = []
        self.after: list[Exception] = []
        self.numbers: list[int] = []

    async def publish_sequenced(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        self.numbers.append(publisher[1])
        if self.before:
            raise self.before.pop(0)
        points = await super().publish_sequenced(name, messages, publisher, destination)
        if self.after:
            raise self.after.pop(0)
        return points


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
            publish_in(self.db, queue, b"%d" % number, key=key, headers={"n": number})
        if commit:
            self.db.commit()
        else:
            self.db.rollback()

    def left(self) -> list[tuple[Any, ...]]:
        return self.db.execute("select id, queue, error from dep2p_outbox order by id").fetchall()

    def close(self) -> None:
        self.db.close()


@pytest.fixture
def app(tmp_path: Path) -> Any:
    made = App(tmp_path / "app.db")
    yield made
    made.close()


async def _bodies(queues: Queues, queue: str = "jobs") -> list[int]:
    return [int(message.body) for message in await exported(queues, queue)]


async def test_what_commits_becomes_a_message_and_what_is_rolled_back_does_not(app: App) -> None:
    async with queue_sides() as (broker, asker):
        for queues in (broker.queues, asker.at(broker)):
            await queues.create("jobs")
            async with queues.relay(app.path, poll_s=0.01) as relay:
                first = len(await _bodies(queues))
                app.order(first + 1, first + 2)
                app.order(first + 3, commit=False)
                app.order(first + 3)
                with trio.fail_after(30):
                    await relay.flush()
                assert relay.counts["published"] == 3
                assert app.left() == []
        assert await _bodies(broker.queues) == [1, 2, 3, 4, 5, 6]
        (message, *_) = await broker.queues.peek("jobs")
        assert (message.key, message.headers) == ("k", {"n": 1})


async def test_the_relay_finds_out_by_itself(app: App) -> None:
    async with queue_sides(1) as (broker,):
        await broker.queues.create("jobs")
        async with broker.queues.relay(app.path, poll_s=0.01):
            app.order(1)
            async with broker.queues.consume("jobs", "c") as messages:
                with trio.fail_after(30):
                    assert (await anext(messages)).body == b"1"


async def test_what_was_published_and_not_removed_is_not_published_twice(app: App) -> None:
    """The crash between the two steps, as the next relay sees it."""
    async with queue_sides(1) as (broker,):
        queues = Shaky(broker.engine, broker.rights)
        await queues.create("jobs")
        app.order(*range(1, 31))
        queues.after = [StreamClosedError("the process dies here")]
        async with queues.relay(app.path, poll_s=0.01) as relay:
            with trio.fail_after(30):
                while not relay.problem:  # noqa: ASYNC110  (there is no event for it)
                    await trio.sleep(0.01)
        assert len(app.left()) == 30
        assert await _bodies(queues) == list(range(1, 31))
        app.order(31)
        async with queues.relay(app.path, poll_s=0.01) as relay:
            with trio.fail_after(30):
                await relay.flush()
        assert await _bodies(queues) == list(range(1, 32))
        assert queues.numbers == [1, 1, 31]
        assert broker.engine.registry.find(REALM, "jobs").counts["deduplicated"] == 1
        assert app.left() == []


async def test_a_busy_or_lost_place_is_tried_again(app: App) -> None:
    async with queue_sides(1) as (broker,):
        queues = Shaky(broker.engine, broker.rights)
        await queues.create("jobs")
        queues.before = [QueueFullError("full"), StreamClosedError("away"), StoreError("ill")]
        app.order(1, 2, 3)
        async with queues.relay(app.path, poll_s=0.01) as relay:
            with trio.fail_after(30):
                await relay.flush()
            assert relay.counts["failed"] == 3
            assert relay.problem == ""
        assert await _bodies(queues) == [1, 2, 3]
        assert queues.numbers == [1, 1, 1, 1]


async def test_a_refused_message_stays_with_its_error_and_the_others_go_on(app: App) -> None:
    async with queue_sides(1) as (broker,):
        await broker.queues.create("jobs", {"message_bytes_max": 3})
        app.order(1, 2, 30_000, 4)
        app.order(5, queue="nothing")
        async with broker.queues.relay(app.path, poll_s=0.01) as relay:
            with trio.fail_after(30):
                await relay.flush()
            assert relay.counts["refused"] == 2
            assert await _bodies(broker.queues) == [1, 2, 4]
            (large, missing) = app.left()
            assert "MessageTooLargeError" in large[2]
            assert "QueueNotFoundError" in missing[2]
            # Mended, it goes.
            await broker.queues.create("nothing")
            app.db.execute("update dep2p_outbox set error = null where queue = 'nothing'")
            app.db.commit()
            with trio.fail_after(30):
                await relay.flush()
            assert await _bodies(broker.queues, "nothing") == [5]


async def test_only_one_relay_at_a_time_publishes(app: App) -> None:
    async with queue_sides(1) as (broker,):
        await broker.queues.create("jobs")
        async with (
            broker.queues.relay(app.path, poll_s=0.01) as old,
            broker.queues.relay(app.path, poll_s=0.01) as new,
        ):
            for number in range(1, 40):
                app.order(number)
            with trio.fail_after(30):
                await new.flush()
                while "taken the outbox" not in old.problem and old.counts["published"]:
                    app.order(1_000 + old.counts["published"])
                    await trio.sleep(0.01)
        bodies = await _bodies(broker.queues)
        assert len(bodies) == len(set(bodies))
        assert [number for number in bodies if number < 1_000] == list(range(1, 40))


async def test_each_flush_ends_also_when_another_relay_has_the_outbox(app: App) -> None:
    async with queue_sides(1) as (broker,):
        await broker.queues.create("jobs")
        with trio.fail_after(30):
            async with (
                broker.queues.relay(app.path, poll_s=0.01) as old,
                broker.queues.relay(app.path, poll_s=3_600) as new,
            ):
                await new.flush()  # it has found the outbox empty, and looks again when it is told to
                app.order(1)
                with pytest.raises(StoreLockedError):
                    await old.flush()
                with pytest.raises(StoreLockedError):
                    await old.flush()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(new.flush)
                    nursery.start_soon(new.flush)
        assert await _bodies(broker.queues) == [1]


async def test_a_flush_ends_with_the_block_of_its_relay(app: App) -> None:
    async with queue_sides(1) as (broker,):
        queues = Shaky(broker.engine, broker.rights)
        await queues.create("jobs")
        queues.before = [QueueFullError("full") for _ in range(100)]

        async def flush(relay: OutboxRelay) -> None:
            with pytest.raises(StreamClosedError, match="left in the outbox"):
                await relay.flush()

        app.order(1)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                async with queues.relay(app.path, poll_s=0.01) as relay:
                    nursery.start_soon(flush, relay)
                    while not relay.problem:  # noqa: ASYNC110  (there is no event for it)
                        await trio.sleep(0.01)
            await flush(relay)
        assert [number for number, *_ in app.left()] == [1]


async def test_a_relay_that_was_replaced_does_not_take_the_outbox_back_when_it_connects_anew(app: App) -> None:
    old, new = OutboxDatabase(app.path, "dep2p_outbox"), OutboxDatabase(app.path, "dep2p_outbox")
    old.open()
    new.open()
    old.close()
    old.open()
    app.order(1)
    with pytest.raises(StoreLockedError):
        old.step(None)
    batch = new.step(None)
    assert batch is not None and len(batch.ids) == 1
    old.close()
    new.close()
    new.open()  # also the relay that has the outbox may connect anew
    assert new.step(batch) is None
    new.close()


async def test_an_outbox_of_another_name(app: App) -> None:
    create_outbox(app.db, table="mail")
    publish_in(app.db, "jobs", b"7", table="mail")
    app.db.commit()
    async with queue_sides(1) as (broker,):
        await broker.queues.create("jobs")
        async with broker.queues.relay(app.path, table="mail", poll_s=0.01) as relay:
            with trio.fail_after(30):
                await relay.flush()
        assert await _bodies(broker.queues) == [7]


class _Async:
    """A stand-in for an asynchronous connection."""

    async def execute(self, *_: object) -> None: ...


_Async.__module__ = "psycopg"


@pytest.mark.parametrize("connection", [object(), "app.db", _Async()])
def test_other_connections_are_refused(connection: Any) -> None:
    with pytest.raises(ValueError, match="connection"):
        publish_in(connection, "jobs", b"x")
    with pytest.raises(ValueError, match="connection"):
        create_outbox(connection)


@pytest.mark.parametrize("table", ["", "Orders", "a;drop table x", "1a", "a" * 41, "a b"])
def test_other_table_names_are_refused(app: App, table: str) -> None:
    with pytest.raises(ValueError, match="table"):
        publish_in(app.db, "jobs", b"x", table=table)
    with pytest.raises(ValueError, match="table"):
        create_outbox(app.db, table=table)


def test_a_malformed_message_is_refused_before_it_is_written(app: App) -> None:
    with pytest.raises(ValueError, match="name"):
        publish_in(app.db, "no such name!", b"x")
    with pytest.raises(ValueError, match="attributes"):
        publish_in(app.db, "jobs", b"x", headers={"h": "y" * 20_000})
    assert app.left() == []


async def test_a_database_that_cannot_be_opened_is_told_at_once(tmp_path: Path) -> None:
    async with running_engine() as engine:
        with pytest.raises(sqlite3.OperationalError):
            async with LocalQueues(StoreOwnership(engine), Rights.__new__(Rights), "").relay(
                tmp_path / "no" / "app.db"
            ):
                pass
        with pytest.raises(ValueError, match="poll_s"):
            LocalQueues(StoreOwnership(engine), Rights.__new__(Rights), "").relay(tmp_path / "app.db", poll_s=0)
