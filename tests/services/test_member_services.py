"""Requests to any member that offers a service: who is chosen, what is tried at another member, and what errors say."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    HandlerError,
    NoHandlerError,
    OverloadedError,
    PeerNotFoundError,
    ProtocolError,
    ProtocolNotSupportedError,
    RequestTimeoutError,
    ServiceNotFoundError,
    ServiceUnavailableError,
    StreamClosedError,
    error_from_wire,
)
from dep2p.messaging.handlers import HandlerGoneError
from dep2p.messaging.offered_services import OfferedService
from dep2p.messaging.responder import InboundLink
from dep2p.node.node import Node
from dep2p.protocols.messaging.incoming import Request
from dep2p.protocols.messaging.request import Job
from dep2p.protocols.realm.statement import ServiceOffer
from dep2p.services.service import ServiceMemberInfo, failure_of
from dep2p.testing import MemoryNetwork
from tests.realm.realm_nodes import TEAM, until

Clock = trio.testing.MockClock
OFFER = ServiceOffer("resize", "workers")


async def echo(request: Request) -> bytes:
    return request.body


@asynccontextmanager
async def realm_of(count: int) -> AsyncGenerator[list[Node], None]:
    """Nodes of one realm, each connected to all others."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for _ in range(count):
            host = network.host()
            addrs = nodes[0].listen_addrs() if nodes else []
            nodes.append(
                await stack.enter_async_context(Node.open(TEAM, host=host, identity=host.identity, bootstrap=addrs))
            )
        await until(lambda: all(node.realms()[0].members_up == count - 1 for node in nodes), timeout_s=120)
        yield nodes


def offer(
    node: Node, answer: Callable[[Request], bytes] = lambda request: request.body, **options: str
) -> Counter[str]:
    """Offer ``resize``; count the requests."""
    counts = Counter[str]()

    @node.on_request("resize", **({"group": "workers"} | options))  # type: ignore[arg-type]  # pyright: ignore
    async def resize(request: Request) -> bytes:
        counts["requests"] += 1
        await trio.sleep(0.01)
        return answer(request)

    return counts


async def known(node: Node, count: int) -> None:
    await until(lambda: len(node.offered_services().get("resize", ())) == count)


async def test_requests_go_to_all_members_that_offer_a_service_and_to_this_node_itself(autojump_clock: Clock) -> None:
    async with realm_of(4) as (a, *others):
        counts = [offer(node) for node in (a, *others[:2])]
        await known(others[2], 3)
        await known(a, 3)
        for caller in (a, others[2]):
            for number in range(900):
                assert await caller.request_any("resize", b"%d" % number) == b"%d" % number
        # within 20 % of even, which are six standard deviations of draws
        assert all(480 < each["requests"] < 720 for each in counts), counts


async def test_a_service_is_there_for_its_own_node_at_once_and_ends_with_its_handler(autojump_clock: Clock) -> None:
    async with realm_of(2) as (a, b):
        with pytest.raises(ServiceNotFoundError, match="no member of the realm 'team' offers 'resize'"):
            await a.request_any("resize", b"x")

        end = a.handle(None, lambda m: m.on_request("resize", echo, service=OfferedService(OFFER)))
        assert await a.request_any("resize", b"x") == b"x"
        await known(b, 1)
        end()
        with pytest.raises(NoHandlerError):
            await a.request_any("resize", b"x")
        await until(lambda: not b.offered_services())


async def test_group_version_and_schema_choose_and_errors_name_what_there_is(autojump_clock: Clock) -> None:
    async with realm_of(3) as (a, b, c):
        offer(b, lambda _: b"old", version="1.0", schema="s1")
        offer(c, lambda _: b"new", version="2.0", schema="s2", group="canary")
        await known(a, 2)
        for _ in range(10):
            assert await a.request_any("resize", b"", version="1.0") == b"old"
            assert await a.request_any("resize", b"", schema="s2") == b"new"
            assert await a.request_any("resize", b"", group="canary") == b"new"
        with pytest.raises(ServiceNotFoundError, match=r"'resize' with version '3'; there is group 'canary' ver"):
            await a.request_any("resize", b"", version="3")


async def test_a_member_that_has_not_what_it_claims_costs_one_try(autojump_clock: Clock) -> None:
    async with realm_of(3) as (a, b, c):
        counts = offer(b)
        c.membership().set_services([OFFER])
        await known(a, 2)
        for number in range(40):
            assert await a.request_any("resize", b"%d" % number) == b"%d" % number
        services = a.services().services
        assert counts["requests"] == 40 and services.counters().get("tries_failed_absent", 0) == 1
        b.membership().set_services([])  # its handler is there, and nobody says so
        await known(a, 1)
        with pytest.raises(ServiceUnavailableError, match=rf"answered 'resize'; tried \d+: {c.peer_id}: no han"):
            await a.request_any("resize", b"", timeout_s=5)


