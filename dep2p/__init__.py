"""dep2p: a peer-to-peer messaging node. Public names load on first use, so that the CLI starts fast."""

from importlib import import_module
from typing import TYPE_CHECKING

from dep2p._version import __version__

if TYPE_CHECKING:
    from dep2p.errors import (
        AlreadyRespondedError,
        ConfigError,
        Dep2pError,
        HandlerError,
        HeadersTooLargeError,
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
    from dep2p.gossipsub.scoring.params import ScoreParams
    from dep2p.identity import Identity
    from dep2p.limits import Limits
    from dep2p.messaging.handlers import Notification, Request
    from dep2p.messaging.message_stream import MessageStream
    from dep2p.messaging.service import Messaging
    from dep2p.node.joined_realm import RealmStatus
    from dep2p.node.node import Node
    from dep2p.protocols.sessions.options import SessionOptions
    from dep2p.protocols.timing.backoff import Backoff
    from dep2p.pubsub.seqno_validator import SeqnoValidator
    from dep2p.pubsub.subscription import Subscription
    from dep2p.pubsub.topic import Topic
    from dep2p.pubsub.types import Lagged, PublishResult, PubSubMessage, TopicStatus
    from dep2p.pubsub.wire_formats import PublicPubSub
    from dep2p.queues.api.outbox import OutboxRelay, create_outbox, publish_in
    from dep2p.queues.api.producer import Producer
    from dep2p.queues.api.push_consumer import PushConsumer, PushedMessage
    from dep2p.queues.api.simple_consumer import SimpleConsumer
    from dep2p.realm.credentials import Invite, Realm
    from dep2p.realm.interface import MemberEvent
    from dep2p.sessions.server_session import SessionRequest
    from dep2p.sessions.service import OpenSession, Session
    from dep2p.types import PeerId, RealmId

__all__ = [
    "AlreadyRespondedError",
    "Backoff",
    "ConfigError",
    "Dep2pError",
    "GossipParams",
    "HandlerError",
    "HeadersTooLargeError",
    "Identity",
    "IdentityError",
    "Invite",
    "Lagged",
    "Limits",
    "ListenError",
    "MemberEvent",
    "MessageStream",
    "MessageTooLargeError",
    "Messaging",
    "NoHandlerError",
    "NoPeersSubscribedError",
    "Node",
    "NotInRealmError",
    "NotMemberError",
    "Notification",
    "OpenSession",
    "OutboxRelay",
    "OverloadedError",
    "PeerId",
    "PeerNotFoundError",
    "Producer",
    "ProtocolError",
    "ProtocolNotSupportedError",
    "PubSubMessage",
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
    "SeqnoValidator",
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

_HOMES = {
    "Backoff": "dep2p.protocols.timing.backoff",
    "OutboxRelay": "dep2p.queues.api.outbox",
    "Producer": "dep2p.queues.api.producer",
    "PushConsumer": "dep2p.queues.api.push_consumer",
    "PushedMessage": "dep2p.queues.api.push_consumer",
    "RejectMessage": "dep2p.errors",
    "RetryMessage": "dep2p.errors",
    "SimpleConsumer": "dep2p.queues.api.simple_consumer",
    "create_outbox": "dep2p.queues.api.outbox",
    "publish_in": "dep2p.queues.api.outbox",
    "ConfigError": "dep2p.errors",
    "Dep2pError": "dep2p.errors",
    "HandlerError": "dep2p.errors",
    "IdentityError": "dep2p.errors",
    "ListenError": "dep2p.errors",
    "HeadersTooLargeError": "dep2p.errors",
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
    "Messaging": "dep2p.messaging.service",
    "Notification": "dep2p.messaging.handlers",
    "Request": "dep2p.messaging.handlers",
    "MessageStream": "dep2p.messaging.message_stream",
    "Limits": "dep2p.limits",
    "Node": "dep2p.node.node",
    "RealmStatus": "dep2p.node.joined_realm",
    "Invite": "dep2p.realm.credentials",
    "Realm": "dep2p.realm.credentials",
    "MemberEvent": "dep2p.realm.interface",
    "PeerId": "dep2p.types",
    "RealmId": "dep2p.types",
    "SeqnoValidator": "dep2p.pubsub.seqno_validator",
    "ScoreParams": "dep2p.gossipsub.scoring.params",
    "GossipParams": "dep2p.gossipsub.params",
    "TooManyTopicsError": "dep2p.errors",
    "NoPeersSubscribedError": "dep2p.errors",
    "PublishRefusedError": "dep2p.errors",
    "Verdict": "dep2p.gossipsub.events",
    "Topic": "dep2p.pubsub.topic",
    "Subscription": "dep2p.pubsub.subscription",
    "PublicPubSub": "dep2p.pubsub.wire_formats",
    "TopicStatus": "dep2p.pubsub.types",
    "PublishResult": "dep2p.pubsub.types",
    "PubSubMessage": "dep2p.pubsub.types",
    "Lagged": "dep2p.pubsub.types",
    "AlreadyRespondedError": "dep2p.errors",
    "OpenSession": "dep2p.sessions.service",
    "Session": "dep2p.sessions.service",
    "SessionOptions": "dep2p.protocols.sessions.options",
    "SessionRequest": "dep2p.sessions.server_session",
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
