"""The asking and the answering side of a link against a naive model."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dep2p.errors import (
    OverloadedError,
    RequestTimeoutError,
)
from dep2p.limits import Limits
from dep2p.protocols.messaging.admission import PeerLoad
from dep2p.protocols.messaging.request import Abandon, Begin, Job, Requester, SendAnswer
from dep2p.protocols.wire.frame import (
    REQ_ID_MAX,
    Frame,
    FrameType,
)
from dep2p.protocols.wire.payload import PayloadReader
from tests.protocols.messaging.request_frames import one_frame, request_frame, responder, response


class Link(RuleBasedStateMachine):
    """Requester and responder joined by two queues of frames; a dict of who waits is the model."""

    calls = Bundle("calls")
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(handlers_per_peer_max=4, message_bytes_max=100)
        self.now = 0.0
        self.load = PeerLoad(limits)
        self.asking: Requester[int] = Requester(PayloadReader(limits, None), in_flight_max=99, last_id=REQ_ID_MAX - 3)
        self.answering = responder(limits, self.load)
        self.to_server: list[Frame] = []
        self.to_client: list[Frame] = []
        self.waiting: dict[int, tuple[int, float]] = {}  # call -> (req_id, deadline)
        self.running: dict[int, Job] = {}
        self.calls_made = 0
        self.answered: dict[int, object] = {}

    @rule(target=calls, timeout_ms=st.integers(1, 50))
    def ask(self, timeout_ms: int) -> int:
        self.calls_made += 1
        call = self.calls_made
        deadline = self.now + timeout_ms / 1000
        req_id = self.asking.start(call, deadline)
        assert req_id and req_id not in [used for used, _ in self.waiting.values()]
        self.waiting[call] = (req_id, deadline)
        self.to_server.append(request_frame(req_id, body=str(call).encode(), timeout_ms=timeout_ms))
        return call

    @rule(call=consumes(calls))
    def give_up(self, call: int) -> None:
        entry = self.waiting.pop(call, None)
        if entry is not None:
            assert self.asking.give_up(entry[0])
            self.to_server.append(Frame(FrameType.CANCEL, 0, entry[0], b""))

    @rule(count=st.integers(1, 5))
    def deliver_to_server(self, count: int) -> None:
        frames, self.to_server = self.to_server[:count], self.to_server[count:]
        self._effects(self.answering.handle(frames, self.now))
        assert self.answering.violation is None

    @rule(count=st.integers(1, 5))
    def deliver_to_client(self, count: int) -> None:
        frames, self.to_client = self.to_client[:count], self.to_client[count:]
        for call, answer in self.asking.handle(frames, self.now):
            assert call in self.waiting
            del self.waiting[call]
            assert call not in self.answered
            self.answered[call] = answer
            if isinstance(answer, bytes):
                assert answer == str(call).encode()
            else:
                assert isinstance(answer, (OverloadedError, RequestTimeoutError))
        assert self.asking.violation is None

    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        if self.running:
            call = data.draw(st.sampled_from(list(self.running)))
            job = self.running.pop(call)
            if self.answering.finish(job):
                self.to_client.append(response(job.req_id, job.data))

    @rule(ms=st.integers(1, 30))
    def time_passes(self, ms: int) -> None:
        self.now += ms / 1000
        expired = [call for _, call in self.asking.on_deadline(self.now)]
        assert sorted(expired) == sorted(call for call, (_, at) in self.waiting.items() if at <= self.now)
        for call in expired:
            req_id, _ = self.waiting.pop(call)
            self.to_server.append(Frame(FrameType.CANCEL, 0, req_id, b""))
        self._effects(self.answering.on_deadline(self.now))

    def _effects(self, effects: list[Begin | Abandon | SendAnswer]) -> None:
        for effect in effects:
            match effect:
                case Begin(job):
                    call = int(job.data)
                    assert call not in self.running
                    self.running[call] = job
                case SendAnswer(frame):
                    self.to_client.append(one_frame(frame))
                case Abandon(job):
                    assert self.running[int(job.data)] is job

    @invariant()
    def counts_agree(self) -> None:
        assert self.asking.in_flight == len(self.waiting)
        assert self.load.jobs == len(self.running) <= 4
        assert self.answering.in_flight <= len(self.running)
        deadline = self.asking.next_deadline()
        assert (deadline is None) == (not self.waiting)
        assert deadline is None or deadline <= min(at for _, at in self.waiting.values())


Link.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLinkAgainstModel = Link.TestCase
