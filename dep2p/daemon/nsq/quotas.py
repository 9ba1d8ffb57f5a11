"""Shares of NSQ's clients in the node: memory, publishes, topics. A connection that has used up its share waits."""

from typing import Final

import trio

from dep2p.config.nsq import NsqConfig
from dep2p.protocols.fairness.shares import MemberShares
from dep2p.token_bucket import TokenBucket

TOPICS_BURST: Final = 200
_MESSAGES_BURST_S: Final = 10.0
Holder = object
"""A connection, or an HTTP request: compared by identity."""


class SharedPool:
    """Places that all clients share; one holder gets at most 7 of 8."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._shares: MemberShares[Holder] = MemberShares(places)
        self._released = trio.Event()

    @property
    def taken(self) -> int:
        """Places of all holders together."""
        return self._shares.taken

    @property
    def held_most(self) -> int:
        """Places of the holder that has most."""
        return self._shares.held_most

    def has_share(self, holder: Holder, amount: int = 1) -> bool:
        """Whether the holder may have so many places more; always when it is alone and has none."""
        return self._shares.may_take(holder, amount) or not self._shares.taken

    def hold(self, holder: Holder, amount: int) -> None:
        """Note that the holder now has ``amount`` places, even if there are not so many."""
        more = amount - self._shares.held(holder)
        if more > 0:
            self._shares.take(holder, more)
        elif more < 0:
            self._shares.release(holder, -more)
            self._released.set()

    def add(self, holder: Holder, amount: int) -> None:
        """Note that the holder has ``amount`` places more, or fewer."""
        self.hold(holder, self._shares.held(holder) + amount)

    async def wait(self, holder: Holder, amount: int = 1) -> None:
        """Wait until the holder may have so many places more."""
        while not self.has_share(holder, amount):
            if self._released.is_set():
                self._released = trio.Event()
            await self._released.wait()


class NsqQuotas:
    """The pools of one server, and the rates of its connections."""

    def __init__(self, config: NsqConfig) -> None:
        self.memory: SharedPool = SharedPool(config.memory_bytes_max)
        self.publishes: SharedPool = SharedPool(config.publishes_pending_max)
        self.connections_max: int = config.connections_max
        self.topics_max: int = config.topics_max
        self._topics_per_s = config.topics_per_s
        self._messages_per_s = config.messages_per_s

    def topics_rate(self) -> TokenBucket | None:
        """The rate at which one connection makes topics; None without a limit."""
        return TokenBucket(self._topics_per_s, TOPICS_BURST) if self._topics_per_s else None

    def messages_rate(self) -> TokenBucket | None:
        """The rate at which one connection publishes; None without a limit."""
        per_s = self._messages_per_s
        return TokenBucket(per_s, per_s * _MESSAGES_BURST_S) if per_s else None
