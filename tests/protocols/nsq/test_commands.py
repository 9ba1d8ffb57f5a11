"""NSQ's commands and frames: what is taken, what is refused with which words, in pieces of any size."""

import json
import struct

import pytest

from dep2p.protocols.nsq.commands import (
    Close,
    Command,
    CommandParser,
    Finish,
    IdentifyCommand,
    Nothing,
    PublishCommand,
    Ready,
    Requeue,
    SubscribeCommand,
    Touch,
    split_mpub,
)
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.frames import FRAME_ERROR, FRAME_MESSAGE, encode_frame, encode_message
from dep2p.protocols.nsq.identify import identify_answer, parse_identify
from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.protocols.nsq.session import NsqSession, NsqState

LIMITS = NsqLimits(message_bytes_max=100, body_bytes_max=300)
ID = b"0123456789abcdef"


def sized(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def mpub(*bodies: bytes) -> bytes:
    return struct.pack(">i", len(bodies)) + b"".join(sized(body) for body in bodies)


def parsed(data: bytes) -> tuple[list[Command], str]:
    parser = CommandParser(LIMITS)
    found = parser.feed(b"  V2" + data)
    return found, "" if parser.failure is None else str(parser.failure)


def failure(data: bytes) -> str:
    found, text = parsed(data)
    assert found == []
    return text


EVERY = (
    b"IDENTIFY\n" + sized(b"{}") + b"SUB topic channel#ephemeral\r\n" + b"RDY 7\nRDY\n" + b"PUB t\n" + sized(b"a\nb")
    + b"MPUB t\n" + sized(mpub(b"1", b"22")) + b"DPUB t 1500\n" + sized(b"late") + b"FIN " + ID + b"\nREQ " + ID
    + b" 250\nREQ " + ID + b" -5\nTOUCH " + ID + b"\nNOP\nCLS\n"
)  # fmt: skip
MEANING: list[Command] = [
    IdentifyCommand(b"{}"),
    SubscribeCommand("topic", "channel#ephemeral"),
    Ready(7),
    Ready(1),
    PublishCommand("PUB", "t", (b"a\nb",)),
    PublishCommand("MPUB", "t", (b"1", b"22")),
    PublishCommand("DPUB", "t", (b"late",), 1500),
    Finish(ID),
    Requeue(ID, 250),
    Requeue(ID, 0),
    Touch(ID),
    Nothing(),
    Close(),
]


def test_every_command() -> None:
    assert parsed(EVERY) == (MEANING, "")


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
def test_in_pieces_of_any_size(step: int) -> None:
    parser = CommandParser(LIMITS)
    data = b"  V2" + EVERY
    found: list[Command] = []
    for at in range(0, len(data), step):
        found += parser.feed(data[at : at + step])
    assert found == MEANING
    assert parser.buffered_bytes == 0


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HELLO\n", "E_INVALID invalid command HELLO"),
        (b"\n", "E_INVALID invalid command "),
        (b"pub t\n", "E_INVALID invalid command pub"),
        (b"x" * 5000, "E_INVALID the command is too long"),
        (b"PUB\n", "E_INVALID PUB insufficient number of parameters"),
        (b"PUB sp\xc3\xa4t\n", 'E_BAD_TOPIC PUB topic name "sp\\xc3\\xa4t" is not valid'),
        (b"PUB " + b"t" * 65 + b"\n", f'E_BAD_TOPIC PUB topic name "{"t" * 64}" is not valid'),
        (b"SUB t\n", "E_INVALID SUB insufficient number of parameters"),
        (b"SUB t c!\n", 'E_BAD_CHANNEL SUB channel name "c!" is not valid'),
        (b"PUB t\n" + sized(b""), "E_BAD_MESSAGE PUB invalid message body size 0"),
        (b"PUB t\n\xff\xff\xff\xff", "E_BAD_MESSAGE PUB invalid message body size -1"),
        (b"PUB t\n" + sized(b"x" * 101), "E_BAD_MESSAGE PUB message too big 101 > 100"),
        (b"DPUB t x\n", "E_INVALID DPUB could not parse timeout x"),
        (b"DPUB t -1\n", "E_INVALID DPUB could not parse timeout -1"),
        (b"DPUB t 2592000001\n", "E_INVALID DPUB timeout 2592000001 out of range 0-2592000000"),
        (b"MPUB t\n" + sized(b"x" * 301), "E_BAD_BODY MPUB body too big 301 > 300"),
        (b"MPUB t\n" + sized(b""), "E_BAD_BODY MPUB invalid body size 0"),
        (b"MPUB t\n" + sized(mpub()), "E_BAD_BODY MPUB invalid message count 0"),
        (b"MPUB t\n" + sized(mpub(b"a", b"")), "E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
        (b"MPUB t\n" + sized(mpub(b"a", b"x" * 101)), "E_BAD_MESSAGE MPUB message too big 101 > 100"),
        (b"MPUB t\n" + sized(mpub(b"a", b"bcd")[:-1]), "E_BAD_MESSAGE MPUB failed to read message body"),
        (b"MPUB t\n" + sized(mpub(b"a") + b"!"), "E_BAD_BODY MPUB has 1 bytes behind its 1 messages"),
        (b"RDY x\n", "E_INVALID RDY could not parse count x"),
        (b"RDY 2501\n", "E_INVALID RDY count 2501 out of range 0-2500"),
        (b"FIN\n", "E_INVALID FIN insufficient number of params"),
        (b"FIN 123\n", "E_INVALID invalid message ID"),
        (b"REQ " + ID + b"\n", "E_INVALID REQ insufficient number of params"),
        (b"REQ " + ID + b" soon\n", "E_INVALID REQ could not parse timeout soon"),
        (b"AUTH now\n", "E_INVALID AUTH invalid number of parameters"),
        (b"IDENTIFY\n" + sized(b""), "E_BAD_BODY IDENTIFY invalid body size 0"),
    ],
)
def test_what_is_wrong_is_named_and_ends_the_connection(data: bytes, text: str) -> None:
    assert failure(data) == text


