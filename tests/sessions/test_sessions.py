"""Ordered sessions between nodes in memory: pushes, requests, reconnects, tokens, ends."""

from contextlib import suppress

import pytest
import trio
import trio.testing

from dep2p.errors import (
    HandlerError,
    NoHandlerError,
    OverloadedError,
    RequestTimeoutError,
    SessionClosedError,
    SessionFailedError,
    SessionFullError,
    SessionGapError,
    SessionNotFoundError,
    SessionResetError,
    SessionTokenError,
)
from dep2p.limits import Limits
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.wire import PUSH
from dep2p.sessions.server_session import SessionRequest
from dep2p.sessions.service import OpenSession, Session
from dep2p.testing.memory import MemoryNetwork
from tests.sessions.nodes import SessionSide, forever, session_sides, take


async def test_pushes_arrive_in_order_and_then_the_end(autojump_clock: trio.testing.MockClock) -> None:
    async def count(session: Session) -> None:
        assert session.body == b"from where?"
        for number in range(10_000):
            assert await session.push(b"%d" % number) == number + 1

    async with session_sides() as [server, client]:
        server.serve(count)
        async with client.service.open(server.peer, "x", b"from where?") as session:
            got = [push async for push in session]
        assert [int(push.body) for push in got] == list(range(10_000))
        assert {push.kind for push in got} == {PUSH}
        await trio.sleep(1)
        assert server.service.served() == []
        assert client.service.opened() == []
        assert server.count("failed") == client.count("failed") == 0


async def test_many_are_taken_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async def count(session: Session) -> None:
        for number in range(1_000):
            await session.push(b"%d" % number)

    async with session_sides() as [server, client]:
        server.serve(count)
        async with client.service.open(server.peer, "x") as session:
            got: list[int] = []
            while batch := await session.receive_many(300):
                assert len(batch) <= 300
                got += [int(push.body) for push in batch]
        assert got == list(range(1_000))


async def test_the_connection_is_lost_again_and_again(autojump_clock: trio.testing.MockClock) -> None:
    async def count(session: Session) -> None:
        for number in range(3_000):
            await session.push(b"%d" % number)
            if number % 10 == 0:
                await trio.sleep(0.01)

    async with session_sides() as [server, client]:
        server.serve(count)
        got: list[int] = []

        async def cut_now_and_then() -> None:
            while len(got) < 3_000:
                await trio.sleep(0.37)
                await client.cut(server)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut_now_and_then)
            async with client.service.open(server.peer, "x") as session:
                async for push in session:
                    got.append(int(push.body))
        assert got == list(range(3_000))
        assert client.count("resumes") >= 5
        assert server.count("resumes_served") >= 5


