"""Bugs reported against other implementations, as tests of ours. Issue numbers: go-libp2p-pubsub G, rust-libp2p R,
js-libp2p-gossipsub J, js-libp2p JL, py-libp2p P, nim-libp2p N."""

import pytest

from dep2p.errors import MessageTooLargeError, NoPeersSubscribedError
from dep2p.gossipsub.effects import (
    Deliver,
    Disconnect,
    Effect,
    HoldPeer,
    Lane,
    OpenStream,
    PublishAccepted,
    PublishExpired,
    ResetStream,
    Send,
    Validate,
)
from dep2p.gossipsub.events import (
    ConfigureTopic,
    Event,
    Join,
    Leave,
    PeerDown,
    PeerUp,
    Publish,
    RpcReceived,
    SendDropped,
    StreamDown,
    StreamUp,
    Validated,
    Verdict,
)
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import IHave, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.scoring.params import standard_scores
from dep2p.gossipsub.state.control_rate import (
    CONTROL_DEBT_MAX,
    CONTROL_FLOOD_S,
    CONTROL_ITEMS_BURST,
    CONTROL_ITEMS_PER_S,
)
from dep2p.gossipsub.tracing.libp2p_events import DropRpc
from dep2p.pubsub.seqno_validator import SeqnoValidator
from tests.gossipsub.network import connect, inline, make_router, message_from, peer, public_message, run_until, sends

HOUR = 3_600.0


def joined(peers: int = 0, **options: object) -> Router:
    """A router in topic t with some subscribed peers."""
    router = make_router(**options)  # type: ignore[arg-type]
    router.handle(Join("t"), 0.0)
    for number in range(1, peers + 1):
        connect(router, number, 0.0, "t")
    return router


def deliver(router: Router, message: RpcMessage, now: float, sender: int = 1) -> bool:
    """Whether a copy of the message from this peer is delivered."""
    effects = router.handle(RpcReceived(peer(sender), Rpc((message,))), now)
    return any(isinstance(effect, Deliver) for effect in effects)


def grafts(router_effects: list[Effect]) -> int:
    return sum(len(effect.rpc.graft) for effect in router_effects if isinstance(effect, Send))


# G#524, kubo#9665, G#502 ---------------------------------------------------------------------------------------------


def test_a_message_that_keeps_coming_is_never_new_again_when_its_time_starts_with_each_copy() -> None:
    router = joined(2, params=GossipParams(seen_refresh=True))
    message = message_from(9, 1)
    assert deliver(router, message, 0.0)
    for now in (100.0, 200.0, 300.0):
        run_until(router, now)
        assert not deliver(router, message, now)
    run_until(router, 500.0)
    assert deliver(router, message, 500.0), "after silence for the whole time it counts as new"


def test_the_seqno_validator_ignores_an_old_message_after_it_was_forgotten() -> None:
    router = joined(2)
    router.handle(ConfigureTopic("t", inline=inline(SeqnoValidator())), 0.0)
    old = message_from(9, 1)
    assert deliver(router, old, 0.0)
    assert deliver(router, message_from(9, 2), 1.0)
    run_until(router, 300.0)
    assert not deliver(router, old, 300.0)
    assert router.counters()["rejected: validation ignored"] == 1


# kubo#11304, JL PR3487, R#3453, R PR3716 -----------------------------------------------------------------------------


def test_own_seqnos_grow_strictly_also_over_a_restart_and_pass_a_seqno_validator() -> None:
    validator = SeqnoValidator()
    seqnos: list[int] = []
    start = 1_700_000_000_000_000_000
    for _ in range(3):
        router = joined(1, seqno_start=start)
        for number in range(50):
            effects = router.handle(Publish("t", b"%d" % number), 0.0)
            (message,) = [effect.message for effect in effects if isinstance(effect, PublishAccepted)]
            seqnos.append(int.from_bytes(message.seqno, "big"))
            assert validator(public_message(message)) is Verdict.ACCEPT
        start = router.last_seqno
    assert seqnos == sorted(set(seqnos))


# J#413 ---------------------------------------------------------------------------------------------------------------


def told(router: Router, number: int, message: RpcMessage, now: float) -> list[Effect]:
    return list(router.handle(RpcReceived(peer(number), Rpc(ihave=(IHave("t", (message.id,)),))), now))


