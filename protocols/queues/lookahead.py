"""How a channel looks ahead in a queue's partitions: what is ready, what is deferred, which pages are missing. Pure.

Nothing here grows with the backlog: messages are looked at in a window ahead of what is handed out.
"""

import heapq
from abc import abstractmethod
from typing import Final

from dep2p.protocols.queues.cursor import ChannelPlaces, Place
from dep2p.protocols.queues.message import OVERHEAD_BYTES, Message
from dep2p.protocols.queues.partition_log import Read
from dep2p.protocols.queues.records import StateRow
from dep2p.protocols.queues.trace_hooks import QueueTrace

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


class ChannelAhead(ChannelPlaces):
    """The part of a `Channel` that looks ahead."""

    @abstractmethod
    def _is_used_up(self, attempts: int) -> bool:
        """Whether so many deliveries are all that a message has."""

    @abstractmethod
    def _die(self, place: Place, message: Message, attempts: int, history: bytes, reason: str, wall_us: int) -> None:
        """It becomes a dead letter."""

    @abstractmethod
    def tell_expired(self, trace: QueueTrace, partition: int, message: Message) -> None:
        """To a trace."""

    # What is ready

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

    # Looking ahead

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
        if is_plain and not place.states and not log.holes:
            ready = self._look_plainly(place, most)
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
            ready += self._look_at(place, message, now, wall_us)
        return ready > 0, place.read > start

    def _look_plainly(self, place: Place, most: int) -> int:
        """As `_look_in` and `_look_at`, for nearly all messages: those of which nothing is said, and nothing known."""
        log, cursor, start = place.log, place.cursor, place.read
        if start <= max(cursor.floor, cursor.handed_out, log.trimmed, place.done.last):
            return 0
        rows, unhanded, ready, partition = log.rows, place.unhanded, self._ready, log.id
        seq, end = start, min(log.visible + 1, start + most)
        while seq < end:
            message = rows.get(seq)
            if message is None or message[2:6] != _PLAIN:
                break
            unhanded[seq] = None
            ready.append((partition, seq))
            seq += 1
        place.read = seq
        return seq - start

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
