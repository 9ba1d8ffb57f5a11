"""The router as a whole: forwarding, validation, direct peers, fanout, peer exchange, the heartbeat, traces."""

import base64
import json
import logging
from typing import Any

import pytest

from dep2p.errors import RateLimitedError, TooManyTopicsError
from dep2p.gossipsub.effects import (
    Deliver,
    Dial,
    Disconnect,
    Effect,
    Lane,
    PublishAccepted,
    ResetStream,
    Send,
    Validate,
)
from dep2p.gossipsub.events import (
    ConfigureTopic,
    Join,
    Leave,
    Malformed,
    PeerDown,
    PeerUp,
    Publish,
    RpcReceived,
    SendDropped,
    SetAppScore,
    SetBlacklist,
    SetDirect,
    StreamDown,
    Validated,
    Verdict,
    Version,
)
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.scoring.params import TopicScoreParams, standard_scores
from dep2p.gossipsub.scoring.peer_gater import GaterParams
from dep2p.gossipsub.signing.policy import SigningPolicy
from dep2p.gossipsub.subscriptions import allow_topics
from dep2p.gossipsub.tracing import libp2p_events as trace
from dep2p.types import PeerId
from tests.gossipsub.network import connect, identity, make_router, message_from, peer, run_until, sends


def joined(peers: int = 0, **options: Any) -> Router:
    router = make_router(**options)
    router.handle(Join("t"), 0.0)
    for number in range(1, peers + 1):
        connect(router, number, 0.0, "t")
    return router


def receive(router: Router, message: RpcMessage, sender: int = 1, now: float = 0.5) -> list[Effect]:
    return router.handle(RpcReceived(peer(sender), Rpc((message,))), now)


def delivered(effects: list[Effect]) -> list[bytes]:
    return [effect.message.data for effect in effects if isinstance(effect, Deliver)]


def published(effects: list[Effect]) -> tuple[PeerId, ...]:
    (found,) = [effect.peers for effect in effects if isinstance(effect, PublishAccepted)]
    return found


def forwarded(effects: list[Effect]) -> set[PeerId]:
    return {to for effect in effects if isinstance(effect, Send) and effect.rpc.messages for to in effect.peers}


def test_a_new_message_goes_to_the_mesh_but_not_to_its_sender_nor_its_author() -> None:
    router = joined(4)
    effects = receive(router, message_from(3, 1), sender=1)
    assert delivered(effects) == [b"data"]
    assert forwarded(effects) == {peer(2), peer(4)}
    assert receive(router, message_from(3, 1), sender=2) == []
    assert router.counters()["duplicates"] == 1


def test_an_rpc_with_one_message_goes_on_as_the_same_object_to_all_in_one_effect() -> None:
    router = joined(4)
    rpc = Rpc((message_from(9, 1),))
    (send,) = [effect for effect in router.handle(RpcReceived(peer(1), rpc), 0.5) if isinstance(effect, Send)]
    assert send.rpc is rpc
    assert send.peers == (peer(2), peer(3), peer(4))
    mixed = Rpc((message_from(9, 2),), iwant=(b"x",))
    (send,) = [effect for effect in router.handle(RpcReceived(peer(1), mixed), 0.5) if isinstance(effect, Send)]
    assert send.rpc == Rpc(mixed.messages)


def test_messages_of_topics_that_are_not_joined_are_dropped_and_a_relay_forwards_without_delivering() -> None:
    router = make_router()
    for number in (1, 2):
        connect(router, number, 0.0, "t")
    assert receive(router, message_from(9, 1)) == []
    assert router.counters()["drop: message of a topic not joined"] == 1
    router.handle(Join("t", deliver=False), 0.1)
    effects = receive(router, message_from(9, 1))
    assert delivered(effects) == []
    assert forwarded(effects) == {peer(2)}
    router.handle(Join("t"), 0.6)
    assert delivered(receive(router, message_from(9, 2))) == [b"data"]


def test_an_unknown_peer_s_rpc_does_nothing() -> None:
    router = joined()
    assert receive(router, message_from(9, 1), sender=77) == []
    assert router.counters()["drop: rpc of an unknown peer"] == 1


