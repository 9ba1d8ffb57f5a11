"""The addresses of peers, each with an expiry, and their protocols: bounded, and kept in a file when one is named."""

import logging
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import trio

from dep2p.host.addresses import expect_peer
from dep2p.host.counters import Counters
from dep2p.types import Clock, PeerId, parse_peer_id

logger: logging.Logger = logging.getLogger("dep2p.host")

ADDRS_PER_PEER_MAX = 32
PROTOCOLS_PER_PEER_MAX = 256
PROTOCOLS_BYTES_PER_PEER_MAX = 16_384
"""Bytes of the names of a peer's protocols together; further names are not remembered."""
TTL_S_MAX = 30 * 86_400.0
"""No address is remembered for longer than 30 days without being named again."""
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS addrs (
    peer TEXT NOT NULL, addr TEXT NOT NULL, expires_s REAL NOT NULL, PRIMARY KEY (peer, addr)
) WITHOUT ROWID
"""


@dataclass(slots=True)
class _PeerEntry:
    addrs: dict[str, float] = field(default_factory=dict[str, float])
    """Address text without the peer id, to its expiry in wall-clock seconds."""
    protocols: tuple[str, ...] = ()
    agent: str = ""
    signed_record: bytes = b""


class PeerStore:
    """Peers and their addresses, least recently named first; in memory, with `load` and `save` for a file."""

    def __init__(
        self,
        own_peer: PeerId,
        peers_max: int,
        counters: Counters,
        *,
        wall_clock_s: Clock = time.time,
        path: Path | None = None,
    ) -> None:
        self._own_peer = own_peer
        self._peers_max = peers_max
        self._counters = counters
        self._now_s = wall_clock_s
        self._path = path
        self._entries: OrderedDict[PeerId, _PeerEntry] = OrderedDict()
        self._dirty = False
        self._pinned: dict[PeerId, None] = {}

    def pin(self, peer: PeerId) -> None:
        """Never drop or expire the addresses of this peer."""
        self._pinned[peer] = None

    def unpin(self, peer: PeerId) -> None:
        """End `pin`."""
        self._pinned.pop(peer, None)

    def is_pinned(self, peer: PeerId) -> bool:
        """Whether the peer is pinned."""
        return peer in self._pinned

    def __len__(self) -> int:
        return len(self._entries)

    def add_addrs(self, peer: PeerId, addrs: Sequence[str], ttl_s: float) -> bool:
        """Remember addresses; a malformed one, or one of another peer, is dropped and counted. True if one is new."""
        if peer == self._own_peer or not addrs:
            return False
        has_new = False
        entry = self._touch(peer)
        expires_s = self._now_s() + min(max(ttl_s, 0.0), TTL_S_MAX)
        for text in addrs[: 4 * ADDRS_PER_PEER_MAX]:
            try:
                key = expect_peer(text, peer).text
            except ValueError as error:
                self._counters.add("peerstore_address_malformed")
                logger.debug("address of %s dropped: %s", peer, error)
                continue
            if len(entry.addrs) >= ADDRS_PER_PEER_MAX and key not in entry.addrs:
                self._counters.add("peerstore_address_dropped_full")
                del entry.addrs[min(entry.addrs, key=entry.addrs.__getitem__)]
            has_new = has_new or key not in entry.addrs
            entry.addrs[key] = max(expires_s, entry.addrs.get(key, 0.0))
            self._dirty = True
        return has_new

    def _touch(self, peer: PeerId) -> _PeerEntry:
        entry = self._entries.get(peer)
        if entry is None:
            entry = self._entries[peer] = _PeerEntry()
            if len(self._entries) > self._peers_max:
                # The newest itself, when all others are pinned.
                del self._entries[next((one for one in self._entries if one not in self._pinned), peer)]
                self._counters.add("peerstore_peer_dropped_full")
        if peer in self._entries:
            self._entries.move_to_end(peer)
        return entry

    def addrs(self, peer: PeerId) -> list[str]:
        """Return addresses that have not expired, those that live longest first."""
        entry = self._entries.get(peer)
        if entry is None:
            return []
        now_s = self._now_s() if peer not in self._pinned else 0.0
        live = [(-expires_s, text) for text, expires_s in entry.addrs.items() if expires_s > now_s]
        return [text for _, text in sorted(live)]

    def peers(self) -> list[PeerId]:
        """Return every peer with an entry, the least recently named first."""
        return list(self._entries)

    def set_protocols(self, peer: PeerId, protocols: Sequence[str], agent: str, signed_record: bytes = b"") -> None:
        """Record the protocols and software that a connected peer named in identify; call `forget_protocols` when it is
        gone.

        ``signed_record``: a checked one; empty keeps the earlier one.
        """
        if peer == self._own_peer:
            return
        kept: list[str] = []
        room = PROTOCOLS_BYTES_PER_PEER_MAX
        for name in protocols[:PROTOCOLS_PER_PEER_MAX]:
            room -= len(name.encode("utf-8", "replace"))
            if room < 0:
                self._counters.add("peerstore_protocols_dropped_full")
                break
            kept.append(name)
        entry = self._touch(peer)
        entry.protocols = tuple(kept)
        entry.agent = agent
        entry.signed_record = signed_record or entry.signed_record

    def forget_protocols(self, peer: PeerId) -> None:
        """Forget the protocols of a peer that is not connected any more: they take no room."""
        entry = self._entries.get(peer)
        if entry is None:
            return
        entry.protocols, entry.signed_record = (), b""
        if not entry.addrs and peer not in self._pinned:
            del self._entries[peer]

    def protocols(self, peer: PeerId) -> tuple[str, ...]:
        """The protocols that the peer named in identify; empty before that, and when it is not connected."""
        entry = self._entries.get(peer)
        return () if entry is None else entry.protocols

    def agent(self, peer: PeerId) -> str:
        """Return the software that the peer named in identify."""
        entry = self._entries.get(peer)
        return "" if entry is None else entry.agent

    def signed_record(self, peer: PeerId) -> bytes:
        """Return the signed record that a connected peer sent in identify; b"" when it sent none that holds."""
        entry = self._entries.get(peer)
        return b"" if entry is None else entry.signed_record

    def expire(self) -> None:
        """Forget addresses past their time, and peers without any."""
        now_s = self._now_s()
        for peer, entry in list(self._entries.items()):
            if peer in self._pinned:
                continue
            for text in [text for text, expires_s in entry.addrs.items() if expires_s <= now_s]:
                del entry.addrs[text]
                self._dirty = True
            if not entry.addrs and not entry.protocols:
                del self._entries[peer]

    # The file

    def load(self) -> None:
        """Read the file. A damaged one is renamed aside with a warning, and a fresh one begun: it only caches."""
        if self._path is None or not self._path.exists():
            return
        try:
            rows = _read_rows(self._path, self._peers_max * ADDRS_PER_PEER_MAX)
        except (sqlite3.Error, ValueError) as error:
            aside = self._path.with_name(f"{self._path.name}.damaged-{int(self._now_s())}")
            os.replace(self._path, aside)
            self._counters.add("peerstore_file_damaged")
            logger.warning(
                "the peer store %s is damaged (%s): renamed to %s, a fresh one begins", self._path, error, aside.name
            )
            return
        now_s = self._now_s()
        for peer_text, addr, expires_s in rows:
            try:
                peer = parse_peer_id(str(peer_text))
            except ValueError:
                self._counters.add("peerstore_address_malformed")
                continue
            self.add_addrs(peer, (str(addr),), float(expires_s) - now_s)
        self.expire()
        self._dirty = False

    async def save(self) -> None:
        """Write the file if anything changed. A failure is logged and counted; the host goes on without."""
        if self._path is None or not self._dirty:
            return
        self._dirty = False
        rows = [
            (peer, text, expires_s) for peer, entry in self._entries.items() for text, expires_s in entry.addrs.items()
        ]
        try:
            await trio.to_thread.run_sync(_write_rows, self._path, rows)
        except (sqlite3.Error, OSError) as error:
            self._dirty = True
            self._counters.add("peerstore_save_failed")
            logger.warning("the peer store %s cannot be written: %s", self._path, error)


def _read_rows(path: Path, rows_max: int) -> list[tuple[object, object, float]]:
    with closing(sqlite3.connect(path)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != _SCHEMA_VERSION:
            raise ValueError(f"schema version {version}, not {_SCHEMA_VERSION}")
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise ValueError(str(verdict))
        rows = db.execute("SELECT peer, addr, expires_s FROM addrs ORDER BY expires_s LIMIT ?", (rows_max,)).fetchall()
        return [(peer, addr, float(expires_s)) for peer, addr, expires_s in rows]


def _write_rows(path: Path, rows: list[tuple[PeerId, str, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        db.execute(_SCHEMA)
        db.execute("DELETE FROM addrs")
        db.executemany("INSERT INTO addrs VALUES (?, ?, ?)", rows)
