"""One subscription: a bounded buffer between the router and an app's loop."""

from collections import deque
from typing import Final, Protocol, Self

import trio

from dep2p.gossipsub.topic_types import Lagged, MatchedTopicsFull, OnFull, TopicMessage
from dep2p.protocols.realm.statement import TopicGroup

_TASKS_MAX: Final = 1_024
_ITEMS_PER_STEP: Final = 64
"""Messages after which a loop that never waits gives other tasks a turn."""


class SubscriptionOwner(Protocol):
    """The topic, as a subscription uses it."""

    def open_subscription(self, subscription: "Subscription") -> None: ...

    def close_subscription(self, subscription: "Subscription") -> None: ...

    def subscription_full(self, subscription: "Subscription") -> None:
        """Hold back the peers (policy "pause")."""
        ...

    def subscription_low(self, subscription: "Subscription") -> None:
        """End the hold: there is room again."""
        ...

    def message_handled(self, message: TopicMessage) -> None:
        """Report that the app came back for the next message."""
        ...

    def count_lagged(self, policy: OnFull) -> None: ...


class Subscription:
    """``async with topic.subscribe() as messages: async for message in messages``.

    Messages that arrive inside the block are buffered: at most ``buffer_items``, and ``buffer_bytes`` of payload and
    headers. Iterating gives each :class:`TopicMessage`, and a :class:`Lagged` where some were dropped; it ends when
    the topic is left. Several tasks may iterate: each message goes to one of them.
    """

    def __init__(
        self,
        owner: SubscriptionOwner,
        buffer_items: int,
        buffer_bytes: int,
        on_full: OnFull,
        *,
        origin: object | None = None,
        group: TopicGroup | None = None,
    ) -> None:
        """``origin``: the handle that subscribes; what is published by it is not put here. ``group``: those that share
        the messages with it, those of its own handle, too."""
        if buffer_items < 1 or buffer_bytes < 1:
            raise ValueError("buffer_items and buffer_bytes must be at least 1")
        if on_full not in ("drop_oldest", "drop_newest", "pause"):
            raise ValueError(f'on_full is {on_full!r}: it must be "drop_oldest", "drop_newest" or "pause"')
        self._owner = owner
        self.origin = origin
        self.group: TopicGroup | None = group
        """The group whose messages it shares."""
        self._items_max = buffer_items
        self._bytes_max = buffer_bytes
        self._on_full: OnFull = on_full
        self._items: deque[TopicMessage | Lagged] = deque()
        self._bytes = 0
        self._messages = 0
        self._lagged = 0  # dropped in front of everything in the buffer
        self._taken = 0
        self._lot = trio.lowlevel.ParkingLot()
        self._given: dict[trio.lowlevel.Task, TopicMessage] = {}
        """Messages that apps work on: each task has its message until it comes back for the next one."""
        self._is_open = False
        self._is_over = False
        self._is_pausing = False
        self.lagged_total: int = 0
        """Messages dropped so far."""

    def __len__(self) -> int:
        """Messages in the buffer."""
        return self._messages

    @property
    def buffered_bytes(self) -> int:
        """Bytes of payload and headers in the buffer."""
        return self._bytes

    async def __aenter__(self) -> Self:
        await trio.lowlevel.checkpoint()
        if self._is_open or self._is_over:
            raise RuntimeError("a subscription is entered once: make another one")
        self._owner.open_subscription(self)
        self._is_open = True
        return self

    async def __aexit__(self, kind: object, *_exc: object) -> None:
        given = self._given.pop(trio.lowlevel.current_task(), None)
        self._given.clear()
        if given is not None and kind is None:  # the loop was left, not broken by an error
            self._owner.message_handled(given)
        self.close()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def close(self) -> None:
        """End it: the buffered messages still come, then iterating ends. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._resume()
        if self._is_open:
            self._owner.close_subscription(self)
        self._lot.unpark_all()

    @property
    def holds_publishers(self) -> bool:
        """Whether publishers wait until the app has read half of the buffer (policy "pause")."""
        return self._is_pausing

    def put_local(self, message: TopicMessage) -> None:
        """For the router's shell: a program of this node has published to the topic, and may not have waited."""
        if self._is_pausing:
            self._note_gap()
        else:
            self.put(message)

    def put(self, message: TopicMessage) -> None:
        """Add a message of the topic. Called by the router's shell."""
        size = len(message.body) + message.headers.size_bytes
        if self._messages >= self._items_max or (self._messages and self._bytes + size > self._bytes_max):
            if self._on_full == "drop_newest":
                self._note_gap()
                return
            if self._on_full == "drop_oldest":
                self._drop_oldest(size)
        self._items.append(message)
        self._messages += 1
        self._bytes += size
        if (
            self._on_full == "pause"
            and not self._is_pausing
            and (self._messages >= self._items_max or self._bytes >= self._bytes_max)
        ):
            self._is_pausing = True
            self._owner.subscription_full(self)
        if self._lot:
            self._lot.unpark()

    def put_topics_full(self, topics: int, topics_max: int) -> None:
        """Say that further topics match and do not come. For a subscription to a pattern, by the router's shell."""
        last = self._items[-1] if self._items else None
        if isinstance(last, MatchedTopicsFull):
            self._items[-1] = MatchedTopicsFull(0, last.topics + topics, topics_max)
        else:
            self._items.append(MatchedTopicsFull(0, topics, topics_max))
        if self._lot:
            self._lot.unpark()

    def _note_gap(self) -> None:
        self._count_lagged()
        last = self._items[-1]
        if type(last) is Lagged:
            self._items[-1] = Lagged(last.count + 1)
        else:
            self._items.append(Lagged(1))

    def _drop_oldest(self, size: int) -> None:
        while self._messages >= self._items_max or (self._messages and self._bytes + size > self._bytes_max):
            oldest = self._items.popleft()
            if isinstance(oldest, TopicMessage):
                self._messages -= 1
                self._bytes -= len(oldest.body) + oldest.headers.size_bytes
                self._lagged += 1
                self._count_lagged()

    def _count_lagged(self) -> None:
        self.lagged_total += 1
        self._owner.count_lagged(self._on_full)

    def _resume(self) -> None:
        if self._is_pausing:
            self._is_pausing = False
            self._owner.subscription_low(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicMessage | Lagged:
        """Return the next item. Cancelling it loses none."""
        self._taken += 1
        task = trio.lowlevel.current_task()
        if self._given:
            given = self._given.pop(task, None)
            if given is not None:
                self._owner.message_handled(given)
        if not self._items or not self._taken % _ITEMS_PER_STEP:
            await trio.lowlevel.checkpoint()
        while not self._items and not self._lagged:
            if self._is_over:
                raise StopAsyncIteration
            if not self._is_open:
                raise RuntimeError("enter the subscription first: `async with topic.subscribe() as messages`")
            await self._lot.park()
        if self._lagged:
            count, self._lagged = self._lagged, 0
            return Lagged(count)
        item = self._items.popleft()
        if isinstance(item, TopicMessage):
            self._messages -= 1
            self._bytes -= len(item.body) + item.headers.size_bytes
            if (
                len(self._given) >= _TASKS_MAX
            ):  # messages of tasks that ended without coming back, so that no call reports them as handled
                del self._given[next(iter(self._given))]
            self._given[task] = item
            if self._is_pausing and self._messages * 2 <= self._items_max and self._bytes * 2 <= self._bytes_max:
                self._resume()
        return item