async def test_a_member_that_never_answers_costs_one_idempotent_request_half_its_time(
    autojump_clock: Clock,
) -> None:
    async with realm_of(3) as (a, b, c):
        counts = offer(b)

        @c.on_request("resize", group="workers")
        async def never(_request: Request) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        await known(a, 2)
        slow = 0
        for _ in range(40):
            began = trio.current_time()
            assert await a.request_any("resize", b"x", timeout_s=4, idempotent=True) == b"x"
            slow += trio.current_time() - began > 1
        assert slow == 1 and counts["requests"] == 40
        await trio.sleep(30)
        with pytest.raises(RequestTimeoutError, match=f"tried 1: {c.peer_id}: no answer"):
            for _ in range(100):
                await a.request_any("resize", b"x", timeout_s=2)


async def test_a_member_that_ends_under_traffic_fails_no_idempotent_request(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    hosts = [network.host() for _ in range(3)]
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(
                Node.open(TEAM, host=host, identity=host.identity, bootstrap=[hosts[0].addr] if at else [])
            )
            for at, host in enumerate(hosts[:2])
        ]
        offer(b)
        async with Node.open(TEAM, host=hosts[2], identity=hosts[2].identity, bootstrap=[hosts[0].addr]) as c:
            offer(c)
            await known(a, 2)
            done = 0

            async def ask() -> None:
                nonlocal done
                for _ in range(50):
                    assert await a.request_any("resize", b"x", idempotent=True) == b"x"
                    done += 1

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(ask)
                await until(lambda: done > 100)
                for connection in list(hosts[2].connections()):
                    await connection.close()
        assert done == 400


@pytest.mark.parametrize(("idempotent", "error"), [(False, StreamClosedError), (True, None)])
async def test_a_request_that_may_have_been_handled_is_tried_at_another_member_only_when_that_does_no_harm(
    autojump_clock: Clock, idempotent: bool, error: type[Dep2pError] | None
) -> None:
    async with realm_of(3) as (a, b, c):
        handled = Counter[str]()

        def cutting(node: Node) -> None:
            @node.on_request("resize", group="workers")
            async def resize(request: Request) -> bytes:
                handled["all"] += 1
                if handled["all"] == 1:
                    for connection in list(node.host.connections(a.peer_id)):
                        await connection.close()
                    await trio.sleep_forever()
                return request.body

        cutting(b)
        cutting(c)
        await known(a, 2)
        if error is None:
            assert await a.request_any("resize", b"x", idempotent=idempotent) == b"x"
            assert handled["all"] == 2
        else:
            with pytest.raises(error, match="no member answered 'resize'; tried 1: 12D3"):
                await a.request_any("resize", b"x", idempotent=idempotent)
            assert handled["all"] == 1


NOT_RUN = ("absent", "unreachable", "busy")
NOT_RUN_CODES = (ErrorCode.NO_HANDLER, ErrorCode.OVERLOADED, ErrorCode.RATE_LIMITED)
MAY_HAVE_RUN_CODES = (ErrorCode.TIMEOUT, ErrorCode.NOT_MEMBER)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_of_the_errors_that_members_answer_three_say_that_no_handler_ran(code: ErrorCode) -> None:
    failure = failure_of(error_from_wire(code, "text"))
    assert (failure in NOT_RUN) == (code in NOT_RUN_CODES)
    assert (failure is None) == (code not in (*NOT_RUN_CODES, *MAY_HAVE_RUN_CODES))