def test_a_promise_is_kept_by_anyone_who_delivers_the_message() -> None:
    router = joined(2, scores=standard_scores())
    message = message_from(9, 1)
    assert sends(told(router, 1, message, 1.0))[0].iwant == (message.id,)
    assert deliver(router, message, 1.5, sender=2)
    run_until(router, 10.0)
    assert "broken promise" not in router.counters()


def test_a_promise_is_broken_only_after_three_seconds_and_then_scored() -> None:
    router = joined(2, scores=standard_scores())
    told(router, 1, message_from(9, 1), 1.0)
    run_until(router, 3.9)
    assert router.scores()[peer(1)] >= 0
    run_until(router, 5.2)
    assert router.counters()["broken promise"] == 1
    assert router.scores()[peer(1)] < router.scores()[peer(2)]


def test_a_promise_is_void_when_our_asking_or_their_answer_was_dropped_by_us() -> None:
    router = joined(2, scores=standard_scores(), params=GossipParams(validation_max=1))
    router.handle(ConfigureTopic("t", external=True), 0.0)
    effects = told(router, 1, message_from(9, 1), 1.0)
    (asked,) = sends(effects)
    router.handle(SendDropped(peer(1), asked), 1.0)
    answer = message_from(9, 2)
    told(router, 2, answer, 1.0)
    deliver(router, message_from(9, 3), 1.1)
    deliver(router, answer, 1.2, sender=2)
    assert router.counters()["rejected: validation queue full"] == 1
    run_until(router, 10.0)
    assert "broken promise" not in router.counters()


# J#456, JL#677, JL PR693, JL PR3531 ----------------------------------------------------------------------------------


def next_opening(router: Router) -> float:
    """Let deadlines pass until a stream is asked for; when that was."""
    while True:
        deadline = router.next_deadline()
        assert deadline is not None
        if any(isinstance(effect, OpenStream) for effect in router.on_deadline(deadline)):
            return deadline


def test_a_lost_stream_is_asked_for_again_with_growing_pauses_and_announced_and_grafted_anew() -> None:
    router = joined(1)
    router.handle(StreamDown(peer(1)), 1.0)
    assert router.mesh("t") == []
    assert router.peers("t") == [peer(1)], "what it told us on its own stream still holds"
    pauses: list[float] = []
    now = 1.0
    last: list[Effect] = []
    for _ in range(4):
        opened = next_opening(router)
        pauses.append(opened - now)
        now = opened
        last = router.handle(StreamDown(peer(1)), now)
    assert pauses == sorted(pauses)
    assert 0.05 <= pauses[0] <= 0.1
    assert [type(effect) for effect in last] == [Disconnect]
    effects = list(router.handle(StreamUp(peer(1)), now))
    (hello, graft) = sends(effects)
    assert hello.subscriptions == (SubscriptionChange("t", True),)
    assert graft.graft == ("t",)
    assert router.mesh("t") == [peer(1)]


# calimero core#3816 --------------------------------------------------------------------------------------------------


def test_a_subscription_that_found_the_queue_full_is_said_again() -> None:
    router = make_router()
    connect(router, 1, 0.0)
    (announced,) = sends(router.handle(Join("t"), 0.5))
    router.handle(SendDropped(peer(1), announced), 0.5)
    again = [rpc for rpc in sends(run_until(router, 1.2), peer(1)) if rpc.subscriptions]
    assert again == [Rpc(subscriptions=(SubscriptionChange("t", True),))]
    assert not [rpc for rpc in sends(run_until(router, 3.2), peer(1)) if rpc.subscriptions]


def test_an_unsubscription_graft_or_prune_that_found_the_queue_full_is_said_again_where_still_true() -> None:
    router = joined(1)
    router.handle(SendDropped(peer(1), Rpc(graft=("t",))), 0.5)
    assert [rpc.graft for rpc in sends(run_until(router, 1.2), peer(1))] == [("t",)]
    for rpc in sends(router.handle(Leave("t"), 1.5), peer(1)):
        router.handle(SendDropped(peer(1), rpc), 1.5)
    again = sends(run_until(router, 2.2), peer(1))
    assert [rpc.subscriptions for rpc in again if rpc.subscriptions] == [(SubscriptionChange("t", False),)]
    assert [prune.topic for rpc in again for prune in rpc.prune] == ["t"]


