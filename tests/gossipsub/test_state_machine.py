"""Arbitrary sequences of events: nothing but documented errors, and what must hold after each of them."""

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dep2p.errors import MessageTooLargeError, NoPeersSubscribedError, RateLimitedError, TooManyTopicsError
from dep2p.gossipsub.effects import Deliver, Effect, Send, Validate
from dep2p.gossipsub.events import ConfigureTopic, Event, Join, JoinMatching, Publish, Validated, Verdict
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.patterns import has_wildcard
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.scoring.params import hardening_scores, standard_scores
from dep2p.gossipsub.scoring.peer_gater import GaterParams
from dep2p.gossipsub.subscriptions import PATTERNS_PER_PEER_MAX
from tests.gossipsub.hostile import PEERS, TOPICS, some_event, some_rpc
from tests.gossipsub.network import make_router, peer

DOCUMENTED = (MessageTooLargeError, NoPeersSubscribedError, RateLimitedError, TooManyTopicsError, ValueError)

SMALL = GossipParams(
    d=3,
    d_lo=2,
    d_hi=5,
    d_score=1,
    d_out=1,
    mcache_items_max=20,
    mcache_bytes_max=10_000,
    seen_items_max=60,
    backoff_items_max=15,
    matched_topics_max=2,
    matched_topic_idle_ticks=2,
    ihave_ids_max=50,
    idontwant_ids_max=30,
    validation_max=8,
    validation_per_topic_max=5,
    validation_bytes_max=10_000,
    message_bytes_max=4_000,
    topics_max=2,
    topics_per_peer_max=3,
    peers_max=8,
    pending_publish_items_max=5,
    pending_publish_bytes_max=8_000,
    publish_rate_per_s=5.0,
    publish_burst=10,
    validation_timeout_s=3.0,
    px_send=True,
)


def check(router: Router) -> None:
    """Check the invariants of a router at any moment."""
    params = SMALL
    connected = set(router.peers())
    assert peer(0) not in connected
    for topic in TOPICS:
        mesh = router.mesh(topic)
        assert len(mesh) == len(set(mesh))
        assert set(mesh) <= connected
        assert not mesh or topic in router.topics()
        # Above d_hi only by grafts that we took of outbound peers; never above the number of peers.
        assert len(mesh) <= params.peers_max
        assert set(router.peers(topic)) <= connected
    sizes = router.sizes()
    assert sizes["peers"] <= params.peers_max
    matched = router.matched()
    assert len(matched) <= params.matched_topics_max
    assert set(matched) <= set(router.topics())
    assert not any(map(has_wildcard, router.topics())) or not sizes["patterns"]
    assert sizes["patterns"] <= params.peers_max * PATTERNS_PER_PEER_MAX + PATTERNS_PER_PEER_MAX
    assert len(router.topics()) <= params.topics_max + params.matched_topics_max
    assert sizes[
        "topics"
    ] <= params.topics_max + params.matched_topics_max + params.peers_max * params.topics_per_peer_max + len(TOPICS)
    assert sizes["seen"] <= params.seen_items_max
    assert sizes["mcache"] <= params.mcache_items_max
    assert sizes["mcache bytes"] <= params.mcache_bytes_max
    assert sizes["backoffs"] <= params.backoff_items_max
    assert sizes["validating"] <= params.validation_max
    assert sizes["pending publishes"] <= params.pending_publish_items_max
    assert sizes["unwanted"] <= params.peers_max * params.idontwant_ids_max * (params.idontwant_ticks + 1)
    assert sizes["promises"] <= params.peers_max * params.ihave_rpcs_max * 5
    deadline = router.next_deadline()
    assert deadline is not None


def check_effects(router: Router, effects: list[Effect]) -> None:
    """Nothing goes to ourselves or to nobody, nothing empty is sent."""
    for effect in effects:
        if isinstance(effect, Send):
            assert effect.peers
            assert peer(0) not in effect.peers
            assert len(set(effect.peers)) == len(effect.peers)
            rpc = effect.rpc
            parts = (rpc.messages, rpc.subscriptions, rpc.ihave, rpc.iwant, rpc.graft, rpc.prune, rpc.idontwant)
            assert any(parts)
            assert all(prune.backoff_s <= 3_600 for prune in rpc.prune)


class RouterMachine(RuleBasedStateMachine):
    """Time only goes forward; everything else is up to the world."""

    @initialize(
        seed=st.integers(0, 1 << 32),
        scores=st.sampled_from([None, standard_scores(), hardening_scores()]),
        gated=st.booleans(),
        external=st.booleans(),
        tracing=st.booleans(),
        patterns=st.booleans(),
    )
    def start(self, seed: int, scores: Any, gated: bool, external: bool, tracing: bool, patterns: bool) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.delivered: dict[bytes, int] = {}
        self.tickets: list[int] = []
        self.router = make_router(
            params=SMALL,
            scores=scores,
            gater=GaterParams() if gated else None,
            is_external=external,
            tracing=tracing,
            patterns=patterns,
        )

    def feed(self, event: Event) -> None:
        try:
            effects = self.router.handle(event, self.now)
        except DOCUMENTED:
            named = Publish | Join | JoinMatching | ConfigureTopic  # by the app: a name may be a malformed pattern
            assert isinstance(event, named), "only these may be refused"
            assert self.router.handle(Validated(0, Verdict.ACCEPT), self.now) == [], "a refusal leaves nothing behind"
            return
        self.take(effects)

    def take(self, effects: list[Effect]) -> None:
        check_effects(self.router, effects)
        self.tickets += [effect.ticket for effect in effects if isinstance(effect, Validate)]
        for effect in effects:
            if isinstance(effect, Deliver):
                assert effect.message.topic in self.router.topics()

    @rule(count=st.integers(1, 30))
    def events(self, count: int) -> None:
        for _ in range(count):
            self.feed(some_event(self.rng))

    @rule(verdict=st.sampled_from(list(Verdict)))
    def verdict(self, verdict: Verdict) -> None:
        if self.tickets:
            self.feed(Validated(self.tickets.pop(self.rng.randrange(len(self.tickets))), verdict))

    @rule(number=st.integers(1, PEERS - 1), count=st.integers(1, 40))
    def flood(self, number: int, count: int) -> None:
        for _ in range(count):
            self.take(self.router.receive(peer(number), some_rpc(self.rng), self.now))

    @rule(step_s=st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 70.0, 4_000.0]))
    def wait(self, step_s: float) -> None:
        until = self.now + step_s
        for _ in range(100):
            deadline = self.router.next_deadline()
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self.take(self.router.on_deadline(self.now))
        self.now = until

    @rule()
    def early_deadline_does_nothing(self) -> None:
        deadline = self.router.next_deadline()
        if deadline is not None and deadline > self.now:
            assert self.router.on_deadline(self.now) == []

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "router"):
            check(self.router)


RouterMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRouterMachine = RouterMachine.TestCase
