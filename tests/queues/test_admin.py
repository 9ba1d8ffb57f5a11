"""Administrative requests: what is malformed is refused by every surface, and changes nothing."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.control_api.structs import FieldError
from dep2p.errors import ProtocolError
from dep2p.protocols.queues.admin import (
    REQUESTS,
    EmptyQueue,
    ListDeadLetters,
    MessageList,
    PeekMessages,
    QueueRoute,
    operation_of,
)
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.admin import (
    decode_admin,
    decode_answer,
    encode_admin,
    encode_answer,
    parse_reply,
    parse_request,
    reply_fields,
)
from dep2p.protocols.wire.frame import encode_frame
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.admin import BrokerAdmin
from tests.queues.admin_cases import KINDS, VALID, Malformed, malformed, prepare, state
from tests.queues.nodes import queue_sides

CASES = list(malformed())
SPEC = Path(__file__).parents[2] / "docs/spec/queue.md"


def test_every_operation_is_among_the_cases() -> None:
    assert set(VALID) == set(KINDS)
    for op, fields in VALID.items():
        assert parse_request({"op": op, **fields})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_malformed_request_is_refused_with_the_name_of_the_field(case: Malformed) -> None:
    with pytest.raises(FieldError) as raised:
        parse_request({"op": case.op, **case.fields})
    assert str(raised.value).startswith(f"{case.op}: ")
    assert "\n" not in str(raised.value)
    if case.fault in ("unknown", "missing", "wrong type", "out of bounds") and case.op not in ("serve",):
        assert case.field in str(raised.value)


async def test_a_malformed_request_between_nodes_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [broker, asker]:
        await prepare(broker.queues)
        before = await state(broker.queues, broker.engine)
        route = asker.service._broker_directory.to(broker.peer)  # pyright: ignore[reportPrivateUsage]
        for case in CASES:
            payload = json.dumps({"op": case.op, **case.fields}).encode()

            def frame(req_id: int, payload: bytes = payload) -> bytes:
                return encode_frame(wire.ADMIN, payload, req_id=req_id)

            answer = await route.request(frame, 5.0)
            assert isinstance(answer.error, ProtocolError), case
            assert str(answer.error).startswith(f"{case.op}: "), case
            assert await state(broker.queues, broker.engine) == before, case
        assert broker.count("refused_invalid") == len(CASES)


@pytest.mark.parametrize("where", ["own", "another member's"])
async def test_a_malformed_request_of_a_program_changes_nothing(
    autojump_clock: trio.testing.MockClock, where: str
) -> None:
    async with queue_sides(2) as [broker, asker]:
        await prepare(broker.queues)
        before = await state(broker.queues, broker.engine)
        queues = broker.queues if where == "own" else asker.at(broker)
        for case in CASES:
            kind = KINDS[case.op]
            names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
            given: dict[str, Any] = {names.get(name, name): value for name, value in case.fields.items()}
            with pytest.raises((TypeError, ValueError)):
                await queues.ask(kind(**given))
            assert await state(broker.queues, broker.engine) == before, case


WRONG: Any = 5
NOTHING: Any = None
TEXT: Any = "4"


CALLS: list[Callable[[Queues], Awaitable[object]]] = [
    lambda queues: queues.empty("jobs", WRONG),
    lambda queues: queues.empty("jobs", NOTHING),
    lambda queues: queues.pause("jobs", NOTHING),
    lambda queues: queues.resume("jobs", NOTHING),
    lambda queues: queues.replay("jobs", "a", [TEXT]),
    lambda queues: queues.delete_dead_letters("jobs", "a", [-1]),
    lambda queues: queues.delete("jobs", force=TEXT),
    lambda queues: queues.delete_channel("jobs", NOTHING),
    lambda queues: queues.expand("jobs", TEXT),
    lambda queues: queues.create("new", {"partition": 2}),
    lambda queues: queues.create("new", access={"publishing": "owner"}),
    lambda queues: queues.create_channel("jobs", "c", exclusive=TEXT),
    lambda queues: queues.simple_consumer("jobs", "b").receive(0),
]


@pytest.mark.parametrize("call", CALLS)
async def test_a_method_with_a_wrong_argument_changes_nothing(
    autojump_clock: trio.testing.MockClock, call: Callable[[Queues], Awaitable[object]]
) -> None:
    async with queue_sides(1) as [broker]:
        await prepare(broker.queues)
        before = await state(broker.queues, broker.engine)
        with pytest.raises(ValueError):
            await call(broker.queues)
        assert await state(broker.queues, broker.engine) == before


async def test_emptying_one_channel_leaves_the_others(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [broker, asker]:
        await prepare(broker.queues)
        queues: Queues = asker.at(broker)
        assert await queues.empty("jobs", "b") == 3
        info = await queues.info("jobs")
        assert (info.channel("a").ready, info.channel("b").ready, info.messages) == (2, 0, 3)
        assert await queues.empty_all("jobs") == 3
        assert (await queues.info("jobs")).messages == 0


def test_a_request_goes_over_the_wire_as_op_and_fields_without_defaults() -> None:
    assert json.loads(encode_admin(EmptyQueue(queue="jobs", channel="b"))) == {
        "op": "empty",
        "queue": "jobs",
        "channel": "b",
    }
    for op, fields in VALID.items():
        request = parse_request({"op": op, **fields})
        assert parse_request(decode_admin(encode_admin(request))) == request


async def test_each_reply_comes_out_of_the_wire_as_it_went_in(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(1) as [broker]:
        await prepare(broker.queues)
        local = BrokerAdmin(broker.engine, broker.rights, broker.queues._namespace)  # pyright: ignore[reportPrivateUsage]
        for op in (
            "list",
            "info",
            "create_channel",
            "peek",
            "export",
            "dead",
            "receive",
            "route",
            "consumers",
            "floors",
        ):
            request = parse_request({"op": op, **VALID[op]})
            reply = await local.perform(request)
            assert decode_answer(request, encode_answer(request, reply)) == reply, op


def test_replies_keep_their_names_between_nodes() -> None:
    """Earlier nodes read and write these."""
    raw = b'{"dead":[],"more":false,"later":1}'
    page = decode_answer(ListDeadLetters(queue="q", channel="c"), raw)
    assert json.loads(encode_answer(ListDeadLetters(queue="q", channel="c"), page)) == {"dead": [], "more": False}
    message: dict[str, object] = {"id": "0" * 16, "published_s": 1.0, "key": "", "tags": [], "priority": 0}
    peek = PeekMessages(queue="q")
    raw = json.dumps({"messages": [{**message, "headers": {}, "data": "eA==", "encoding": "base64"}]}).encode()
    found = decode_answer(peek, raw)
    assert found.messages[0].body == b"x"
    assert json.loads(encode_answer(peek, found)) == json.loads(raw)
    shown = reply_fields(found.messages[0])
    assert (shown["body"], "data" in shown) == ("eA==", False)
    assert parse_reply(MessageList, reply_fields(found)) == found
    request = parse_request({"op": "route", "queue": "q"})
    row = {"partition": 1, "messages": 0, "bytes": 0, "last_seq": 0, "node": "n", "share": "s", "elsewhere": 2}
    route = decode_answer(request, json.dumps({"version": 1, "partitions": [row], "routes": []}).encode())
    assert isinstance(route, QueueRoute)
    assert (route.partitions[0].shard, route.partitions[0].off_partition) == ("s", 2)
    assert json.loads(encode_answer(request, route))["partitions"] == [row]


@pytest.mark.parametrize("payload", [b"[]", b"5", b"{", b'{"queue":"jobs"}', b'{"op":5}', b"\xff"])
def test_what_is_no_request_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_admin(payload)


def test_the_specification_has_each_operation_with_its_fields() -> None:
    rows = {
        cells[1].strip(" `"): cells[2]
        for cells in (line.split("|") for line in SPEC.read_text("utf-8").splitlines() if line.startswith("| `"))
        if cells[1].strip(" `") in KINDS
    }
    for kind in REQUESTS:
        named = [each.split("`")[1] for each in rows[operation_of(kind)].split(",") if "`" in each]
        assert sorted(named) == sorted(kind.__struct_encode_fields__), operation_of(kind)
