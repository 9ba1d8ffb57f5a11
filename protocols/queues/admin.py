"""Administrative requests on queues, and their replies: one struct each, for every surface.

The same structs are used by the broker, between nodes (the ADMIN and ANSWER frames of docs/spec/queue.md), by the
control API, the Python client and the command line. A request with an unknown, misspelt, missing or mistyped field is
refused with a sentence that names the field, before anything has changed. Replies are read leniently: a field that this
version does not know is ignored, so that a newer node may say more. Pure.

An operation that destroys or stops more than one thing says so: ``EmptyQueue(queue="jobs", channel="b")`` or
``EmptyQueue(queue="jobs", all_channels=True)``; neither or both is refused.
"""

from typing import Annotated, Final, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field

from dep2p.control_api.encoding import decode_headers
from dep2p.protocols.queues.names import LOGICAL_PARTITIONS
from dep2p.protocols.queues.options import QueueOptions
from dep2p.types import Headers

COUNT_MAX: Final = 1_000
"""Messages or dead letters of one reply at most."""
RECEIVE_ITEMS_MAX: Final = 32
"""Messages of one receive, as RocketMQ's."""
RECEIVE_WAIT_MAX_S: Final = 20.0
HANDLES_MAX: Final = 256
ATTEMPT_ID_CHARS: Final = 64
NODES_MAX: Final = 1_024
DEAD_IDS_MAX: Final = 10_000
ANSWER_BYTES: Final = 524_288
"""About the bytes of the bodies in one reply."""
_INVISIBLE_MAX_S: Final = 10 * 365 * 86_400.0
"""The bound of a request; the queue cuts times to its own (``msg_timeout_max_s``)."""

OptionValue = bool | int | float | str
Who = str | tuple[str, ...]
"""``members``, ``owner`` (programs of the queue's node), or peer ids."""
Count = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
Partition = Annotated[int, Meta(ge=0, le=2**40)]
RangeEnd = Annotated[int, Meta(ge=0, le=LOGICAL_PARTITIONS)]
DeadId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NodeNames = Annotated[tuple[str, ...], Meta(max_length=NODES_MAX)]
AttemptId = Annotated[str, Meta(max_length=ATTEMPT_ID_CHARS)]
Whole = Annotated[int, Meta(ge=0, le=2**53)]
"""A count or a number in a reply."""


# Replies


class AdminReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a request."""


class Done(AdminReply, frozen=True, kw_only=True):
    """The request was carried out."""


class QueueSummary(AdminReply, frozen=True, kw_only=True):
    """A queue in numbers."""

    name: str
    messages: Whole
    """Messages in its log: those that not every channel has finished."""
    bytes: Whole
    """Bytes of the bodies in its log."""
    in_flight: Whole
    """Deliveries that consumers hold, summed over the channels, as are the next ones."""
    deferred: Whole
    dead: Whole
    channel_count: Whole
    consumers: Whole
    is_paused: bool
    counts: dict[str, Whole]
    """Counts since the broker has loaded the queue: published, expired, and so on."""


class QueueList(AdminReply, frozen=True, kw_only=True):
    """All queues of a broker."""

    queues: tuple[QueueSummary, ...]


class QueueAccess(Struct, frozen=True, kw_only=True):
    """The peers that have each right on a queue: "members", "owner", or peer ids."""

    publish: Who
    consume: Who
    administer: Who


class ChannelInfo(Struct, frozen=True, kw_only=True):
    """A channel: its settings and its messages in numbers."""

    name: str
    ready: Whole
    """Messages that wait for a consumer."""
    in_flight: Whole
    deferred: Whole
    dead: Whole
    """Dead letters."""
    consumers: Whole
    consumer_names: tuple[str, ...]
    """The names of the first 100 consumers."""
    is_paused: bool
    filter: str
    """The filter; empty when the channel gets every message."""
    exclusive: bool
    delivered: Whole
    """Deliveries since the broker has loaded the queue, as are the next counts."""
    finished: Whole
    requeued: Whole
    timed_out: Whole
    counts: dict[str, Whole]


class ShardInfo(Struct, frozen=True, kw_only=True):
    """The location of a partition of a distributed queue: a queue of its own, named ``shard``, at the member
    ``node``."""

    partition: Whole
    node: str
    shard: str


class QueueInfo(QueueSummary, frozen=True, kw_only=True):
    """A queue with its options, access and channels."""

    options: QueueOptions
    access: QueueAccess
    channels: tuple[ChannelInfo, ...]
    shards: tuple[ShardInfo, ...] = ()
    """The shards of a queue on several nodes; empty for a local queue."""

    def channel(self, name: str) -> ChannelInfo:
        """The channel of that name. Raises ``KeyError``."""
        for each in self.channels:
            if each.name == name:
                return each
        raise KeyError(name)


class PendingDeletion(Struct, frozen=True, kw_only=True):
    """A shard of a deleted queue at a node that was away: it is deleted when the node is back."""

    node: str
    shard: str


class QueueDeleted(AdminReply, frozen=True, kw_only=True):
    """The queue is deleted."""

    pending_deletions: tuple[PendingDeletion, ...] | None = None
    """With ``force``: the shards that remain on unreachable nodes."""


class MessageCount(AdminReply, frozen=True, kw_only=True):
    """The number of messages, or dead letters, that a request changed."""

    messages: Whole


class BrowsedMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that was read without taking it."""

    published_s: float
    """Unix seconds."""
    key: str
    tags: tuple[str, ...]
    priority: int
    headers_json: dict[str, object] = field(name="headers")
    """The headers in JSON's form; see `headers`."""
    body: bytes = field(name="data")
    encoding: Literal["base64"]
    due_s: float = 0.0
    """Not delivered before this time, in Unix seconds."""
    state: str = ""
    """``in flight`` or ``damaged``."""
    partition: int | None = None
    """The partition, with ``node``, of a message of a queue on several nodes."""
    node: str = ""

    def __post_init__(self) -> None:
        if self.headers_json:
            decode_headers(self.headers_json)

    @property
    def headers(self) -> Headers:
        """The app's headers."""
        return decode_headers(self.headers_json)


