"""A joined topic as apps hold it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, Self, Unpack, overload

import trio

from dep2p.arguments import checks_arguments, unchecked
from dep2p.errors import NotInRealmError, TopicNotFoundError
from dep2p.gossipsub.topic_types import (
    BUFFER_BYTES,
    BUFFER_ITEMS,
    AcknowledgementOptions,
    OnFull,
    OnNoPeers,
    PublishResult,
    TopicMessage,
    WaitFor,
    acknowledgement_of,
    check_unacknowledged,
)
from dep2p.protocols.realm.statement import TopicGroup, check_group
from dep2p.pubsub.subscription import Subscription
from dep2p.pubsub.types import GroupReaders, ReliablePublish, ReliableTopics, TopicValidator
from dep2p.pubsub.validation import Validation, Validator
from dep2p.types import PeerId, RealmId


class TopicNetwork(Protocol):
    """A network's pub/sub, as its topics use it (`dep2p.pubsub.service.PubSub`)."""

    @property
    def realm_id(self) -> RealmId | None: ...
    @property
    def reliable(self) -> ReliableTopics | None: ...
    @property
    def validators(self) -> Validation: ...
    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        wait: bool,
        on_no_peers: OnNoPeers,
        origin: object | None,
        headers: Mapping[str, object] | None,
    ) -> PublishResult: ...
    def peers(self, topic: str) -> list[PeerId]: ...
    def mesh(self, topic: str) -> list[PeerId]: ...
    def scores(self) -> dict[PeerId, float]: ...
    def leave(self, state: "SharedTopic") -> None: ...
    def join_group(self, group: TopicGroup) -> None: ...
    def leave_group(self, group: TopicGroup) -> None: ...
    def hold(self, who: object) -> None: ...
    def release(self, who: object) -> None: ...
    def message_handled(self, message: TopicMessage) -> None: ...

    def subscription_opened(self, topic: str) -> None: ...
    def count_lagged(self, policy: OnFull) -> None: ...


def group_of(topic: str, group: str, realm_id: RealmId | None) -> TopicGroup:
    """Return the group of a topic or of a pattern. Raises ``ValueError``, NotInRealmError on the public network."""
    if realm_id is None:
        raise NotInRealmError("groups need a realm: on the public network no member says which groups it reads in")
    named = TopicGroup(topic, group)
    check_group(named)
    return named