# Validation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(Verdict.IGNORE, "validation ignored"), (Verdict.REJECT, "validation failed")],
)
@pytest.mark.parametrize("external", [False, True])
def test_ignored_and_rejected_messages_are_neither_delivered_nor_tried_again(
    verdict: Verdict, reason: str, external: bool
) -> None:
    router = joined(3, scores=standard_scores())

    def judge(sender: PeerId, message: RpcMessage) -> Verdict:
        return verdict

    inline = None if external else judge
    router.handle(ConfigureTopic("t", inline=inline, external=external), 0.0)
    effects = receive(router, message_from(9, 1))
    if external:
        (ticket,) = [effect.ticket for effect in effects if isinstance(effect, Validate)]
        receive(router, message_from(9, 1), sender=2)
        effects = router.handle(Validated(ticket, verdict), 0.6)
    else:
        receive(router, message_from(9, 1), sender=2)
    assert (delivered(effects), forwarded(effects)) == ([], set())
    assert router.counters()[f"rejected: {reason}"] == 1
    assert receive(router, message_from(9, 1), sender=3) == []
    is_bad = {number: router.scores()[peer(number)] < 0 for number in (1, 2, 3)}
    assert is_bad == dict.fromkeys((1, 2, 3), verdict is Verdict.REJECT), "everybody who forwards a rejected message"


def test_after_external_acceptance_the_message_skips_who_sent_a_copy_meanwhile() -> None:
    router = joined(4)
    router.handle(ConfigureTopic("t", external=True), 0.0)
    (ticket,) = [e.ticket for e in receive(router, message_from(9, 1)) if isinstance(e, Validate)]
    assert receive(router, message_from(9, 1), sender=2) == []
    effects = router.handle(Validated(ticket, Verdict.ACCEPT), 0.6)
    assert delivered(effects) == [b"data"]
    assert forwarded(effects) == {peer(3), peer(4)}
    assert router.handle(Validated(ticket, Verdict.ACCEPT), 0.7) == []
    assert router.counters()["verdict too late"] == 1


def test_a_validator_that_raises_ignores_the_message_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(sender: PeerId, message: RpcMessage) -> Verdict:
        raise RuntimeError("the app's bug")

    router = joined(2)
    router.handle(ConfigureTopic("t", inline=broken), 0.0)
    with caplog.at_level(logging.ERROR, "dep2p.gossipsub"):
        assert receive(router, message_from(9, 1)) == []
    assert "the app's bug" in caplog.text
    router.handle(ConfigureTopic("t"), 0.1)
    assert delivered(receive(router, message_from(9, 2))) == [b"data"]


def forge(message: RpcMessage) -> str | None:
    return "invalid signature" if message.data == b"forged" else None


def test_a_forged_message_is_punished_and_does_not_hide_the_true_one() -> None:
    router = joined(3, authenticate=forge, scores=standard_scores())
    assert receive(router, message_from(9, 1, data=b"forged")) == []
    assert router.scores()[peer(1)] < 0
    assert delivered(receive(router, message_from(9, 1, data=b"true"), sender=2)) == [b"true"]


def test_with_external_authentication_a_forged_copy_in_front_does_not_hide_the_true_one() -> None:
    router = joined(4, is_external=True, scores=standard_scores())
    (first,) = receive(router, message_from(9, 1, data=b"forged"))
    assert isinstance(first, Validate)
    assert first.authenticate
    assert receive(router, message_from(9, 1, data=b"forged"), sender=2) == []
    assert receive(router, message_from(9, 1, data=b"true"), sender=3) == []
    (second,) = router.handle(Validated(first.ticket, Verdict.BAD_SIGNATURE), 0.6)
    assert isinstance(second, Validate)
    assert (second.message.data, second.peer) == (b"true", peer(3))
    assert delivered(router.handle(Validated(second.ticket, Verdict.ACCEPT), 0.7)) == [b"true"]
    scores = router.scores()
    assert (scores[peer(1)] < 0, scores[peer(2)] < 0, scores[peer(3)] < 0) == (True, True, False)


def test_unsigned_messages_are_refused_under_strict_sign() -> None:
    router = joined(1, scores=standard_scores())
    bare = message_from(9, 1)
    receive(router, RpcMessage(bare.id, bare.author, bare.seqno, "t", b"x"))
    assert router.counters()["rejected: missing signature"] == 1
    assert router.scores()[peer(1)] < 0


