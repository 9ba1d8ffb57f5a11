"""Malformed calls of the control API about queues: each is refused, and changes nothing."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, cast

import pytest

from tests.daemon.api.harness import Served, serving
from tests.queues.admin_cases import HANDLE, KINDS, VALID, Malformed, malformed, prepare, state

QUEUE: Final = "/v1/queues/{queue}"
CHANNEL: Final = f"{QUEUE}/channels/{{channel}}"


class Call(NamedTuple):
    """How an operation is asked for: its fields are in the path, and in the query or in a JSON body."""

    method: str
    path: str
    query: tuple[str, ...] = ()
    body: tuple[str, ...] | None = None


CALLS: Final[dict[str, Call]] = {
    "list": Call("GET", "/v1/queues"),
    "info": Call("GET", QUEUE),
    "create": Call("POST", "/v1/queues", body=("queue", "options", "access", "nodes")),
    "delete": Call("DELETE", QUEUE, query=("force",)),
    "delete_channel": Call("DELETE", CHANNEL),
    "pause": Call("POST", f"{QUEUE}/pause", body=("channel", "all_channels")),
    "resume": Call("POST", f"{QUEUE}/resume", body=("channel", "all_channels")),
    "empty": Call("POST", f"{QUEUE}/empty", body=("channel", "all_channels")),
    "peek": Call("GET", f"{QUEUE}/messages", query=("channel", "count")),
    "export": Call("GET", f"{QUEUE}/export"),
    "dead": Call("GET", f"{CHANNEL}/dead-letters", query=("after", "count")),
    "replay": Call("POST", f"{CHANNEL}/dead-letters/replay", body=("ids", "all")),
    "forget_dead": Call("POST", f"{CHANNEL}/dead-letters/delete", body=("ids", "all")),
    "receive": Call("POST", f"{CHANNEL}/receive", body=("count", "wait_s", "invisible_s", "attempt_id", "from_start")),
    "ack": Call("POST", f"{CHANNEL}/ack", body=("handles",)),
    "invisible": Call("POST", f"{CHANNEL}/invisible", body=("handle", "invisible_s")),
    "expand": Call("POST", f"{QUEUE}/expand", body=("partitions", "nodes")),
    "route": Call("GET", f"{QUEUE}/route"),
    "consumers": Call("GET", f"{CHANNEL}/consumers"),
    "locks": Call("GET", f"{CHANNEL}/locks"),
}
BETWEEN_NODES: Final = {"create_channel", "end_receive", "serve", "floors", "may_create", "keepers"}
"""Operations that the control API does not have."""


class Refused(NamedTuple):
    """A call that is refused."""

    name: str
    method: str
    path: str
    query: dict[str, str]
    body: object
    field: str
    """Which the refusal names."""

    def __str__(self) -> str:
        return self.name


def refused() -> Iterator[Refused]:
    """Each field of each call unknown, misspelt, of a wrong type, out of bounds or missing."""
    for case in malformed():
        call = CALLS.get(case.op)
        if call is None:
            continue
        own = call.query if call.body is None else call.body
        if case.field not in own and case.fault != "unknown":
            continue  # in the path, where it cannot be missing or of another type; or a field between nodes alone
        given = {
            name: value for name, value in case.fields.items() if name in own or name not in VALID[case.op]
        }  # what is not valid is the misspelt or unknown field
        yield _refused(str(case), call, case, given)
    for op in ("pause", "resume", "empty"):
        yield _with_body(op, "null", {"channel": None}, "")
        yield _with_body(op, "nothing", {}, "")
        yield _with_body(op, "a queue in the body", {"channel": "b", "queue": "jobs"}, "queue")
    for op in ("delete", "delete_channel", "list", "peek", "export", "dead", "route"):
        yield _with_body(op, "a body", {"channel": "b"}, "")
    for op, field in (("receive", "only_again"), ("receive", "of_placed"), ("export", "after_seq"), ("route", "brief")):
        yield _with_body(op, f"{field} is between nodes", {field: True}, field if CALLS[op].body else "")
    for name, text in (("chanel", "b"), ("forced", "true"), ("force", "yes")):
        yield _call("delete", f"{name}={text}", {name: text}, None, name)
    for name in ("realm", "peer"):
        yield _call("empty", f"{name} in the body", {}, {"channel": "b", name: "x"}, name)
        yield _call("empty", f"{name} misspelt", {f"{name}s": "x"}, {"channel": "b"}, f"{name}s")
    for body in ([], "b", 5, [{"channel": "b"}]):
        yield _call("empty", f"{body!r} as the body", {}, body, "")
    yield from messages()


def messages() -> Iterator[Refused]:
    """Calls about messages."""
    path = "/v1/queues/jobs/messages"
    valid: dict[str, object] = {
        "body": "x",
        "encoding": "utf-8",
        "key": "k",
        "tags": ["a"],
        "priority": 1,
        "delay_s": 0.0,
        "headers": {"h": 1},
    }
    for name, value in valid.items():
        rest = {each: given for each, given in valid.items() if each != name}
        other = 5 if isinstance(value, str | list | dict) else "5"
        yield Refused(f"publish-misspelt-{name}", "POST", path, {}, rest | {f"{name}x": value}, f"{name}x")
        yield Refused(f"publish-wrong type-{name}", "POST", path, {}, valid | {name: other}, name)
    yield Refused("publish-missing-body", "POST", path, {}, {"key": "k"}, "body")
    unknown: dict[str, object] = {"order_key": "k", "data": "x", "defer_s": 1.0, "timeout": 1}
    for name, given in unknown.items():
        yield Refused(f"publish-unknown-{name}", "POST", path, {}, valid | {name: given}, name)
    wrong_values: dict[str, object] = {
        "priority": 256,
        "delay_s": -1,
        "encoding": "hex",
        "tags": ["a"] * 33,
        "headers": {"h": 1.5},
    }
    for name, given in wrong_values.items():
        yield Refused(f"publish-out of bounds-{name}", "POST", path, {}, valid | {name: given}, name)
    yield Refused("publish-no base64", "POST", path, {}, {"body": "?"}, "body")
    for name, text in (
        ("max_inflight", "1"),
        ("max_in_flight", "0"),
        ("from_start", "yes"),
        ("count", "x"),
        ("losses", "yes"),
    ):
        yield Refused(f"consume-{name}={text}", "POST", "/v1/queues/jobs/channels/b/consume", {name: text}, None, name)
    yield Refused("consume-body", "POST", "/v1/queues/jobs/channels/b/consume", {}, {"max_in_flight": 1}, "")
    result: dict[str, object] = {"id": "0" * 16, "do": "finish", "delay_s": 1.0, "reason": "x"}
    path = "/v1/queue-consumers/0/results"
    for name, value in result.items():
        rest = {each: given for each, given in result.items() if each != name}
        yield Refused(
            f"results-misspelt-{name}", "POST", path, {}, {"results": [rest | {f"{name}x": value}]}, f"{name}x"
        )
        wrong = {"results": [result | {name: 5 if isinstance(value, str) else "5"}]}
        yield Refused(f"results-wrong type-{name}", "POST", path, {}, wrong, name)
    for name in ("id", "do"):
        rest = {each: given for each, given in result.items() if each != name}
        yield Refused(f"results-missing-{name}", "POST", path, {}, {"results": [rest]}, name)
    yield Refused("results-unknown", "POST", path, {}, {"result": [result]}, "result")
    for given in (-1, 65_537, "1"):
        yield Refused(f"results-ready-{given}", "POST", path, {}, {"max_in_flight": given}, "max_in_flight")


def _refused(name: str, call: Call, case: Malformed, given: dict[str, object]) -> Refused:
    field = "name" if (case.op, case.field) == ("create", "queue") else case.field
    if case.fault == "misspelt":
        (field,) = set(given) - set(VALID[case.op])
        if case.op == "create" and case.field == "queue":
            field = "name"
    elif case.fault in ("both", "not all"):
        field = ""
    if call.body is None:
        texts = {each: _query_text(case, each, value) for each, value in given.items()}
        return Refused(name, call.method, _path(call), texts, None, field)
    if case.op == "create" and "queue" in given:
        given = {"name": given["queue"], **{each: value for each, value in given.items() if each != "queue"}}
    return Refused(name, call.method, _path(call), {}, given, field)


def _query_text(case: Malformed, name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    wrong = case.fault == "wrong type" and name == case.field
    return "x" if wrong and isinstance(VALID[case.op][name], int) else str(value)


def _path(call: Call) -> str:
    channel = "a" if "dead-letters" in call.path else "b"
    return call.path.format(queue="jobs", channel=channel)


def _with_body(op: str, what: str, body: object, field: str) -> Refused:
    return _call(op, what, {}, body, field)


def _call(op: str, what: str, query: dict[str, str], body: object, field: str) -> Refused:
    call = CALLS[op]
    return Refused(f"{op}-{what}", call.method, _path(call), query, body, field)


@pytest.fixture(scope="module")
def queues() -> Iterator[Served]:
    with serving() as served:
        served.call(served.control.nursery.start, served.node.queues.engine.run)
        served.call(prepare, served.node.queues.select(None))
        yield served


def _state(served: Served) -> object:
    return served.call(state, served.node.queues.select(None), served.node.queues.engine)


def test_every_operation_has_its_call() -> None:
    assert set(CALLS) | BETWEEN_NODES == set(KINDS)
    assert not set(CALLS) & BETWEEN_NODES


@pytest.mark.parametrize("call", list(refused()), ids=str)
def test_a_malformed_call_is_refused_and_changes_nothing(queues: Served, call: Refused) -> None:
    before = _state(queues)
    answer = queues.http.request(call.method, call.path, params=call.query, json=call.body)
    problem = cast(dict[str, Any], answer.json())
    assert 400 <= answer.status_code < 500, answer.text
    # A channel of another name is not there, which is no malformed call.
    assert problem["code"] in ("D1005", "D5202"), answer.text
    if call.field and problem["code"] == "D1005":
        assert call.field in problem["detail"], answer.text
        assert call.field in problem.get("field", call.field), answer.text
    assert _state(queues) == before


def test_what_is_well_formed_is_taken(queues: Served) -> None:
    """The same calls without the fault: so the refusals above are about the fault."""
    for op in ("list", "info", "peek", "export", "dead", "route", "consumers", "locks"):
        call = CALLS[op]
        texts = {name: str(VALID[op][name]) for name in call.query}
        answer = queues.http.request(call.method, _path(call), params=texts)
        assert answer.status_code == 200, answer.text
    held = queues.http.post("/v1/queues/jobs/channels/b/ack", json={"handles": [HANDLE]})
    assert held.json() == {"refused": [HANDLE]}
    emptied = queues.http.post("/v1/queues/jobs/empty", json={"channel": "b"})
    assert emptied.json() == {"messages": 3}
