"""The daemon's client, under asyncio and trio, against a control API over a fake node."""

import base64
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
import trio

from dep2p.client import (
    Client,
    ControlError,
    DaemonUnreachableError,
    Event,
    Lagged,
    Notification,
    code_of,
)
from dep2p.client.transport import Transport
from dep2p.control_api.errors import error_from_problem
from dep2p.daemon.bounds import ControlBounds
from dep2p.errors import (
    Dep2pError,
    HandlerError,
    MessageTooLargeError,
    NoHandlerError,
    NotInRealmError,
    NotMemberError,
    OverloadedError,
    PeerNotFoundError,
    ProtocolError,
    RateLimitedError,
    RemoteError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import PeerConnected
from dep2p.realm.credentials import Realm
from dep2p.types import PeerId
from tests.daemon.api.fake_node import ADDR, ANN, BOB, ME, STRANGER, FakeConnection, FakeStream, Message
from tests.daemon.api.harness import TOKEN, Served, serving

Run = Callable[[Callable[[Client], Awaitable[None]]], None]


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as started:
        yield started


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest, served: Served) -> Run:
    """Runs a test's body with a client, in an event loop of each kind."""

    def runner(body: Callable[[Client], Awaitable[None]]) -> None:
        async def main() -> None:
            with anyio.fail_after(20):
                async with Client.open(served.socket) as client:
                    await body(client)

        anyio.run(main, backend=request.param)

    return runner


async def in_api(served: Served, function: Callable[..., object], *args: object) -> None:
    """Call something in the API's thread without blocking this loop."""
    await anyio.to_thread.run_sync(lambda: served.do(function, *args))


