"""A Hypothesis state machine: a server and a client of a session against lists, with everything an app can do."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dep2p.errors import AlreadyRespondedError, LocalProtocolError, ProtocolError, SessionFullError
from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.server import ServerSession
from dep2p.protocols.sessions.wire import (
    AFTER,
    BEFORE,
    FAILURE,
    PUSH,
    RESET,
    RESPONSE,
    SKIP,
    decode_resume,
    encode_failure,
    read_reset,
)
from dep2p.protocols.wire.frame import Frame, FrameDecoder

_OPTIONS = SessionOptions(
    items_max=6,
    bytes_max=200,
    gap="skip",
    ack_timeout_s=5.0,
    retries_max=1_000,
    bound_items_max=4,
    resume_timeout_s=1e9,
)
_ID = b"s" * 16
Item = tuple[int, int, bytes]


class NaiveServer:
    """A session without windows, frames or loss: a list, with holes where a number is reserved."""

    def __init__(self) -> None:
        self.items: list[Item | None] = []
        self.before: dict[int, list[bytes]] = {}
        self.after: dict[int, list[bytes]] = {}
        self.open: dict[int, None] = {}
        self.answered: dict[int, None] = {}

    def answer(self, request_id: int, kind: int, data: bytes) -> None:
        self.items += [(BEFORE, request_id, each) for each in self.before.pop(request_id, [])]
        self.items.append((kind, request_id, data))
        self.items += [(AFTER, request_id, each) for each in self.after.pop(request_id, [])]
        del self.open[request_id]
        self.answered[request_id] = None


class Sessions(RuleBasedStateMachine):
    """The real pair, the model, and what the client's app has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 1
        self.server = ServerSession(_ID, "x", self.epoch, _OPTIONS, 0.0)
        self.model = NaiveServer()
        self.client = ClientSession(_ID, "x", _OPTIONS)
        self.seen: list[Item] = []
        self.place = (0, 0)
        self.base = 0
        self.to_client: list[Frame] = []
        self.to_server: list[Frame] = []

    # The network: in order, until it is cut

    @precondition(lambda self: not self.client.is_attached and self.client.may_attach)
    @rule()
    def connect(self) -> None:
        [frame] = FrameDecoder(1 << 20).feed(self.client.attach(self.now))
        if self.server.is_attached:
            self.server.detach(self.now)
        self.server.attach(decode_resume(frame.payload), self.now)

    @rule()
    def cut(self) -> None:
        self.client.detach()
        if self.server.is_attached:
            self.server.detach(self.now)
        self.to_client.clear()
        self.to_server.clear()

    @rule(count=st.integers(1, 8))
    def carry(self, count: int) -> None:
        self.to_client += FrameDecoder(1 << 20).feed(b"".join(self.server.collect(60, self.now)))
        self.to_server += FrameDecoder(1 << 20).feed(b"".join(self.client.collect(60, self.now)))
        if self.client.is_attached:
            frames, self.to_client = self.to_client[:count], self.to_client[count:]
            self.client.handle(frames, self.now)
            self.client.lost_requests.clear()
        if self.server.is_attached:
            frames, self.to_server = self.to_server[:count], self.to_server[count:]
            self.server.handle(frames, self.now)
        while self.server.requests:
            self.model.open[self.server.requests.popleft().request_id] = None

    @rule(seconds=st.sampled_from([0.3, 6.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.server.is_attached or seconds < 1:
            for _kind, request_id, _data in self.server.on_deadline(self.now):
                self.model.before.pop(request_id, None)
                self.model.after.pop(request_id, None)
            for request_id in self.server.expired_requests:
                self.model.answer(request_id, FAILURE, encode_failure(4, "no answer within the deadline"))
            self.server.expired_requests.clear()
            for at, item in enumerate(self.model.items):
                if item is None and not self._is_reserved(at + 1):
                    self.model.items[at] = (SKIP, 0, b"not filled within 30 s")
        self.client.on_deadline(self.now)
        assert self.server.closed is None

    def _is_reserved(self, seq: int) -> bool:
        return seq in self.server.sender._reserved  # pyright: ignore[reportPrivateUsage]

    # The server's app

    @rule(data=st.binary(max_size=30))
    def push(self, data: bytes) -> None:
        seq = self.server.push(data)
        if seq:
            self.model.items.append((PUSH, 0, data))
            assert seq == len(self.model.items)
        else:
            assert self.server.sender.unhandled

    @rule()
    def reserve(self) -> None:
        seq = self.server.sender.reserve(self.now)
        if seq:
            self.model.items.append(None)
            assert seq == len(self.model.items)

    @rule(data=st.binary(max_size=30), pick=st.integers(0, 50))
    def fill(self, data: bytes, pick: int) -> None:
        holes = [at + 1 for at, item in enumerate(self.model.items) if item is None]
        if holes and pick < 45:
            seq = holes[pick % len(holes)]
            self.server.fill(seq, PUSH, data)
            self.model.items[seq - 1] = (PUSH, 0, data)
        else:
            with pytest.raises(LocalProtocolError):
                self.server.fill(len(self.model.items) + 1, PUSH, data)

    @rule(kind=st.sampled_from([BEFORE, AFTER]), offset=st.integers(-2, 2), data=st.binary(max_size=20))
    def bind(self, kind: int, offset: int, data: bytes) -> None:
        request_id = max(1, self.server.bindings.taken + offset)
        is_late = request_id <= self.server.bindings.taken and request_id not in self.model.open
        try:
            done = self.server.bind(kind, request_id, data, self.now)
        except AlreadyRespondedError:
            assert is_late and kind == BEFORE
            return
        except SessionFullError:
            assert self.server.bindings.items >= _OPTIONS.bound_items_max
            return
        assert not (is_late and kind == BEFORE)
        if is_late and done:
            self.model.items.append((AFTER, request_id, data))
        elif done:
            (self.model.before if kind == BEFORE else self.model.after).setdefault(request_id, []).append(data)

    @rule(pick=st.integers(0, 9), data=st.binary(max_size=20))
    def respond(self, pick: int, data: bytes) -> None:
        if self.model.open:
            request_id = list(self.model.open)[pick % len(self.model.open)]
            if self.server.respond(request_id, RESPONSE, data):
                self.model.answer(request_id, RESPONSE, data)
        if self.model.answered:
            with pytest.raises(AlreadyRespondedError):
                self.server.respond(next(iter(self.model.answered)), RESPONSE, data)

    # The client's app

    @rule()
    def ask(self) -> None:
        if self.client.requests_open < 5 and self.client.epoch:
            self.client.ask(b"?", 100_000)

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        for _ in range(count):
            push = self.client.take()
            if push is None:
                self.client.idle()
                return
            if push.kind == RESET:
                _epoch, next_seq, _reason = read_reset(push)
                self.base = next_seq - 1
                self.seen = []
                continue
            if push.kind in (RESPONSE, FAILURE):
                self.client.answered(push.request_id)
            assert push.seq == self.base + len(self.seen) + 1
            self.seen.append((push.kind, push.request_id, push.body))

    @rule(past=st.integers(1, 3))
    def forge_an_acknowledgement(self, past: int) -> None:
        sender = self.server.sender
        floors = (sender.received, sender.handled)
        with pytest.raises(ProtocolError):
            sender.acknowledge(sender.last_sent + past, sender.handled, self.now)
        assert not sender.acknowledge(max(0, floors[0] - past), max(0, floors[1] - past), self.now)
        assert (sender.received, sender.handled) == floors

    @invariant()
    def what_was_seen_is_the_beginning_of_what_was_pushed(self) -> None:
        assert self.seen == self.model.items[self.base : self.base + len(self.seen)]

    @invariant()
    def everything_is_bounded(self) -> None:
        sender, receiver = self.server.sender, self.client.receiver
        assert sender.unhandled <= 2 * _OPTIONS.items_max + _OPTIONS.requests_max
        assert receiver.received - receiver.handled <= 2 * _OPTIONS.items_max
        assert sender.handled <= sender.received <= sender.last_sent <= sender.in_order <= sender.last_seq
        assert sender.last_seq == len(self.model.items)

    def teardown(self) -> None:
        """Left alone, everything arrives."""
        for turn in range(200):
            if not self.client.is_attached and self.client.may_attach:
                self.connect()
            self.carry(8)
            self.take(5)
            if turn < 190:
                self.wait(0.3)
        holes = [at for at, item in enumerate(self.model.items) if item is None]
        assert len(self.seen) == (holes[0] if holes else len(self.model.items)) - self.base
        self.what_was_seen_is_the_beginning_of_what_was_pushed()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
