"""The peers of `python -m bench queue`, each used in the fastest way that keeps what it acknowledges on disk."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

GROUP = 64
"""Messages that go to a server together: our 64 publishers, who each wait for their own, are batched alike."""


class Peer(Protocol):
    """Blocking calls; each works on an empty queue of its own."""

    def publish(self, bodies: list[bytes]) -> None:
        """Publish all of them; they are durable on return."""
        ...

    def consume(self, count: int) -> int:
        """Take up to ``count`` messages and acknowledge them; return how many there were."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


@dataclass(frozen=True, slots=True)
class PeerKind:
    """How a peer is named, what it needs, and how it is made."""

    title: str
    package: str
    needs: str
    """``redis`` or ``postgres``, when it is a server; empty for a library."""
    make: Callable[[Path, str, int], Peer]
    """From a directory, the server's address, and the number of consumer groups."""
    group: int = GROUP


class RedisStreams:
    """Streams with appendfsync always, pipelined."""

    def __init__(self, directory: Path, url: str, channels: int) -> None:
        redis: Any = __import__("redis")
        self._redis = redis.Redis.from_url(url)
        self._redis.config_set("appendfsync", "always")
        self._redis.delete("bench")
        self._groups = [f"g{number}" for number in range(channels)]
        for group in self._groups:
            self._redis.xgroup_create("bench", group, id="0", mkstream=True)

    def publish(self, bodies: list[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for body in bodies:
            pipeline.xadd("bench", {"d": body})
        pipeline.execute()

    def consume(self, count: int) -> int:
        taken = 0
        for group in self._groups:
            found = self._redis.xreadgroup(group, "c", {"bench": ">"}, count=count)
            if found:
                ids = [each[0] for each in found[0][1]]
                pipeline = self._redis.pipeline(transaction=False)
                pipeline.xack("bench", group, *ids)
                if group == self._groups[-1]:
                    pipeline.xdel("bench", *ids)
                pipeline.execute()
                taken += len(ids)
        return taken

    def close(self) -> None:
        self._redis.delete("bench")
        self._redis.close()


class PostgresSkipLocked:
    """A table, COPY in, DELETE of unlocked rows, synchronous_commit on."""

    def __init__(self, directory: Path, url: str, channels: int) -> None:
        psycopg: Any = __import__("psycopg")
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute("drop table if exists bench_queue")
        self._connection.execute("create table bench_queue(id bigserial primary key, body bytea not null)")

    def publish(self, bodies: list[bytes]) -> None:
        with (
            self._connection.cursor() as cursor,
            cursor.copy("copy bench_queue(body) from stdin (format binary)") as copy,
        ):
            copy.set_types(["bytea"])
            for body in bodies:
                copy.write_row((body,))

    def consume(self, count: int) -> int:
        with self._connection.transaction():
            rows = self._connection.execute(
                "select id, body from bench_queue order by id limit %s for update skip locked", (count,)
            ).fetchall()
            if rows:
                self._connection.execute("delete from bench_queue where id = any(%s)", ([row[0] for row in rows],))
        return len(rows)

    def close(self) -> None:
        self._connection.execute("drop table bench_queue")
        self._connection.close()


class PersistQueue:
    """SQLiteAckQueue, which commits each operation."""

    def __init__(self, directory: Path, url: str, channels: int) -> None:
        module: Any = __import__("persistqueue")
        self._queue = module.SQLiteAckQueue(str(directory / "persist"), auto_commit=True, multithreading=True)

    def publish(self, bodies: list[bytes]) -> None:
        for body in bodies:
            self._queue.put(body)

    def consume(self, count: int) -> int:
        for taken in range(count):
            try:
                item = self._queue.get(block=False)
            except Exception:
                return taken
            self._queue.ack(item)
        return count

    def close(self) -> None:
        self._queue.close()


class LiteQueue:
    """litequeue, which does not wait for the disk (synchronous=NORMAL)."""

    def __init__(self, directory: Path, url: str, channels: int) -> None:
        module: Any = __import__("litequeue")
        self._queue = module.LiteQueue(str(directory / "lite.db"))

    def publish(self, bodies: list[bytes]) -> None:
        for body in bodies:
            self._queue.put(body.decode("latin-1"))

    def consume(self, count: int) -> int:
        for taken in range(count):
            task = self._queue.pop() if hasattr(self._queue, "pop") else self._queue.get()
            if task is None:
                return taken
            self._queue.done(task.message_id)
        return count

    def close(self) -> None:
        self._queue.close()


PEERS = {
    "redis": PeerKind("Redis streams, appendfsync always, 64 a pipeline", "redis", "redis", RedisStreams),
    "postgres": PeerKind("PostgreSQL SKIP LOCKED, 64 a transaction", "psycopg", "postgres", PostgresSkipLocked),
    "persist-queue": PeerKind("persist-queue SQLiteAckQueue", "persistqueue", "", PersistQueue, 1),
    "litequeue": PeerKind("litequeue, not waiting for the disk", "litequeue", "", LiteQueue, 1),
}


def missing(kind: PeerKind, addresses: dict[str, str]) -> str:
    """Return why a peer cannot be measured here; empty when it can."""
    if importlib.util.find_spec(kind.package) is None:
        return f"the package {kind.package} is not installed"
    if kind.needs and not addresses.get(kind.needs):
        return f"no {kind.needs} server could be started"
    return ""


def run_for(peer: Peer, what: str, seconds: float, body_bytes: int, group: int) -> tuple[int, float, list[float]]:
    """Messages, seconds and the latencies of calls. ``what`` is ``publish``, ``consume`` (both, in turn)."""
    bodies = [bytes([number % 251]) * body_bytes for number in range(group)]
    done = 0
    latencies_s: list[float] = []
    began_s = time.perf_counter()
    until_s = began_s + seconds
    while True:
        now_s = time.perf_counter()
        if now_s >= until_s:
            break
        peer.publish(bodies)
        latencies_s.append(time.perf_counter() - now_s)
        if what != "publish":
            taken = 0
            while taken < group:
                got = peer.consume(group)
                if not got:
                    break
                taken += got
        done += group
    return done, time.perf_counter() - began_s, latencies_s