def test_commands_before_a_failure_are_done_and_none_behind_it() -> None:
    parser = CommandParser(LIMITS)
    assert parser.feed(b"  V2NOP\nBAD\nNOP\n") == [Nothing()]
    assert str(parser.failure) == "E_INVALID invalid command BAD"
    assert parser.feed(b"NOP\n") == []


def test_another_protocol_is_refused_at_its_first_bytes() -> None:
    parser = CommandParser(LIMITS)
    assert parser.feed(b"GE") == []
    assert str(parser.failure) == "E_BAD_PROTOCOL"


def test_what_waits_for_its_end_is_bounded() -> None:
    parser = CommandParser(LIMITS)
    parser.feed(b"  V2MPUB t\n" + struct.pack(">i", 300))
    for _ in range(299):
        parser.feed(b"x")
    assert parser.buffered_bytes == 299
    assert parser.failure is None


def test_a_bad_topic_is_reported_before_its_body_comes() -> None:
    assert failure(b"PUB !\n").startswith("E_BAD_TOPIC")


def test_split_mpub_gives_the_bodies() -> None:
    assert split_mpub(mpub(b"a", b"bc"), LIMITS) == (b"a", b"bc")
    with pytest.raises(NsqError, match="failed to read message count"):
        split_mpub(b"\0\0", LIMITS)


def test_frames() -> None:
    assert encode_frame(FRAME_ERROR, b"E_X") == b"\0\0\0\x07\0\0\0\x01E_X"
    frame = encode_message(ID, 3, 1_700_000_000_123_456_789, b"body")
    size, kind, timestamp, attempts = struct.unpack_from(">iiqH", frame)
    assert (size, kind, timestamp, attempts) == (len(frame) - 4, FRAME_MESSAGE, 1_700_000_000_123_456_789, 3)
    assert frame[18:] == ID + b"body"
    assert struct.unpack_from(">H", encode_message(ID, 70_000, 0, b""), 16) == (65_535,)


def test_identify_takes_what_it_may_and_reports_what_holds() -> None:
    wanted = {
        "client_id": "c",
        "heartbeat_interval": 5000,
        "output_buffer_size": 1024,
        "output_buffer_timeout": 100,
        "msg_timeout": 2000,
        "sample_rate": 10,
        "feature_negotiation": True,
        "tls_v1": True,
        "deflate": True,
        "snappy": True,
    }
    settings = parse_identify(json.dumps(wanted).encode(), LIMITS)
    answer = json.loads(identify_answer(settings, LIMITS))
    assert (settings.heartbeat_ms, settings.output_buffer_timeout_ms, settings.sample_rate) == (5000, 100, 10)
    assert (answer["msg_timeout"], answer["output_buffer_size"], answer["max_rdy_count"]) == (2000, 1024, 2500)
    assert not (answer["tls_v1"] or answer["deflate"] or answer["snappy"] or answer["auth_required"])


