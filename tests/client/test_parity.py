"""A node and a client have the same verbs: names, parameters, defaults and results are compared by inspection."""

import inspect
import re
from collections.abc import Callable
from typing import Final

import pytest

from dep2p.client import (
    Client,
    ClientGathering,
    ClientOpenSession,
    ClientOutbox,
    ClientOutboxRelay,
    ClientPendingSend,
    ClientProducer,
    ClientPushConsumer,
    ClientPushedMessage,
    ClientQueueHandle,
    ClientQueueMessage,
    ClientQueues,
    ClientReceipt,
    ClientServedSession,
    ClientSessionRequest,
    ClientSessions,
    ClientSimpleConsumer,
    ClientStream,
    ClientSubscription,
    ClientTopic,
    ClientTopicPublish,
    ClientTracer,
)
from dep2p.delivery.receipts import Receipt, TopicPublish
from dep2p.messaging.message_stream import MessageStream
from dep2p.node.node import Node
from dep2p.node.outbox import Outbox
from dep2p.node.queues_api import NodeQueues
from dep2p.node.sessions import Sessions
from dep2p.node.tracer import Tracer
from dep2p.pubsub.subscription import Subscription
from dep2p.pubsub.topic import Topic
from dep2p.queues.api.outbox import OutboxRelay
from dep2p.queues.api.producer import PendingSend, Producer
from dep2p.queues.api.push_consumer import PushConsumer, PushedMessage
from dep2p.queues.api.queues import QueueHandle
from dep2p.queues.api.simple_consumer import SimpleConsumer
from dep2p.queues.consumer import QueueMessage
from dep2p.services.gathers import Gathering
from dep2p.sessions.client_session import OpenSession
from dep2p.sessions.server_session import Session, SessionRequest

PAIRS: Final[tuple[tuple[type, type], ...]] = (
    (Node, Client),
    (NodeQueues, ClientQueues),
    (QueueHandle, ClientQueueHandle),
    (QueueMessage, ClientQueueMessage),
    (OutboxRelay, ClientOutboxRelay),
    (Producer, ClientProducer),
    (PendingSend, ClientPendingSend),
    (PushConsumer, ClientPushConsumer),
    (PushedMessage, ClientPushedMessage),
    (SimpleConsumer, ClientSimpleConsumer),
    (Sessions, ClientSessions),
    (Session, ClientServedSession),
    (SessionRequest, ClientSessionRequest),
    (OpenSession, ClientOpenSession),
    (MessageStream, ClientStream),
    (Topic, ClientTopic),
    (Subscription, ClientSubscription),
    (Outbox, ClientOutbox),
    (Receipt, ClientReceipt),
    (TopicPublish, ClientTopicPublish),
    (Tracer, ClientTracer),
    (Gathering, ClientGathering),
)
"""A class of a node, and the one of a client that stands for it."""
_ALIASES: Final = {
    "Place": "Literal[before, after]",
    "SessionRequestHandler": "Callable[[SessionRequest], Awaitable[bytes]]",
}
"""Names of types in modules whose annotations stay texts."""
_REALM_CHOICE: Final = "Union[Realm, RealmId, str, NoneType]"
EXCEPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "how a node or a connection to a daemon is made": ("Node.open", "Client.over"),
    "a node does not go away from its own program": ("Client.watch_feeds",),
    "about the daemon's process, or its settings": (
        "Client.bounds", "Client.config", "Client.events", "Client.healthy", "Client.metrics", "Client.ready",
        "Client.shutdown", "Client.status",
    ),
    "parts of a node, and views of them, for the program that embeds it": (
        "Node.unreached_bootstrap",
        "Node.all_apps", "Node.all_pubsubs", "Node.all_services", "Node.counters", "Node.delivery", "Node.handle",
        "Node.is_draining", "Node.membership", "Node.messaging", "Node.pubsub", "Node.quotas", "Node.remember",
        "Node.services", "Node.stats", "Node.subscribe_members", "Node.subscribe_peers", "Tracer.attach",
        "Tracer.counters", "Tracer.is_on", "Tracer.run",
    ),
    "a daemon gives the realm's secret out as an invite only": ("Node.realm",),
    "the broker's side, for producers, consumers and the daemon": (
        "NodeQueues.ask", "NodeQueues.ask_broker", "NodeQueues.destinations", "NodeQueues.distributed_values",
        "NodeQueues.flows", "NodeQueues.is_off_partition", "NodeQueues.of", "NodeQueues.open_consumer",
        "NodeQueues.open_subscription", "NodeQueues.ownership", "NodeQueues.publish_batch",
        "NodeQueues.publish_sequenced", "NodeQueues.publish_sequenced_to_broker", "NodeQueues.publish_to_broker",
    ),
    "for the metrics of the node": (
        "Producer.flow_counts", "Producer.flow_values", "PushConsumer.flow_counts", "PushConsumer.flow_values",
    ),
    "one request with many messages; in a node `publish_many` takes parts": ("ClientQueues.publish_from",),
    "the encoder's view of a message": ("PushedMessage.attributes", "QueueMessage.attributes"),
    "the options of a session are the daemon's settings": ("Sessions.open", "Sessions.serve", "Sessions.start"),
    "the list of sessions has it": ("Sessions.opened", "Session.is_attached", "OpenSession.is_attached"),
    "a number that is held over HTTP would hold the session when its program dies": (
        "Session.fill", "Session.reserve", "OpenSession.next_request_id",
    ),
    "over HTTP an answer and the pushes come by two ways, so that an answer never waits": ("OpenSession.request",),
    "between a session, a stream or a receipt and what drives it": (
        "Gathering.answer_came", "Gathering.published_to",
        "Session.attach", "Session.close", "Session.collect", "Session.detach", "Session.handle",
        "Session.next_deadline", "Session.on_deadline", "ClientServedSession.take_request",
        "OpenSession.failed_internally", "OpenSession.leave", "OpenSession.next_deadline", "OpenSession.on_deadline",
        "OpenSession.opened", "OpenSession.run", "OpenSession.stop", "MessageStream.abort", "MessageStream.accept",
        "MessageStream.error", "MessageStream.finish", "MessageStream.is_on", "MessageStream.is_over",
        "MessageStream.is_unwanted", "MessageStream.lose_membership", "MessageStream.next_deadline",
        "MessageStream.on_deadline", "MessageStream.open", "MessageStream.opened_by_peer",
        "MessageStream.raise_unreported", "MessageStream.receive", "MessageStream.reset", "MessageStream.start",
        "MessageStream.progress", "MessageStream.wait_left", "ClientStream.is_closed", "ClientStream.sent_bytes",
        "ClientTopic.join", "Receipt.body_of_try",
        "Receipt.ended", "Receipt.left", "Subscription.put", "Subscription.put_local", "Subscription.put_topics_full",
    ),
    "validators judge in the router, before a message is forwarded": ("Topic.add_validator",),
    "`ReliablePublish` is what pub/sub knows of `TopicPublish`": ("Topic.publish",),
    "a client gives the control API's structs of offers": ("Node.offered_services", "Node.service_info"),
    "the buffer is in the daemon": ("Subscription.buffered_bytes", "Subscription.holds_publishers"),
    "a daemon's trace has the settings of [trace]": ("Tracer.start", "Tracer.status", "Tracer.stop"),
}  # fmt: skip
"""By reason: the members that one side has alone, or has with another signature. Each is ``Class.member``."""


