"""Signatures in batches and the validators of apps, beside the tasks that receive."""

import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from dep2p.concurrency.wait_queue import Sleeper
from dep2p.errors import PublishRefusedError
from dep2p.gossipsub.events import Verdict
from dep2p.gossipsub.headers import NO_HEADERS, MessageHeaders
from dep2p.gossipsub.rpc import RpcMessage as RouterMessage
from dep2p.gossipsub.topic_types import TopicMessage
from dep2p.protocols.fairness.lines import PeerLines
from dep2p.pubsub.types import TopicValidator, ValidatorVerdict
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_BATCH_COST: Final = 32
"""The work, counted in signatures, after which other tasks get a turn: some 2 ms."""
_ACCEPT: Final = Verdict.ACCEPT  # looking up a member of an enumeration costs as much as a small call
_SAY_INTERVAL_S: Final = 60.0
_COST_BYTES: Final = 16_384
"""Bytes that cost about as much again as a signature."""


class Judge(Protocol):
    """The receiver of verdicts."""

    def judged(self, ticket: int, verdict: Verdict) -> None: ...

    def received_all(self) -> None:
        """These were all verdicts of one batch."""
        ...


class Validator:
    """One validator of a topic, with its throttle."""

    __slots__ = ("concurrency", "fn", "running", "timeout_s")

    def __init__(self, fn: TopicValidator, concurrency: int, timeout_s: float) -> None:
        if concurrency < 1 or timeout_s <= 0:
            raise ValueError("a validator's concurrency must be at least 1 and its timeout_s above 0")
        if not callable(fn):
            raise ValueError(f"a validator must be callable, not {fn!r}")
        self.fn: TopicValidator = fn
        self.concurrency: int = concurrency
        self.timeout_s: float = timeout_s
        self.running: int = 0


