"""Every public exception, and the wire error codes that map one to one to them (docs/spec/frame.md)."""

from collections.abc import Sequence
from enum import IntEnum

from dep2p.outside_text import printable


class ErrorCode(IntEnum):
    """Codes of an ERROR frame's payload."""

    UNKNOWN = 1
    INVALID_REQUEST = 2
    HANDLER_FAILED = 3
    TIMEOUT = 4
    NOT_MEMBER = 5
    NO_HANDLER = 6
    MESSAGE_TOO_LARGE = 7
    RATE_LIMITED = 8
    TOPIC_NOT_FOUND = 9
    UNSUPPORTED_VERSION = 10
    OVERLOADED = 11


class Dep2pError(Exception):
    """Base of all errors that this package raises on purpose."""

    is_unsent: bool = False
    """Set on an error of a request that ended before anything was sent: no handler can have run."""


class LocalProtocolError(Dep2pError):
    """Our own side misused a protocol core: a bug in the caller, never the peer's fault."""


class WireError(Dep2pError):
    """An error that crosses the wire; ``code`` says which."""

    code: ErrorCode = ErrorCode.UNKNOWN


class RemoteError(WireError):
    """The peer failed in a way that it did not name."""


class ProtocolError(WireError):
    """A peer broke the protocol. It is not tried again."""

    code: ErrorCode = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.code = code


class HandlerError(WireError):
    """The handler on the other side failed.

    Its text crosses the wire only when the handler raised this very class.
    """

    code = ErrorCode.HANDLER_FAILED


class RequestTimeoutError(WireError, TimeoutError):
    """No answer within the deadline."""

    code = ErrorCode.TIMEOUT


class NotMemberError(WireError):
    """The peer is not a verified member of the realm at this moment."""

    code = ErrorCode.NOT_MEMBER


class NoHandlerError(WireError):
    """The peer has no handler under that name."""

    code = ErrorCode.NO_HANDLER


class ServiceNotFoundError(NoHandlerError):
    """No member of the realm offers the service, in the group, version and schema that were asked for."""


class ServiceUnavailableError(Dep2pError):
    """Members offer the service, and none that was tried took the request; the text says who was tried and why not."""


class MessageTooLargeError(WireError):
    """A message is over the size limit, and nothing of it was sent; or it is a response, whose handler has run."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class HeadersTooLargeError(MessageTooLargeError):
    """Headers, key and tags of a message are over their limit, whatever the size of its body."""


class RateLimitedError(WireError):
    """The peer takes no more from us for now."""

    code = ErrorCode.RATE_LIMITED

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class TopicNotFoundError(WireError):
    """No such topic."""

    code = ErrorCode.TOPIC_NOT_FOUND


class OverloadedError(WireError):
    """The peer's bounded queues are full."""

    code = ErrorCode.OVERLOADED


class PeerNotFoundError(Dep2pError):
    """No address of the peer is known, or none of them answers."""


class StreamClosedError(Dep2pError):
    """The stream or connection ended before the call was done."""


class ProtocolNotSupportedError(Dep2pError):
    """The peer does not speak the protocol that was asked for."""


class NotInRealmError(Dep2pError):
    """This node is not in the realm that the call needs."""


class NoPeersSubscribedError(Dep2pError):
    """No peer that this node knows is subscribed to the topic: nothing was sent."""


class PublishRefusedError(Dep2pError):
    """A validator of this node's own topic did not accept the message that was to be published: nothing was sent."""


class TooManyTopicsError(Dep2pError):
    """This node is in as many topics as its limit allows."""


class ListenError(Dep2pError):
    """An address to listen on is taken, malformed or not ours."""


class HostFailedError(Dep2pError):
    """A part of the host that it cannot do without has failed; the host is closed."""


class IdentityError(Dep2pError):
    """The node's key file cannot be read, written or understood."""


class RealmFileError(Dep2pError):
    """A realm file or an invite cannot be read or understood."""


class RealmSecretError(Dep2pError, ValueError):
    """A realm's name, secret or passphrase is not usable; the message says why and never shows the secret."""


class DeliveryFailedError(Dep2pError):
    """A reliable message was not taken: its receiver rejected it, was silent for all tries, or it was dropped."""


class DeliveryExpiredError(DeliveryFailedError):
    """A reliable message was not acknowledged within the age allowed."""


class DeliveryUnknownError(Dep2pError):
    """The node does not know (any more) how a reliable message ended: it was restarted, or the message is too old."""


class DeliveryQueueFullError(Dep2pError):
    """So many reliable messages wait already that this one was not accepted."""


class StoreError(Dep2pError):
    """A store cannot read or write; the text says what, why and what to do. Nothing that was acknowledged is lost."""

    is_about_batch = False
    """The store refuses this batch; the store itself is well."""
    is_away = False
    """The store could not be reached."""


class StoreUnknownError(StoreError):
    """The store went away while it wrote: whether it did is not known yet.

    The batch is kept. When the store is back it is found to be there, or written: publishing it again without a
    publisher's number may make two of it.
    """


class StoreFullError(StoreError):
    """There is no room for more: nothing was written. Acknowledgements still work."""


class StoreLockedError(StoreError):
    """Another process has the store."""


