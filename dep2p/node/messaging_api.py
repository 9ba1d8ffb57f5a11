"""The messaging verbs of a node."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from dep2p.errors import Dep2pError
from dep2p.messaging.service import MessageStream, Messaging
from dep2p.realm.credentials import Realm
from dep2p.realm.membership import Membership
from dep2p.types import Headers, PeerId, RealmId

RealmChoice = Realm | RealmId | str | None
"""A realm, its id, a unique prefix of its id, its name, or None for the only one joined."""


class MessagingVerbs(ABC):
    """Each picks the realm and does the rest there."""

    @property
    @abstractmethod
    def peer_id(self) -> PeerId: ...

    @abstractmethod
    def messaging(self, realm: RealmChoice = None) -> Messaging: ...

    @abstractmethod
    def membership(self, realm: RealmChoice = None) -> Membership: ...

    async def request(
        self,
        peer: PeerId,
        name: str,
        data: bytes,
        *,
        timeout: float | None = None,
        idempotent: bool = False,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> bytes:
        """The peer's answer. ``timeout`` in seconds, for all tries together; see :meth:`Messaging.request`."""
        messaging = self.messaging(realm)
        return await messaging.request(peer, name, data, timeout_s=timeout, idempotent=idempotent, headers=headers)

    async def notify(
        self, peer: PeerId, name: str, data: bytes, *, headers: Headers | None = None, realm: RealmChoice = None
    ) -> None:
        """Send without an answer; see :meth:`Messaging.notify`."""
        await self.messaging(realm).notify(peer, name, data, headers=headers)

    def stream(
        self,
        peer: PeerId,
        name: str,
        data: bytes = b"",
        *,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> AbstractAsyncContextManager[MessageStream]:
        """Open a two-way stream of items; see :meth:`Messaging.stream`."""
        return self.messaging(realm).stream(peer, name, data, headers=headers)

    async def broadcast_request(
        self,
        name: str,
        data: bytes,
        *,
        peers: Sequence[PeerId] | None = None,
        timeout: float | None = None,
        idempotent: bool = False,
        concurrency: int = 16,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> Mapping[PeerId, bytes | Dep2pError]:
        """Ask many peers (every member that is up when ``peers`` is None); a result or an error for each."""
        return await self.messaging(realm).broadcast_request(
            self._targets(realm, peers),
            name,
            data,
            timeout_s=timeout,
            idempotent=idempotent,
            concurrency=concurrency,
            headers=headers,
        )

    async def broadcast_notify(
        self,
        name: str,
        data: bytes,
        *,
        peers: Sequence[PeerId] | None = None,
        concurrency: int = 16,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> Mapping[PeerId, Dep2pError | None]:
        """Notify many peers (every member that is up when ``peers`` is None); None or an error for each."""
        return await self.messaging(realm).broadcast_notify(
            self._targets(realm, peers), name, data, concurrency=concurrency, headers=headers
        )

    def _targets(self, realm: RealmChoice, peers: Sequence[PeerId] | None) -> list[PeerId]:
        if peers is not None:
            return list(peers)
        return [m.peer for m in self.membership(realm).members() if m.state == "up" and m.peer != self.peer_id]
