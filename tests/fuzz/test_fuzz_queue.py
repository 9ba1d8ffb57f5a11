"""Random bytes and mutated frames at both ends of a queue link: bounded time, no exception but ProtocolError."""

import random

import pytest
import trio
import trio.testing

from dep2p.errors import ProtocolError
from dep2p.host.interface import ByteStream
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.frames import Delivered, DeliveryResult, Point, Settle, Settled, WireMessage
from dep2p.protocols.wire.cbor import encode_canonical
from dep2p.protocols.wire.frame import encode_frame
from tests.fuzz.conftest import FuzzRounds
from tests.queues.nodes import queue_sides

pytestmark = pytest.mark.fuzz

_DECODERS = (
    wire.decode_publish,
    wire.decode_published,
    wire.decode_ready,
    wire.decode_deliver,
    wire.decode_settle,
    wire.decode_settled,
    wire.decode_refused,
)


def frames(rng: random.Random) -> list[bytes]:
    """Valid frames of every kind."""
    body = rng.randbytes(rng.choice((0, 1, 40)))
    subscribe = encode_canonical({"q": "jobs", "c": "c", "n": rng.randrange(5), "b": 1 << 20})
    return [
        wire.encode_publish(rng.randrange(1, 9), "jobs", b"", 0, [WireMessage(b"", body)] * rng.randrange(1, 4)),
        wire.encode_publish(rng.randrange(1, 9), "jobs", rng.randbytes(16), rng.randrange(99), [WireMessage(b"", b"")]),
        encode_frame(wire.SUBSCRIBE, subscribe, req_id=rng.randrange(1, 9)),
        wire.encode_settle(rng.randrange(1, 9), rng.randrange(3), [DeliveryResult(Settle.FINISH, 1, rng.randrange(9))]),
        wire.encode_settle(rng.randrange(1, 9), 0, [DeliveryResult(Settle.REQUEUE, 1, 1, 5, "why")]),
        wire.encode_ready(rng.randrange(1, 9), rng.randrange(9), 99),
        encode_frame(wire.UNSUBSCRIBE, b"", req_id=rng.randrange(1, 9)),
        encode_frame(wire.ADMIN, b'{"op":"info","queue":"jobs"}', req_id=rng.randrange(1, 9)),
        encode_frame(wire.ADMIN, b'{"op":"peek","queue":"jobs","count":3}', req_id=rng.randrange(1, 9)),
        wire.encode_published(rng.randrange(1, 9), [Point(1, 1)]),
        wire.encode_deliver(rng.randrange(1, 9), [Delivered(1, 1, 1, 1, 1, b"", body)]),
        wire.encode_settled(rng.randrange(1, 9), Settled(1, [(1, 1, 7)], [(1, 2, 3)])),
        wire.encode_refused(wire.REFUSED, rng.randrange(1, 9), 6, "full", 5),
    ]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut out or put in."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(3):
            case 0:
                changed[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 1:
                del changed[at : at + rng.randrange(1, 9)]
            case _:
                if at < len(changed):
                    changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def test_decoders_take_anything(fuzz_rounds: FuzzRounds) -> None:
    refused = 0
    for rng in fuzz_rounds():
        payload = mutate(rng, rng.choice(frames(rng)))[12:]
        for decode in _DECODERS:
            try:
                decode(payload)
            except ProtocolError:
                refused += 1
    assert refused


async def test_a_hostile_member_ends_its_own_link_and_nothing_else(
    fuzz_rounds: FuzzRounds, autojump_clock: trio.testing.MockClock
) -> None:
    async with queue_sides(3) as [broker, hostile, honest]:
        await broker.queues.create("jobs")
        async with honest.at(broker).consume("jobs", "honest", max_in_flight=5) as messages:
            links = 0
            for rng in fuzz_rounds():
                connection = await hostile.gate.connect(broker.peer)
                stream: ByteStream = await connection.open_stream(broker.service.protocol)
                links += 1
                for _ in range(rng.randrange(1, 20)):
                    chosen = rng.choice(frames(rng))
                    if stream.is_write_closed:
                        break
                    stream.write_nowait(mutate(rng, chosen) if rng.random() < 0.5 else chosen)
                    if rng.random() < 0.3:
                        await trio.sleep(0.01)
                await trio.sleep(0.05)
                stream.reset()
                marker = b"honest %d" % links
                await honest.at(broker).publish("jobs", marker)
                while True:
                    message = await messages.__anext__()
                    await message.finish()
                    if message.body == marker:
                        break
            assert links
            assert broker.count("links_failed_internally") == 0