# JL PR3583, JL#3598, P PR1475, N#554 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["stream first", "subscription first"])
def test_a_new_subscriber_is_grafted_at_once_and_gets_the_next_publish(order: str) -> None:
    router = joined()
    router.handle(PeerUp(peer(1), b"id-1"), 0.2)
    stream = StreamUp(peer(1))
    subscription = RpcReceived(peer(1), Rpc(subscriptions=(SubscriptionChange("t", True),)))
    events: list[Event] = [stream, subscription] if order == "stream first" else [subscription, stream]
    effects = [effect for event in events for effect in router.handle(event, 0.2)]
    assert [rpc.graft for rpc in sends(effects) if rpc.graft] == [("t",)]
    (published,) = [e for e in router.handle(Publish("t", b"x"), 0.2) if isinstance(e, PublishAccepted)]
    assert published.peers == (peer(1),)


# P PR1398, P PR1201, J#483 -------------------------------------------------------------------------------------------


def test_a_publish_before_anybody_is_there_waits_in_a_queue_and_goes_out_with_the_first_subscriber() -> None:
    router = joined()
    first = router.handle(Publish("t", b"early", ref=7, if_no_peers="queue"), 0.1)
    assert [(e.ref, e.queued, e.peers) for e in first if isinstance(e, PublishAccepted)] == [(7, True, ())]
    effects = connect(router, 1, 0.5, "t")
    assert [(e.ref, e.queued, e.peers) for e in effects if isinstance(e, PublishAccepted)] == [(7, False, (peer(1),))]
    (rpc,) = [rpc for rpc in sends(effects, peer(1)) if rpc.messages]
    assert rpc.messages[0].data == b"early"


def test_a_queued_publish_that_finds_no_one_is_reported_and_the_queue_is_bounded() -> None:
    router = joined(params=GossipParams(pending_publish_items_max=2))
    for ref in (1, 2):
        router.handle(Publish("t", b"x", ref=ref, if_no_peers="queue"), 0.1)
    with pytest.raises(NoPeersSubscribedError, match="full"):
        router.handle(Publish("t", b"x", if_no_peers="queue"), 0.1)
    effects = run_until(router, 31.0)
    assert [effect.ref for effect in effects if isinstance(effect, PublishExpired)] == [1, 2]
    assert router.sizes()["pending publishes"] == 0


# specs#215 -----------------------------------------------------------------------------------------------------------


def test_in_a_star_of_more_than_d_hi_a_refused_leaf_grafts_at_most_once_a_minute() -> None:
    leaf = joined(1)
    count = 0
    now = 0.0
    while now < 200.0:
        now += 1.0
        effects = run_until(leaf, now)
        asked = grafts(list(effects))
        if asked or (now == 1.0 and leaf.mesh("t")):
            count += 1
            leaf.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", 60),))), now)
    assert 2 <= count <= 4


# R PR6184, R#6183 ----------------------------------------------------------------------------------------------------


def test_the_mesh_takes_no_inbound_graft_at_d_hi_but_outbound_ones_and_is_back_at_d_after_the_heartbeat() -> None:
    router = joined(params=GossipParams(heartbeat_initial_delay_s=5.0))
    for number in range(1, 13):
        connect(router, number, 0.0, "t")
        router.handle(RpcReceived(peer(number), Rpc(graft=("t",))), 0.0)
    assert len(router.mesh("t")) == 12
    connect(router, 20, 0.1, "t")
    (refused,) = sends(router.handle(RpcReceived(peer(20), Rpc(graft=("t",))), 0.1))
    assert refused.prune == (Prune("t", 60),)
    for number in (21, 22):
        connect(router, number, 0.1, "t", outbound=True)
        router.handle(RpcReceived(peer(number), Rpc(graft=("t",))), 0.1)
    assert len(router.mesh("t")) == 14
    effects = run_until(router, 5.5)
    assert len(router.mesh("t")) == 6
    assert {peer(21), peer(22)} <= set(router.mesh("t")), "outbound peers survive up to d_out"
    assert sum(len(rpc.prune) for rpc in sends(effects)) == 8


# G#368, specs#289, N PR616 -------------------------------------------------------------------------------------------


