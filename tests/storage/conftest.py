"""Stores of every kind, for the tests that all of them must pass. Those on servers are `real`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dep2p.storage.memory import MemoryStore
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.sqlite.store import SqliteStore
from tests.services import servers

ON_SERVERS = [pytest.param(name, marks=pytest.mark.real) for name in ("postgres", "redis")]
DURABLE = ["sqlite", *ON_SERVERS]
ALL = ["memory", *DURABLE]


class Stores:
    """Makes stores of one kind over the same content, which is its own for each test."""

    def __init__(self, kind: str, make: Callable[[], QueueStore]) -> None:
        self.kind = kind
        self._make = make
        self._made: list[QueueStore] = []

    def one(self) -> QueueStore:
        """Not opened; closed at the end of the test."""
        self._made.append(self._make())
        return self._made[-1]

    def opened(self) -> QueueStore:
        """The same, opened."""
        store = self.one()
        store.open()
        return store

    def close(self) -> None:
        for store in self._made:
            store.close()


@pytest.fixture(scope="session")
def running_servers() -> Iterator[Callable[[str], servers.Server]]:
    """Servers by kind, started when first asked for."""
    started: dict[str, servers.Server] = {}

    def get(kind: str) -> servers.Server:
        if kind not in started:
            server = servers.postgres() if kind == "postgres" else servers.redis()
            server.start()
            started[kind] = server
        return started[kind]

    yield get
    for server in started.values():
        server.remove()


_names = iter(range(1_000_000))


def fresh_place(kind: str, folder: Path, get_server: Callable[[str], servers.Server]) -> Callable[[], QueueStore]:
    """Makes stores over one new content."""
    name = f"t{next(_names)}"
    if kind == "memory":
        kept = MemoryStore()
        return lambda: kept
    if kind == "sqlite":
        return lambda: SqliteStore(folder / name / "queues.sqlite", compress_bytes_min=1_000)
    server = get_server(kind)

    def on_server() -> QueueStore:
        from dep2p.storage.postgres.store import PostgresStore
        from dep2p.storage.redis.store import RedisStore

        if kind == "redis":
            return RedisStore(server.url, prefix=name + ":")
        return PostgresStore(server.url, schema=name)

    return on_server


@pytest.fixture
def stores(
    request: pytest.FixtureRequest, tmp_path: Path, running_servers: Callable[[str], servers.Server]
) -> Iterator[Stores]:
    """Stores of the kind that the test is parametrized with, indirectly."""
    kind: str = request.param
    made = Stores(kind, fresh_place(kind, tmp_path, running_servers))
    yield made
    made.close()
