"""Reliable delivery: the numbering, the frames, and what each end does with bad ones."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.protocols.delivery.receiver import REASON_UNKNOWN, ReceiveWindow
from dep2p.protocols.delivery.sender import RETRIES_USED_UP, TOO_OLD, DeliveryPolicy, Outgoing, SendWindow
from dep2p.protocols.delivery.states import DeliveryState
from dep2p.protocols.delivery.wire import (
    NUMBER_MAX,
    WINDOW_MAX,
    Ack,
    Hello,
    as_ranges,
    decode_ack,
    decode_batch,
    decode_hello,
    encode_ack,
    encode_batch,
    encode_hello,
    fits_batch,
    split_ack,
)
from dep2p.protocols.wire.frame import HEADERS, Frame, FrameDecoder, FrameType
from dep2p.protocols.wire.headers import HeaderKey, HeaderReader, encode_headers

EPOCH = bytes(range(8))


def _frame(data: bytes) -> Frame:
    [frame] = FrameDecoder(1 << 20).feed(data)
    return frame


def _window(policy: DeliveryPolicy | None = None) -> tuple[SendWindow[Outgoing], list[tuple[int, DeliveryState]]]:
    seen: list[tuple[int, DeliveryState]] = []
    window: SendWindow[Outgoing] = SendWindow(
        EPOCH, policy or DeliveryPolicy(), lambda m: seen.append((m.number, m.state))
    )
    return window, seen


def _add(window: SendWindow[Outgoing], now: float = 0.0) -> Outgoing:
    message = Outgoing(b"h", 0, b"body", now)
    message.number = window.reserve()
    window.add(message)
    return message


# The wire


def test_the_vectors_of_the_specification() -> None:
    assert encode_hello(Hello(EPOCH, 41)).hex() == "01110000000000000000000c" + "0001020304050607" + "00000029"
    ack = Ack(9, [(3, 7)], [(8, "no")])
    assert encode_ack(ack).hex() == (
        "011000000000000000000017" + "00000009" + "0001" + "0001" + "00000003" + "00000007" + "00000008" + "02" + "6e6f"
    )
    assert decode_ack(_frame(encode_ack(ack))) == ack
    assert decode_hello(_frame(encode_hello(Hello(EPOCH, 41)))) == Hello(EPOCH, 41)
    batch = b"".join(encode_batch(7, encode_headers({HeaderKey.NAME: "n"}), [b"hi", b"", b"you"]))
    assert batch.hex() == (
        "011200080000000700000017" + "0003" + "00000002" + "00000000" + "00000003" + "a101616e" + "6869" + "796f75"
    )
    assert decode_batch(_frame(batch), HeaderReader(1_000).split) == ({HeaderKey.NAME: "n"}, [b"hi", b"", b"you"])


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=60), st.integers(1, NUMBER_MAX - 60))
def test_a_batch_gives_the_messages_it_was_made_of(bodies: list[bytes], number: int) -> None:
    head = encode_headers({HeaderKey.NAME: "news"})
    assert fits_batch(head, bodies)
    frame = _frame(b"".join(encode_batch(number, head, bodies)))
    assert frame.req_id == number
    assert decode_batch(frame, HeaderReader(1_000).split) == ({HeaderKey.NAME: "news"}, bodies)


def test_what_does_not_fit_is_no_batch() -> None:
    assert not fits_batch(b"h", [b"one"])
    assert not fits_batch(b"h", [b""] * 1_025)
    assert not fits_batch(b"h", [b"x" * 40_000] * 2)
    assert fits_batch(b"h", [b""] * 1_024)


@given(st.binary(max_size=90), st.sampled_from([0, HEADERS, 1]), st.integers(0, NUMBER_MAX))
def test_any_bytes_are_a_batch_or_a_protocol_error(payload: bytes, flags: int, req_id: int) -> None:
    for front in (b"", b"\0\1\0\0\0\2\xa1\1\x61\x6e"):
        try:
            _headers, bodies = decode_batch(
                Frame(FrameType.ACK_REQUESTS, flags, req_id, front + payload), HeaderReader(50).split
            )
        except ProtocolError:
            continue
        assert bodies and sum(map(len, bodies)) <= len(payload)


@given(st.sets(st.integers(1, 300)), st.dictionaries(st.integers(1, 300), st.text(max_size=300), max_size=40))
def test_acks_say_what_they_were_given(numbers: set[int], rejected: dict[int, str]) -> None:
    handled: list[int] = []
    reasons: dict[int, str] = {}
    for data in split_ack(300, list(numbers), list(rejected.items())):
        ack = decode_ack(_frame(data))
        assert ack.received == 300
        handled += [number for low, high in ack.handled for number in range(low, high + 1)]
        reasons.update(ack.rejected)
    assert sorted(handled) == sorted(numbers)
    assert list(reasons) == list(rejected)
    for number, text in rejected.items():
        assert text.encode("utf-8", "replace").startswith(reasons[number].encode()[:200])


def test_ranges_do_not_touch() -> None:
    assert as_ranges([5, 1, 2, 3, 9, 8]) == [(1, 3), (5, 5), (8, 9)]
    assert as_ranges([]) == []


@given(st.binary(max_size=60), st.integers(0, 0xFFFF), st.integers(0, NUMBER_MAX))
def test_any_bytes_are_an_ack_or_a_protocol_error(payload: bytes, flags: int, req_id: int) -> None:
    for decode in (decode_ack, decode_hello):
        try:
            decode(Frame(FrameType.ACK, flags, req_id, payload))
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    "payload",
    [
        bytes.fromhex("00000000" + "ffff" + "0000"),
        bytes.fromhex("00000000" + "0001" + "0000" + "00000005" + "00000004"),
        bytes.fromhex("00000000" + "0001" + "0000" + "00000000" + "00000004"),
        bytes.fromhex("00000000" + "0000" + "0001" + "00000001" + "05" + "61"),
        bytes.fromhex("00000000" + "0000" + "0000" + "00"),
    ],
)
def test_malformed_acks(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_ack(Frame(FrameType.ACK, 0, 0, payload))


# The sender


def test_a_message_goes_through_its_states() -> None:
    window, seen = _window()
    message = _add(window)
    window.link_up(0.0)
    hello, taken = window.take(0.0, 100)
    assert hello == Hello(EPOCH, 0)
    assert taken == [message]
    window.on_ack(Ack(received=1), 1.0)
    window.on_ack(Ack(handled=[(1, 1)]), 2.0)
    assert seen == [(1, DeliveryState.SENDING), (1, DeliveryState.DELIVERED), (1, DeliveryState.ACKNOWLEDGED)]
    assert window.next_deadline() is None


def test_duplicate_and_old_acks_are_passed_over() -> None:
    window, seen = _window()
    _add(window)
    _add(window)
    window.link_up(0.0)
    window.take(0.0, 100)
    window.on_ack(Ack(handled=[(1, 1)]), 1.0)
    before = list(seen)
    window.on_ack(Ack(handled=[(1, 1)], rejected=[(1, "no")]), 1.0)
    assert seen == before


def test_an_ack_of_what_was_never_sent_is_a_violation_and_changes_nothing() -> None:
    window, _seen = _window()
    _add(window)
    window.link_up(0.0)
    window.take(0.0, 100)
    for ack in (Ack(received=2), Ack(handled=[(1, 2)]), Ack(handled=[(1, NUMBER_MAX)]), Ack(rejected=[(2, "")])):
        with pytest.raises(ProtocolError, match="last one sent is 1"):
            window.on_ack(ack, 1.0)
    assert list(window.unsettled) == [1]


def test_a_silent_receiver_is_tried_as_often_as_allowed_and_then_the_message_has_failed() -> None:
    window, seen = _window(DeliveryPolicy(ack_timeout_s=5.0, retries_max=3))
    message = _add(window)
    window.link_up(0.0)
    sent = 0
    now = 0.0
    while window.unsettled:
        sent += len(window.take(now, 100)[1])
        deadline = window.next_deadline()
        assert deadline is not None
        now = deadline
        window.on_deadline(now)
    assert sent == 4
    assert message.reason == RETRIES_USED_UP
    assert seen[-1] == (1, DeliveryState.FAILED)
    assert message.sent_s == 15.0


def test_a_word_from_the_receiver_puts_the_timeout_off() -> None:
    window, _seen = _window()
    _add(window)
    window.link_up(0.0)
    window.take(0.0, 100)
    for at in (4.0, 8.0, 12.0):
        window.on_ack(Ack(received=1), at)
    assert window.next_deadline() == 17.0


def test_a_message_that_the_receiver_has_passed_over_is_sent_again_while_it_acknowledges_others() -> None:
    window, seen = _window(DeliveryPolicy(ack_timeout_s=5.0, retries_max=3, age_max_s=300.0))
    left = _add(window)
    window.link_up(0.0)
    window.take(0.0, 100)
    sent_at: list[float] = []
    for second in range(1, 300):
        now = float(second)
        following = _add(window, now)
        if left in window.take(now, 1_000)[1]:
            sent_at.append(now)
        window.on_ack(Ack(following.number, [(following.number, following.number)]), now)
        deadline = window.next_deadline()
        assert deadline is not None
        if deadline <= now:
            window.on_deadline(now)
    # Later and later, and without using up tries: the receiver is there, and may be at work on it all the same.
    assert [later - earlier for earlier, later in itertools.pairwise([0.0, *sent_at])] == [6, 11, 21, 41, 81]
    assert left.tries == 6
    window.on_deadline(300.0)
    assert seen[-1] == (1, DeliveryState.EXPIRED)


def test_what_was_passed_over_has_all_its_tries_when_the_receiver_falls_silent() -> None:
    window, _seen = _window(DeliveryPolicy(ack_timeout_s=5.0, retries_max=1, age_max_s=300.0))
    left = _add(window)
    window.link_up(0.0)
    window.take(0.0, 100)
    other = _add(window, 1.0)
    window.take(1.0, 100)
    window.on_ack(Ack(2, [(other.number, other.number)]), 1.0)
    window.on_deadline(5.0)
    assert window.take(5.0, 100)[1] == [left]
    for now in (10.0, 15.0):
        assert left.state is DeliveryState.SENDING
        window.on_deadline(now)
        window.take(now, 100)
    assert left.state is DeliveryState.FAILED
    assert left.reason == RETRIES_USED_UP


def test_links_that_end_cost_no_try() -> None:
    window, _seen = _window(DeliveryPolicy(retries_max=0))
    message = _add(window)
    for _ in range(20):
        window.link_up(0.0)
        assert window.take(0.0, 100)[1] == [message]
        window.link_down()
    assert message.tries == 1
    assert message.state is DeliveryState.RETRYING


def test_a_message_expires_with_and_without_a_link() -> None:
    window, _seen = _window(DeliveryPolicy(age_max_s=10.0))
    away = _add(window, 1.0)
    assert window.next_deadline() == 11.0
    window.on_deadline(11.0)
    assert (away.state, away.reason) == (DeliveryState.EXPIRED, TOO_OLD)
    there = _add(window, 20.0)
    window.link_up(20.0)
    window.take(20.0, 100)
    for at in (22.0, 24.0, 26.0, 28.0):
        window.on_ack(Ack(received=2), at)
    window.on_deadline(30.0)
    assert there.state is DeliveryState.EXPIRED


def test_what_is_on_its_way_to_the_disk_is_not_settled() -> None:
    window, _seen = _window()
    first, second = window.reserve(), window.reserve()
    message = Outgoing(b"", 0, b"", 0.0)
    message.number = second
    window.link_up(0.0)
    assert window.settled == 0
    window.release(first)
    assert window.settled == 1
    window.add(message)
    window.take(0.0, 100)
    window.on_ack(Ack(handled=[(2, 2)]), 0.0)
    assert window.settled == 2


def test_what_failed_is_not_settled_before_its_removal_is_on_disk() -> None:
    window, _seen = _window()
    for _ in range(3):
        _add(window)
    window.link_up(0.0)
    window.take(0.0, 1_000)
    window.on_ack(Ack(3, [(1, 1), (3, 3)], [(2, "no")]), 0.0)
    window.leave(2)
    assert (window.settled, window.is_settled) == (1, False)
    with pytest.raises(LocalProtocolError):
        window.renew(b"another!")
    window.left(2)
    assert (window.settled, window.is_settled) == (3, True)


def test_the_window_and_the_numbers_are_bounded() -> None:
    window, _seen = _window()
    _add(window)
    window.next_number = WINDOW_MAX + 1
    assert window.is_full
    window.next_number = 2
    assert not window.is_full
    with pytest.raises(LocalProtocolError):
        window.renew(b"x" * 8)
    window.drop(1, "dropped")
    window.next_number = NUMBER_MAX + 1
    assert window.is_full
    assert window.is_settled
    window.renew(b"x" * 8)
    assert not window.is_full
    assert _add(window).number == 1


def test_dropping_ends_a_message_once() -> None:
    window, seen = _window()
    message = _add(window)
    assert window.drop(1, "dropped by request")
    assert not window.drop(1, "again")
    assert message.reason == "dropped by request"
    window.link_up(0.0)
    assert window.take(0.0, 100)[1] == []
    assert seen == [(1, DeliveryState.FAILED)]


# The receiver


def test_what_came_before_is_recognised_also_after_a_restart() -> None:
    window = ReceiveWindow(EPOCH)
    for number in (1, 2, 4):
        assert window.begin(number) == "handle"
        assert window.begin(number) == "working"
        window.finish(number)
    assert window.begin(3) == "handle"
    window.abandon(3)
    again = ReceiveWindow(EPOCH, floor=window.dump()[0], done=window.dump()[1])
    assert again.dump() == (2, [(4, 4)])
    assert [again.begin(number) for number in (1, 2, 3, 4, 5)] == ["handled", "handled", "handle", "handled", "handle"]
    assert again.repeated == 3


def test_a_rejected_message_stays_rejected_until_it_is_settled() -> None:
    window = ReceiveWindow(EPOCH)
    window.begin(1)
    window.reject(1, "no")
    assert window.begin(1) == "rejected"
    assert window.reason(1) == "no"
    window.on_hello(Hello(EPOCH, 1))
    assert window.begin(1) == "handled"
    assert window.dump() == (1, []) and not window.dump_rejected()


def test_a_rejected_message_is_not_taken_for_handled_after_a_restart_or_when_there_are_many() -> None:
    window = ReceiveWindow(EPOCH)
    numbers = range(1, 5_001)
    for number in numbers:
        window.begin(number)
        window.reject(number, "no")
    assert window.reason(1) == "no" and window.reason(5_000) == REASON_UNKNOWN
    floor, done = window.dump()
    again = ReceiveWindow(EPOCH, floor=floor, done=done, rejected=window.dump_rejected())
    for each in (window, again):
        assert {each.begin(number) for number in numbers} == {"rejected"}
    assert again.reason(1) == REASON_UNKNOWN


def test_numbers_far_away_and_other_epochs_are_violations() -> None:
    window = ReceiveWindow(EPOCH)
    with pytest.raises(ProtocolError, match="above the settled"):
        window.begin(WINDOW_MAX + 1)
    with pytest.raises(ProtocolError, match="another epoch"):
        window.on_hello(Hello(b"another!", 3))
    assert window.begin(WINDOW_MAX) == "handle"


def test_settled_numbers_are_forgotten_however_far_they_jump() -> None:
    window = ReceiveWindow(EPOCH)
    for number in range(2, 100):
        window.begin(number)
        window.finish(number)
    window.on_hello(Hello(EPOCH, NUMBER_MAX))
    assert window.dump() == (NUMBER_MAX, [])
    window.on_hello(Hello(EPOCH, 5))
    assert window.floor == NUMBER_MAX
