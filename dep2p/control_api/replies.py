"""The replies of the control API, one struct each: its routes give them, and its client returns them.

They are read leniently: a field that this version does not know is ignored, so that a newer daemon may say more. The
replies about queues are in `dep2p.protocols.queues.admin`. Pure.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from dep2p.types import PeerId, RealmId

Fields = dict[str, object]
"""An object whose fields this module does not know."""

R = TypeVar("R", bound=Struct)


class Reply(Struct, frozen=True, kw_only=True):
    """An answer, a part of one, or a line of one."""


class PayloadReply(Reply, frozen=True, kw_only=True):
    """An answer that carries bytes."""

    data: bytes
    encoding: Literal["base64"] = "base64"


class AcceptedReply(Reply, frozen=True, kw_only=True):
    """The call was carried out."""

    accepted: bool = True


class Health(Reply, frozen=True, kw_only=True):
    """GET /healthz."""

    status: str
    state: str
    listening: bool


class Readiness(Reply, frozen=True, kw_only=True):
    """GET /readyz."""

    ready: bool
    reasons: tuple[str, ...]


class RealmSummary(Reply, frozen=True, kw_only=True):
    """A joined realm."""

    name: str
    realm_id: RealmId
    members_known: int
    members_up: int
    problems: tuple[str, ...] = ()
    """Why connected peers are not verified in the realm although the node tries, and, while no member is connected, why
    the peers of the invite are not reached; a sentence for each."""


class RealmList(Reply, frozen=True, kw_only=True):
    """GET /v1/realms."""

    realms: tuple[RealmSummary, ...]


class ConnectionCounts(Reply, frozen=True, kw_only=True):
    """Connections by direction."""

    inbound: int
    outbound: int


class StoreOwnershipSummary(Reply, frozen=True, kw_only=True):
    """The broker of the queues. All but the first three are of a store that several nodes share."""

    shared: bool
    role: str
    """``owner`` or ``standby``."""
    store: str
    owner: str | None = None
    term: int = 0
    since_s: float | None = None
    silent_s: float = 0.0
    lease_s: float = 0.0
    nodes: tuple[str, ...] = ()
    problem: str = ""
    terms: int = 0
    failovers: int = 0
    terms_lost: int = 0
    owner_checks_failed: int = 0


class NsqSummary(Reply, frozen=True, kw_only=True):
    """NSQ's protocol and nsqd's API: their addresses and their clients."""

    listen: str | None
    http: str | None
    connections: int
    consumers: int


class MemberQuotas(Reply, frozen=True, kw_only=True):
    """One member's use of this node."""

    peer: PeerId
    held: dict[str, int]
    """By quota, how much it holds now."""
    refused: dict[str, int]
    """By quota, how often it was refused since the node started."""


class CircuitSummary(Reply, frozen=True, kw_only=True):
    """The relay that a connection goes through, and what the relay still carries."""

    relay: PeerId
    limited: bool
    """It carries little, or not for long: requests go over it, pub/sub does not."""
    data_left_bytes: int | None
    """Bytes in the direction that has carried more; None without a limit."""
    time_left_s: float | None
    """None without a limit."""


class LimitedPeer(Reply, frozen=True, kw_only=True):
    """A peer that is reached over limited relays only."""

    peer: PeerId
    circuit: CircuitSummary
    """The circuit of the connection in use."""


class DaemonStatus(Reply, frozen=True, kw_only=True):
    """GET /v1/status: the node at a glance."""

    peer_id: PeerId
    version: str
    pid: int
    state: str
    """``running``, ``draining`` or ``stopping``."""
    started_at_s: float
    """Unix seconds."""
    uptime_s: float
    data_dir: str
    listen: tuple[str, ...]
    """The addresses under which others can dial it."""
    peers: int
    connections: ConnectionCounts
    realms: tuple[RealmSummary, ...]
    streams: int
    subscriptions: dict[str, int]
    """Readers of the control API, by kind."""
    in_flight: int
    """Calls that a drain waits for."""
    queues: StoreOwnershipSummary
    nsq: NsqSummary | None
    problems: tuple[str, ...]
    """Problems of a daemon that runs nevertheless, human-readable."""
    quotas: tuple[MemberQuotas, ...] = ()
    """The members that were refused most, at most 16."""
    limited: tuple[LimitedPeer, ...] = ()
    """The peers that are reached over limited relays only, at most 16."""
    messaging: object
    """Statistics, as docs/reference/control-api.md has them; so are the next ones."""
    pubsub: object
    public_pubsub: object
    counters: dict[str, int]


