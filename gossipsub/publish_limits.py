"""Limits of own publishes: a rate, and a queue for those that no peer could get yet."""

from collections import deque

from dep2p.errors import NoPeersSubscribedError, RateLimitedError
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import RpcMessage
from dep2p.token_bucket import TokenBucket


class PublishRate:
    """The rate of own publishes; may be shared by several routers that use the same clock."""

    __slots__ = ("_bucket", "_rate_per_s")

    def __init__(self, rate_per_s: float, burst: int, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._bucket = TokenBucket(rate_per_s, burst) if rate_per_s else None
        self.check(now)

    def check(self, now: float) -> None:
        """Raises :class:`RateLimitedError`, with the time to wait, when another publish is too many."""
        wait_s = self._bucket.wait_s(now) if self._bucket is not None else 0.0
        if wait_s:
            wait_ms = int(wait_s * 1000) + 1
            raise RateLimitedError(
                f"more than {self._rate_per_s:g} publishes a second: wait {wait_ms} ms, or raise publish_rate_per_s",
                wait_ms,
            )

    def take(self) -> None:
        """One publish went out."""
        if self._bucket is not None:
            self._bucket.spend()


class PendingPublishes:
    """Publishes that wait for the first peer of their topic, bounded in items and bytes over all topics."""

    __slots__ = ("_by_topic", "_bytes", "_count", "_ends", "_params")

    def __init__(self, params: GossipParams) -> None:
        self._params = params
        self._by_topic: dict[str, deque[tuple[int, int, RpcMessage]]] = {}
        self._ends: deque[tuple[float, int, str]] = deque()
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._by_topic.values())

    def topics(self) -> list[str]:
        """The topics of what waits."""
        return list(self._by_topic)

    def check(self, size: int) -> None:
        """Raises :class:`NoPeersSubscribedError` when there is no room for a payload of this size."""
        if len(self) >= self._params.pending_publish_items_max or (
            self._bytes + size > self._params.pending_publish_bytes_max
        ):
            raise NoPeersSubscribedError(
                "no peer is subscribed yet, and the queue of publishes that wait for one is full"
            )

    def add(self, message: RpcMessage, ref: int, now: float) -> None:
        """Keep a publish."""
        while self._ends and not self._is_waiting(self._ends[0]):
            self._ends.popleft()
        self._count += 1
        self._bytes += len(message.data) + message.headers.size_bytes
        self._by_topic.setdefault(message.topic, deque()).append((self._count, ref, message))
        self._ends.append((now + self._params.pending_publish_ttl_s, self._count, message.topic))

    def _is_waiting(self, end: tuple[float, int, str]) -> bool:
        waiting = self._by_topic.get(end[2])
        return waiting is not None and waiting[0][0] <= end[1]

    def take(self, topic: str) -> list[tuple[int, RpcMessage]]:
        """Take out everything that waits in a topic, oldest first, as (ref, message)."""
        waiting = self._by_topic.pop(topic, None)
        if not waiting:
            return []
        for _, _, message in waiting:
            self._bytes -= len(message.data) + message.headers.size_bytes
        return [(ref, message) for _, ref, message in waiting]

    def next_deadline(self) -> float | None:
        """When the oldest has waited too long."""
        if not self._by_topic:
            self._ends.clear()
        return self._ends[0][0] if self._ends else None

    def expired(self, now: float) -> list[tuple[int, RpcMessage]]:
        """Take out what has waited too long, as (ref, message)."""
        late: list[tuple[int, RpcMessage]] = []
        while self._ends and self._ends[0][0] <= now:
            _, number, topic = self._ends.popleft()
            waiting = self._by_topic.get(topic)
            if waiting and waiting[0][0] == number:
                _, ref, message = waiting.popleft()
                self._bytes -= len(message.data) + message.headers.size_bytes
                late.append((ref, message))
                if not waiting:
                    del self._by_topic[topic]
        return late
