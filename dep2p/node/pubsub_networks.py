"""Pub/sub of a node: one network per realm, and the public one."""

import random
from pathlib import Path

import trio

from dep2p.errors import NotInRealmError
from dep2p.gossipsub.options import RouterOptions
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.publish_limits import PublishRate
from dep2p.gossipsub.scoring.params import ScoreParams, standard_scores
from dep2p.host.interface import Host
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.pubsub.json_tracer import TraceFile
from dep2p.pubsub.peers import Neighbours, PublicNeighbours, RealmNeighbours
from dep2p.pubsub.service import PubSub, PubSubNetwork, params_from
from dep2p.pubsub.wire_formats import PublicPubSub, PublicWire, RealmWire, Wire
from dep2p.realm.credentials import Realm
from dep2p.realm.membership import Membership
from dep2p.types import RealmId


class PubSubs:
    """Makes the pub/sub networks of one node, all with the same settings."""

    def __init__(
        self,
        host: Host,
        identity: Identity,
        limits: Limits,
        params: GossipParams | None,
        scores: ScoreParams | None,
        *,
        tracing: bool,
        fairness: Fairness,
    ) -> None:
        self._host = host
        self._identity = identity
        self._limits = limits
        self._params = params or params_from(limits)
        # One limit for the node, however many realms it is in.
        self._rate = PublishRate(self._params.publish_rate_per_s, self._params.publish_burst, trio.current_time())
        self._scores = scores or standard_scores()
        self._tracing = tracing
        self._fairness = fairness
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
        """Make the pub/sub of a realm that the node is joining."""
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
        options = RouterOptions(
            scores=self._scores if public is None or public.scores is None else public.scores,
            gater=None if public is None else public.gater,
            subscription_filter=None if public is None else public.subscription_filter,
            publish_rate=self._rate if params is self._params else None,
            patterns=realm_id is not None,
            tracing=self._tracing,
        )
        pubsub = PubSub(
            self._host,
            self._identity,
            self._limits,
            PubSubNetwork(
                neighbours=neighbours,
                wire=wire,
                params=params,
                realm_id=realm_id,
                options=options,
                fairness=self._fairness,
            ),
            rng=self._rng,
        )
        if self._trace_file is not None and pubsub.traces is not None:
            self._trace_file.add(pubsub.traces)
        return pubsub

    def of_public(self) -> PubSub:
        """The pub/sub of the public network. Raises NotInRealmError when the node has none."""
        if not self.public:
            raise NotInRealmError("public pub/sub is off: open the node with public_pubsub=True")
        return self.public[0]

    def own_counters(self) -> dict[str, int]:
        """Return the counters that belong to no realm."""
        counts = {f"public_pubsub_{name}": count for public in self.public for name, count in public.counters().items()}
        if self._trace_file is not None:
            counts.update({f"pubsub_{name}": count for name, count in self._trace_file.counters.items()})
        return counts
