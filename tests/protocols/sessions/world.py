"""A client and a server of an ordered session in one loop: a bad network, restarts, virtual time, and what must hold.

Everything follows from a seed. Links lose, repeat and reorder frames (a real stream does not: it only ends); they
are cut at any step; either end is started anew, the server without its sessions, the client with what it had on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from dep2p.errors import AlreadyRespondedError, ProtocolError, SessionClosedError, SessionFullError
from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.server import ServerSession
from dep2p.protocols.sessions.wire import (
    AFTER,
    BEFORE,
    END,
    FAILURE,
    RESET,
    RESPONSE,
    SKIP,
    Push,
    decode_resume,
    read_reset,
)
from dep2p.protocols.wire.frame import Frame, FrameDecoder

_ID = b"0123456789abcdef"
_HELLO_TIMEOUT_S = 10.0
_FLIGHT_S = (0.001, 0.3)


@dataclass(frozen=True)
class Faults:
    """Faults of a run, as chances: of frames, and of each step."""

    loss: float = 0.3
    duplication: float = 0.1
    cut: float = 0.01
    server_restart: float = 0.002
    client_restart: float = 0.004
    token_every: int = 1
    """The client's app keeps its place after so many pushes; 1: with each one."""


class Truth:
    """The pushes of the server's app, by epoch, and the requests that it got."""

    def __init__(self) -> None:
        self.pushed: dict[int, list[tuple[int, int, bytes]]] = {}
        """epoch -> (kind, request id, data) of each number, from 1 on."""
        self.requests: dict[int, list[bytes]] = {}
        self.request_ids: dict[int, list[int]] = {}


@dataclass
class Seen:
    """The events that the client's app has seen, across its restarts."""

    events: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    """("push", epoch, seq), ("reset", epoch, next seq), ("restart", epoch, seq of the token)."""
    data: dict[tuple[int, int], tuple[int, int, bytes]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int, bytes]]
    )


