"""One connection of an NSQ client: it reads commands, carries them out on the queues, and writes frames."""

import logging
from collections import Counter, deque
from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

import trio

from dep2p.daemon.nsq.quotas import NsqQuotas
from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    MessageTooLargeError,
    QueueFullError,
)
from dep2p.protocols.nsq.commands import (
    Close,
    Command,
    CommandParser,
    Finish,
    IdentifyCommand,
    PublishCommand,
    Ready,
    Requeue,
    SubscribeCommand,
    Touch,
)
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.frames import (
    CLOSE_WAIT,
    FRAME_ERROR,
    FRAME_RESPONSE,
    HEARTBEAT,
    OK,
    encode_frame,
    encode_message,
)
from dep2p.protocols.nsq.identify import identify_answer
from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.protocols.nsq.session import NsqSession
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import message_id, parse_message_id
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.types import SubscribeOptions
from dep2p.token_bucket import TokenBucket

logger: logging.Logger = logging.getLogger("dep2p.nsq")

READ_BYTES: Final = 65_536
OUT_BYTES_MAX: Final = 1_048_576
"""Bytes of frames that wait for the socket; at this bound the connection takes no further messages."""
ANSWER_BYTES_MAX: Final = 65_536
"""Bytes of answers and errors that wait for the socket; at this bound the server does not read from the client."""
IN_FLIGHT_BYTES_MAX: Final = 16_777_216
PUBLISHES_MAX: Final = 256
PUBLISH_BYTES_MAX: Final = 8_388_608
"""Bytes of one connection's publishes that wait to become durable; at this bound the server does not read from it."""
SPACE_TIMEOUT_S: Final = 30.0
"""Seconds for which a publish waits for room in a full queue before it fails."""
END_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 1.0
_WAITED_S: Final = 0.1
"""Seconds of a write from which on it has waited for the client: the socket was full, and what is in it moves."""
_DELIVERIES: Final = 64


class NsqQueues(Protocol):
    """The queues and counters that all connections share."""

    @property
    def engine(self) -> QueueEngine: ...

    limits: NsqLimits
    quotas: NsqQuotas
    counts: Counter[str]
    rng: Random

    def namespace(self) -> str:
        """The namespace of the topics. Raises NotInRealmError."""
        ...

    async def topic(self, namespace: str, name: str, rate: TokenBucket | None) -> None:
        """Make a topic when it is new, as soon as ``rate`` allows it, and load it."""
        ...