def test_a_graft_exactly_at_the_end_of_its_backoff_is_taken_while_we_wait_some_slack_longer() -> None:
    router = joined(1, scores=standard_scores())
    router.handle(Leave("t"), 1.0)
    router.handle(Join("t"), 2.0)
    assert router.mesh("t") == []
    router.handle(RpcReceived(peer(1), Rpc(graft=("t",))), 11.0)
    assert router.mesh("t") == [peer(1)]
    assert router.scores()[peer(1)] >= 0
    other = joined(1)
    other.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", 5),))), 1.0)
    run_until(other, 6.9)
    assert other.mesh("t") == []
    run_until(other, 9.2)
    assert other.mesh("t") == [peer(1)]


# G#367, J#441, J PR444, jvm-libp2p PR472 -----------------------------------------------------------------------------


def test_joining_and_new_subscriptions_never_graft_a_peer_in_backoff() -> None:
    router = joined(1)
    router.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", 60),))), 1.0)
    router.handle(Leave("t"), 2.0)
    effects = router.handle(Join("t"), 3.0)
    for subscribe in (False, True):
        effects += router.handle(RpcReceived(peer(1), Rpc(subscriptions=(SubscriptionChange("t", subscribe),))), 3.0)
    assert grafts(list(effects)) == 0
    assert grafts(list(run_until(router, 60.9))) == 0


def test_who_we_pruned_is_in_backoff_with_us_too_and_punished_for_grafting_in_it() -> None:
    router = joined(1, scores=standard_scores())
    router.handle(Leave("t"), 1.0)
    router.handle(Join("t"), 1.5)
    effects = router.handle(RpcReceived(peer(1), Rpc(graft=("t",))), 2.0)
    assert router.mesh("t") == []
    assert [prune.topic for rpc in sends(effects) for prune in rpc.prune] == ["t"]
    assert router.scores()[peer(1)] < 0


# specs#383, G PR488, J PR447, R PR6124 -------------------------------------------------------------------------------


def test_leaving_says_ten_seconds_and_both_ends_find_each_other_right_after() -> None:
    one, two = joined(1), make_router(1)
    two.handle(Join("t"), 0.0)
    connect(two, 0, 0.0, "t")
    effects = sends(one.handle(Leave("t"), 1.0), peer(1))
    assert [prune for rpc in effects for prune in rpc.prune] == [Prune("t", 10)]
    for rpc in effects:
        two.handle(RpcReceived(peer(0), rpc), 1.0)
    assert two.mesh("t") == []
    for rpc in sends(one.handle(Join("t"), 2.0), peer(1)):
        two.handle(RpcReceived(peer(0), rpc), 2.0)
    run_until(two, 9.0)
    assert two.mesh("t") == []
    run_until(two, 14.2)
    assert two.mesh("t") == [peer(0)]


# G#705, G PR708, J#542, JL PR3405, P#1349, CVE-2026-46679 ------------------------------------------------------------


def test_nothing_is_left_of_topics_that_peers_made_up_once_they_are_gone() -> None:
    router = joined(scores=standard_scores())
    empty = router.sizes()
    for round_ in range(3):
        for number in range(1, 6):
            connect(router, number, round_, *(f"made-up-{number}-{i}" for i in range(100)))
        for number in range(1, 4):
            router.handle(PeerDown(peer(number)), round_ + 0.5)
        for number in range(4, 6):
            leaving = tuple(SubscriptionChange(f"made-up-{number}-{i}", False) for i in range(100))
            router.handle(RpcReceived(peer(number), Rpc(subscriptions=leaving)), round_ + 0.5)
            router.handle(PeerDown(peer(number)), round_ + 0.6)
    assert router.sizes() == empty


def test_a_peer_s_topics_are_capped_in_number_and_bytes() -> None:
    params = GossipParams(topics_per_peer_max=10, topic_bytes_per_peer_max=2_000)
    router = joined(params=params)
    connect(router, 1, 0.0, *(f"topic-{i}" for i in range(50)))
    assert router.sizes()["topics"] == 11
    connect(router, 2, 0.0, *("x" * 900 + str(i) for i in range(9)))
    assert router.sizes()["topics"] == 13
    connect(router, 3, 0.0, "y" * 1_025)
    assert router.sizes()["topics"] == 13
    assert router.counters()["drop: subscription over the cap"] == 40 + 7 + 1


# R#2530, R PR5595, R#6117, G#152, G PR34, spacemesh#2647, ethlambda PR589 --------------------------------------------


