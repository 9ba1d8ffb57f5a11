"""Files that were written before the layout by feature open as before: stores, an outbox, realm, records and identity.

`stored/` holds small files of the state of November 2026 (schema 4 of the queues, with a write-ahead log as a crash
leaves it), and `expected.json` what the code of that day read from them.
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from dep2p.identity import Identity
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.protocols.realm.member_record import open_envelope
from dep2p.queues.access import Access
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.types import SubscribeOptions
from dep2p.realm.credentials import Realm
from dep2p.realm.records_file import load_records
from dep2p.storage.delivery_store import SqliteDeliveryStore
from dep2p.storage.sqlite.store import SqliteStore

STORED = Path(__file__).with_name("stored")
EXPECTED: dict[str, Any] = json.loads((STORED / "expected.json").read_text())


def as_json(value: Any) -> Any:
    """A row of whatever kind in the form in which `expected.json` has it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        fields: dict[Any, Any] = {**value}
        return {str(key): as_json(each) for key, each in fields.items()}
    if isinstance(value, list | tuple):
        items: list[Any] = [*value]
        return [as_json(each) for each in items]
    names = getattr(value, "__dataclass_fields__", None) or getattr(value, "__slots__", None)
    if names and not isinstance(value, str | int | float):
        return [as_json(getattr(value, name)) for name in names]
    return value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files, unpacked where they may be written to."""
    for packed in STORED.glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    for name in ("identity.key", "team.realm", "members.cbor"):
        shutil.copyfile(STORED / name, tmp_path / name)
        (tmp_path / name).chmod(0o600)
    return tmp_path


def test_every_row_of_the_queues_file_is_read_as_before(folder: Path) -> None:
    store = SqliteStore(folder / "queues.sqlite")
    store.open()
    partitions = range(1, 16)
    assert as_json(dict(sorted(store.load().items()))) == EXPECTED["definitions"]
    assert as_json([store.load_partition(each) for each in partitions]) == EXPECTED["partitions"]
    rows = [list(store.scan(each, 1, items_max=100, bytes_max=1 << 20)) for each in partitions]
    assert as_json(rows) == EXPECTED["messages"]
    dead = [list(store.scan_dead_letters(each, 0, items_max=10)) for each in range(1, 6)]
    assert as_json(dead) == EXPECTED["dead"]
    store.close()


async def test_the_queues_work_as_before(folder: Path) -> None:
    """A local queue, an ordered one, and a distributed one with its route table and its pending deletions."""
    engine = QueueEngine(SqliteStore(folder / "queues.sqlite"))
    await engine.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        (namespace,) = engine.namespaces()
        for name in engine.queue_names(namespace):
            queue = await engine.loaded(namespace, name)
            distribution = [queue.locations, queue.pending_expansion, queue.serves, queue.made_by]
            assert as_json(distribution) == EXPECTED[f"distribution {name}"]
            info, before = await engine.inspector.info(namespace, name, Access().as_reply()), EXPECTED[f"info {name}"]
            assert reply_fields(info)["options"] == before["options"]
            fixed = ("name", "filter", "paused", "exclusive")
            for shown, channel_before in zip(info.channels, before["channels"], strict=True):
                assert [reply_fields(shown).get(each) for each in fixed] == [channel_before.get(each) for each in fixed]
            found = await engine.inspector.peek(namespace, name, None, items_max=50, bytes_max=1 << 20)
            peeked = [[each.partition, each.seq, each.body, each.attributes] for each in found]
            assert as_json(peeked) == EXPECTED[f"peek {name}"]
            for channel in queue.channels:
                letters = await engine.dead_letters.page(namespace, name, channel, after_id=0, items_max=10)
                dead = [[each.id, each.message.body, each.attempts, list(each.reasons)] for each in letters]
                assert as_json(dead) == EXPECTED[f"dead {name} {channel}"]
        due = [[list(key), node] for key, node in sorted(engine.registry.pending_deletions.items())]
        assert as_json(due) == EXPECTED["to remove"]
        consumer = await engine.subscribe(namespace, "plain", "a", SubscribeOptions(max_in_flight=50))
        wanted = {tuple(each[:3]) for each in EXPECTED["consumed"]}  # what is deferred may be due by now, too
        got: set[tuple[int, int, str]] = set()
        with trio.fail_after(10):
            while not wanted <= got:
                got |= {(each.partition, each.seq, each.body.hex()) for each in await consumer.receive()}
        await consumer.aclose()
        nursery.cancel_scope.cancel()
    await engine.aclose()


def test_the_outbox_is_read_as_before(folder: Path) -> None:
    realm = Realm.from_psk_file(folder / "team.realm")
    store = SqliteDeliveryStore(folder / "outbox.sqlite")
    found = store.load(str(realm.realm_id))
    assert {row.ttl_ms for row in found.rows} == {0} and not found.lost, "the old file had neither"
    rows = [row[:-1] for row in found.rows]
    assert as_json([rows, found.windows, found.inboxes]) == EXPECTED["outbox"]
    store.close()


def test_realm_records_and_identity_are_read_as_before(folder: Path) -> None:
    realm = Realm.from_psk_file(folder / "team.realm")
    assert [realm.name, realm.psk.hex(), str(realm.realm_id), list(realm.bootstrap)] == EXPECTED["realm"]
    records = load_records(folder / "members.cbor", records_max=9)
    members = [as_json(open_envelope(each.envelope, realm.keys)[0]) for each in records]
    assert [member[0].pop() for member in members] == [[{}, [], []]] * len(members), "nothing more was said"
    assert members == EXPECTED["members"]
    assert records and not any(each.is_proved for each in records)
    assert Identity.load(folder / "identity.key").peer_id == EXPECTED["identity"]
