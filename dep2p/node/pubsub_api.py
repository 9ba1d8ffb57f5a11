"""Pub/sub of a node: one network per realm, the public one, and the verbs."""

import random
from abc import ABC, abstractmethod
from pathlib import Path

import trio

from dep2p.errors import NotInRealmError, TooManyTopicsError
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.publish_limits import PublishRate
from dep2p.gossipsub.scoring.params import ScoreParams, standard_scores
from dep2p.host.interface import Host
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.node.messaging_api import RealmChoice
from dep2p.pubsub.json_tracer import TraceFile
from dep2p.pubsub.peers import Neighbours, PublicNeighbours, RealmNeighbours
from dep2p.pubsub.service import PubSub, params_from
from dep2p.pubsub.topic import Topic
from dep2p.pubsub.types import OnNoPeers, PublishResult, TopicStatus
from dep2p.pubsub.wire_formats import PublicPubSub, PublicWire, RealmWire, Wire
from dep2p.realm.credentials import Realm
from dep2p.realm.membership import Membership
from dep2p.types import RealmId


class PubSubs:
    """Makes the pub/sub networks of one node alike."""

    def __init__(
        self,
        host: Host,
        identity: Identity,
        limits: Limits,
        params: GossipParams | None,
        scores: ScoreParams | None,
        *,
        tracing: bool,
    ) -> None:
        self._host = host
        self._identity = identity
        self._limits = limits
        self._params = params or params_from(limits)
        # The limit is the node's, however many realms it is in.
        self._rate = PublishRate(self._params.publish_rate_per_s, self._params.publish_burst, trio.current_time())
        self._scores = scores or standard_scores()
        self._tracing = tracing
        self._trace_file: TraceFile | None = None
        self._rng = random.SystemRandom()
        self.public: list[PubSub] = []
        """The public network, when it is on."""

    async def start(self, nursery: trio.Nursery, public: bool | PublicPubSub, trace_json: Path | None) -> None:
        """Start the trace file and the public network, where wanted. Raises ``OSError`` for the file."""
        if trace_json is not None:
            self._tracing = True
            self._trace_file = TraceFile(trace_json, self._identity.peer_id)
            await nursery.start(self._trace_file.run)
        if public:
            options = PublicPubSub() if public is True else public
            params = options.params or self._params
            wire = PublicWire(self._identity, options, params)
            self.public.append(self._make(PublicNeighbours(self._host), wire, params, None, options))
            await nursery.start(self.public[0].run)

    def of_realm(self, realm: Realm, membership: Membership) -> PubSub:
        """A new one, for a realm that is being joined."""
        wire = RealmWire(self._identity, realm.psk, realm.realm_id, self._params)
        return self._make(RealmNeighbours(self._host, membership), wire, self._params, realm.realm_id)

    def _make(
        self,
        neighbours: Neighbours,
        wire: Wire,
        params: GossipParams,
        realm_id: RealmId | None,
        public: PublicPubSub | None = None,
    ) -> PubSub:
        pubsub = PubSub(
            self._host,
            self._identity,
            neighbours,
            wire,
            self._limits,
            params,
            rng=self._rng,
            realm_id=realm_id,
            scores=self._scores if public is None or public.scores is None else public.scores,
            gater=None if public is None else public.gater,
            subscription_filter=None if public is None else public.subscription_filter,
            publish_rate=self._rate if params is self._params else None,
            tracing=self._tracing,
        )
        if self._trace_file is not None and pubsub.traces is not None:
            self._trace_file.add(pubsub.traces)
        return pubsub

    def of_public(self) -> PubSub:
        """The public one. Raises NotInRealmError."""
        if not self.public:
            raise NotInRealmError("public pub/sub is off: open the node with public_pubsub=True")
        return self.public[0]

    def own_counters(self) -> dict[str, int]:
        """What belongs to no realm."""
        counts = {f"public_pubsub_{name}": count for public in self.public for name, count in public.counters().items()}
        if self._trace_file is not None:
            counts.update({f"pubsub_{name}": count for name, count in self._trace_file.counters.items()})
        return counts


class PubSubVerbs(ABC):
    """The pub/sub verbs of a node."""

    @abstractmethod
    def pubsub(self, realm: RealmChoice = None, *, public: bool = False) -> PubSub: ...

    @abstractmethod
    def all_pubsubs(self) -> list[PubSub]: ...

    async def join(self, topic: str, *, realm: RealmChoice = None, public: bool = False) -> Topic:
        """Join a topic of a realm, or of the public network. Joining again gives another handle of the same topic.

        Raises ``ValueError`` (an empty or too long name), TooManyTopicsError (``limits.pubsub_topics_max``),
        NotInRealmError.
        """
        pubsub = self.pubsub(realm, public=public)
        topics_max = pubsub.params.topics_max
        if not pubsub.has_joined(topic) and len(self.topics()) >= topics_max:
            raise TooManyTopicsError(
                f"this node is in {topics_max} topics already: leave one, or raise pubsub_topics_max in [limits]"
            )
        return await pubsub.join(topic)

    async def publish(
        self,
        topic: str,
        data: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        realm: RealmChoice = None,
        public: bool = False,
    ) -> PublishResult:
        """Publish without joining the topic; see :meth:`Topic.publish`."""
        return await self.pubsub(realm, public=public).publish(topic, data, wait=wait, on_no_peers=on_no_peers)

    def topics(self) -> list[TopicStatus]:
        """The joined topics of all realms, then those of the public network."""
        return [status for pubsub in self.all_pubsubs() for status in pubsub.topics()]
