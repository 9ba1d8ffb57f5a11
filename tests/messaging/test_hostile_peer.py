"""A peer that speaks bytes, not our code: each violation ends its stream by a named error, and nothing else."""

import struct

import pytest
import trio

from dep2p.errors import ErrorCode, ProtocolError, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.messaging.service import Notification, Request
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.frame import (
    COMPRESSED,
    FINAL,
    HEADERS,
    Frame,
    FrameDecoder,
    FrameType,
    decode_error,
    encode_error,
    encode_frame,
)
from dep2p.protocols.wire.headers import encode_headers
from tests.messaging.nodes import Side, settled, sides

HEAD = encode_headers({1: "echo"})
LIMITS = Limits(message_bytes_max=10_000, headers_bytes_max=1_000, stream_item_bytes_max=20_000)


async def echo(request: Request) -> bytes:
    return request.body


async def raw_link(a: Side, b: Side) -> ByteStream:
    connection = await a.gate.connect(b.peer)
    return await connection.open_stream(b.message_protocol)


async def all_frames(stream: ByteStream) -> list[Frame]:
    """Read all frames of the other side until it closes."""
    decoder = FrameDecoder(100_000)
    frames: list[Frame] = []
    with trio.fail_after(20):
        while data := await stream.read():
            frames += decoder.feed(data)
    assert decoder.error is None and decoder.buffered_bytes == 0
    return frames


def request(req_id: int, body: bytes = b"", flags: int = 0, own: dict[int, object] | None = None) -> bytes:
    return encode_frame(
        FrameType.REQUEST, encode_headers(own or {1: "echo"}) + body, flags=HEADERS | flags, req_id=req_id
    )


VIOLATIONS = {
    "version": (struct.pack(">BBHII", 9, 1, 0, 1, 0), ErrorCode.UNSUPPORTED_VERSION),
    "first byte": (b"GET / HTTP/1.1\r\n", ErrorCode.UNSUPPORTED_VERSION),
    "type": (struct.pack(">BBHII", 1, 0x33, 0, 1, 0), ErrorCode.INVALID_REQUEST),
    "a known type of another protocol": (encode_frame(FrameType.GOSSIP, b"x"), ErrorCode.INVALID_REQUEST),
    "response to a server": (encode_frame(FrameType.RESPONSE, b"x", req_id=1), ErrorCode.INVALID_REQUEST),
    "error to a server": (encode_error(1, "x", req_id=1), ErrorCode.INVALID_REQUEST),
    "flag": (struct.pack(">BBHII", 1, 1, 0x0100, 1, 0), ErrorCode.INVALID_REQUEST),
    "encrypted": (struct.pack(">BBHII", 1, 1, 2, 1, 0), ErrorCode.INVALID_REQUEST),
    "final": (request(1, flags=FINAL), ErrorCode.INVALID_REQUEST),
    "length": (struct.pack(">BBHII", 1, 1, 0, 0, 11_001), ErrorCode.MESSAGE_TOO_LARGE),
    "body": (request(1, bytes(10_001)), ErrorCode.MESSAGE_TOO_LARGE),
    "zip bomb": (request(1, Zstd(10**9).compress(bytes(50_000_000)), COMPRESSED), ErrorCode.MESSAGE_TOO_LARGE),
    "no zstd frame": (request(1, b"xyz", COMPRESSED), ErrorCode.INVALID_REQUEST),
    "req_id 0": (request(0), ErrorCode.INVALID_REQUEST),
    "no headers": (encode_frame(FrameType.REQUEST, b"", req_id=1), ErrorCode.INVALID_REQUEST),
    "no name": (request(1, own={2: 5}), ErrorCode.INVALID_REQUEST),
    "headers": (
        encode_frame(FrameType.REQUEST, b"\xbf\x01\x02", flags=HEADERS, req_id=1),
        ErrorCode.INVALID_REQUEST,
    ),
    "cancel with a payload": (encode_frame(FrameType.CANCEL, b"x", req_id=1), ErrorCode.INVALID_REQUEST),
    "notify with an id": (encode_frame(FrameType.NOTIFY, HEAD, flags=HEADERS, req_id=1), ErrorCode.INVALID_REQUEST),
    "notify without a name": (encode_frame(FrameType.NOTIFY, b"x"), ErrorCode.INVALID_REQUEST),
}


