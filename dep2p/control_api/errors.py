"""Errors of the control API, and the table between D-codes and the library's own exceptions."""

from collections.abc import Mapping
from typing import Final

from dep2p.encoding.shapes import is_list
from dep2p.error_codes import ERRORS, find
from dep2p.errors import (
    AlreadyRespondedError,
    ChannelNotFoundError,
    ConfigError,
    DeliveryExpiredError,
    DeliveryFailedError,
    DeliveryQueueFullError,
    DeliveryUnknownError,
    Dep2pError,
    HandlerError,
    HeadersTooLargeError,
    IdentityError,
    ListenError,
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
    QueueExistsError,
    QueueFullError,
    QueueIsDistributedError,
    QueueMessageNotFoundError,
    QueueNotFoundError,
    QueuePartlyPublishedError,
    RateLimitedError,
    RealmFileError,
    RealmSecretError,
    RemoteError,
    RequestTimeoutError,
    ServiceNotFoundError,
    ServiceUnavailableError,
    SessionClosedError,
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
)


class ControlError(Dep2pError):
    """The daemon refused a call, or gave an answer that the client does not understand.

    Only problems without an exception of their own in :mod:`dep2p.errors` have this class.
    """

    def __init__(self, problem: Mapping[str, object]) -> None:
        self.problem = problem
        """The RFC 9457 problem, whole."""
        self.code: str = str(problem.get("code", "D9001"))
        """A key of :data:`dep2p.error_codes.ERRORS`."""
        self.status: int = _whole(problem.get("status"), 500)
        """The HTTP status."""
        self.detail: str = str(problem.get("detail") or problem.get("title") or "no detail")
        """A human-readable description of the problem."""
        self.hint: str = str(problem.get("try", ""))
        """A suggestion for the user; may be empty."""
        super().__init__(self.detail)


class DaemonUnreachableError(ControlError):
    """Not now: no daemon answers, it stops, or it went away during the call. A later try may succeed.

    ``code`` is D3001, or D3006 for a daemon that stops or drains.
    """

    def __init__(self, detail: str, hint: str = "", *, code: str = "D3001", was_sent: bool = True) -> None:
        info = ERRORS[code]
        super().__init__(
            {
                "code": info.code,
                "title": info.title,
                "status": info.http_status,
                "detail": detail,
                "try": hint or info.what_to_try,
            }
        )
        self.was_sent = was_sent
        """False when the daemon certainly did not carry out the call, so that the call may be made again."""


class FeedEndedError(ControlError):
    """Never: a subscription, handler, consumer or session was open and cannot go on, however long the program waits.

    The node left the realm, the queue was deleted, the token is wrong, the daemon is of another version. ``code`` is
    D3009; ``reason`` has the cause.
    """

    def __init__(self, feed: str, reason: Dep2pError) -> None:
        info = ERRORS["D3009"]
        super().__init__(
            {
                "code": info.code,
                "title": info.title,
                "status": info.http_status,
                "detail": f"{feed} cannot go on: {reason}",
                "try": info.what_to_try,
            }
        )
        self.feed = feed
        """The name of the feed, as in `FeedInterrupted`."""
        self.reason = reason
        """The error that ended it, which has the code of the cause (`code_of`)."""


def unexpected_answer(detail: str) -> ControlError:
    """Return the error of an answer that is not that of a daemon of this version."""
    return ControlError({"code": "D3007", "status": 502, "detail": f"not the answer that was expected: {detail}"})


def too_late(detail: str) -> ControlError:
    """Return the error of an answer to a request whose caller no longer waits."""
    return ControlError({"code": "D5011", "status": 404, "detail": detail})


