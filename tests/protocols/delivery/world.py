"""One sender, one receiver and a bad link between them, under a clock of its own: the pure cores of reliable delivery.

The sender's outbox and the receiver's record survive their crashes; everything else does not. The link loses, repeats
and reorders frames, and is cut at any step.
"""

import heapq
import itertools
from random import Random
from typing import Final

from dep2p.protocols.delivery.receiver import ReceiveWindow
from dep2p.protocols.delivery.sender import DeliveryPolicy, Outgoing, SendWindow
from dep2p.protocols.delivery.states import ENDS, DeliveryState
from dep2p.protocols.delivery.wire import Hello, decode_ack, decode_hello, encode_hello, split_ack
from dep2p.protocols.wire.frame import FrameDecoder, FrameType, encode_frame

FOLLOWS: Final[dict[DeliveryState, tuple[DeliveryState, ...]]] = {
    DeliveryState.CREATED: (
        DeliveryState.SENDING,
        DeliveryState.ACKNOWLEDGED,
        DeliveryState.FAILED,
        DeliveryState.EXPIRED,
    ),
    DeliveryState.SENDING: (
        DeliveryState.DELIVERED,
        DeliveryState.ACKNOWLEDGED,
        DeliveryState.RETRYING,
        DeliveryState.FAILED,
        DeliveryState.EXPIRED,
    ),
    DeliveryState.DELIVERED: (
        DeliveryState.ACKNOWLEDGED,
        DeliveryState.RETRYING,
        DeliveryState.FAILED,
        DeliveryState.EXPIRED,
    ),
    DeliveryState.RETRYING: (
        DeliveryState.SENDING,
        DeliveryState.DELIVERED,
        DeliveryState.ACKNOWLEDGED,
        DeliveryState.FAILED,
        DeliveryState.EXPIRED,
    ),
    DeliveryState.ACKNOWLEDGED: (),
    DeliveryState.FAILED: (),
    DeliveryState.EXPIRED: (),
}
"""The states that may follow each state. DELIVERED may be passed over: an acknowledgement says it too. A message of an
earlier run may be acknowledged before this run has sent it again."""

EPOCH = b"epoch--1"


