"""The figures of a report: types of the objects in ``summary.json``, field by field in docs/reference/traces.md."""

from typing import Final, Literal, NotRequired, TypedDict

Histogram = dict[str, float]
"""``n``, ``p50``, ``p90``, ``p99`` and ``max``; ``mean`` for latencies. All but ``n`` in ms."""


class TopicFigures(TypedDict):
    """How messages of one topic spread."""

    topic: str
    messages: int
    published_untraced: int
    local_deliveries: int
    deliveries: int
    expected: int
    reliability: float | None
    worst_message: float | None
    latency_ms: Histogram | None
    coverage_ms: dict[str, float | None]
    hops_mean: float | None
    hops_max: int | None
    hops_unknown: int
    last_delivery_hops_mean: float | None
    branching: float | None
    duplicates_per_delivery: float | None
    rmr: float | None
    iwant_recovered: float | None
    rejects: int
    duplicate_bytes: int


class MeshFigures(TypedDict):
    """The mesh of one topic."""

    topic: str
    degree_mean: float
    degree_lowest: int
    degree_highest: int
    one_way: float | None
    changes_per_node_minute: float
    session_s: dict[str, float] | None
    islands_most: int | None


class RpcFigures(TypedDict):
    """RPCs of all nodes together."""

    sent: int
    received: int
    dropped: int
    drop_ratio: float | None
    message_bytes: int
    control_bytes: int
    control_overhead: float | None
    ihave_ids: int
    iwant_ids: int
    iwant_per_ihave: float | None
    idontwant_sent: int
    idontwant_answered: int
    idontwant_obeyed: float | None
    late_copies: int


class DeliveryFigures(TypedDict):
    """Reliable messages of all nodes together."""

    messages: int
    acknowledged: int
    lost: int
    failed: int
    expired: int
    dropped: int
    under_way: int
    retries: int
    retried: int
    ack_ms: Histogram | None
    loss: float | None
    received: int
    repeated: int
    reordered: int


class QueueFigures(TypedDict):
    """One channel of a queue."""

    namespace: str
    queue: str
    channel: str
    messages: int
    finished: int
    redelivered: int
    hand_outs: int
    timeouts: int
    requeues: int
    dead: int
    expired: int
    rejected: int
    redelivered_share: float | None
    wait_ms: Histogram | None
    service_ms: Histogram | None
    order_violations: int


class RequestFigures(TypedDict):
    """Requests under one name, at one side (``in`` or ``out``)."""

    name: str
    side: str
    requests: int
    failed: int
    duration_ms: Histogram | None


class StreamFigures(TypedDict):
    """Streams under one name, at one side, in one state."""

    name: str
    side: str
    state: str
    streams: int
    bytes_in: int
    bytes_out: int
    mean_us: float


class SessionFigures(TypedDict):
    """How often sessions came into a state, and how many pushes were skipped or sent again then."""

    times: int
    items: int


class PushFigures(TypedDict):
    """Times from the sending of a push to its receipt."""

    latency_ms: Histogram | None


class Estimate(TypedDict):
    """A count of all messages, estimated from a sample. The true one is within ``error`` of it in 95 % of samples."""

    count: int
    error: NotRequired[int]


class TopicEstimate(Estimate):
    """The messages of one topic."""

    topic: str


class Estimates(TypedDict):
    """Estimates of the counts of all messages, from a sample with a ``share`` of them. A count of zero is left out."""

    share: float
    messages: NotRequired[Estimate]
    reliable_messages: NotRequired[Estimate]
    queued_messages: NotRequired[Estimate]
    deliveries: NotRequired[Estimate]
    duplicates: NotRequired[Estimate]
    topics: list[TopicEstimate]


EstimateName = Literal["messages", "reliable_messages", "queued_messages", "deliveries", "duplicates"]
ESTIMATE_NAMES: Final[tuple[EstimateName, ...]] = (
    *("messages", "reliable_messages", "queued_messages"),
    *("deliveries", "duplicates"),
)


class AppFigures(TypedDict):
    """Reliable delivery, queues, requests, streams and sessions."""

    delivery: NotRequired[DeliveryFigures]
    queues: list[QueueFigures]
    requests: list[RequestFigures]
    streams: list[StreamFigures]
    pushes: PushFigures
    sessions: dict[str, SessionFigures]


class Figures(AppFigures):
    """``summary.json``. Times of the trace in µs since 1970."""

    schema: int
    from_us: int
    to_us: int
    seconds: float
    events: int
    nodes: int
    runs: int
    missing_events: int
    sample: float
    settle_s: float
    clocks_corrected: int
    topics: list[TopicFigures]
    mesh: list[MeshFigures]
    rpcs: RpcFigures | None
    estimated: Estimates | None