def test_a_peer_that_does_not_read_is_seen_traced_and_scored_and_others_get_everything() -> None:
    router = joined(3, scores=standard_scores(), tracing=True)
    run_until(router, 1.2)
    for number in range(60):
        effects = router.handle(Publish("t", b"%d" % number), 1.5)
        (send,) = [effect for effect in effects if isinstance(effect, Send) and effect.lane is Lane.MESSAGE]
        assert set(send.peers) == {peer(1), peer(2), peer(3)}
        dropped = router.handle(SendDropped(peer(1), send.rpc), 1.5)
        assert [effect.send_to for effect in dropped if isinstance(effect, DropRpc)] == [peer(1)]
    run_until(router, 2.2)
    assert router.counters()["drop: peer queue full"] == 60
    assert router.scores()[peer(1)] < router.scores()[peer(2)]


# JL#3427, JL PR3486, J#544, R PR1539, R#2603, G PR189, G#401 ---------------------------------------------------------


def test_an_oversize_publish_is_an_error_that_names_the_limit_and_nothing_is_sent() -> None:
    router = joined(1)
    with pytest.raises(MessageTooLargeError, match="1048577 bytes: at most 1048576"):
        router.handle(Publish("t", bytes(1_048_577)), 0.5)
    assert router.sizes()["mcache"] == 0
    (published,) = [e for e in router.handle(Publish("t", bytes(1_048_576)), 0.5) if isinstance(e, PublishAccepted)]
    assert published.peers == (peer(1),)


def test_an_oversize_message_from_a_peer_is_refused_and_scored() -> None:
    router = joined(1, params=GossipParams(message_bytes_max=100), scores=standard_scores())
    assert not deliver(router, message_from(9, 1, data=bytes(101)), 0.5)
    assert router.counters()["rejected: message too large"] == 1
    assert router.scores()[peer(1)] < 0


# keep-core#1138, lotus#723, lotus#13103, go-f3#759, G#46, G#69, ssv PR1989 -------------------------------------------


def test_full_validation_is_counted_blames_no_one_and_the_message_can_still_come() -> None:
    router = joined(2, params=GossipParams(validation_per_topic_max=2), scores=standard_scores())
    router.handle(ConfigureTopic("t", external=True), 0.0)
    tickets: list[int] = []
    for seqno in range(5):
        effects = router.handle(RpcReceived(peer(1), Rpc((message_from(9, seqno),))), 0.5)
        tickets += [effect.ticket for effect in effects if isinstance(effect, Validate)]
    assert len(tickets) == 2
    assert router.counters()["rejected: validation queue full"] == 3
    assert router.scores()[peer(1)] >= 0
    for ticket in tickets:
        router.handle(Validated(ticket, Verdict.ACCEPT), 0.6)
    effects = router.handle(RpcReceived(peer(2), Rpc((message_from(9, 4),))), 0.7)
    assert [type(effect) for effect in effects] == [Validate]


def test_a_validator_that_never_answers_times_out_and_frees_its_place() -> None:
    router = joined(1, params=GossipParams(validation_max=1, validation_timeout_s=5.0))
    router.handle(ConfigureTopic("t", external=True), 0.0)
    effects = router.handle(RpcReceived(peer(1), Rpc((message_from(9, 1),))), 0.5)
    (ticket,) = [effect.ticket for effect in effects if isinstance(effect, Validate)]
    run_until(router, 5.6)
    assert router.sizes()["validating"] == 0
    assert router.counters()["validation timeout"] == 1
    assert router.handle(Validated(ticket, Verdict.ACCEPT), 6.0) == []
    assert any(isinstance(e, Validate) for e in router.handle(RpcReceived(peer(1), Rpc((message_from(9, 1),))), 6.0))


# G PR284, R PR6486, R#6409, JL#3520, lodestar PR9117 -----------------------------------------------------------------


def test_an_ihave_flood_is_cut_in_rpcs_and_ids_per_heartbeat() -> None:
    router = joined(1, params=GossipParams(ihave_ids_max=100))
    asked = 0
    for batch in range(30):
        ids = tuple(b"%d-%d" % (batch, number) for number in range(30))
        for rpc in sends(router.handle(RpcReceived(peer(1), Rpc(ihave=(IHave("t", ids),))), 0.5)):
            asked += len(rpc.iwant)
    assert asked == 100
    assert router.sizes()["promises"] <= 10
    assert router.counters()["drop: ihave flood"] > 0
    run_until(router, 1.2)
    assert sends(router.handle(RpcReceived(peer(1), Rpc(ihave=(IHave("t", (b"new",)),))), 1.3))