# Most specific first, so that a subclass does not get its base's code.
_CODES: Final[tuple[tuple[type[Dep2pError], str], ...]] = (
    (ConfigError, "D1003"),
    (IdentityError, "D2001"),
    (RealmFileError, "D2002"),
    (RealmSecretError, "D2005"),
    (ListenError, "D3003"),
    (PeerNotFoundError, "D4001"),
    (NotMemberError, "D4002"),
    (NotInRealmError, "D4003"),
    (RequestTimeoutError, "D5001"),
    (HandlerError, "D5002"),
    (ServiceNotFoundError, "D5017"),
    (ServiceUnavailableError, "D5018"),
    (NoHandlerError, "D5003"),
    (HeadersTooLargeError, "D5016"),
    (MessageTooLargeError, "D5004"),
    (RateLimitedError, "D5005"),
    (OverloadedError, "D5006"),
    (ProtocolError, "D5007"),
    (RemoteError, "D5008"),
    (ProtocolNotSupportedError, "D5009"),
    (TopicNotFoundError, "D5010"),
    (NoPeersSubscribedError, "D5013"),
    (TooManyTopicsError, "D5014"),
    (PublishRefusedError, "D5015"),
    (SessionClosedError, "D5101"),
    (SessionFullError, "D5102"),
    (SessionResetError, "D5103"),
    (SessionGapError, "D5104"),
    (SessionNotFoundError, "D5105"),
    (SessionTokenError, "D5106"),
    (AlreadyRespondedError, "D5107"),
    (QueueNotFoundError, "D5201"),
    (ChannelNotFoundError, "D5202"),
    (QueueMessageNotFoundError, "D5203"),
    (QueueExistsError, "D5204"),
    (QueueFullError, "D5205"),
    (LockLostError, "D5209"),
    (NotInFlightError, "D5206"),
    (QueueAccessError, "D5207"),
    (QueueConsumerClosedError, "D5208"),
    (QueueIsDistributedError, "D5210"),
    (PartitionMovedError, "D5211"),
    (QueuePartlyPublishedError, "D5212"),
    (DeliveryExpiredError, "D5402"),
    (DeliveryFailedError, "D5401"),
    (DeliveryQueueFullError, "D5403"),
    (DeliveryUnknownError, "D5404"),
    (StoreFullError, "D5302"),
    (NotOwnerError, "D5213"),
    (StoreLockedError, "D5303"),
    (StoreUnknownError, "D5304"),
    (StoreError, "D5301"),
    (StreamClosedError, "D6001"),
    (TraceRunningError, "D7006"),
    (TraceError, "D7005"),
)
_EXCEPTIONS: Final[dict[str, type[Dep2pError]]] = {
    "D1007": MessageTooLargeError,  # a body that is too large for the control API is too large for a message, too
    **{code: kind for kind, code in _CODES if kind not in (ConfigError, IdentityError, ListenError)},
}


def code_of(error: BaseException) -> str:
    """Return the D-code of an exception; D9001 for one that no table names."""
    if isinstance(error, ControlError | ConfigError):
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return "D9001"


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def error_from_problem(problem: Mapping[str, object], status: int = 0) -> Dep2pError:
    """Return the exception for a problem: the library's own where there is one, else :class:`ControlError`."""
    code = str(problem.get("code", ""))
    if find(code) is None:
        problem = {"code": "D3007", "status": status, "detail": f"not a dep2p problem: {str(problem)[:200]}"}
        return ControlError(problem)
    kind = _EXCEPTIONS.get(code)
    if code == "D3006":  # a daemon that stops and one that was killed are the same to a program
        text = str(problem.get("detail", ""))
        return DaemonUnreachableError(text, str(problem.get("try", "")), code=code, was_sent=False)
    if kind is None:
        return ControlError({"status": status, **problem})
    text = str(problem.get("detail", ""))
    if kind is RateLimitedError:
        return RateLimitedError(text, _whole(problem.get("retry_after_ms"), 0))
    if kind is NotOwnerError:
        nodes = problem.get("nodes")
        known = tuple(map(str, nodes)) if is_list(nodes) else ()
        return NotOwnerError(text, str(problem.get("owner", "")), 0, known)
    return kind(text)