class World:
    """One run."""

    def __init__(self, seed: int, faults: Faults, options: SessionOptions) -> None:
        self.rng = Random(seed)
        self.faults = faults
        self.options = options
        self.now = 0.0
        self.truth = Truth()
        self.seen = Seen()
        self.violations: list[str] = []
        self.failures = 0
        self.cuts = 0
        self.quiet = False
        self.answers = 0
        self._payload = 0
        self.server: ServerSession | None = None
        self.token: tuple[int, int] = (0, 0)
        self._since_token = 0
        self._app_epoch = 0
        self._knows_ids = False
        self.client = self._new_client()
        self.link = 0
        """Counts links; frames of an earlier one go nowhere."""
        self._greeted = self._answered = False
        self._hello_at = 0.0
        self._flying: list[tuple[float, int, int, str, Frame]] = []
        self._order = 0
        self._stop_step = -1
        self._stop: Callable[[], None] = self.cut

    def _new_client(self) -> ClientSession:
        epoch, handled = self.token
        return ClientSession(_ID, "sim", self.options, epoch=epoch, handled=handled)

    # The network

    def _send(self, to: str, pieces: list[bytes]) -> None:
        frames = FrameDecoder(1 << 24).feed(b"".join(pieces))
        for frame in frames:
            first = frame.type == 0x32
            for _ in range(1 if self.quiet else self._copies(first)):
                delay_s = 0.0 if first else self.rng.uniform(*_FLIGHT_S)
                self._order += 1
                self._flying.append((self.now + delay_s, self._order, self.link, to, frame))

    def _copies(self, first: bool) -> int:
        if self.rng.random() < self.faults.loss:
            return 0
        return 2 if not first and self.rng.random() < self.faults.duplication else 1

    def cut(self) -> None:
        """The link is gone, with all that flies."""
        self.cuts += 1
        self.link += 1
        self._flying.clear()
        self._greeted = False
        self.client.detach()
        if self.server is not None and self.server.is_attached:
            self.server.detach(self.now)

    def _connect(self) -> None:
        if self.client.is_attached or self.client.ended or not self.client.may_attach:
            return
        self.link += 1
        self._greeted = False
        self._hello_at = self.now
        self._send("server", [self.client.attach(self.now)])

    def _deliver(self) -> None:
        due = sorted(each for each in self._flying if each[0] <= self.now)
        for each in due:
            if each in self._flying:
                self._flying.remove(each)
                if each[2] == self.link:
                    self._arrive(each[3], each[4])

    def _arrive(self, to: str, frame: Frame) -> None:
        try:
            if to == "client":
                self.client.handle([frame], self.now)
                self.client.lost_requests.clear()
                if self.client.is_open:
                    self._knows_ids = True
                    if not self._app_epoch and not self.client.receiver.stale:
                        self._app_epoch = self.client.epoch
            elif frame.type == 0x32 and not self._greeted:
                self._greet(frame)
            elif self._greeted and self.server is not None:
                before = self.server.sender.last_seq
                self.server.handle([frame], self.now)
                self._note(before)
                self._take_requests()
        except ProtocolError as error:
            self.violations.append(f"{to}: {error}")
            self.cut()

    def _greet(self, frame: Frame) -> None:
        self._greeted = True
        resume = decode_resume(frame.payload)
        if self.server is None or self.server.closed is not None:
            epoch = self.rng.getrandbits(48) | 1
            self.server = ServerSession(_ID, "sim", epoch, self.options, self.now)
            self.truth.pushed[epoch] = []
            self.truth.requests[epoch] = []
        if self.server.is_attached:
            self.server.detach(self.now)
        self.server.attach(resume, self.now)

    def _take_requests(self) -> None:
        server = self.server
        assert server is not None
        while server.requests:
            asked = server.requests.popleft()
            ids = self.truth.request_ids.setdefault(server.epoch, [0])
            assert asked.request_id > ids[-1], "a request is taken twice or out of order"
            ids.append(asked.request_id)
            self.truth.requests[server.epoch].append(asked.data)

    # The apps

    def _next(self) -> bytes:
        self._payload += 1
        return b"%d " % self._payload + bytes(self.rng.randrange(40))

    def _note(self, before: int) -> None:
        """Record what the server's sender was given since."""
        server = self.server
        assert server is not None
        # Everything appended is in the log, in order, as encoded.
        log = self.truth.pushed[server.epoch]
        sender = server.sender
        for seq in range(before + 1, sender.last_seq + 1):
            item = sender._log[seq - sender.handled - 1]  # pyright: ignore[reportPrivateUsage]
            log.append((item[0], int.from_bytes(item[1:5], "big"), item[9:]))
            assert len(log) == seq

    def _serve(self) -> None:
        server = self.server
        if server is None or server.closed is not None:
            return
        before = server.sender.last_seq
        bindings = server.bindings
        choice = self.rng.random()
        try:
            if choice < 0.6:
                for _ in range(self.rng.randint(1, 5)):
                    server.push(self._next())
            elif choice < 0.75:
                kind = self.rng.choice((BEFORE, AFTER))
                server.bind(kind, max(1, bindings.taken + self.rng.randint(-1, 2)), self._next(), self.now)
            elif bindings.open_requests:
                request_id = self.rng.choice(bindings.open_ids())
                if choice < 0.95:
                    server.respond(request_id, RESPONSE, self._next())
                else:
                    server.respond(request_id, FAILURE, b"\0\0\0\3no")
                self.answers += 1
        except (AlreadyRespondedError, SessionFullError, SessionClosedError):
            pass
        self._note(before)

    def _app(self) -> None:
        """The client's app takes one push, handles it, and keeps its place."""
        client = self.client
        push = client.take()
        if push is None:
            client.idle()
            return
        self._handle(push)

    def _handle(self, push: Push) -> None:
        if push.kind == RESET:
            self._app_epoch, next_seq, _reason = read_reset(push)
            self.seen.events.append(("reset", self._app_epoch, next_seq))
            self.token = (self._app_epoch, next_seq - 1)
            return
        epoch = self._app_epoch
        if push.kind in (RESPONSE, FAILURE):
            self.client.answered(push.request_id)
        self.seen.events.append(("push", epoch, push.seq))
        assert (epoch, push.seq) not in self.seen.data or self.faults.token_every > 1, f"{push.seq} is handled twice"
        self.seen.data[(epoch, push.seq)] = (push.kind, push.request_id, push.body)
        self._since_token += 1
        if self._since_token >= self.faults.token_every:
            self._since_token = 0
            self.token = (epoch, push.seq)

    def _ask(self) -> None:
        client = self.client
        # Before the first answer, the ids that an earlier process used are not known.
        if self._knows_ids and client.requests_open < 20 and not client.ended:
            request_id = client.ask(self._next(), 600_000)
            if self.rng.random() < 0.1:
                client.give_up(request_id)  # before it was sent
            elif self.rng.random() < 0.1:
                client.give_up(self.rng.randint(1, request_id))

    # Time

    def _tick(self) -> None:
        self._deliver()
        server, client = self.server, self.client
        deadline = client.next_deadline()
        if deadline is not None and deadline <= self.now:
            client.on_deadline(self.now)
        if server is not None and server.closed is None:
            deadline = server.next_deadline()
            if deadline is not None and deadline <= self.now:
                before = server.sender.last_seq
                server.on_deadline(self.now)
                self._note(before)
                if server.closed is not None:
                    self.failures += 1
                    self.cut()
        if client.is_attached and not client.is_open and self.now - self._hello_at > _HELLO_TIMEOUT_S:
            self.cut()
        if not client.is_attached:
            self._connect()
        self._write()
        self._bounds()

    def _write(self) -> None:
        if self.server is not None and self.server.is_attached and self._greeted:
            self._send("client", self.server.collect(100_000, self.now))
        if self.client.is_open:
            self._send("server", self.client.collect(100_000, self.now))

    def _bounds(self) -> None:
        options, receiver = self.options, self.client.receiver
        if self.server is not None:
            sender = self.server.sender
            assert sender.unhandled <= 2 * options.items_max
            assert sender.kept_bytes <= 2 * options.bytes_max + 1_000
        assert receiver.received - receiver.handled <= 2 * options.items_max

    def stop_at(self, step: int, end: str) -> None:
        """Cut the "link", or restart the "client" or "server", before this step."""
        self._stop_step = step
        self._stop = {"link": self.cut, "client": self._restart_client, "server": self._restart_server}[end]

    def run(self, steps: int) -> None:
        """So many steps with faults, then quiet until everything has arrived."""
        rng, faults = self.rng, self.faults
        actions: list[tuple[float, Callable[[], None]]] = [
            (faults.cut, self.cut),
            (faults.server_restart, self._restart_server),
            (faults.client_restart, self._restart_client),
        ]
        for step in range(steps):
            if step == self._stop_step:
                self._stop()
            self.now += rng.expovariate(1 / 0.2) if rng.random() < 0.95 else rng.uniform(0, 20)
            for chance, action in actions:
                if rng.random() < chance:
                    action()
            choice = rng.random()
            if choice < 0.4:
                self._serve()
            elif choice < 0.5:
                self._ask()
            else:
                self._app()
            self._tick()
        self._calm_down()
        self.check()

    def _restart_server(self) -> None:
        self.cut()
        self.server = None

    def _restart_client(self) -> None:
        self.cut()
        self.seen.events.append(("restart", *self.token))
        self._since_token = 0
        self._app_epoch = self.token[0]
        self._knows_ids = False
        self.client = self._new_client()

    def _calm_down(self) -> None:
        self.quiet = True
        for _ in range(2_000):
            self.now += 1.0
            self._tick()
            while self.client.receiver.queue:
                self._app()
            self.client.done()
            self.client.idle()
            server = self.server
            if (
                server is not None
                and server.closed is None
                and server.is_attached
                and self.client.is_open
                and not self.client.receiver.queue
                and server.sender.handled == server.sender.last_seq
                and not server.sender.unsent
                and server.bindings.taken == self.client.next_request_id - 1
            ):
                return
        raise AssertionError(f"it does not settle: {self.server and self.server.stats()} {self.client.stats()}")

    # What must hold

    def check(self) -> None:
        """Strict order, each once, nothing missing without a reset, responses in one run, bounded."""
        epoch, seq = 0, 0
        for kind, its_epoch, its_seq in self.seen.events:
            if kind == "push":
                if its_epoch != epoch:
                    assert epoch == 0 and its_seq == 1, f"epoch {its_epoch} begins at {its_seq} without a reset"
                    epoch, seq = its_epoch, 0
                assert its_seq == seq + 1, f"{its_seq} comes after {seq}"
                seq = its_seq
            elif kind == "reset":
                epoch, seq = its_epoch, its_seq - 1
            else:
                if self.faults.token_every == 1:
                    assert (its_epoch, its_seq) == (epoch, seq) or not its_epoch
                epoch, seq = its_epoch, its_seq
        for (its_epoch, its_seq), item in self.seen.data.items():
            assert self.truth.pushed[its_epoch][its_seq - 1] == item, f"number {its_seq} has another content"
        assert self.server is not None
        assert (self.server.epoch, self.server.sender.last_seq) == (epoch, seq) or self.server.sender.last_seq == 0
        for log in self.truth.pushed.values():
            _check_runs(log)
        for request_id in self.client.asked_ids():
            assert self.server.bindings.is_open(request_id), f"request {request_id} is lost"
        taken = [data for requests in self.truth.requests.values() for data in requests]
        assert len(taken) == len(set(taken)), "a request is handled twice"


def _check_runs(log: list[tuple[int, int, bytes]]) -> None:
    """(before*, response, after*) of a request are one run; an after that stands elsewhere comes later."""
    place = {request_id: at for at, (kind, request_id, _data) in enumerate(log) if kind in (RESPONSE, FAILURE)}
    responses = [request_id for kind, request_id, _data in log if kind in (RESPONSE, FAILURE)]
    assert len(responses) == len(set(responses)), "a request is answered twice"
    for at, (kind, request_id, _data) in enumerate(log):
        if kind == BEFORE:
            between = log[at : place[request_id]]
            assert all(each[0] == BEFORE and each[1] == request_id for each in between), "a run is torn"
        elif kind == AFTER:
            assert place.get(request_id, -1) < at, "what goes after a response came before it"
        else:
            assert kind not in (END, SKIP, RESET)
