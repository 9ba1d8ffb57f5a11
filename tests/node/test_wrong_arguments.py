"""Wrong types and sizes for every parameter of the node's public methods: the node still answers a neighbour."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dep2p.messaging.service import Messaging, Request
from dep2p.node.node import Node
from dep2p.node.queues_api import NodeQueues
from dep2p.node.sessions import Sessions
from dep2p.pubsub.topic import Topic
from dep2p.queues.api.queues import QueueHandle
from dep2p.queues.api.simple_consumer import SimpleConsumer
from dep2p.queues.service.realm_queues import RemoteQueues
from dep2p.realm.credentials import Realm
from tests.node.test_node import nodes, until_up
from tests.node.wrong_arguments import Wrong, WrongCall, call_wrongly, calls_of, wrong_values

_ENDS: Final = ("open", "drain", "leave_realm", "aclose", "run", "leave", "trace_to")
"""A right call of these ends what the others need."""
_INNER: Final = (
    "ask",
    "ask_broker",
    "publish_to_broker",
    "publish_sequenced_to_broker",
    "open_subscription",
    "open_consumer",
)
_TAKES_OBJECTS: Final = (
    "is_off_partition",
    "destinations",
    "relay",
    "publish_in",
    "publish_sequenced",
    "publish_batch",
)
_OWNERS: Final[dict[str, tuple[type[Any], tuple[str, ...]]]] = {
    "node": (Node, ()),
    "messaging": (Messaging, ("on_request", "on_notify", "on_stream", "request_once")),
    "queues": (NodeQueues, (*_INNER, *_TAKES_OBJECTS)),
    "remote": (RemoteQueues, (*_INNER, *_TAKES_OBJECTS)),
    "handle": (QueueHandle, _TAKES_OBJECTS),
    "simple": (SimpleConsumer, ()),
    "sessions": (Sessions, ()),
    "topic": (Topic, ()),
}
_CALLS: Final = [(owner, call) for owner, (cls, but) in _OWNERS.items() for call in calls_of(cls, but=(*but, *_ENDS))]


_GivenCall = tuple[tuple[str, WrongCall], Wrong]


async def greet(request: Request) -> bytes:
    return b"hello " + request.body


async def handler(_: object) -> None: ...


def ignore(*_: object) -> None: ...


async def no_messages() -> AsyncGenerator[bytes, None]:
    empty: tuple[bytes, ...] = ()
    for body in empty:
        yield body


def register(_: object) -> object:
    return ignore


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(st.lists(st.tuples(st.sampled_from(_CALLS), wrong_values), min_size=30, max_size=30))
def test_one_wrong_argument_at_a_time_leaves_the_node_at_work(
    calls: list[_GivenCall],
) -> None:
    trio.run(_call_all, calls, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("owner", _OWNERS)
def test_every_parameter_with_an_object_and_with_much_text(owner: str) -> None:
    calls = [each for each in _CALLS if each[0] == owner]
    assert len(calls) > 3
    values = (object(), "x" * 100_000, b"x" * 70_000)
    given: list[_GivenCall] = [(each, Wrong(value)) for each in calls for value in values]
    trio.run(_call_all, given, clock=trio.testing.MockClock(autojump_threshold=0))


async def _call_all(calls: list[_GivenCall]) -> None:
    async with nodes(2, Realm.generate("team")) as (a, b):
        await until_up(a, 1)
        a.on_request("greet")(greet)
        b.on_request("greet")(greet)
        await a.queues.create("jobs")
        await b.queues.of().create("jobs")
        owners: dict[str, object] = {
            "node": a,
            "messaging": a.messaging(),
            "queues": a.queues,
            "remote": a.queues.at(b.peer_id),
            "handle": a.queues.at(b.peer_id).queue("jobs"),
            "simple": a.queues.simple_consumer("jobs", "c"),
            "sessions": a.sessions,
            "topic": await a.join("news"),
        }
        for (owner, call), value in calls:
            right = _right(b, "jobs" if owner in ("queues", "remote") else "greet")
            await call_wrongly(owners[owner], call, value, right)
        assert await b.request(a.peer_id, "greet", b"a", timeout_s=5) == b"hello a"
        assert await a.request(b.peer_id, "greet", b"b", timeout_s=5) == b"hello b"
        await a.queues.create("after")
        assert await a.queues.publish("after", b"x")
        remote = a.queues.at(b.peer_id)
        await remote.create("after")
        assert await remote.publish("after", b"x")


def _right(other: Node, name: str) -> Mapping[str, Any]:
    return {
        "peer": other.peer_id,
        "peers": [other.peer_id],
        "name": name,
        "data": b"x",
        "body": b"x",
        "bodies": [b"x"],
        "messages": no_messages(),
        "topic": "news",
        "addr": other.peer_id,
        "addrs": other.listen_addrs(),
        "realm": None,
        "channel": "c",
        "group": "c",
        "ids": [1],
        "partitions": 2,
        "handler": handler,
        "register": register,
        "on_event": ignore,
        "on_request": None,
        "fn": ignore,
        "session_id": "ab",
        "critical_peers": None,
        "fields": {"load": "1"},
        "message": "handle",
        "seconds": 1.0,
        "invisible_s": 1.0,
        "options": None,
    }
