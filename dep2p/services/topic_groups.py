"""Groups of one realm's topics: which members read in a group, and whether a message is this node's to deliver."""

import logging
from collections import Counter
from typing import Final

import trio

from dep2p.errors import Dep2pError
from dep2p.host.interface import Connection, Host, HostEvent
from dep2p.protocols.realm.statement import TopicGroup, check_group
from dep2p.protocols.services.group_choice import chosen_reader
from dep2p.pubsub.service import PubSub
from dep2p.realm.membership import Membership
from dep2p.types import PeerId

CONNECTED_READERS_MAX: Final = 64
"""Readers of one group that this node connects to: those that see each other agree on who gets a message."""
REACH_OUT_INTERVAL_S: Final = 5.0
"""Seconds between two looks for readers that are not connected."""
_CONNECT_TIMEOUT_S: Final = 5.0
_WITHDRAWAL_S: Final = 0.5
"""Seconds after which the others know that this node reads in no group any more."""

_logger = logging.getLogger("dep2p.services")


class TopicGroups:
    """The groups of one realm. Sets itself as `PubSub.groups`."""

    def __init__(self, host: Host, pubsub: PubSub, membership: Membership) -> None:
        self._host = host
        self._membership = membership
        self._own = host.peer_id
        self._subscriptions: Counter[TopicGroup] = Counter()
        """Open subscriptions of this node, by group."""
        self._readers: dict[TopicGroup, tuple[PeerId, ...]] = {}
        self._version = -1
        self._counts: Counter[str] = Counter()
        self._is_withdrawn = False
        self._is_reading = True
        pubsub.groups = self

    # PubSub

    def join(self, group: TopicGroup) -> None:
        """Note one more subscription in a group. Raises ``ValueError`` for a name that is not allowed, or when this
        node reads in too many groups."""
        check_group(group)
        self._subscriptions[group] += 1
        if self._subscriptions[group] == 1:
            try:
                self._announce()
            except ValueError:
                del self._subscriptions[group]
                raise

    def leave(self, group: TopicGroup) -> None:
        """Note the end of one subscription in a group."""
        self._subscriptions[group] -= 1
        if self._subscriptions[group] <= 0:
            del self._subscriptions[group]
            self._announce()

    def is_ours(self, group: TopicGroup, message_id: bytes) -> bool:
        """Whether this node delivers a message to its subscriptions in a group."""
        is_ours = chosen_reader(self.readers(group), message_id) == self._own
        self._counts["group_messages_taken" if is_ours else "group_messages_left_to_others"] += 1
        return is_ours

    def readers(self, group: TopicGroup) -> tuple[PeerId, ...]:
        """The readers of a group that count here: this node, and the connected members whose records say so."""
        index = self._membership.offers
        if index.version != self._version:
            self._readers.clear()
            self._version = index.version
        found = self._readers.get(group)
        if found is None:
            others = (peer for peer in index.readers(group) if peer != self._own and self._is_connected(peer))
            found = self._readers[group] = (self._own, *others) if self._is_reading else tuple(others)
        return found

    def _is_connected(self, peer: PeerId) -> bool:
        return self._membership.verified_connection(peer) is not None

    def _announce(self) -> None:
        self._readers.clear()
        self._membership.set_groups(() if self._is_withdrawn else sorted(self._subscriptions))

    # RealmService

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""

        def forget(_what: HostEvent | Connection) -> None:
            self._readers.clear()

        ends = (
            self._host.subscribe(forget),
            self._membership.subscribe_verified(forget),
            self._membership.subscribe_unverified(forget),
        )
        try:
            task_status.started()
            while True:
                await self._reach_out()
                await trio.sleep(REACH_OUT_INTERVAL_S)
        finally:
            for end in ends:
                end()

    async def drain(self) -> None:
        """Read in no group any more, so that others take this node's share before it stops. Until they know, at most
        half a second, this node goes on with it."""
        self._is_withdrawn = True
        self._announce()
        await trio.sleep(_WITHDRAWAL_S if self._subscriptions else 0)
        self._is_reading = False
        self._readers.clear()

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return dict(self._counts)

    def stats(self) -> dict[str, int]:
        """Return the readers of each group that this node reads in."""
        return {f"{group.topic} {group.group}": len(self.readers(group)) for group in self._subscriptions}

    async def _reach_out(self) -> None:
        """Connect to readers of this node's groups that it has no connection to."""
        for group in list(self._subscriptions):
            readers = sorted(self._membership.offers.readers(group))
            room = CONNECTED_READERS_MAX - sum(map(self._is_connected, readers))
            missing = [peer for peer in readers if peer != self._own and not self._is_connected(peer)]
            for peer in missing[: max(0, room)]:
                try:
                    await self._membership.connect(peer, timeout_s=_CONNECT_TIMEOUT_S)
                except Dep2pError as error:
                    self._counts["group_readers_not_reached"] += 1
                    _logger.debug("%s reads in group %r too, and is not reached: %s", peer, group.group, error)
