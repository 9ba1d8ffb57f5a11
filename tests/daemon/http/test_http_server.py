"""The HTTP server as RFC 9112 has it: each request gets its answer, and none is carried out twice."""

import re
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from starlette.types import ASGIApp, Receive, Scope, Send

from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.server import HttpServer

BODY = b"x" * 5
GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n" + BODY
CLOSING_POST = b"POST /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 5\r\n\r\n" + BODY
CHUNKED = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Application:
    """Takes the whole body, then answers 200 with path, query, host and body."""

    requests: list[str] = field(default_factory=list[str])
    """Method and path of each that was carried out."""
    cancelled: trio.Event = field(default_factory=trio.Event)
    delay_s: float = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/silent":
            return
        body = b""
        if scope["path"] != "/early":
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message["body"]
                if not message["more_body"]:
                    break
        try:
            await trio.sleep(self.delay_s)
        except trio.Cancelled:
            self.cancelled.set()
            raise
        self.requests.append(f"{scope['method']} {scope['raw_path'].decode()}")
        host = dict(scope["headers"]).get(b"host", b"")
        answer = b" ".join((scope["raw_path"], scope["query_string"], host, body))
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def connected(
    app: ASGIApp, *, tcp: bool = False, bounds: ControlBounds | None = None
) -> AsyncGenerator[trio.SocketStream, None]:
    """A client of a server that has one connection."""
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
    else:
        ours, theirs = socket.socketpair()
    server = HttpServer(bounds or ControlBounds(linger_timeout_s=0.2))
    async with trio.open_nursery() as nursery, trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as client:
        nursery.start_soon(server.handle, app, trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
        yield client
        nursery.cancel_scope.cancel()


async def everything(client: trio.SocketStream, timeout_s: float = 2) -> bytes:
    """All that the server sends until it closes."""
    received = b""
    with trio.fail_after(timeout_s):
        async for piece in client:
            received += piece
    return received


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received)]


@dataclass(frozen=True)
class Answer:
    """The statuses of the answers, and how many requests the application carried out."""

    statuses: list[int]
    carried_out: int


@dataclass(frozen=True)
class Case:
    """The bytes of one client, and their answer here, from nginx 1.22 (a proxy before aiohttp) and from aiohttp 3.

    nginx and aiohttp got them from a client that keeps its sending side open: they take its end as a hang-up. Where
    they do not agree, RFC 9112 leaves the choice, or one of them is wrong.
    """

    sent: bytes
    here: Answer
    nginx: Answer
    aiohttp: Answer


