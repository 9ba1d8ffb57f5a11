"""dep2p: a peer-to-peer messaging node. Public names load on first use, so that the CLI starts fast."""

from importlib import import_module
from typing import TYPE_CHECKING

from dep2p._version import __version__

if TYPE_CHECKING:
    from dep2p.arguments import (
        WrongTypeError,
    )
    from dep2p.control_api.errors import (
        ControlError,
        DaemonUnreachableError,
        FeedEndedError,
    )
    from dep2p.control_api.replies import (
        ConnectedPeer,
        MemberSummary,
        OutboxList,
        OutboxMessage,
        PeerSummary,
        RealmSummary,
        TopicPeers,
        TopicSummary,
    )
    from dep2p.delivery.receipts import (
        Receipt,
        TopicPublish,
    )
    from dep2p.errors import (
        AlreadyRespondedError,
        ChannelNotFoundError,
        ConfigError,
        DeliveryExpiredError,
        DeliveryFailedError,
        DeliveryQueueFullError,
        DeliveryUnknownError,
        Dep2pError,
        ErrorCode,
        HandlerError,
        HeadersTooLargeError,
        HostFailedError,
        IdentityError,
        ListenError,
        LocalProtocolError,
        LockLostError,
        MessageTooLargeError,
        NoHandlerError,
        NoPeersSubscribedError,
        NotInFlightError,
        NotInRealmError,
        NotMemberError,
        NotOwnerError,
        OverloadedError,
        PartitionMovedError,
        PeerNotFoundError,
        ProtocolError,
        ProtocolNotSupportedError,
        PublishRefusedError,
        QueueAccessError,
        QueueConsumerClosedError,
        QueueError,
        QueueExistsError,
        QueueFullError,
        QueueIsDistributedError,
        QueueMessageNotFoundError,
        QueueNotFoundError,
        QueuePartlyPublishedError,
        RateLimitedError,
        RealmFileError,
        RealmSecretError,
        RejectMessage,
        RemoteError,
        RequestTimeoutError,
        RetryMessage,
        ServiceNotFoundError,
        ServiceUnavailableError,
        SessionClosedError,
        SessionFailedError,
        SessionFullError,
        SessionGapError,
        SessionNotFoundError,
        SessionResetError,
        SessionTokenError,
        StoreError,
        StoreFullError,
        StoreLockedError,
        StoreUnknownError,
        StreamClosedError,
        TooManyTopicsError,
        TopicNotFoundError,
        TraceError,
        TraceRunningError,
        WireError,
    )
    from dep2p.gossipsub.events import (
        Verdict,
    )
    from dep2p.gossipsub.params import (
        GossipParams,
    )
    from dep2p.gossipsub.scoring.params import (
        ScoreParams,
    )
    from dep2p.gossipsub.topic_types import (
        AcknowledgementOptions,
        Lagged,
        MatchedTopicsFull,
        OnFull,
        OnNoPeers,
        PublishedMany,
        PublishResult,
        TopicMessage,
    )
    from dep2p.identity import (
        Identity,
    )
    from dep2p.limits import (
        Limits,
    )
    from dep2p.messaging.message_stream import (
        MessageStream,
    )
    from dep2p.messaging.service import (
        Messaging,
    )
    from dep2p.node.node import (
        Node,
    )
    from dep2p.node.outbox import (
        Outbox,
    )
    from dep2p.node.queues_api import (
        NodeQueues,
    )
    from dep2p.node.sessions import (
        Sessions,
    )
    from dep2p.node.tracer import (
        Tracer,
        TraceStatus,
    )
    from dep2p.protocols.delivery.states import (
        DeliveryState,
        DeliveryStatus,
    )
    from dep2p.protocols.fairness.ledger import (
        MemberUsage,
    )
    from dep2p.protocols.messaging.answers import (
        GatherOptions,
        GatherResult,
        TopicAnswer,
    )
    from dep2p.protocols.messaging.incoming import (
        IncomingRequest,
        Notification,
        Request,
        RequestOptions,
        SendOptions,
    )
    from dep2p.protocols.queues.admin import (
        ChannelConsumers,
        ChannelLocks,
        DeadLetterInfo,
        MessageInfo,
        PendingDeletion,
        QueueExpanded,
        QueueInfo,
        QueueRoute,
        QueueSummary,
        ReceivedMessage,
    )
    from dep2p.protocols.queues.clients.settings import (
        ConsumerOptions,
        ProducerOptions,
    )
    from dep2p.protocols.queues.options import (
        ConsumeOptions,
        MessageOptions,
        QueueOptions,
    )
    from dep2p.protocols.realm.member_update import (
        MemberUpdate,
    )
    from dep2p.protocols.realm.statement import (
        ServiceOffer,
    )
    from dep2p.protocols.services.options import (
        AnyOptions,
        ServiceOptions,
    )
    from dep2p.protocols.sessions.options import (
        SessionOptions,
    )
    from dep2p.protocols.sessions.wire import (
        Push,
    )
    from dep2p.protocols.timing.backoff import (
        Backoff,
    )
    from dep2p.pubsub.seqno_validator import (
        SeqnoValidator,
    )
    from dep2p.pubsub.subscription import (
        Subscription,
    )
    from dep2p.pubsub.topic import (
        Topic,
    )
    from dep2p.pubsub.wire_formats import (
        PublicPubSub,
    )
    from dep2p.queues.api.outbox import (
        OutboxRelay,
    )
    from dep2p.queues.api.producer import (
        PendingSend,
        Producer,
    )
    from dep2p.queues.api.push_consumer import (
        PushConsumer,
        PushedMessage,
    )
    from dep2p.queues.api.queues import (
        QueueHandle,
        Queues,
    )
    from dep2p.queues.api.simple_consumer import (
        SimpleConsumer,
    )
    from dep2p.queues.consumer import (
        Messages,
        QueueMessage,
    )
    from dep2p.queues.settings import (
        QueueSettings,
    )
    from dep2p.realm.credentials import (
        Invite,
        Realm,
    )
    from dep2p.realm.interface import (
        MemberEvent,
    )
    from dep2p.services.gathers import (
        Gathering,
    )
    from dep2p.services.service import (
        ServiceMember,
        ServiceMemberInfo,
    )
    from dep2p.sessions.server_session import (
        SessionRequest,
    )
    from dep2p.sessions.service import (
        OpenSession,
        Session,
    )
    from dep2p.storage.app_outbox import (
        create_outbox,
        publish_in,
    )
    from dep2p.tracing.settings import (
        TraceSettings,
    )
    from dep2p.types import (
        PeerId,
        RealmId,
    )