class World:
    """``handled`` counts how often the handler ended for each message, ``torn`` how often a crash took its record."""

    def __init__(
        self, seed: int, *, loss: float = 0.3, rejecting: float = 0.0, policy: DeliveryPolicy | None = None
    ) -> None:
        self.rng = Random(seed)
        self.loss = loss
        self.rejecting = rejecting
        self.unwanted: dict[int, None] = {}
        """Messages that the handler rejects."""
        self.policy = policy or DeliveryPolicy(age_max_s=1e9, retries_max=10**6)
        self.now = 0.0
        self.accepted: list[int] = []
        self.ends: dict[int, DeliveryState] = {}
        self.states: dict[int, DeliveryState] = {}
        self.handled: dict[int, int] = {}
        self.torn: dict[int, int] = {}
        self.reported_rejected: dict[int, None] = {}
        self.retries = 0
        self._stored: dict[int, float] = {}
        self._next_number = 1
        self._record: tuple[int, list[tuple[int, int]], list[tuple[int, int]]] = (0, [], [])
        self._unreported: list[int] = []
        self._unrecorded: list[int] = []
        self._agenda: list[tuple[float, int, str, bytes, int]] = []
        self._order = itertools.count()
        self._link = 0  # grows with each link: what is under way on an older one is lost
        self._is_up = False
        self.sender = self._new_sender()
        self.receiver = ReceiveWindow(EPOCH)
        self._received = 0

    def _new_sender(self) -> SendWindow[Outgoing]:
        window = SendWindow(EPOCH, self.policy, self._on_state, next_number=self._next_number)
        messages: list[Outgoing] = []
        for number, created_s in self._stored.items():
            message = Outgoing(b"", 0, b"%d" % number, created_s)
            message.number = number
            messages.append(message)
            self.states[number] = DeliveryState.CREATED
        window.restore(messages)
        return window

    def _on_state(self, message: Outgoing) -> None:
        number = message.number
        before = self.states.get(number, DeliveryState.CREATED)
        assert message.state in FOLLOWS[before], (before, message.state)
        self.states[number] = message.state
        self.retries += message.state is DeliveryState.RETRYING
        if message.state in ENDS:
            assert number not in self.ends
            assert message.reason or message.state is DeliveryState.ACKNOWLEDGED
            self.ends[number] = message.state
            del self._stored[number]

    # What may happen

    def send(self) -> None:
        if self.sender.is_full:
            return
        message = Outgoing(b"", 0, b"x", self.now)
        message.number = self.sender.reserve()
        self._next_number = self.sender.next_number
        if self.rng.random() < 0.05:  # it never got onto the disk
            self.sender.release(message.number)
            return
        self.accepted.append(message.number)
        if self.rng.random() < self.rejecting:
            self.unwanted[message.number] = None
        self._stored[message.number] = self.now
        self.sender.add(message)
        self._flush()

    def cut(self) -> None:
        self._link += 1
        self._is_up = False
        self.sender.link_down()

    def connect(self) -> None:
        if not self._is_up:
            self._link += 1
            self._is_up = True
            self._received = 0
            self.sender.link_up(self.now)
            self._flush()

    def crash_sender(self) -> None:
        self.cut()
        self.sender = self._new_sender()

    def crash_receiver(self) -> None:
        self.cut()
        for number in self._unrecorded:
            self.torn[number] = self.torn.get(number, 0) + 1
        self._unrecorded, self._unreported = [], []
        floor, done, rejected = self._record
        self.receiver = ReceiveWindow(EPOCH, floor=floor, done=done, rejected=rejected)

    def run_for(self, duration_s: float) -> None:
        until = self.now + duration_s
        while True:
            deadline = self.sender.next_deadline()
            due = self._agenda[0][0] if self._agenda else until
            at = min(until, due, until if deadline is None else max(deadline, self.now))
            self.now = at
            if self._agenda and self._agenda[0][0] <= at:
                _at, _order, to, data, link = heapq.heappop(self._agenda)
                if link == self._link and self._is_up:
                    (self._at_receiver if to == "receiver" else self._at_sender)(data)
            elif deadline is not None and deadline <= at:
                self.sender.on_deadline(at)
                self._flush()
            elif at >= until:
                return

    def settle(self, within_s: float = 3_600.0) -> None:
        """No more faults, until nothing is on its way."""
        self.loss = 0.0
        end = self.now + within_s
        while self.sender.unsettled and self.now < end:
            self.connect()
            self.run_for(6.0)
        self.run_for(6.0)
        self._check_rest()

    def _check_rest(self) -> None:
        """Everything has ended, and with the next HELLO the receiver keeps no more than a floor."""
        self.cut()
        self.connect()
        self.run_for(1.0)
        assert not self._agenda
        assert not self._stored
        assert set(self.ends) == set(self.accepted), "a message has no end"
        assert self.sender.is_settled and not self.sender.has_unsent and self.sender.next_deadline() is None
        assert not self.receiver.has_working
        assert self.receiver.dump() == (self._next_number - 1, []) and not self.receiver.dump_rejected()

    # The link

    def _flush(self) -> None:
        while self._is_up and self.sender.has_unsent:
            hello, messages = self.sender.take(self.now, 1_000)
            if hello is not None:
                self._post("receiver", encode_hello(hello), must=True)
            for message in messages:
                self._post("receiver", encode_frame(FrameType.ACK_REQUEST, message.body, req_id=message.number))

    def _post(self, to: str, data: bytes, *, must: bool = False) -> None:
        copies = 1 if must else (0 if self.rng.random() < self.loss else 1 + (self.rng.random() < self.loss / 3))
        for _ in range(copies):
            delay_s = 0.01 if must else 0.01 + self.rng.random() * (0.5 if self.loss else 0.01)
            heapq.heappush(self._agenda, (self.now + delay_s, next(self._order), to, data, self._link))

    def _at_receiver(self, data: bytes) -> None:
        [frame] = FrameDecoder(1 << 20).feed(data)
        if not frame.req_id:
            hello: Hello = decode_hello(frame)
            self.receiver.on_hello(hello)
            return
        number = frame.req_id
        self._received = max(self._received, number)
        verdict = self.receiver.begin(number)
        if verdict == "handle":
            self.handled[number] = self.handled.get(number, 0) + 1
            assert number not in self.reported_rejected, f"{number} was told as rejected, and is handled again"
            if number in self.unwanted:
                self.receiver.reject(number, "no")
            else:
                self.receiver.finish(number)
            self._unrecorded.append(number)
            self._unreported.append(number)
            if self.rng.random() < 0.3:
                return  # the record and the acknowledgement come with a later message
        else:
            # A late copy of what the sender has settled counts as handled, whatever became of it: nobody listens.
            is_settled = number <= self.receiver.floor and number in self.ends
            assert verdict == ("rejected" if number in self.unwanted and not is_settled else "handled")
            if number not in self._unreported:
                self._unreported.append(number)
        told, self._unreported = self._unreported, []
        self._unrecorded = []
        self._record = (*self.receiver.dump(), self.receiver.dump_rejected())
        rejected = [(each, "no") for each in told if each in self.unwanted]
        self.reported_rejected.update(dict.fromkeys(number for number, _why in rejected))
        taken = [each for each in told if each not in self.unwanted]
        for ack in split_ack(0 if self.loss else self._received, taken, rejected):
            self._post("sender", ack)

    def _at_sender(self, data: bytes) -> None:
        [frame] = FrameDecoder(1 << 20).feed(data)
        self.sender.on_ack(decode_ack(frame), self.now)
        self._flush()
