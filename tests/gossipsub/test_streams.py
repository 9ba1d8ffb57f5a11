"""State of a stream, not of a peer: what both ends of a link believe agrees after streams were lost or replaced."""

import pytest

from dep2p.gossipsub.effects import Effect, Send
from dep2p.gossipsub.events import (
    Event,
    Join,
    Leave,
    PeerUp,
    Publish,
    RpcReceived,
    StreamAccepted,
    StreamDown,
    StreamUp,
)
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import Prune, Rpc, SubscriptionChange
from dep2p.gossipsub.scoring.params import standard_scores
from tests.gossipsub.network import connect, identity, make_router, merge_rpcs, peer, run_until, sends


def joined(peers: int = 0) -> Router:
    router = make_router(scores=standard_scores())
    router.handle(Join("t"), 0.0)
    for number in range(1, peers + 1):
        connect(router, number, 0.0, "t")
    return router


def subscribe(router: Router, number: int, now: float, *topics: str) -> list[Effect]:
    subscriptions = tuple(SubscriptionChange(topic, True) for topic in topics)
    return router.handle(RpcReceived(peer(number), Rpc(subscriptions=subscriptions)), now)


# Our stream to the peer was lost --------------------------------------------------------------------------------------


def test_a_stream_that_is_lost_and_opened_again_leaves_no_one_sided_edge() -> None:
    """However full the mesh is: the peer may still have us in its own, so it hears a graft or a prune."""
    router = joined(4)
    lost = router.mesh("t")[0]
    router.handle(StreamDown(lost), 1.0)
    assert lost not in router.mesh("t")
    for number in range(5, 9):  # meanwhile the mesh is full without it
        connect(router, number, 1.0, "t")
        router.handle(RpcReceived(peer(number), Rpc(graft=("t",))), 1.0)
    assert len(router.mesh("t")) >= 6
    said = merge_rpcs(sends(router.handle(StreamUp(lost), 1.2), lost))
    assert said.subscriptions == (SubscriptionChange("t", True),)
    assert said.graft == ("t",) and lost in router.mesh("t")


def test_a_mesh_that_is_full_meanwhile_prunes_the_peer_whose_stream_is_back() -> None:
    router = joined(4)
    lost = router.mesh("t")[0]
    router.handle(StreamDown(lost), 1.0)
    for number in range(5, 20):
        connect(router, number, 1.0, "t")
        router.handle(RpcReceived(peer(number), Rpc(graft=("t",))), 1.0)
    assert len(router.mesh("t")) == 12
    said = merge_rpcs(sends(router.handle(StreamUp(lost), 1.2), lost))
    assert said.prune == (Prune("t", 60),) and lost not in router.mesh("t")


def test_a_topic_that_was_left_while_the_stream_was_down_is_taken_back() -> None:
    router = joined(3)
    lost = router.mesh("t")[0]
    router.handle(StreamDown(lost), 1.0)
    router.handle(Leave("t"), 1.1)
    router.handle(Join("u"), 1.1)
    said = merge_rpcs(sends(router.handle(StreamUp(lost), 1.2), lost))
    assert said.subscriptions == (SubscriptionChange("u", True), SubscriptionChange("t", False))


class FullGraph:
    """Routers that are all linked, without latency."""

    def __init__(self, count: int) -> None:
        self.routers = [make_router(number, seed=number) for number in range(count)]
        pairs = [(number, other) for number in range(count) for other in range(count) if other != number]
        for number in range(count):
            self.handle(number, Join("t"), 0.0)
        for number, other in pairs:
            self.handle(number, PeerUp(peer(other), identity(other)), 0.0)
        for number, other in pairs:
            self.handle(number, StreamUp(peer(other)), 0.0)

    def handle(self, number: int, event: Event, now: float) -> None:
        self.carry(number, self.routers[number].handle(event, now), now)

    def carry(self, number: int, effects: list[Effect], now: float) -> None:
        for effect in effects:
            for name in effect.peers if isinstance(effect, Send) else ():
                assert isinstance(effect, Send)
                other = int(name[1:])
                self.carry(other, self.routers[other].receive(peer(number), effect.rpc, now), now)

    def pass_time(self, now: float) -> None:
        for number, router in enumerate(self.routers):
            self.carry(number, run_until(router, now), now)

    def edges(self) -> dict[tuple[int, int], None]:
        return {(n, int(name[1:])): None for n, router in enumerate(self.routers) for name in router.mesh("t")}

    def one_sided(self) -> list[tuple[int, int]]:
        found = self.edges()
        return [edge for edge in found if edge[::-1] not in found]