class _Answer:
    """The place of an answer among the others: answers come in the order of their commands."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | None = None) -> None:
        self.data = data


class NsqConnection:
    """Serves one client until it leaves, fails, or is silent for two heartbeats."""

    def __init__(self, queues: NsqQueues, stream: trio.abc.HalfCloseableStream, remote: str) -> None:
        self.remote = remote
        self.session: NsqSession = NsqSession(queues.limits)
        self.counts: Counter[str] = Counter()
        self.connected_s = 0
        self.consumer: LocalConsumer | None = None
        self._queues = queues
        self._engine = queues.engine
        self._stream = stream
        self._parser = CommandParser(queues.limits)
        self._answers: deque[_Answer] = deque()
        self._out: deque[tuple[bytes, bool]] = deque()
        """Frames, and whether each is an answer."""
        self._out_bytes = 0
        self._answer_bytes = 0
        self._changed = trio.Event()
        """Set when the writer has work to do."""
        self._eased = trio.Event()
        """Set when bytes were written, or a publish became durable."""
        self._ending = False
        self._reading = trio.CancelScope()
        self._publishes = 0
        self._publish_bytes = 0
        self._topics_rate = queues.quotas.topics_rate()
        self._messages_rate = queues.quotas.messages_rate()
        self._has_begun = False
        self._nursery: trio.Nursery

    @property
    def has_begun(self) -> bool:
        """Whether the client has sent a whole command."""
        return self._has_begun

    def cut(self) -> None:
        """End a connection that is to make room."""
        self._nursery.cancel_scope.cancel()

    async def run(self) -> None:
        """Serve the client. Never raises because of it."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write)
                nursery.start_soon(self._beat)
                await self._read()
                self._ending = True
                if self.consumer is not None:
                    await self.consumer.aclose()  # its messages go to others now, even with open answers
                with trio.move_on_after(END_TIMEOUT_S):
                    while self._answers or self._out or self._out_bytes:
                        await self._ease()
                    if self._parser.failure is not None or self.counts["errors"]:
                        await self._linger()
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self._queues.counts["connections_broken"] += 1
        except* Exception:
            logger.exception("the connection of client %s failed", self.remote)
        finally:
            if self.consumer is not None:
                with trio.CancelScope(shield=True):
                    await self.consumer.aclose()
            self._queues.quotas.memory.hold(self, 0)
            await trio.aclose_forcefully(self._stream)

    async def _linger(self) -> None:
        """Read on for a moment: closing with unread data would lose the error to the client."""
        with trio.move_on_after(LINGER_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(READ_BYTES):
                pass

    # In

    async def _read(self) -> None:
        parser = self._parser
        while not self._ending:
            heartbeat_ms = self.session.settings.heartbeat_ms
            data = b""
            with trio.move_on_after(heartbeat_ms * 2 / 1000 if heartbeat_ms else float("inf")) as self._reading:
                while self._answer_bytes > ANSWER_BYTES_MAX:
                    await self._ease()
                if parser.buffered_bytes >= READ_BYTES:  # in a large body; small commands always get through
                    await self._wait_for_memory()
                data = bytes(await self._stream.receive_some(READ_BYTES))
            if self._reading.cancelled_caught:
                if not self._ending:
                    self._queues.counts["connections_silent"] += 1
                return
            if not data:
                return
            try:
                commands = parser.feed(data)
                self._has_begun = self._has_begun or bool(commands)
                self._account()
                await self._do(commands)
                self._account()
                if parser.failure is not None:
                    raise parser.failure
            except NsqError as error:
                self._fail(error)
                return

    def _account(self) -> None:
        held_bytes = self._parser.buffered_bytes + self._publish_bytes + self._out_bytes
        self._queues.quotas.memory.hold(self, held_bytes)

    async def _wait_for_memory(self) -> None:
        memory = self._queues.quotas.memory
        if not memory.has_share(self):
            self._queues.counts["memory_waited"] += 1
            await memory.wait(self)

    def _fail(self, error: NsqError) -> None:
        self._answer(self._failed(error))

    def _failed(self, error: NsqError) -> bytes:
        """Count an error, log it, and send it as a frame."""
        if error.fatal or not self.counts["errors"]:  # a client can cause further ones without end
            logger.info("client %s: %s", self.remote, error)
        self.counts["errors"] += 1
        self._queues.counts[f"errors_{error.nsq_code[2:].lower()}"] += 1
        return encode_frame(FRAME_ERROR, str(error).encode("utf-8", "backslashreplace"))

    async def _do(self, commands: Sequence[Command]) -> None:
        finished: list[bytes] = []
        for command in commands:
            if isinstance(command, Finish):
                self.session.accept(command)
                finished.append(command.message_id)
                continue
            if finished:
                self._finish(finished)
                finished = []
            if self.session.accept(command):
                await self._do_one(command)
        if finished:
            self._finish(finished)

    async def _do_one(self, command: Command) -> None:
        if isinstance(command, PublishCommand):
            await self._publish(command)
        elif isinstance(command, Requeue | Touch):
            self._settle(command)
        elif isinstance(command, Ready):
            if self.consumer is not None:
                self.consumer.set_ready(command.count)
        elif isinstance(command, SubscribeCommand):
            await self._subscribe(command)
        elif isinstance(command, IdentifyCommand):
            self._answer(encode_frame(FRAME_RESPONSE, identify_answer(self.session.settings, self.session.limits)))
        elif isinstance(command, Close):
            if self.consumer is not None:
                self.consumer.set_ready(0)
            self._answer(CLOSE_WAIT)

    # Publishing

    async def _publish(self, command: PublishCommand) -> None:
        verb = command.verb
        size = sum([len(body) for body in command.bodies])
        delay_s = command.delay_ms / 1000
        messages = [NewMessage(body, delay_s=delay_s) for body in command.bodies]
        while self._publishes >= PUBLISHES_MAX or (self._publishes and self._publish_bytes + size > PUBLISH_BYTES_MAX):
            await self._ease()
        await self._wait_for_turn(len(messages))
        answer = _Answer()

        def release() -> None:
            self._publishes -= 1
            self._publish_bytes -= size
            self._account()
            self._queues.quotas.publishes.add(self, -len(messages))

        def done(_ids: Sequence[tuple[int, int]], error: Dep2pError | None) -> None:
            release()
            if error is None:
                answer.data = OK
                self._published(command)
            else:
                answer.data = self._failed(_refusal(verb, error))
                self._ending = True
                self._reading.cancel()
            self._flush()

        try:
            namespace = self._queues.namespace()
            await self._queues.topic(namespace, command.topic, self._topics_rate)
        except (Dep2pError, ValueError) as error:
            raise _refusal(verb, error) from error
        self._publishes += 1
        self._publish_bytes += size
        self._account()
        self._queues.quotas.publishes.add(self, len(messages))
        self._answers.append(answer)
        try:
            try:
                self._engine.publish_soon(namespace, command.topic, messages, None, done)
            except BaseException:
                release()
                self._answers.remove(answer)
                raise
        except QueueFullError:
            await self._publish_when_space(command, namespace, messages)
        except (Dep2pError, ValueError) as error:
            raise _refusal(verb, error) from error

    async def _wait_for_turn(self, messages: int) -> None:
        """Wait until this connection's rate and its share of the publishes allow so many messages more."""
        if self._messages_rate is not None:
            while wait_s := self._messages_rate.wait_s(trio.current_time()):
                self._queues.counts["messages_waited"] += 1
                await trio.sleep(wait_s)
            self._messages_rate.spend(messages)
        publishes = self._queues.quotas.publishes
        if not publishes.has_share(self, messages):
            self._queues.counts["publishes_waited_share"] += 1
            await publishes.wait(self, messages)

    async def _publish_when_space(self, command: PublishCommand, namespace: str, messages: list[NewMessage]) -> None:
        """Publish when there is room. The connection is not read meanwhile, which holds its publisher back."""
        self._queues.counts["publishes_waited"] += 1
        try:
            await self._engine.publish(namespace, command.topic, messages, timeout_s=SPACE_TIMEOUT_S)
        except (Dep2pError, ValueError) as error:
            raise _refusal(command.verb, error) from error
        self._published(command)
        self._answer(OK)

    def _published(self, command: PublishCommand) -> None:
        self.counts["published"] += len(command.bodies)
        self.counts[f"topic {command.topic}"] += len(command.bodies)
        self._queues.counts["published"] += len(command.bodies)

    # Consuming

    async def _subscribe(self, command: SubscribeCommand) -> None:
        timeout_ms = self.session.settings.msg_timeout_ms
        try:
            namespace = self._queues.namespace()
            for is_last in (False, True):
                try:
                    await self._queues.topic(namespace, command.topic, self._topics_rate)
                    self.consumer = await self._engine.subscribe(
                        namespace,
                        command.topic,
                        command.channel,
                        SubscribeOptions(max_in_flight=0, bytes_max=IN_FLIGHT_BYTES_MAX),
                        msg_timeout_s=timeout_ms / 1000 if timeout_ms else None,
                        owner=f"nsq {self.session.settings.client_id or self.remote}",
                    )
                    break
                except ChannelNotFoundError:  # an ephemeral channel whose last client has just left
                    if is_last:
                        raise
        except (Dep2pError, ValueError) as error:
            raise NsqError("E_SUB_FAILED", f"SUB failed {error}") from error
        self._answer(OK)
        self._nursery.start_soon(self._deliver)

    async def _deliver(self) -> None:
        consumer = self.consumer
        assert consumer is not None
        sample_rate, rng = self.session.settings.sample_rate, self._queues.rng
        most = 1
        """Messages of one step: about as many as fit into the output, by the size of those before."""
        while True:
            while self._out_bytes > OUT_BYTES_MAX:
                await self._ease()
            if self._out_bytes:
                await self._wait_for_memory()
            try:
                deliveries = await consumer.receive(most)
            except Dep2pError:
                self._nursery.cancel_scope.cancel()  # topic or channel was deleted: nsqd closes its clients then
                return
            sampled_out: list[tuple[int, int]] = []
            for partition, seq, attempts, published_us, _deadline_s, _attributes, body, _epoch in deliveries:
                if sample_rate and rng.randrange(100) >= sample_rate:
                    sampled_out.append((partition, seq))
                    continue
                raw_id = message_id(partition, seq).encode()
                self._put(encode_message(raw_id, attempts, published_us * 1000, body), is_answer=False)
            largest = max([len(each[6]) for each in deliveries], default=0)
            most = max(1, min(_DELIVERIES, OUT_BYTES_MAX // (largest + 1)))
            self._account()
            if sampled_out:
                consumer.finish(sampled_out)
            sent = len(deliveries) - len(sampled_out)
            self.counts["delivered"] += sent
            self._queues.counts["delivered"] += sent
            self._queues.counts["sampled_out"] += len(sampled_out)

    def _finish(self, ids: list[bytes]) -> None:
        consumer = self.consumer
        if consumer is None:
            return
        keys: list[tuple[int, int]] = []
        for raw in ids:
            key = _key(raw)
            if key is None:
                self._not_held("FIN", raw)
            else:
                keys.append(key)
        refused = consumer.finish(keys)
        for key in refused:
            self._not_held("FIN", message_id(*key).encode())
        self.counts["finished"] += len(keys) - len(refused)
        self._queues.counts["finished"] += len(keys) - len(refused)

    def _settle(self, command: Requeue | Touch) -> None:
        consumer = self.consumer
        if consumer is None:
            return
        verb, kind, delay_ms = "TOUCH", Settle.TOUCH, 0
        if isinstance(command, Requeue):
            most_ms = round(self._engine.defaults.delay_max_s * 1000)
            verb, kind, delay_ms = "REQ", Settle.REQUEUE, min(command.delay_ms, most_ms)
        key = _key(command.message_id)
        if key is None or consumer.apply([DeliveryResult(kind, *key, delay_ms)]).refused:
            self._not_held(verb, command.message_id)
            return
        name = "requeued" if kind is Settle.REQUEUE else "touched"
        self.counts[name] += 1
        self._queues.counts[name] += 1

    def _not_held(self, verb: str, raw_id: bytes) -> None:
        shown = raw_id.decode("ascii", "backslashreplace")
        self._fail(NsqError(f"E_{verb}_FAILED", f"{verb} {shown} failed ID not in flight", fatal=False))

    # Out

    def _answer(self, data: bytes) -> None:
        self._answers.append(_Answer(data))
        self._flush()

    def _flush(self) -> None:
        answers = self._answers
        while answers and (data := answers[0].data) is not None:
            answers.popleft()
            if data:
                self._put(data)
        self._eased.set()

    def _put(self, data: bytes, *, is_answer: bool = True) -> None:
        self._out.append((data, is_answer))
        self._out_bytes += len(data)
        if is_answer:
            self._answer_bytes += len(data)
        self._changed.set()

    async def _ease(self) -> None:
        if self._eased.is_set():
            self._eased = trio.Event()
        await self._eased.wait()

    async def _write(self) -> None:
        out = self._out
        while True:
            if not out:
                self._changed = trio.Event()
                self._eased.set()
                await self._changed.wait()
                continue
            most = self.session.settings.output_buffer_bytes
            chunk: list[bytes] = []
            size = answers = 0
            while out and (not chunk or size + len(out[0][0]) <= most):
                data, is_answer = out.popleft()
                chunk.append(data)
                size += len(data)
                answers += len(data) if is_answer else 0
            await self._send(b"".join(chunk))
            self._out_bytes -= size
            self._answer_bytes -= answers
            self._account()
            self._eased.set()

    async def _send(self, data: bytes) -> None:
        """Send in parts, so that a slow client that takes one after the other is not taken for one that takes none."""
        settings, limits = self.session.settings, self.session.limits
        stall_s = (settings.heartbeat_ms or limits.heartbeat_ms) / 1000
        with memoryview(data) as view:
            for start in range(0, len(view), READ_BYTES):
                began_s = trio.current_time()
                with trio.fail_after(stall_s):
                    await self._stream.send_all(view[start : start + READ_BYTES])
                now_s = trio.current_time()
                if now_s - began_s >= _WAITED_S and settings.heartbeat_ms:
                    # The client takes what is in front of the heartbeat: it cannot have answered that.
                    self._reading.deadline = max(self._reading.deadline, now_s + 2 * settings.heartbeat_ms / 1000)

    async def _beat(self) -> None:
        last_s = trio.current_time()
        while True:
            heartbeat_ms = self.session.settings.heartbeat_ms
            if not heartbeat_ms:
                return
            due_s = last_s + heartbeat_ms / 1000
            # IDENTIFY may choose another interval at any time: look again each second until it did.
            await trio.sleep_until(due_s if self.session.has_identified else min(due_s, trio.current_time() + 1.0))
            if trio.current_time() >= due_s:
                last_s = trio.current_time()
                self._put(HEARTBEAT)


def _key(raw: bytes) -> tuple[int, int] | None:
    try:
        return parse_message_id(raw.decode("ascii"))
    except ValueError:
        return None


def _refusal(verb: str, error: Exception) -> NsqError:
    if isinstance(error, NsqError):
        return error
    if isinstance(error, MessageTooLargeError):
        return NsqError("E_BAD_MESSAGE", f"{verb} message too big: {error}")
    return NsqError(f"E_{verb}_FAILED", f"{verb} failed {error}")
