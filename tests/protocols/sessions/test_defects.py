"""The defects of the ordered queue of XQI77/gateway_test, one by one: it has each of them, ours has none.

Each test has two halves under one name. `research/queues.md` §1.1 lists them with these numbers.
"""

from collections.abc import Callable

import pytest

from dep2p.errors import AlreadyRespondedError, ErrorCode, MessageTooLargeError, ProtocolError
from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.server import ServerSession
from dep2p.protocols.sessions.wire import AFTER, BEFORE, FAILURE, PUSH, RESET, RESPONSE, SKIP, Push, decode_resume
from dep2p.protocols.wire.frame import Frame, FrameDecoder, FrameType
from tests.protocols.sessions.naive_queue import OldBindings, OldQueue, OldSender

_OPTIONS = SessionOptions(items_max=1_000)


def frames_of(pieces: list[bytes]) -> list[Frame]:
    return FrameDecoder(1 << 24).feed(b"".join(pieces))


class Pair:
    """A server and a client that are connected by hand."""

    def __init__(self, options: SessionOptions = _OPTIONS) -> None:
        self.now = 0.0
        self.server = ServerSession(b"i" * 16, "x", 77, options, 0.0)
        self.client = ClientSession(b"i" * 16, "x", options)
        self.connect()

    def connect(self) -> None:
        self.client.detach()
        if self.server.is_attached:
            self.server.detach(self.now)
        [resume] = frames_of([self.client.attach(self.now)])
        self.server.attach(decode_resume(resume.payload), self.now)

    def to_client(self) -> list[Frame]:
        """Everything that the server writes now, handed over."""
        frames = frames_of(self.server.collect(1 << 20, self.now))
        self.client.handle(frames, self.now)
        return frames

    def to_server(self) -> None:
        self.server.handle(frames_of(self.client.collect(1 << 20, self.now)), self.now)

    def taken(self) -> list[Push]:
        """Take and handle all pushes, as the client's app."""
        pushes: list[Push] = []
        while (push := self.client.take()) is not None:
            pushes.append(push)
        self.client.done()
        self.client.idle()
        return pushes

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.server.on_deadline(self.now)
        self.client.on_deadline(self.now)


def data_of(pushes: list[Push]) -> list[bytes]:
    return [push.body for push in pushes]


def old(items_max: int = 1_000, fails: dict[int, bool] | None = None) -> tuple[OldQueue, list[int]]:
    out: list[int] = []

    def send(seq: int, _data: bytes) -> bool:
        if fails and seq in fails:
            return False
        out.append(seq)
        return True

    return OldQueue(send, items_max), out


def test_1_a_send_that_fails_once_does_not_stall_the_rest() -> None:
    fails = {2: True}
    queue, out = old(fails=fails)
    for seq in range(1, 6):
        queue.enqueue(seq, b"")
    fails.clear()
    queue.enqueue(6, b"")
    queue.tick(40)
    assert set(out) == {1}, "the old one waits for 2 for ever"
    assert not queue.waiting, "and has silently dropped 3 to 6"

    pair = Pair()
    pair.to_client()
    for each in b"12345":
        assert pair.server.push(bytes([each]))
    pair.server.collect(1 << 20, 0.0)  # written, and lost with the link
    pair.connect()
    pair.server.push(b"6")
    pair.to_client()
    assert data_of(pair.taken()) == [b"1", b"2", b"3", b"4", b"5", b"6"]


def test_2_an_encoding_that_fails_leaves_no_gap() -> None:
    def encode(data: bytes) -> bytes:
        if data == b"bad":
            raise ValueError("too large")
        return data

    queue, out = old()
    sender = OldSender(queue, encode)
    assert [sender.push(each) for each in (b"1", b"bad", b"3")] == ["", "encode failed", ""]
    assert out == [1], "the number of the bad one is used up"

    pair = Pair(SessionOptions(message_bytes_max=10))
    pair.to_client()
    pair.server.push(b"1")
    with pytest.raises(MessageTooLargeError):
        pair.server.push(b"x" * 11)
    pair.server.push(b"3")
    pair.to_client()
    assert [(push.seq, push.body) for push in pair.taken()] == [(1, b"1"), (2, b"3")]