async def test_what_is_pushed_while_the_client_is_away_waits_for_it(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    async with session_sides(network=network) as [server, client]:
        server.serve(forever)
        async with client.service.open(server.peer, "x") as session:
            await server.session.push(b"1")
            assert await take(session, 1) == [b"1"]
            network.partition(server.peer, client.peer)
            await client.cut(server)
            await server.cut(client)
            await trio.sleep(5)
            assert not server.session.is_attached
            assert not session.is_attached
            for each in b"234":
                await server.session.push(bytes([each]))
            await trio.sleep(20)
            network.heal()
            assert await take(session, 3) == [b"2", b"3", b"4"]
            assert session.stats()["resumes"] == 1


async def test_a_push_waits_for_space_and_push_nowait_does_not(autojump_clock: trio.testing.MockClock) -> None:
    options = SessionOptions(items_max=4)
    async with session_sides() as [server, client]:
        server.serve(forever, options=options)
        async with client.service.open(server.peer, "x") as session:
            served = server.session
            for each in b"1234":
                served.push_nowait(bytes([each]))
            with pytest.raises(SessionFullError, match="has not handled 4 pushes"):
                served.push_nowait(b"5")
            with trio.move_on_after(100) as scope:
                await served.push(b"never")
            assert scope.cancelled_caught
            async with trio.open_nursery() as nursery:
                for each in b"5678":
                    nursery.start_soon(served.push, bytes([each]))
                    await trio.testing.wait_all_tasks_blocked()
                assert await take(session, 8) == [bytes([each]) for each in b"12345678"]
            assert not server.count("failed")


async def test_a_client_that_takes_nothing_stops_the_server_and_nothing_else(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Slow is not dead: everything is acknowledged as received, so nothing is sent again and nothing fails."""
    async with session_sides() as [server, client]:
        server.serve(forever, options=SessionOptions(items_max=10))
        async with client.service.open(server.peer, "x") as session:
            with trio.move_on_after(3_600):
                while True:
                    await server.session.push(b"x" * 100)
            stats = server.session.stats()
            assert stats["pending_count"] == 10
            assert stats["retransmitted_items"] == 0
            assert len(await take(session, 10)) == 10


# Requests


async def echo(request: SessionRequest) -> bytes:
    await request.before(b"before " + request.body)
    await request.after(b"after " + request.body)
    return b"answer to " + request.body


async def test_pushes_around_an_answer(autojump_clock: trio.testing.MockClock) -> None:
    seen: list[bytes] = []

    async def read(session: OpenSession) -> None:
        async for push in session:
            await trio.sleep(0.5)  # the answer waits for it
            seen.append(push.body)

    async with session_sides() as [server, client], trio.open_nursery() as nursery:
        server.serve(forever, echo)
        async with client.service.open(server.peer, "x") as session:
            nursery.start_soon(read, session)
            await trio.testing.wait_all_tasks_blocked()
            assert await session.request(b"1") == b"answer to 1"
            assert seen == [b"before 1"]
            await trio.sleep(2)
            assert seen == [b"before 1", b"after 1"]
            assert session.stats()["requests_open"] == 0


async def test_who_takes_pushes_may_ask_too_even_when_many_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever, echo, options=SessionOptions(items_max=5))
        async with client.service.open(server.peer, "x") as session:
            assert await session.request(b"first") == b"answer to first"
            assert await take(session, 2) == [b"before first", b"after first"]
            served = server.session
            async with trio.open_nursery() as nursery:
                for each in b"1234567":
                    nursery.start_soon(served.push, bytes([each]))
                await trio.sleep(1)
                [one] = await take(session, 1)
                assert await session.request(b"again", timeout_s=5) == b"answer to again"
                rest = await take(session, 8)
            assert sorted(each for each in [one, *rest] if len(each) == 1) == [bytes([each]) for each in b"1234567"]
            assert [each for each in rest if len(each) > 1] == [b"before again", b"after again"]


async def test_requests_by_iteration_and_their_failures(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(session: Session) -> None:
        async for request in session:
            if request.body == b"fail":
                await request.fail("not today")
            elif request.body != b"ignore":
                await request.respond(request.body.upper())

    async with session_sides() as [server, client]:
        server.serve(handler)
        async with client.service.open(server.peer, "x") as session:
            assert await session.request(b"hello") == b"HELLO"
            with pytest.raises(HandlerError, match="not today"):
                await session.request(b"fail")
            started = trio.current_time()
            with pytest.raises(RequestTimeoutError):
                await session.request(b"ignore", timeout_s=3)
            assert trio.current_time() - started == pytest.approx(3, abs=0.1)
            await trio.sleep(1)
            assert server.count("requests_timed_out") + server.count("requests_cancelled") >= 1
            assert await session.request(b"on") == b"ON"


async def test_a_handler_of_requests_that_raises_or_is_too_slow(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(request: SessionRequest) -> bytes:
        if request.body == b"own":
            raise HandlerError("said so")
        if request.body == b"bug":
            raise KeyError("secret")
        await trio.sleep(100)
        return b""

    async with session_sides() as [server, client]:
        server.serve(forever, handler)
        async with client.service.open(server.peer, "x") as session:
            with pytest.raises(HandlerError, match="said so"):
                await session.request(b"own")
            with pytest.raises(HandlerError, match="the handler failed"):
                await session.request(b"bug")
            with pytest.raises(RequestTimeoutError):
                await session.request(b"slow", timeout_s=1)


async def test_pushes_bound_from_elsewhere_before_the_request_comes(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(session: Session) -> None:
        async for request in session:
            await request.respond(b"response")

    async with session_sides() as [server, client]:
        server.serve(handler)
        async with client.service.open(server.peer, "x") as session:
            found = server.service.find(session.id)
            await found.bind(session.next_request_id, b"before", "before")
            await found.bind(session.next_request_id, b"after", "after")
            assert await session.request(b"?") == b"response"
            assert await take(session, 2) == [b"before", b"after"]
            with pytest.raises(SessionNotFoundError):
                server.service.find("00")


async def test_a_request_is_handled_once_though_the_connection_is_lost(autojump_clock: trio.testing.MockClock) -> None:
    handled: list[bytes] = []

    async def handler(session: Session) -> None:
        async for request in session:
            handled.append(request.body)
            await trio.sleep(0.25)
            await request.respond(request.body)

    async with session_sides() as [server, client]:
        server.serve(handler)
        async with client.service.open(server.peer, "x") as session:

            async def cut() -> None:
                for _ in range(20):
                    await trio.sleep(0.21)
                    await client.cut(server)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut)
                for number in range(15):
                    assert await session.request(b"%d" % number) == b"%d" % number
        assert handled == [b"%d" % number for number in range(15)]


async def test_a_request_that_is_given_up_stops_its_handler_and_uses_its_number(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stopped: list[int] = []

    async def handler(request: SessionRequest) -> bytes:
        if request.body == b"slow":
            try:
                await trio.sleep_forever()
            finally:
                stopped.append(request.request_id)
        return request.body

    network = MemoryNetwork()
    async with session_sides(network=network) as [server, client]:
        server.serve(forever, handler)
        async with client.service.open(server.peer, "x") as session:
            with trio.move_on_after(1):
                await session.request(b"slow")
            await trio.sleep(1)
            assert stopped == [1]
            # Given up before it could be sent: the server never gets it, and the next one is answered.
            network.partition(server.peer, client.peer)
            await client.cut(server)
            await server.cut(client)
            with trio.move_on_after(1):
                await session.request(b"slow")
            network.heal()
            assert await session.request(b"next") == b"next"
            assert stopped == [1]
            assert session.stats()["requests_open"] == 0


# Tokens, resets, ends


async def test_a_token_goes_on_where_the_last_handled_push_was(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    async with session_sides(network=network) as [server, client]:
        server.serve(forever)
        session = await client.service.start(server.peer, "x")
        for each in b"12345":
            await server.session.push(bytes([each]))
        assert await take(session, 2) == [b"1", b"2"]
        token = session.token  # 2 is not handled yet
        session.stop()  # as a process that dies
        await trio.sleep(10)
        async with client.service.open(server.peer, "x", token=token) as session:
            assert await take(session, 4) == [b"2", b"3", b"4", b"5"]
            session.handled()
            token = await session.detach()
        await server.session.push(b"6")
        async with client.service.open(server.peer, "x", token=token) as session:
            assert await take(session, 1) == [b"6"]
        assert client.count("resets") == 0


async def test_a_token_that_is_older_than_what_was_acknowledged_says_so(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever)
        session = await client.service.start(server.peer, "x")
        await server.session.push(b"1")
        assert await take(session, 1) == [b"1"]
        old = session.token
        for each in b"2345":
            await server.session.push(bytes([each]))
        await take(session, 3)
        session.handled()
        await session.detach()
        async with client.service.open(server.peer, "x", token=old) as session:
            with pytest.raises(SessionResetError, match="pushes 1 to 4 were acknowledged before"):
                await session.receive()
            assert await take(session, 1) == [b"5"]


async def test_a_server_that_was_started_again_resets_and_loses_requests(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    async with session_sides(network=network) as [server, client], trio.open_nursery() as nursery:
        server.serve(forever)
        async with client.service.open(server.peer, "x") as session:
            for each in b"123":
                await server.session.push(bytes([each]))
            assert await take(session, 1) == [b"1"]
            await trio.sleep(1)
            failed: list[BaseException] = []

            async def ask() -> None:
                try:
                    await session.request(b"?")
                except SessionResetError as error:
                    failed.append(error)

            nursery.start_soon(ask)
            await trio.sleep(1)
            server.stop()
            await client.cut(server)
            await trio.sleep(1)
            again = SessionSide(network, Limits(), server.host)
            again.serve(forever)
            await nursery.start(again.run)
            # What had come before is still taken, in order; then the reset; then the new sequence.
            assert await take(session, 2) == [b"2", b"3"]
            with pytest.raises(SessionResetError, match="does not have this session any more") as caught:
                await session.receive()
            assert caught.value.next_seq == 1
            await trio.testing.wait_all_tasks_blocked()
            assert len(failed) == 1
            await again.session.push(b"new")
            assert await take(session, 1) == [b"new"]
        nursery.cancel_scope.cancel()


async def test_a_client_that_does_not_come_back_fails_the_session(autojump_clock: trio.testing.MockClock) -> None:
    seen: list[type[BaseException]] = []

    async def handler(session: Session) -> None:
        try:
            while True:
                await session.push(b"x")
                await trio.sleep(1)
        except SessionClosedError as error:
            seen.append(type(error))
            raise

    async with session_sides() as [server, client]:
        server.serve(handler)
        session = await client.service.start(server.peer, "x")
        await trio.sleep(3)
        session.stop()
        await client.cut(server)
        await trio.sleep(290)
        assert len(server.service.served()) == 1
        await trio.sleep(20)
        assert server.service.served() == []
        assert seen == [SessionFailedError]
        assert server.count("failed") == 1
        [last] = [each for each in server.service.each() if each["is_over"]]
        assert "did not come back within 300 s" in str(last["reason"])


async def test_a_server_that_is_away_too_long_fails_the_clients_end(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever)
        with pytest.raises(SessionFailedError, match="was away for too long"):
            async with client.service.open(server.peer, "x") as session:
                await server.session.push(b"1")
                await trio.sleep(1)
                server.host.kill()
                assert await take(session, 1) == [b"1"]
                await session.receive()


async def test_the_client_ends_it_and_the_handler_is_reported(autojump_clock: trio.testing.MockClock) -> None:
    ended: list[str | None] = []

    async def handler(session: Session) -> None:
        await session.wait_closed()
        ended.append(session.close_reason)

    async with session_sides() as [server, client]:
        server.serve(handler)
        async with client.service.open(server.peer, "x") as session:
            await server.session.push(b"1")
            served = server.session
        await trio.sleep(1)
        assert ended == ["the client has closed it"]
        assert server.count("failed") == 0
        with pytest.raises(SessionClosedError):
            await served.push(b"2")
        with pytest.raises(SessionClosedError):
            await session.request(b"?")
        assert await session.receive() is None


async def test_a_handler_that_does_not_notice_the_end_is_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    cancelled = trio.Event()

    async def handler(session: Session) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with session_sides() as [server, client]:
        server.serve(handler)
        async with client.service.open(server.peer, "x"):
            pass
        with trio.fail_after(10):
            await cancelled.wait()


async def test_a_handler_that_fails_is_an_error_at_the_client_behind_its_pushes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def handler(session: Session) -> None:
        await session.push(b"1")
        raise HandlerError("out of stock") if session.body else KeyError("secret")

    async with session_sides() as [server, client]:
        server.serve(handler)
        for data, text in ((b"own", "out of stock"), (b"", "the handler failed")):
            async with client.service.open(server.peer, "x", data) as session:
                assert await take(session, 1) == [b"1"]
                with pytest.raises(SessionFailedError, match=text):
                    await session.receive()


async def test_numbers_can_be_reserved_and_filled_later(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever, options=SessionOptions(gap="skip"))
        async with client.service.open(server.peer, "x") as session:
            first, second = await server.session.reserve(), await server.session.reserve()
            third = await server.session.reserve()
            await server.session.push(b"4")
            second.fill(b"2")
            first.fill(b"1")
            assert await take(session, 2) == [b"1", b"2"]
            third.skip("nothing to say")
            with pytest.raises(SessionGapError, match="3 of the sequence is skipped: nothing to say"):
                await session.receive()
            assert await take(session, 1) == [b"4"]
            await server.session.reserve()
            await server.session.push(b"6")
            with pytest.raises(SessionGapError, match="not filled within 30 s"):
                await session.receive()
            assert await take(session, 1) == [b"6"]


# Refusals


async def test_what_cannot_be_opened(autojump_clock: trio.testing.MockClock) -> None:
    limits = Limits(sessions_per_peer_max=2)
    async with session_sides(3, limits=limits) as [server, client, other]:
        server.serve(forever)
        with pytest.raises(NoHandlerError, match="no sessions 'y'"):
            await client.service.start(server.peer, "y")
        sessions = [await client.service.start(server.peer, "x") for _ in range(2)]
        with pytest.raises(OverloadedError, match="2 of them yours"):
            await client.service.start(server.peer, "x")
        await other.service.start(server.peer, "x")
        token = sessions[0].token
        with pytest.raises(SessionTokenError, match="open in this node already"):
            await client.service.start(server.peer, "x", token=token)
        with pytest.raises(SessionTokenError, match="another peer, or of another name"):
            await client.service.start(server.peer, "other", token=token)
        with pytest.raises(SessionTokenError, match="starts with dps1_"):
            await client.service.start(server.peer, "x", token="nonsense")
        with pytest.raises(ValueError, match="have a handler already"):
            server.serve(forever)


async def test_a_token_of_another_is_worth_nothing_and_costs_its_owner_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session_sides(3) as [server, owner, thief]:
        server.serve(forever)
        session = await owner.service.start(server.peer, "x")
        await server.session.push(b"for the owner")
        token = session.token
        stolen = await thief.service.start(server.peer, "x", token=token)
        with pytest.raises(SessionResetError):
            await stolen.receive()
        assert len(server.service.served()) == 2
        with trio.move_on_after(60):
            await stolen.receive()
            raise AssertionError("it has got something")
        assert await take(session, 1) == [b"for the owner"]
        assert session.stats()["links"] == 1


async def test_an_expelled_member_loses_its_link_and_gets_nothing_more(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever)
        async with client.service.open(server.peer, "x") as session:
            await trio.sleep(1)
            server.gate.expel(client.peer)
            await trio.sleep(1)
            assert not server.session.is_attached
            await server.session.push(b"secret")
            with trio.move_on_after(30), suppress(SessionFailedError):
                await session.receive()
                raise AssertionError("it has got something")


async def test_drain_refuses_new_ones_and_waits_for_what_was_pushed(autojump_clock: trio.testing.MockClock) -> None:
    async with session_sides() as [server, client]:
        server.serve(forever)
        async with client.service.open(server.peer, "x") as session:
            server.session.push_nowait(b"last words")
            with trio.fail_after(5):
                await server.service.drain()
            with pytest.raises(OverloadedError, match="about to stop"):
                await client.service.start(server.peer, "x")
            assert await take(session, 1) == [b"last words"]


async def test_an_answer_does_not_wait_for_who_has_gone_or_for_who_does_not_want(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session_sides() as [server, client], trio.open_nursery() as nursery:
        server.serve(forever, echo)
        async with client.service.open(server.peer, "x") as session:
            for each in b"123":
                await server.session.push(bytes([each]))
            await trio.sleep(1)
            reader_may_end = trio.Event()

            async def read_one() -> None:
                await take(session, 1)
                await reader_may_end.wait()

            nursery.start_soon(read_one)
            await trio.testing.wait_all_tasks_blocked()
            # A reader is at work on the first push: an answer in order comes after what the reader has not handled.
            with pytest.raises(RequestTimeoutError, match="pushes wait to be taken first"):
                await session.request(b"a", timeout_s=2)
            assert await session.request(b"b", timeout_s=2, in_order=False) == b"answer to b"
            reader_may_end.set()
            await trio.testing.wait_all_tasks_blocked()
            assert await session.request(b"c", timeout_s=2) == b"answer to c"
