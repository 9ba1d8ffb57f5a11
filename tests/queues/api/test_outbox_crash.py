"""The outbox under kill -9, and on PostgreSQL: every committed row is one message, no other is."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from dep2p.queues.access import Access, Rights
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.service.realm_queues import LocalQueues
from dep2p.storage.app_outbox import create_outbox, publish_in
from dep2p.storage.sqlite.store import SqliteStore
from tests.queues.nodes import exported
from tests.services import servers

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ROUNDS = int(os.environ.get("DEP2P_CRASH_ROUNDS", "4"))

_APP = """
import random, sqlite3, sys
import trio
from dep2p.queues.access import Access, Rights
from dep2p.queues.broker.engine import QueueEngine
from dep2p.storage.app_outbox import publish_in
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.service.realm_queues import LocalQueues
from dep2p.storage.sqlite.store import SqliteStore
from pathlib import Path

async def main(address, store, seed):
    rng = random.Random(seed)
    engine = QueueEngine(SqliteStore(Path(store)))
    await engine.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        queues = LocalQueues(StoreOwnership(engine), Rights(Access(), "members"), "")
        await queues.create("jobs")
        async with queues.relay(address, poll_s=0.001):
            await trio.to_thread.run_sync(work, address, rng)

def work(address, rng):
    if address.startswith("postgres"):
        import psycopg
        db, mark = psycopg.connect(address), "%s"
    else:
        db, mark = sqlite3.connect(address, timeout=30), "?"
    print("began", flush=True)
    while True:
        number = rng.randrange(1 << 40)
        for at in range(rng.randrange(1, 6)):
            db.execute(f"insert into orders values ({mark})", (number + at,))
            publish_in(db, "jobs", b"%d" % (number + at), key=str(number % 7))
        if rng.random() < 0.3:
            db.rollback()
        else:
            db.commit()

trio.run(main, *sys.argv[1:4])
"""


def _crash_once(address: str, store: Path, seed: int, pause_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _APP, address, str(store), str(seed)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    time.sleep(pause_s)  # not to wait for anything: where it dies is random
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


async def _drained(address: str, store: Path) -> list[int]:
    """Everything that is in the queue when the outbox is empty."""
    engine = QueueEngine(SqliteStore(store))
    await engine.open()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            queues = LocalQueues(StoreOwnership(engine), Rights(Access(), "members"), "")
            async with queues.relay(address, poll_s=0.01) as relay:
                with trio.fail_after(120):
                    await relay.flush()
                assert relay.counts["refused"] == 0
            found = [int(message.body) for message in await exported(queues, "jobs")]
            nursery.cancel_scope.cancel()
    finally:
        await engine.aclose()
    return found


def test_kill_9_neither_loses_nor_repeats_what_was_committed(tmp_path: Path) -> None:
    address = str(tmp_path / "app.db")
    with sqlite3.connect(address) as db:
        db.execute("pragma journal_mode=wal")
        db.execute("create table orders (number integer primary key)")
        create_outbox(db)
    rng = random.Random(7)
    for number in range(ROUNDS):
        _crash_once(address, tmp_path / "queues.db", number, rng.uniform(0.05, 0.5))
    messages = trio.run(_drained, address, tmp_path / "queues.db")
    with sqlite3.connect(address) as db:
        orders = [row[0] for row in db.execute("select number from orders")]
        assert db.execute("select count(*) from dep2p_outbox").fetchone() == (0,)
    assert len(orders) > 10 * ROUNDS
    assert sorted(messages) == sorted(orders)


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    server = servers.postgres()
    server.start()
    yield server.url
    server.remove()


def test_kill_9_neither_loses_nor_repeats_what_was_committed_to_postgresql(postgres: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(postgres) as db:
        db.execute("create table orders (number bigint primary key)")
        create_outbox(db)
    rng = random.Random(8)
    for number in range(ROUNDS):
        _crash_once(postgres, tmp_path / "queues.db", number, rng.uniform(0.05, 0.5))
    messages = trio.run(_drained, postgres, tmp_path / "queues.db")
    with psycopg.connect(postgres) as db:
        orders = [row[0] for row in db.execute("select number from orders")]
        assert db.execute("select count(*) from dep2p_outbox").fetchone() == (0,)
    assert len(orders) > 10 * ROUNDS
    assert sorted(messages) == sorted(orders)


def test_a_transaction_of_postgresql_that_is_rolled_back_publishes_nothing(postgres: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(postgres) as db:
        create_outbox(db, table="other")
        db.commit()
        publish_in(db, "jobs", b"1", table="other")
        db.rollback()
        publish_in(db, "jobs", b"2", table="other", headers={"n": 2})
        db.commit()

    async def run() -> list[int]:
        engine = QueueEngine(SqliteStore(tmp_path / "queues.db"))
        await engine.open()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
                queues = LocalQueues(StoreOwnership(engine), Rights(Access(), "members"), "")
                await queues.create("jobs")
                async with queues.relay(postgres, table="other", poll_s=0.01) as relay:
                    with trio.fail_after(60):
                        await relay.flush()
                found = [int(message.body) for message in await exported(queues, "jobs")]
                nursery.cancel_scope.cancel()
        finally:
            await engine.aclose()
        return found

    assert trio.run(run) == [2]