class NotOwnerError(StoreLockedError):
    """Another node is the broker of the queues of the store that this one shares with it. Nothing was taken.

    ``owner``: its peer id, empty while there is none. ``term``: a higher one is newer.
    ``nodes``: those that share the store.
    """

    def __init__(self, message: str, owner: str = "", term: int = 0, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.owner = owner
        self.term = term
        self.nodes = nodes


class QueueError(Dep2pError):
    """A durable queue cannot carry out the request."""


class QueueNotFoundError(QueueError):
    """The broker has no queue of that name."""


class ChannelNotFoundError(QueueError):
    """The queue has no channel of that name."""


class QueueMessageNotFoundError(QueueError):
    """No such message or dead letter."""


class QueueExistsError(QueueError):
    """A queue of that name is there, with other options."""


class QueueFullError(QueueError):
    """The queue, or its node, takes no more for now. Nothing of the publish was taken."""


class NotInFlightError(QueueError):
    """The consumer does not hold that message (any more): its time was over, or it was settled before."""

    def __init__(self, text: str, handles: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.handles: tuple[str, ...] = tuple(handles)
        """The handles that an ack came too late for."""


class LockLostError(NotInFlightError):
    """The consumer has lost the partition of that message: its lease was over, or it has handed it over."""


class QueueAccessError(QueueError):
    """The queue's owner does not allow the operation to this peer."""


class QueueConsumerClosedError(QueueError):
    """The consumer is over: the queue or channel was deleted, or the consumer was closed."""


class QueueIsDistributedError(QueueError):
    """The partitions of the queue are on several nodes: that operation goes to them."""


class PartitionMovedError(QueueError):
    """The key belongs to another partition now, on another node maybe. Nothing of the publish was taken."""


class QueuePartlyPublishedError(QueueError):
    """Messages of several order keys were published together to a queue on several nodes: some are durable, and the
    rest is not, or it is not known; the cause says why."""

    def __init__(self, text: str, taken: dict[int, str] | None = None) -> None:
        super().__init__(text)
        self.taken: dict[int, str] = dict(taken or {})
        """Ids of the durable messages, by their index in the publish. Publish the others again."""


class RejectMessage(Exception):
    """Raised by the handler of a queue's consumer: the message can never work. It becomes a dead letter at once."""


class RetryMessage(Exception):
    """Raised by the handler of a queue's consumer: try the message again, after ``delay_s`` seconds (None: as the
    consumer's ``retry`` says)."""

    def __init__(self, reason: str = "", *, delay_s: float | None = None) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


class SessionClosedError(Dep2pError):
    """The ordered session is over: one of its ends has ended it."""


class SessionFailedError(SessionClosedError):
    """The ordered session is over without its client having had everything; the text says why."""


class SessionFullError(Dep2pError):
    """The client has not handled what was pushed before, and the session keeps no more. Nothing was pushed."""


class SessionResetError(Dep2pError):
    """The server goes on with another sequence: pushes before ``next_seq`` that were not received are lost.

    Raised once, where it happened; taking goes on after it. A request that it hits may or may not have been handled.
    """

    def __init__(self, message: str, epoch: int = 0, next_seq: int = 0) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.next_seq = next_seq


class SessionGapError(Dep2pError):
    """Numbers of the sequence were given up, by the option ``gap="skip"``. Raised once; taking goes on after it."""


class SessionNotFoundError(Dep2pError):
    """No session of this node has that id."""


class SessionTokenError(Dep2pError, ValueError):
    """A session token is malformed, or of another server or name."""


class AlreadyRespondedError(Dep2pError):
    """The request was answered before: nothing can go in front of its response any more."""


class TraceError(Dep2pError):
    """The trace of a node cannot be written where it should be."""


class TraceRunningError(TraceError):
    """The node is tracing already."""


class ConfigError(Dep2pError):
    """A configuration value or key is wrong; the message names the place and the nearest right key.

    ``code`` is D1002 (unknown key), D1003 (wrong value) or D1004 (file unreadable).
    """

    def __init__(self, message: str, code: str = "D1003") -> None:
        super().__init__(message)
        self.code = code


_EXCEPTIONS: dict[int, type[WireError]] = {
    ErrorCode.UNKNOWN: RemoteError,
    ErrorCode.INVALID_REQUEST: ProtocolError,
    ErrorCode.HANDLER_FAILED: HandlerError,
    ErrorCode.TIMEOUT: RequestTimeoutError,
    ErrorCode.NOT_MEMBER: NotMemberError,
    ErrorCode.NO_HANDLER: NoHandlerError,
    ErrorCode.MESSAGE_TOO_LARGE: MessageTooLargeError,
    ErrorCode.RATE_LIMITED: RateLimitedError,
    ErrorCode.TOPIC_NOT_FOUND: TopicNotFoundError,
    ErrorCode.UNSUPPORTED_VERSION: ProtocolError,
    ErrorCode.OVERLOADED: OverloadedError,
}


def error_from_wire(code: int, text: str, retry_after_ms: int = 0) -> WireError:
    """The public exception for a received ERROR frame; an unknown code becomes :class:`RemoteError`.

    The peer chose the text: control characters become escapes, since errors end up in logs and on terminals.
    """
    text = printable(text)
    kind = _EXCEPTIONS.get(code, RemoteError)
    if kind is RateLimitedError:
        return RateLimitedError(text, retry_after_ms)
    if kind is ProtocolError:
        return ProtocolError(text, ErrorCode(code))
    return kind(text)
