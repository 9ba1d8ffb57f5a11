"""Multistream-select between our two ends, in any split of the bytes, and against hostile ones."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dep2p.errors import ProtocolError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.multistream import NAME_BYTES_MAX, PROPOSALS_MAX, encode_message, respond, select

HEADER = b"\x13/multistream/1.0.0\n"


class Script:
    """A stream whose incoming bytes are given, in these pieces; then silence or the end."""

    def __init__(self, pieces: Sequence[bytes], *, ends: bool = True) -> None:
        self.pieces = [piece for piece in pieces if piece]
        self.ends = ends
        self.written = b""

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        self.written += bytes(data)

    async def read(self, max_bytes: int = 65_536) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self.pieces:
            if self.ends:
                return b""
            await trio.sleep_forever()
        data, rest = self.pieces[0][:max_bytes], self.pieces[0][max_bytes:]
        self.pieces[:1] = [rest] if rest else []
        return data

    @property
    def left(self) -> bytes:
        return b"".join(self.pieces)


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    points = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(points)]


names = st.text(st.characters(exclude_characters="\n", codec="utf-8"), min_size=2, max_size=40).map(lambda s: "/" + s)


@settings(deadline=None)
@given(names, st.binary(max_size=50), st.lists(st.integers(0, 200), max_size=8))
def test_responder_agrees_and_takes_no_byte_that_follows(name: str, payload: bytes, cuts: list[int]) -> None:
    stream = Script(split(HEADER + encode_message("/else/1") + encode_message(name) + payload, cuts))

    async def run() -> str:
        return await respond(stream, {name}, timeout_s=5)

    assert trio.run(run) == name
    assert stream.left == payload
    assert stream.written == HEADER + b"\x03na\n" + encode_message(name)


@settings(deadline=None)
@given(names, st.binary(max_size=50), st.lists(st.integers(0, 200), max_size=8))
def test_initiator_agrees_and_takes_no_byte_that_follows(name: str, payload: bytes, cuts: list[int]) -> None:
    stream = Script(split(HEADER + encode_message(name) + payload, cuts))

    async def run() -> None:
        await select(stream, name, timeout_s=5)

    trio.run(run)
    assert stream.left == payload
    assert stream.written == HEADER + encode_message(name)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_an_agreement_or_an_expected_error(data: bytes) -> None:
    async def run() -> None:
        for stream in (Script([data]), Script([HEADER + data])):
            try:
                await respond(stream, {"/echo/1"}, timeout_s=5)
            except (ProtocolError, StreamClosedError):
                pass  # the only ways to fail here
        for stream in (Script([data]), Script([HEADER + data])):
            try:
                await select(stream, "/echo/1", timeout_s=5)
            except (ProtocolError, StreamClosedError, ProtocolNotSupportedError):
                pass

    trio.run(run)


async def test_refusal_is_an_error_of_its_own() -> None:
    with pytest.raises(ProtocolNotSupportedError, match="/echo/1"):
        await select(Script([HEADER + b"\x03na\n"]), "/echo/1", timeout_s=5)


async def test_other_answer_is_a_violation() -> None:
    with pytest.raises(ProtocolError):
        await select(Script([HEADER + encode_message("/other/1")]), "/echo/1", timeout_s=5)


async def test_header_is_answered_before_the_proposal_comes(autojump_clock: trio.testing.MockClock) -> None:
    stream = Script([HEADER], ends=False)
    with pytest.raises(RequestTimeoutError):
        await respond(stream, {"/echo/1"}, timeout_s=5)
    assert stream.written == HEADER


async def test_initiator_times_out(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(RequestTimeoutError):
        await select(Script([], ends=False), "/echo/1", timeout_s=5)


async def test_proposals_are_bounded() -> None:
    stream = Script([HEADER + encode_message("/nope") * (PROPOSALS_MAX + 1)])
    with pytest.raises(ProtocolError, match="proposals"):
        await respond(stream, {"/echo/1"}, timeout_s=5)


async def test_longest_name_is_taken_and_a_longer_one_is_not() -> None:
    name = "/" + "a" * (NAME_BYTES_MAX - 1)
    assert await respond(Script([HEADER + encode_message(name)]), {name}, timeout_s=5) == name
    for wrong in ("", name + "a", "a\nb"):
        with pytest.raises(ValueError, match="no protocol name"):
            encode_message(wrong)
    with pytest.raises(ProtocolError):
        await respond(Script([HEADER + b"\x82\x08" + name.encode() + b"a\n"]), {name + "a"}, timeout_s=5)