def test_the_same_message_is_sent_to_who_asks_for_it_three_times_at_most() -> None:
    router = joined(2)
    message = message_from(9, 1)
    deliver(router, message, 0.5)
    ask = RpcReceived(peer(2), Rpc(iwant=(message.id, message.id)))
    answers = [sends(router.handle(ask, 0.6), peer(2)) for _ in range(5)]
    assert [len(answer) for answer in answers] == [1, 1, 1, 0, 0]
    assert [len(answer[0].messages) for answer in answers[:3]] == [1, 1, 1]


def test_an_iwant_flood_is_cut_per_heartbeat() -> None:
    router = joined(2, params=GossipParams(iwant_ids_max=10))
    message = message_from(9, 1)
    deliver(router, message, 0.5)
    router.handle(RpcReceived(peer(2), Rpc(iwant=(b"x",) * 10)), 0.6)
    assert sends(router.handle(RpcReceived(peer(2), Rpc(iwant=(message.id,))), 0.6)) == []
    assert router.counters()["drop: iwant flood"] == 1


def test_a_node_asks_for_no_more_in_one_iwant_than_it_can_judge_of_one_answer() -> None:
    router = joined(2, params=GossipParams(iwant_ids_per_rpc_max=10))
    ids = tuple(b"%d" % number for number in range(25))
    asked = [rpc.iwant for rpc in sends(router.handle(RpcReceived(peer(1), Rpc(ihave=(IHave("t", ids),))), 1.0))]
    assert [len(each) for each in asked] == [10, 10, 5]
    assert sorted(message_id for each in asked for message_id in each) == sorted(ids)


def test_a_graft_flood_gets_one_answer_per_heartbeat_and_ends_in_the_graylist() -> None:
    router = joined(1, scores=standard_scores())
    router.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", 60),))), 0.5)
    answers = 0
    for _ in range(100):
        answers += len(sends(router.handle(RpcReceived(peer(1), Rpc(graft=("t",))), 0.6), peer(1)))
    assert answers == 1
    assert router.scores()[peer(1)] < -80
    assert router.counters()["drop: rpc of a graylisted peer"] > 90
    effects = run_until(router, 1.2)
    assert [effect.peer for effect in effects if isinstance(effect, Disconnect)] == [peer(1)]


def test_an_idontwant_flood_is_cut_per_heartbeat_and_forgotten_after_three() -> None:
    router = joined(1, params=GossipParams(idontwant_ids_max=50))
    for batch in range(10):
        ids = tuple(b"%d-%d" % (batch, number) for number in range(20))
        router.handle(RpcReceived(peer(1), Rpc(idontwant=ids)), 0.5)
    assert router.sizes()["unwanted"] == 50
    assert router.counters()["drop: idontwant flood"] == 150
    run_until(router, 4.2)
    assert router.sizes()["unwanted"] == 0


# R GHSA-gc42-3jg7-rxr2, GHSA-xqmp-fxgv-xvq5 --------------------------------------------------------------------------