class MessageInfo(BrowsedMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a queue's log."""

    id: str
    """16 hex digits."""
    attempts: int = 0


class MessageList(AdminReply, frozen=True, kw_only=True):
    """Messages of a queue, oldest first."""

    messages: tuple[MessageInfo, ...]


class ExportPage(AdminReply, frozen=True, kw_only=True):
    """A part of a queue's log."""

    messages: tuple[MessageInfo, ...]
    after: str
    """The position where the next part begins; empty when there is none."""


class DeadLetterInfo(BrowsedMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message that a channel has given up."""

    id: DeadId
    """The id of the dead letter in its channel."""
    message_id: str
    """16 hex digits."""
    died_s: float
    """Unix seconds."""
    attempts: int
    reasons: tuple[str, ...]
    """Why each attempt failed, oldest first."""


class DeadLetterPage(AdminReply, frozen=True, kw_only=True):
    """Dead letters of a channel, oldest first."""

    dead_letters: tuple[DeadLetterInfo, ...]
    more: bool
    """Whether there may be others behind them."""


class ReceivedMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that belongs to its receiver for ``invisible_s``: other consumers do not get it meanwhile."""

    handle: str
    """The name of this delivery of the message, for acks."""
    id: str
    """16 hex digits."""
    attempts: int
    """The number of this delivery, from 1."""
    published_s: float
    """Unix seconds."""
    invisible_s: float
    """Seconds from the receipt on, after which the message is delivered again."""
    key: str
    tags: tuple[str, ...]
    priority: int
    headers_json: dict[str, object] = field(name="headers")
    """The headers in JSON's form; see `headers`."""
    body: bytes = field(name="data")
    encoding: Literal["base64"]

    def __post_init__(self) -> None:
        if self.headers_json:
            decode_headers(self.headers_json)

    @property
    def headers(self) -> Headers:
        """The app's headers."""
        return decode_headers(self.headers_json)


class ReceivedMessages(AdminReply, frozen=True, kw_only=True):
    """The messages that a receive got."""

    messages: tuple[ReceivedMessage, ...]


class RefusedHandles(AdminReply, frozen=True, kw_only=True):
    """The deliveries that an ack came too late for; it acknowledged all others."""

    refused: tuple[str, ...]


class InvisibleTime(AdminReply, frozen=True, kw_only=True):
    """The time from now on for which a received message stays hidden."""

    invisible_s: float


class PartitionInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition of a queue. ``node``, ``shard``, ``off_partition`` and ``is_up`` are only for queues on several
    nodes."""

    partition: Whole
    messages: Whole
    bytes: Whole
    last_seq: Whole
    """The number of its newest message."""
    node: str = ""
    shard: str = ""
    off_partition: Whole | None = None
    """Messages that went here while the node of their key's partition was away."""
    is_up: bool | None = None
    """Whether its node has answered; None: this request did not ask it."""


class RangeBarrier(Struct, frozen=True, kw_only=True):
    """A barrier of a range: messages in ``partition`` up to the number ``up_to`` that must be finished before the range
    is read."""

    partition: Whole
    up_to: Whole


class KeyRange(Struct, frozen=True, kw_only=True):
    """The logical partitions from ``low`` to below ``high``, and the partition that has them."""

    low: Whole
    high: Whole
    partition: Whole
    after: tuple[RangeBarrier, ...]


class QueueRoute(AdminReply, frozen=True, kw_only=True):
    """The route table of a queue: which partition has which keys."""

    version: Whole
    """Rises with each expansion."""
    partitions: tuple[PartitionInfo, ...]
    routes: tuple[KeyRange, ...]
    placement: dict[str, object] | UnsetType = UNSET
    """The table that publishers and consumers use (docs/spec/queue.md). Only queues on several nodes have one."""


class QueueExpanded(QueueRoute, frozen=True, kw_only=True):
    """The route table after an expansion."""

    queue: str
    added: tuple[Whole, ...]
    """The new partitions."""


class ConsumerInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A consumer of a channel. ``member``, ``since_s`` and ``lease_left_s`` are only for exclusive channels."""

    consumer: str
    member: str = ""
    """The start of its name, in hex digits."""
    partitions: tuple[Whole, ...]
    """The partitions that it takes from; in an exclusive channel no other consumer takes from them."""
    in_flight: Whole
    since_s: float | None = None
    """Unix seconds."""
    lease_left_s: float | None = None


class LockInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The holder of a partition of an exclusive channel."""

    partition: Whole
    epoch: Whole
    """Rises with each new holder."""
    member: str
    """The start of its name, in hex digits."""
    consumer: str
    """The consumer; empty when the holder is gone and its lease is not over yet."""
    since_s: float
    """Unix seconds."""
    node: str = ""
    """The node that stores the partition; empty for a local queue."""


class ChannelLocks(AdminReply, frozen=True, kw_only=True):
    """The holders of a channel's partitions; a channel that is not exclusive has no locks."""

    exclusive: bool
    locks: tuple[LockInfo, ...]
    away: tuple[Whole, ...] | None = None
    """Partitions whose nodes have not answered. Only queues on several nodes have this field."""


class ChannelConsumers(ChannelLocks, frozen=True, kw_only=True):
    """The consumers of a channel."""

    consumers: tuple[ConsumerInfo, ...]
    version: Whole | None = None
    """The version of the assignment of partitions, in an exclusive channel."""
    lease_s: float | None = None


class RangeServed(AdminReply, frozen=True, kw_only=True):
    """The range of a shard is set."""

    last_seq: Whole
    """The last number that the shard has given."""


class AckFloors(AdminReply, frozen=True, kw_only=True):
    """The ack floors of a shard."""

    messages: Whole
    bytes: Whole
    last_seq: Whole
    off_partition: Whole
    floors: dict[str, Whole]
    """The ack floor by channel: up to this number everything is done, durably."""


class FailoverGroupInfo(AdminReply, frozen=True, kw_only=True):
    """The nodes that share a store, and the one that is the broker of its queues."""

    owner: str
    """The owner's peer id; empty when it is not known, or the owner cannot be sure."""
    term: int = field(name="epoch")
    nodes: tuple[str, ...]


# Requests

R = TypeVar("R", bound=AdminReply, covariant=True)


class AdminRequest(
    Struct,
    Generic[R],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="op",
):
    """A request whose reply is an ``R``."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for fields that do not go together."""


class QueueRequest(AdminRequest[R], Generic[R], frozen=True, kw_only=True):
    """A request about one queue."""

    queue: str


class ChannelRequest(QueueRequest[R], Generic[R], frozen=True, kw_only=True):
    """A request about one channel."""

    channel: str


class ChannelsRequest(QueueRequest[R], Generic[R], frozen=True, kw_only=True):
    """A request about one channel, or about all of them: it names one of the two."""

    channel: str | None = None
    all_channels: bool = False

    def __post_init__(self) -> None:
        if self.all_channels is (self.channel is not None):
            given = "both are given" if self.all_channels else "neither is given"
            raise ValueError(f"say `channel`, or `all_channels` as true: {given}")


class DeadLettersRequest(ChannelRequest[R], Generic[R], frozen=True, kw_only=True):
    """A request about some dead letters of a channel, or about all of them: it names one of the two."""

    ids: Annotated[tuple[DeadId, ...], Meta(max_length=DEAD_IDS_MAX)] | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if self.all is (self.ids is not None):
            given = "both are given" if self.all else "neither is given"
            raise ValueError(f"say `ids`, or `all` as true: {given}")


class ListQueues(AdminRequest[QueueList], frozen=True, kw_only=True, tag="list"):
    """List all queues in numbers."""


class DescribeQueue(QueueRequest[QueueInfo], frozen=True, kw_only=True, tag="info"):
    """Describe one queue with its channels."""


class AccessChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """New access rules. A right that is left out stays as it is, or as the node's default."""

    publish: Who | UnsetType = UNSET
    consume: Who | UnsetType = UNSET
    administer: Who | UnsetType = UNSET


class CreateQueue(QueueRequest[QueueInfo], frozen=True, kw_only=True, tag="create"):
    """Make a queue. A queue that is there with the same options stays as it is."""

    options: dict[str, OptionValue] = {}
    """Options of :class:`QueueOptions`; those that are left out have the node's defaults."""
    access: AccessChange | None = None
    nodes: NodeNames = ()
    """Peer ids of the members that store its partitions, in turn; "home" is the node that is asked."""


class CreateChannel(ChannelRequest[Done], frozen=True, kw_only=True, tag="create_channel"):
    """Make a channel. A channel that is there with the same settings stays as it is."""

    from_start: bool = False
    filter: str = ""
    exclusive: bool = False


class DeleteQueue(QueueRequest[QueueDeleted], frozen=True, kw_only=True, tag="delete"):
    """Delete a queue with all its messages."""

    force: bool = False
    """Whether a queue on several nodes is deleted even though some of them are unreachable."""


class DeleteChannel(ChannelRequest[Done], frozen=True, kw_only=True, tag="delete_channel"):
    """Delete a channel with its dead letters."""


class PauseQueue(ChannelsRequest[Done], frozen=True, kw_only=True, tag="pause"):
    """Pause delivery."""


class ResumeQueue(ChannelsRequest[Done], frozen=True, kw_only=True, tag="resume"):
    """Resume delivery."""


class EmptyQueue(ChannelsRequest[MessageCount], frozen=True, kw_only=True, tag="empty"):
    """Drop the messages that wait."""


class PeekMessages(QueueRequest[MessageList], frozen=True, kw_only=True, tag="peek"):
    """List the oldest messages of the log, or those that ``channel`` has not finished."""

    channel: str | None = None
    count: Count = 10


class ExportMessages(QueueRequest[ExportPage], frozen=True, kw_only=True, tag="export"):
    """Export a part of the log, behind the message ``after``."""

    after: str
    """A message id; empty for the start."""
    count: Count = 100
    after_seq: Partition = 0
    """Only for a shard: export messages after this number. The controller does not know the shard's own number of its
    partition."""


class ListDeadLetters(ChannelRequest[DeadLetterPage], frozen=True, kw_only=True, tag="dead"):
    """List dead letters behind the id ``after``."""

    after: Annotated[int, Meta(ge=0, le=10**17)] = 0
    count: Count = 100


class ReplayDeadLetters(DeadLettersRequest[MessageCount], frozen=True, kw_only=True, tag="replay"):
    """Give dead letters to their channel again."""


class DeleteDeadLetters(DeadLettersRequest[MessageCount], frozen=True, kw_only=True, tag="forget_dead"):
    """Drop dead letters."""


class ReceiveMessages(ChannelRequest[ReceivedMessages], frozen=True, kw_only=True, tag="receive"):
    """Give messages to the asker for a while; it may wait for them."""

    count: Annotated[int, Meta(ge=1, le=RECEIVE_ITEMS_MAX)] = 16
    wait_s: Annotated[float, Meta(ge=0, le=RECEIVE_WAIT_MAX_S)] = 10.0
    invisible_s: Annotated[float, Meta(gt=0, le=_INVISIBLE_MAX_S)] = 60.0
    attempt_id: AttemptId = ""
    """A receive with the id of an earlier one gets the messages of that one that are still held."""
    from_start: bool = False
    only_again: bool = False
    """Only messages that this attempt received before and still holds."""
    of_distributed: bool = field(name="of_placed", default=False)
    """Whether the queue is a shard: then its controller makes the channel."""


class AckMessages(ChannelRequest[RefusedHandles], frozen=True, kw_only=True, tag="ack"):
    """Acknowledge received messages."""

    handles: Annotated[tuple[str, ...], Meta(min_length=1, max_length=HANDLES_MAX)]


class ChangeInvisible(ChannelRequest[InvisibleTime], frozen=True, kw_only=True, tag="invisible"):
    """Change the time after which a received message is delivered again."""

    handle: str
    invisible_s: Annotated[float, Meta(ge=0, le=_INVISIBLE_MAX_S)] = 60.0


class EndReceive(ChannelRequest[Done], frozen=True, kw_only=True, tag="end_receive"):
    """End a receive whose asker waits no more: its messages go to others without an attempt."""

    attempt_id: Annotated[str, Meta(min_length=1, max_length=ATTEMPT_ID_CHARS)]


class ExpandQueue(QueueRequest[QueueExpanded], frozen=True, kw_only=True, tag="expand"):
    """Expand the queue to this number of partitions in all."""

    partitions: Annotated[int, Meta(ge=1, le=LOGICAL_PARTITIONS)]
    nodes: NodeNames = ()
    """The nodes of the new partitions of a queue on several nodes; by default those that it has."""


class DescribeRoute(QueueRequest[QueueRoute], frozen=True, kw_only=True, tag="route"):
    """Describe the route table."""

    brief: bool = False
    """Whether the nodes of a distributed queue are left unasked."""


class ListConsumers(ChannelRequest[ChannelConsumers], frozen=True, kw_only=True, tag="consumers"):
    """List the consumers of a channel."""


class ListLocks(ChannelRequest[ChannelLocks], frozen=True, kw_only=True, tag="locks"):
    """List the holders of partitions."""


class ServeRange(QueueRequest[RangeServed], frozen=True, kw_only=True, tag="serve"):
    """Make the queue the shard of the logical partitions from ``low`` to below ``high``."""

    low: RangeEnd
    high: RangeEnd

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"a shard serves no range from {self.low} to {self.high}")


class ReadAckFloors(QueueRequest[AckFloors], frozen=True, kw_only=True, tag="floors"):
    """Return the ack floors of a shard's channels."""


class MayCreate(QueueRequest[Done], frozen=True, kw_only=True, tag="may_create"):
    """Check whether the asker, and the member for whom it asks, may make such a queue. Nothing is made."""

    asker: str | None = field(name="for", default=None)
    """A peer id: the member that asks the controller."""


class ReadFailoverGroup(AdminRequest[FailoverGroupInfo], frozen=True, kw_only=True, tag="keepers"):
    """List the nodes that share the store, and the one that is the broker of its queues."""


REQUESTS: Final[tuple[type[AdminRequest[AdminReply]], ...]] = (
    ListQueues,
    DescribeQueue,
    CreateQueue,
    CreateChannel,
    DeleteQueue,
    DeleteChannel,
    PauseQueue,
    ResumeQueue,
    EmptyQueue,
    PeekMessages,
    ExportMessages,
    ListDeadLetters,
    ReplayDeadLetters,
    DeleteDeadLetters,
    ReceiveMessages,
    AckMessages,
    ChangeInvisible,
    EndReceive,
    ExpandQueue,
    DescribeRoute,
    ListConsumers,
    ListLocks,
    ServeRange,
    ReadAckFloors,
    MayCreate,
    ReadFailoverGroup,
)


def operation_of(request: AdminRequest[AdminReply] | type[AdminRequest[AdminReply]]) -> str:
    """Return the name of a request's operation: its ``op``."""
    return str(request.__struct_config__.tag)
