"""Forged copies of a message, under its id, in front of the true one: they do not keep the true one out."""

import pytest

from dep2p.gossipsub.effects import Deliver, Effect, Send, Validate
from dep2p.gossipsub.events import Join, PeerDown, RpcReceived, Validated, Verdict
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import IHave, Rpc, RpcMessage
from dep2p.gossipsub.scoring.params import standard_scores
from dep2p.gossipsub.validation import DIFFERING_MAX, OTHERS_MAX
from tests.gossipsub.network import connect, identity, make_router, message_from, peer, run_until, sends

TRUE = message_from(90, 1, data=b"x" * 2_000)


def forged(number: int, of: RpcMessage = TRUE) -> RpcMessage:
    return RpcMessage(of.id, of.author, of.seqno, of.topic, b"forged %d" % number, b"bad")


def node(peers: int, *, external: bool, number: int = 0) -> Router:
    """A router of a live node: signatures are checked outside of it, or inside."""

    def authenticate(message: RpcMessage) -> str | None:
        return None if message.signature == b"signed" else "invalid signature"

    router = make_router(
        number, is_external=external, authenticate=None if external else authenticate, scores=standard_scores()
    )
    router.handle(Join("t"), 0.0)
    for other in range(1, peers + 1):
        connect(router, other, 0.0, "t")
    return router


def judge(router: Router, effects: list[Effect], now: float) -> list[Effect]:
    """Answer what is to be validated, and what comes of that."""
    done: list[Effect] = []
    while effects:
        effect = effects.pop(0)
        done.append(effect)
        if isinstance(effect, Validate):
            verdict = Verdict.ACCEPT if effect.message.signature == b"signed" else Verdict.BAD_SIGNATURE
            effects += router.handle(Validated(effect.ticket, verdict), now)
    return done


def delivered(effects: list[Effect]) -> list[bytes]:
    return [effect.message.data for effect in effects if isinstance(effect, Deliver)]


@pytest.mark.parametrize("external", [False, True])
def test_a_forged_copy_makes_nobody_hold_the_true_one_back(external: bool) -> None:
    victim = node(7, external=external)
    effects = judge(victim, victim.handle(RpcReceived(peer(7), Rpc((forged(0),))), 1.0), 1.0)
    assert [effect for effect in effects if isinstance(effect, Send)] == []
    assert delivered(effects) == []
    effects = judge(victim, victim.handle(RpcReceived(peer(1), Rpc((TRUE,))), 1.1), 1.1)
    assert delivered(effects) == [TRUE.data]
    (told,) = [effect for effect in effects if isinstance(effect, Send) and effect.rpc.idontwant]
    assert peer(1) not in told.peers


@pytest.mark.parametrize("forgers", [1, DIFFERING_MAX, DIFFERING_MAX + 1, 3 * DIFFERING_MAX, 2 * OTHERS_MAX])
def test_any_number_of_forged_copies_that_wait_hide_nothing(forgers: int) -> None:
    """All forgers are faster than the mesh peer with the true one, and nobody has been judged yet."""
    victim = node(forgers + 1, external=True)
    honest = peer(1)
    assert honest in victim.mesh("t")
    waiting: list[Effect] = []
    for number in range(2, forgers + 2):
        waiting += victim.handle(RpcReceived(peer(number), Rpc((forged(number),))), 1.0)
    waiting += victim.handle(RpcReceived(honest, Rpc((TRUE,))), 1.001)
    effects = judge(victim, waiting, 1.01)
    now = 1.01
    while not delivered(effects) and now < 10.0:
        # What was not kept is asked for; forgers answer with another forgery.
        now += 0.05
        answers: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send) and TRUE.id in effect.rpc.iwant:
                for asked in effect.peers:
                    answer = TRUE if asked == honest else forged(int(asked[1:]) + 1_000)
                    answers += victim.handle(RpcReceived(asked, Rpc((answer,))), now)
        effects = judge(victim, [*answers, *run_until(victim, now)], now)
    assert delivered(effects) == [TRUE.data]
    assert now < 2.0


def test_a_forged_answer_lets_the_next_peer_be_asked_at_once() -> None:
    router = node(3, external=True)
    for number in (1, 2, 3):
        router.handle(RpcReceived(peer(number), Rpc(ihave=(IHave("t", (TRUE.id,)),))), 1.0)
    effects = judge(router, router.handle(RpcReceived(peer(1), Rpc((forged(1),))), 1.1), 1.1)
    (ask,) = [effect for effect in effects if isinstance(effect, Send) and effect.rpc.iwant]
    assert ask.peers in ((peer(2),), (peer(3),))