def test_identify_of_an_old_client_is_answered_ok() -> None:
    settings = parse_identify(b'{"short_id": "s", "heartbeat_interval": -1, "output_buffer_size": -1}', LIMITS)
    assert (settings.client_id, settings.heartbeat_ms, settings.output_buffer_bytes) == ("s", 0, 0)
    assert identify_answer(settings, LIMITS) == b"OK"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[]", "failed to decode JSON body"),
        (b"{", "failed to decode JSON body"),
        (b"[" * 100_000, "failed to decode JSON body"),
        (b'{"client_id": 1}', "failed to decode JSON body: client_id is no text"),
        (b'{"sample_rate": "x"}', "failed to decode JSON body: sample_rate is no whole number"),
        (b'{"sample_rate": 100}', r"sample rate \(100\) is invalid"),
        (b'{"heartbeat_interval": 999}', r"heartbeat interval \(999\) is invalid"),
        (b'{"output_buffer_size": 63}', r"output buffer size \(63\) is invalid"),
        (b'{"output_buffer_timeout": 30001}', r"output buffer timeout \(30001\) is invalid"),
        (b'{"msg_timeout": 999}', r"msg timeout \(999\) is invalid"),
        (b'{"msg_timeout": true}', "failed to decode JSON body: msg_timeout is no whole number"),
    ],
)
def test_identify_names_what_is_wrong(body: bytes, text: str) -> None:
    with pytest.raises(NsqError, match=f"^E_BAD_BODY IDENTIFY {text}"):
        parse_identify(body, LIMITS)


def in_state(*commands: Command) -> NsqSession:
    session = NsqSession(LIMITS)
    for command in commands:
        session.accept(command)
    return session


SUB = SubscribeCommand("t", "c")


@pytest.mark.parametrize(
    ("session", "command", "text"),
    [
        (in_state(), Ready(1), "E_INVALID cannot RDY in current state"),
        (in_state(), Finish(ID), "E_INVALID cannot FIN in current state"),
        (in_state(), Requeue(ID, 0), "E_INVALID cannot REQ in current state"),
        (in_state(), Touch(ID), "E_INVALID cannot TOUCH in current state"),
        (in_state(), Close(), "E_INVALID cannot CLS in current state"),
        (in_state(SUB), SUB, "E_INVALID cannot SUB in current state"),
        (in_state(SUB), IdentifyCommand(b"{}"), "E_INVALID cannot IDENTIFY in current state"),
        (in_state(IdentifyCommand(b"{}")), IdentifyCommand(b"{}"), "E_INVALID cannot IDENTIFY in current state"),
        (in_state(SUB, Close()), Close(), "E_INVALID cannot CLS in current state"),
        (in_state(IdentifyCommand(b'{"heartbeat_interval":-1}')), SUB, "E_INVALID cannot SUB with heartbeats disabled"),
    ],
)
def test_what_may_not_come_now(session: NsqSession, command: Command, text: str) -> None:
    with pytest.raises(NsqError) as raised:
        session.accept(command)
    assert str(raised.value) == text
    assert raised.value.fatal


def test_authentication_is_not_offered() -> None:
    parser = CommandParser(LIMITS)
    (command,) = parser.feed(b"  V2AUTH\n" + sized(b"secret"))
    with pytest.raises(NsqError, match=r"^E_AUTH_DISABLED AUTH disabled$"):
        NsqSession(LIMITS).accept(command)


def test_closing_still_settles_and_ignores_rdy() -> None:
    session = in_state(SUB, Ready(5), Close())
    assert session.state == NsqState.CLOSING
    assert session.accept(Finish(ID))
    assert not session.accept(Ready(9))
    assert session.ready == 0


@pytest.mark.parametrize(("length", "text"), [(4_095, "invalid command x"), (4_096, "the command is too long")])
def test_the_longest_line_counts_its_carriage_return_in_whatever_pieces(length: int, text: str) -> None:
    data = b"  V2" + b"x" * length + b"\r\n"
    for pieces in ([data], [data[:-1], data[-1:]], [data[:-2], data[-2:]]):
        parser = CommandParser(LIMITS)
        for piece in pieces:
            assert parser.feed(piece) == []
        assert str(parser.failure).startswith(f"E_INVALID {text}")
