"""Sender and receiver of reliable delivery against a naive model: any order of steps, frames and crashes."""

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dep2p.protocols.delivery.receiver import ReceiveWindow
from dep2p.protocols.delivery.sender import DeliveryPolicy, Outgoing, SendWindow
from dep2p.protocols.delivery.states import ENDS, DeliveryState
from dep2p.protocols.delivery.wire import decode_ack, decode_hello, encode_hello, split_ack
from dep2p.protocols.wire.frame import Frame, FrameDecoder, FrameType, encode_frame
from tests.protocols.delivery.world import FOLLOWS

_EPOCH = b"12345678"
_POLICY = DeliveryPolicy(ack_timeout_s=5.0, retries_max=2, age_max_s=60.0)


def _frame(raw: bytes) -> Frame:
    [frame] = FrameDecoder(1 << 20).feed(raw)
    return frame


class DeliveryMachine(RuleBasedStateMachine):
    """The model: what was accepted, how often the handler took it, what it rejected, how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.accepted: dict[int, float] = {}
        self.taken: dict[int, int] = {}
        self.refused: dict[int, None] = {}
        self.reported_refused: dict[int, None] = {}
        self.torn: dict[int, int] = {}
        self.ends: dict[int, DeliveryState] = {}
        self.next_number = 1
        self.states: dict[int, DeliveryState] = {}
        self.sender = self._new_sender()
        self.receiver = ReceiveWindow(_EPOCH)
        self.record: tuple[int, list[tuple[int, int]], list[tuple[int, int]]] = (0, [], [])
        self.to_receiver: list[bytes] = []
        self.to_sender: list[bytes] = []
        self.working: list[int] = []
        self.unrecorded: dict[int, None] = {}
        self.is_up = False

    def _new_sender(self) -> SendWindow[Outgoing]:
        window = SendWindow(_EPOCH, _POLICY, self._on_state, next_number=self.next_number)
        kept: list[Outgoing] = []
        for number, at in self.accepted.items():
            if number not in self.ends:
                message = Outgoing(b"", 0, b"x", at)
                message.number = number
                kept.append(message)
                self.states[number] = DeliveryState.CREATED
        window.restore(kept)
        return window

    def _on_state(self, message: Outgoing) -> None:
        assert message.state in FOLLOWS[self.states.get(message.number, DeliveryState.CREATED)]
        self.states[message.number] = message.state
        if message.state in ENDS:
            assert message.number not in self.ends
            self.ends[message.number] = message.state
            assert (message.reason == "") is (message.state is DeliveryState.ACKNOWLEDGED)

    # Steps

    @rule(count=st.integers(1, 3))
    def accept(self, count: int) -> None:
        for _ in range(count):
            message = Outgoing(b"", 0, b"x", self.now)
            message.number = self.sender.reserve()
            self.next_number = self.sender.next_number
            self.accepted[message.number] = self.now
            self.sender.add(message)

    @rule()
    def the_disk_refuses_one(self) -> None:
        self.sender.release(self.sender.reserve())
        self.next_number = self.sender.next_number

    @rule()
    def many_numbers_stay_unused(self) -> None:
        for _ in range(64):
            self.the_disk_refuses_one()

    @rule()
    def link_up(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.sender.link_up(self.now)

    @rule()
    def link_down(self) -> None:
        self.is_up = False
        self.to_receiver, self.to_sender = [], []
        self.sender.link_down()

    @precondition(lambda self: self.is_up)
    @rule()
    def write(self) -> None:
        hello, messages = self.sender.take(self.now, 10_000)
        if hello is not None:
            self.to_receiver.append(encode_hello(hello))
        self.to_receiver += [encode_frame(FrameType.ACK_REQUEST, b"x", req_id=each.number) for each in messages]

    @precondition(lambda self: self.to_receiver)
    @rule(data=st.data(), again=st.booleans())
    def arrive(self, data: Any, again: bool) -> None:
        at = int(data.draw(st.integers(0, min(4, len(self.to_receiver) - 1))))
        self._receive(_frame(self.to_receiver[at] if again else self.to_receiver.pop(at)))

    def _receive(self, frame: Frame) -> None:
        if not frame.req_id:
            self.receiver.on_hello(decode_hello(frame))
            return
        match self.receiver.begin(frame.req_id):
            case "handle":
                assert frame.req_id not in self.working
                assert frame.req_id not in self.reported_refused, "told as rejected, and handled again"
                self.working.append(frame.req_id)
            case "handled":
                assert self.taken.get(frame.req_id) or frame.req_id in self.ends
                self._report([frame.req_id], [])
            case "rejected":
                assert frame.req_id in self.refused
                self._report([], [(frame.req_id, "no")])
            case _:
                assert frame.req_id in self.working

    @precondition(lambda self: self.to_receiver)
    @rule()
    def get_lost(self) -> None:
        if _frame(self.to_receiver[0]).req_id:  # a stream that loses its HELLO is no stream
            del self.to_receiver[0]

    @precondition(lambda self: self.working)
    @rule(takes=st.booleans(), records=st.booleans())
    def handler_ends(self, takes: bool, records: bool) -> None:
        number = self.working.pop(0)
        if takes:
            self.taken[number] = self.taken.get(number, 0) + 1
            self.receiver.finish(number)
        else:
            self.refused[number] = None
            self.receiver.reject(number, "no")
        self.unrecorded[number] = None
        if records:
            self._report([number] if takes else [], [] if takes else [(number, "no")])

    @rule(takes=st.lists(st.booleans(), min_size=1, max_size=4), is_heard=st.booleans())
    def a_whole_round(self, takes: list[bool], is_heard: bool) -> None:
        """A round that single steps seldom come to: all messages are handled and on disk, and the sender hears of it or
        not."""
        self.link_up()
        self.write()
        while self.to_receiver:
            self._receive(_frame(self.to_receiver.pop(0)))
        for takes_it in takes:
            if self.working:
                self.handler_ends(takes_it, True)
        while self.to_sender and is_heard:
            self.sender.on_ack(decode_ack(_frame(self.to_sender.pop(0))), self.now)

    def _report(self, handled: list[int], rejected: list[tuple[int, str]]) -> None:
        self.record = (*self.receiver.dump(), self.receiver.dump_rejected())
        self.unrecorded.clear()
        self.reported_refused.update(dict.fromkeys(number for number, _why in rejected))
        self.to_sender += split_ack(0, handled, rejected)

    @precondition(lambda self: self.to_sender)
    @rule(data=st.data(), again=st.booleans())
    def hear(self, data: Any, again: bool) -> None:
        at = int(data.draw(st.integers(0, min(4, len(self.to_sender) - 1))))
        self.sender.on_ack(decode_ack(_frame(self.to_sender[at] if again else self.to_sender.pop(at))), self.now)

    @rule(seconds=st.sampled_from([0.5, 5.5, 61.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        self.sender.on_deadline(self.now)

    @rule()
    def sender_dies(self) -> None:
        self.link_down()
        self.sender = self._new_sender()

    @rule()
    def receiver_dies(self) -> None:
        self.link_down()
        for number in self.unrecorded:
            self.torn[number] = self.torn.get(number, 0) + 1
            self.refused.pop(number, None)
        self.unrecorded, self.working = {}, []
        floor, done, rejected = self.record
        self.receiver = ReceiveWindow(_EPOCH, floor=floor, done=done, rejected=rejected)

    # What must be true

    @invariant()
    def the_handler_takes_each_once_unless_a_crash_took_the_record(self) -> None:
        assert all(times <= 1 + self.torn.get(number, 0) for number, times in self.taken.items())

    @invariant()
    def acknowledged_is_what_was_taken(self) -> None:
        for number, state in self.ends.items():
            assert state is not DeliveryState.ACKNOWLEDGED or self.taken.get(number)
            assert state is not DeliveryState.ACKNOWLEDGED or number not in self.reported_refused

    @invariant()
    def nothing_vanishes(self) -> None:
        assert list(self.sender.unsettled) == [number for number in self.accepted if number not in self.ends]

    def teardown(self) -> None:
        """To rest: everything has an end, and the receiver keeps no more than a floor."""
        for _ in range(200):
            self.link_up()
            self.write()
            while self.to_receiver:
                self._receive(_frame(self.to_receiver.pop(0)))
            while self.working:
                number = self.working.pop(0)
                self.taken[number] = self.taken.get(number, 0) + 1
                self.receiver.finish(number)
                self.unrecorded[number] = None
                self._report([number], [])
            while self.to_sender:
                self.sender.on_ack(decode_ack(_frame(self.to_sender.pop(0))), self.now)
            if not self.sender.unsettled:
                break
            self.time_goes_on(5.5)
        self.the_handler_takes_each_once_unless_a_crash_took_the_record()
        self.acknowledged_is_what_was_taken()
        assert set(self.ends) == set(self.accepted), "a message has no end"
        self.link_down()
        self.link_up()
        self.write()
        self._receive(_frame(self.to_receiver.pop(0)))
        assert self.sender.is_settled and not self.to_receiver and self.sender.next_deadline() is None
        assert self.receiver.dump() == (self.next_number - 1, []) and not self.receiver.dump_rejected()
        assert not self.receiver.has_working


DeliveryMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("DEP2P_EXAMPLES", "100")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestDeliveryMachine = DeliveryMachine.TestCase
