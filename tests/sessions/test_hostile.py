"""Peers that speak the bytes of a session and not its rules: only their own stream suffers."""

from dataclasses import replace

import pytest
import trio
import trio.testing

from dep2p.errors import ErrorCode, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.wire import (
    Resume,
    SessionAnswer,
    decode_session_answer,
    encode_ack,
    encode_item,
    encode_request,
    encode_resume,
    encode_session_answer,
    push_header,
)
from dep2p.protocols.wire.frame import Frame, FrameDecoder, decode_error, encode_frame
from tests.sessions.nodes import SessionSide, forever, session_sides, take

RESUME = Resume(b"0123456789abcdef", 0, 0, 0, 64, 1_000, 0, "x", b"")


class Raw:
    """A stream of the session protocol in our own hand."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.decoder = FrameDecoder(1 << 24)
        self.frames: list[Frame] = []

    @classmethod
    async def open(cls, client: SessionSide, server: SessionSide) -> "Raw":
        connection = await client.gate.connect(server.peer)
        return cls(await connection.open_stream(server.service.protocol))

    def send(self, *frames: bytes) -> None:
        self.stream.write_nowait(b"".join(frames))

    async def next(self) -> Frame | None:
        """The next frame; None at the end."""
        with trio.fail_after(100):
            while not self.frames:
                data = await self.stream.read()
                if not data:
                    return None
                self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    async def resume(self, resume: Resume = RESUME) -> SessionAnswer:
        self.send(encode_resume(resume))
        frame = await self.next()
        assert frame is not None and frame.type == 0x32
        return decode_session_answer(frame.payload)

    async def refused(self) -> ErrorCode:
        """The code of the ERROR that ends the stream."""
        while (frame := await self.next()) is not None:
            if frame.type == 0x06:
                assert await self.next() is None
                return ErrorCode(decode_error(frame.payload)[0])
        raise AssertionError("the stream ended without a word")


_RESUME_BYTES = encode_resume(RESUME)
VIOLATIONS = {
    "nothing sensible first": (b"", encode_ack(0, 0)),
    "short RESUME": (b"", encode_frame(0x32, bytes(20))),
    "RESUME without a name": (b"", encode_frame(0x32, bytes(56) + b"\0")),
    "a name that is not UTF-8": (b"", encode_frame(0x32, bytes(56) + b"\2\xff\xff")),
    "handled more than received": (b"", encode_resume(RESUME._replace(handled=3, received=2))),
    "RESUME from the future": (b"", encode_resume(RESUME._replace(received=3))),
    "flags on RESUME": (b"", encode_frame(0x32, _RESUME_BYTES[12:], flags=4)),
    "a second RESUME": (_RESUME_BYTES, _RESUME_BYTES),
    "an ack of what was never sent": (_RESUME_BYTES, encode_ack(2, 0)),
    "an ack of more handled than received": (_RESUME_BYTES, encode_ack(0, 1)),
    "an ack of the end of time": (_RESUME_BYTES, encode_ack(2**64 - 1, 2**64 - 1)),
    "a server's ack": (_RESUME_BYTES, encode_frame(0x31, bytes(4))),
    "PUSH to a server": (_RESUME_BYTES, push_header(1, 9) + encode_item(0, 0, b"")),
    "REQUEST 0": (_RESUME_BYTES, encode_request(0, b"", 0)),
    "REQUEST without a timeout": (_RESUME_BYTES, encode_frame(0x01, b"", req_id=1)),
    "flags on an ack": (_RESUME_BYTES, encode_frame(0x31, bytes(16), flags=8)),
    "an unknown type": (_RESUME_BYTES, encode_frame(0x33, b"")),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_ends_the_stream_by_a_named_error_and_the_session_lives(
    autojump_clock: trio.testing.MockClock, name: str
) -> None:
    before, bad = VIOLATIONS[name]
    async with session_sides() as [server, client]:
        server.serve(forever)
        async with client.service.open(server.peer, "x") as other:
            raw = await Raw.open(client, server)
            raw.send(before)
            if before:
                assert await raw.next() is not None
                [session] = [each for each in server.service.served() if each.id == RESUME.session_id.hex()]
                await session.push(b"1")
            raw.send(bad)
            assert await raw.refused() == ErrorCode.INVALID_REQUEST
            # Whoever speaks properly goes on, this session too.
            await other_session(server, other.id)
            assert await take(other, 1) == [b"still here"]
            again = await Raw.open(client, server)
            answer = await again.resume()
            assert answer.next_seq == 1


async def other_session(server: SessionSide, session_id: str) -> None:
    await server.service.find(session_id).push(b"still here")


async def test_a_client_that_acknowledges_nothing_costs_a_bounded_log_and_fails_visibly(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever, options=SessionOptions(items_max=10))
        raw = await Raw.open(client, server)
        await raw.resume()
        session = server.session
        pushed = 0
        with trio.move_on_after(59):
            while True:
                await session.push(b"x")
                pushed += 1
        assert pushed == session.core.sender.unhandled == 10
        assert session.core.sender.retransmissions == 3
        await trio.sleep(2)
        assert session.close_reason == "push 1 was sent 4 times and not acknowledged"
        assert server.count("failed") == 1
        received = 0
        while (frame := await raw.next()) is not None:
            received += frame.type == 0x30
        assert received >= 4


async def test_a_window_of_one_byte_gets_one_push_at_a_time(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever)
        raw = await Raw.open(client, server)
        await raw.resume(RESUME._replace(window_items=1, window_bytes=1))
        session = server.session
        async with trio.open_nursery() as nursery:

            async def push_all() -> None:
                for number in range(5):
                    await session.push(b"%d" % number * 100)

            nursery.start_soon(push_all)
            for number in range(1, 6):
                frame = await raw.next()
                assert frame is not None and frame.type == 0x30
                assert int.from_bytes(frame.payload[:8], "big") == number
                with trio.move_on_after(5):
                    await raw.next()
                    raise AssertionError("a second push came over a window of one byte")
                raw.send(encode_ack(number, number))


async def test_ten_million_in_flight_are_cut_to_what_the_server_keeps(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever, options=SessionOptions(items_max=10))
        raw = await Raw.open(client, server)
        await raw.resume(RESUME._replace(window_items=10_000_000, window_bytes=2**32 - 1))
        session = server.session
        for _ in range(10):
            session.push_nowait(b"x")
        assert session.stats()["window_items"] == 20
        with trio.move_on_after(5) as scope:
            await session.push(b"one more")
        assert scope.cancelled_caught


async def test_requests_over_the_bound_are_refused_and_repeated_ones_ignored(
    autojump_clock: trio.testing.MockClock,
) -> None:
    options = SessionOptions(requests_max=3)
    async with session_sides() as [server, client]:
        server.serve(forever, options=options)
        raw = await Raw.open(client, server)
        await raw.resume()
        raw.send(*[encode_request(number, b"?", 60_000) for number in (1, 2, 2, 1, 4, 3, 3)])
        await trio.sleep(1)
        bindings = server.session.core.bindings
        assert (bindings.taken, bindings.open_requests) == (3, 3)
        assert server.count("requests_repeated") == 3
        assert server.count("requests_early") == 1
        raw.send(encode_request(4, b"?", 60_000))
        await trio.sleep(1)
        assert server.count("requests_refused_overloaded") == 1
        assert bindings.open_requests == 3


async def test_a_stream_that_says_nothing_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever)
        raw = await Raw.open(client, server)
        started = trio.current_time()
        with pytest.raises(StreamClosedError):
            await raw.next()
        assert trio.current_time() - started == pytest.approx(server.limits.stream_first_item_timeout_s, abs=1)


async def test_a_peer_opens_a_bounded_number_of_streams(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides(limits=Limits(sessions_per_peer_max=2)) as [server, client]:
        server.serve(forever)
        streams = [await Raw.open(client, server) for _ in range(6)]
        await trio.sleep(1)
        assert server.count("links_refused_per_peer_max") == 2
        assert len(streams) == 6


# A server that does not keep to the rules


PUSHES = push_header(1, 20) + encode_item(0, 0, b"a") + encode_item(0, 0, b"b")
BAD_SERVERS = {
    "a PUSH before the answer": PUSHES,
    "an answer of an unknown status": encode_session_answer(SessionAnswer(9, 5, 1, 0)),
    "an answer without an epoch": encode_session_answer(SessionAnswer(0, 0, 1, 0)),
    "an answer at another place": encode_session_answer(SessionAnswer(1, 5, 3, 0)),
    "requests taken that were never sent": encode_session_answer(SessionAnswer(0, 5, 1, 0))
    + encode_frame(0x31, b"\0\0\0\7"),
    "more than the window": encode_session_answer(SessionAnswer(0, 5, 1, 0))
    + push_header(1, 9 * 30)
    + encode_item(0, 0, b"") * 30,
    "number 0": encode_session_answer(SessionAnswer(0, 5, 1, 0)) + push_header(0, 9) + encode_item(0, 0, b""),
    "a PUSH that is cut off": encode_session_answer(SessionAnswer(0, 5, 1, 0))
    + push_header(1, 11)
    + encode_item(0, 0, b"abc")[:-1],
    "an unknown kind": encode_session_answer(SessionAnswer(0, 5, 1, 0)) + push_header(1, 9) + encode_item(7, 0, b""),
    "a REQUEST to a client": encode_session_answer(SessionAnswer(0, 5, 1, 0)) + encode_request(1, b"", 0),
}


@pytest.mark.parametrize("name", BAD_SERVERS)
async def test_a_client_leaves_a_server_that_breaks_the_rules(
    autojump_clock: trio.testing.MockClock, name: str
) -> None:
    told: list[ErrorCode] = []

    async with session_sides() as [server, client]:

        async def serve_badly(stream: ByteStream) -> None:
            await stream.read()
            stream.write_nowait(BAD_SERVERS[name])
            decoder = FrameDecoder(1 << 20)
            while data := await stream.read():
                for frame in decoder.feed(data):
                    if frame.type == 0x06:
                        told.append(ErrorCode(decode_error(frame.payload)[0]))
            await stream.close()

        server.host.set_stream_handler(server.service.protocol, serve_badly)
        session = None
        try:
            options = replace(SessionOptions(), items_max=8)
            session = await client.service.start(server.peer, "x", options=options, timeout_s=3)
        except Exception as error:
            assert "answer" in name or "status" in name or "epoch" in name or "place" in name, error
        await trio.sleep(1)
        assert told and set(told) == {ErrorCode.INVALID_REQUEST}
        if session is not None:
            assert session.core.receiver.received == 0 or name == "more than the window"
            session.stop()
