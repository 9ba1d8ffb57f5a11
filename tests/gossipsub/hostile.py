"""Events as a hostile or broken world would give them; for the state machine and the fuzz."""

import random
from dataclasses import replace

from dep2p.gossipsub.events import (
    ConfigureTopic,
    Event,
    Join,
    JoinMatching,
    Leave,
    LeaveMatching,
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
    StreamUp,
    TopicAppeared,
    Validated,
    Verdict,
    Version,
)
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.pubsub.seqno_validator import SeqnoValidator
from dep2p.types import PeerId
from tests.gossipsub.network import identity, inline, message_from, peer

TOPICS = ("t", "u", "v", "", "x" * 2_000, "é", "a.b", "a.c", "a.b.c", "a.*", "a.>", ">", "a.>.b")
PEERS = 12


def reject(sender: PeerId, message: RpcMessage) -> Verdict:
    return Verdict.REJECT


def some_id(rng: random.Random) -> bytes:
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.choice([0, 1, 16, 46, 2_000]))
        case _:
            return message_from(rng.randrange(5), rng.randrange(20)).id


def some_ids(rng: random.Random) -> tuple[bytes, ...]:
    return tuple(some_id(rng) for _ in range(rng.choice([0, 1, 2, 5, 60])))


def some_message(rng: random.Random) -> RpcMessage:
    data = bytes(rng.choice([0, 1, 500, 1_024, 3_000]))
    message = message_from(rng.randrange(PEERS), rng.choice([0, 1, 2, 3, 999, 1_001, 2**40]), rng.choice(TOPICS), data)
    if rng.random() < 0.1:
        return RpcMessage(message.id, b"", b"", message.topic, data)
    return message


def some_rpc(rng: random.Random) -> Rpc:
    infos = tuple(PeerInfo(rng.randbytes(rng.choice([0, 4, 38])), rng.randbytes(3)) for _ in range(rng.randrange(20)))
    backoff_s = rng.choice([0, 1, 10, 60, 3_600, 2**32, 2**64 - 1])
    return Rpc(
        tuple(some_message(rng) for _ in range(rng.choice([0, 0, 1, 1, 4]))),
        tuple(SubscriptionChange(rng.choice(TOPICS), rng.random() < 0.8) for _ in range(rng.choice([0, 0, 1, 3]))),
        tuple(IHave(rng.choice(TOPICS), some_ids(rng)) for _ in range(rng.choice([0, 0, 1, 2]))),
        some_ids(rng) if rng.random() < 0.3 else (),
        tuple(rng.choice(TOPICS) for _ in range(rng.choice([0, 0, 1, 3]))),
        tuple(Prune(rng.choice(TOPICS), backoff_s, infos) for _ in range(rng.choice([0, 0, 0, 1, 2]))),
        some_ids(rng) if rng.random() < 0.2 else (),
    )


def some_pattern_event(rng: random.Random, topic: str) -> Event:
    match rng.randrange(4):
        case 0:
            return TopicAppeared(topic)
        case 1:
            return LeaveMatching(topic)
        case _:
            return JoinMatching(topic)


def some_event(rng: random.Random) -> Event:
    number = rng.randrange(1, PEERS)
    name = peer(number)
    topic = rng.choice(TOPICS)
    match rng.randrange(28):
        case 0 | 1:
            ips = rng.choice([(), ("192.0.2.1",), ("2001:db8::1", "127.0.0.1"), ("nonsense",)])
            return PeerUp(name, identity(number), rng.choice(list(Version)), rng.random() < 0.5, ips)
        case 2 | 3 | 4:
            return StreamUp(name, "/meshsub/1.2.0")
        case 5:
            return PeerDown(name)
        case 6:
            return StreamDown(name)
        case 7 | 8:
            return Join(topic, rng.random() < 0.8)
        case 9:
            return Leave(topic)
        case 10 | 11:
            choice = rng.choice(["error", "queue", "ignore"])
            return Publish(topic, bytes(rng.choice([0, 10, 2_000, 5_000])), rng.randrange(100), choice)  # type: ignore[arg-type]
        case 12:
            return Validated(rng.randrange(200), rng.choice(list(Verdict)))
        case 13:
            return SendDropped(name, replace(some_rpc(rng), prune=(Prune(topic, 60),)))
        case 14:
            return (
                SetDirect(name, rng.random() < 0.5) if rng.random() < 0.5 else SetAppScore(name, rng.uniform(-200, 50))
            )
        case 15:
            if rng.random() < 0.7:
                return Malformed(name, "x")
            return SetBlacklist(name, identity(number), rng.random() < 0.3)
        case 16:
            validator = rng.choice([None, inline(SeqnoValidator(2)), reject])
            return ConfigureTopic(topic, validator, rng.random() < 0.4)
        case 17 | 18:
            return some_pattern_event(rng, topic)
        case _:
            return RpcReceived(name, some_rpc(rng))
