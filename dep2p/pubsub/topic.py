"""A joined topic as apps hold it."""

from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, Self, overload

import trio

from dep2p.arguments import checks_arguments, unchecked
from dep2p.errors import NotInRealmError, TopicNotFoundError
from dep2p.pubsub.subscription import Subscription
from dep2p.pubsub.types import (
    OnFull,
    OnNoPeers,
    PublishResult,
    PubSubMessage,
    ReliablePublish,
    ReliableTopics,
    TopicValidator,
    WaitFor,
)
from dep2p.pubsub.validation import Validation, Validator
from dep2p.types import PeerId, RealmId

BUFFER_ITEMS: Final = 16_384
BUFFER_BYTES: Final = 33_554_432


class TopicNetwork(Protocol):
    """A network's pub/sub, as its topics use it (`dep2p.pubsub.service.PubSub`)."""

    @property
    def realm_id(self) -> RealmId | None: ...
    @property
    def reliable(self) -> ReliableTopics | None: ...
    @property
    def validators(self) -> Validation: ...
    async def publish(
        self, topic: str, body: bytes, *, wait: bool, on_no_peers: OnNoPeers, origin: object | None
    ) -> PublishResult: ...
    def peers(self, topic: str) -> list[PeerId]: ...
    def mesh(self, topic: str) -> list[PeerId]: ...
    def scores(self) -> dict[PeerId, float]: ...
    def leave(self, state: "SharedTopic") -> None: ...
    def hold(self, who: object) -> None: ...
    def release(self, who: object) -> None: ...
    def message_handled(self, message: PubSubMessage) -> None: ...

    def subscription_opened(self, topic: str) -> None: ...
    def count_lagged(self, policy: OnFull) -> None: ...


class SharedTopic:
    """The state that all handles of one topic share; the owner of its subscriptions."""

    def __init__(self, pubsub: TopicNetwork, name: str) -> None:
        self._pubsub = pubsub
        self.name = name
        self.handles = 0
        self.critical_peers: tuple[PeerId, ...] | None = None
        self.subscriptions: dict[Subscription, None] = {}
        self.is_over: bool = False

    def end(self) -> None:
        """End all subscriptions of a topic that was left, when they are read empty."""
        self.is_over = True
        for subscription in list(self.subscriptions):
            subscription.close()

    def open_subscription(self, subscription: Subscription) -> None:
        if self.is_over:
            raise TopicNotFoundError(f"the topic {self.name!r} was left")
        self.subscriptions[subscription] = None
        self._pubsub.subscription_opened(self.name)

    def close_subscription(self, subscription: Subscription) -> None:
        self.subscriptions.pop(subscription, None)

    def subscription_full(self, subscription: Subscription) -> None:
        self._pubsub.hold(subscription)

    def subscription_low(self, subscription: Subscription) -> None:
        self._pubsub.release(subscription)

    def message_handled(self, message: PubSubMessage) -> None:
        self._pubsub.message_handled(message)

    def count_lagged(self, policy: OnFull) -> None:
        self._pubsub.count_lagged(policy)