class ConfigurationPaths(Reply, frozen=True, kw_only=True):
    """Files of the daemon."""

    key_file: str
    socket: str
    token_file: str


class Configuration(Reply, frozen=True, kw_only=True):
    """GET /v1/config: the configuration in effect, without secrets."""

    values: dict[str, Fields]
    """By section and key."""
    origins: dict[str, str]
    """Where each ``section.key`` has its value from."""
    file: str | None
    paths: ConfigurationPaths


class LimitsSummary(Reply, frozen=True, kw_only=True):
    """GET /v1/limits: every bound of the node and of the control API."""

    node: Fields
    control: Fields


class DrainState(Reply, frozen=True, kw_only=True):
    """POST /v1/drain."""

    state: str
    in_flight: int


class ShutdownState(Reply, frozen=True, kw_only=True):
    """POST /v1/shutdown."""

    state: str


class ConnectionSummary(Reply, frozen=True, kw_only=True):
    """A connection to a peer."""

    id: int
    direction: str
    """``inbound`` or ``outbound``."""
    addr: str
    age_s: float
    rtt_ms: float | None
    circuit: CircuitSummary | None = None
    """None for a direct connection."""


class PeerSummary(Reply, frozen=True, kw_only=True):
    """A connected peer."""

    peer: PeerId
    connections: tuple[ConnectionSummary, ...]
    addrs: tuple[str, ...]
    realms: tuple[str, ...]
    """Names of the realms in which it is a verified member."""


class PeerList(Reply, frozen=True, kw_only=True):
    """GET /v1/peers."""

    peers: tuple[PeerSummary, ...]


class ConnectedPeer(Reply, frozen=True, kw_only=True):
    """POST /v1/peers: the connection that there is now."""

    peer: PeerId
    addr: str
    direction: str
    realms: tuple[str, ...]
    """Names of the realms in which it is a verified member."""


class PeerDisconnection(Reply, frozen=True, kw_only=True):
    """DELETE /v1/peers/{peer}."""

    peer: PeerId
    disconnected: bool = True


class PingTimes(Reply, frozen=True, kw_only=True):
    """POST /v1/peers/{peer}/ping: round trips; None for a ping that got no answer."""

    peer: PeerId
    rtts_ms: tuple[float | None, ...]
    lost: int


class RealmLeft(Reply, frozen=True, kw_only=True):
    """DELETE /v1/realms/{realm}."""

    left: str
    realm_id: RealmId


class MemberOffer(Reply, frozen=True, kw_only=True):
    """A service that a member offers."""

    name: str
    group: str
    version: str = ""
    schema: str = ""


class MemberSummary(Reply, frozen=True, kw_only=True):
    """A member of a realm, as this node knows it. Times are Unix seconds."""

    peer: PeerId
    addrs: tuple[str, ...]
    state: str
    """``up``, ``down`` or ``left``."""
    seq: int
    issued_s: float
    expires_s: float
    last_seen_s: float | None
    fields: dict[str, str] = {}
    """Its own words about itself, by key."""
    services: tuple[MemberOffer, ...] = ()
    """The services that it offers."""


class MemberFields(Reply, frozen=True, kw_only=True):
    """GET and POST /v1/fields: what this node says about itself."""

    realm: str
    fields: dict[str, str]


class MemberEventFields(Reply, frozen=True):
    """The further fields of an event about a member: the member after it."""

    state: str = "left"
    fields: dict[str, str] = {}
    services: tuple[MemberOffer, ...] = ()


class MemberList(Reply, frozen=True, kw_only=True):
    """GET /v1/realms/{realm}/members."""

    realm: str
    members: tuple[MemberSummary, ...]


