"""Errors of queues on the wire: a code and a text."""

from typing import Final

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    LockLostError,
    MessageTooLargeError,
    NotInFlightError,
    NotOwnerError,
    OverloadedError,
    PartitionMovedError,
    ProtocolError,
    QueueAccessError,
    QueueConsumerClosedError,
    QueueExistsError,
    QueueFullError,
    QueueIsDistributedError,
    QueueMessageNotFoundError,
    QueueNotFoundError,
    RemoteError,
    StoreError,
    StoreFullError,
    StoreUnknownError,
)
from dep2p.limits import Limits
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.frames import QueueCode

_OVERHEAD_BYTES: Final = 65_536
_BATCH_BYTES: Final = 1_048_576
_ANSWER_BYTES: Final = 524_288

_EXCEPTIONS: Final[dict[int, type[Dep2pError]]] = {
    QueueCode.INVALID: ProtocolError,
    QueueCode.QUEUE_NOT_FOUND: QueueNotFoundError,
    QueueCode.CHANNEL_NOT_FOUND: ChannelNotFoundError,
    QueueCode.MESSAGE_NOT_FOUND: QueueMessageNotFoundError,
    QueueCode.EXISTS: QueueExistsError,
    QueueCode.FULL: QueueFullError,
    QueueCode.NOT_IN_FLIGHT: NotInFlightError,
    QueueCode.ACCESS: QueueAccessError,
    QueueCode.OVERLOADED: OverloadedError,
    QueueCode.TOO_LARGE: MessageTooLargeError,
    QueueCode.STORE: StoreError,
    QueueCode.STORE_FULL: StoreFullError,
    QueueCode.CONSUMER_CLOSED: QueueConsumerClosedError,
    QueueCode.STORE_UNKNOWN: StoreUnknownError,
    QueueCode.LOCK_LOST: LockLostError,
    QueueCode.DISTRIBUTED: QueueIsDistributedError,
    QueueCode.MOVED: PartitionMovedError,
    QueueCode.NOT_OWNER: NotOwnerError,
}


def error_of(code: int, text: str) -> Dep2pError:
    """The public exception of a refusal. Raises ProtocolError for a malformed one."""
    if code == QueueCode.NOT_OWNER:
        epoch, owner, nodes, rest = wire.read_not_owner(text)
        return NotOwnerError(rest, owner, epoch, nodes)
    return _EXCEPTIONS.get(code, RemoteError)(text)


def code_of(error: BaseException) -> QueueCode:
    """The code under which a refusal crosses the wire."""
    if isinstance(error, ValueError | TypeError):
        return QueueCode.INVALID
    for code, kind in reversed(_EXCEPTIONS.items()):
        if kind is not StoreError and isinstance(error, kind):
            return QueueCode(code)
    return QueueCode.STORE if isinstance(error, StoreError) else QueueCode.OTHER


def text_of(error: BaseException) -> str:
    """The text of a refusal."""
    if isinstance(error, NotOwnerError):
        return wire.not_owner_text(error.term, error.owner, error.nodes, str(error))
    return str(error)


def payload_bytes_max(limits: Limits) -> int:
    """The largest payload of a queue frame: an ANSWER with messages, the last one of the largest size, in base64."""
    return 2 * (max(limits.message_bytes_max, _BATCH_BYTES) + _ANSWER_BYTES) + _OVERHEAD_BYTES