class Validation:
    """The messages that wait for a verdict.

    `put` never blocks; `run` is one task, and each async validator at work another.
    """

    def __init__(
        self,
        judge: Judge,
        counters: Counter[str],
        check_signature: Callable[[RouterMessage], str | None],
        public_message: Callable[[RouterMessage, PeerId | None], TopicMessage],
        *,
        items_max: int,
        on_held: Callable[[bool], None],
    ) -> None:
        """``on_held``: called with True when more than half of ``items_max`` is waiting, with False when few are
        left."""
        self._judge = judge
        self._counters = counters
        self._check_signature = check_signature
        self._public_message = public_message
        self._high = max(1, items_max // 2)
        self._low = items_max // 8
        self._on_held = on_held
        self._is_held = False
        self._items_max = max(1, items_max)
        self._say_at_s = float("-inf")
        self._waiting: PeerLines[tuple[int, RouterMessage, PeerId, bool]] = PeerLines()
        self._sleeper = Sleeper()
        self._nursery: trio.Nursery | None = None
        self._at_work = 0
        self.by_topic: dict[str, list[Validator]] = {}

    def __len__(self) -> int:
        return len(self._waiting) + self._at_work

    def put(self, ticket: int, message: RouterMessage, peer: PeerId, *, has_signature: bool) -> None:
        """Take a message for judgement, behind those of its peer and its author: peers take turns, and messages of one
        author keep their order.

        Above ``items_max`` of one peer, which one large RPC can bring, it is not judged.
        """
        waiting = len(self._waiting)
        if waiting >= self._items_max and self._waiting.waiting(peer) >= self._items_max:
            self._counters["messages_dropped_peer_over_share"] += 1
            self._say_dropped(peer)
            self._judge.judged(ticket, Verdict.THROTTLED)
            return
        self._waiting.put(peer, message.author or peer, (ticket, message, peer, has_signature))
        if not self._is_held and waiting + 1 + self._at_work > self._high:
            self._is_held = True
            self._on_held(True)
        if self._sleeper.task is not None:
            self._sleeper.wake()

    def _say_dropped(self, peer: PeerId) -> None:
        now = trio.current_time()
        if now >= self._say_at_s:
            self._say_at_s = now + _SAY_INTERVAL_S
            logger.warning(
                "%s sent over %d messages at once: the rest of them was dropped without a verdict; counted as "
                "pubsub_messages_dropped_peer_over_share, logged once in %.0f s",
                peer,
                self._items_max,
                _SAY_INTERVAL_S,
            )

    async def run(self) -> None:
        """Run until cancelled."""
        async with trio.open_nursery() as self._nursery:
            while True:
                if self._waiting:
                    self._one_batch()
                    self._judge.received_all()
                    self._resume_if_low()
                    await trio.lowlevel.checkpoint()
                else:
                    await self._sleeper.wait()

    def _one_batch(self) -> None:
        cost = 0
        waiting = self._waiting
        left = len(waiting)  # a verdict adds nothing that this step could not leave to the next one
        while left and cost < _BATCH_COST:
            left -= 1
            ticket, message, peer, has_signature = waiting.take()
            cost += 1
            if has_signature:
                cost += len(message.data) // _COST_BYTES
                if self._check_signature(message) is not None:
                    self._counters["rejected_invalid_signature"] += 1
                    self._judge.judged(ticket, Verdict.BAD_SIGNATURE)
                    continue
            validators = self.by_topic.get(message.topic)
            if validators:
                self._ask(ticket, message, peer, list(validators))
            else:
                self._judge.judged(ticket, _ACCEPT)

    def _resume_if_low(self) -> None:
        if self._is_held and len(self) <= self._low:
            self._is_held = False
            self._on_held(False)

    # Validators of apps

    async def judge_own(
        self, topic: str, body: bytes, sender: PeerId | None, headers: MessageHeaders = NO_HEADERS
    ) -> None:
        """Ask the topic's validators about a message before this node publishes it.

        It has no id and no seqno yet, and came from no neighbour. Raises PublishRefusedError unless all of them accept.
        """
        message = TopicMessage(topic, body, sender, None, b"", None, headers)
        for validator in list(self.by_topic.get(topic, ())):
            try:
                verdict = await self._call(message, validator)
            except Exception as error:
                logger.exception("a validator of topic %r failed: the publish is refused", topic)
                self._counters["validators_failed"] += 1
                raise PublishRefusedError(f"a validator of topic {topic!r} failed: nothing was sent") from error
            if verdict is not Verdict.ACCEPT:
                self._counters["publishes_refused_validator"] += 1
                raise PublishRefusedError(
                    f"a validator of topic {topic!r} said {verdict.name.lower()}: nothing was sent"
                )

    def _ask(self, ticket: int, message: RouterMessage, peer: PeerId, validators: list[Validator]) -> None:
        """Ask sync validators at once; from the first async one on, a task of its own goes on."""
        public = self._public_message(message, peer)
        for number, validator in enumerate(validators):
            try:
                answer = validator.fn(public)
            except Exception:
                logger.exception("a validator of topic %r failed: its message is ignored", message.topic)
                self._counters["validators_failed"] += 1
                self._judge.judged(ticket, Verdict.IGNORE)
                return
            if inspect.isawaitable(answer):
                if validator.running >= validator.concurrency or self._nursery is None:
                    if inspect.iscoroutine(answer):
                        answer.close()
                    self._counters["validations_throttled"] += 1
                    self._judge.judged(ticket, Verdict.THROTTLED)
                    return
                validator.running += 1
                self._at_work += 1
                self._nursery.start_soon(self._finish, ticket, public, answer, validator, validators[number + 1 :])
                return
            verdict = _as_verdict(answer)
            if verdict is not Verdict.ACCEPT:
                self._judge.judged(ticket, verdict)
                return
        self._judge.judged(ticket, Verdict.ACCEPT)

    async def _finish(
        self,
        ticket: int,
        message: TopicMessage,
        answer: Awaitable[ValidatorVerdict],
        validator: Validator,
        following: list[Validator],
    ) -> None:
        verdict = Verdict.IGNORE
        try:
            verdict = await self._await_one(message, answer, validator)
            for other in following:
                if verdict is not Verdict.ACCEPT:
                    break
                verdict = await self._call(message, other)
        except Exception:
            logger.exception("a validator of topic %r failed: its message is ignored", message.topic)
            self._counters["validators_failed"] += 1
            verdict = Verdict.IGNORE
        finally:
            self._at_work -= 1
        self._judge.judged(ticket, verdict)
        self._judge.received_all()
        self._resume_if_low()

    async def _call(self, message: TopicMessage, validator: Validator) -> Verdict:
        answer = validator.fn(message)
        if not inspect.isawaitable(answer):
            return _as_verdict(answer)
        if validator.running >= validator.concurrency:
            if inspect.iscoroutine(answer):
                answer.close()
            self._counters["validations_throttled"] += 1
            return Verdict.THROTTLED
        validator.running += 1
        return await self._await_one(message, answer, validator)

    async def _await_one(
        self, message: TopicMessage, answer: Awaitable[ValidatorVerdict], validator: Validator
    ) -> Verdict:
        try:
            with trio.move_on_after(validator.timeout_s):
                return _as_verdict(await answer)
        finally:
            validator.running -= 1
        self._counters["validations_timed_out"] += 1
        return Verdict.IGNORE


def _as_verdict(answer: object) -> Verdict:
    if answer is None or answer is True:
        return Verdict.ACCEPT
    if answer is False:
        return Verdict.REJECT
    if isinstance(answer, Verdict) and answer is not Verdict.BAD_SIGNATURE:
        return answer
    raise TypeError(f"a validator gave {answer!r}: it must give a Verdict, a bool or None")