TABLE = {
    "a request": Case(GET, Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)),
    "two at once": Case(GET + POST, Answer([200, 200], 2), nginx=Answer([200, 200], 2), aiohttp=Answer([200, 200], 2)),
    "CRLF behind the body of a closing request": Case(
        CLOSING_POST + b"\r\n", Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)
    ),
    "LF behind the body of a closing request": Case(
        CLOSING_POST + b"\n", Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)
    ),
    "nonsense behind the body of a closing request": Case(
        CLOSING_POST + b"\x00nonsense", Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([400], 0)
    ),
    "a second request behind a closing one": Case(
        CLOSING_POST + POST, Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([400], 0)
    ),
    "CRLF between two requests": Case(
        POST + b"\r\n" + POST, Answer([200, 200], 2), nginx=Answer([200, 200], 2), aiohttp=Answer([200, 200], 2)
    ),
    "CRLF before the first request": Case(
        b"\r\n\r\n" + GET, Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)
    ),
    "CRLF and no more": Case(POST + b"\r\n", Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)),
    "nonsense behind a request": Case(
        POST + b"\x00nonsense", Answer([200, 400], 1), nginx=Answer([200, 400], 1), aiohttp=Answer([400], 0)
    ),
    "HTTP/1.0 with CRLF behind its body": Case(
        CLOSING_POST.replace(b"1.1", b"1.0") + b"\r\n",
        Answer([200], 1),
        nginx=Answer([200], 1),
        aiohttp=Answer([200], 1),
    ),
    "HTTP/1.0 without Host": Case(
        b"GET /a HTTP/1.0\r\n\r\n", Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)
    ),
    "HTTP/1.2 is HTTP/1.1": Case(
        GET.replace(b"1.1", b"1.2"), Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([400], 0)
    ),
    "HTTP/2.0": Case(GET.replace(b"1.1", b"2.0"), Answer([505], 0), nginx=Answer([505], 0), aiohttp=Answer([], 1)),
    "HTTP/0.9 with a version": Case(
        GET.replace(b"1.1", b"0.9"), Answer([505], 0), nginx=Answer([400], 0), aiohttp=Answer([], 1)
    ),
    "the preface of HTTP/2": Case(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Answer([505], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "http/1.1 in lower case": Case(
        GET.replace(b"HTTP", b"http"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "no Host": Case(b"GET /a HTTP/1.1\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)),
    "two Hosts": Case(
        b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        Answer([400], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "a method in lower case is another method": Case(
        GET.replace(b"GET", b"get"), Answer([200], 1), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "CONNECT": Case(
        b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n", Answer([501], 0), nginx=Answer([400], 0), aiohttp=Answer([404], 0)
    ),
    "OPTIONS of the server": Case(
        b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", Answer([200], 1), nginx=Answer([400], 0), aiohttp=Answer([404], 0)
    ),
    "* of another method": Case(
        b"GET * HTTP/1.1\r\nHost: h\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a target that is no path": Case(
        b"GET a HTTP/1.1\r\nHost: h\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "an absolute target": Case(
        b"GET http://h/a HTTP/1.1\r\nHost: h\r\n\r\n",
        Answer([200], 1),
        nginx=Answer([200], 1),
        aiohttp=Answer([200], 1),
    ),
    "an absolute target of another scheme": Case(
        b"GET ftp://h/a HTTP/1.1\r\nHost: h\r\n\r\n", Answer([400], 0), nginx=Answer([200], 1), aiohttp=Answer([200], 1)
    ),
    "an absolute target without a host": Case(
        b"GET http:///a HTTP/1.1\r\nHost: h\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "an absolute target with a user": Case(
        b"GET http://u@h/a HTTP/1.1\r\nHost: h\r\n\r\n",
        Answer([400], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([200], 1),
    ),
    "h2c is ignored": Case(
        GET.replace(b"Host: h", b"Host: h\r\nConnection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: "),
        Answer([200], 1),
        nginx=Answer([200], 1),
        aiohttp=Answer([200], 1),
    ),
    "h2c of a request with a body": Case(
        POST.replace(b"Host: h", b"Host: h\r\nConnection: upgrade\r\nUpgrade: h2c") + GET,
        Answer([200, 200], 2),
        nginx=Answer([200, 200], 2),
        aiohttp=Answer([200], 1),
    ),
    "WebSocket is ignored": Case(
        GET.replace(b"Host: h", b"Host: h\r\nConnection: Upgrade\r\nUpgrade: websocket"),
        Answer([200], 1),
        nginx=Answer([200], 1),
        aiohttp=Answer([200], 1),
    ),
    "chunks": Case(
        CHUNKED + b"2\r\nxx\r\n3;ext=1\r\nxxx\r\n0\r\n\r\n" + GET,
        Answer([200, 200], 2),
        nginx=Answer([200, 200], 2),
        aiohttp=Answer([200, 200], 2),
    ),
    "chunks with a trailer": Case(
        CHUNKED + b"5\r\nxxxxx\r\n0\r\nA: b\r\n\r\n", Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)
    ),
    "a chunk's size with 0x": Case(
        CHUNKED + b"0x5\r\nxxxxx\r\n0\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a chunk's size with a sign": Case(
        CHUNKED + b"+5\r\nxxxxx\r\n0\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a chunk's size with a separator": Case(
        CHUNKED + b"0_5\r\nxxxxx\r\n0\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "an empty chunk's size": Case(
        CHUNKED + b"\r\nxxxxx\r\n0\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a chunk longer than its size": Case(
        CHUNKED + b"4\r\nxxxxx\r\n0\r\n\r\n", Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a chunk's size that ends with LF": Case(
        CHUNKED + b"5\nxxxxx\r\n0\r\n\r\n", Answer([400], 0), nginx=Answer([200], 1), aiohttp=Answer([400], 0)
    ),
    "chunks that end early": Case(CHUNKED + b"5\r\nxxx", Answer([400], 0), nginx=Answer([], 0), aiohttp=Answer([], 0)),
    "chunked and a length": Case(
        POST.replace(b"Host: h", b"Host: h\r\nTransfer-Encoding: chunked"),
        Answer([400], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "chunked in HTTP/1.0": Case(
        CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
        Answer([400], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([200], 1),
    ),
    "chunked twice": Case(
        CHUNKED.replace(b"chunked", b"chunked, chunked") + b"0\r\n\r\n",
        Answer([501], 0),
        nginx=Answer([501], 0),
        aiohttp=Answer([400], 0),
    ),
    "another coding": Case(
        CHUNKED.replace(b"chunked", b"gzip") + b"0\r\n\r\n",
        Answer([501], 0),
        nginx=Answer([501], 0),
        aiohttp=Answer([400], 0),
    ),
    "two lengths that differ": Case(
        POST.replace(b"Host: h", b"Host: h\r\nContent-Length: 6"),
        Answer([400], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "two lengths that agree": Case(
        POST.replace(b"Host: h", b"Host: h\r\nContent-Length: 5"),
        Answer([200], 1),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "a length with a sign": Case(
        POST.replace(b": 5", b": +5"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a length that is negative": Case(
        POST.replace(b": 5", b": -5"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a length in hex": Case(
        POST.replace(b": 5", b": 0x5"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a body that ends early": Case(POST[:-1], Answer([400], 0), nginx=Answer([], 0), aiohttp=Answer([], 0)),
    "a head that ends early": Case(GET[:-2], Answer([400], 0), nginx=Answer([], 0), aiohttp=Answer([], 0)),
    "a space before a header's colon": Case(
        GET.replace(b"Host:", b"Host :"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a NUL in a header": Case(
        GET.replace(b": h", b": h\x00"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a head that is too long": Case(
        GET.replace(b": h\r\n", b": h\r\nA: " + b"x" * 70_000 + b"\r\n"),
        Answer([431], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "an answer before the body": Case(
        POST.replace(b"/a", b"/early") + GET,
        Answer([200], 1),
        nginx=Answer([200, 200], 2),
        aiohttp=Answer([200, 200], 2),
    ),
    "no answer of the application": Case(
        GET.replace(b"/a", b"/silent"), Answer([500], 0), nginx=Answer([500], 0), aiohttp=Answer([500], 0)
    ),
    "HEAD": Case(GET.replace(b"GET", b"HEAD"), Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([200], 1)),
    "Expect": Case(
        POST.replace(b"Host: h", b"Host: h\r\nExpect: 100-continue"),
        Answer([100, 200], 1),
        nginx=Answer([100, 200], 1),
        aiohttp=Answer([100, 200], 1),
    ),
    "an unknown expectation": Case(
        POST.replace(b"Host: h", b"Host: h\r\nExpect: tea"),
        Answer([200], 1),
        nginx=Answer([200], 1),
        aiohttp=Answer([417], 0),
    ),
    "Chunked with a capital": Case(
        CHUNKED.replace(b"chunked", b"Chunked") + b"0\r\n\r\n",
        Answer([200], 1),
        nginx=Answer([200], 1),
        aiohttp=Answer([200], 1),
    ),
    "a header over two lines": Case(
        GET.replace(b"Host: h", b"Host: h\r\nA: b\r\n c"),
        Answer([200], 1),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "line ends of LF alone": Case(
        GET.replace(b"\r\n", b"\n"), Answer([200], 1), nginx=Answer([200], 1), aiohttp=Answer([400], 0)
    ),
    "a length of two equal numbers": Case(
        POST.replace(b": 5", b": 5, 5"), Answer([200], 1), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a bare CR in a header": Case(
        GET.replace(b"Host: h", b"Host: h\r\nA: b\rc"),
        Answer([400], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "a target with a space": Case(
        GET.replace(b"/a", b"/a b"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a target with a control character": Case(
        GET.replace(b"/a", b"/a\x01"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "a target that is not ASCII": Case(
        GET.replace(b"/a", b"/\xc3\xa4"), Answer([400], 0), nginx=Answer([400], 0), aiohttp=Answer([400], 0)
    ),
    "bytes of TLS": Case(
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\n" * 3,
        Answer([400], 0),
        nginx=Answer([400], 0),
        aiohttp=Answer([400], 0),
    ),
    "nothing": Case(b"", Answer([], 0), nginx=Answer([], 0), aiohttp=Answer([], 0)),
}


@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
async def test_each_request_is_answered_as_rfc_9112_has_it(case: Case, in_pieces: bool) -> None:
    app, sent = Application(), case.sent
    async with connected(app) as client:
        step = max(1, len(sent) // 40) if in_pieces else len(sent) or 1
        with trio.fail_after(5):
            for start in range(0, len(sent), step):
                try:
                    await client.send_all(sent[start : start + step])
                except trio.BrokenResourceError:
                    break  # the server has answered, and took no more
                await trio.testing.wait_all_tasks_blocked()
            await client.send_eof()
        received = await everything(client)
    assert Answer(statuses(received), len(app.requests)) == case.here


async def test_an_absolute_target_gives_path_query_and_host() -> None:
    app = Application()
    async with connected(app) as client:
        await client.send_all(b"GET HTTP://right:80/p%2Fq?r=1 HTTP/1.1\r\nHost: wrong\r\nConnection: close\r\n\r\n")
        assert (await everything(client)).endswith(b"/p%2Fq r=1 right:80 ")
    async with connected(app) as client:
        await client.send_all(b"GET http://right?r=1 HTTP/1.1\r\nHost: wrong\r\nConnection: close\r\n\r\n")
        assert (await everything(client)).endswith(b"/ r=1 right ")


async def test_the_answer_to_head_has_the_length_and_no_body() -> None:
    async with connected(Application()) as client:
        await client.send_all(GET.replace(b"GET", b"HEAD"))
        await client.send_eof()
        received = await everything(client)
    assert b"content-length: 6" in received.lower()
    assert received.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("tcp", [False, True])
async def test_a_client_that_ends_its_sending_side_gets_its_answer(tcp: bool) -> None:
    app = Application(delay_s=1.5)  # longer than the watch for hang-ups takes
    async with connected(app, tcp=tcp) as client:
        await client.send_all(POST)
        await client.send_eof()
        assert statuses(await everything(client, 5)) == [200]


async def test_over_tcp_a_client_that_sends_no_more_is_taken_as_gone_after_a_time() -> None:
    app = Application(delay_s=60)
    async with connected(app, tcp=True, bounds=ControlBounds(half_close_timeout_s=0.2)) as client:
        await client.send_all(POST)
        await client.send_eof()
        with trio.fail_after(5):
            await app.cancelled.wait()


@pytest.mark.parametrize("behind", [b"", GET], ids=["alone", "with another behind it"])
async def test_a_client_that_hangs_up_cancels_its_request(behind: bytes) -> None:
    app = Application(delay_s=60)
    async with connected(app) as client:
        await client.send_all(POST + behind)
        await trio.testing.wait_all_tasks_blocked()
        await client.aclose()
        with trio.fail_after(5):
            await app.cancelled.wait()


async def test_a_client_that_hangs_up_while_its_body_waits_is_noticed() -> None:
    begun, cancelled = trio.Event(), trio.Event()

    async def stalled(_scope: Scope, _receive: Receive, _send: Send) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with connected(stalled) as client:
        await client.send_all(POST[:-1])
        with trio.fail_after(5):
            await begun.wait()
            await client.aclose()
            await cancelled.wait()


async def test_the_end_of_keep_alive_closes_idle_connections_and_says_so_in_the_present_answer() -> None:
    app = Application(delay_s=0.2)
    server = HttpServer(ControlBounds(linger_timeout_s=0.2))
    pairs = [socket.socketpair() for _ in range(2)]
    async with trio.open_nursery() as nursery:
        clients = [trio.SocketStream(trio.socket.from_stdlib_socket(ours)) for ours, _ in pairs]
        for _, theirs in pairs:
            nursery.start_soon(server.handle, app, trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
        await clients[0].send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        server.end_keep_alive()
        assert await everything(clients[1]) == b""
        answer = await everything(clients[0])
        assert statuses(answer) == [200] and b"connection: close" in answer.lower()
        with trio.fail_after(2):
            await server.wait_closed()
        for client in clients:
            await client.aclose()