@pytest.mark.parametrize(
    "error",
    [
        *(error_from_wire(code, "text") for code in ErrorCode),
        ProtocolError("x"),
        PeerNotFoundError("x"),
        ProtocolNotSupportedError("x"),
        StreamClosedError("x"),
        Dep2pError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_handler_ran_for_what_was_not_sent(error: Dep2pError) -> None:
    error.is_unsent = True
    assert failure_of(error) in NOT_RUN


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("code", list(ErrorCode))
async def test_a_request_goes_to_another_member_by_what_its_error_says_of_the_handler(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, code: ErrorCode, idempotent: bool
) -> None:
    answer = InboundLink.answer
    answered = Counter[str]()

    async def first_fails(link: InboundLink, job: Job, data: bytes) -> None:
        if job.name == "resize":
            answered["all"] += 1
            if answered["all"] == 1:
                await link.answer_error(job, code, "so it is")
                return
        await answer(link, job, data)

    monkeypatch.setattr(InboundLink, "answer", first_fails)
    async with realm_of(3) as (a, b, c):
        offer(b)
        offer(c)
        await known(a, 2)
        if code in NOT_RUN_CODES or (idempotent and code in MAY_HAVE_RUN_CODES):
            assert await a.request_any("resize", b"x", idempotent=idempotent) == b"x"
            assert answered["all"] == 2
        else:
            with pytest.raises(Dep2pError, match="so it is"):
                await a.request_any("resize", b"x", idempotent=idempotent)
            assert answered["all"] == 1


async def test_a_handler_s_failure_is_an_answer(autojump_clock: Clock) -> None:
    async with realm_of(3) as (a, b, c):

        def fail(_request: Request) -> bytes:
            raise HandlerError("no such image")

        counts = [offer(b, fail), offer(c, fail)]
        await known(a, 2)
        with pytest.raises(HandlerError, match=r"^no such image$"):
            await a.request_any("resize", b"x", idempotent=True)
        assert sum(each["requests"] for each in counts) == 1


async def test_a_member_that_stops_takes_its_offers_back_first(autojump_clock: Clock) -> None:
    async with realm_of(3) as (a, b, c):
        counts = [offer(b), offer(c)]
        await known(a, 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.drain)
            for _ in range(20):
                assert await a.request_any("resize", b"x") == b"x"
        await known(a, 1)
        assert counts[0]["requests"] >= 15


async def test_handlers_of_one_group_share_and_must_say_the_same(autojump_clock: Clock) -> None:
    async with realm_of(2) as (a, b):
        first, second = offer(b, version="1"), offer(b, version="1")
        with pytest.raises(ValueError, match=r"offers 'resize' as group 'workers', version '1' already"):
            offer(b, version="2")
        with pytest.raises(ValueError, match="has a handler already"):
            b.on_request("resize")(echo)
        with pytest.raises(ValueError, match="give its group, too"):
            b.on_request("other", version="1")
        await known(a, 1)
        for _ in range(20):
            assert await a.request_any("resize", b"x") == b"x"
        assert (first["requests"], second["requests"]) == (10, 10)


async def test_a_program_that_went_away_leaves_its_requests_to_another_one(autojump_clock: Clock) -> None:
    async with realm_of(3) as (a, b, c):
        here = Counter[str]()

        @b.on_request("resize", group="workers")
        async def gone(request: Request) -> bytes:
            here["gone"] += 1
            raise HandlerGoneError("the program went away", has_begun=True)

        await known(a, 1)
        with pytest.raises(HandlerError, match="the program went away"):
            await a.request_any("resize", b"x")
        offer(b)
        assert await b.request_any("resize", b"x", idempotent=True) == b"x"
        counts = offer(c)
        await known(a, 2)
        for _ in range(40):  # chance passes one of two members by once in 10^12
            assert await a.request_any("resize", b"x", idempotent=True) == b"x"
        assert here["gone"] <= 2 and counts["requests"] > 0


async def test_overload_is_tried_at_another_member_and_then_again(autojump_clock: Clock) -> None:
    async with realm_of(2) as (a, b):
        counts = Counter[str]()

        async def busy(request: Request) -> bytes:
            counts["all"] += 1
            await trio.sleep(0.1)  # shorter than the pauses of five tries, whatever their jitter
            return request.body

        b.handle(
            None,
            lambda m: m.on_request("resize", busy, concurrency=1, waiting_max=0, service=OfferedService(OFFER)),
        )
        await known(a, 1)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(lambda: a.request_any("resize", b"x"))
        assert counts["all"] == 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: a.request_any("resize", b"x"))
            await trio.sleep(0.05)
            with pytest.raises(OverloadedError):
                await a.request(b.peer_id, "resize", b"x")


async def test_members_describe_their_services(autojump_clock: Clock) -> None:
    async with realm_of(3) as (a, b, c):
        offer(b, version="1.2")
        c.membership().set_services([OFFER])

        @b.on_request("sum", group="workers", metadata={"team": "blue"})
        async def add(request: Request) -> bytes:
            raise HandlerError("no")

        await known(a, 2)
        for _ in range(3):
            await a.request_any("resize", b"x", version="1.2")
        infos = await a.service_info("resize")
        told = infos[b.peer_id]
        assert isinstance(told, ServiceMemberInfo) and told.rtt_s >= 0
        (info,) = told.services
        assert (info.name, info.version, info.requests, info.errors, info.programs) == ("resize", "1.2", 3, 0, 1)
        assert info.mean_ms == pytest.approx(10, abs=1) and info.p99_ms == pytest.approx(10, abs=1)
        lied = infos[c.peer_id]
        assert isinstance(lied, ServiceMemberInfo) and lied.services == ()
        with pytest.raises(HandlerError):
            await a.request_any("sum", b"")
        (summed,) = (await b.service_info("sum")).values()
        assert isinstance(summed, ServiceMemberInfo) and summed.services[0].metadata == {"team": "blue"}
        assert summed.services[0].errors == 1
        with pytest.raises(ServiceNotFoundError):
            await a.service_info("nothing")


async def test_names_of_dep2p_itself_and_too_many_services_are_refused(autojump_clock: Clock) -> None:
    async with realm_of(1) as (a,):
        with pytest.raises(ValueError, match="dep2p's own"):
            a.on_request("$dep2p/x", group="g")(echo)
        for number in range(64):
            a.on_request(f"s{number}", group="g")(echo)
        with pytest.raises(ValueError, match="65 services"):
            a.on_request("s64", group="g")(echo)
        assert len(a.offered_services()) == 64