@checks_arguments
class Topic:
    """A handle of a joined topic, from ``await node.join(name)``. The last handle that leaves leaves the topic.

    Also an async context manager that leaves at its end.
    """

    def __init__(self, pubsub: TopicNetwork, state: SharedTopic) -> None:
        self._pubsub = pubsub
        self._state = state
        self._has_left = False
        self._undo: dict[Callable[[], None], None] = {}

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def realm_id(self) -> RealmId | None:
        """The realm's id; None on the public network."""
        return self._pubsub.realm_id

    @property
    def is_joined(self) -> bool:
        """Whether this handle is joined: false once it has left, or the realm was left."""
        return not self._has_left and not self._state.is_over

    def __repr__(self) -> str:
        return f"Topic({self.name!r}{'' if self.is_joined else ', left'})"

    async def __aenter__(self) -> Self:
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._leave_now()
        await trio.lowlevel.cancel_shielded_checkpoint()

    @overload
    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        reliable: Literal[False] = False,
    ) -> PublishResult: ...

    @overload
    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        reliable: Literal[True],
        critical_peers: Sequence[PeerId] | None = None,
        wait_for: WaitFor = "all",
    ) -> ReliablePublish: ...

    @unchecked
    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        reliable: bool = False,
        critical_peers: Sequence[PeerId] | None = None,
        wait_for: WaitFor = "all",
    ) -> PublishResult | ReliablePublish:
        """Publish ``body``. Returns when it is in the bounded queues of the neighbours that forward it.

        With ``wait`` it waits while the publish rate is used up or a neighbour's queue is full; a neighbour that is
        much slower than the others is not waited for, and listed in ``dropped``. Without, it waits for nothing.
        Subscriptions of other handles on this node get it, too, without the network.
        ``on_no_peers``: what to do while no peer and no other handle here is subscribed: "error" raises
        NoPeersSubscribedError, "queue" keeps it for a first peer, "ok" publishes to no peer.

        Raises MessageTooLargeError (``Limits.message_bytes_max``), RateLimitedError (``pubsub_publish_per_s``, only
        without ``wait``), NoPeersSubscribedError, PublishRefusedError (a validator of this topic said no),
        TopicNotFoundError (this handle has left); nothing was sent then.
        Cancelled, it has published or not, never in part.

        ``reliable``: each of ``critical_peers`` (by default `Topic.critical_peers`, or who is subscribed now) must have
        handled it, or the returned receipt says why not; what pub/sub does not bring them is sent to them directly.
        All the others get it as ever. Raises NoPeersSubscribedError when there is no critical peer, StoreError when it
        is published but could not be kept for them.
        """
        self._check()
        if reliable:
            service = self._pubsub.reliable
            if service is None:
                raise NotInRealmError("reliable publishing needs a realm: the public network has no acknowledgements")
            peers = critical_peers if critical_peers is not None else self._state.critical_peers
            return await service.publish(self.name, body, peers, wait_for, wait, origin=self)
        if critical_peers is not None:
            raise ValueError("critical_peers are for a reliable publish: add reliable=True")
        return await self._pubsub.publish(self._state.name, body, wait=wait, on_no_peers=on_no_peers, origin=self)

    @property
    def critical_peers(self) -> tuple[PeerId, ...] | None:
        """The peers that must acknowledge reliable publishes to this topic; None: all that are subscribed then."""
        return self._state.critical_peers

    @critical_peers.setter
    def critical_peers(self, peers: Sequence[PeerId] | None) -> None:
        """Set the critical peers of the publishes that follow, by every handle of the topic."""
        self._state.critical_peers = None if peers is None else tuple(peers)

    def subscribe(
        self,
        *,
        buffer_items: int = BUFFER_ITEMS,
        buffer_bytes: int = BUFFER_BYTES,
        on_full: OnFull = "drop_oldest",
    ) -> Subscription:
        """Subscribe to the messages of others: ``async with topic.subscribe() as messages: async for message in
        messages``.

        Others are all members, and the other programs of this node: what this very handle publishes does not come back
        to it, what another handle of the topic or `Node.publish` publishes does.

        ``on_full``: "drop_oldest" and "drop_newest" drop, count and say so by a `Lagged` item; "pause" takes nothing
        more from any neighbour of this network until half of the buffer is read, and loses nothing.
        Raises ``ValueError``, and TopicNotFoundError when this handle has left.
        """
        self._check()
        return Subscription(self._state, buffer_items, buffer_bytes, on_full, origin=self)

    def peers(self) -> list[PeerId]:
        """List the neighbours that are subscribed."""
        return self._pubsub.peers(self.name)

    def mesh(self) -> list[PeerId]:
        """List the neighbours with which this node exchanges every message."""
        return self._pubsub.mesh(self.name)

    def scores(self) -> dict[PeerId, float]:
        """The router's opinion of each subscribed neighbour; below 0 it leaves the mesh."""
        scores = self._pubsub.scores()
        return {peer: scores[peer] for peer in self.peers() if peer in scores}

    def add_validator(
        self, fn: TopicValidator, *, concurrency: int = 1_024, timeout_s: float = 10.0
    ) -> Callable[[], None]:
        """Judge messages before they are delivered, forwarded or published; returns a function that ends it.

        ``fn(message)``, sync or async, gives a :class:`Verdict`, True or None (accept), or False (reject: lowers the
        score of who forwarded it). An exception, and an async one that takes ``timeout_s``, ignores the message; when
        ``concurrency`` calls are at work, further messages are dropped and may come again. Several are asked in order.
        Own publishes are asked about too, before they have an id: neighbours with the same rule would reject them.
        """
        self._check()
        validator = Validator(fn, concurrency, timeout_s)
        by_topic = self._pubsub.validators.by_topic
        by_topic.setdefault(self.name, []).append(validator)

        def remove() -> None:
            self._undo.pop(remove, None)
            known = by_topic.get(self.name, [])
            if validator in known:
                known.remove(validator)
                if not known:
                    del by_topic[self.name]

        self._undo[remove] = None
        return remove

    async def leave(self) -> None:
        """Give up this handle; its validators end. Idempotent."""
        self._leave_now()
        await trio.lowlevel.checkpoint()

    def _leave_now(self) -> None:
        if not self._has_left:
            self._has_left = True
            for undo in list(self._undo):
                undo()
            self._pubsub.leave(self._state)

    def _check(self) -> None:
        if not self.is_joined:
            raise TopicNotFoundError(f"the topic {self.name!r} was left")
