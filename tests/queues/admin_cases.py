"""Malformed administrative requests: of every operation, each field misspelt, of a wrong type, or missing."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec.structs import fields

from dep2p.protocols.queues.admin import REQUESTS, AdminReply, AdminRequest, operation_of
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.engine import QueueEngine

HANDLE: Final = "0000010000000001-1"
PEER: Final = "12D3KooWGF3PZd2mXoURctJ2pECg78hdjPMWCm7uVyrATqJErX8h"

VALID: Final[dict[str, dict[str, object]]] = {
    "list": {},
    "info": {"queue": "jobs"},
    "create": {"queue": "new", "options": {"partitions": 2}, "access": {"consume": "owner"}, "nodes": []},
    "create_channel": {"queue": "jobs", "channel": "c", "from_start": True, "filter": "tag = a", "exclusive": False},
    "delete": {"queue": "jobs", "force": True},
    "delete_channel": {"queue": "jobs", "channel": "b"},
    "pause": {"queue": "jobs", "channel": "b"},
    "resume": {"queue": "jobs", "channel": "paused"},
    "empty": {"queue": "jobs", "channel": "b"},
    "peek": {"queue": "jobs", "channel": "b", "count": 5},
    "export": {"queue": "jobs", "after": "", "count": 5, "after_seq": 0},
    "dead": {"queue": "jobs", "channel": "a", "after": 0, "count": 5},
    "replay": {"queue": "jobs", "channel": "a", "ids": [1]},
    "forget_dead": {"queue": "jobs", "channel": "a", "ids": [1]},
    "receive": {
        "queue": "jobs",
        "channel": "b",
        "count": 2,
        "wait_s": 0.5,
        "invisible_s": 5.0,
        "attempt_id": "x",
        "from_start": True,
        "only_again": False,
        "of_placed": False,
    },
    "ack": {"queue": "jobs", "channel": "b", "handles": [HANDLE]},
    "invisible": {"queue": "jobs", "channel": "b", "handle": HANDLE, "invisible_s": 5.0},
    "end_receive": {"queue": "jobs", "channel": "b", "attempt_id": "x"},
    "expand": {"queue": "jobs", "partitions": 4, "nodes": []},
    "route": {"queue": "jobs", "brief": True},
    "consumers": {"queue": "jobs", "channel": "b"},
    "locks": {"queue": "jobs", "channel": "b"},
    "serve": {"queue": "jobs", "low": 0, "high": 512},
    "floors": {"queue": "jobs"},
    "may_create": {"queue": "new", "for": PEER},
    "keepers": {},
}
"""A request of each operation with all of its fields."""
NEEDED: Final = {name: ("channel",) for name in ("pause", "resume", "empty")} | {
    name: ("ids",) for name in ("replay", "forget_dead")
}
"""Fields that may be left out only if another one says that all are meant."""
OUT_OF_BOUNDS: Final[dict[str, object]] = {
    "count": 0,
    "wait_s": -1.0,
    "invisible_s": -1.0,
    "attempt_id": "x" * 65,
    "handles": [],
    "partitions": 1_025,
    "low": -1,
    "high": 1_025,
    "after_seq": -1,
    "ids": [-1],
}
KINDS: Final[dict[str, type[AdminRequest[AdminReply]]]] = {operation_of(each): each for each in REQUESTS}


class Malformed(NamedTuple):
    """A request that is refused."""

    op: str
    fault: str
    field: str
    fields: dict[str, object]

    def __str__(self) -> str:
        return f"{self.op}-{self.fault}-{self.field}"


def malformed() -> Iterator[Malformed]:
    """All of them."""
    for op, valid in VALID.items():
        yield Malformed(op, "unknown", "nonsense", valid | {"nonsense": 1})
        required = [each.encode_name for each in fields(KINDS[op]) if each.required]
        for name, value in valid.items():
            rest = {each: given for each, given in valid.items() if each != name}
            yield Malformed(op, "misspelt", name, rest | {_misspelt(name): value})
            yield Malformed(op, "wrong type", name, valid | {name: _of_another_type(value)})
            if name in required or name in NEEDED.get(op, ()):
                yield Malformed(op, "missing", name, rest)
            if name in OUT_OF_BOUNDS and (op, name) != ("dead", "after"):
                yield Malformed(op, "out of bounds", name, valid | {name: OUT_OF_BOUNDS[name]})
    for op in NEEDED:
        rest = {name: value for name, value in VALID[op].items() if name not in NEEDED[op]}
        both = "all" if op in ("replay", "forget_dead") else "all_channels"
        yield Malformed(op, "both", both, VALID[op] | {both: True})
        yield Malformed(op, "not all", both, rest | {both: False})


def _misspelt(name: str) -> str:
    """``channel`` as ``chanel``, ``ids`` as ``is``."""
    at = next((i for i in range(1, len(name)) if name[i] == name[i - 1]), len(name) // 2)
    return name[:at] + name[at + 1 :]


def _of_another_type(value: object) -> object:
    return 5 if isinstance(value, str | list | dict) else "5"


async def prepare(queues: Queues) -> None:
    """Two partitions, channels with messages, a paused channel, and a dead letter."""
    await queues.create("jobs", {"partitions": 2}, access={"administer": "members"})
    for channel in ("a", "b", "paused"):
        await queues.create_channel("jobs", channel)
    await queues.pause("jobs", "paused")
    await queues.publish_many("jobs", [b"one", b"two", b"three"])
    async with queues.consume("jobs", "a") as messages:
        await (await messages.__anext__()).reject("bad")


async def state(queues: Queues, engine: QueueEngine) -> object:
    """Everything that a request could have changed."""
    infos = [reply_fields(await queues.info(each.name)) for each in await queues.listing()]
    letters = [reply_fields(each) for each in await queues.dead_letters("jobs", "a")]
    messages = [reply_fields(each) for each in await queues.peek("jobs", count=100)]
    held = [
        len(consumer.held)
        for queue in engine.registry.queues.values()
        for channel in queue.channels.values()
        for consumer in channel.consumers.values()
    ]
    return infos, letters, messages, reply_fields(await queues.route("jobs")), held
