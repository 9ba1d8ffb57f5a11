"""The broker's side of simple consumers: receive, ack and change_invisible as calls of their own.

Received messages belong to their asker (a member, or this node's programs) for their invisible duration, even when the
asker's connection is lost; then they are delivered again. RocketMQ calls it a simple consumer; nothing here is retried.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import trio

from dep2p.errors import NotInFlightError, QueueConsumerClosedError, QueueFullError
from dep2p.protocols.queues import consumer as core
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.consumer import HeldMessage
from dep2p.protocols.queues.names import is_ephemeral, message_id, parse_message_id
from dep2p.queues.broker.interfaces import EngineCore, ReceivingEngine

ITEMS_MAX: Final = 32
"""Messages of one receive, as RocketMQ's."""
WAIT_MAX_S: Final = 20.0
_WAIT_MIN_S: Final = 0.05
"""The least time of a receive, also of one that does not wait: a delivery takes a commit."""
BODIES_BYTES: Final = 524_288
"""About the bytes of the bodies in one reply."""
HELD_ITEMS_MAX: Final = 16_384
HELD_BYTES_MAX: Final = 67_108_864
"""Bytes that one receiver may hold of a channel without an acknowledgement: all of them are in memory."""
_ATTEMPTS_REMEMBERED: Final = 512

Key = tuple[int, int]


class ReceivedDelivery(NamedTuple):
    """A message that was received."""

    delivery: core.ChannelDelivery
    handle: str
    invisible_s: float


class _Waiter:
    """A receive that waits."""

    __slots__ = ("arrived", "attempt_id", "got", "items", "size")

    def __init__(self, items: int, attempt_id: str) -> None:
        self.items = items
        self.attempt_id = attempt_id
        self.size = 0
        self.got: list[core.ChannelDelivery] = []
        self.arrived = trio.Event()

    @property
    def has_room(self) -> bool:
        return len(self.got) < self.items and self.size < BODIES_BYTES


