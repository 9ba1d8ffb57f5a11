"""The outbox on disk: many rows in one statement are the same rows."""

from pathlib import Path

import pytest

from dep2p.storage.delivery_store import DeliveryBatch, OutboxRow, SendWindowRow, SqliteDeliveryStore

REALM, ANN, BOB = "a" * 64, "ann", "bob"


def row(peer: str, number: int) -> OutboxRow:
    return OutboxRow(REALM, peer, number, 1_000 + number, "news", "", b"head", 8, b"body %d" % number)


def kept(path: Path) -> list[OutboxRow]:
    store = SqliteDeliveryStore(path)
    try:
        return store.load(REALM).rows
    finally:
        store.close()


@pytest.mark.parametrize("count", [1, 3, 4, 5, 63, 64, 65, 150, 341])
def test_as_many_rows_as_are_added_are_there(tmp_path: Path, count: int) -> None:
    store = SqliteDeliveryStore(tmp_path / "outbox.db")
    rows = [row(ANN if n % 3 else BOB, n) for n in range(1, count + 1)]
    store.commit(DeliveryBatch(added=rows, windows={(REALM, ANN): SendWindowRow(b"epoch678", count + 1)}))
    store.close()
    assert sorted(kept(tmp_path / "outbox.db")) == sorted(rows)


def test_only_what_was_removed_is_gone(tmp_path: Path) -> None:
    store = SqliteDeliveryStore(tmp_path / "outbox.db")
    rows = [row(peer, n) for peer in (ANN, BOB) for n in range(1, 101)]
    store.commit(DeliveryBatch(added=rows))
    gone = [(ANN, n) for n in (1, 2, 3, 50, 99, 100)] + [(BOB, n) for n in range(20, 60)] + [(BOB, 7)]
    store.commit(DeliveryBatch(removed=[(REALM, peer, n) for peer, n in reversed(gone)] + [(REALM, ANN, 5_000)]))
    store.close()
    assert [each for each in rows if (each.peer, each.number) not in gone] == kept(tmp_path / "outbox.db")


def test_a_number_that_is_removed_and_added_in_one_step_is_there(tmp_path: Path) -> None:
    store = SqliteDeliveryStore(tmp_path / "outbox.db")
    store.commit(DeliveryBatch(added=[row(ANN, 1)]))
    anew = row(ANN, 1)._replace(body=b"anew")
    store.commit(DeliveryBatch(removed=[(REALM, ANN, 1)], added=[anew]))
    store.close()
    assert kept(tmp_path / "outbox.db") == [anew]
