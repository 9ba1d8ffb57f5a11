"""Administrative requests and replies as JSON: the payloads of ADMIN and ANSWER frames, and those of the control API.

A malformed request is refused with one sentence that names the field and the expected value. Pure.
"""

from collections.abc import Mapping
from typing import Final, cast, get_args

import msgspec
from msgspec import Struct

from dep2p.control_api.structs import FieldError, S, convert_fields
from dep2p.errors import ErrorCode, ProtocolError
from dep2p.protocols.queues.admin import (
    REQUESTS,
    AdminReply,
    AdminRequest,
    BrowsedMessage,
    CreateQueue,
    DeadLetterPage,
    DeleteQueue,
    DescribeQueue,
    DescribeRoute,
    ExpandQueue,
    ExportPage,
    ListDeadLetters,
    MessageList,
    R,
    ReadAckFloors,
    ReceivedMessage,
    ReceivedMessages,
    operation_of,
)

_BY_OPERATION: Final = {operation_of(each): each for each in REQUESTS}
_REPLIES: Final[dict[type[AdminRequest[AdminReply]], type[AdminReply]]] = {
    each: get_args(vars(each)["__orig_bases__"][0])[0] for each in REQUESTS
}


def parse_request(fields: Mapping[str, object]) -> AdminRequest[AdminReply]:
    """Make a request from its ``op`` and its other fields in JSON.

    Raises :class:`FieldError` with a sentence that names the field and the expected value.
    """
    operation = fields.get("op")
    kind = _BY_OPERATION.get(operation) if isinstance(operation, str) else None
    if kind is None:
        raise FieldError(f"no operation {operation!r:.60} on queues: there are {', '.join(_BY_OPERATION)}", "op")
    return convert_fields(fields, kind, operation_of(kind))


def checked(request: AdminRequest[R]) -> AdminRequest[R]:
    """Check that the fields of a request have the types and bounds of their declarations; return the request.

    A program that no type checker has seen may have made it with others. Raises ``ValueError``.
    """
    return convert_fields(_fields(request), type(request), operation_of(request))


def encode_admin(request: AdminRequest[AdminReply]) -> bytes:
    """Encode the payload of an ADMIN frame: a JSON object of ``op`` and the fields that are not at their defaults."""
    return msgspec.json.encode(request)


def decode_admin(payload: bytes) -> dict[str, object]:
    """Decode the object of an ADMIN frame, for `parse_request`. Raises :class:`ProtocolError`."""
    fields = _decode_object(payload, "ADMIN")
    if not isinstance(fields.get("op"), str):
        raise ProtocolError("ADMIN without an operation")
    return fields


# The fields of replies that have other names between nodes than in the API, and the requests whose replies have some.
_WIRE_NAMES: Final = {"dead_letters": "dead", "shards": "placed", "pending_deletions": "left"}
_WIRE_ROW_NAMES: Final = {"shard": "share", "off_partition": "elsewhere"}
_API_NAMES: Final = {wire: name for name, wire in _WIRE_NAMES.items()}
_API_ROW_NAMES: Final = {wire: name for name, wire in _WIRE_ROW_NAMES.items()}
_RENAMED: Final = (CreateQueue, DescribeQueue, DeleteQueue, ListDeadLetters, ExpandQueue, DescribeRoute, ReadAckFloors)


def encode_answer(request: AdminRequest[AdminReply], reply: AdminReply) -> bytes:
    """Encode the payload of an ANSWER frame."""
    if not isinstance(request, _RENAMED):
        return msgspec.json.encode(reply)
    return msgspec.json.encode(_renamed(_fields(reply), _WIRE_NAMES, _WIRE_ROW_NAMES))


def decode_answer(request: AdminRequest[R], payload: bytes) -> R:
    """Decode the reply of an ANSWER frame. Raises :class:`ProtocolError` for one that does not answer this request."""
    fields = _decode_object(payload, "the answer")
    if isinstance(request, _RENAMED):
        fields = _renamed(fields, _API_NAMES, _API_ROW_NAMES)
        if isinstance(request, ListDeadLetters):
            fields.setdefault("more", False)
    try:
        return cast(R, msgspec.convert(fields, _REPLIES[type(request)]))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the answer to {operation_of(request)!r} is malformed: {error}") from None


def reply_fields(reply: Struct) -> dict[str, object]:
    """Return the fields of a reply, or of a message in one, for the control API: a body is ``body`` there."""
    fields = _fields(reply)
    if isinstance(reply, BrowsedMessage | ReceivedMessage):
        return _message(fields, "data", "body")
    if rows := _MESSAGES.get(type(reply)):
        fields[rows] = [_message(each, "data", "body") for each in _rows(fields[rows])]
    return fields


def parse_reply(kind: type[S], fields: Mapping[str, object]) -> S:
    """Make the struct from the fields of the control API. Raises ``ValueError``."""
    if issubclass(kind, BrowsedMessage):
        fields = _message(dict(fields), "body", "data")
    elif rows := _MESSAGES.get(kind):
        fields = {**fields, rows: [_message(each, "body", "data") for each in _rows(fields.get(rows, ()))]}
    return msgspec.convert(fields, kind)


_MESSAGES: Final[dict[type[Struct], str]] = {
    MessageList: "messages",
    ExportPage: "messages",
    ReceivedMessages: "messages",
    DeadLetterPage: "dead_letters",
}
"""The field with the messages of a reply."""


def _message(fields: dict[str, object], name: str, new_name: str) -> dict[str, object]:
    if name in fields:
        fields[new_name] = fields.pop(name)
    return fields


def _rows(value: object) -> list[dict[str, object]]:
    return msgspec.convert(value, list[dict[str, object]])


def _fields(reply: Struct) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(reply)
    return fields


def _decode_object(payload: bytes, what: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(payload, type=dict[str, object])
    except msgspec.ValidationError:
        raise ProtocolError(f"{what} is no object", ErrorCode.INVALID_REQUEST) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON: {type(error).__name__}", ErrorCode.INVALID_REQUEST) from None


def _renamed(fields: dict[str, object], names: Mapping[str, str], row_names: Mapping[str, str]) -> dict[str, object]:
    """Rename some fields, and some fields of the rows in ``placed``, ``left`` and ``partitions``. Counts that happen to
    have such a name stay."""
    renamed: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, list | tuple):
            renamed[names.get(name, name)] = [_row(each, row_names) for each in msgspec.convert(value, list[object])]
        else:
            renamed[row_names.get(name, name)] = value
    return renamed


def _row(value: object, row_names: Mapping[str, str]) -> object:
    if not isinstance(value, dict):
        return value
    return {row_names.get(name, name): each for name, each in msgspec.convert(value, dict[str, object]).items()}