class Receiver:
    """The messages that one simple consumer has received from one channel and holds."""

    def __init__(self, engine: EngineCore, channel: Channel, name: str) -> None:
        self.channel = channel
        self.closed: str = ""
        self.core: core.ChannelConsumer = core.ChannelConsumer(
            name,
            core.ConsumerWindow(0, HELD_BYTES_MAX, channel.queue.options.msg_timeout_s),
            on_deliver=self._on_deliver,
            on_closed=self._on_closed,
        )
        self._engine = engine
        self._waiters: deque[_Waiter] = deque()
        self._spare: list[Key] = []
        """Messages that came when no receive waited: to release."""
        self._attempts: OrderedDict[str, list[tuple[Key, int]]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Ids of attempts that were given up: they get no messages, whenever they come."""
        channel.attach(self.core)

    @property
    def waiting(self) -> int:
        """The number of receives that wait."""
        return len(self._waiters)

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing, and no receive waits."""
        return not self.core.held and not self._waiters

    def _on_deliver(self, deliveries: list[core.ChannelDelivery]) -> None:
        for delivery in deliveries:
            while self._waiters and not self._waiters[0].has_room:
                self._waiters.popleft()
            if self._waiters:
                waiter = self._waiters[0]
                waiter.got.append(delivery)
                waiter.size += len(delivery.message.body) + len(delivery.message.attributes)
                waiter.arrived.set()
            else:
                self._spare.append((delivery.partition, delivery.message.seq))
        while self._waiters and self._waiters[0].got:
            self._waiters.popleft()
        if self._spare:
            trio.lowlevel.current_trio_token().run_sync_soon(self._release_spare)

    def _on_closed(self, reason: str) -> None:
        self.closed = reason
        for waiter in self._waiters:
            waiter.arrived.set()
        self._waiters.clear()

    def _release_spare(self) -> None:
        spare, self._spare = self._spare, []
        for key in sorted(spare, reverse=True):
            if key in self.core.held:
                self.channel.release(self.core, key)
        self._engine.changed()

    def _set_ready(self) -> None:
        wanted = sum(waiter.items for waiter in self._waiters)
        ready = min(HELD_ITEMS_MAX, len(self.core.held) + wanted) if wanted else 0
        self.channel.set_ready(self.core, ready)
        self._engine.changed()

    async def receive(
        self, items: int, wait_s: float, invisible_s: float, attempt_id: str, *, only_again: bool = False
    ) -> list[ReceivedDelivery]:
        """Return the messages that are there, at least one unless ``wait_s`` is over. ``only_again``: only those that
        this attempt received before.

        Raises QueueFullError: too much is unacknowledged.
        """
        again = self._received_before(attempt_id, invisible_s)
        if again or only_again or attempt_id in self._ended:
            await trio.lowlevel.checkpoint()
            return again
        held = self.core.held
        if len(held) >= HELD_ITEMS_MAX or self.core.held_bytes >= HELD_BYTES_MAX:
            await trio.lowlevel.checkpoint()
            raise QueueFullError(
                f"{len(held)} received messages of {self.core.held_bytes} bytes are not acknowledged: ack some, or "
                "wait until their invisible duration is over"
            )
        waiter = _Waiter(items, attempt_id)
        self._waiters.append(waiter)
        self._set_ready()
        try:
            with trio.move_on_after(max(_WAIT_MIN_S, wait_s)):
                await waiter.arrived.wait()
        except BaseException:
            self._release(waiter)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if not self.closed:
                self._set_ready()
        if self.closed and not waiter.got:
            raise QueueConsumerClosedError(f"nothing more can be received: {self.closed}")
        if attempt_id in self._ended:
            self._release(waiter)
            return []
        received = [each for each in (self._hold(delivery, invisible_s) for delivery in waiter.got) if each]
        if attempt_id and received:
            self._attempts[attempt_id] = [
                ((each.delivery.partition, each.delivery.message.seq), each.delivery.attempts) for each in received
            ]
            if len(self._attempts) > _ATTEMPTS_REMEMBERED:
                self._attempts.popitem(last=False)
        return received

    def _release(self, waiter: _Waiter) -> None:
        self._spare += [(each.partition, each.message.seq) for each in waiter.got]
        self._release_spare()

    def end(self, attempt_id: str) -> None:
        """Give up a receive: release the messages that it got, or gets yet."""
        self._ended[attempt_id] = None
        if len(self._ended) > _ATTEMPTS_REMEMBERED:
            self._ended.popitem(last=False)
        for waiter in self._waiters:
            if waiter.attempt_id == attempt_id:
                waiter.arrived.set()
        for key, attempts in self._attempts.pop(attempt_id, ()):
            held = self.core.held.get(key)
            if held is not None and held.attempts == attempts:
                self._spare.append(key)
        self._release_spare()

    def _received_before(self, attempt_id: str, invisible_s: float) -> list[ReceivedDelivery]:
        """Return the messages of an earlier receive that is asked again since its answer was lost."""
        found: list[ReceivedDelivery] = []
        for key, attempts in self._attempts.get(attempt_id, ()) if attempt_id else ():
            held = self.core.held.get(key)
            if held is not None and held.attempts == attempts:
                received = self._hold(core.ChannelDelivery(key[0], held.message, attempts, held.deadline), invisible_s)
                found += [received] if received is not None else []
        return found

    def _hold(self, delivery: core.ChannelDelivery, invisible_s: float) -> ReceivedDelivery | None:
        key = (delivery.partition, delivery.message.seq)
        held = self.core.held.get(key)
        if held is None:
            return None
        left_s = self._hold_for(key, held, invisible_s)
        return ReceivedDelivery(delivery, f"{message_id(*key)}-{delivery.attempts}", left_s)

    def _hold_for(self, key: Key, held: HeldMessage, invisible_s: float) -> float:
        now = self._engine.now()
        until: float = min(now + invisible_s, held.first + self.channel.queue.options.msg_timeout_max_s)
        self.core.hold_until(key, held, until)
        self._engine.changed()
        return max(0.0, until - now)

    def _held(self, handle: str) -> tuple[Key, HeldMessage] | None:
        key, attempts = parse_handle(handle)
        partitions = self.channel.queue.partition_ids
        if not key[0] and len(partitions) == 1:  # of a shard, whose number members do not know
            key = (partitions[0], key[1])
        held = self.core.held.get(key)
        return (key, held) if held is not None and held.attempts == attempts else None

    def ack(self, handles: Sequence[str]) -> list[str]:
        """Acknowledge messages. Return the handles that are not held any more. Raises ``ValueError`` for a malformed
        handle."""
        found = {handle: self._held(handle) for handle in handles}
        self.channel.finish(self.core, [each[0] for each in found.values() if each is not None])
        self._engine.changed()
        return [handle for handle, each in found.items() if each is None]

    def change_invisible(self, handle: str, invisible_s: float) -> float:
        """Deliver a message again after ``invisible_s`` from now, unless it is acknowledged before; return the time
        that it got.

        Raises NotInFlightError, ``ValueError``.
        """
        found = self._held(handle)
        if found is None:
            raise NotInFlightError(
                f"the message {handle[:40]} is not held here any more: its time was over, or it is done"
            )
        key, held = found
        if invisible_s > 0:
            return self._hold_for(key, held, invisible_s)
        self.channel.requeue(self.core, key, 0.0, "it was made visible", self._engine.now())
        self._engine.changed()
        return 0.0


class SimpleReceivers:
    """All receivers of an engine, by channel and asker."""

    def __init__(self, engine: ReceivingEngine) -> None:
        self._engine = engine
        self._receivers: dict[tuple[int, str], Receiver] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._receivers)

    @property
    def waiting(self) -> int:
        """The number of receives that wait."""
        return sum(each.waiting for each in self._receivers.values())

    async def receiver(
        self, namespace: str, name: str, channel: str, owner: str, *, from_start: bool, of_distributed: bool = False
    ) -> Receiver:
        """Return the receiver of a channel and an asker. The channel is made if it is new, except one
        ``of_distributed``: the controller of a distributed queue makes it in all partitions. Raises
        ChannelNotFoundError then, ``ValueError`` for an ephemeral one."""
        require_lasting(channel)
        queue = await self._engine.loaded(namespace, name)
        if queue.channels.get(channel) is None and not of_distributed:
            await self._engine.create_channel(namespace, name, channel, from_start=from_start)
        found = queue.channel(channel)
        known = self._receivers.get((found.id, owner))
        if known is None or known.closed:
            self._forget_idle()
            if len(self._receivers) >= self._engine.consumers_max:
                raise QueueFullError(f"{len(self._receivers)} askers receive messages: no more")
            self._number += 1
            known = self._receivers[found.id, owner] = Receiver(self._engine, found, f"{owner} simple {self._number}")
        return known

    async def known(self, namespace: str, name: str, channel: str, owner: str) -> Receiver | None:
        """Return the receiver of a channel and an asker, if it has received anything."""
        queue = await self._engine.loaded(namespace, name)
        return self._receivers.get((queue.channel(channel).id, owner))

    def _forget_idle(self) -> None:
        now = self._engine.now()
        for key, receiver in list(self._receivers.items()):
            if receiver.closed or receiver.is_idle:
                del self._receivers[key]
                if not receiver.closed:
                    receiver.channel.detach(receiver.core, now)


def require_lasting(channel: str) -> None:
    """Raises ``ValueError`` for the name of an ephemeral channel."""
    if is_ephemeral(channel):
        raise ValueError(f"the channel {channel!r} goes with its last consumer: consume from it, or take another one")


def parse_handle(handle: str) -> tuple[Key, int]:
    """Parse a receipt handle: the message and the attempt. Raises ``ValueError``."""
    text, _, attempts = handle.partition("-")
    try:
        if not attempts.isascii() or not attempts.isdigit() or len(attempts) > 10:
            raise ValueError
        return parse_message_id(text), int(attempts)
    except ValueError:
        raise ValueError(f"{handle[:40]!r} is no receipt handle: take that of a received message") from None