def test_two_routers_agree_after_any_one_stream_was_reset() -> None:
    """Reset the stream of every pair in a mesh once in each direction."""
    graph = FullGraph(10)
    now = 1.0
    graph.pass_time(now)
    assert graph.one_sided() == [] and graph.edges()
    for number, other in list(graph.edges()):
        now += 0.3
        graph.handle(number, StreamDown(peer(other)), now)
        graph.handle(other, StreamAccepted(peer(number), says_hello=True), now)
        graph.handle(number, StreamUp(peer(other)), now)
        graph.pass_time(now)
        assert graph.one_sided() == []
    assert min(len(router.mesh("t")) for router in graph.routers) >= 4


def test_a_graft_that_comes_before_our_stream_is_open_counts_once_it_is() -> None:
    router = joined(8)
    assert len(router.mesh("t")) >= 4
    router.handle(PeerUp(peer(20), identity(20)), 1.0)
    subscribe(router, 20, 1.0, "t")
    router.handle(RpcReceived(peer(20), Rpc(graft=("t",))), 1.0)
    assert peer(20) not in router.mesh("t")
    router.handle(StreamUp(peer(20)), 1.5)
    assert peer(20) in router.mesh("t")


# The peer has opened a new stream to us -------------------------------------------------------------------------------


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_restarted_peer_is_in_the_topics_that_it_names_now(says_hello: bool) -> None:
    router = make_router()
    for topic in ("t", "u"):
        router.handle(Join(topic), 0.0)
    connect(router, 1, 0.0, "t", "u")
    assert router.mesh("u") == [peer(1)]
    router.handle(StreamAccepted(peer(1), says_hello=says_hello), 1.0)
    effects = subscribe(router, 1, 1.1, "t")
    # A restarted peer has an empty mesh: it is grafted again, which one that kept its mesh passes over.
    assert merge_rpcs(sends(effects, peer(1))).graft == ("t",)
    run_until(router, 8.0)
    assert router.peers("t") == [peer(1)] and router.peers("u") == [] and router.mesh("u") == []


def test_a_peer_that_says_no_hello_on_a_further_stream_keeps_its_topics() -> None:
    """As rust-libp2p: subscriptions are said on the first connection only."""
    router = joined(1)
    router.handle(StreamAccepted(peer(1)), 1.0)
    run_until(router, 20.0)
    assert router.mesh("t") == [peer(1)]


def test_on_a_wire_where_all_say_hello_silence_ends_subscriptions() -> None:
    router = joined(1)
    router.handle(StreamAccepted(peer(1), says_hello=True), 1.0)
    run_until(router, 20.0)
    assert router.peers("t") == []


def test_a_further_stream_with_the_same_topics_changes_nothing() -> None:
    router = joined(5)
    mesh = router.mesh("t")
    for number in range(1, 6):
        router.handle(StreamAccepted(peer(number), says_hello=True), 1.0)
        subscribe(router, number, 1.1, "t")
    run_until(router, 20.0)
    assert router.mesh("t") == mesh


# A graft is no subscription -------------------------------------------------------------------------------------------


def test_peers_that_graft_and_never_subscribe_have_no_place_in_the_mesh() -> None:
    router = joined()
    for number in range(1, 9):
        connect(router, number, 0.0)
        router.handle(RpcReceived(peer(number), Rpc(graft=("t",))), 0.1)
    assert router.mesh("t") == []
    with pytest.raises(Exception, match="no peer is subscribed"):
        router.handle(Publish("t", b"x"), 0.2)
    connect(router, 100, 0.3, "t")
    effects = run_until(router, 5.0)
    assert router.mesh("t") == [peer(100)]
    refusals = [rpc.prune for number in range(1, 9) for rpc in sends(effects, peer(number)) if rpc.prune]
    assert refusals == [(Prune("t", 60),)] * 8


def test_a_subscription_that_comes_after_its_graft_brings_the_peer_into_the_mesh() -> None:
    router = joined(8)
    connect(router, 20, 0.0)
    run_until(router, 1.2)
    router.handle(RpcReceived(peer(20), Rpc(graft=("t",))), 1.2)
    run_until(router, 2.2)
    subscribe(router, 20, 2.2, "t")
    assert peer(20) in router.mesh("t")