@pytest.mark.parametrize("name", list(VIOLATIONS))
@pytest.mark.parametrize("step", [1, 7, 1_000_000])
async def test_a_violation_ends_the_link_by_name_and_the_frames_before_it_count(
    name: str, step: int, autojump_clock: trio.abc.Clock
) -> None:
    async with sides(limits=LIMITS) as (a, b):
        got: list[bytes] = []

        async def note(notification: Notification) -> None:
            got.append(notification.body)

        b.messaging.on_request("echo", echo)
        b.messaging.on_notify("note", note)
        violation, code = VIOLATIONS[name]
        good = encode_frame(FrameType.NOTIFY, encode_headers({1: "note"}) + b"before", flags=HEADERS)
        data = good + request(77, b"x", own={1: "nobody"}) + violation
        behind = encode_frame(FrameType.NOTIFY, encode_headers({1: "note"}) + b"behind", flags=HEADERS)
        stream = await raw_link(a, b)
        if len(data) > 1_000 and step == 1:
            step = 100
        for at in range(0, len(data), step):
            if stream.is_write_closed:
                break
            stream.write_nowait(data[at : at + step])
        stream.write_nowait(behind)
        frames = await all_frames(stream)
        assert [frame.req_id for frame in frames if frame.req_id] == [77]
        last = frames[-1]
        assert (last.type, last.req_id) == (FrameType.ERROR, 0)
        assert decode_error(last.payload)[0] == code
        await settled()
        assert got == [b"before"]
        assert b.count(f"links_refused_{code.name.lower()}") == 1
        assert b.messaging.stats() == []
        # Another stream on the same connection, and our own code, are served as before.
        assert await a.messaging.request(b.peer, "echo", b"still here") == b"still here"


