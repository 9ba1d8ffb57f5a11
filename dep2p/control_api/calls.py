"""The calls of the control API, one struct each: its client sends them, and its routes read them.

A call with an unknown, missing or mistyped field is refused with a sentence that names the field, before anything has
changed (`parse_call`). The calls about queues are in `dep2p.protocols.queues.admin`. Pure.
"""

import base64
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from dep2p.control_api.encoding import decode_payload
from dep2p.control_api.structs import FieldError, S, convert_fields
from dep2p.gossipsub.topic_types import OnNoPeers, WaitFor
from dep2p.limits import HANDLER_CONCURRENCY

Encoding = Literal["base64", "utf-8"]
Fields = dict[str, object]
"""An object whose fields this module does not know."""
RequestId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
HandleToken = Annotated[str, Meta(min_length=1, max_length=64)]
"""A handle of a topic, by the name that its client has given it."""
RepliesConcurrency = Annotated[int, Meta(ge=1)]
TAKE_ITEMS_MAX: Final = 4_096
INVITE_ADDRS_MAX: Final = 16
JOIN_ADDRS_MAX: Final = 64
BROADCAST_PEERS_MAX: Final = 4_096
BROADCAST_CONCURRENCY_MAX: Final = 256
CRITICAL_PEERS_MAX: Final = 256


