"""The yamux session and its streams without I/O."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import LocalProtocolError, ProtocolError, StreamClosedError
from dep2p.host.resources.scopes import Account
from dep2p.host.resources.window_budget import WindowBudget
from dep2p.host.yamux.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    HEADER_BYTES,
    PING,
    RST,
    SYN,
    WINDOW_INITIAL_BYTES,
    WINDOW_MAX,
    WINDOW_UPDATE,
    GoAway,
    encode_header,
)
from dep2p.host.yamux.send_queue import CONTROL_BYTES_MAX, QUANTUM_BYTES
from dep2p.host.yamux.session import ACCEPT_BACKLOG_MAX
from dep2p.host.yamux.stream_state import (
    BUFFERED_BYTES_MAX,
    DISCARD_BYTES_MAX,
    RECEIVE_WINDOW_MAX_BYTES,
    RECEIVE_WINDOW_NEAR_BYTES,
    WINDOW_GROWTH_BUDGET_BYTES,
    StreamState,
)

MakeEnds = Callable[..., Any]
Frame = tuple[int, int, int, int, bytes]


def frames(data: bytes) -> list[Frame]:
    """(type, flags, stream, length, body) of each frame."""
    found: list[Frame] = []
    at = 0
    while at < len(data):
        _, kind, flags, stream_id, length = HEADER.unpack_from(data, at)
        at += HEADER_BYTES
        body = data[at : at + length] if kind == DATA else b""
        at += len(body)
        found.append((kind, flags, stream_id, length, body))
    return found


class Receiver:
    """Push mode: collects what comes."""

    def __init__(self, stream: StreamState) -> None:
        self.data = bytearray()
        self.ends: list[BaseException | None] = []
        stream.set_receiver(self.data.extend, self.ends.append)


# Frames on the wire


def test_opening_writing_and_half_closing_send_the_frames_of_the_specification(ends: Any) -> None:
    stream = ends.one.core.open_stream()
    stream.enqueue(b"hello")
    stream.end_writing()
    sent = ends.one.output()
    assert frames(sent) == [
        (WINDOW_UPDATE, SYN, 1, 0, b""),
        (DATA, 0, 1, 5, b"hello"),
        (WINDOW_UPDATE, FIN, 1, 0, b""),
    ]
    ends.other.feed(sent)
    theirs = ends.other.core.accept_stream()
    assert frames(ends.other.output()) == [(WINDOW_UPDATE, ACK, 1, 0, b"")]
    assert theirs.take_received(100) == b"hello"
    theirs.end_writing()
    assert frames(ends.other.output()) == [(WINDOW_UPDATE, FIN, 1, 0, b"")]
    assert not ends.other.core.streams


def test_the_end_follows_data_that_fills_the_buffer(ends: Any) -> None:
    mine, theirs = ends.stream()
    mine.enqueue(bytes(QUANTUM_BYTES))
    mine.end_writing()
    buffer = memoryview(bytearray(QUANTUM_BYTES + HEADER_BYTES + 5))
    sizes = [ends.one.core.send_queue.fill(buffer), ends.one.core.send_queue.fill(buffer)]
    assert sizes == [QUANTUM_BYTES + HEADER_BYTES, HEADER_BYTES]
    assert frames(bytes(buffer[:HEADER_BYTES])) == [(WINDOW_UPDATE, FIN, mine.id, 0, b"")]
    assert not ends.one.core.send_queue.has_output
    assert theirs.error is None


def test_each_side_gives_ids_of_its_own_parity(ends: Any) -> None:
    assert [ends.one.core.open_stream().id for _ in range(3)] == [1, 3, 5]
    assert [ends.other.core.open_stream().id for _ in range(3)] == [2, 4, 6]


def test_small_writes_are_joined_into_one_frame(ends: Any) -> None:
    mine, theirs = ends.stream()
    for _ in range(100):
        mine.enqueue(bytes(100))
    sent = frames(ends.one.output())
    assert [frame[3] for frame in sent] == [10_000]
    assert theirs.id == mine.id


def test_a_reused_buffer_of_the_caller_does_not_change_what_is_sent(ends: Any) -> None:
    mine, theirs = ends.stream()
    for size in (10, 10_000):
        buffer = bytearray(b"a" * size)
        mine.enqueue(buffer)
        mine.enqueue(memoryview(buffer))
        buffer[:] = b"b" * size
    ends.pump()
    assert theirs.take_received(100_000) == b"a" * 20_020


def test_a_view_of_larger_items_is_sent_as_its_bytes(ends: Any) -> None:
    mine, theirs = ends.stream()
    for count in (3, 3_000):
        mine.enqueue(memoryview(array("I", [0x01020304] * count)))
    ends.pump()
    assert theirs.take_received(100_000) == array("I", [0x01020304] * 3_003).tobytes()


# Any split


@given(st.lists(st.binary(max_size=3_000), max_size=6), st.integers(1, 700))
def test_any_split_of_the_bytes_gives_the_same_result(make_ends: MakeEnds, parts: list[bytes], step: int) -> None:
    ends = make_ends()
    mine, theirs = ends.stream()
    for part in parts:
        mine.enqueue(part)
    mine.end_writing()
    ends.other.feed(ends.one.output(), step)
    assert theirs.take_received(1_000_000) == b"".join(parts)
    assert theirs.read_ended


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "write", "end", "reset", "read", "pause", "resume", "pump"]),
        st.booleans(),
        st.integers(0, 5),
        st.integers(0, 400_000),
    ),
    max_size=40,
)


@given(ACTIONS, st.sampled_from([1_000, 65_519, 10_000_000]))
def test_two_honest_sides_never_break_the_protocol_and_lose_nothing(
    make_ends: MakeEnds, actions: list[tuple[str, bool, int, int]], step: int
) -> None:
    ends = make_ends(streams_max=6)
    sides = (ends.one, ends.other)
    seen: dict[tuple[int, bool], StreamState] = {}
    sent: dict[tuple[int, bool], bytearray] = {}
    got: dict[tuple[int, bool], bytearray] = {}
    ended: list[object] = []

    def add(stream: StreamState, is_other: bool) -> None:
        key = (stream.id, is_other)
        seen[key], sent[key], got[key] = stream, bytearray(), bytearray()
        if stream.id % 3 == 0:  # some are pushed to, the rest is read
            stream.set_receiver(got[key].extend, ended.append)

    def pump() -> None:
        ends.pump(step)
        for is_other, side in enumerate(sides):
            while (accepted := side.core.accept_stream()) is not None:
                add(accepted, bool(is_other))

    for action, is_other, which, size in actions:
        side = sides[is_other]
        mine = [key for key in seen if key[1] == is_other]
        if action == "open":
            if len(side.core.streams) < 6:
                add(side.core.open_stream(), is_other)
            continue
        if action == "pump":
            pump()
            continue
        if not mine:
            continue
        key = mine[which % len(mine)]
        stream = seen[key]
        if action == "write" and not stream.write_ended and stream.error is None:
            data = bytes([size % 251]) * size
            stream.enqueue(data)
            sent[key] += data
        elif action == "end":
            stream.end_writing()
        elif action == "reset" and which == 0:
            stream.reset_state("test")
        elif action == "read" and not stream.has_receiver:
            got[key] += stream.take_received(size)
        elif action == "pause":
            stream.pause_receiving()
        elif action == "resume":
            stream.resume_receiving()
    for _ in range(100):  # everybody reads on: all that was written must arrive
        pump()
        for key, stream in seen.items():
            stream.resume_receiving()
            if not stream.has_receiver:
                got[key] += stream.take_received(1_000_000)
    pump()
    for key, stream in seen.items():
        peer_key = (key[0], not key[1])
        if peer_key in seen and stream.error is None and seen[peer_key].error is None:
            assert got[key] == sent[peer_key]
            assert stream.unsent_bytes == 0
    for side in sides:
        assert side.core.counts["violations"] == 0
        assert side.core.buffered_bytes == sum(len(stream.buffer) for stream in side.core.streams.values())
        assert side.core.grown_bytes == sum(
            stream.receive_window - WINDOW_INITIAL_BYTES for stream in side.core.streams.values()
        )


# Flow control


def test_nothing_is_sent_beyond_the_window_and_reading_half_of_it_grants_more(ends: Any) -> None:
    mine, theirs = ends.stream()
    mine.enqueue(bytes(WINDOW_INITIAL_BYTES + 10))
    ends.pump()
    assert mine.unsent_bytes == 10
    theirs.take_received(WINDOW_INITIAL_BYTES // 2 - 1)
    assert not ends.other.core.send_queue.has_output
    theirs.take_received(1)
    ends.pump()
    assert mine.unsent_bytes == 0
    assert len(theirs.buffer) == WINDOW_INITIAL_BYTES // 2 + 10


def test_a_peer_that_sends_beyond_the_window_breaks_the_protocol(ends: Any) -> None:
    mine, theirs = ends.stream()
    mine.send_window += 1
    mine.enqueue(bytes(WINDOW_INITIAL_BYTES + 1))
    with pytest.raises(ProtocolError, match="window"):
        ends.other.feed(ends.one.output())
    assert len(theirs.buffer) <= WINDOW_INITIAL_BYTES
    assert ends.other.core.counts["violations"] == 1


def test_credit_is_in_one_update_for_many_reads(ends: Any) -> None:
    mine, theirs = ends.stream()
    receiver = Receiver(theirs)
    for _ in range(WINDOW_INITIAL_BYTES // 2 // 100 + 1):
        mine.enqueue(bytes(100))
        ends.other.feed(ends.one.output())
    updates = [frame for frame in frames(ends.other.output()) if frame[0] == WINDOW_UPDATE]
    assert len(updates) == 1
    assert len(receiver.data) >= WINDOW_INITIAL_BYTES // 2


def send(ends: Any, mine: StreamState, times: int, *, round_trip_s: float) -> None:
    for _ in range(times):
        mine.enqueue(bytes(1_000_000))
        ends.other.owner.clock_s += round_trip_s
        ends.pump()


@pytest.mark.parametrize(
    ("rtt_s", "grows_to"), [(0.0, RECEIVE_WINDOW_NEAR_BYTES), (0.2, RECEIVE_WINDOW_MAX_BYTES)], ids=["near", "far"]
)
def test_the_window_of_a_busy_stream_grows_to_what_its_round_trip_needs(ends: Any, rtt_s: float, grows_to: int) -> None:
    ends.other.owner.rtt_s_min = rtt_s
    mine, theirs = ends.stream()
    Receiver(theirs)
    send(ends, mine, 40, round_trip_s=0.0 if rtt_s else 0.001)
    assert theirs.receive_window == grows_to
    assert mine.send_window <= grows_to


def test_a_window_that_lasts_long_does_not_grow_beyond_the_near_one(ends: Any) -> None:
    ends.other.owner.rtt_s_min = 0.2
    mine, theirs = ends.stream()
    Receiver(theirs)
    for _ in range(200):
        mine.enqueue(bytes(200_000))
        ends.other.owner.clock_s += 0.3  # half of the near window in 0.6 s at least
        ends.pump()
    assert theirs.receive_window == RECEIVE_WINDOW_NEAR_BYTES


@pytest.mark.parametrize("end", ["streams", "session"])
def test_far_windows_share_a_budget_of_the_host_which_gets_them_back(ends: Any, end: str) -> None:
    budget = ends.other.core.resources.windows = WindowBudget(5_000_000)
    ends.other.owner.rtt_s_min = 1.0
    pairs = [ends.stream() for _ in range(3)]
    for mine, theirs in pairs:
        Receiver(theirs)
        send(ends, mine, 20, round_trip_s=0.0)
    assert budget.taken_bytes == 5_000_000
    assert sum(theirs.receive_window for _, theirs in pairs) == 5_000_000 + 3 * RECEIVE_WINDOW_NEAR_BYTES
    if end == "session":
        ends.other.core.fail("test")
    for mine, _ in pairs:
        mine.reset_state("test")
    ends.pump()
    assert budget.taken_bytes == 0


def test_a_stream_that_a_relay_carries_has_no_far_window(ends: Any) -> None:
    ends.other.owner.rtt_s_min = 1.0
    mine, theirs = ends.stream()
    ends.other.core.charge_to(theirs, Account("a circuit", 10_000_000))
    Receiver(theirs)
    send(ends, mine, 20, round_trip_s=0.0)
    assert theirs.receive_window == RECEIVE_WINDOW_NEAR_BYTES


def test_windows_of_one_connection_grow_within_a_budget_that_ended_streams_give_back(ends: Any) -> None:
    ends.other.owner.rtt_s_min = 1.0
    pairs = [ends.stream() for _ in range(60)]
    for mine, theirs in pairs:
        Receiver(theirs)
        mine.enqueue(bytes(3_000_000))
    ends.pump()
    assert ends.other.core.grown_bytes <= WINDOW_GROWTH_BUDGET_BYTES
    assert ends.other.core.grown_bytes > WINDOW_GROWTH_BUDGET_BYTES - RECEIVE_WINDOW_MAX_BYTES
    for mine, _ in pairs:
        mine.reset_state("test")
    ends.pump()
    assert ends.other.core.grown_bytes == 0


def test_a_paused_receiver_grants_nothing_and_gets_all_on_resume(ends: Any) -> None:
    mine, theirs = ends.stream()
    receiver = Receiver(theirs)
    theirs.pause_receiving()
    mine.enqueue(bytes(1_000_000))
    mine.end_writing()
    ends.pump()
    assert (len(theirs.buffer), len(receiver.data)) == (WINDOW_INITIAL_BYTES, 0)
    assert mine.unsent_bytes == 1_000_000 - WINDOW_INITIAL_BYTES
    theirs.resume_receiving()
    ends.pump()
    assert len(receiver.data) == 1_000_000
    assert receiver.ends == [None]


def test_pausing_from_within_the_receiver_keeps_the_rest(ends: Any) -> None:
    mine, theirs = ends.stream()
    got: list[int] = []
    ended: list[object] = []

    def take(data: bytes | memoryview) -> None:
        got.append(len(data))
        theirs.pause_receiving()

    theirs.set_receiver(take, ended.append)
    for _ in range(3):
        mine.enqueue(bytes(10_000))
        ends.pump()
    assert (got, len(theirs.buffer)) == ([10_000], 20_000)
    theirs.resume_receiving()
    assert (got, len(theirs.buffer)) == ([10_000, 20_000], 0)


def test_a_window_over_32_bits_breaks_the_protocol(ends: Any) -> None:
    mine, _ = ends.stream()
    with pytest.raises(ProtocolError, match="window"):
        ends.one.feed(encode_header(WINDOW_UPDATE, 0, mine.id, WINDOW_MAX))


def test_unread_bytes_of_one_connection_are_bounded(make_ends: MakeEnds) -> None:
    ends = make_ends()
    count = BUFFERED_BYTES_MAX // WINDOW_INITIAL_BYTES
    pairs: list[tuple[StreamState, StreamState]] = []
    for _ in range(count + 1):
        pair = ends.stream()
        pair[0].enqueue(bytes(WINDOW_INITIAL_BYTES))
        ends.pump()
        pairs.append(pair)
    assert ends.other.core.buffered_bytes <= BUFFERED_BYTES_MAX
    assert ends.other.core.counts["resets_buffer_full"] == 1
    assert [pair[1].error is None for pair in pairs] == [True] * count + [False]


# Ending


def test_half_close_lets_the_other_direction_go_on(ends: Any) -> None:
    mine, theirs = ends.stream()
    receiver = Receiver(theirs)
    mine.end_writing()
    ends.pump()
    assert receiver.ends == [None]
    with pytest.raises(StreamClosedError):
        mine.enqueue(b"more")
    theirs.enqueue(b"answer")
    theirs.end_writing()
    ends.pump()
    assert (mine.take_received(100), mine.read_ended) == (b"answer", True)
    assert not ends.one.core.streams
    assert not ends.other.core.streams


def test_a_reset_ends_both_directions_and_drops_what_waits(ends: Any) -> None:
    mine, theirs = ends.stream()
    receiver = Receiver(mine)
    theirs.enqueue(bytes(1_000_000))
    mine.enqueue(b"unread")
    ends.pump()
    mine.reset_state("enough")
    assert [str(end) for end in receiver.ends] == ["enough"]
    ends.pump()
    assert isinstance(theirs.error, StreamClosedError)
    assert (theirs.unsent_bytes, theirs.buffer) == (0, b"")
    for stream in (mine, theirs):
        with pytest.raises(StreamClosedError):
            stream.enqueue(b"x")
        stream.reset_state("again")
    assert ends.one.core.counts["resets_out"] == ends.other.core.counts["resets_in"] == 1
    assert not ends.one.core.streams
    assert not ends.other.core.send_queue.has_output


def test_frames_that_crossed_a_reset_are_ignored_and_counted(ends: Any) -> None:
    mine, theirs = ends.stream()
    theirs.enqueue(bytes(100))
    theirs.end_writing()
    late = ends.other.output()
    mine.reset_state("test")
    ends.one.feed(late)
    ends.pump()
    assert ends.one.core.counts["bytes_of_ended_streams"] == 100
    again = ends.stream()
    again[0].enqueue(b"works")
    ends.pump()
    assert again[1].take_received(9) == b"works"


def test_a_reset_in_the_middle_of_a_body_drops_the_rest_of_it_only(ends: Any) -> None:
    mine, theirs = ends.stream()
    theirs.enqueue(bytes(100))
    wire = ends.other.output()
    ends.one.feed(wire[:50])
    mine.reset_state("test")
    ends.one.feed(wire[50:] + encode_header(PING, SYN, 0, 7))
    assert (PING, ACK, 0, 7, b"") in frames(ends.one.output())


def test_data_after_the_end_breaks_the_protocol(ends: Any) -> None:
    mine, theirs = ends.stream()
    mine.end_writing()
    ends.pump()
    assert theirs.read_ended
    with pytest.raises(ProtocolError, match="after its end"):
        ends.other.feed(encode_header(DATA, 0, mine.id, 1) + b"x")


def test_a_stream_that_discards_takes_what_is_on_the_way_and_resets_a_peer_that_goes_on(ends: Any) -> None:
    mine, theirs = ends.stream()
    mine.enqueue(b"unread")
    ends.pump()
    theirs.end_writing()
    theirs.discard_input()
    mine.enqueue(bytes(DISCARD_BYTES_MAX // 2))
    ends.pump()
    assert (ends.other.core.buffered_bytes, theirs.error) == (0, None)
    mine.enqueue(bytes(10))
    ends.pump()
    assert mine.error is not None
    assert ends.other.core.counts["resets_no_reader"] == 1


def test_bytes_that_an_ended_stream_still_holds_can_be_read(ends: Any) -> None:
    mine, theirs = ends.stream()
    theirs.end_writing()
    mine.enqueue(b"last words")
    mine.end_writing()
    ends.pump()
    assert not ends.other.core.streams
    assert ends.other.core.buffered_bytes == 0
    assert theirs.take_received(100) == b"last words"
    assert ends.other.core.buffered_bytes == 0


def test_a_receiver_that_fails_resets_its_stream_and_nothing_else(ends: Any, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = ends.stream()
    other_mine, other_theirs = ends.stream()
    ended: list[BaseException | None] = []

    def fail(_data: bytes | memoryview) -> None:
        raise ZeroDivisionError

    theirs.set_receiver(fail, ended.append)
    mine.enqueue(b"x")
    other_mine.enqueue(b"y")
    ends.pump()
    assert mine.error is not None
    assert len(ended) == 1
    assert other_theirs.take_received(9) == b"y"
    assert ends.other.core.counts["receiver_failures"] == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_second_receiver_is_our_own_error(ends: Any) -> None:
    mine, _ = ends.stream()
    Receiver(mine)
    with pytest.raises(LocalProtocolError):
        Receiver(mine)


def test_the_end_of_the_session_ends_every_stream_once(ends: Any) -> None:
    pairs = [ends.stream() for _ in range(3)]
    receivers = [Receiver(mine) for mine, _ in pairs]
    pairs[0][0].enqueue(b"x")
    ends.one.core.fail("over")
    ends.one.core.fail("again")
    assert [[str(end) for end in receiver.ends] for receiver in receivers] == [["over"]] * 3
    assert not ends.one.core.send_queue.has_output
    with pytest.raises(StreamClosedError, match="over"):
        ends.one.core.open_stream()


def test_a_lost_connection_leaves_what_was_whole_and_drops_what_was_not(ends: Any) -> None:
    whole, whole_theirs = ends.stream()
    part, part_theirs = ends.stream()
    pushed, pushed_theirs = ends.stream()
    receiver = Receiver(pushed_theirs)
    pushed_theirs.pause_receiving()
    for stream in (whole, part, pushed):
        stream.enqueue(b"data")
    whole.end_writing()
    pushed.end_writing()
    ends.pump()
    ends.other.core.fail("lost")
    assert (whole_theirs.take_received(9), whole_theirs.read_ended) == (b"data", True)
    assert (part_theirs.take_received(9), part_theirs.read_ended) == (b"", False)
    pushed_theirs.resume_receiving()
    assert bytes(receiver.data) == b"data"
    assert receiver.ends == [None]
    assert ends.other.core.buffered_bytes == 0


# Limits and violations


def test_streams_beyond_the_limit_are_reset_at_once_and_counted(make_ends: MakeEnds) -> None:
    ends = make_ends(streams_max=3)
    for _ in range(3):
        ends.stream()
    with pytest.raises(StreamClosedError, match="3 streams"):
        ends.one.core.open_stream()
    ends.other.feed(encode_header(WINDOW_UPDATE, SYN, 101, 0))
    assert frames(ends.other.output()) == [(WINDOW_UPDATE, RST, 101, 0, b"")]
    assert ends.other.core.counts["streams_refused_limit"] == 1


def test_streams_beyond_the_accept_backlog_are_reset_at_once_and_counted(ends: Any) -> None:
    opened = [ends.one.core.open_stream() for _ in range(ACCEPT_BACKLOG_MAX + 2)]
    ends.pump()
    assert [stream.error is None for stream in opened] == [True] * ACCEPT_BACKLOG_MAX + [False] * 2
    assert ends.other.core.counts["streams_refused_backlog"] == 2
    assert ends.one.core.unacknowledged == ACCEPT_BACKLOG_MAX
    while ends.other.core.accept_stream():
        pass
    ends.pump()
    assert ends.one.core.unacknowledged == 0


def test_a_stream_reset_before_it_was_accepted_is_not_accepted(ends: Any) -> None:
    first, second = ends.one.core.open_stream(), ends.one.core.open_stream()
    first.reset_state("test")
    ends.pump()
    assert ends.other.core.accept_stream().id == second.id
    assert ends.other.core.accept_stream() is None


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"\x01" + encode_header(PING, SYN, 0, 0)[1:], "version"),
        (encode_header(4, 0, 0, 0), "type"),
        (encode_header(DATA, SYN, 2, 0), "ours"),
        (encode_header(DATA, 0, 0, 5), "without a stream id"),
        (encode_header(WINDOW_UPDATE, SYN, 0, 0), "without a stream id"),
        (encode_header(DATA, 0, 2, 5), "never opened"),
        (encode_header(WINDOW_UPDATE, 0, 8, 5), "never opened"),
        (encode_header(DATA, SYN, 1, WINDOW_INITIAL_BYTES + 1), "window"),
        (encode_header(DATA, 0, 1, RECEIVE_WINDOW_MAX_BYTES + 1), "larger"),
        (encode_header(WINDOW_UPDATE, SYN, 1, 0) * 2, "twice"),
        (encode_header(PING, SYN, 1, 0), "PING on stream"),
    ],
)
@pytest.mark.parametrize("step", [1, 1_000])
def test_violations_are_protocol_errors(ends: Any, frame: bytes, text: str, step: int) -> None:
    with pytest.raises(ProtocolError, match=text):
        ends.other.feed(frame, step)
    assert ends.other.core.counts["violations"] == 1


def test_pings_are_answered_and_pongs_passed_on(ends: Any) -> None:
    ends.one.core.ping(0xFFFFFFFF)
    ends.pump()
    assert ends.one.owner.pongs == [0xFFFFFFFF]


def test_a_peer_that_pings_and_never_reads_ends_the_session(ends: Any) -> None:
    count = CONTROL_BYTES_MAX // HEADER_BYTES + 2
    ends.other.feed(encode_header(PING, SYN, 0, 1) * count)
    assert ends.other.core.error is not None
    assert len(ends.other.owner.stuck) == 1
    assert not ends.other.core.send_queue.has_output


def test_after_a_go_away_no_stream_is_opened_and_open_ones_go_on(ends: Any) -> None:
    mine, theirs = ends.stream()
    ends.other.core.go_away(GoAway.NORMAL)
    ends.pump()
    assert ends.one.owner.go_aways == [0]
    with pytest.raises(StreamClosedError, match="no new streams"):
        ends.one.core.open_stream()
    mine.enqueue(b"still here")
    ends.pump()
    assert theirs.take_received(100) == b"still here"
    assert frames(encode_header(GO_AWAY, 0, 0, 0)) == [(GO_AWAY, 0, 0, 0, b"")]


# Fairness


def test_a_bulk_stream_delays_a_small_message_by_one_message_at_most(ends: Any) -> None:
    bulk, _ = ends.stream()
    small, _ = ends.stream()
    bulk.enqueue(bytes(10_000_000))
    buffer = memoryview(bytearray(65_519))
    ends.one.core.send_queue.fill(buffer)
    small.enqueue(b"quick")
    size = ends.one.core.send_queue.fill(buffer)
    sent = frames(bytes(buffer[:size]))
    assert sent[0][2:4] == (small.id, 5)
    assert sent[1][2] == bulk.id


def test_bulk_streams_take_turns(ends: Any) -> None:
    streams = [ends.stream()[0] for _ in range(4)]
    for stream in streams:
        stream.enqueue(bytes(200_000))
    order = [frame[2] for frame in frames(ends.one.output()) if frame[3] == QUANTUM_BYTES]
    assert order == [stream.id for stream in streams] * 3


def test_small_messages_without_end_do_not_starve_a_bulk_stream(ends: Any) -> None:
    bulk, _ = ends.stream()
    small = [ends.stream()[0] for _ in range(20)]
    bulk.enqueue(bytes(200_000))
    buffer = memoryview(bytearray(65_519))
    for _ in range(20):
        for stream in small:
            stream.send_window = 1_000_000
            if not stream.unsent_bytes:
                stream.enqueue(bytes(16_000))
        ends.one.core.send_queue.fill(buffer)
    assert bulk.unsent_bytes == 0