def test_an_own_message_of_an_earlier_run_is_no_one_s_fault_but_a_new_one_in_our_name_is() -> None:
    router = joined(1, scores=standard_scores())
    assert receive(router, message_from(0, 999)) == []
    assert router.scores()[peer(1)] >= 0
    receive(router, message_from(0, 5_000))
    assert router.counters()["rejected: self originated message"] == 1
    assert router.scores()[peer(1)] < 0


def test_a_verdict_on_what_has_gone_meanwhile_does_no_harm() -> None:
    for verdict in (Verdict.ACCEPT, Verdict.REJECT):
        router = joined(3)
        router.handle(ConfigureTopic("t", external=True), 0.0)
        tickets: list[int] = []
        for seqno in (1, 2):
            effects = receive(router, message_from(9, seqno))
            tickets += [effect.ticket for effect in effects if isinstance(effect, Validate)]
        router.handle(PeerDown(peer(1)), 0.6)
        effects = router.handle(Validated(tickets[0], verdict), 0.7)
        assert forwarded(effects) == ({peer(2), peer(3)} if verdict is Verdict.ACCEPT else set())
        router.handle(Leave("t"), 0.8)
        assert delivered(router.handle(Validated(tickets[1], verdict), 0.9)) == []


def test_copies_that_come_while_the_first_is_validated_count_as_delivered() -> None:
    topic = TopicScoreParams(delivery_weight=-1.0, delivery_threshold=2.0, delivery_activation_s=1.0)
    router = joined(3, scores=standard_scores())
    router.handle(ConfigureTopic("t", external=True, score=topic), 0.0)
    for seqno in range(3):
        (ticket,) = [e.ticket for e in receive(router, message_from(9, seqno), 1) if isinstance(e, Validate)]
        receive(router, message_from(9, seqno), 2, 0.9)
        router.handle(Validated(ticket, Verdict.ACCEPT), 1.0)
    run_until(router, 1.5)
    scores = router.scores()
    assert scores[peer(3)] < 0 < scores[peer(1)]
    assert scores[peer(2)] > scores[peer(3)]


# Publishing ----------------------------------------------------------------------------------------------------------


def test_publishes_are_limited_by_an_average_rate_with_a_burst() -> None:
    router = joined(1, params=GossipParams(publish_rate_per_s=10.0, publish_burst=5))
    for _ in range(5):
        router.handle(Publish("t", b"x"), 1.0)
    with pytest.raises(RateLimitedError) as caught:
        router.handle(Publish("t", b"x"), 1.0)
    assert 0 < caught.value.retry_after_ms <= 101
    router.handle(Publish("t", b"x"), 1.0 + caught.value.retry_after_ms / 1000)


def test_a_default_burst_of_ten_thousand_is_taken() -> None:
    router = joined(1)
    for _ in range(10_000):
        router.handle(Publish("t", b"x"), 1.0)
    with pytest.raises(RateLimitedError):
        router.handle(Publish("t", b"x"), 1.0)


def test_topics_are_limited_and_named_well() -> None:
    router = make_router(params=GossipParams(topics_max=2))
    router.handle(Join("a"), 0.0)
    router.handle(Join("b"), 0.0)
    router.handle(Join("b"), 0.0)
    with pytest.raises(TooManyTopicsError, match="2 topics"):
        router.handle(Join("c"), 0.0)
    router.handle(Leave("a"), 0.0)
    router.handle(Join("c"), 0.0)
    assert router.topics() == ["b", "c"]
    for name in ("", "x" * 1_025, "\ud800"):
        with pytest.raises(ValueError, match="topic name"):
            router.handle(Join(name), 0.0)
        with pytest.raises(ValueError, match="topic name"):
            router.handle(Publish(name, b""), 0.0)


def test_a_thin_mesh_is_filled_up_for_own_publishes_and_flood_publish_reaches_everybody() -> None:
    def thin(**params: Any) -> Router:
        router = joined(params=GossipParams(graft_on_subscribe=False, heartbeat_initial_delay_s=5, **params))
        for number in range(1, 11):
            connect(router, number, 0.0, "t")
        return router

    assert len(published(thin().handle(Publish("t", b"x"), 0.1))) == 6
    assert len(published(thin(flood_publish=True).handle(Publish("t", b"x"), 0.1))) == 10