async def test_a_duplicate_id_in_flight_is_a_violation(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def slow(request: Request) -> bytes:
            await trio.sleep(5)
            return b""

        b.messaging.on_request("slow", slow)
        stream = await raw_link(a, b)
        stream.write_nowait(request(5, own={1: "slow"}) * 2)
        assert decode_error((await all_frames(stream))[-1].payload)[0] == ErrorCode.INVALID_REQUEST


async def test_extension_frames_are_skipped(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_request("echo", echo)
        stream = await raw_link(a, b)
        skipped = struct.pack(">BBHII", 1, 0xC3, 0xFFFF, 9, 100_000) + bytes(100_000)
        stream.write_nowait(skipped + request(1, b"x") + skipped)
        await settled()
        assert await stream.read() == encode_frame(FrameType.RESPONSE, b"x", req_id=1)
        assert b.count("frames_skipped_extension") == 2


async def test_half_closing_the_link_still_gets_the_answers(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def slow(request: Request) -> bytes:
            await trio.sleep(3)
            return request.body

        b.messaging.on_request("slow", slow)
        stream = await raw_link(a, b)
        stream.write_nowait(request(1, b"x", own={1: "slow"}))
        await stream.close_write()
        (answer,) = await all_frames(stream)
        assert answer == Frame(FrameType.RESPONSE, 0, 1, b"x")
        await settled()
        assert b.messaging.stats() == []


async def test_a_peer_that_opens_many_links_gets_four(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_request("echo", echo)
        streams = [await raw_link(a, b) for _ in range(10)]
        await settled()
        assert b.count("links_refused_per_peer_max") == 6
        alive = 0
        for stream in streams:
            try:
                stream.write_nowait(request(1, b"x"))
                alive += bool(await stream.read())
            except StreamClosedError:
                continue
        assert alive == 4


async def test_compression_that_was_not_offered_is_a_violation(autojump_clock: trio.abc.Clock) -> None:
    async with sides(features=frozenset()) as (a, b):
        b.messaging.on_request("echo", echo)
        stream = await raw_link(a, b)
        stream.write_nowait(request(1, Zstd(1_000).compress(b"x" * 100), COMPRESSED))
        assert "zstd" in decode_error((await all_frames(stream))[-1].payload)[1]


# The other way: a server that does not keep to the protocol


@pytest.mark.parametrize(
    "answer",
    [
        b"\x07garbage",
        encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=1),
        encode_frame(FrameType.NOTIFY, HEAD, flags=HEADERS),
        encode_frame(FrameType.RESPONSE, b"x", flags=FINAL, req_id=1),
        encode_frame(FrameType.RESPONSE, b"zzzz", flags=COMPRESSED, req_id=1),
        encode_frame(FrameType.ERROR, b"\0", req_id=1),
        struct.pack(">BBHII", 1, 2, 0, 1, 2**32 - 1),
        encode_error(ErrorCode.INVALID_REQUEST, "I do not understand you"),
    ],
)
async def test_a_server_that_answers_nonsense_fails_the_call_and_the_link(
    answer: bytes, autojump_clock: trio.abc.Clock
) -> None:
    async with sides() as (a, b):

        async def nonsense(stream: ByteStream) -> None:
            await stream.read()
            stream.write_nowait(answer)
            while await stream.read():
                pass
            await stream.close()

        b.host.set_stream_handler(b.message_protocol, nonsense)
        with pytest.raises((StreamClosedError, ProtocolError)):
            await a.messaging.request(b.peer, "echo", b"x", timeout_s=5)
        await settled()
        assert a.messaging.stats() == []


async def test_a_flood_of_answers_that_no_one_asked_for_is_counted(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def generous(stream: ByteStream) -> None:
            await stream.read()
            for req_id in range(1_000, 1, -1):
                stream.write_nowait(encode_frame(FrameType.RESPONSE, b"x", req_id=req_id))
            stream.write_nowait(encode_frame(FrameType.RESPONSE, b"right", req_id=1))

        b.host.set_stream_handler(b.message_protocol, generous)
        assert await a.messaging.request(b.peer, "echo", b"x") == b"right"
        assert a.count("responses_unmatched") == 999


# Streams


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x00", ErrorCode.UNSUPPORTED_VERSION),
        (encode_frame(FrameType.STREAM_DATA, b"x", flags=FINAL, req_id=1), ErrorCode.INVALID_REQUEST),
        (encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=2), ErrorCode.INVALID_REQUEST),
        (
            encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=1)
            + encode_frame(FrameType.STREAM_DATA, bytes(10_000), req_id=1) * 3,
            ErrorCode.MESSAGE_TOO_LARGE,
        ),
        (
            encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=1)
            + encode_frame(
                FrameType.STREAM_DATA, Zstd(10**9).compress(bytes(9_000_000)), flags=COMPRESSED | FINAL, req_id=1
            ),
            ErrorCode.MESSAGE_TOO_LARGE,
        ),
        (
            encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=1)
            + encode_frame(FrameType.STREAM_END, b"", req_id=1) * 2,
            ErrorCode.INVALID_REQUEST,
        ),
    ],
)
async def test_a_violation_aborts_the_stream_by_name(
    data: bytes, code: ErrorCode, autojump_clock: trio.abc.Clock
) -> None:
    from dep2p.messaging.service import MessageStream

    async with sides(limits=LIMITS) as (a, b):

        async def sink(stream: MessageStream) -> None:
            async for _ in stream:
                pass
            await trio.sleep(1)

        b.messaging.on_stream("echo", sink)
        b.messaging.on_request("echo", echo)
        connection = await a.gate.connect(b.peer)
        stream = await connection.open_stream(b.stream_protocol)
        for at in range(0, len(data), 50):
            stream.write_nowait(data[at : at + 50])
        frames = await all_frames(stream)
        assert frames[-1].type == FrameType.ERROR
        assert decode_error(frames[-1].payload)[0] == code
        await settled()
        assert b.open_streams == 0
        assert await a.messaging.request(b.peer, "echo", b"x") == b"x"