__all__ = [
    "AcknowledgementOptions",
    "AlreadyRespondedError",
    "AnyOptions",
    "Backoff",
    "ChannelConsumers",
    "ChannelLocks",
    "ChannelNotFoundError",
    "ConfigError",
    "ConnectedPeer",
    "ConsumeOptions",
    "ConsumerOptions",
    "ControlError",
    "DaemonUnreachableError",
    "DeadLetterInfo",
    "DeliveryExpiredError",
    "DeliveryFailedError",
    "DeliveryQueueFullError",
    "DeliveryState",
    "DeliveryStatus",
    "DeliveryUnknownError",
    "Dep2pError",
    "ErrorCode",
    "FeedEndedError",
    "GatherOptions",
    "GatherResult",
    "Gathering",
    "GossipParams",
    "HandlerError",
    "HeadersTooLargeError",
    "HostFailedError",
    "Identity",
    "IdentityError",
    "IncomingRequest",
    "Invite",
    "Lagged",
    "Limits",
    "ListenError",
    "LocalProtocolError",
    "LockLostError",
    "MatchedTopicsFull",
    "MemberEvent",
    "MemberSummary",
    "MemberUpdate",
    "MemberUsage",
    "MessageInfo",
    "MessageOptions",
    "MessageStream",
    "MessageTooLargeError",
    "Messages",
    "Messaging",
    "NoHandlerError",
    "NoPeersSubscribedError",
    "Node",
    "NodeQueues",
    "NotInFlightError",
    "NotInRealmError",
    "NotMemberError",
    "NotOwnerError",
    "Notification",
    "OnFull",
    "OnNoPeers",
    "OpenSession",
    "Outbox",
    "OutboxList",
    "OutboxMessage",
    "OutboxRelay",
    "OverloadedError",
    "PartitionMovedError",
    "PeerId",
    "PeerNotFoundError",
    "PeerSummary",
    "PendingDeletion",
    "PendingSend",
    "Producer",
    "ProducerOptions",
    "ProtocolError",
    "ProtocolNotSupportedError",
    "PublicPubSub",
    "PublishRefusedError",
    "PublishResult",
    "PublishedMany",
    "Push",
    "PushConsumer",
    "PushedMessage",
    "QueueAccessError",
    "QueueConsumerClosedError",
    "QueueError",
    "QueueExistsError",
    "QueueExpanded",
    "QueueFullError",
    "QueueHandle",
    "QueueInfo",
    "QueueIsDistributedError",
    "QueueMessage",
    "QueueMessageNotFoundError",
    "QueueNotFoundError",
    "QueueOptions",
    "QueuePartlyPublishedError",
    "QueueRoute",
    "QueueSettings",
    "QueueSummary",
    "Queues",
    "RateLimitedError",
    "Realm",
    "RealmFileError",
    "RealmId",
    "RealmSecretError",
    "RealmSummary",
    "Receipt",
    "ReceivedMessage",
    "RejectMessage",
    "RemoteError",
    "Request",
    "RequestOptions",
    "RequestTimeoutError",
    "RetryMessage",
    "ScoreParams",
    "SendOptions",
    "SeqnoValidator",
    "ServiceMember",
    "ServiceMemberInfo",
    "ServiceNotFoundError",
    "ServiceOffer",
    "ServiceOptions",
    "ServiceUnavailableError",
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
    "Sessions",
    "SimpleConsumer",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "StoreUnknownError",
    "StreamClosedError",
    "Subscription",
    "TooManyTopicsError",
    "Topic",
    "TopicAnswer",
    "TopicMessage",
    "TopicNotFoundError",
    "TopicPeers",
    "TopicPublish",
    "TopicSummary",
    "TraceError",
    "TraceRunningError",
    "TraceSettings",
    "TraceStatus",
    "Tracer",
    "Verdict",
    "WireError",
    "WrongTypeError",
    "__version__",
    "create_outbox",
    "publish_in",
]

