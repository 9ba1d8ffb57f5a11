"""The relay of an app's outbox, of a client: see `dep2p.storage.app_outbox`."""

from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from dep2p.client.background import tasks
from dep2p.client.queues.calls import MALFORMED_CODES, BrokerCalls, queue_path
from dep2p.control_api.encoding import encode_headers
from dep2p.control_api.errors import ControlError, unexpected_answer
from dep2p.control_api.queues import BatchMessage, FindDestinations, NewQueueBatch, PublishedBatch, QueueDestinations
from dep2p.errors import Dep2pError, StoreLockedError, StreamClosedError
from dep2p.protocols.queues.attributes import decode_attributes
from dep2p.protocols.queues.names import parse_message_id
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.storage.app_outbox import RELAY_RETRY, OutboxDatabase, OutboxWork, RelayBatch, RelayFlow

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _DaemonBroker:
    """The queues of a broker, through the daemon, as a relay needs them."""

    def __init__(self, calls: BrokerCalls) -> None:
        self._calls = calls

    async def publish_sequenced(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        """Publish all or none, under a number that counts once. Raises ``ValueError`` for what the daemon refuses."""
        batch = NewQueueBatch(
            messages=tuple(_message(each) for each in messages),
            publisher=publisher[0].hex(),
            number=publisher[1],
            destination=destination,
        )
        try:
            path = f"{queue_path(name)}/publishes"
            published = await self._calls.ask(PublishedBatch, "POST", path, reply_fields(batch))
        except ControlError as error:
            raise _as_refusal(error) from error
        try:
            return [parse_message_id(each) for each in published.ids]
        except ValueError as error:  # of another version: this is no refusal
            raise unexpected_answer(str(error)) from error

    async def destinations(self, name: str, messages: Sequence[WireMessage], *, is_stale: bool = False) -> list[str]:
        """Return the destination of each message; "" for a queue on one node."""
        keys = tuple(decode_attributes(each.attributes).key for each in messages)
        wanted = FindDestinations(keys=keys, is_stale=is_stale)
        path = f"{queue_path(name)}/destinations"
        found = await self._calls.ask(QueueDestinations, "POST", path, reply_fields(wanted))
        if len(found.destinations) != len(messages):
            raise unexpected_answer(f"{len(found.destinations)} destinations of {len(messages)} messages")
        return list(found.destinations)


def _as_refusal(error: ControlError) -> Exception:
    """Return a ``ValueError`` for a call that the daemon refuses each time."""
    return ValueError(str(error)) if error.code in MALFORMED_CODES else error


def _message(message: WireMessage) -> BatchMessage:
    attributes = decode_attributes(message.attributes)
    return BatchMessage(
        body=b64encode(message.body).decode("ascii"),
        key=attributes.key,
        tags=attributes.tags,
        priority=attributes.priority,
        delay_s=attributes.delay_ms / 1000,
        headers=encode_headers(attributes.headers),
    )


class ClientOutboxRelay:
    """Made by ``queues.relay(…)``; works as long as its ``async with`` block.

    While the daemon is away, the messages wait in the outbox.
    """

    def __init__(self, calls: BrokerCalls, address: str | Path, *, table: str, poll_s: float) -> None:
        if not 0.001 <= poll_s <= 3_600:
            raise ValueError(f"poll_s is {poll_s}: it is 0.001 to 3,600")
        self._database = OutboxDatabase(address, table)
        self._flow = RelayFlow(
            _DaemonBroker(calls), OutboxWork(lambda: self._database.publisher, self._set_apart, self._send_to)
        )
        self.counts: Counter[str] = self._flow.counts
        """``published`` (batches after a crash count, too), ``refused``, ``failed``, and ``redirected``: messages that
        got another node of a distributed queue."""
        self._poll_s = poll_s
        self._limiter = anyio.CapacityLimiter(1)
        self._wake = anyio.Event()
        self._flushes: list[anyio.Event] = []
        self._ended: Dep2pError | None = None

    @property
    def problem(self) -> str:
        """The reason why nothing goes on now, human-readable; "" when it does."""
        return self._flow.problem

    def wake(self) -> None:
        """Look at the outbox now: the app has just committed."""
        self._wake.set()

    async def flush(self) -> None:
        """Wait until the outbox has no message left that was committed before this call, except refused ones.

        Raises StoreLockedError when another relay has taken the outbox over, and StreamClosedError when this relay's
        block is over, also when it ends meanwhile.
        """
        is_over = anyio.Event()
        if self._ended is None:
            self._flushes.append(is_over)
            self.wake()
            await is_over.wait()
            if is_over not in self._flushes:
                return
        if self._ended is not None:
            raise self._ended.with_traceback(None)

    @asynccontextmanager
    async def working(self) -> AsyncGenerator["ClientOutboxRelay", None]:
        """Publish committed messages while the block runs; the next relay publishes the rest."""
        try:
            await self._call(self._database.open)
            async with tasks() as group:
                group.start_soon(self._run)
                yield self
        finally:
            self._end(StreamClosedError("the relay is over: what is left in the outbox waits for the next relay"))
            with anyio.CancelScope(shield=True):
                await self._call(self._database.close)

    async def _run(self) -> None:
        done: RelayBatch | None = None
        failures = 0
        while True:
            self._wake = anyio.Event()
            flushes = len(self._flushes)  # a later one may be about a later message
            try:
                batch = await self._call(self._database.step, done)
                done = None
                if batch is None:
                    self._flushed(flushes)
                    self._flow.problem, failures = "", 0
                    with anyio.move_on_after(self._poll_s):
                        await self._wake.wait()
                    continue
                done = await self._flow.publish(batch)
                self._flow.problem, failures = "", 0
            except StoreLockedError as error:
                self._flow.report(str(error))
                self._end(error)
                return
            except Exception as error:  # an error of the database's driver, of any class
                failures += 1
                self._flow.report(f"the outbox waits: {type(error).__name__}: {error}")
                self.counts["failed"] += 1
                await anyio.sleep(RELAY_RETRY.after(failures))
                if not isinstance(error, Dep2pError):
                    await self._reconnect()

    def _end(self, error: Dep2pError) -> None:
        """Let each call of `flush` raise that is not done, and each later one. The first reason stays."""
        self._ended = self._ended or error
        for each in self._flushes:
            each.set()

    def _flushed(self, count: int) -> None:
        """Let the first ``count`` calls of `flush` return."""
        for each in self._flushes[:count]:
            each.set()
        del self._flushes[:count]

    async def _reconnect(self) -> None:
        try:
            await self._call(self._database.close)
            await self._call(self._database.open)
        except Exception as error:
            self._flow.report(f"the outbox's database cannot be reached: {type(error).__name__}: {error}")

    async def _call(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._limiter)

    async def _set_apart(self, batch: RelayBatch, error: str) -> None:
        await self._call(self._database.set_apart, batch, error)

    async def _send_to(self, batch: RelayBatch, destinations: Sequence[str]) -> list[int]:
        return await self._call(self._database.send_to, batch, destinations)