def test_own_messages_are_delivered_to_ourselves_only_by_option() -> None:
    assert delivered(joined(1).handle(Publish("t", b"x"), 0.1)) == []
    assert delivered(joined(1, params=GossipParams(emit_self=True)).handle(Publish("t", b"x"), 0.1)) == [b"x"]


def test_the_fanout_is_kept_while_it_is_used_then_forgotten_and_becomes_the_mesh_on_joining() -> None:
    router = make_router()
    for number in range(1, 20):
        connect(router, number, 0.0, "t")
    first = published(router.handle(Publish("t", b"1"), 0.5))
    assert len(first) == 6
    run_until(router, 50.0)
    assert set(published(router.handle(Publish("t", b"2"), 50.0))) == set(first)
    router.handle(Join("t"), 50.5)
    assert set(router.mesh("t")) == set(first)
    router.handle(Leave("t"), 51.0)
    again = published(router.handle(Publish("t", b"3"), 51.5))
    run_until(router, 113.0)
    assert set(published(router.handle(Publish("t", b"4"), 113.0))) != set(again)


def test_idontwant_for_own_publishes_is_an_option() -> None:
    for wanted in (False, True):
        router = joined(3, params=GossipParams(idontwant_on_publish=wanted))
        effects = router.handle(Publish("t", bytes(2_000)), 0.1)
        assert bool([rpc for rpc in sends(effects) if rpc.idontwant]) is wanted


def test_the_same_content_is_published_once_where_ids_come_from_the_content() -> None:
    def compose(topic: str, data: bytes, seqno: bytes) -> RpcMessage:
        return RpcMessage(b"id of " + data, b"", b"", topic, data)

    router = joined(1, compose=compose, policy=SigningPolicy.STRICT_NO_SIGN)
    assert published(router.handle(Publish("t", b"x"), 0.1)) == (peer(1),)
    assert published(router.handle(Publish("t", b"x"), 0.2)) == ()
    assert router.counters()["publish of what was seen"] == 1
    assert delivered(receive(router, compose("t", b"y", b""))) == [b"y"]


# Direct peers, floodsub, blacklist, filters --------------------------------------------------------------------------


def test_a_direct_peer_gets_everything_is_in_no_mesh_and_is_dialed_when_away() -> None:
    router = joined(params=GossipParams(direct_connect_ticks=10))
    (dial,) = router.handle(SetDirect(peer(1)), 0.0)
    assert dial == Dial(peer(1))
    assert [effect for effect in run_until(router, 1.2) if isinstance(effect, Dial)] == [Dial(peer(1))]
    for number in (1, 2, 3):
        connect(router, number, 1.5, "t")
    run_until(router, 5.0)
    assert set(router.mesh("t")) == {peer(2), peer(3)}
    assert forwarded(receive(router, message_from(9, 1), sender=2)) == {peer(1), peer(3)}
    (refusal,) = sends(router.handle(RpcReceived(peer(1), Rpc(graft=("t",))), 5.5))
    assert refusal.prune == (Prune("t", 60),)
    assert forwarded(receive(router, message_from(9, 5), sender=1)) == {peer(2), peer(3)}
    router.handle(SetDirect(peer(2)), 5.8)
    assert set(router.mesh("t")) == {peer(3)}
    assert forwarded(receive(router, message_from(9, 6), sender=3)) == {peer(1), peer(2)}
    router.handle(SetDirect(peer(1), direct=False), 6.0)
    router.handle(SetDirect(peer(2), direct=False), 6.0)
    run_until(router, 7.2)
    assert forwarded(receive(router, message_from(9, 2), sender=2)) == {peer(3)}


def test_a_floodsub_peer_gets_every_message_and_no_control() -> None:
    router = joined(1)
    effects = connect(router, 2, 0.0, "t", version=Version.FLOODSUB)
    assert all(not (rpc.graft or rpc.prune) for rpc in sends(effects, peer(2)))
    effects = receive(router, message_from(9, 1), sender=1)
    assert forwarded(effects) == {peer(2)}
    later = run_until(router, 3.2)
    assert sends(later, peer(2)) == []