class ServiceSummary(Reply, frozen=True, kw_only=True):
    """A service, as one member offers it."""

    name: str
    group: str
    version: str
    schema: str
    peer: PeerId
    connected: bool
    in_flight: int
    """Requests of this node to any member that it works on."""
    time_ms: float | None
    """The time of its answers to this node, averaged; null: it has answered none lately."""
    failures: int
    """Tries in a row that it did not answer."""


class ServiceList(Reply, frozen=True, kw_only=True):
    """GET /v1/services."""

    services: tuple[ServiceSummary, ...]


class ServiceDetails(Reply, frozen=True, kw_only=True):
    """A member's own words about a service."""

    name: str
    group: str
    version: str
    schema: str
    metadata: dict[str, str]
    programs: int
    since_s: float
    requests: int
    errors: int
    in_flight: int
    mean_ms: float
    p99_ms: float


class ServiceAnswer(Reply, frozen=True, kw_only=True):
    """A member's answer, or the error in its place."""

    peer: PeerId
    rtt_ms: float | None = None
    services: tuple[ServiceDetails, ...] = ()
    """None: the member does not offer it, whatever its record says."""
    error: dict[str, object] | UnsetType = UNSET
    """An RFC 9457 problem."""


class ServiceAnswers(Reply, frozen=True, kw_only=True):
    """GET /v1/services/{name}."""

    members: tuple[ServiceAnswer, ...]


class InviteReply(Reply, frozen=True, kw_only=True):
    """POST /v1/realms/{realm}/invite."""

    invite: str
    realm: str
    addrs: tuple[str, ...]


class RequestReply(PayloadReply, frozen=True, kw_only=True):
    """POST /v1/requests: a member's answer."""

    peer: PeerId
    elapsed_ms: float


class MemberResult(Reply, frozen=True, kw_only=True):
    """One member's part of a broadcast: an answer, an RFC 9457 problem, or neither for a message without answer."""

    peer: PeerId
    data: bytes | UnsetType = UNSET
    encoding: Literal["base64"] | UnsetType = UNSET
    error: Fields | UnsetType = UNSET


class BroadcastReply(Reply, frozen=True, kw_only=True):
    """POST /v1/requests and /v1/notifies to every member."""

    results: tuple[MemberResult, ...]


class MessageLine(PayloadReply, frozen=True, kw_only=True):
    """A message of a member."""

    peer: PeerId
    name: str
    realm_id: RealmId
    headers: Fields = {}


class NotifyLine(MessageLine, frozen=True, kw_only=True):
    """GET /v1/notifies: a notify of a member."""

    received_at_s: float = 0.0
    """When it came to this node, in seconds since 1970."""
    id: str | UnsetType = UNSET
    """The name of a reliable message, for a reader that confirms: `POST /v1/notifies/{id}`."""


class RequestLine(MessageLine, frozen=True, kw_only=True):
    """POST /v1/replies: a request of a member."""

    id: str
    deadline_ms: int
    idempotent: bool = False


class StreamLine(MessageLine, frozen=True, kw_only=True):
    """GET /v1/streams: a stream that a member opened."""

    id: str


class StreamOpenedReply(Reply, frozen=True, kw_only=True):
    """POST /v1/streams."""

    id: str
    peer: PeerId
    name: str
    realm_id: RealmId


class StreamItems(Reply, frozen=True, kw_only=True):
    """POST /v1/streams/{id}/items: the items that went to the peer."""

    items: int
    bytes: int


class StreamClosed(Reply, frozen=True, kw_only=True):
    """DELETE /v1/streams/{id}."""

    id: str
    closed: bool = True


class TopicSummary(Reply, frozen=True, kw_only=True):
    """A joined topic, in counts."""

    topic: str
    realm: str | None
    """None for the public network."""
    realm_id: RealmId | None
    peers: int
    mesh: int
    subscriptions: int
    buffered_items: int
    by_pattern: bool = False
    """Whether the node is in it only because a pattern matches."""


class TopicList(Reply, frozen=True, kw_only=True):
    """GET /v1/topics."""

    topics: tuple[TopicSummary, ...]


