"""Administrative operations on the queues of this node: the same for its own programs and for other members."""

import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, cast

from dep2p.control_api.encoding import encode_headers
from dep2p.errors import NotInFlightError
from dep2p.protocols.queues.names import LOGICAL_PARTITIONS
from dep2p.queues.access import Right, Rights, parse_access
from dep2p.queues.broker.engine import QueueEngine, StoredMessage
from dep2p.queues.broker.receive import ITEMS_MAX, WAIT_MAX_S, Received, parse_handle
from dep2p.queues.types import decode_attributes, message_id, parse_message_id

RIGHTS: Final[Mapping[str, Right]] = {
    "list": Right.LOOK,
    "info": Right.LOOK,
    "create": Right.CREATE,
    "create_channel": Right.CONSUME,
    "peek": Right.CONSUME,
    "export": Right.CONSUME,
    "dead": Right.CONSUME,
    "receive": Right.CONSUME,
    "ack": Right.CONSUME,
    "invisible": Right.CONSUME,
    "end_receive": Right.CONSUME,
    "delete": Right.ADMINISTER,
    "delete_channel": Right.ADMINISTER,
    "pause": Right.ADMINISTER,
    "resume": Right.ADMINISTER,
    "empty": Right.ADMINISTER,
    "replay": Right.ADMINISTER,
    "forget_dead": Right.ADMINISTER,
    "expand": Right.ADMINISTER,
    "route": Right.LOOK,
    "consumers": Right.LOOK,
    "locks": Right.LOOK,
    "serve": Right.ADMINISTER,
    "floors": Right.LOOK,
    "may_create": Right.CREATE,
}
"""The operations, and what each needs of a member."""

COUNT_MAX: Final = 1_000
_HANDLES_MAX: Final = 256
_ATTEMPT_ID_CHARS: Final = 64
_INVISIBLE_MAX_S: Final = 10 * 365 * 86_400.0
"""The queue cuts it (``msg_timeout_max_s``)."""
ANSWER_BYTES: Final = 524_288
"""About so much of messages goes into one answer."""


class _Asked:
    """The fields of a request. Raises ``ValueError`` for what is missing or wrong."""

    def __init__(self, fields: Mapping[str, object], owner: str) -> None:
        self.fields = fields
        self.owner = owner
        """Who asks."""

    def has(self, name: str) -> bool:
        return bool(self.fields.get(name))

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ValueError(f"{name} is missing or not a text")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.fields.get(name) is None else self.text(name)

    def integer(self, name: str, default: int, high: int) -> int:
        value = self.fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
            raise ValueError(f"{name} is not a whole number from 0 to {high}")
        return value

    def number(self, name: str, default: float, high: float) -> float:
        value = self.fields.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
            raise ValueError(f"{name} is not a number from 0 to {high:g}")
        return float(value)

    def texts(self, name: str, items_max: int) -> list[str]:
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in cast(list[object], value)):
            raise ValueError(f"{name} is not a list of texts")
        texts = cast(list[str], value)
        if not 1 <= len(texts) <= items_max:
            raise ValueError(f"{name} has {len(texts)} entries: 1 to {items_max} are taken")
        return texts

    def flag(self, name: str) -> bool:
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is not true or false")
        return value

    def ids(self) -> list[int] | None:
        value = self.fields.get("ids")
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(each, int) and not isinstance(each, bool) for each in cast(list[object], value)
        ):
            raise ValueError("ids is not a list of whole numbers")
        return cast(list[int], value)

    def mapping(self, name: str) -> dict[str, object] | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} is not an object")
        return cast("dict[str, object] | None", value)


async def perform(
    engine: QueueEngine, rights: Rights, namespace: str, op: str, fields: Mapping[str, object], owner: str = "local"
) -> dict[str, Any]:
    """Do it. Who may was checked before; ``owner`` is who asks, of whom nobody else settles what was received.

    Raises ``ValueError`` for malformed fields, QueueError, StoreError.
    """
    return await _OPERATIONS[op](engine, rights, namespace, _Asked(fields, owner))