_HOMES = {
    "AcknowledgementOptions": "dep2p.gossipsub.topic_types",
    "AlreadyRespondedError": "dep2p.errors",
    "AnyOptions": "dep2p.protocols.services.options",
    "Backoff": "dep2p.protocols.timing.backoff",
    "ChannelConsumers": "dep2p.protocols.queues.admin",
    "ChannelLocks": "dep2p.protocols.queues.admin",
    "ChannelNotFoundError": "dep2p.errors",
    "ConfigError": "dep2p.errors",
    "ConnectedPeer": "dep2p.control_api.replies",
    "ConsumeOptions": "dep2p.protocols.queues.options",
    "ConsumerOptions": "dep2p.protocols.queues.clients.settings",
    "ControlError": "dep2p.control_api.errors",
    "DaemonUnreachableError": "dep2p.control_api.errors",
    "DeadLetterInfo": "dep2p.protocols.queues.admin",
    "DeliveryExpiredError": "dep2p.errors",
    "DeliveryFailedError": "dep2p.errors",
    "DeliveryQueueFullError": "dep2p.errors",
    "DeliveryState": "dep2p.protocols.delivery.states",
    "DeliveryStatus": "dep2p.protocols.delivery.states",
    "DeliveryUnknownError": "dep2p.errors",
    "Dep2pError": "dep2p.errors",
    "ErrorCode": "dep2p.errors",
    "FeedEndedError": "dep2p.control_api.errors",
    "GatherOptions": "dep2p.protocols.messaging.answers",
    "GatherResult": "dep2p.protocols.messaging.answers",
    "Gathering": "dep2p.services.gathers",
    "GossipParams": "dep2p.gossipsub.params",
    "HandlerError": "dep2p.errors",
    "HeadersTooLargeError": "dep2p.errors",
    "HostFailedError": "dep2p.errors",
    "Identity": "dep2p.identity",
    "IdentityError": "dep2p.errors",
    "IncomingRequest": "dep2p.protocols.messaging.incoming",
    "Invite": "dep2p.realm.credentials",
    "Lagged": "dep2p.gossipsub.topic_types",
    "Limits": "dep2p.limits",
    "ListenError": "dep2p.errors",
    "LocalProtocolError": "dep2p.errors",
    "LockLostError": "dep2p.errors",
    "MatchedTopicsFull": "dep2p.gossipsub.topic_types",
    "MemberEvent": "dep2p.realm.interface",
    "MemberSummary": "dep2p.control_api.replies",
    "MemberUpdate": "dep2p.protocols.realm.member_update",
    "MemberUsage": "dep2p.protocols.fairness.ledger",
    "MessageInfo": "dep2p.protocols.queues.admin",
    "MessageOptions": "dep2p.protocols.queues.options",
    "MessageStream": "dep2p.messaging.message_stream",
    "MessageTooLargeError": "dep2p.errors",
    "Messages": "dep2p.queues.consumer",
    "Messaging": "dep2p.messaging.service",
    "NoHandlerError": "dep2p.errors",
    "NoPeersSubscribedError": "dep2p.errors",
    "Node": "dep2p.node.node",
    "NodeQueues": "dep2p.node.queues_api",
    "NotInFlightError": "dep2p.errors",
    "NotInRealmError": "dep2p.errors",
    "NotMemberError": "dep2p.errors",
    "NotOwnerError": "dep2p.errors",
    "Notification": "dep2p.protocols.messaging.incoming",
    "OnFull": "dep2p.gossipsub.topic_types",
    "OnNoPeers": "dep2p.gossipsub.topic_types",
    "OpenSession": "dep2p.sessions.service",
    "Outbox": "dep2p.node.outbox",
    "OutboxList": "dep2p.control_api.replies",
    "OutboxMessage": "dep2p.control_api.replies",
    "OutboxRelay": "dep2p.queues.api.outbox",
    "OverloadedError": "dep2p.errors",
    "PartitionMovedError": "dep2p.errors",
    "PeerId": "dep2p.types",
    "PeerNotFoundError": "dep2p.errors",
    "PeerSummary": "dep2p.control_api.replies",
    "PendingDeletion": "dep2p.protocols.queues.admin",
    "PendingSend": "dep2p.queues.api.producer",
    "Producer": "dep2p.queues.api.producer",
    "ProducerOptions": "dep2p.protocols.queues.clients.settings",
    "ProtocolError": "dep2p.errors",
    "ProtocolNotSupportedError": "dep2p.errors",
    "PublicPubSub": "dep2p.pubsub.wire_formats",
    "PublishRefusedError": "dep2p.errors",
    "PublishResult": "dep2p.gossipsub.topic_types",
    "PublishedMany": "dep2p.gossipsub.topic_types",
    "Push": "dep2p.protocols.sessions.wire",
    "PushConsumer": "dep2p.queues.api.push_consumer",
    "PushedMessage": "dep2p.queues.api.push_consumer",
    "QueueAccessError": "dep2p.errors",
    "QueueConsumerClosedError": "dep2p.errors",
    "QueueError": "dep2p.errors",
    "QueueExistsError": "dep2p.errors",
    "QueueExpanded": "dep2p.protocols.queues.admin",
    "QueueFullError": "dep2p.errors",
    "QueueHandle": "dep2p.queues.api.queues",
    "QueueInfo": "dep2p.protocols.queues.admin",
    "QueueIsDistributedError": "dep2p.errors",
    "QueueMessage": "dep2p.queues.consumer",
    "QueueMessageNotFoundError": "dep2p.errors",
    "QueueNotFoundError": "dep2p.errors",
    "QueueOptions": "dep2p.protocols.queues.options",
    "QueuePartlyPublishedError": "dep2p.errors",
    "QueueRoute": "dep2p.protocols.queues.admin",
    "QueueSettings": "dep2p.queues.settings",
    "QueueSummary": "dep2p.protocols.queues.admin",
    "Queues": "dep2p.queues.api.queues",
    "RateLimitedError": "dep2p.errors",
    "Realm": "dep2p.realm.credentials",
    "RealmFileError": "dep2p.errors",
    "RealmId": "dep2p.types",
    "RealmSecretError": "dep2p.errors",
    "RealmSummary": "dep2p.control_api.replies",
    "Receipt": "dep2p.delivery.receipts",
    "ReceivedMessage": "dep2p.protocols.queues.admin",
    "RejectMessage": "dep2p.errors",
    "RemoteError": "dep2p.errors",
    "Request": "dep2p.protocols.messaging.incoming",
    "RequestOptions": "dep2p.protocols.messaging.incoming",
    "RequestTimeoutError": "dep2p.errors",
    "RetryMessage": "dep2p.errors",
    "ScoreParams": "dep2p.gossipsub.scoring.params",
    "SendOptions": "dep2p.protocols.messaging.incoming",
    "SeqnoValidator": "dep2p.pubsub.seqno_validator",
    "ServiceMember": "dep2p.services.service",
    "ServiceMemberInfo": "dep2p.services.service",
    "ServiceNotFoundError": "dep2p.errors",
    "ServiceOffer": "dep2p.protocols.realm.statement",
    "ServiceOptions": "dep2p.protocols.services.options",
    "ServiceUnavailableError": "dep2p.errors",
    "Session": "dep2p.sessions.service",
    "SessionClosedError": "dep2p.errors",
    "SessionFailedError": "dep2p.errors",
    "SessionFullError": "dep2p.errors",
    "SessionGapError": "dep2p.errors",
    "SessionNotFoundError": "dep2p.errors",
    "SessionOptions": "dep2p.protocols.sessions.options",
    "SessionRequest": "dep2p.sessions.server_session",
    "SessionResetError": "dep2p.errors",
    "SessionTokenError": "dep2p.errors",
    "Sessions": "dep2p.node.sessions",
    "SimpleConsumer": "dep2p.queues.api.simple_consumer",
    "StoreError": "dep2p.errors",
    "StoreFullError": "dep2p.errors",
    "StoreLockedError": "dep2p.errors",
    "StoreUnknownError": "dep2p.errors",
    "StreamClosedError": "dep2p.errors",
    "Subscription": "dep2p.pubsub.subscription",
    "TooManyTopicsError": "dep2p.errors",
    "Topic": "dep2p.pubsub.topic",
    "TopicAnswer": "dep2p.protocols.messaging.answers",
    "TopicMessage": "dep2p.gossipsub.topic_types",
    "TopicNotFoundError": "dep2p.errors",
    "TopicPeers": "dep2p.control_api.replies",
    "TopicPublish": "dep2p.delivery.receipts",
    "TopicSummary": "dep2p.control_api.replies",
    "TraceError": "dep2p.errors",
    "TraceRunningError": "dep2p.errors",
    "TraceSettings": "dep2p.tracing.settings",
    "TraceStatus": "dep2p.node.tracer",
    "Tracer": "dep2p.node.tracer",
    "Verdict": "dep2p.gossipsub.events",
    "WireError": "dep2p.errors",
    "WrongTypeError": "dep2p.arguments",
    "create_outbox": "dep2p.storage.app_outbox",
    "publish_in": "dep2p.storage.app_outbox",
}

if not TYPE_CHECKING:  # else checkers would accept any name at all

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
