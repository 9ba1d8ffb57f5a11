"""A channel: an independent cursor over a queue's partitions, with what is in flight, deferred and done. Pure."""

from collections.abc import Sequence

from dep2p.errors import NotInFlightError
from dep2p.protocols.queues.consumer import Consumer, Delivery, Held
from dep2p.protocols.queues.cursor import Place
from dep2p.protocols.queues.failure_history import add_failure
from dep2p.protocols.queues.lookahead import ChannelAhead
from dep2p.protocols.queues.message import Message, encode_meta
from dep2p.protocols.queues.partition_log import Read
from dep2p.protocols.queues.records import DeadRow, StateRow
from dep2p.protocols.queues.trace_hooks import OVERDUE, QueueTrace

_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class Channel(ChannelAhead):
    """Made by `Queue.create_channel`."""

    # Consumers

    def attach(self, consumer: Consumer) -> None:
        """A consumer takes messages from now on. Raises ``ValueError`` when its id is attached already."""
        if consumer.id in self.consumers:
            raise ValueError(f"a consumer {consumer.id!r} is attached already")
        self.consumers[consumer.id] = consumer
        self.queue.book.active[self] = None
        self.wake()

    def set_ready(self, consumer: Consumer, max_in_flight: int) -> None:
        """It holds at most so many from now on; 0 pauses it."""
        consumer.max_in_flight = max_in_flight
        self.wake()

    def detach(self, consumer: Consumer, now: float) -> None:
        """The consumer is gone: what it held goes to others at once, unless the queue's options say otherwise."""
        if self.consumers.get(consumer.id) is not consumer:
            return
        if self.queue.options.requeue_on_disconnect or self.queue.is_ephemeral:
            del self.consumers[consumer.id]
            consumer.staged = []
            # Each goes to the front, so that their order stays; that of `held` is the order of deadlines.
            for key in sorted(consumer.held, reverse=True):
                held = consumer.drop(key)
                assert held is not None
                if not held.is_out:  # it never saw it
                    self._release(key, held)
                else:
                    self.counts["requeued_consumer_gone"] += 1
                    self._back(key, held, now, 0.0, "its consumer was gone", front=True)
        else:
            consumer.max_in_flight = 0
            consumer.is_gone = True
            if not consumer.held:
                del self.consumers[consumer.id]
        self.wake()

    # Handing out

    def pump(self, now: float, wall_us: int) -> list[Read]:
        """Assign what is ready to the consumers that have room, fairly. Gives the pages that are missing for it."""
        self.is_awake = False
        self._undefer(now)
        if self.is_paused or self.queue.is_paused:
            return []
        wants: dict[int, Read] = {}
        # Pages of what is ready come first: those further ahead would push them out again, for ever.
        self._look_ahead(now, wall_us, None if self._is_first_missing() else wants)
        hungry = [each for each in self.consumers.values() if each.room > 0]
        if not hungry:
            return []
        turn = self._turn
        # Each has a run of what is ready: its results come together, and the floor moves with them.
        share = len(self._ready) // len(hungry)
        handed = 0
        while hungry:
            index = turn % len(hungry)
            consumer = hungry[index]
            count = self._hand_out_run(consumer, max(1, share - handed), now)
            if not count:
                key = self._next_ready()
                if key is None:
                    if not self._look_ahead(now, wall_us, wants):
                        break
                    continue
                place = self._places[key[0]]
                message = place.log.rows.get(key[1])
                if message is None:
                    self._put_back(key)
                    self._want(place, key[1], wants)
                    break
                self._hand_out(place, message, consumer, now)
                count = 1
            handed += count
            if consumer.room <= 0:
                hungry.pop(index)
                turn, handed = index, 0
            elif handed >= share:
                turn, handed = turn + 1, 0
        self._turn = turn + 1 if handed else turn
        return list(wants.values())

    def _hand_out_run(self, consumer: Consumer, most: int, now: float) -> int:
        """As `_hand_out` of what `_next_ready` gives, for the first of what is ready, as long as the cursor alone says
        what was handed out: nearly all messages. Gives how many."""
        ready = self._ready
        if not ready or self._urgent:
            return 0
        partition = ready[0][0]
        place = self._places.get(partition)
        if place is None or place.states or place.log.holes:
            return 0
        rows, unhanded, cursor = place.log.rows, place.unhanded, place.cursor
        above = max(cursor.floor, place.log.trimmed, place.done.last)
        held_of, staged, trace = consumer.held, consumer.staged, self.queue.book.trace
        deadline = now + consumer.msg_timeout_s
        size = count = 0
        room_bytes = consumer.bytes_max - consumer.held_bytes
        most = min(most, consumer.max_in_flight - len(held_of))
        while count < most and ready and size < room_bytes:
            key = ready[0]
            seq = key[1]
            message = rows.get(seq)
            if message is None or message[2] or key[0] != partition or seq <= above or next(iter(unhanded), 0) != seq:
                break
            del ready[0], unhanded[seq]
            held_of[key] = held = Held(message, 1, now, deadline)
            size += held.size
            staged.append(_new(Delivery, (partition, message, 1, deadline, 0)))
            count += 1
            if trace is not None:
                trace.handed_out(self, partition, message, consumer.id, 1)
        if count:
            handed_out = next(iter(unhanded), place.read) - 1
            if handed_out > cursor.handed_out:
                cursor.handed_out = handed_out
            self._touch(place)
            consumer.held_bytes += size
            consumer.delivered += count
            self.counts["delivered"] += count
            self.queue.book.staged[consumer] = None
        return count

    def _hand_out(self, place: Place, message: Message, consumer: Consumer, now: float) -> None:
        seq = message.seq
        state = place.states.get(seq)
        unhanded = place.unhanded
        if state is None and not message.due_us and unhanded and next(iter(unhanded)) == seq:
            # In order: the cursor alone says that it was handed out.
            del unhanded[seq]
            cursor = place.cursor
            handed_out = next(iter(unhanded), place.read) - 1
            if handed_out > cursor.handed_out:
                cursor.handed_out = handed_out
            attempts = 1
            if place.change is None:
                self._touch(place)
        else:
            unhanded.pop(seq, None)
            before = self._attempts_before(place, seq, state)
            attempts = before + 1
            self._set_state(place, seq, attempts, 0, b"" if state is None else state.history)
        self.counts["delivered"] += 1
        if attempts > 1:
            self.counts["redelivered"] += 1
        consumer.delivered += 1
        consumer.assign(place.log.id, message, attempts, now)
        trace = self.queue.book.trace
        if trace is not None:
            trace.handed_out(self, place.log.id, message, consumer.id, attempts)
        if len(consumer.staged) == 1:
            self.queue.book.staged[consumer] = None

    def _attempts_before(self, place: Place, seq: int, state: StateRow | None) -> int:
        return 0 if state is None else state.attempts

    # Settling

    def finish(self, consumer: Consumer, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """These are done. Gives those that the consumer does not hold."""
        refused: list[tuple[int, int]] = []
        places, held_of, trace = self._places, consumer.held, self.queue.book.trace
        for key in keys:
            held = held_of.pop(key, None)
            if held is None:
                refused.append(key)
                continue
            consumer.held_bytes -= held.size
            if trace is not None:
                trace.settled(self, "finished", key[0], held)
            self._done(places[key[0]], key[1])
        self.counts["finished"] += len(keys) - len(refused)
        if refused:
            self.counts["refused_not_in_flight"] += len(refused)
        self._settled(consumer)
        return refused

    def requeue(self, consumer: Consumer, key: tuple[int, int], delay_s: float, reason: str, now: float) -> None:
        """Deliver it again, after ``delay_s`` (cut to the queue's ``delay_max_s``). Raises NotInFlightError."""
        held = self._drop(consumer, key)
        self.counts["requeued"] += 1
        self._back(key, held, now, min(max(0.0, delay_s), self.queue.options.delay_max_s), reason)
        self._settled(consumer)

    def release(self, consumer: Consumer, key: tuple[int, int]) -> None:
        """Give it back untried: the attempt does not count. Raises NotInFlightError."""
        held = self._drop(consumer, key)
        self.counts["released"] += 1
        self._release(key, held)
        self._settled(consumer)

    def reject(self, consumer: Consumer, key: tuple[int, int], reason: str) -> None:
        """It can never work: to the dead letters at once. Raises NotInFlightError."""
        held = self._drop(consumer, key)
        self.counts["rejected"] += 1
        place = self._places[key[0]]
        wall_us = self.queue.book.wall_us
        if self.queue.book.trace is not None:
            self.queue.book.trace.settled(self, "rejected", key[0], held, reason)
        history = add_failure(self._history(place, key[1]), wall_us, held.attempts, reason or "rejected")
        self._die(place, held.message, held.attempts, history, reason or "rejected", wall_us)
        self._settled(consumer)

    def touch(self, consumer: Consumer, key: tuple[int, int], now: float) -> float:
        """Its time begins anew; gives the new deadline. Raises NotInFlightError."""
        held = consumer.held.get(key)
        if held is None:
            raise self._not_in_flight(key)
        consumer.touch(key, held, now, held.first + self.queue.options.msg_timeout_max_s)
        self.counts["touched"] += 1
        return held.deadline

    def _drop(self, consumer: Consumer, key: tuple[int, int]) -> Held:
        held = consumer.drop(key)
        if held is None:
            self.counts["refused_not_in_flight"] += 1
            raise self._not_in_flight(key)
        return held

    def _not_in_flight(self, key: tuple[int, int]) -> NotInFlightError:
        return NotInFlightError(
            f"message {key[1]} of partition {key[0]} is not held by this consumer: its time was over, it was settled "
            "before, or somebody else has it"
        )

    def _settled(self, consumer: Consumer) -> None:
        if not consumer.held and not consumer.max_in_flight and consumer.is_gone:
            self.consumers.pop(consumer.id, None)
        if consumer.max_in_flight:
            self.wake()

    def _release(self, key: tuple[int, int], held: Held) -> None:
        if self.queue.book.trace is not None:
            self.queue.book.trace.settled(self, "released", key[0], held)
        if not self._is_open(*key):  # it was too old, and has left the log
            return
        place = self._places[key[0]]
        self._set_state(place, key[1], held.attempts - 1, 0, self._history(place, key[1]))
        self._put_back(key)
        self.wake()

    def _back(
        self, key: tuple[int, int], held: Held, now: float, delay_s: float, reason: str, *, front: bool = False
    ) -> None:
        """Deliver it again, or bury it when its deliveries are used up."""
        if self.queue.book.trace is not None:
            state = "timed_out" if reason is OVERDUE else "requeued"
            self.queue.book.trace.settled(self, state, key[0], held, reason)
        if not self._is_open(*key):  # it was too old, and has left the log
            return
        place = self._places[key[0]]
        book = self.queue.book
        history = add_failure(self._history(place, key[1]), book.wall_us, held.attempts, reason)
        if self._is_used_up(held.attempts):
            self._die(place, held.message, held.attempts, history, reason or "requeued", book.wall_us)
            return
        due_us = book.wall_us + round(delay_s * 1e6) if delay_s else 0
        self._set_state(place, key[1], held.attempts, due_us, history)
        if delay_s:
            self._defer(key[0], held.message, now + delay_s)
        elif front:
            self._put_back(key)
        else:
            self._make_ready(key[0], held.message)
        self.wake()

    def _is_used_up(self, attempts: int) -> bool:
        most = self.queue.options.max_attempts
        return bool(most) and attempts >= most

    def _history(self, place: Place, seq: int) -> bytes:
        state = place.states.get(seq)
        return b"" if state is None else state.history

    def _die(self, place: Place, message: Message, attempts: int, history: bytes, reason: str, wall_us: int) -> None:
        self._done(place, message.seq)
        if self.queue.book.trace is not None:
            self._tell_death(self.queue.book.trace, place.log.id, message, reason)
        if not self.queue.options.dead_letters:
            self.counts["dropped_attempts_used_up"] += 1
            return
        self.counts["dead"] += 1
        self.last_dead_id += 1
        row = DeadRow(
            self.id,
            self.last_dead_id,
            place.log.id,
            message.seq,
            wall_us,
            attempts,
            encode_meta(message),
            message.body,
            history or add_failure(b"", wall_us, attempts, reason),
        )
        self.queue.bury(self, row)

    def _tell_death(self, trace: QueueTrace, partition: int, message: Message, reason: str) -> None:
        trace.ended(self, "dead" if self.queue.options.dead_letters else "dropped", partition, message, reason)

    def tell_expired(self, trace: QueueTrace, partition: int, message: Message) -> None:
        """A message is too old; for the trace, when the channel has not done with it yet."""
        if self._is_open(partition, message.seq):
            trace.ended(self, "expired", partition, message)

    # Time

    def next_deadline(self) -> float | None:
        """When `on_deadline` has something to do."""
        found = self._deferred[0][0] if self._deferred else None
        for consumer in self.consumers.values():
            deadline = consumer.next_deadline()
            if deadline is not None and (found is None or deadline < found):
                found = deadline
        return found

    def on_deadline(self, now: float) -> None:
        """Take back what was not settled in time; what is due becomes ready at the next `pump`."""
        for consumer in list(self.consumers.values()):
            while (key := consumer.overdue(now)) is not None:
                held = consumer.drop(key)
                assert held is not None
                if consumer.staged:
                    consumer.staged = [each for each in consumer.staged if (each.partition, each.message.seq) != key]
                self.counts["timed_out"] += 1
                self._back(key, held, now, 0.0, OVERDUE)
            self._settled(consumer)
        if self._deferred and self._deferred[0][0] <= now:
            self.wake()

    def close(self, reason: str) -> None:
        """The channel is deleted."""
        consumers, self.consumers = list(self.consumers.values()), {}
        for consumer in consumers:
            consumer.held.clear()
            consumer.staged = []
            consumer.on_closed(reason)
        self.queue.book.active.pop(self, None)
        self.queue.book.awake.pop(self, None)