@pytest.mark.parametrize("backoff_s", [3_601, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_a_backoff_of_any_size_is_clamped_to_an_hour(backoff_s: int) -> None:
    router = joined(1)
    router.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", backoff_s),))), 1.0)
    run_until(router, HOUR)
    assert router.mesh("t") == []
    run_until(router, HOUR + 5.0)
    assert router.mesh("t") == [peer(1)]


# R#2034, R#2036, R#2585, J#309, J#472, G#539 -------------------------------------------------------------------------


def test_a_publish_to_no_one_is_a_named_error_or_by_option_none() -> None:
    router = joined()
    with pytest.raises(NoPeersSubscribedError, match="'t'"):
        router.handle(Publish("t", b"x"), 0.5)
    assert router.last_seqno == 1_000, "no number is used up"
    (published,) = [
        effect
        for effect in router.handle(Publish("t", b"x", if_no_peers="ignore"), 0.5)
        if isinstance(effect, PublishAccepted)
    ]
    assert published.peers == ()
    connect(router, 1, 0.6, "t")
    router.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", 60),))), 0.7)
    told_ids = [item.ids for rpc in sends(run_until(router, 1.2), peer(1)) for item in rpc.ihave]
    assert set(told_ids) == {(published.message.id,)}, "who comes soon after hears of it by gossip"


def test_a_publish_after_a_long_idle_time_finds_its_peers() -> None:
    router = make_router()
    connect(router, 1, 0.0, "t")
    for now in (0.5, 1_000.0):
        run_until(router, now)
        (published,) = [e for e in router.handle(Publish("t", b"x"), now) if isinstance(e, PublishAccepted)]
        assert published.peers == (peer(1),)
    run_until(router, 2_000.0)
    assert router.sizes()["topics"] == 1


CONTROL_KINDS = ["subscribe", "unsubscribe", "graft", "prune", "graft and prune"]


def control_rpc(kind: str, number: int, items: int) -> Rpc:
    """An RPC of so many items; subscriptions are to new topics."""
    names = tuple(f"{number}-{index}" for index in range(items))
    share = items // 2 if kind == "graft and prune" else items
    return Rpc(
        subscriptions=tuple(SubscriptionChange(name, kind == "subscribe") for name in names)
        if "subscribe" in kind
        else (),
        graft=("t",) * share if "graft" in kind else (),
        prune=(Prune("t", 1),) * share if "prune" in kind else (),
    )


@pytest.mark.parametrize("items", [1, 50, 1_000])
@pytest.mark.parametrize("kind", CONTROL_KINDS)
def test_a_control_flood_is_held_to_the_neighbour_s_rate_and_ended_when_it_goes_on(kind: str, items: int) -> None:
    items = max(items, 2) if kind == "graft and prune" else items
    router = make_router(scores=standard_scores())
    router.handle(Join("t"), 0.0)
    connect(router, 1, 0.0, "t")
    connect(router, 2, 0.0, "t")
    now, sent, ended = 0.1, 0, False
    while not ended:
        effects = router.handle(RpcReceived(peer(1), control_rpc(kind, sent, items)), now)
        sent += items
        holds = [effect.seconds for effect in effects if isinstance(effect, HoldPeer) and effect.peer == peer(1)]
        now += sum(holds)  # as a shell does
        ended = any(isinstance(effect, Disconnect) and effect.peer == peer(1) for effect in effects)
        assert ended == any(isinstance(effect, ResetStream) for effect in effects)
        assert now < 30.0
    assert CONTROL_FLOOD_S <= now <= CONTROL_FLOOD_S + 10.0
    assert sent <= CONTROL_ITEMS_BURST + CONTROL_ITEMS_PER_S * (now + 0.5)
    assert router.counters().get("drop: control flood", 0) == 0, "held back, it loses nothing"
    assert router.scores()[peer(1)] < 0
    router.handle(RpcReceived(peer(2), Rpc(subscriptions=(SubscriptionChange("of two", True),))), now)
    assert router.peers("of two") == [peer(2)]


@pytest.mark.parametrize("kind", CONTROL_KINDS)
def test_a_control_flood_that_nothing_holds_back_is_cut(kind: str) -> None:
    """A simulated network has no back-pressure."""
    router = make_router(scores=standard_scores())
    router.handle(Join("t"), 0.0)
    connect(router, 1, 0.0, "t")
    for number in range(40):
        router.handle(RpcReceived(peer(1), control_rpc(kind, number, 100)), 0.1)
    dropped = router.counters()["drop: control flood"]
    assert dropped >= 4_000 - CONTROL_ITEMS_BURST - CONTROL_DEBT_MAX - 100
    assert router.scores()[peer(1)] < 0


def test_a_neighbour_that_joins_and_leaves_all_its_topics_is_within_its_rate() -> None:
    router = make_router()
    router.handle(Join("t"), 0.0)
    connect(router, 1, 0.0, "t")
    for now in (0.1, 2.5, 5.0):
        names = [f"topic {number}" for number in range(255)]
        for subscribe in (True, False):
            changes = tuple(SubscriptionChange(name, subscribe) for name in names)
            router.handle(RpcReceived(peer(1), Rpc(subscriptions=changes)), now)
    assert router.counters().get("drop: control flood", 0) == 0