async def _list(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    return {"queues": [await engine.summary(ns, name) for name in engine.queue_names(ns)]}


async def _info(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    name = asked.text("queue")
    return {**await engine.info(ns, name), "access": rights.of(ns, name).as_dict()}


async def _create(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    name = asked.text("queue")
    if asked.has("nodes"):
        raise ValueError("only queues of a realm can be on several nodes: name the realm")
    access = asked.mapping("access")
    wanted = None if access is None else parse_access(access, rights.of(ns, name))
    made_by = asked.owner.removeprefix("peer ") if asked.owner.startswith("peer ") else ""
    await engine.create_queue(ns, name, engine.options_from(asked.mapping("options") or {}), made_by)
    if wanted is not None and wanted != rights.of(ns, name):
        rights.set(ns, name, wanted)
        await engine.flush()
    return await _info(engine, rights, ns, asked)


async def _may_create(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    return {}  # whoever asks was looked at before


async def _create_channel(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    await engine.create_channel(
        ns,
        asked.text("queue"),
        asked.text("channel"),
        from_start=asked.flag("from_start"),
        filter_text=asked.optional_text("filter") or "",
        exclusive=asked.flag("exclusive"),
    )
    return {}


async def _delete(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    name = asked.text("queue")
    await engine.delete_queue(ns, name)
    rights.forget(ns, name)
    return {}


async def _delete_channel(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    await engine.delete_channel(ns, asked.text("queue"), asked.text("channel"))
    return {}


async def _pause(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    await engine.pause(ns, asked.text("queue"), asked.optional_text("channel"))
    return {}


async def _resume(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    await engine.resume(ns, asked.text("queue"), asked.optional_text("channel"))
    return {}


async def _empty(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    return {"messages": await engine.empty(ns, asked.text("queue"), asked.optional_text("channel"))}


async def _peek(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    count = asked.integer("count", 10, COUNT_MAX)
    found = await engine.peek(
        ns, asked.text("queue"), asked.optional_text("channel"), items_max=count, bytes_max=ANSWER_BYTES
    )
    return {"messages": [_message(each) for each in found]}


async def _export(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    after = asked.text("after")
    count = max(1, asked.integer("count", 100, COUNT_MAX))
    position = parse_message_id(after) if after else None
    after_seq = asked.integer("after_seq", 0, 2**40)
    if after_seq:  # of a share, whose own number of its partition its home does not know
        position = ((await engine.loaded(ns, asked.text("queue"))).partition_ids[0], after_seq)
    found = await engine.read_log(ns, asked.text("queue"), after=position, items_max=count, bytes_max=ANSWER_BYTES)
    last = message_id(found[-1].partition, found[-1].seq) if found else ""
    return {"messages": [_message(each) for each in found], "after": last}


async def _dead(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    found = await engine.dead_letters(
        ns,
        asked.text("queue"),
        asked.text("channel"),
        after_id=asked.integer("after", 0, 10**17),
        items_max=max(1, asked.integer("count", 100, COUNT_MAX)),
    )
    letters: list[dict[str, Any]] = []
    size = 0
    more = len(found) >= max(1, asked.integer("count", 100, COUNT_MAX))
    for each in found:
        size += len(each.message.body)
        if letters and size > ANSWER_BYTES:
            more = True
            break
        message = _message(each.message)
        letters.append(
            {
                **message,
                "id": each.id,
                "message_id": message["id"],
                "died_s": each.died_us / 1e6,
                "attempts": each.attempts,
                "reasons": list(each.reasons),
            }
        )
    return {"dead": letters, "more": more}


async def _replay(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    count = await engine.replay(ns, asked.text("queue"), asked.text("channel"), asked.ids())
    return {"messages": count}


async def _forget_dead(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    count = await engine.forget_dead(ns, asked.text("queue"), asked.text("channel"), asked.ids())
    return {"messages": count}


class ReceiveAsked(NamedTuple):
    """The fields of a ``receive``."""

    channel: str
    items: int
    wait_s: float
    invisible_s: float
    attempt_id: str
    from_start: bool
    only_again: bool
    """Only what that attempt got before, and is still held."""
    of_placed: bool
    """Of a share: the home makes its channels."""


def receive_asked(fields: Mapping[str, object]) -> ReceiveAsked:
    """Raises ``ValueError``."""
    asked = _Asked(fields, "")
    items = asked.integer("count", 16, ITEMS_MAX)
    wait_s = asked.number("wait_s", 10.0, WAIT_MAX_S)
    invisible_s = asked.number("invisible_s", 60.0, _INVISIBLE_MAX_S)
    if not items or not invisible_s:
        raise ValueError("count and invisible_s are more than 0")
    return ReceiveAsked(
        asked.text("channel"),
        items,
        wait_s,
        invisible_s,
        _attempt_id(asked),
        asked.flag("from_start"),
        asked.flag("only_again"),
        asked.flag("of_placed"),
    )


def channel_asked(fields: Mapping[str, object]) -> str:
    """Raises ``ValueError``."""
    return _Asked(fields, "").text("channel")


def _attempt_id(asked: _Asked) -> str:
    attempt_id = asked.optional_text("attempt_id") or ""
    if len(attempt_id) > _ATTEMPT_ID_CHARS:
        raise ValueError(f"attempt_id has {len(attempt_id)} characters: at most {_ATTEMPT_ID_CHARS}")
    return attempt_id


async def _receive(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    wanted = receive_asked(asked.fields)
    receiver = await engine.simple.receiver(
        ns,
        asked.text("queue"),
        wanted.channel,
        asked.owner,
        from_start=wanted.from_start,
        of_placed=wanted.of_placed,
    )
    found = await receiver.receive(
        wanted.items, wanted.wait_s, wanted.invisible_s, wanted.attempt_id, only_again=wanted.only_again
    )
    return {"messages": [_received(each) for each in found]}


async def _end_receive(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    attempt_id = _attempt_id(asked)
    if not attempt_id:
        raise ValueError("attempt_id is missing: it says which receive is to end")
    receiver = await engine.simple.receiver(
        ns, asked.text("queue"), asked.text("channel"), asked.owner, from_start=False, of_placed=True
    )
    receiver.end(attempt_id)
    return {}


def _received(received: Received) -> dict[str, Any]:
    message = received.delivery.message
    stored = StoredMessage(
        received.delivery.partition,
        message.seq,
        message.published_us,
        0,
        received.delivery.attempts,
        "",
        message.attributes,
        message.body,
    )
    return {**_message(stored), "handle": received.handle, "invisible_s": received.invisible_s}


def handles_asked(fields: Mapping[str, object]) -> list[str]:
    """Of an ``ack``. Raises ``ValueError``."""
    handles = _Asked(fields, "").texts("handles", _HANDLES_MAX)
    for handle in handles:
        parse_handle(handle)  # before any is taken
    return handles


async def _ack(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    handles = handles_asked(asked.fields)
    receiver = await engine.simple.known(ns, asked.text("queue"), asked.text("channel"), asked.owner)
    refused = handles if receiver is None else receiver.ack(handles)
    if len(refused) < len(handles):
        await engine.flush()
    return {"refused": refused}


def invisible_asked(fields: Mapping[str, object]) -> tuple[str, float]:
    """Handle and seconds of an ``invisible``. Raises ``ValueError``."""
    asked = _Asked(fields, "")
    handle = asked.text("handle")
    parse_handle(handle)
    return handle, asked.number("invisible_s", 60.0, _INVISIBLE_MAX_S)


async def _invisible(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    handle, invisible_s = invisible_asked(asked.fields)
    receiver = await engine.simple.known(ns, asked.text("queue"), asked.text("channel"), asked.owner)
    if receiver is None:
        raise NotInFlightError(f"nothing that was received is held: {handle[:40]} is over")
    left_s = receiver.change_invisible(handle, invisible_s)
    if not left_s:
        await engine.flush()
    return {"invisible_s": left_s}


async def _expand(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    name = asked.text("queue")
    if asked.has("nodes"):
        raise ValueError(f"the queue {name!r} is kept here alone: its new partitions are here, too")
    added = await engine.expand(ns, name, asked.integer("partitions", 0, LOGICAL_PARTITIONS))
    return {"queue": name, "added": added, **await engine.route(ns, name)}


async def _route(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    return await engine.route(ns, asked.text("queue"))


async def _consumers(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    return await engine.group(ns, asked.text("queue"), asked.text("channel"))


async def _locks(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    found = await engine.group(ns, asked.text("queue"), asked.text("channel"))
    return {"exclusive": found["exclusive"], "locks": found["locks"]}


async def _serve(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    low, high = asked.integer("low", 0, LOGICAL_PARTITIONS), asked.integer("high", 0, LOGICAL_PARTITIONS)
    if low >= high:
        raise ValueError(f"a share serves no range from {low} to {high}")
    return {"last_seq": await engine.serve(ns, asked.text("queue"), low, high)}


async def _floors(engine: QueueEngine, rights: Rights, ns: str, asked: _Asked) -> dict[str, Any]:
    queue = await engine.loaded(ns, asked.text("queue"))
    floors = {
        name: min(channel.floor(partition) for partition in queue.partition_ids)
        for name, channel in queue.channels.items()
    }
    # What a crash takes back is not behind a barrier yet.
    await engine.flush()
    return {
        "messages": queue.items,
        "bytes": queue.size_bytes,
        "last_seq": sum(log.visible for log in queue.logs.values()),
        "elsewhere": queue.counts["published_elsewhere"],
        "floors": floors,
    }


def _message(stored: StoredMessage) -> dict[str, Any]:
    attributes = decode_attributes(stored.attributes)
    fields: dict[str, Any] = {
        "id": message_id(stored.partition, stored.seq),
        "published_s": stored.published_us / 1e6,
        "key": attributes.key,
        "tags": list(attributes.tags),
        "priority": attributes.priority,
        "headers": encode_headers(attributes.headers),
        "data": base64.b64encode(stored.body).decode("ascii"),
        "encoding": "base64",
    }
    if stored.due_us:
        fields["due_s"] = stored.due_us / 1e6
    if stored.state:
        fields["state"] = stored.state
    if stored.attempts:
        fields["attempts"] = stored.attempts
    return fields


_Operation = Callable[[QueueEngine, Rights, str, _Asked], Awaitable[dict[str, Any]]]
_OPERATIONS: Final[Mapping[str, _Operation]] = {
    "list": _list,
    "info": _info,
    "create": _create,
    "create_channel": _create_channel,
    "delete": _delete,
    "delete_channel": _delete_channel,
    "pause": _pause,
    "resume": _resume,
    "empty": _empty,
    "peek": _peek,
    "export": _export,
    "dead": _dead,
    "receive": _receive,
    "ack": _ack,
    "invisible": _invisible,
    "end_receive": _end_receive,
    "replay": _replay,
    "forget_dead": _forget_dead,
    "expand": _expand,
    "route": _route,
    "consumers": _consumers,
    "locks": _locks,
    "serve": _serve,
    "floors": _floors,
    "may_create": _may_create,
}
