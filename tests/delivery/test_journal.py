"""The journal of the outbox: rows that wait together share a commit, and no failure."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dep2p.delivery.journal import Journal
from dep2p.errors import StoreError, StoreFullError
from dep2p.storage.delivery_store import DeliveryBatch, InboxRow, OutboxRow, SendWindowRow, SqliteDeliveryStore

REALM, ANN = "a" * 64, "ann"


@asynccontextmanager
async def running(
    path: Path, store_type: type[SqliteDeliveryStore] = SqliteDeliveryStore
) -> AsyncGenerator[Journal, None]:
    journal = Journal(store_type(path))
    async with trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        yield journal
        nursery.cancel_scope.cancel()
    await journal.aclose()


async def test_a_row_that_the_store_cannot_write_fails_alone(tmp_path: Path) -> None:
    outcomes: dict[int, str] = {}
    calls: list[str] = []

    async with running(tmp_path / "outbox.db") as journal:

        async def add(number: int, body: Any) -> None:
            row = OutboxRow(REALM, ANN, number, 1_000, "news", "", b"head", 8, body)
            window = SendWindowRow(b"epoch678", number + 1)
            try:
                await journal.add(
                    row, window, lambda: calls.append(f"accept {number}"), lambda: calls.append(f"refuse {number}")
                )
                outcomes[number] = "ok"
            except StoreError as error:
                outcomes[number] = str(error)

        async with trio.open_nursery() as nursery:
            for number, body in enumerate([b"a", b"b", object(), b"c", ["x"], b"d"], 1):
                nursery.start_soon(add, number, body)
        await add(7, b"after")
        stored = await journal.load(REALM)
    assert sorted(row.number for row in stored.rows) == [1, 2, 4, 6, 7]
    assert [number for number, outcome in sorted(outcomes.items()) if outcome != "ok"] == [3, 5]
    assert "this message cannot be written" in outcomes[3]
    assert sorted(calls) == ["accept 1", "accept 2", "accept 4", "accept 6", "accept 7", "refuse 3", "refuse 5"]


def _row(number: int) -> OutboxRow:
    return OutboxRow(REALM, ANN, number, 1_000, "news", "", b"head", 8, b"body")


async def _add(journal: Journal, number: int) -> None:
    await journal.add(_row(number), SendWindowRow(b"epoch678", number + 1), lambda: None, lambda: None)


async def test_what_was_handled_and_cannot_be_written_stops_no_message(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with running(tmp_path / "outbox.db") as journal:
            journal.note_soon(REALM, ANN, InboxRow(b"epoch678", 1, [(1 << 40, 1 << 41)], []))
            await _add(journal, 1)
            assert await journal.note_handled(REALM, "bob", InboxRow(b"epoch678", 1, [(3, 4)], []))
            stored = await journal.load(REALM)
    assert [row.number for row in stored.rows] == [1]
    assert list(stored.inboxes) == ["bob"]


class _TakesNoMessages(SqliteDeliveryStore):
    is_full = False

    def commit(self, batch: DeliveryBatch) -> None:
        if self.is_full and batch.added:
            raise StoreFullError("no room")
        super().commit(batch)


async def test_a_full_disk_refuses_messages_and_still_takes_their_removal(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with running(tmp_path / "outbox.db", _TakesNoMessages) as journal:
            store = journal.store
            assert isinstance(store, _TakesNoMessages)
            await _add(journal, 1)
            store.is_full = True
            journal.remove(REALM, ANN, 1)
            async with trio.open_nursery() as nursery:
                for number in (2, 3):

                    async def refused(number: int = number) -> None:
                        with pytest.raises(StoreFullError, match="no room"):
                            await _add(journal, number)

                    nursery.start_soon(refused)
            await journal.flush()
            assert (await journal.load(REALM)).rows == []
            store.is_full = False
            await _add(journal, 4)
            assert [row.number for row in (await journal.load(REALM)).rows] == [4]
