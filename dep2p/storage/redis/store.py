"""A queue store in Redis: redis-py in the writer's thread, one Lua step a batch, which Redis runs whole or refuses.

Messages and dead letters are streams, whose ids are the numbers. The step checks the owner's epoch and writes the
batch's number, so that an owner that lost its connection neither writes over another's work nor takes a commit whose
answer was lost for one that failed.
"""

import contextlib
import functools
import logging
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from dep2p.errors import StoreError, StoreFullError, StoreLockedError, StoreUnknownError
from dep2p.protocols.queues.range_set import joined
from dep2p.protocols.queues.records import (
    Cursor,
    CursorChange,
    DeadLetterRow,
    MessageRow,
    PartitionRecord,
    StateRow,
    StoreBatch,
    StoreStatistics,
)
from dep2p.storage.queue_store import no_wait
from dep2p.storage.redis.scripts import STEP, TAKE

logger: logging.Logger = logging.getLogger("dep2p.storage")

RECONNECT_S: Final = 15.0
"""Seconds for which a call waits for a server that went away."""
_TIMEOUT_S: Final = 10.0
_SIZE_S: Final = 60.0
"""Seconds between two looks at the server's memory."""
_TRIM_ROWS: Final = 4_000
"""Messages removed from the log in one commit; more of them go with later ones, so that no commit stalls."""
_STATE: Final = struct.Struct(">QQ")
_DEAD: Final = struct.Struct(">QQQQ")

T = TypeVar("T")