def test_3_an_acknowledgement_of_what_was_never_sent_is_refused_and_changes_nothing() -> None:
    queue, out = old()
    queue.enqueue(1, b"")
    queue.enqueue(2, b"")
    queue.ack(1_000)
    assert queue.enqueue(3, b"") == "stale", "a black hole"
    assert out == [1, 2]

    pair = Pair()
    pair.to_client()
    pair.server.push(b"1")
    pair.server.push(b"2")
    pair.to_client()
    with pytest.raises(ProtocolError, match="1000 received"):
        pair.server.sender.acknowledge(1_000, 1_000, 0.0)
    assert pair.server.push(b"3") == 3
    pair.to_client()
    assert data_of(pair.taken()) == [b"1", b"2", b"3"]


def test_4_after_a_reconnect_the_unacknowledged_tail_comes_first_in_order_and_at_once() -> None:
    queue, out = old()
    queue.resync(3)  # a new queue after a reconnect: 1 to 5 were sent, 3 acknowledged; the counter goes on at 6
    queue.enqueue(6, b"")
    assert out == [], "4 and 5 are never sent, and 6 waits for them"

    pair = Pair()
    pair.to_client()
    for each in b"12345":
        pair.server.push(bytes([each]))
    pieces = pair.server.collect(1 << 20, 0.0)
    [frame] = frames_of(pieces)
    # Only three of the five arrive before the link is gone.
    pair.client.handle([frame._replace(payload=frame.payload[: 8 + 3 * 10])], 0.0)
    pair.connect()
    pair.server.push(b"6")
    pair.to_client()
    assert [(push.seq, push.body) for push in pair.taken()] == [(n, b"%d" % n) for n in range(1, 7)]
    assert pair.client.receiver.duplicates == 0, "nothing is sent that the client has"


def test_5_what_fills_the_gap_is_taken_even_when_everything_is_full() -> None:
    queue, out = old(items_max=3)
    for seq in (2, 3, 4):
        queue.enqueue(seq, b"")
    assert queue.enqueue(1, b"") == "queue full"
    assert out == []

    pair = Pair(SessionOptions(items_max=4))
    pair.to_client()
    sender = pair.server.sender
    assert sender.reserve(0.0) == 1
    assert [pair.server.push(each) for each in (b"2", b"3", b"4", b"5")] == [2, 3, 4, 0], "full"
    assert pair.to_client() == []
    sender.fill(1, PUSH, b"1")
    pair.to_client()
    assert data_of(pair.taken()) == [b"1", b"2", b"3", b"4"]


def test_6_after_the_last_retry_the_session_fails_for_all_to_see() -> None:
    queue, out = old()
    queue.enqueue(1, b"")
    for now in range(10, 200, 10):
        queue.tick(now)
    assert out == [1, 1, 1, 1]
    assert not queue.sent, "forgotten, and nobody was told"

    pair = Pair()
    pair.to_client()
    pair.server.push(b"1")
    sends = 0
    while pair.server.closed is None:
        sends += len(frames_of(pair.server.collect(1 << 20, pair.now)))
        pair.later(15.0)
    assert (sends, pair.now) == (4, 60.0)
    assert pair.server.failed
    assert "push 1 was sent 4 times and not acknowledged" in pair.server.closed


def test_7_what_is_not_acknowledged_is_bounded() -> None:
    queue, _out = old(items_max=1_000)
    for seq in range(1, 20_001):
        queue.enqueue(seq, b"")
    assert len(queue.sent) == 20_000

    pair = Pair(SessionOptions(items_max=1_000))
    pair.to_client()
    for _ in range(20_000):
        pair.server.push(b"x")
        pair.to_client()
    assert pair.server.sender.unhandled == 1_000
    assert len(pair.client.receiver.queue) == 1_000


def test_8_what_is_sent_again_is_sent_in_order() -> None:
    queue, out = old()
    for seq in range(1, 6):
        queue.enqueue(seq, b"")
    out.clear()
    queue.tick(20)
    assert sorted(out) == [1, 2, 3, 4, 5]
    assert out != sorted(out)

    pair = Pair()
    pair.to_client()
    for each in b"12345":
        pair.server.push(bytes([each]))
    pair.server.collect(1 << 20, 0.0)  # lost
    pair.later(15.0)
    pair.to_client()
    assert [push.seq for push in pair.taken()] == [1, 2, 3, 4, 5]
    assert pair.server.sender.retransmitted_items == 5


