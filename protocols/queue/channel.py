"""A channel: an independent cursor over a queue's partitions, with what is in flight, deferred and done. Pure.

Nothing here grows with the backlog: messages are looked at in a window ahead of what is handed out.
"""

import heapq
from collections.abc import Sequence
from typing import Final

from dep2p.errors import NotInFlightError
from dep2p.protocols.queue.channel_places import ChannelPlaces, Place
from dep2p.protocols.queue.consumer import Consumer, Held
from dep2p.protocols.queue.history import add_failure
from dep2p.protocols.queue.log import Read
from dep2p.protocols.queue.message import OVERHEAD_BYTES, Message, encode_meta
from dep2p.protocols.queue.records import DeadRow, StateRow
from dep2p.protocols.queue.tracing import OVERDUE, QueueTrace

_WINDOW_ITEMS: Final = 1_024
"""So far ahead of what is handed out a channel looks, at least."""
_SHARE_ITEMS: Final = 32
"""Of a partition, before it is another one's turn."""
_DEFERRED_MAX: Final = 1_000_000
"""Deferred messages in memory; a channel with more looks no further ahead until some are due."""
_PAGE_ITEMS: Final = 1_024
_PLAIN: Final = (0, 0, 0, 0)
"""Of a message: due_us, expires_us, only_channel and priority."""
PAGE_BYTES: Final = 4_194_304