class RedisStore:
    """A queue store below a prefix of a Redis database, as durable as the server's ``appendfsync`` (it is logged)."""

    is_durable = True

    def __init__(self, url: str, *, prefix: str = "dep2p:", is_synced: bool = True) -> None:
        self._prefix = prefix
        self._is_synced = is_synced
        self._is_open = False
        self._is_connected = False
        self._term = self._batch = 0
        self._trimmed: dict[int, int] = {}
        """The last number that has left the log, by partition, as far as this store knows it."""
        self._trims: dict[int, int] = {}
        """The same for partitions with such messages still in Redis."""
        self._doubt: StoreBatch | None = None
        """The batch that may have been written, under the last number."""
        self._size_bytes = 0
        self._size_s = 0.0
        """The time of the next look at the memory."""
        self._commits = self._rows = 0
        self.on_wait = no_wait
        # The driver sends nothing twice: the number of a step shows whether it was taken.
        self._db: Any = redis.Redis.from_url(
            url,
            single_connection_client=False,
            max_connections=1,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=5.0,
        )
        where = self._db.connection_pool.connection_kwargs
        self.location: str = (
            f"redis://{where.get('host', where.get('path', ''))}:{where.get('port', '')}/{where.get('db', 0)}"
        )
        """The place of the store, human-readable, without its password."""
        self._step: Any = self._db.register_script(STEP)
        self._take: Any = self._db.register_script(TAKE)

    # Life

    def open(self) -> None:
        """Connect and become the owner. Raises StoreError, StoreLockedError."""
        try:
            self._own_first()
            self._batch = int(self._db.hget(self._prefix + "owner", "batch") or 0)
            self._is_open = True
            self._report_durability()
            self._look_at_size()
        except redis.RedisError as error:
            self._db.connection_pool.disconnect()
            raise self._explain(error) from None
        except StoreError:
            self._db.connection_pool.disconnect()
            raise

    def _own_first(self) -> None:
        """Become the owner. Waits for a server that is there and still reads its files."""
        until_s = time.monotonic() + RECONNECT_S
        while True:
            try:
                self._own()
            except redis.BusyLoadingError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(0.1)
            else:
                return

    def _own(self) -> None:
        run_id = self._db.info("server")["run_id"]
        me = f"{run_id}:{self._db.client_id()}"
        before = (self._db.hget(self._prefix + "owner", "client") or b"").decode()
        if before and before != me:
            its_run, _, its_id = before.partition(":")
            if its_run == run_id and its_id and self._db.execute_command("CLIENT", "LIST", "ID", its_id):
                raise StoreLockedError(
                    f"the queues in {self.location}, prefix {self._prefix}, are in use by another process: "
                    "stop it first"
                )
        term = self._take(keys=[self._prefix], args=[before, me, self._term or ""])
        if not term:
            raise StoreLockedError(
                f"the queues in {self.location}, prefix {self._prefix}, were taken by another process"
            )
        self._term = int(term)
        self._is_connected = True

    def _report_durability(self) -> None:
        try:
            names = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
            found = {name: value for each in names for name, value in self._db.config_get(each).items()}
        except redis.RedisError:
            return  # a server that does not report it
        if self._is_synced and (found.get("appendonly"), found.get("appendfsync")) != ("yes", "always"):
            logger.warning(
                "the queues in %s may lose what they acknowledged when the server dies: it has appendonly %s, "
                "appendfsync %s; set `appendonly yes` and `appendfsync always` there",
                self.location,
                found.get("appendonly"),
                found.get("appendfsync"),
            )
        if found.get("maxmemory") != "0" and found.get("maxmemory-policy") != "noeviction":
            logger.warning(
                "Redis may drop the queues in %s when its memory is full: it has maxmemory-policy %s; set "
                "`maxmemory-policy noeviction` there",
                self.location,
                found.get("maxmemory-policy"),
            )

    def close(self) -> None:
        """Give up the ownership and disconnect. Idempotent."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(redis.RedisError):
                self._db.close()
            self._db.connection_pool.disconnect()

    def _call(self, step: Callable[[], T]) -> T:
        """Do a step again on a new connection for as long as the server is away."""
        if not self._is_open:
            raise StoreError(f"the queues' store in {self.location} is closed")
        until_s = time.monotonic() + RECONNECT_S
        while True:
            try:
                if not self._is_connected:
                    self._db.connection_pool.disconnect()
                    self._own()
                return step()
            except (redis.ConnectionError, redis.TimeoutError, StoreLockedError) as error:
                # The server may not have noticed yet that the old connection, which owns it, has gone.
                if isinstance(error, StoreLockedError) and self._is_connected:
                    raise
                self._is_connected = False
                if time.monotonic() >= until_s:
                    explained = error if isinstance(error, StoreError) else self._explain(error)
                    explained.is_away = True
                    raise explained from None
                time.sleep(0.1)
            except redis.RedisError as error:
                raise self._explain(error) from None

    def _explain(self, error: redis.RedisError) -> StoreError:
        text = " ".join(str(error).split())
        if isinstance(error, OutOfMemoryError) or "OOM" in text or "MISCONF" in text:
            return StoreFullError(f"no room for the queues in {self.location}: {text}. Free some memory or disk there")
        return StoreError(f"the queues in {self.location}: {text}. Check that the server runs and its address")

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(map(str, parts))

    # Reading

    def load(self) -> dict[str, bytes]:
        """All definitions."""
        found = self._call(lambda: self._db.hgetall(self._key("definitions")))
        return {key.decode(): found[key] for key in sorted(found)}

    def load_partition(self, partition: int) -> PartitionRecord:
        """All of a partition but its messages."""
        trimmed = self._trimmed_of(partition)
        if trimmed and self._call(lambda: self._db.xrange(self._key("log", partition), max=str(trimmed), count=1)):
            self._trims[partition] = trimmed
        while partition in self._trims:  # messages that are being removed do not count
            self.tidy()
        return self._call(lambda: self._load_partition(partition))

    def _trimmed_of(self, partition: int) -> int:
        known = self._trimmed.get(partition)
        if known is None:
            trimmed = self._call(lambda: self._db.hget(self._key("part", partition), "trimmed"))
            known = self._trimmed[partition] = int(trimmed or 0)
        return known

    def _load_partition(self, partition: int) -> PartitionRecord:
        part = self._db.hgetall(self._key("part", partition))
        record = PartitionRecord(
            int(part.get(b"last", 0)),
            int(part.get(b"trimmed", 0)),
            self._db.xlen(self._key("log", partition)),
            int(part.get(b"bytes", 0)),
        )
        cursors = self._db.hgetall(self._key("cursors", partition))
        for channel in sorted(map(int, cursors)):
            ack_floor, delivered_up_to = map(int, cursors[b"%d" % channel].split())
            record.cursors[channel] = Cursor(ack_floor, delivered_up_to)
            ranges = self._db.zrange(self._key("done", channel, partition), 0, -1)
            record.done[channel] = joined(_range(each) for each in ranges)
            states = self._db.hgetall(self._key("state", channel, partition))
            record.states[channel] = []
            for seq in sorted(map(int, states)):
                packed = states[b"%d" % seq]
                attempts, due_us = _STATE.unpack_from(packed)
                state = StateRow(channel, partition, seq, attempts, due_us, packed[_STATE.size :])
                record.states[channel].append(state)
            record.last_dead_id[channel] = int(self._db.hget(self._key("dead"), str(channel)) or 0)
        return record

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        """Messages from ``from_seq`` on."""
        found: list[MessageRow] = []
        size = 0
        from_seq = max(from_seq, self._trimmed_of(partition) + 1)
        while len(found) < items_max:  # in parts: a count does not bound the bytes
            count = min(items_max - len(found), 64)
            read = functools.partial(self._db.xrange, self._key("log", partition), min=str(from_seq), count=count)
            rows = self._call(read)
            for name, fields in rows:
                row = MessageRow(partition, int(name.split(b"-")[0]), fields[b"m"], fields[b"b"])
                size += len(row.body)
                if found and size > bytes_max:
                    return found
                found.append(row)
            if len(rows) < count:
                break
            from_seq = found[-1].seq + 1
        return found

    def get(self, partition: int, seqs: list[int]) -> list[MessageRow]:
        """These messages."""
        trimmed = self._trimmed_of(partition)

        def read() -> list[MessageRow]:
            pipe = self._db.pipeline(transaction=False)
            for seq in sorted(each for each in seqs if each > trimmed):
                pipe.xrange(self._key("log", partition), min=f"{seq}-1", max=f"{seq}-1")
            return [
                MessageRow(partition, int(name.split(b"-")[0]), fields[b"m"], fields[b"b"])
                for rows in pipe.execute()
                for name, fields in rows
            ]

        return self._call(read)

    def scan_dead_letters(self, channel: int, after_id: int, *, items_max: int) -> list[DeadLetterRow]:
        """Dead letters behind an id."""
        rows = self._call(lambda: self._db.xrange(self._key("dead", channel), min=str(after_id + 1), count=items_max))
        found: list[DeadLetterRow] = []
        for name, row in rows:
            partition, seq, died_us, attempts = _DEAD.unpack(row[b"r"])
            dead_id = int(name.split(b"-")[0])
            found.append(
                DeadLetterRow(channel, dead_id, partition, seq, died_us, attempts, row[b"m"], row[b"b"], row[b"h"])
            )
        return found

    def count_dead_letters(self, channel: int) -> int:
        """How many dead letters there are."""
        return int(self._call(lambda: self._db.xlen(self._key("dead", channel))))

    # Writing

    def check(self, batch: StoreBatch) -> None:
        """Raises what `commit` would raise."""
        self._answer(
            self._call(
                lambda: self._step(keys=[self._prefix], args=[self._term, 0, "check", 0, *_steps(batch, batch.trims)])
            )
        )

    def commit(self, batch: StoreBatch) -> None:
        """Write the batch in one step, with its number."""
        self.on_wait()  # nearly all the time it waits for an answer
        self._commit(batch)
        self._commits += 1
        self._rows += len(batch.appends)

    def tidy_in_s(self) -> float | None:
        """Return when `tidy` has work to do."""
        return 0.0 if self._trims else max(0.0, self._size_s - time.monotonic())

    def tidy(self) -> None:
        """Remove some trimmed messages, or look at the memory."""
        if self._trims:
            self._commit(StoreBatch())
        else:
            self._look_at_size()

    def _commit(self, batch: StoreBatch) -> None:
        is_again = self._doubt is batch
        if not is_again:
            self._batch += 1  # each number is used once, even for a failed batch
        number, self._doubt = self._batch, None
        trims = {**self._trims, **batch.trims}
        steps = [self._term, number, "commit", _TRIM_ROWS, *_steps(batch, trims)]

        def step() -> bytes:
            nonlocal is_again
            if is_again:
                term, last = self._db.hmget(self._key("owner"), "epoch", "batch")
                if (int(term or 0), int(last or 0)) == (self._term, number):
                    # The batch was written; only the answer was lost, and with it the open trims.
                    return " ".join(["trims", *map(str, trims)]).encode()
            is_again = True
            return bytes(self._step(keys=[self._prefix], args=steps))

        try:
            unfinished = self._answer(self._call(step))
        except StoreError as error:
            if is_again and error.is_away:
                self._doubt = batch
                raise StoreUnknownError(f"whether this was written is not known: {error}") from None
            raise
        self._trims = {each: trims[each] for each in unfinished if each not in batch.partitions_removed}
        for partition, up_to in batch.trims.items():
            self._trimmed[partition] = max(self._trimmed.get(partition, 0), up_to)
        for partition in batch.partitions_removed:
            self._trimmed.pop(partition, None)

    def _answer(self, answer: bytes) -> list[int]:
        """Return the partitions whose trims are not complete."""
        if answer == b"taken over":
            raise StoreLockedError(f"the queues in {self.location} were taken over by another process")
        what, *partitions = answer.split()
        if what == b"trims":
            return [int(each) for each in partitions]
        refused = StoreError(f"the queues in {self.location} do not take this: {answer.decode()}")
        refused.is_about_batch = True
        raise refused

    def _look_at_size(self) -> None:
        """Read the server's memory."""
        self._size_s = time.monotonic() + _SIZE_S
        self._size_bytes = int(self._call(lambda: self._db.info("memory")["used_memory"]))

    def statistics(self) -> StoreStatistics:
        """Counts since `open`; the size is that of the server's memory, a minute old at most."""
        return StoreStatistics(
            bytes_on_disk=self._size_bytes,
            commits=self._commits,
            fsyncs=self._commits if self._is_synced else 0,
            rows_written=self._rows,
        )