def answer_ours(
    pair: Pair, prepare: Callable[[ServerSession], object], kind: int, data: bytes
) -> list[tuple[int, bytes]]:
    pair.to_client()
    pair.client.ask(b"?", 1_000)
    pair.to_server()
    prepare(pair.server)
    pair.server.respond(1, kind, data)
    pair.to_client()
    return [(push.kind, push.body) for push in pair.taken()]


def test_9_what_goes_before_a_response_goes_before_it_on_every_path() -> None:
    out: list[bytes] = []
    bindings = OldBindings(out.append)
    bindings.before[1] = [b"before"]
    bindings.answer_sync(1, lambda: b"response")
    assert out == [b"response", b"before"], "the login path has it the wrong way round"

    def prepare(server: ServerSession) -> None:
        server.bind(AFTER, 1, b"after", 0.0)
        server.bind(BEFORE, 1, b"before", 0.0)

    got = answer_ours(Pair(), prepare, RESPONSE, b"response")
    assert got == [(BEFORE, b"before"), (RESPONSE, b"response"), (AFTER, b"after")]


def test_10_what_is_bound_goes_too_when_the_handler_fails_or_is_late_and_ids_are_never_cut() -> None:
    def late() -> bytes:
        raise TimeoutError

    bindings = OldBindings(lambda data: None)
    bindings.before[1] = [b"before"]
    bindings.answer_async(1, late)
    assert bindings.before, "it stays for ever"
    bindings.before[5] = [b"for 5"]
    out: list[bytes] = []
    bindings.push = out.append
    bindings.answer_async((1 << 32) + 5, lambda: b"response")
    assert out == [b"for 5", b"response"], "another request's push: the id was cut to 32 bits"

    pair = Pair()
    pair.to_client()
    pair.client.ask(b"?", 1_000)
    pair.to_server()
    pair.server.bind(BEFORE, 1, b"before", 0.0)
    pair.server.bind(AFTER, 1, b"after", 0.0)
    pair.later(1.0)
    pair.to_client()
    got = pair.taken()
    assert [push.kind for push in got] == [BEFORE, FAILURE, AFTER]
    assert int.from_bytes(got[1].body[:4], "big") == ErrorCode.TIMEOUT
    assert pair.server.bindings.items == 0
    assert pair.server.bindings.of(1) == ([], [])
    with pytest.raises(ValueError, match="ids go from 1"):
        pair.server.bind(BEFORE, (1 << 32) + 5, b"", 0.0)


def test_10_a_binding_whose_request_never_comes_expires_and_is_counted() -> None:
    for policy, arrived in (("drop", []), ("deliver", [b"early", b"late"])):
        pair = Pair(SessionOptions(binding_expired="drop" if policy == "drop" else "deliver"))
        pair.to_client()
        pair.server.bind(BEFORE, 9, b"early", 0.0)
        pair.server.bind(AFTER, 9, b"late", 0.0)
        assert pair.server.next_deadline() == 30.0
        pair.later(30.0)
        pair.to_client()
        assert data_of(pair.taken()) == arrived
        assert pair.server.bindings.expired == 2
        assert pair.server.bindings.items == pair.server.bindings.size_bytes == 0


def test_11_an_old_or_repeated_acknowledgement_is_no_error_and_changes_nothing() -> None:
    queue, _out = old()
    queue.enqueue(1, b"")
    assert queue.ack(1) is True
    assert queue.ack(1) is False, "taken for invalid"

    pair = Pair()
    pair.to_client()
    for each in b"123":
        pair.server.push(bytes([each]))
    pair.to_client()
    pair.taken()
    sender = pair.server.sender
    assert sender.acknowledge(3, 2, 0.0)
    for received, handled in ((3, 2), (1, 1), (0, 0), (2, 0)):
        assert sender.acknowledge(received, handled, 0.0) is False
        assert (sender.received, sender.handled) == (3, 2)


def test_12_pushing_never_writes() -> None:
    writes: list[int] = []

    def write(seq: int, _data: bytes) -> bool:
        writes.append(seq)
        return True

    queue = OldQueue(write)
    queue.enqueue(1, b"")
    assert writes, "the network write is inside of the call, under the queue's lock"

    # Ours keeps the push; whoever can write collects, many pushes in one write.
    pair = Pair()
    pair.to_client()
    for _ in range(500):
        pair.server.push(b"x")
    pieces = pair.server.collect(1 << 20, 0.0)
    assert len(frames_of(pieces)) == 1
    assert frames_of(pieces)[0].type == FrameType.PUSH


