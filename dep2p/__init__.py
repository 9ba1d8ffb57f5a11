"""dep2p: a peer-to-peer messaging node. Public names load on first use, so that the CLI starts fast."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dep2p.errors import (
        AlreadyRespondedError,
        ConfigError,
        Dep2pError,
        HandlerError,
        IdentityError,
        ListenError,
        MessageTooLargeError,
        NoHandlerError,
        NoPeersSubscribedError,
        NotInRealmError,
        NotMemberError,
        OverloadedError,
        PeerNotFoundError,
        ProtocolError,
        ProtocolNotSupportedError,
        PublishRefusedError,
        RateLimitedError,
        RealmFileError,
        RejectMessage,
        RemoteError,
        RequestTimeoutError,
        RetryMessage,
        SessionClosedError,
        SessionFailedError,
        SessionFullError,
        SessionGapError,
        SessionNotFoundError,
        SessionResetError,
        SessionTokenError,
        StreamClosedError,
        TooManyTopicsError,
        TopicNotFoundError,
    )
    from dep2p.gossipsub.events import Verdict
    from dep2p.gossipsub.params import GossipParams
    from dep2p.gossipsub.score_params import ScoreParams
    from dep2p.identity import Identity
    from dep2p.io.messaging import Messaging
    from dep2p.io.pubsub_items import Lagged, Message, PublishResult, TopicStatus
    from dep2p.io.pubsub_subscription import Subscription
    from dep2p.io.pubsub_topic import Topic
    from dep2p.io.pubsub_wire import PublicPubSub
    from dep2p.io.queue_outbox import OutboxRelay, create_outbox, publish_in
    from dep2p.io.queue_producer import Producer
    from dep2p.io.queue_push_consumer import PushConsumer, PushedMessage
    from dep2p.io.queue_simple_consumer import SimpleConsumer
    from dep2p.io.registry import Notice, Request
    from dep2p.io.sessions import OpenSession, Session
    from dep2p.io.sessions_served import SessionRequest
    from dep2p.io.streams import MessageStream
    from dep2p.limits import Limits
    from dep2p.node import Node
    from dep2p.node_joined import RealmStatus
    from dep2p.protocols.ordered.options import SessionOptions
    from dep2p.protocols.queue.flows.backoff import Backoff
    from dep2p.realm.interface import MemberEvent
    from dep2p.realm.secret import Invite, Realm
    from dep2p.types import PeerId, RealmId

__all__ = [
    "AlreadyRespondedError",
    "Backoff",
    "ConfigError",
    "Dep2pError",
    "GossipParams",
    "HandlerError",
    "Identity",
    "IdentityError",
    "Invite",
    "Lagged",
    "Limits",
    "ListenError",
    "MemberEvent",
    "Message",
    "MessageStream",
    "MessageTooLargeError",
    "Messaging",
    "NoHandlerError",
    "NoPeersSubscribedError",
    "Node",
    "NotInRealmError",
    "NotMemberError",
    "Notice",
    "OpenSession",
    "OutboxRelay",
    "OverloadedError",
    "PeerId",
    "PeerNotFoundError",
    "Producer",
    "ProtocolError",
    "ProtocolNotSupportedError",
    "PublicPubSub",
    "PublishRefusedError",
    "PublishResult",
    "PushConsumer",
    "PushedMessage",
    "RateLimitedError",
    "Realm",
    "RealmFileError",
    "RealmId",
    "RealmStatus",
    "RejectMessage",
    "RemoteError",
    "Request",
    "RequestTimeoutError",
    "RetryMessage",
    "ScoreParams",
    "Session",
    "SessionClosedError",
    "SessionFailedError",
    "SessionFullError",
    "SessionGapError",
    "SessionNotFoundError",
    "SessionOptions",
    "SessionRequest",
    "SessionResetError",
    "SessionTokenError",
    "SimpleConsumer",
    "StreamClosedError",
    "Subscription",
    "TooManyTopicsError",
    "Topic",
    "TopicNotFoundError",
    "TopicStatus",
    "Verdict",
    "__version__",
    "create_outbox",
    "publish_in",
]
__version__ = "0.1.0"

_HOMES = {
    "Backoff": "dep2p.protocols.queue.flows.backoff",
    "OutboxRelay": "dep2p.io.queue_outbox",
    "Producer": "dep2p.io.queue_producer",
    "PushConsumer": "dep2p.io.queue_push_consumer",
    "PushedMessage": "dep2p.io.queue_push_consumer",
    "RejectMessage": "dep2p.errors",
    "RetryMessage": "dep2p.errors",
    "SimpleConsumer": "dep2p.io.queue_simple_consumer",
    "create_outbox": "dep2p.io.queue_outbox",
    "publish_in": "dep2p.io.queue_outbox",
    "ConfigError": "dep2p.errors",
    "Dep2pError": "dep2p.errors",
    "HandlerError": "dep2p.errors",
    "IdentityError": "dep2p.errors",
    "ListenError": "dep2p.errors",
    "MessageTooLargeError": "dep2p.errors",
    "NoHandlerError": "dep2p.errors",
    "NotInRealmError": "dep2p.errors",
    "NotMemberError": "dep2p.errors",
    "OverloadedError": "dep2p.errors",
    "PeerNotFoundError": "dep2p.errors",
    "ProtocolError": "dep2p.errors",
    "ProtocolNotSupportedError": "dep2p.errors",
    "RateLimitedError": "dep2p.errors",
    "RealmFileError": "dep2p.errors",
    "RemoteError": "dep2p.errors",
    "RequestTimeoutError": "dep2p.errors",
    "StreamClosedError": "dep2p.errors",
    "TopicNotFoundError": "dep2p.errors",
    "Identity": "dep2p.identity",
    "Messaging": "dep2p.io.messaging",
    "Notice": "dep2p.io.registry",
    "Request": "dep2p.io.registry",
    "MessageStream": "dep2p.io.streams",
    "Limits": "dep2p.limits",
    "Node": "dep2p.node",
    "RealmStatus": "dep2p.node_joined",
    "Invite": "dep2p.realm.secret",
    "Realm": "dep2p.realm.secret",
    "MemberEvent": "dep2p.realm.interface",
    "PeerId": "dep2p.types",
    "RealmId": "dep2p.types",
    "ScoreParams": "dep2p.gossipsub.score_params",
    "GossipParams": "dep2p.gossipsub.params",
    "TooManyTopicsError": "dep2p.errors",
    "NoPeersSubscribedError": "dep2p.errors",
    "PublishRefusedError": "dep2p.errors",
    "Verdict": "dep2p.gossipsub.events",
    "Topic": "dep2p.io.pubsub_topic",
    "Subscription": "dep2p.io.pubsub_subscription",
    "PublicPubSub": "dep2p.io.pubsub_wire",
    "TopicStatus": "dep2p.io.pubsub_items",
    "PublishResult": "dep2p.io.pubsub_items",
    "Message": "dep2p.io.pubsub_items",
    "Lagged": "dep2p.io.pubsub_items",
    "AlreadyRespondedError": "dep2p.errors",
    "OpenSession": "dep2p.io.sessions",
    "Session": "dep2p.io.sessions",
    "SessionOptions": "dep2p.protocols.ordered.options",
    "SessionRequest": "dep2p.io.sessions_served",
    "SessionClosedError": "dep2p.errors",
    "SessionFailedError": "dep2p.errors",
    "SessionFullError": "dep2p.errors",
    "SessionGapError": "dep2p.errors",
    "SessionNotFoundError": "dep2p.errors",
    "SessionResetError": "dep2p.errors",
    "SessionTokenError": "dep2p.errors",
}

if not TYPE_CHECKING:  # else checkers would accept any name at all

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
