"""Patterns of names: the tree against a naive matcher, and the shares of topics that patterns match."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.gossipsub.effects import Send
from dep2p.gossipsub.events import JoinMatching, LeaveMatching, PeerDown, Publish, RpcReceived
from dep2p.gossipsub.matched_topics import MatchedTopics
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.patterns import PatternSet, has_wildcard, pattern_tokens
from dep2p.gossipsub.rpc import IHave, Prune, Rpc, SubscriptionChange
from dep2p.gossipsub.scoring.params import standard_scores
from dep2p.types import PeerId
from tests.gossipsub.network import connect, make_router, message_from, peer

TOKENS = st.sampled_from(["", "a", "b", "*x", "x>", "ü"])
NAMES = st.lists(TOKENS, min_size=1, max_size=6).map(".".join)
PATTERNS = (
    st.tuples(st.lists(st.one_of(TOKENS, st.just("*")), max_size=6), st.sampled_from(["*", ">", "a"]))
    .map(lambda parts: [*parts[0], parts[1]])
    .filter(lambda tokens: "*" in tokens or tokens[-1] == ">")
    .map(".".join)
)


def naive(pattern: str, name: str) -> bool:
    wanted, given_tokens = pattern.split("."), name.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given_tokens) <= len(wanted):
            return False
        given_tokens = given_tokens[: len(wanted)]
    return len(wanted) == len(given_tokens) and all(
        one in ("*", other) for one, other in zip(wanted, given_tokens, strict=True)
    )


@given(st.lists(PATTERNS, unique=True, max_size=20), st.data(), st.lists(NAMES, max_size=10))
def test_the_tree_matches_as_the_naive_way_does_also_after_removals(
    patterns: list[str], data: st.DataObject, names: list[str]
) -> None:
    tree: PatternSet[str] = PatternSet()
    for pattern in patterns:
        tree.add(pattern_tokens(pattern), pattern)
    removed = data.draw(st.lists(st.sampled_from(patterns), unique=True)) if patterns else []
    for pattern in removed:
        tree.remove(pattern_tokens(pattern))
    left = [pattern for pattern in patterns if pattern not in removed]
    assert len(tree) == len(left)
    for name in names:
        assert sorted(tree.match(name)) == sorted(pattern for pattern in left if naive(pattern, name))
    for pattern in left:
        tree.remove(pattern_tokens(pattern))
    assert tree.is_clear  # nothing stays behind of what a peer has removed


@pytest.mark.parametrize("name", ["a", "a*", "*a.b", "->", "a.b>c", "", "a..b", "**"])
def test_a_name_without_a_wildcard_as_a_whole_token_is_plain(name: str) -> None:
    assert not has_wildcard(name)
    with pytest.raises(ValueError, match="not a pattern"):
        pattern_tokens(name)


@pytest.mark.parametrize("name", ["*", ">", "a.*", "*.a", "a.>", "a.*.>", ".>", "*."])
def test_a_name_with_one_is_a_pattern(name: str) -> None:
    assert has_wildcard(name)
    assert ".".join(pattern_tokens(name)) == name


@pytest.mark.parametrize("name", [">.a", "a.>.b", ">.>", ".".join("*" * 17)])
def test_some_are_neither(name: str) -> None:
    assert has_wildcard(name)
    with pytest.raises(ValueError, match=r"last token|at most 16"):
        pattern_tokens(name)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.booleans()), max_size=200), st.integers(1, 30))
def test_matched_topics_are_bounded_and_leave_room_for_a_neighbour_that_has_none(
    steps: list[tuple[int, int, bool]], items_max: int
) -> None:
    topics = MatchedTopics(items_max)
    held: dict[str, str] = {}
    for number, owner, is_added in steps:
        name, peer = f"t{number}", PeerId(f"p{owner}")
        if not is_added:
            topics.remove(name)
            held.pop(name, None)
        elif name not in held:
            free = items_max - len(held)
            mine = sum(1 for other in held.values() if other == peer)
            assert topics.add(name, peer) == (free > 0 and mine < 4 * free)
            if name in topics:
                held[name] = peer
        assert topics.names() == list(held)
        assert len(topics) == len(held) <= items_max


def test_a_neighbour_that_makes_up_names_without_end_costs_a_bounded_amount() -> None:
    router = make_router(params=GossipParams(matched_topics_max=20), patterns=True, scores=standard_scores())
    router.handle(JoinMatching(">"), 0.0)
    connect(router, 1, 0.0)
    connect(router, 2, 0.0)
    answers = 0
    for number in range(20_000):
        now = number * 0.01
        name = f"made.up.{number}"
        rpc = (
            Rpc(subscriptions=(SubscriptionChange(name, True),)),
            Rpc((message_from(1, 5_000 + number, name),)),
            Rpc(graft=(name,)),
            Rpc(ihave=(IHave(name, (b"x" * 16,)),)),
        )[number % 4]
        for effect in router.handle(RpcReceived(peer(1), rpc), now):
            answers += isinstance(effect, Send) and bool(effect.rpc.prune)
        if number % 100 == 99:
            router.on_deadline(now)
    assert len(router.matched()) == 16  # four fifths
    assert router.sizes()["topics"] <= 16 + 256 + 1
    assert answers <= 256 * 201
    router.handle(RpcReceived(peer(2), Rpc(subscriptions=(SubscriptionChange("mine", True),))), 201.0)
    assert "mine" in router.matched()
    router.handle(LeaveMatching(">"), 202.0)
    assert (router.matched(), router.topics(), router.sizes()["patterns"]) == ([], [], 0)


def test_a_peer_s_patterns_are_bounded_and_malformed_ones_are_not_kept() -> None:
    router = make_router(patterns=True)
    names = [f"a.{number}.*" for number in range(100)] + ["a.>.b", ".".join("*" * 17)]
    connect(router, 1, 0.0, *names)
    assert router.sizes()["patterns"] == 32
    assert router.counters()["drop: subscription to a pattern"] == 70
    router.handle(PeerDown(peer(1)), 1.0)
    assert (router.sizes()["patterns"], router.sizes()["topics"]) == (0, 0)


def test_a_topic_that_a_peer_declines_is_not_sent_to_it_for_a_while() -> None:
    router = make_router(patterns=True)
    connect(router, 1, 0.0, "a.*")

    def sent(now: float) -> list[PeerId]:
        effects = router.handle(Publish("a.b", b"x", if_no_peers="ignore"), now)
        return [to for effect in effects if isinstance(effect, Send) and effect.rpc.messages for to in effect.peers]

    assert sent(0.0) == [peer(1)]
    declined = Rpc(subscriptions=(SubscriptionChange("a.b", False),), prune=(Prune("a.b", 60),))
    router.handle(RpcReceived(peer(1), declined), 0.1)
    assert sent(0.2) == []
    again: list[int] = []
    for second in range(1, 70):
        router.on_deadline(float(second))
        if sent(second + 0.5):
            again.append(second)
    assert 60 <= again[0] <= 63