class TopicJoined(Reply, frozen=True, kw_only=True):
    """GET /v1/topics/{topic}/handle: the first line; the handle is there while the connection is."""

    topic: str
    realm_id: RealmId | None


class TopicPeers(Reply, frozen=True, kw_only=True):
    """GET /v1/topics/{topic}: the neighbours that are in it."""

    topic: str
    realm_id: RealmId | None
    joined: bool
    """Whether this node is in it."""
    peers: tuple[PeerId, ...]
    mesh: tuple[PeerId, ...]
    """Those with which this node exchanges every message."""
    scores: dict[PeerId, float]


class TopicLine(PayloadReply, frozen=True, kw_only=True):
    """GET /v1/topics/{topic}/messages: a message."""

    topic: str
    sender: PeerId | None
    seqno: int | None
    id: str
    received_from: PeerId | None
    received_at_s: float = 0.0
    """When it came to this node, in seconds since 1970."""
    headers: Fields | UnsetType = UNSET
    """Those of the author; not there when it gave none."""
    reply_token: str | UnsetType = UNSET
    """In hex: the author waits for answers, for POST /v1/answers."""
    reply_within_s: float | UnsetType = UNSET
    """For how long from now, at most."""


class TopicsNotJoinedLine(Reply, frozen=True, kw_only=True):
    """GET /v1/topics/{pattern}/messages: further topics match, and the node is in as many as it may be for patterns."""

    topics_not_joined: int
    topics_max: int


class DeliveryReceipt(Reply, frozen=True, kw_only=True):
    """POST /v1/deliveries, and GET /v1/deliveries/{id}: a reliable message at the end of the call."""

    id: str
    peer: PeerId
    state: str
    tries: int
    reason: str
    may_have_been_taken: bool = False
    """Whether the message failed or expired, and the receiver's handler may have taken it all the same."""


class PublishReply(Reply, frozen=True, kw_only=True):
    """POST /v1/topics/{topic}/messages: one message."""

    id: str
    """In hex."""
    sent_to: tuple[PeerId, ...]
    queued: bool
    dropped: tuple[PeerId, ...]
    local_subscriptions: int
    """Subscriptions of programs of this node that got it."""
    seqno: int | None = None
    """The node's number for the message; null on a network that does not sign."""


class ReliablePublishReply(PublishReply, frozen=True, kw_only=True):
    """The same with ``reliable``."""

    acknowledged_by: tuple[PeerId, ...]
    missing: dict[PeerId, str]
    receipts: tuple[DeliveryReceipt, ...]
    """One for each critical peer."""


class PublishManyReply(Reply, frozen=True, kw_only=True):
    """The same with a body of messages."""

    messages: int
    bytes: int
    queued: int
    dropped: int
    peers: int
    local_subscriptions: int
    """The fewest subscriptions of programs of this node that got a message."""


class SessionOpened(Reply, frozen=True, kw_only=True):
    """POST /v1/sessions."""

    id: str
    peer: PeerId
    name: str
    token: str


class SessionList(Reply, frozen=True, kw_only=True):
    """GET /v1/sessions: the statistics of each, as docs/reference/control-api.md has them."""

    sessions: tuple[Fields, ...]


class PushLine(PayloadReply, frozen=True, kw_only=True):
    """A push of a session; with a request that it is bound to, and its place beside the response."""

    seq: int
    request_id: int | UnsetType = UNSET
    place: Literal["", "before", "after"] | UnsetType = UNSET


class SessionResetPoint(Reply, frozen=True, kw_only=True):
    """The server has begun anew."""

    detail: str
    epoch: int
    next_seq: int