def test_a_blacklisted_peer_is_cut_off_as_neighbour_and_as_author() -> None:
    router = joined(3)
    effects = router.handle(SetBlacklist(peer(1), identity(1)), 0.5)
    assert [type(effect) for effect in effects] == [Disconnect]
    assert peer(1) not in router.mesh("t")
    assert receive(router, message_from(9, 1), sender=1) == []
    assert receive(router, message_from(1, 1), sender=2) == []
    assert router.counters()["rejected: blacklisted source"] == 1
    assert [type(e) for e in router.handle(PeerUp(peer(1), identity(1)), 1.0)] == [Disconnect]
    router.handle(SetBlacklist(peer(1), identity(1), blocked=False), 2.0)
    connect(router, 1, 2.0, "t")
    assert delivered(receive(router, message_from(1, 2), sender=1, now=2.5)) == [b"data"]


@pytest.mark.parametrize("subscription_filter", [allow_topics("t", "u"), ["t", "u"].__contains__])
def test_subscriptions_that_are_filtered_leave_nothing(subscription_filter: Any) -> None:
    router = make_router(subscription_filter=subscription_filter)
    connect(router, 1, 0.0, "t", "other", "u")
    assert router.peers("t") == router.peers("u") == [peer(1)]
    assert router.peers("other") == []
    assert router.counters()["drop: subscription filtered"] == 1


def test_more_peers_than_the_limit_are_refused() -> None:
    router = joined(2, params=GossipParams(peers_max=2))
    assert [type(e) for e in router.handle(PeerUp(peer(3), identity(3)), 1.0)] == [Disconnect]
    assert router.peers() == [peer(1), peer(2)]


def test_malformed_bytes_cost_the_peer_its_score_and_its_stream() -> None:
    router = joined(1, scores=standard_scores())
    assert router.handle(Malformed(peer(1), "no CBOR"), 0.5) == [ResetStream(peer(1), "no CBOR")]
    assert router.scores()[peer(1)] < 0


# Heartbeat -----------------------------------------------------------------------------------------------------------


def test_peers_below_zero_are_pruned_and_not_grafted() -> None:
    router = joined(8, scores=standard_scores())
    run_until(router, 1.2)
    victim = router.mesh("t")[0]
    router.handle(SetAppScore(victim, -5.0), 1.5)
    effects = run_until(router, 2.2)
    assert victim not in router.mesh("t")
    assert [prune for rpc in sends(effects, victim) for prune in rpc.prune] == [Prune("t", 60)]
    run_until(router, 100.0)
    assert victim not in router.mesh("t")


def test_the_best_scored_peers_survive_pruning() -> None:
    params = GossipParams(heartbeat_initial_delay_s=5.0)
    router = joined(params=params, scores=standard_scores())
    for number in range(1, 13):
        connect(router, number, 0.0, "t")
        router.handle(RpcReceived(peer(number), Rpc(graft=("t",))), 0.0)
    best = [peer(number) for number in (2, 5, 7, 11)]
    for name in best:
        router.handle(SetAppScore(name, 10.0), 1.0)
    run_until(router, 5.5)
    assert len(router.mesh("t")) == 6
    assert set(best) <= set(router.mesh("t"))


def test_a_full_mesh_without_outbound_peers_grafts_some() -> None:
    router = joined(6)
    run_until(router, 1.2)
    assert len(router.mesh("t")) >= 4
    for number in (11, 12, 13):
        connect(router, number, 1.5, "t", outbound=True)
    run_until(router, 2.2)
    assert len({peer(11), peer(12), peer(13)} & set(router.mesh("t"))) == 2


def test_a_mesh_of_low_median_grafts_better_peers() -> None:
    router = joined(4, scores=standard_scores())
    for number in range(11, 15):
        connect(router, number, 0.5, "t")
        router.handle(SetAppScore(peer(number), 50.0), 0.5)
    run_until(router, 58.9)
    assert set(router.mesh("t")) == {peer(number) for number in (1, 2, 3, 4)}
    run_until(router, 60.0)
    assert len(router.mesh("t")) == 6
    assert router.counters()["opportunistic graft"] == 2


