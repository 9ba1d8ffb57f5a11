"""A fake daemon for the command line: the client's verbs, answered from what a test put in."""

import contextlib
import io
import json
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from dep2p.cli import main
from dep2p.cli.framework.command import Invocation
from dep2p.client import ControlError, DaemonUnreachableError, IncomingRequest, Lagged, Notification, Request
from dep2p.control_api.calls import base64_text
from dep2p.control_api.encoding import fields_of
from dep2p.control_api.replies import (
    ConnectedPeer,
    DaemonStatus,
    MemberList,
    MemberSummary,
    PeerList,
    PeerSummary,
    RealmList,
    RealmSummary,
    StoreOwnershipSummary,
    TopicList,
    TopicPeers,
    TopicSummary,
    parse_reply,
)
from dep2p.errors import Dep2pError, StreamClosedError
from dep2p.realm.credentials import Realm
from dep2p.types import PeerId, RealmId

OWN = "12D3KooWGjMCwWMRvRNTxVVjyPGHTBm7bNJYGVfBWvmm6e3BHown"
ANN = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"
BOB = "12D3KooWLbtq3zyR1sr5LJrvc5rVBsqXLSRPVG3tMQ8g4PPcNaM8"
REALM_ID = RealmId("3f" * 32)


@dataclass
class Outcome:
    """The output and exit code of a run of the command line."""

    code: int
    out_bytes: bytes
    err: str

    @property
    def out(self) -> str:
        return self.out_bytes.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def problem(self) -> Any:
        return json.loads(self.err)


class FakeStream:
    """One end of an in-memory stream. ``break_after`` items sent, the stream breaks."""

    def __init__(self, peer: str, name: str) -> None:
        self.peer = PeerId(peer)
        self.name = name
        self.body = b""
        self.other: FakeStream
        self.break_after: int | None = None
        self.sent = 0
        self.broken = False
        self.eof_sent = False
        self._queue: deque[bytes] = deque()
        """Sent and not yet taken by the other end."""
        self._changed = anyio.Event()

    @property
    def sent_bytes(self) -> int:
        """Changes as items go on: here, as the other end takes them."""
        return self.sent - len(self._queue)

    def _tell(self) -> None:
        for end in (self, self.other):
            end._changed.set()
            end._changed = anyio.Event()

    async def send(self, item: bytes) -> None:
        if self.break_after is not None and self.sent >= self.break_after:
            self.reset()
        while len(self._queue) >= 8 and not self.broken:
            await self._changed.wait()
        if self.broken or self.eof_sent:
            raise StreamClosedError("the stream was reset")
        self._queue.append(item)
        self.sent += 1
        self._tell()
        await anyio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        self.eof_sent = True
        self._tell()

    def reset(self) -> None:
        self.broken = self.other.broken = True
        self._tell()

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> bytes:
        while not self.other._queue:
            if self.broken:
                raise StreamClosedError("the peer reset the stream")
            if self.other.eof_sent:
                raise StopAsyncIteration
            await self._changed.wait()
        item = self.other._queue.popleft()
        self._tell()
        return item

    async def aclose(self) -> None:
        if not self.eof_sent or not self.other.eof_sent:
            self.reset()

    async def __aenter__(self) -> "FakeStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def stream_pair(sender: str, receiver: str, name: str) -> tuple[FakeStream, FakeStream]:
    """The sender's end and the receiver's."""
    mine, theirs = FakeStream(receiver, name), FakeStream(sender, name)
    mine.other, theirs.other = theirs, mine
    return mine, theirs


_STATUS: dict[str, Any] = {
    "pid": 1,
    "started_at_s": 0.0,
    "data_dir": "/x",
    "subscriptions": {},
    "in_flight": 0,
    "queues": fields_of(StoreOwnershipSummary(shared=False, role="owner", store="memory")) | {"nodes": []},
    "nsq": None,
    "messaging": {},
    "pubsub": {},
    "public_pubsub": [],
    "counters": {},
}
"""The fields of a status that few tests look at."""
_MEMBER: dict[str, Any] = {"seq": 1, "issued_s": 0.0, "last_seen_s": None}


