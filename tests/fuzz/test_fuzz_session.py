"""Hostile frames into both cores of ordered sessions: only protocol errors, bounded memory, order kept."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dep2p.errors import ProtocolError, SessionClosedError, SessionTokenError
from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.resume_token import SessionToken, decode_token, encode_token
from dep2p.protocols.sessions.server import ServerSession
from dep2p.protocols.sessions.wire import (
    RESET,
    Push,
    Resume,
    SessionAnswer,
    decode_resume,
    encode_ack,
    encode_item,
    encode_request,
    encode_resume,
    encode_session_answer,
    encode_taken,
    push_header,
)
from dep2p.protocols.wire.frame import Frame, FrameDecoder, FrameType, encode_frame

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]
OPTIONS = SessionOptions(items_max=8, bytes_max=500, requests_max=5, message_bytes_max=200, bound_items_max=10)
_EDGES = [0, 1, 2, 3, 7, 16, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def number(rng: random.Random, bits: int = 64) -> int:
    return (rng.choice(_EDGES) if rng.random() < 0.5 else rng.randrange(12)) & ((1 << bits) - 1)


def resume(rng: random.Random) -> bytes:
    name = rng.choice(["x", "", "y" * 300])[:255]
    counts = (number(rng), number(rng), number(rng), number(rng, 32), number(rng, 32), number(rng, 32))
    return encode_resume(Resume(b"i" * 16, *counts, name, rng.randbytes(rng.randrange(5))))


def pushes(rng: random.Random) -> bytes:
    items = b"".join(
        encode_item(rng.randrange(9), number(rng, 32), rng.randbytes(rng.randrange(40)))
        for _ in range(rng.randrange(6))
    )
    if rng.random() < 0.1:
        items = items[: rng.randrange(len(items) + 1)]
    return push_header(number(rng), len(items)) + items


def hostile(rng: random.Random) -> bytes:
    match rng.randrange(9):
        case 0:
            return resume(rng)
        case 1:
            return encode_session_answer(SessionAnswer(rng.randrange(6), number(rng), number(rng), number(rng, 32)))
        case 2 | 3:
            return pushes(rng)
        case 4:
            return encode_ack(number(rng), number(rng))
        case 5:
            return encode_request(number(rng, 32), rng.randbytes(rng.randrange(30)), number(rng, 32))
        case 6:
            return encode_taken(number(rng, 32))
        case 7:
            kind = rng.choice([int(FrameType.PUSH), 0x31, 0x32, 0x01, 0x05, 0x03, 0x10])
            return encode_frame(kind, rng.randbytes(rng.randrange(60)), flags=rng.choice([0, 0, 4]))
        case _:
            return encode_frame(int(FrameType.STREAM_END), b"") if rng.random() < 0.05 else pushes(rng)


def frames_of(raw: bytes) -> list[Frame]:
    return FrameDecoder(1 << 20).feed(raw)


def test_hostile_clients(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        now = 0.0
        server = ServerSession(b"i" * 16, "x", 5, OPTIONS, now)
        for _ in range(60):
            now += rng.choice([0.0, 0.0, 1.0, 16.0])
            server.push(rng.randbytes(rng.randrange(30)))
            try:
                for frame in frames_of(hostile(rng)):
                    if server.closed is not None:
                        break
                    if frame.type == 0x32 and not server.is_attached:
                        server.attach(decode_resume(frame.payload), now)
                    elif server.is_attached:
                        server.handle([frame], now)
            except ProtocolError:
                if server.is_attached:
                    server.detach(now)
            server.collect(1_000, now)
            server.on_deadline(now)
            server.requests.clear()
            sender = server.sender
            assert sender.handled <= sender.received <= sender.last_sent <= sender.in_order == sender.last_seq
            assert sender.unhandled <= 2 * OPTIONS.items_max + OPTIONS.requests_max
            assert server.bindings.open_requests <= OPTIONS.requests_max
            if server.closed is not None:
                break


def test_hostile_servers(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        now = 0.0
        client = ClientSession(b"i" * 16, "x", OPTIONS)
        given: list[Push] = []
        for _ in range(60):
            now += rng.choice([0.0, 0.0, 1.0, 16.0])
            if not client.is_attached and client.may_attach:
                client.attach(now)
                if rng.random() < 0.8:
                    good = encode_session_answer(SessionAnswer(0, 5, min(client.receiver.received + 1, 2**64 - 1), 0))
                    with_error(client, good, now)
            if client.is_attached:
                with_error(client, hostile(rng), now)
            if rng.random() < 0.1 and client.requests_open < 5 and not client.ended:
                with suppress(SessionClosedError):  # a server may say that all ids were used
                    client.ask(b"?", 1_000)
            if rng.random() < 0.4:
                while (push := client.take()) is not None:
                    if push.kind == RESET:
                        given.clear()
                    elif given:
                        assert push.seq == given[-1].seq + 1, "out of order"
                    if push.kind != RESET:
                        given.append(push)
                client.done()
            client.collect(1_000, now)
            client.on_deadline(now)
            receiver = client.receiver
            assert receiver.received - receiver.handled <= 2 * OPTIONS.items_max + 6
            assert len(receiver.queue) <= 4 * OPTIONS.items_max + 12
            if receiver.failure is not None:
                break


def with_error(client: ClientSession, raw: bytes, now: float) -> None:
    try:
        client.handle(frames_of(raw), now)
    except ProtocolError:
        client.detach()


def test_hostile_tokens(fuzz_rounds: FuzzRounds) -> None:
    good = encode_token(SessionToken(b"i" * 16, 5, 3, b"peer", "name"))
    for rng in fuzz_rounds():
        text = list(good)
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.choice("AZaz09-_=+/ é\n")
        mangled = "".join(text)[: rng.randrange(len(text) + 1) if rng.random() < 0.3 else None]
        try:
            token = decode_token(mangled)
        except SessionTokenError:
            continue
        assert token.epoch and token.name