def members(cls: type) -> dict[str, object]:
    """The public methods and properties of a class, its bases' among them."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base.__module__.startswith(("dep2p.", "abc")):
            found |= {name: member for name, member in vars(base).items() if not name.startswith("_")}
    plain = {name: getattr(member, "__func__", member) for name, member in found.items()}
    return {name: each for name, each in plain.items() if isinstance(each, property) or inspect.isfunction(each)}


def neutral(text: object) -> str:
    """An annotation with the node's names of classes, whichever side it is of."""
    plain = re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(text)).replace("'", "").replace('"', "")
    plain = re.sub(r"<class (\w+)>", r"\1", plain).replace(_REALM_CHOICE, "RealmChoice")
    for ours, theirs in PAIRS:
        plain = re.sub(rf"\b{theirs.__name__}\b", ours.__name__, plain)
    for alias, meaning in _ALIASES.items():
        plain = re.sub(rf"\b{alias}\b", meaning, plain)
    return plain.replace("ClientMessages", "Messages").replace("Client", "").replace("NodeQueues", "Queues")


def parameters(function: Callable[..., object]) -> list[tuple[str, str, str, str]]:
    """The parameters of a method without ``self``: names, kinds, defaults and annotations."""
    found = list(inspect.signature(function).parameters.values())[1:]
    return [(each.name, str(each.kind), repr(each.default), neutral(each.annotation)) for each in found]


def result(function: Callable[..., object]) -> str:
    """The annotation of what a call gives in the end."""
    given = neutral(inspect.signature(function).return_annotation)
    return re.sub(r"^(?:Awaitable|AsyncGenerator|AbstractAsyncContextManager)\[(.*?)(?:, None)?\]$", r"\1", given)


def is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function)) if callable(function) else False


def difference(ours: object, theirs: object) -> str:
    """What differs between a node's member and a client's; empty when nothing does.

    A client may await what a node has at once, as a method or a property: it asks its daemon.
    """
    if isinstance(ours, property) and isinstance(theirs, property):
        return ""
    if isinstance(ours, property):
        assert ours.fget is not None
        is_asked = callable(theirs) and is_async(theirs) and not parameters(theirs)
        return "" if is_asked else "a property on one side"
    if isinstance(theirs, property) or not callable(ours) or not callable(theirs):
        return "a property on one side"
    if parameters(ours) != parameters(theirs):
        return f"parameters: {parameters(ours)} and {parameters(theirs)}"
    if result(ours) != result(theirs):
        return f"results: {result(ours)} and {result(theirs)}"
    if is_async(ours) and not is_async(theirs):
        return "only the node's is awaited"
    return ""


def differences() -> dict[str, str]:
    found: dict[str, str] = {}
    for ours, theirs in PAIRS:
        node, client = members(ours), members(theirs)
        for name in sorted({*node, *client}):
            if name not in client:
                found[f"{ours.__name__}.{name}"] = "only the node has it"
            elif name not in node and name in getattr(ours, "__struct_fields__", ()):
                continue
            elif name not in node:
                found[f"{theirs.__name__}.{name}"] = "only the client has it"
            elif text := difference(node[name], client[name]):
                found[f"{ours.__name__}.{name}"] = text
    return found


def test_a_client_differs_from_a_node_only_where_the_table_says_why() -> None:
    known = {name for names in EXCEPTIONS.values() for name in names}
    unknown = {name: text for name, text in differences().items() if name not in known}
    assert not unknown, "give the other side the same, or add a reason:\n" + "\n".join(
        f"{name}: {text}" for name, text in unknown.items()
    )


@pytest.mark.parametrize("reason", EXCEPTIONS)
def test_each_exception_is_needed(reason: str) -> None:
    found = differences()
    assert not [name for name in EXCEPTIONS[reason] if name not in found]