class Call(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a call."""


class EmptyCall(Call, frozen=True):
    """A call that says nothing besides its path."""


class PayloadCall(Call, frozen=True, kw_only=True):
    """A call that carries bytes: in base64, or as the text that they are in UTF-8."""

    data: str
    encoding: Encoding = "base64"

    def payload(self) -> bytes:
        """The bytes. Raises :class:`FieldError`."""
        return _decoded(self.data, self.encoding)


class OptionalPayloadCall(Call, frozen=True, kw_only=True):
    """A call that may carry bytes."""

    data: str = ""
    encoding: Encoding = "base64"

    def payload(self) -> bytes:
        """The bytes; none when the call has no data. Raises :class:`FieldError`."""
        return _decoded(self.data, self.encoding)


class ConnectPeer(Call, frozen=True, kw_only=True):
    """POST /v1/peers: dial an address that ends in /p2p/PEER, or a known peer. One of the two."""

    addr: str | None = None
    peer: str | None = None
    timeout_s: float | None = None


class PingPeer(Call, frozen=True, kw_only=True):
    """POST /v1/peers/{peer}/ping."""

    count: Annotated[int, Meta(ge=1)] = 1
    timeout_s: float = 5.0


class JoinRealm(Call, frozen=True, kw_only=True):
    """POST /v1/realms: join by an invite, or by a realm file in base64. One of the two."""

    invite: str | None = None
    realm: str | None = None
    addrs: Annotated[tuple[str, ...], Meta(max_length=JOIN_ADDRS_MAX)] = ()
    """Addresses of members to dial, besides those of the invite or the realm file."""


class InviteToRealm(Call, frozen=True, kw_only=True):
    """POST /v1/realms/{realm}/invite."""

    addrs: Annotated[tuple[str, ...], Meta(max_length=INVITE_ADDRS_MAX)] = ()
    """The addresses in the invite; the node's own when empty."""


class SetFields(Call, frozen=True, kw_only=True):
    """POST /v1/fields: say these things about this node; null removes a field."""

    fields: dict[str, str | None]
    realm: str | None = None


class MessageMember(PayloadCall, frozen=True, kw_only=True):
    """POST /v1/notifies: a message to a member, or with ``*`` to every member that is up."""

    peer: str
    name: str
    realm: str | None = None
    headers: Fields | None = None
    peers: Annotated[tuple[str, ...], Meta(max_length=BROADCAST_PEERS_MAX)] | None = None
    """With ``*``: these peers, in place of every member that is up."""
    concurrency: Annotated[int, Meta(ge=1, le=BROADCAST_CONCURRENCY_MAX)] = 16
    """With ``*``: peers that are asked at once."""


class RequestMember(MessageMember, frozen=True, kw_only=True):
    """POST /v1/requests."""

    timeout_s: float | None = None
    idempotent: bool = False


class ServeRequests(Call, frozen=True, kw_only=True):
    """POST /v1/replies: take the requests of a name."""

    name: str
    realm: str | None = None
    concurrency: RepliesConcurrency = HANDLER_CONCURRENCY
    rate_per_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Requests of one member in a second at most; 0: no limit."""
    group: str | None = None
    """Share the requests with other programs of this group, and offer the name to all members."""
    version: str | None = None
    schema: str | None = None
    metadata: dict[str, str] | None = None


class RequestAny(PayloadCall, frozen=True, kw_only=True):
    """POST /v1/services/{name}/requests: ask any member that offers the service."""

    realm: str | None = None
    headers: Fields | None = None
    timeout_s: float | None = None
    idempotent: bool = False
    group: str | None = None
    version: str | None = None
    schema: str | None = None


class GiveReply(Call, frozen=True, kw_only=True):
    """POST /v1/replies/{id}: the answer, or the text of an error."""

    data: str | None = None
    encoding: Encoding = "base64"
    error: str | None = None

    def payload(self) -> bytes:
        """The bytes of the answer. Raises :class:`FieldError`."""
        if self.data is None:
            raise FieldError("the field 'data' is missing", "data")
        return _decoded(self.data, self.encoding)


class ConfirmNotify(Call, frozen=True, kw_only=True):
    """POST /v1/notifies/{id}: a reliable message was handled, or the text of the error that rejects it."""

    error: str | None = None


class OpenStreamCall(OptionalPayloadCall, frozen=True, kw_only=True):
    """POST /v1/streams."""

    peer: str
    name: str
    realm: str | None = None
    headers: Fields | None = None


class PublishCall(PayloadCall, frozen=True, kw_only=True):
    """POST /v1/topics/{topic}/messages. The last three are for a reliable publish."""

    realm: str | None = None
    public: bool = False
    on_no_peers: OnNoPeers = "error"
    headers: Fields | None = None
    wait: bool = True
    """Whether to wait while the publish rate is used up or a neighbour's queue is full."""
    handle: HandleToken | None = None
    """The handle that publishes: its own subscriptions do not get the message."""
    reliable: bool = False
    critical_peers: Annotated[tuple[str, ...], Meta(max_length=CRITICAL_PEERS_MAX)] | None = None
    wait_for: WaitFor | None = None
    wait_s: float | None = None
    ttl_s: float | None = None
    """Seconds until a reliable message expires; the daemon's setting by default."""


class PublishedLine(PayloadCall, frozen=True, kw_only=True):
    """One line of a body of messages to publish."""

    headers: Fields | None = None


class OpenSessionCall(OptionalPayloadCall, frozen=True, kw_only=True):
    """POST /v1/sessions: open a session, or go on with one by its token."""

    peer: str
    name: str
    realm: str | None = None
    token: str | None = None
    timeout_s: float | None = None
    """Seconds for the server's first answer; the daemon's setting by default."""


class TakePushes(Call, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/take: all up to ``after`` are handled; give the next ones."""

    after: Annotated[int, Meta(ge=0)] = 0
    items_max: Annotated[int, Meta(ge=1, le=TAKE_ITEMS_MAX)] = 256
    wait_s: float = 30.0


class AskSession(OptionalPayloadCall, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/requests."""

    timeout_s: float | None = None


class PushToSession(PayloadCall, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/pushes; with a ``request_id`` bound to that request."""

    request_id: RequestId = 0
    place: Literal["before", "after"] = "before"
    wait: bool = True
    """Whether to wait for room; a bound push always does."""


class PushToSessions(PayloadCall, frozen=True, kw_only=True):
    """POST /v1/sessions/pushes: to every session of a name."""

    name: str


class RespondInSession(OptionalPayloadCall, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/responses: the answer, or the text of an error."""

    request_id: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    error: str | None = None


class EndSession(Call, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/end."""

    reason: Annotated[str, Meta(max_length=1_024)] = ""


class SendReliably(PayloadCall, frozen=True, kw_only=True):
    """POST /v1/deliveries."""

    peer: str
    name: str
    realm: str | None = None
    headers: Fields | None = None
    wait_s: float = 0.0
    when_full: Literal["wait", "error"] = "wait"
    ttl_s: float | None = None
    """Seconds until it expires; the daemon's setting by default."""


class FlushOutbox(Call, frozen=True, kw_only=True):
    """POST /v1/outbox/flush."""

    realm: str | None = None
    wait_s: float = 0.0


class DropFromOutbox(Call, frozen=True, kw_only=True):
    """POST /v1/outbox/drop: one message, those for a peer, or all. One of the three."""

    realm: str | None = None
    id: str | None = None
    peer: str | None = None
    all: bool = False
    failed: bool = False
    """Forget messages that were lost, in place of giving up those that wait."""


class ReplayLost(Call, frozen=True, kw_only=True):
    """POST /v1/outbox/replay: one lost message, those for a peer, or all. One of the three."""

    realm: str | None = None
    id: str | None = None
    peer: str | None = None
    all: bool = False


class StartTrace(Call, frozen=True, kw_only=True):
    """POST /v1/trace/start; settings that are left out are those of [trace]."""

    dir: str | None = None
    """Absolute, on the daemon's machine."""
    rpcs: bool | None = None
    sample: Annotated[float, Meta(gt=0, le=1)] | None = None
    roll_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    roll_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    disk_bytes_max: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    age_max_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    snapshot_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    clock_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None


def base64_text(data: bytes) -> str:
    """The ``data`` of a call that carries bytes."""
    return base64.b64encode(data).decode("ascii")


def _decoded(data: str, encoding: Encoding) -> bytes:
    try:
        return decode_payload(data, encoding)
    except ValueError as error:
        raise FieldError(f"the field 'data': {error}", "data") from None


def parse_call(fields: Mapping[str, object], kind: type[S], label: str) -> S:
    """A call from its JSON fields; null stands for a field that is not there. ``label`` begins a refusal's sentence.

    Raises :class:`FieldError` with a sentence about the field.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise FieldError(f"{label}: the field {name!r}: is not valid Unicode", name) from None
    return convert_fields(given, kind, label)