def test_gossip_goes_to_peers_outside_the_mesh_of_good_standing() -> None:
    router = joined(30, scores=standard_scores())
    run_until(router, 1.2)
    mesh = set(router.mesh("t"))
    outsiders = [name for name in router.peers("t") if name not in mesh]
    for name in outsiders[:5]:
        router.handle(SetAppScore(name, -20.0), 1.3)
    message = message_from(9, 1)
    receive(router, message, now=1.5)
    (send,) = [e for e in run_until(router, 2.2) if isinstance(e, Send) and e.lane is Lane.GOSSIP]
    assert send.rpc.ihave == (IHave("t", (message.id,)),)
    assert len(send.peers) == 6
    assert not set(send.peers) & (mesh | set(outsiders[:5]))
    low = outsiders[0]
    assert router.handle(RpcReceived(low, Rpc(ihave=(IHave("t", (b"new",)),))), 2.5) == []
    assert router.handle(RpcReceived(low, Rpc(iwant=(message.id,))), 2.5) == []


def test_more_ids_than_an_ihave_may_hold_are_reported_in_different_parts() -> None:
    router = joined(
        params=GossipParams(graft_on_subscribe=False, d_lazy=4, ihave_ids_max=10, opportunistic_graft_ticks=0)
    )
    for number in range(1, 5):
        connect(router, number, 0.0, "t")
        router.handle(RpcReceived(peer(number), Rpc(prune=(Prune("t", 60),))), 0.0)
    connect(router, 9, 0.0)
    ids = {message_from(9, seqno).id for seqno in range(30)}
    for seqno in range(30):
        receive(router, message_from(9, seqno), sender=9)
    told = [item.ids for rpc in sends(run_until(router, 0.2)) for item in rpc.ihave]
    assert [len(part) for part in told] == [10] * 4
    assert len(set(told)) == 4
    assert {message_id for part in told for message_id in part} <= ids


def test_a_graft_of_a_peer_with_a_bad_score_is_refused() -> None:
    router = joined(3, scores=standard_scores())
    router.handle(PeerUp(peer(4), identity(4)), 0.0)
    router.handle(SetAppScore(peer(4), -1.0), 0.1)
    connect(router, 4, 0.1, "t")
    (refusal,) = sends(router.handle(RpcReceived(peer(4), Rpc(graft=("t",))), 0.2))
    assert refusal.prune == (Prune("t", 60),)
    assert peer(4) not in router.mesh("t")


@pytest.mark.parametrize("external", [False, True])
def test_idontwant_goes_out_for_accepted_large_messages_and_only_to_those_who_know_it(external: bool) -> None:
    router = joined(2)
    connect(router, 3, 0.0, "t", version=Version.V1_1)
    router.handle(ConfigureTopic("t", external=external), 0.1)

    def told(message: RpcMessage, verdict: Verdict = Verdict.ACCEPT) -> list[tuple[tuple[PeerId, ...], Lane]]:
        effects = receive(router, message)
        asked = [effect for effect in effects if isinstance(effect, Validate)]
        assert bool(asked) is external
        for effect in asked:
            assert not [rpc for rpc in sends(effects) if rpc.idontwant]
            effects += router.handle(Validated(effect.ticket, verdict), 0.6)
        found = [effect for effect in effects if isinstance(effect, Send) and effect.rpc.idontwant]
        assert all(effect.rpc == Rpc(idontwant=(message.id,)) for effect in found)
        return [(effect.peers, effect.lane) for effect in found]

    assert told(message_from(9, 1, data=bytes(1_024))) == [((peer(2),), Lane.CONTROL)]
    assert told(message_from(9, 2, data=bytes(1_023))) == []
    if external:
        for number, verdict in enumerate(Verdict):
            if verdict is not Verdict.ACCEPT:
                assert told(message_from(9, 3 + number, data=bytes(1_024)), verdict) == []


def test_what_a_peer_does_not_want_is_not_sent_to_it() -> None:
    router = joined(3)
    message = message_from(9, 1)
    router.handle(RpcReceived(peer(2), Rpc(idontwant=(message.id,))), 0.4)
    assert forwarded(receive(router, message)) == {peer(3)}
    assert router.handle(RpcReceived(peer(2), Rpc(iwant=(message.id,))), 0.6) == []


