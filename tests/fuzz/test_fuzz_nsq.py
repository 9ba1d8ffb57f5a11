"""Hostile NSQ clients: only errors of the protocol come out, the same whole and byte by byte, and memory is bounded."""

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dep2p.protocols.nsq.commands import Command, CommandParser
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.identify import identify_answer, parse_identify
from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.protocols.nsq.session import NsqSession

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]
LIMITS = NsqLimits(line_bytes_max=200, message_bytes_max=100, body_bytes_max=300)
_VERBS = [b"PUB", b"MPUB", b"DPUB", b"SUB", b"RDY", b"FIN", b"REQ", b"TOUCH", b"CLS", b"NOP", b"AUTH", b"IDENTIFY"]
_WORDS = [b"t", b"c#ephemeral", b"", b"7", b"-1", b"99999999999999999999", b"0123456789abcdef", b"\xff\x00", b"x" * 70]
_BODIES = [
    b"{}",
    b'{"heartbeat_interval":-1}',
    b"\0\0\0\1\0\0\0\1x",
    b"\0\0\0\2\0\0\0\1x",
    b"[[[",
    b'{"sample_rate":1e3}',
]


def hostile(rng: random.Random) -> bytes:
    data = b"  V2" if rng.random() < 0.95 else rng.randbytes(4)
    for _ in range(rng.randrange(8)):
        verb = rng.choice(_VERBS) if rng.random() < 0.95 else rng.randbytes(3)
        words = [rng.choice(_WORDS) for _ in range(rng.randrange(4))]
        data += b" ".join([verb, *words]) + rng.choice([b"\n", b"\r\n"])
        if rng.random() < 0.6:
            body = rng.choice(_BODIES) if rng.random() < 0.7 else rng.randbytes(rng.randrange(50))
            size = len(body) if rng.random() < 0.8 else rng.choice([0, -1, 2**31 - 1, 301, 3])
            data += struct.pack(">i", size) + body
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data) + 1)]
    return data


def run(pieces: list[bytes]) -> tuple[list[Command], str]:
    parser, session = CommandParser(LIMITS), NsqSession(LIMITS)
    found: list[Command] = []
    for piece in pieces:
        commands = parser.feed(piece)
        found += commands
        for command in commands:
            with suppress(NsqError):
                session.accept(command)
        assert parser.buffered_bytes <= LIMITS.body_bytes_max + LIMITS.line_bytes_max + len(piece)
    return found, str(parser.failure)


def test_whole_and_byte_by_byte(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        data = hostile(rng)
        whole = run([data])
        assert run([bytes((byte,)) for byte in data]) == whole
        cut = rng.randrange(len(data) + 1)
        assert run([data[:cut], data[cut:]]) == whole


def test_identify(fuzz_rounds: FuzzRounds) -> None:
    names = [
        "client_id",
        "heartbeat_interval",
        "output_buffer_size",
        "msg_timeout",
        "sample_rate",
        "feature_negotiation",
    ]
    values = ["1", "-1", "0", "null", "1e400", "NaN", '"x"', "[]", "true", "1e3", "5000", "9" * 30]
    for rng in fuzz_rounds():
        body = "{" + ",".join(f'"{rng.choice(names)}":{rng.choice(values)}' for _ in range(rng.randrange(4))) + "}"
        raw = body.encode()
        if rng.random() < 0.3:
            raw = bytes(byte ^ (rng.random() < 0.05) for byte in raw)
        with suppress(NsqError):
            assert identify_answer(parse_identify(raw, LIMITS), LIMITS)