@pytest.mark.parametrize("external", [False, True])
def test_an_unchecked_message_in_our_own_name_marks_nothing_as_seen(external: bool) -> None:
    """Where ids come from the content, such a message has the id of one that another node is about to publish."""
    router = node(2, external=external)
    own = RpcMessage(b"content id", identity(0), (1).to_bytes(8, "big"), "t", b"data", b"bad")
    judge(router, router.handle(RpcReceived(peer(1), Rpc((own,))), 1.0), 1.0)
    assert not router.has_seen(b"content id")
    true = RpcMessage(b"content id", identity(90), (5).to_bytes(8, "big"), "t", b"data", b"signed")
    assert delivered(judge(router, router.handle(RpcReceived(peer(2), Rpc((true,))), 1.1), 1.1)) == [b"data"]


def test_an_authentic_message_of_an_earlier_run_is_ignored_without_blame() -> None:
    router = node(2, external=True)
    own = RpcMessage(b"old", identity(0), (1).to_bytes(8, "big"), "t", b"data", b"signed")
    effects = judge(router, router.handle(RpcReceived(peer(1), Rpc((own,))), 1.0), 1.0)
    assert delivered(effects) == [] and router.has_seen(b"old")
    assert router.scores()[peer(1)] >= 0
    assert router.counters()["own message of an earlier run"] == 1


# One IWANT for a message at a time ------------------------------------------------------------------------------------


def asked(effects: list[Effect], message_id: bytes) -> list[str]:
    return [str(name) for e in effects if isinstance(e, Send) and message_id in e.rpc.iwant for name in e.peers]


def announce(router: Router, numbers: range, now: float, *ids: bytes) -> list[Effect]:
    effects: list[Effect] = []
    for number in numbers:
        effects += router.handle(RpcReceived(peer(number), Rpc(ihave=(IHave("t", ids),))), now)
    return effects


def test_a_message_that_many_announce_is_asked_of_one() -> None:
    router = node(20, external=False)
    effects = announce(router, range(1, 21), 1.0, TRUE.id)
    assert asked(effects, TRUE.id) == [peer(1)]
    assert router.counters()["iwant spared"] == 19


def test_what_does_not_come_is_asked_of_others_one_after_the_other_and_then_of_more() -> None:
    router = node(20, external=False)
    run_until(router, 1.2)
    announce(router, range(1, 21), 1.2, TRUE.id)
    found = [asked(run_until(router, second + 0.2), TRUE.id) for second in range(2, 7)]
    assert [len(each) for each in found] == [1, 2, 4, 8, 1]  # sixteen spares are remembered
    names = [name for each in found for name in each]
    assert len(dict.fromkeys(names)) == len(names) and peer(1) not in names
    run_until(router, 12.0)
    assert router.sizes()["wanted"] == 0


def test_an_announcement_after_the_wait_is_asked_at_once() -> None:
    router = node(3, external=False)
    announce(router, range(1, 2), 1.0, TRUE.id)
    assert asked(announce(router, range(2, 3), 1.4, TRUE.id), TRUE.id) == []
    assert asked(announce(router, range(3, 4), 1.51, TRUE.id), TRUE.id) == [peer(3)]


def test_when_the_asked_peer_is_gone_the_next_heartbeat_asks_another() -> None:
    router = node(3, external=False)
    run_until(router, 1.9)
    announce(router, range(1, 4), 1.9, TRUE.id)
    router.handle(PeerDown(peer(1)), 1.95)
    (name,) = asked(run_until(router, 2.2), TRUE.id)
    assert name in (peer(2), peer(3))


def test_a_message_that_came_is_not_asked_for_again() -> None:
    router = node(3, external=False)
    announce(router, range(1, 4), 1.0, TRUE.id)
    router.handle(RpcReceived(peer(1), Rpc((TRUE,))), 1.2)
    assert asked(run_until(router, 8.0), TRUE.id) == []
    assert router.sizes()["wanted"] == 0


def test_made_up_ids_are_bounded() -> None:
    params = GossipParams(wanted_items_max=50, wanted_bytes_max=1_000)
    router = make_router(params=params)
    router.handle(Join("t"), 0.0)
    connect(router, 1, 0.0, "t")
    for start in range(0, 400, 100):
        ids = tuple(b"%040d" % number for number in range(start, start + 100))
        assert len(sends(announce(router, range(1, 2), 1.0, *ids))) == 1
    assert router.sizes()["wanted"] <= 25
    assert router.counters()["wanted evicted"] >= 375
