"""A client of a running daemon, for asyncio and trio programs alike."""

from dep2p.client.client import Client
from dep2p.client.delivery import DeliveryStatus, ReliablyPublished, Sent
from dep2p.client.models import (
    Event,
    FeedLagged,
    IncomingNotification,
    IncomingRequest,
    Published,
    PublishedMany,
    TopicMessage,
)
from dep2p.client.queues import QueueConsumer, QueueDelivery
from dep2p.client.sessions import OpenedSession, SessionEvent, SessionPush
from dep2p.client.streams import ClientStream
from dep2p.client.topics import OnFull
from dep2p.client.traces import TraceOptions
from dep2p.control_api.calls import OnNoPeers
from dep2p.control_api.errors import ControlError, DaemonUnreachableError, code_of
from dep2p.control_api.queues import QueuedMany
from dep2p.control_api.replies import (
    Configuration,
    ConnectedPeer,
    ConnectionSummary,
    DaemonStatus,
    DrainState,
    LimitsSummary,
    MemberSummary,
    OutboxList,
    OutboxMessage,
    PeerSummary,
    RealmSummary,
    TopicPeers,
    TopicSummary,
    TraceState,
)
from dep2p.protocols.queues.admin import ReceivedMessage

__all__ = [
    "Client",
    "ClientStream",
    "Configuration",
    "ConnectedPeer",
    "ConnectionSummary",
    "ControlError",
    "DaemonStatus",
    "DaemonUnreachableError",
    "DeliveryStatus",
    "DrainState",
    "Event",
    "FeedLagged",
    "IncomingNotification",
    "IncomingRequest",
    "LimitsSummary",
    "MemberSummary",
    "OnFull",
    "OnNoPeers",
    "OpenedSession",
    "OutboxList",
    "OutboxMessage",
    "PeerSummary",
    "Published",
    "PublishedMany",
    "QueueConsumer",
    "QueueDelivery",
    "QueuedMany",
    "RealmSummary",
    "ReceivedMessage",
    "ReliablyPublished",
    "Sent",
    "SessionEvent",
    "SessionPush",
    "TopicMessage",
    "TopicPeers",
    "TopicSummary",
    "TraceOptions",
    "TraceState",
    "code_of",
]