def _range(text: bytes) -> tuple[int, int]:
    low, _, high = text.partition(b"-")
    return int(low), int(high)


def _steps(batch: StoreBatch, trims: Mapping[int, int]) -> list[object]:
    """Encode the batch as the words of the script: a name, how many words follow, the words; four for each message."""
    words: list[object] = []

    def add(name: str, *values: object) -> None:
        words.extend((name, len(values), *values))

    for key, value in batch.definitions.items():
        if value is None:
            add("undefine", key)
        else:
            add("define", key, value)
    for row in batch.appends:
        words.extend(("append", *row))
    for (channel, partition), change in batch.cursors.items():
        _move(add, channel, partition, change)
    for dead in batch.dead_added:
        fixed = _DEAD.pack(dead.partition, dead.seq, dead.died_us, dead.attempts)
        add("dead", dead.channel, dead.id, fixed, dead.meta, dead.body, dead.history)
    for channel, dead_id in batch.dead_removed:
        add("undead", channel, dead_id)
    for partition, up_to in trims.items():
        add("trim", partition, up_to)
    for partition in batch.partitions_removed:
        add("no partition", partition)
    for channel in batch.channels_removed:
        add("no channel", channel)
    return words


def _move(add: Callable[..., None], channel: int, partition: int, change: CursorChange) -> None:
    place = f"{channel}:{partition}"
    add("cursor", channel, partition, f"{change.cursor.ack_floor} {change.cursor.delivered_up_to}")
    for seq in change.states_removed:
        add("stateless", place, seq)
    for state in change.states_set:
        add("state", place, state.seq, _STATE.pack(state.attempts, state.due_us) + state.history)
    for low, high in change.done_added:
        add("done", place, low, f"{low}-{high}")
    add("floor", place, change.cursor.ack_floor)