class TakenPushes(Reply, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/take."""

    pushes: tuple[PushLine, ...]
    token: str | None
    """The place behind the last push."""
    ended: bool
    reset: SessionResetPoint | UnsetType = UNSET
    gap: str | UnsetType = UNSET


class SessionTokenReply(Reply, frozen=True, kw_only=True):
    """DELETE /v1/sessions/{id}: the place of a session that is left."""

    token: str


class PushReply(Reply, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/pushes: its number, or the request that it is bound to."""

    seq: int | UnsetType = UNSET
    request_id: int | UnsetType = UNSET


class PushedToSessions(Reply, frozen=True, kw_only=True):
    """POST /v1/sessions/pushes."""

    pushed: int
    full: tuple[str, ...]
    """Ids of sessions that had no room."""


class ResponseReply(Reply, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/responses."""

    request_id: int


class SessionEnded(Reply, frozen=True, kw_only=True):
    """POST /v1/sessions/{id}/end."""

    id: str


class SessionLine(Reply, frozen=True, kw_only=True):
    """GET /v1/sessions?serve=NAME: something happened on a session that is served here."""

    event: Literal["opened", "request", "closed"]
    session: str
    peer: PeerId
    name: str
    data: bytes | UnsetType = UNSET
    encoding: Literal["base64"] | UnsetType = UNSET
    request_id: int | UnsetType = UNSET
    deadline_ms: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class DeliveryLine(DeliveryReceipt, frozen=True, kw_only=True):
    """GET /v1/deliveries: a reliable message changed its state."""

    realm: str
    """The realm's name."""
    realm_id: RealmId
    name: str


class OutboxMessage(Reply, frozen=True, kw_only=True):
    """A reliable message that waits for its acknowledgement."""

    id: str
    realm: str
    peer: PeerId
    name: str
    topic: str | None
    """The topic of a reliable publish."""
    state: str
    size_bytes: int
    tries: int
    age_s: float
    last_error: str
    """The last error of the link to the receiver; of a lost message, the reason of its end."""
    may_have_been_taken: bool = False
    """Whether it is lost, and the receiver's handler may have taken it all the same: a replay may be the second."""


class OutboxList(Reply, frozen=True, kw_only=True):
    """GET /v1/outbox."""

    items: tuple[OutboxMessage, ...]
    """The messages that wait; with ``?failed=1`` those that were lost, in the order of their ends."""
    is_durable: bool
    """Whether it is on disk."""
    lost: int
    """Messages that failed or expired, and are kept to be sent again."""


class OutboxLeft(Reply, frozen=True, kw_only=True):
    """POST /v1/outbox/flush."""

    left: int


class OutboxDropped(Reply, frozen=True, kw_only=True):
    """POST /v1/outbox/drop."""

    dropped: int


class OutboxReplayed(Reply, frozen=True, kw_only=True):
    """POST /v1/outbox/replay."""

    replayed: int


class TraceSettingsSummary(Reply, frozen=True, kw_only=True):
    """The settings of the trace: its contents and its files; the keys of [trace]."""

    rpcs: bool
    sample: float
    roll_bytes: int
    roll_s: float
    disk_bytes_max: int
    age_max_s: float
    snapshot_s: float
    clock_s: float


class TraceState(Reply, frozen=True, kw_only=True):
    """GET /v1/trace. Counts are of the run that is going on, or of the last one."""

    is_on: bool
    directory: str | None
    """None: nothing was traced yet."""
    settings: TraceSettingsSummary
    started_at_s: float
    """Unix seconds."""
    events: int
    bytes: int
    files: int
    """Complete ones."""
    growing: str | None
    """The file that is written now, by the name that it will have."""
    dropped: dict[str, int]
    """Events that were not written, by reason."""
    files_removed: int
    files_salvaged: int
    error: str
    """Why the last write failed; empty when it did not."""


class MemberEventLine(Reply, frozen=True, kw_only=True):
    """A line of GET /v1/events about a member."""

    kind: str
    peer: PeerId
    realm_id: RealmId
    state: Literal["up", "down", "left"] = "left"
    fields: dict[str, str] = {}
    services: tuple[MemberOffer, ...] = ()


class EventLine(Reply, frozen=True, kw_only=True):
    """The fields of every line of GET /v1/events; other fields depend on ``kind``."""

    id: int
    kind: str
    time_s: float


def parse_reply(fields: Mapping[str, object], kind: type[R]) -> R:
    """A reply from its JSON fields. Raises ``ValueError``."""
    return msgspec.convert(fields, kind)