class Channel(ChannelPlaces):
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
            index = turn % len(hungry)
            consumer = hungry[index]
            self._hand_out(place, message, consumer, now)
            handed += 1
            if len(consumer.held) >= consumer.max_in_flight or consumer.held_bytes >= consumer.bytes_max:
                hungry.pop(index)
                turn, handed = index, 0
            elif handed >= share:
                turn, handed = turn + 1, 0
        self._turn = turn + 1 if handed else turn
        return list(wants.values())

    def _is_first_missing(self) -> bool:
        """Whether what is ready has left the memory."""
        if self._urgent:
            partition, seq = self._urgent[0][2:]
        elif self._ready:
            partition, seq = self._ready[0]
        else:
            return False
        return seq not in self._places[partition].log.rows

    def _next_ready(self) -> tuple[int, int] | None:
        """Takes it out."""
        while self._urgent:
            _priority, _order, partition, seq = heapq.heappop(self._urgent)
            if self._is_open(partition, seq):
                return partition, seq
        ready, places = self._ready, self._places
        while ready:
            key = ready.popleft()
            partition, seq = key
            place = places.get(partition)
            # As `_is_open`: it is asked for each message.
            if place is not None and seq > place.cursor.floor and seq > place.log.trimmed:
                if not (place.done.items and seq in place.done) and not (place.log.holes and place.log.is_gone(seq)):
                    return key
        return None

    def _put_back(self, key: tuple[int, int]) -> None:
        self._ready.appendleft(key)

    def _is_open(self, partition: int, seq: int) -> bool:
        place = self._places.get(partition)
        return place is not None and seq > place.cursor.floor and seq not in place.done and not place.log.is_gone(seq)

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

    def _look_ahead(self, now: float, wall_us: int, wants: dict[int, Read] | None) -> bool:
        """Look at further messages until the window is full; gives whether something became ready."""
        credit = sum(each.room for each in self.consumers.values() if each.room > 0)
        window = max(_WINDOW_ITEMS, credit)
        places = list(self._places.values())
        found = False
        # Each partition has its share of what is free, so that a long one does not keep the others away.
        while (free := window - len(self._ready) - len(self._urgent)) > 0:
            share = min(_SHARE_ITEMS, -(-free // len(places)))
            moved = False
            for place in places:
                became_ready, looked = self._look_in(place, share, now, wall_us, wants if credit else None)
                found = found or became_ready
                moved = moved or looked
            if not moved:
                break
        return found

    def _look_in(
        self, place: Place, most: int, now: float, wall_us: int, wants: dict[int, Read] | None
    ) -> tuple[bool, bool]:
        """Until so many are ready. Gives whether any is, and whether anything was looked at."""
        log = place.log
        start = place.read
        ready = 0
        is_plain = self.filter is None and not self.is_exclusive
        while ready < most and place.read <= log.visible and len(self._deferred) < _DEFERRED_MAX:
            seq = place.read
            if seq <= place.cursor.floor:  # the store had no such message
                place.read = place.cursor.floor + 1
                continue
            if (place.done.items and seq in place.done) or seq <= log.trimmed or (log.holes and log.is_gone(seq)):
                place.read += 1
                self._mark_gone(place, seq)
                continue
            message = log.rows.get(seq)
            if message is None:
                if wants is not None:
                    self._want(place, seq, wants)
                break
            if self.is_exclusive and self._is_blocked(place, message):
                break
            place.read += 1
            if is_plain and message[2:6] == _PLAIN and seq > place.cursor.handed_out and not place.states:
                # As `_look_at`, for nearly all messages.
                place.unhanded[seq] = None
                self._ready.append((log.id, seq))
                ready += 1
            else:
                ready += self._look_at(place, message, now, wall_us)
        return ready > 0, place.read > start

    def _mark_gone(self, place: Place, seq: int) -> None:
        """A number that was never used, or whose message has left the log, is done for everybody."""
        if seq not in place.done and seq > place.cursor.floor:
            self._done(place, seq)

    def _look_at(self, place: Place, message: Message, now: float, wall_us: int) -> bool:
        seq = message.seq
        if message.expires_us and message.expires_us <= wall_us:
            self.counts["expired"] += 1
            if self.queue.book.trace is not None:
                self.tell_expired(self.queue.book.trace, place.log.id, message)
            self._done(place, seq)
            return False
        if message.only_channel and message.only_channel != self.id:
            self._done(place, seq)
            return False
        if self.filter is not None and not self.filter.matches(message.attributes) and not message.only_channel:
            self.counts["filtered"] += 1
            self._done(place, seq)
            return False
        state = place.states.get(seq)
        if state is None and seq <= place.cursor.handed_out and not message.due_us:
            # Handed out by an earlier run, which ended before it was settled.
            state = place.states[seq] = StateRow(self.id, place.log.id, seq, 1, 0, b"")
            self._set_state(place, seq, 1, 0, b"")
            self.counts["recovered"] += 1
        if state is not None and self._is_used_up(state.attempts):
            self._die(place, message, state.attempts, state.history, "its deliveries were used up", wall_us)
            return False
        if state is None and not message.due_us:
            place.unhanded[seq] = None
        if self.is_exclusive and not self._takes_turn(place, message, state):
            return False
        due_us = message.due_us if state is None else state.due_us
        if due_us > wall_us:
            self._defer(place.log.id, message, now + (due_us - wall_us) / 1e6)
            return False
        self._make_ready(place.log.id, message)
        return True

    def _is_blocked(self, place: Place, message: Message) -> bool:
        """Asked for exclusive channels: whether a partition is not to be read further for now."""
        return False

    def _takes_turn(self, place: Place, message: Message, state: StateRow | None) -> bool:
        """Asked for exclusive channels: whether a message may be handed out before any other of its key is done."""
        return True

    def _make_ready(self, partition: int, message: Message) -> None:
        if message.priority:
            heapq.heappush(self._urgent, (-message.priority, next(self._order), partition, message.seq))
        else:
            self._ready.append((partition, message.seq))

    def _make_ready_unseen(self, key: tuple[int, int]) -> None:
        self._ready.append(key)

    def _defer(self, partition: int, message: Message, due: float) -> None:
        key = (partition, message.seq)
        self._deferred_valid[key] = due
        heapq.heappush(self._deferred, (due, message.published_us, partition, message.seq))
        self.queue.book.active[self] = None

    def _undefer(self, now: float) -> None:
        deferred = self._deferred
        while deferred and deferred[0][0] <= now:
            due, _published, partition, seq = heapq.heappop(deferred)
            if self._deferred_valid.get((partition, seq)) != due:
                continue
            del self._deferred_valid[(partition, seq)]
            if self._is_open(partition, seq):
                message = self._places[partition].log.rows.get(seq)
                if message is not None:
                    self._make_ready(partition, message)
                else:
                    self._make_ready_unseen((partition, seq))

    def _want(self, place: Place, seq: int, wants: dict[int, Read]) -> None:
        log = place.log
        if not log.wanted and not log.is_pinned:
            if not self.queue.book.may_read(log):
                self.queue.book.starved[self] = None
                return
            log.wanted = seq
            log.wanted_to = log.visible
            # A page must fit into the cache beside others, or its own end would push its beginning out.
            room = log.cache.bytes_max // 2
            items = max(1, min(_PAGE_ITEMS, room // (2 * OVERHEAD_BYTES)))
            wants[log.id] = Read(log.id, seq, items, max(1, min(PAGE_BYTES, room - items * OVERHEAD_BYTES)))

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