def test_late_heartbeats_are_counted_and_not_made_up_for() -> None:
    router = joined()
    router.on_deadline(0.1)
    assert router.on_deadline(0.2) == []
    router.on_deadline(10.0)
    assert router.counters()["heartbeats missed"] == 8
    assert router.next_deadline() == 11.0


# Peer exchange -------------------------------------------------------------------------------------------------------


def test_peers_are_named_in_prune_only_by_option_and_only_of_good_standing() -> None:
    for px in (False, True):
        router = joined(
            5,
            params=GossipParams(px_send=px),
            scores=standard_scores(),
            record_of={peer(number): b"record" if number == 3 else b"" for number in range(6)}.__getitem__,
        )
        router.handle(SetAppScore(peer(2), -1.0), 0.1)
        effects = router.handle(Leave("t"), 0.5)
        (prune,) = [prune for rpc in sends(effects, peer(1)) for prune in rpc.prune]
        named = {info.peer: info.record for info in prune.peers}
        assert named == ({identity(3): b"record", identity(4): b"", identity(5): b""} if px else {})


def test_named_peers_are_dialed_only_when_the_neighbour_is_trusted() -> None:
    router = joined(2, scores=standard_scores())
    infos = tuple(PeerInfo(identity(number), b"record") for number in (0, 2, *range(50, 80)))
    assert not router.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", 60, infos),))), 0.5)
    router.handle(SetAppScore(peer(1), 20.0), 0.6)
    effects = router.handle(RpcReceived(peer(1), Rpc(prune=(Prune("t", 60, infos),))), 0.7)
    dialed = [effect.info for effect in effects if isinstance(effect, Dial)]
    assert len(dialed) == 8
    assert all(info is not None and info.peer not in (identity(0), identity(2)) for info in dialed)


# Scores in the router ------------------------------------------------------------------------------------------------


def test_copies_soon_after_the_first_count_where_deliveries_are_scored() -> None:
    topic = TopicScoreParams(
        delivery_weight=-1.0,
        delivery_threshold=2.0,
        delivery_activation_s=1.0,
        delivery_window_s=0.05,
        delivery_decay=0.99,
        first_weight=0.0,
        mesh_time_weight=0.0,
    )
    router = joined(3, scores=standard_scores())
    router.handle(ConfigureTopic("t", score=topic), 0.0)
    for seqno in range(3):
        receive(router, message_from(9, seqno), 1, 0.6)
        receive(router, message_from(9, seqno), 2, 0.62)
        receive(router, message_from(9, seqno), 2, 0.63)
        receive(router, message_from(9, seqno), 3, 0.9)
    run_until(router, 1.5)
    scores = router.scores()
    assert (scores[peer(1)], scores[peer(2)]) == (0.0, 0.0)
    assert scores[peer(3)] < 0
    assert peer(3) not in router.mesh("t")


def test_a_graylisted_peer_is_not_read_but_its_subscriptions_are() -> None:
    router = joined(2, scores=standard_scores())
    router.handle(SetAppScore(peer(1), -100.0), 0.5)
    assert receive(router, message_from(9, 1)) == []
    router.handle(RpcReceived(peer(1), Rpc(subscriptions=(SubscriptionChange("u", True),))), 0.6)
    assert router.peers("u") == [peer(1)]


def test_the_gater_drops_messages_of_who_wastes_validation_while_it_is_full() -> None:
    router = joined(2, params=GossipParams(validation_max=1), gater=GaterParams(), scores=None)
    router.handle(ConfigureTopic("t", external=True), 0.0)
    ticket = 0
    for seqno in range(40):
        for effect in receive(router, message_from(9, seqno)):
            if isinstance(effect, Validate):
                ticket = effect.ticket
        if seqno % 2:
            router.handle(Validated(ticket, Verdict.REJECT), 0.5)
    before = router.counters().get("drop: peer gated", 0)
    for seqno in range(100, 200):
        receive(router, message_from(9, seqno))
    assert router.counters()["drop: peer gated"] > before + 50
    assert router.handle(RpcReceived(peer(1), Rpc(graft=("t",))), 0.6) == [], "control is still read"


# Traces --------------------------------------------------------------------------------------------------------------