def test_calls_about_the_daemon(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        assert (await client.status()).peer_id == served.node.peer_id
        assert (await client.config()).origins["node.data_dir"] == "flag"
        assert (await client.bounds()).node["realms_max"] == 16
        assert "dep2p_uptime_seconds" in await client.metrics()
        assert await client.healthy()
        assert await client.ready() == (True, [])
        await client.drain()
        assert await client.ready() == (False, ["the daemon is draining"])
        await client.shutdown()
        assert served.control.lifecycle.stop_requested.is_set()

    run(body)


def test_peers(run: Run) -> None:
    async def body(client: Client) -> None:
        assert (await client.connect(ADDR)).realms == ("team",)
        assert [peer.peer for peer in await client.peers()] == [ANN]
        assert await client.ping(ANN, timeout_s=1.0) == 0.002
        with pytest.raises(RequestTimeoutError):
            await client.ping(BOB)
        assert await client.disconnect(ANN)
        assert not await client.disconnect(ANN)
        with pytest.raises(PeerNotFoundError, match="connection refused"):
            await client.connect(ADDR.replace(ANN, STRANGER))
        assert (await client.peer_id(), await client.listen_addrs()) == (ME, [f"/ip4/127.0.0.1/tcp/4001/p2p/{ME}"])

    run(body)


def test_realms(run: Run) -> None:
    realm = Realm.generate("second")

    async def body(client: Client) -> None:
        assert len(await client.members()) == 4  # of the only realm
        assert (await client.join_realm(realm)).realm_id == realm.realm_id
        assert (await client.join_realm(realm, [ADDR])).name == "second"
        assert [each.name for each in await client.realms()] == ["team", "second"]
        assert len(await client.members(realm)) == 4
        assert Realm.from_invite(await client.invite("second")).realm == realm
        with pytest.raises(NotInRealmError, match="2 realms"):
            await client.members()
        await client.leave_realm(realm)
        with pytest.raises(NotInRealmError):
            await client.members("second")

    run(body)


def test_request_notify_and_broadcast(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        assert await client.request(ANN, "x", b"\x00\xffabc") == b"cba\xff\x00"
        assert await client.request(ANN, "headers", b"", headers={"h": b"\x01", "n": [1, "a"]}) == (
            b"[('h', b'\\x01'), ('n', [1, 'a'])]"
        )
        everyone = await client.broadcast_request("x", b"ab")
        assert everyone[ANN] == b"ba"
        assert isinstance(everyone[BOB], RequestTimeoutError)
        assert list(await client.broadcast_request("x", b"ab", peers=[ANN], concurrency=2)) == [ANN]
        await client.notify(ANN, "seen", b"42", headers={"a": True})
        assert served.node.messaging().notified == [(ANN, "seen", b"42", {"a": True})]
        told = await client.broadcast_notify("seen", b"43")
        assert told[ANN] is None
        assert isinstance(told[BOB], OverloadedError)

    run(body)


@pytest.mark.parametrize(
    ("peer", "name", "expected"),
    [
        (ANN, "timeout", RequestTimeoutError),
        (ANN, "handler", HandlerError),
        (ANN, "no-handler", NoHandlerError),
        (ANN, "too-large", MessageTooLargeError),
        (ANN, "overloaded", OverloadedError),
        (ANN, "protocol", ProtocolError),
        (ANN, "remote", RemoteError),
        (ANN, "closed", StreamClosedError),
        (STRANGER, "x", NotMemberError),
    ],
)
def test_failures_are_the_librarys_own(run: Run, peer: PeerId, name: str, expected: type[Dep2pError]) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(expected) as failed:
            await client.request(peer, name, b"x")
        assert type(failed.value) is expected
        with pytest.raises(RateLimitedError) as limited:
            await client.request(ANN, "rate", b"x")
        assert limited.value.retry_after_ms == 250
        with pytest.raises(ControlError) as bug:
            await client.request(ANN, "bug", b"x")
        assert bug.value.code == "D9001"

    run(body)


@pytest.mark.parametrize("size", [1_048_577, 1_048_578, 1_048_579, 2_000_000, 5_000_000])
def test_a_payload_that_is_too_large_is_measured_as_its_own_bytes(run: Run, size: int) -> None:
    async def body(client: Client) -> None:
        for call in (
            client.send(ANN, "x", bytes(size)),
            client.request(ANN, "x", bytes(size)),
            client.publish("t", bytes(size)),
            client.publish("t", b"a" * size),
        ):
            with pytest.raises(MessageTooLargeError) as refused:
                await call
            said = str(refused.value)
            assert f"the data has {size} bytes" in said and "1048576" in said, said

    run(body)


def test_listen(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        async with client.listen("seen") as notifications:
            handler = served.node.messaging().notifies["seen"]
            for number in range(3):
                message = Message("seen", b"%d" % number, BOB, {"h": b"x"})
                await anyio.to_thread.run_sync(served.call, handler, message)
            received = [await anext(notifications) for _ in range(3)]
        last = received[2]
        assert isinstance(last, Notification) and last.received_at_s > 1_700_000_000
        realm_id = served.node.realm(None).realm_id
        assert (last.peer, last.body, last.headers, last.realm) == (BOB, b"2", {"h": b"x"}, realm_id)

    run(body)


@pytest.mark.parametrize("mistake", [BrokenPipeError(32, "gone"), ConnectionResetError(104, "reset"), TimeoutError()])
def test_an_os_error_of_the_callers_own_block_stays_what_it_is(served: Served, run: Run, mistake: OSError) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(type(mistake)) as caught:
            async with client.listen("seen"):
                raise mistake
        assert caught.value is mistake

    run(body)


def test_a_slow_listener_gets_lagged() -> None:
    async def body(served: Served) -> None:
        async with Client.open(served.socket) as client, client.listen("seen") as notifications:
            handler = served.node.messaging().notifies["seen"]

            async def flood() -> None:
                for _ in range(30):
                    await handler(Message("seen", b"x" * 30_000))

            await anyio.to_thread.run_sync(served.call, flood)
            seen = [await anext(notifications)]
            while not isinstance(seen[-1], Lagged):
                seen.append(await anext(notifications))
            assert seen[-1].count + len(seen) - 1 + 2 == 30

    with serving(ControlBounds(subscription_items_max=2)) as served:
        trio.run(body, served)


def test_events(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        async with client.events(["peer_connected"]) as events:
            await in_api(served, lambda: served.node.tell(PeerConnected(FakeConnection(ANN, 9))))
            event = await anext(events)
        assert isinstance(event, Event)
        assert (event.id, event.kind, event.fields["peer"], event.fields["connection"]) == (1, "peer_connected", ANN, 9)
        assert event.time_s > 1_700_000_000

    run(body)


def test_reply(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        answers: list[bytes | str] = []

        async def ask(data: bytes) -> None:
            try:
                answers.append(await served.node.messaging().requests["greet"](Message("greet", data, deadline_s=1e18)))
            except HandlerError as error:
                answers.append(str(error))

        async with client.reply("greet", concurrency=2) as requests:
            await in_api(served, served.control.nursery.start_soon, ask, b"ann")
            request = await anext(requests)
            assert (request.peer, request.name, request.body) == (ANN, "greet", b"ann")
            await request.respond(b"hello ann")
            with pytest.raises(ControlError) as late:
                await request.respond(b"again")
            assert late.value.code == "D5011"
            await in_api(served, served.control.nursery.start_soon, ask, b"bob")
            await (await anext(requests)).fail("no")
            await anyio.to_thread.run_sync(served.wait_until, lambda: len(answers) == 2, "both are answered")
            with pytest.raises(ControlError) as taken:
                async with client.reply("greet"):
                    pass
            assert taken.value.code == "D5012"
        assert answers == [b"hello ann", "no"]

    run(body)


def test_a_stream_carries_items_both_ways_at_once(served: Served, run: Run) -> None:
    items = [b"", b"one", b"x" * 2_000_000, *(b"%d" % number for number in range(500))]

    async def body(client: Client) -> None:
        async with client.stream(ANN, "echo", b"hello", headers={"a": 1}) as stream, anyio.create_task_group() as tasks:

            async def send_all() -> None:
                for item in items:
                    await stream.send(item)
                await stream.send_eof()

            tasks.start_soon(send_all)
            assert [item async for item in stream] == items
        assert (served.node.opened[-1].body, served.node.opened[-1].headers) == (b"hello", {"a": 1})
        with pytest.raises(StreamClosedError):
            await stream.send(b"too late")

    run(body)


def test_a_sender_is_held_back_by_the_peer(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        sent = 0
        async with client.stream(ANN, "nobody-reads") as stream:
            with anyio.move_on_after(0.5):
                while True:
                    await stream.send(b"x" * 100_000)
                    sent += 1
            assert 5 < sent < 60
            await stream.aclose()
        await anyio.to_thread.run_sync(served.wait_until, lambda: served.node.opened[-1].was_reset, "the peer is told")

    run(body)


def test_leaving_a_stream_by_an_error_lets_it_out_as_it_is_and_resets(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(KeyError, match="mine"):
            async with client.stream(ANN, "x") as stream:
                await stream.send(b"1")
                raise KeyError("mine")
        await anyio.to_thread.run_sync(served.wait_until, lambda: served.node.opened[-1].was_reset, "reset")

    run(body)


def test_a_peers_reset_is_raised_on_both_sides(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(StreamClosedError, match="peer reset"):
            async with client.stream(ANN, "x") as stream:
                await stream.send(b"1")
                far = served.node.opened[-1]
                await anyio.to_thread.run_sync(served.call, far.from_far.send, b"!reset")
                async for _ in stream:
                    pass

    run(body)


def test_a_client_that_is_gone_resets_its_stream_at_once(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        async with Client.open(served.socket) as other, other.stream(ANN, "x") as stream:
            await stream.send(b"1")
            assert await anyio.to_thread.run_sync(served.call, served.node.opened[-1].sent.receive) == b"1"
            connection = stream._upload_scope  # pyright: ignore[reportPrivateUsage]
            assert connection is not None
            connection.cancel()  # cuts the connection in the middle of its body, as the end of a program does
            await anyio.to_thread.run_sync(served.wait_until, lambda: served.node.opened[-1].was_reset, "reset")

    run(body)


def test_accept(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        async with client.accept("sync") as incoming:
            far = FakeStream("sync", b"first", BOB)
            handler = served.node.messaging().streams["sync"]
            await in_api(served, served.control.nursery.start_soon, handler, far)
            async with await anext(incoming) as stream:
                assert (stream.peer, stream.name, stream.body) == (BOB, "sync", b"first")
                await anyio.to_thread.run_sync(served.call, far.from_far.send, b"question")
                assert await anext(stream) == b"question"
                await stream.send(b"answer")
                await stream.send_eof()
                assert await anyio.to_thread.run_sync(served.call, far.sent.receive) == b"answer"
                await in_api(served, far.from_far.close)
                assert [item async for item in stream] == []
        await anyio.to_thread.run_sync(served.wait_until, lambda: len(served.control.streams) == 0, "done")
        assert not far.was_reset

    run(body)


def test_tcp_with_token(served: Served) -> None:
    async def body() -> None:
        async with Client.open(tcp=f"127.0.0.1:{served.tcp_port}", token=TOKEN) as client:
            assert await client.healthy()
        async with Client.open(tcp=f"127.0.0.1:{served.tcp_port}") as client:
            with pytest.raises(ControlError) as refused:
                await client.status()
            assert refused.value.code == "D1008"

    trio.run(body)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_no_daemon_is_reported_with_the_reason(tmp_path: Path, backend: str) -> None:
    async def body() -> None:
        async with Client.open(data_dir=tmp_path) as client:
            with pytest.raises(DaemonUnreachableError, match="no such socket") as unreachable:
                await client.status()
            assert unreachable.value.code == "D3001"
            assert str(tmp_path / "control.sock") in str(unreachable.value)
            (tmp_path / "control.sock").touch()
            (tmp_path / "daemon.lock").write_text("4194303\n")
            with pytest.raises(DaemonUnreachableError, match=r"nothing listens.*stale lock of pid 4194303"):
                await client.status()
        async with Client.open(tcp="127.0.0.1:1") as client:
            with pytest.raises(DaemonUnreachableError, match="nothing listens"):
                await client.status()

    anyio.run(body, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_daemon_that_dies_in_the_middle_is_reported(backend: str) -> None:
    async def body(served: Served, leave: threading.Event) -> None:
        with anyio.fail_after(10):
            opening = Client.open(served.socket, reconnect_s=0)
            async with opening as client, client.listen("x") as notifications:
                leave.set()
                with pytest.raises(DaemonUnreachableError, match="went away"):
                    await anext(notifications)
                with pytest.raises(DaemonUnreachableError):
                    await client.status()

    leave = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        with serving() as served:
            running = executor.submit(lambda: anyio.run(body, served, leave, backend=backend))
            assert leave.wait(10)
        running.result(10)


def test_codes_go_there_and_back() -> None:
    for error in (RequestTimeoutError("a"), HandlerError("b"), NotMemberError("c"), StreamClosedError("d")):
        again = error_from_problem({"code": code_of(error), "detail": str(error)})
        assert (type(again), str(again)) == (type(error), str(error))
    foreign = error_from_problem({"error": "nginx says no"}, 502)
    assert isinstance(foreign, ControlError) and foreign.code == "D3007"


def test_an_answer_that_is_not_a_daemons(tmp_path: Path) -> None:
    async def body() -> None:
        listener = await anyio.create_unix_listener(tmp_path / "s")

        async def foreign(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                await stream.receive()
                await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, foreign)
            async with Client.open(tmp_path / "s") as client:
                with pytest.raises(ControlError) as strange:
                    await client.status()
                assert strange.value.code == "D3007"
            tasks.cancel_scope.cancel()
        await listener.aclose()

    trio.run(body)


def test_the_realm_file_goes_over_whole(served: Served) -> None:
    realm = Realm.generate("bytes")

    async def body() -> None:
        async with Client.open(str(served.socket)) as client:
            await client.join_realm(realm)

    trio.run(body)
    assert base64.b64encode(realm.psk).decode() in next(served.config.realms_dir.glob("*.realm")).read_text()


@pytest.fixture
def stopped_process() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def test_a_daemon_whose_process_is_stopped_is_reported_with_the_way_out(
    tmp_path: Path, stopped_process: int
) -> None:
    path = tmp_path / "control.sock"
    (tmp_path / "daemon.lock").write_text(f"{stopped_process}\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()  # takes calls, and nobody answers
        with pytest.raises(DaemonUnreachableError) as raised:
            await Transport(path, None, None).call("GET", "/v1/status", timeout_s=0.1)
    assert f"its process {stopped_process} is stopped" in raised.value.detail
    assert raised.value.hint == f"Let it go on: kill -CONT {stopped_process}"


async def test_the_lock_of_a_killed_daemon_that_no_one_reaped_is_stale(tmp_path: Path, stopped_process: int) -> None:
    os.kill(stopped_process, signal.SIGKILL)
    os.waitid(os.P_PID, stopped_process, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it ends at once
    (tmp_path / "daemon.lock").write_text(f"{stopped_process}\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
    with pytest.raises(DaemonUnreachableError, match="stale lock"):
        await Transport(tmp_path / "control.sock", None, None).call("GET", "/v1/status")
