"""The peer store: bounds, expiry, pinned peers, and its file."""

import random
import sqlite3
from pathlib import Path

import pytest

from dep2p.host.connections.peerstore import ADDRS_PER_PEER_MAX, PROTOCOLS_BYTES_PER_PEER_MAX, PeerStore
from dep2p.host.counters import Counters
from dep2p.identity import Identity
from dep2p.types import PeerId

RNG = random.Random(1)
OWN, *PEERS = (Identity(RNG.randbytes(32)).peer_id for _ in range(6))


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def peer_store(peers_max: int = 3, clock: Clock | None = None, path: Path | None = None) -> tuple[PeerStore, Counters]:
    counters = Counters()
    return PeerStore(OWN, peers_max, counters, wall_clock_s=clock or Clock(), path=path), counters


def addr(number: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{number}"


def test_addresses_expire_and_the_longest_lived_come_first() -> None:
    clock = Clock()
    store, _ = peer_store(clock=clock)
    assert store.add_addrs(PEERS[0], [addr(1)], 10)
    assert store.add_addrs(PEERS[0], [f"{addr(2)}/p2p/{PEERS[0]}"], 100)
    assert not store.add_addrs(PEERS[0], [addr(1)], 5)
    assert store.addrs(PEERS[0]) == [addr(2), addr(1)]
    clock.now_s += 50
    assert store.addrs(PEERS[0]) == [addr(2)]
    clock.now_s += 500
    store.expire()
    assert len(store) == 0


def test_malformed_and_foreign_addresses_are_dropped_and_counted() -> None:
    store, counters = peer_store()
    assert not store.add_addrs(PEERS[0], ["rubbish", f"{addr(1)}/p2p/{PEERS[1]}"], 10)
    assert counters["peerstore_address_malformed"] == 2
    assert not store.add_addrs(OWN, [addr(1)], 10)
    assert store.addrs(OWN) == []


def test_peers_and_addresses_are_bounded() -> None:
    store, counters = peer_store(peers_max=3)
    for peer in PEERS:
        store.add_addrs(peer, [addr(1)], 10)
    assert store.peers() == PEERS[-3:]
    assert counters["peerstore_peer_dropped_full"] == 2
    store.add_addrs(PEERS[-1], [addr(port) for port in range(1, 100)], 10)
    assert len(store.addrs(PEERS[-1])) == ADDRS_PER_PEER_MAX
    assert counters["peerstore_address_dropped_full"] == 99 - ADDRS_PER_PEER_MAX


def test_pinned_peer_is_neither_dropped_nor_expired() -> None:
    clock = Clock()
    store, _ = peer_store(peers_max=2, clock=clock)
    store.pin(PEERS[0])
    for peer in PEERS:
        store.add_addrs(peer, [addr(1)], 10)
    clock.now_s += 100
    store.expire()
    assert store.addrs(PEERS[0]) == [addr(1)]
    assert store.peers() == [PEERS[0]]
    store.unpin(PEERS[0])
    assert store.addrs(PEERS[0]) == []


def test_store_full_of_pinned_peers_takes_no_other() -> None:
    store, _ = peer_store(peers_max=1)
    store.pin(PEERS[0])
    store.add_addrs(PEERS[0], [addr(1)], 10)
    store.add_addrs(PEERS[1], [addr(1)], 10)
    assert store.peers() == [PEERS[0]]


async def test_file_keeps_what_has_not_expired(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "deep" / "peers.sqlite"
    store, _ = peer_store(clock=clock, path=path)
    store.load()
    store.add_addrs(PEERS[0], [addr(1)], 10)
    store.add_addrs(PEERS[1], [addr(2)], 1_000)
    await store.save()
    clock.now_s += 100
    again, counters = peer_store(clock=clock, path=path)
    again.load()
    assert again.peers() == [PEERS[1]]
    assert counters.snapshot() == {}


@pytest.mark.parametrize("damage", [b"", b"rubbish" * 100, b"SQLite format 3\0" + b"\xff" * 5_000])
async def test_damaged_file_is_put_aside(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "peers.sqlite"
    path.write_bytes(damage)
    store, counters = peer_store(path=path)
    store.load()
    assert counters["peerstore_file_damaged"] == 1
    store.add_addrs(PEERS[0], [addr(1)], 10)
    await store.save()
    again, _ = peer_store(path=path)
    again.load()
    assert again.peers() == [PEERS[0]]


async def test_rows_that_make_no_sense_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "peers.sqlite"
    store, _ = peer_store(path=path)
    store.add_addrs(PEERS[0], [addr(1)], 10_000)
    await store.save()
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO addrs VALUES ('nobody', 'nowhere', 9e9), (?, 'nowhere', 9e9)", (str(PEERS[1]),))
    db.close()
    again, counters = peer_store(path=path)
    again.load()
    assert again.addrs(PEERS[0]) == [addr(1)]
    assert counters["peerstore_address_malformed"] == 2


async def test_file_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    store, counters = peer_store(path=tmp_path / "a file" / "peers.sqlite")
    store.add_addrs(PeerId(PEERS[0]), [addr(1)], 10)
    await store.save()
    assert counters["peerstore_save_failed"] == 1


def test_protocols_are_bounded_in_bytes_and_go_with_the_connection() -> None:
    """Any number of identities could leave 64 KB each, forever."""
    store, counters = peer_store()
    store.set_protocols(PEERS[0], [f"/{number:03}" + "x" * 1_000 for number in range(64)], "agent")
    assert sum(map(len, store.protocols(PEERS[0]))) <= PROTOCOLS_BYTES_PER_PEER_MAX
    assert counters["peerstore_protocols_dropped_full"] == 1
    store.forget_protocols(PEERS[0])
    assert len(store) == 0
    store.set_protocols(PEERS[1], ["/a"], "agent")
    store.add_addrs(PEERS[1], [addr(1)], 10)
    store.forget_protocols(PEERS[1])
    assert store.protocols(PEERS[1]) == () and store.addrs(PEERS[1]) == [addr(1)]