def test_all_thirteen_trace_events_are_reported_in_libp2p_s_json_form() -> None:
    router = make_router(tracing=True)
    effects = router.handle(Join("t"), 0.0)
    for number in range(1, 4):
        effects += connect(router, number, 0.0, "t")
    effects += receive(router, message_from(9, 1))
    effects += receive(router, message_from(9, 1), sender=2)
    bare = message_from(9, 3)
    effects += receive(router, RpcMessage(bare.id, bare.author, bare.seqno, "t", b"x"))
    effects += router.handle(Publish("t", b"x"), 0.6)
    effects += router.handle(SendDropped(peer(1), Rpc(iwant=(b"x",))), 0.7)
    effects += router.handle(Leave("t"), 0.8)
    effects += router.handle(StreamDown(peer(1)), 0.9)
    events = [effect for effect in effects if type(effect) in trace.TRACE_TYPES]
    own = peer(0)
    written = [
        json.loads(json.dumps(line))
        for event in events
        for line in trace.trace_to_json(event, own, 1_000)  # type: ignore[arg-type]
    ]
    assert {line["type"] for line in written} == set(range(13))
    by_type = {line["type"]: line for line in written}
    assert by_type[9]["join"] == {"topic": "t"}
    assert by_type[1]["rejectMessage"]["reason"] == "missing signature"
    assert base64.b64decode(by_type[2]["duplicateMessage"]["messageID"]) == message_from(9, 1).id
    assert by_type[8]["dropRPC"]["meta"]["control"] == {"iwant": [{"messageIDs": ["eA=="]}]}
    sends_of_publish = [line for line in written if line["type"] == 7 and "messages" in line["sendRPC"]["meta"]]
    assert all(isinstance(line["sendRPC"]["sendTo"], str) for line in sends_of_publish)


def test_what_another_effect_says_can_be_left_out_of_the_trace_and_nothing_else() -> None:
    """Each event that is missing then has its effect; a relay delivers nothing and says so itself."""

    def told(*, implied: bool, delivers: bool) -> tuple[list[object], list[object]]:
        router = make_router()
        router.trace(on=True, implied=implied)
        effects = router.handle(Join("t", deliver=delivers), 0.0)
        for number in range(1, 4):
            effects += connect(router, number, 0.0, "t")
        effects += receive(router, message_from(9, 1))
        effects += receive(router, message_from(9, 1), sender=2)
        effects += router.handle(Publish("t", b"x"), 0.6)
        made: list[object] = []
        for effect in effects:
            if not implied and isinstance(effect, Deliver):
                made.append(trace.DeliverMessage(effect.message, effect.peer))
            elif not implied and isinstance(effect, Send):
                made.append(trace.SendRpc(effect.peers, effect.rpc))
            elif type(effect) in trace.TRACE_TYPES:
                made.append(effect)
        return made, effects  # type: ignore[return-value]

    for delivers in (True, False):
        all_of_it, _ = told(implied=True, delivers=delivers)
        lean, effects = told(implied=False, delivers=delivers)
        own = [event for event in all_of_it if isinstance(event, trace.DeliverMessage) and event.received_from is None]
        assert len(own) == 1
        assert sorted(map(str, lean)) == sorted(map(str, [event for event in all_of_it if event not in own]))
        assert not [effect for effect in effects if isinstance(effect, trace.SendRpc)]
        assert len([effect for effect in effects if isinstance(effect, trace.DeliverMessage)]) == (not delivers)


def test_without_tracing_no_trace_event_is_made() -> None:
    router = joined(3)
    effects = receive(router, message_from(9, 1)) + router.handle(Publish("t", b"x"), 0.6) + run_until(router, 3.0)
    assert not [effect for effect in effects if type(effect) in trace.TRACE_TYPES]


def test_the_trace_buffer_is_bounded_and_counts_what_it_drops() -> None:
    buffer = trace.TraceBuffer(items_max=2)
    for number in range(5):
        buffer.put(trace.JoinTopic(str(number)), float(number))
    assert buffer.dropped == 3
    assert buffer.drain() == [(0.0, trace.JoinTopic("0")), (1.0, trace.JoinTopic("1"))]
    assert len(buffer) == 0
