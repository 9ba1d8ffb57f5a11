"""A watcher's bounded buffer of changes of members."""

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import trio

from dep2p.gossipsub.topic_types import Lagged
from dep2p.protocols.realm.member_table import RealmMember
from dep2p.protocols.realm.member_update import MemberUpdate
from dep2p.realm.interface import MemberEvent
from dep2p.types import PeerId, RealmId

WATCH_ITEMS_MAX: Final = 1_024
"""Changes that wait for one watcher; above it the oldest are dropped, and the watcher gets a `Lagged` in their
place."""


def update_of(realm_id: RealmId, event: MemberEvent, member: RealmMember | None) -> MemberUpdate:
    """Return the update for an event; ``member`` as it is known now, None for one that is not known any more."""
    if member is None:
        return MemberUpdate(kind=event.kind, peer=event.peer, realm=realm_id)
    return MemberUpdate(
        kind=event.kind,
        peer=event.peer,
        realm=realm_id,
        state=member.state,
        fields=dict(member.fields),
        services=member.services,
    )


class MemberWatch:
    """An async iterator over changes of members. Cancelling a wait loses none."""

    def __init__(self, find: Callable[[RealmId, PeerId], RealmMember | None], only: RealmId | None) -> None:
        """``find`` returns a member of a realm as it is known; ``only``: the realm to watch, None for all."""
        self._find = find
        self._only = only
        self._updates: deque[MemberUpdate] = deque()
        self._dropped = 0
        self._wake = trio.Event()

    def put(self, realm_id: RealmId, event: MemberEvent) -> None:
        """Take an event; never blocks."""
        if self._only not in (None, realm_id):
            return
        if len(self._updates) >= WATCH_ITEMS_MAX:
            self._updates.popleft()
            self._dropped += 1
        self._updates.append(update_of(realm_id, event, self._find(realm_id, event.peer)))
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[MemberUpdate | Lagged]:
        return self

    async def __anext__(self) -> MemberUpdate | Lagged:
        await trio.lowlevel.checkpoint()
        while not self._updates:
            self._wake = trio.Event()
            await self._wake.wait()
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return Lagged(dropped)
        return self._updates.popleft()