class SharedTopic:
    """The state that all handles of one topic share; the owner of its subscriptions."""

    def __init__(self, pubsub: TopicNetwork, name: str) -> None:
        self._pubsub = pubsub
        self.name = name
        self.handles = 0
        self.critical_peers: tuple[PeerId, ...] | None = None
        self.subscriptions: dict[Subscription, None] = {}
        self.matched_subscriptions: dict[Subscription, None] = {}
        """Those of them that are subscribed to a pattern: they go on when the topic is left."""
        self.groups: dict[TopicGroup, dict[Subscription, None]] = {}
        """Those of them that share messages with others, by group; the one that was given a message last is last."""
        self.is_over: bool = False

    def end(self) -> None:
        """End all subscriptions of a topic that was left, when they are read empty."""
        self.is_over = True
        self.close_own()
        self.subscriptions.clear()
        self.matched_subscriptions.clear()
        self.groups.clear()

    def add(self, subscription: Subscription) -> None:
        """Give the topic's messages to a subscription from now on."""
        self.subscriptions[subscription] = None
        if subscription.group is not None:
            self.groups.setdefault(subscription.group, {})[subscription] = None

    def remove(self, subscription: Subscription) -> None:
        """Give it no more."""
        self.subscriptions.pop(subscription, None)
        members = None if subscription.group is None else self.groups.get(subscription.group)
        if members is not None and subscription.group is not None:
            members.pop(subscription, None)
            if not members:
                del self.groups[subscription.group]

    def chosen(self, message_id: bytes, groups: GroupReaders | None) -> list[Subscription]:
        """Return the subscriptions that get a message: those without a group, and of each group whose choice is this
        node the one that has the fewest waiting."""
        found = [one for one in self.subscriptions if one.group is None]
        for group, members in self.groups.items():
            if groups is None or groups.is_ours(group, message_id):
                one = min(members, key=len)
                members[one] = members.pop(one)
                found.append(one)
        return found

    def close_own(self) -> None:
        """End the subscriptions to this topic, not those to patterns."""
        for subscription in list(self.subscriptions):
            if subscription not in self.matched_subscriptions:
                subscription.close()

    def open_subscription(self, subscription: Subscription) -> None:
        if self.is_over:
            raise TopicNotFoundError(f"the topic {self.name!r} was left")
        if subscription.group is not None:
            self._pubsub.join_group(subscription.group)
        self.add(subscription)
        self._pubsub.subscription_opened(self.name)

    def close_subscription(self, subscription: Subscription) -> None:
        self.remove(subscription)
        if subscription.group is not None:
            self._pubsub.leave_group(subscription.group)

    def subscription_full(self, subscription: Subscription) -> None:
        self._pubsub.hold(subscription)

    def subscription_low(self, subscription: Subscription) -> None:
        self._pubsub.release(subscription)

    def message_handled(self, message: TopicMessage) -> None:
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
        """The topic's name."""
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
        headers: Mapping[str, object] | None = None,
        reliable: Literal[False] = False,
    ) -> PublishResult: ...

    @overload
    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        headers: Mapping[str, object] | None = None,
        reliable: Literal[True],
        critical_peers: Sequence[PeerId] | None = None,
        wait_for: WaitFor = "all",
        ttl_s: float | None = None,
    ) -> ReliablePublish: ...

    @unchecked
    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        headers: Mapping[str, object] | None = None,
        reliable: bool = False,
        **options: Unpack[AcknowledgementOptions],
    ) -> PublishResult | ReliablePublish:
        """Publish ``body``. Returns when it is in the bounded queues of the neighbours that forward it.

        With ``wait`` it waits while the publish rate is used up or a neighbour's queue is full; a neighbour that is
        much slower than the others is not waited for, and listed in ``dropped``. Without, it waits for nothing.
        Subscriptions of other handles on this node get it, too, without the network.
        ``on_no_peers``: what to do while no peer and no other handle here is subscribed: "error" raises
        NoPeersSubscribedError, "queue" keeps it for a first peer, "ok" publishes to no peer.
        ``headers``: at most 60 names with a text, bytes, a 64-bit integer, a bool, or a flat list of these, and
        ``Limits.headers_bytes_max`` bytes; subscribers get them with the message. The public network has none.

        Raises MessageTooLargeError (``Limits.message_bytes_max``), RateLimitedError (``pubsub_publish_per_s``, only
        without ``wait``), NoPeersSubscribedError, PublishRefusedError (a validator of this topic said no),
        TopicNotFoundError (this handle has left), NotInRealmError (headers on the public network), ``ValueError``
        (headers that are not allowed); nothing was sent then.
        Cancelled, it has published or not, never in part.

        ``reliable``: each of ``critical_peers`` (by default `Topic.critical_peers`, or who is subscribed now) must have
        handled it, or the returned receipt says why not; what pub/sub does not bring them is sent to them directly.
        All the others get it as ever. Raises NoPeersSubscribedError when there is no critical peer, StoreError when it
        is published but could not be kept for them. ``ttl_s``: seconds until it expires, at most 30 days;
        ``Limits.delivery_age_max_s`` by default.
        """
        self._check()
        if reliable:
            service = self._pubsub.reliable
            if service is None:
                raise NotInRealmError("reliable publishing needs a realm: the public network has no acknowledgements")
            by = acknowledgement_of(options, self._state.critical_peers)
            return await service.publish(self.name, body, by, wait, origin=self, headers=headers)
        if options:
            check_unacknowledged(options)
        return await self._pubsub.publish(
            self._state.name, body, wait=wait, on_no_peers=on_no_peers, origin=self, headers=headers
        )

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
        group: str | None = None,
    ) -> Subscription:
        """Subscribe to the messages of others: ``async with topic.subscribe() as messages: async for message in
        messages``.

        Others are all members, and the other programs of this node: what this very handle publishes does not come back
        to it, what another handle of the topic or `Node.publish` publishes does.

        ``on_full``: "drop_oldest" and "drop_newest" drop, count and say so by a `Lagged` item; "pause" takes nothing
        more from any neighbour of this network until half of the buffer is read, and loses nothing.
        ``group``: share the messages with all subscriptions to this topic, of every member, that name the same group:
        each message goes to one of them, also what this handle publishes. While readers come and go, a message may
        reach none of them or two; a queue is for work that must be done exactly by one.
        Raises ``ValueError``, NotInRealmError (a group on the public network), and TopicNotFoundError when this handle
        has left. Entering it raises ``ValueError`` when the node reads in more than 64 groups.
        """
        self._check()
        named = None if group is None else group_of(self.name, group, self._pubsub.realm_id)
        return Subscription(self._state, buffer_items, buffer_bytes, on_full, origin=self, group=named)

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