# The rules beside them


def test_a_late_before_is_refused_and_a_late_after_goes_at_once() -> None:
    pair = Pair()
    assert [kind for kind, _data in answer_ours(pair, lambda server: None, RESPONSE, b"yes")] == [RESPONSE]
    with pytest.raises(AlreadyRespondedError):
        pair.server.bind(BEFORE, 1, b"too late", 0.0)
    with pytest.raises(AlreadyRespondedError):
        pair.server.respond(1, RESPONSE, b"again")
    assert pair.server.bind(AFTER, 1, b"late", 0.0)
    pair.to_client()
    assert [(push.kind, push.request_id, push.body) for push in pair.taken()] == [(AFTER, 1, b"late")]


def test_a_run_stays_whole_whatever_is_pushed_meanwhile() -> None:
    pair = Pair()
    pair.to_client()
    pair.client.ask(b"?", 1_000)
    pair.to_server()
    pair.server.push(b"1")
    pair.server.bind(BEFORE, 1, b"b1", 0.0)
    pair.server.push(b"2")
    pair.server.bind(AFTER, 1, b"a1", 0.0)
    pair.server.bind(BEFORE, 1, b"b2", 0.0)
    pair.server.push(b"3")
    pair.server.respond(1, RESPONSE, b"yes")
    pair.server.push(b"4")
    pair.to_client()
    assert data_of(pair.taken()) == [b"1", b"2", b"3", b"b1", b"b2", b"yes", b"a1", b"4"]


def test_a_number_that_is_never_filled_is_skipped_or_fails_the_session_by_option() -> None:
    pair = Pair(SessionOptions(gap="skip"))
    pair.to_client()
    pair.server.sender.reserve(0.0)
    pair.server.push(b"2")
    pair.later(29.9)
    assert pair.to_client() == []
    pair.later(0.1)
    pair.to_client()
    got = pair.taken()
    assert [(push.seq, push.kind) for push in got] == [(1, SKIP), (2, PUSH)]
    assert got[0].body == b"not filled within 30 s"
    assert pair.server.sender.stats()["skipped"] == 1

    pair = Pair(SessionOptions(gap="fail"))
    pair.to_client()
    pair.server.sender.reserve(0.0)
    pair.later(30.0)
    assert pair.server.failed
    assert "reserved and not filled" in str(pair.server.closed)


def test_an_acknowledgement_of_handled_pushes_that_is_lost_is_asked_for() -> None:
    pair = Pair(SessionOptions(items_max=2))
    pair.to_client()
    pair.server.push(b"1")
    pair.server.push(b"2")
    pair.to_client()
    pair.client.on_deadline(0.2)
    pair.to_server()  # they are received
    assert [push.body for push in pair.taken()] == [b"1", b"2"]
    pair.client.collect(1_000, 0.2)  # that they are handled is lost
    assert pair.server.push(b"3") == 0
    pair.now = 0.2
    pair.later(15.0)
    assert [frame.type for frame in pair.to_client()] == [FrameType.PUSH_ACK], "asked, and nothing sent again"
    pair.to_server()
    assert pair.server.push(b"3") == 3


def test_the_place_is_the_old_one_until_the_app_has_been_reported_of_a_reset() -> None:
    pair = Pair()
    pair.to_client()
    for each in b"123":
        pair.server.push(bytes([each]))
    pair.to_client()
    assert pair.client.take() is not None
    assert pair.client.take() is not None  # 1 is handled
    assert pair.client.place == (77, 1)
    for epoch in (78, 79):  # the server is restarted twice
        pair.server = ServerSession(b"i" * 16, "x", epoch, _OPTIONS, 0.0)
        pair.connect()
        pair.to_client()
        assert pair.client.place == (77, 1)
    assert pair.client.take() is not None  # 3
    assert pair.client.place == (77, 1)
    kinds: list[int] = []
    while (push := pair.client.take()) is not None:
        kinds.append(push.kind)
    assert kinds == [RESET, RESET]
    assert pair.client.place == (79, 0)