@dataclass
class FakeClient:
    """The client's verbs. ``calls`` records them; what they return is set by the test."""

    calls: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    answers: dict[str, Any] = field(default_factory=dict[str, Any])
    """Return value, exception or function by the verb's name."""
    incoming: list[Any] = field(default_factory=list[Any])
    """Items that listen(), reply(), accept() or events() yields, then the iteration ends."""
    outgoing_streams: list[FakeStream] = field(default_factory=list["FakeStream"])
    replies: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])

    def _answer(self, verb: str, *arguments: Any) -> Any:
        self.calls.append((verb, arguments))
        found = self.answers[verb]
        if isinstance(found, BaseException):
            raise found
        return found(*arguments) if callable(found) else found

    async def status(self) -> DaemonStatus:
        status = _STATUS | self._answer("status")
        return parse_reply(status | {"queues": _STATUS["queues"] | status["queues"]}, DaemonStatus)

    async def peers(self) -> tuple[PeerSummary, ...]:
        return parse_reply({"peers": self._answer("peers")}, PeerList).peers

    async def realms(self) -> tuple[RealmSummary, ...]:
        realms = [{"members_known": 0, "members_up": 0} | each for each in self._answer("realms")]
        return parse_reply({"realms": realms}, RealmList).realms

    async def ready(self) -> Any:
        return self._answer("ready")

    async def shutdown(self) -> None:
        self._answer("shutdown")

    async def members(self, realm: str) -> tuple[MemberSummary, ...]:
        members = [_MEMBER | each for each in self._answer("members", realm)]
        return parse_reply({"realm": realm, "members": members}, MemberList).members

    async def fields(self, *, realm: str | None = None) -> Any:
        return self._answer("fields", realm) if "fields" in self.answers else {}

    async def set_fields(self, fields: Any, *, realm: str | None = None) -> Any:
        return self._answer("set_fields", fields, realm)

    def watch_members(self, *, realm: str | None = None) -> Any:
        return self._subscription("watch_members", realm)

    async def invite(self, realm: str, addrs: Any = ()) -> Any:
        return self._answer("invite", realm, list(addrs))

    async def join_realm(self, realm: Realm, addrs: Any = ()) -> Any:
        return self._answer("join_realm", realm, list(addrs))

    async def leave_realm(self, realm: str) -> None:
        self._answer("leave_realm", realm)

    async def connect(self, addr: str, *, timeout_s: float | None = None) -> ConnectedPeer:
        return parse_reply({"direction": "outbound"} | self._answer("connect", addr, timeout_s), ConnectedPeer)

    async def disconnect(self, peer: str) -> Any:
        return self._answer("disconnect", peer)

    async def ping(self, peer: str, *, timeout_s: float = 5.0) -> Any:
        return self._answer("ping", peer, timeout_s)

    async def request(self, peer: str, name: str, data: bytes, **options: Any) -> Any:
        return self._answer("request", peer, name, data, options)

    async def broadcast_request(self, name: str, data: bytes, **options: Any) -> Any:
        return self._answer("broadcast_request", name, data, options)

    async def notify(self, peer: str, name: str, data: bytes, **options: Any) -> Any:
        return self._answer("notify", peer, name, data, options)

    async def broadcast_notify(self, name: str, data: bytes, **options: Any) -> Any:
        return self._answer("broadcast_notify", name, data, options)

    @asynccontextmanager
    async def _subscription(self, verb: str, *arguments: Any) -> AsyncGenerator[AsyncIterator[Any], None]:
        self.calls.append((verb, arguments))

        async def entries() -> AsyncIterator[Any]:
            for entry in self.incoming:
                if isinstance(entry, BaseException):
                    raise entry
                yield entry

        yield entries()

    def listen(self, name: str, *, realm: str | None = None) -> Any:
        return self._subscription("listen", name, realm)

    async def publish(self, topic: str, data: bytes, **options: Any) -> Any:
        return self._answer("publish", topic, data, options)

    async def publish_from(self, topic: str, messages: AsyncIterator[bytes], **options: Any) -> Any:
        return self._answer("publish_from", topic, [message async for message in messages], options)

    async def topics(self) -> tuple[TopicSummary, ...]:
        return parse_reply({"topics": self._answer("topics")}, TopicList).topics

    async def topic_peers(self, name: str, **options: Any) -> TopicPeers:
        return parse_reply(self._answer("topic_peers", name, options), TopicPeers)

    def subscribe(self, topic: str, **options: Any) -> Any:
        return self._subscription("subscribe", topic, options)

    def reply(self, name: str, *, realm: str | None = None, concurrency: int = 64, **_service: Any) -> Any:
        return self._subscription("reply", name, realm, concurrency)

    def accept(self, name: str, *, realm: str | None = None) -> Any:
        return self._subscription("accept", name, realm)

    def events(self, types: Any = ()) -> Any:
        return self._subscription("events", list(types))

    def stream(self, peer: str, name: str, data: bytes = b"", *, realm: str | None = None) -> Any:
        self.calls.append(("stream", (peer, name)))
        return self.outgoing_streams.pop(0)

    def incoming_request(self, data: bytes, number: int = 1, deadline_ms: int = 30_000) -> IncomingRequest:
        """A request whose answer lands in ``replies``."""

        async def respond(body: bytes, error: str | None) -> None:
            given: dict[str, object] = (
                {"error": error} if error is not None else {"data": base64_text(body), "encoding": "base64"}
            )
            self.replies[str(number)] = given

        deadline_s = time.monotonic() + deadline_ms / 1000
        request = Request(PeerId(ANN), "greet", data, {"lang": "en"}, deadline_s, False, REALM_ID)
        return IncomingRequest(request, respond)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A daemon in one realm with two other members, of whom one is connected."""
    client = FakeClient()
    client.answers = {
        "status": {
            **_STATUS,
            "peer_id": OWN,
            "version": "0.1.0",
            "uptime_s": 8_040.0,
            "listen": [f"/ip4/127.0.0.1/tcp/4001/p2p/{OWN}"],
            "peers": 1,
            "connections": {"inbound": 0, "outbound": 1},
            "streams": 0,
            "problems": [],
            "quotas": [],
            "limited": [],
            "realms": [{"name": "team", "realm_id": REALM_ID, "members_known": 3, "members_up": 2, "problems": []}],
            "state": "running",
        },
        "peers": [
            {
                "peer": ANN,
                "connections": [
                    {
                        "id": 1,
                        "direction": "outbound",
                        "addr": "/ip4/127.0.0.1/tcp/4002",
                        "age_s": 61,
                        "rtt_ms": 1.25,
                        "circuit": None,
                    }
                ],
                "addrs": [],
                "realms": ["team"],
            }
        ],
        "realms": [{"name": "team", "realm_id": REALM_ID, "members_known": 3, "members_up": 2, "problems": []}],
        "members": [
            {"peer": OWN, "addrs": [], "state": "up", "expires_s": 1_800_000_000},
            {"peer": ANN, "addrs": ["/ip4/127.0.0.1/tcp/4002"], "state": "up", "expires_s": 1_800_000_000},
            {"peer": BOB, "addrs": [], "state": "down", "expires_s": 1_800_000_000},
        ],
        "ready": (True, []),
    }

    @asynccontextmanager
    async def opened(self: Invocation) -> AsyncGenerator[FakeClient, None]:
        yield client

    monkeypatch.setattr(Invocation, "client", opened)
    return client


@pytest.fixture
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call finds no daemon."""

    @asynccontextmanager
    async def opened(self: Invocation) -> AsyncGenerator[FakeClient, None]:
        raise DaemonUnreachableError("cannot reach the daemon at /x/control.sock: no such socket")
        yield FakeClient()

    monkeypatch.setattr(Invocation, "client", opened)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory that the environment names; nothing else of the environment counts."""
    for name in ("DEP2P_SOCKET", "DEP2P_CONTEXT", "DEP2P_CONFIG", "NO_COLOR", "DEP2P_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    data_dir = tmp_path / "data"
    monkeypatch.setenv("DEP2P_DATA_DIR", str(data_dir))
    return data_dir


@pytest.fixture
def cli(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run the command line in this process; ``stdin`` are the bytes of standard input."""

    def call(*args: str, stdin: bytes | None = None) -> Outcome:
        out, err = io.BytesIO(), io.BytesIO()
        text_in = io.TextIOWrapper(io.BytesIO(stdin or b""))
        text_out, text_err = io.TextIOWrapper(out, "utf-8"), io.TextIOWrapper(err, "utf-8")
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(text_out))
            stack.enter_context(contextlib.redirect_stderr(text_err))
            stack.callback(setattr, sys, "stdin", sys.stdin)
            sys.stdin = text_in
            code = main.run(list(args))
            text_out.flush()
            text_err.flush()
        return Outcome(code, out.getvalue(), err.getvalue().decode())

    return call


@pytest.fixture
def notifications() -> Iterator[list[Any]]:
    """Three entries of a notify subscription, one of them a lag."""
    yield [
        Notification(PeerId(ANN), "news", b"lunch is ready", {"kind": "food"}, REALM_ID),
        Lagged(17),
        Notification(PeerId(BOB), "news", b"\xff\x00", {}, REALM_ID),
    ]


@pytest.fixture
def refused() -> Dep2pError:
    """The daemon's error when a name is taken."""
    return ControlError({"code": "D5012", "status": 409, "detail": "another program answers to 'greet'"})


@pytest.fixture
def pair() -> Callable[..., tuple[FakeStream, FakeStream]]:
    """Makes the two ends of an in-memory stream: (sender, receiver, name)."""
    return stream_pair
