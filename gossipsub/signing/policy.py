"""Signing policies: which of author, seqno, signature and key a message must or must not have."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dep2p.gossipsub import reasons
from dep2p.gossipsub.headers import MessageHeaders
from dep2p.gossipsub.rpc import RpcMessage


class SigningPolicy(Enum):
    """A network's rule; all of its nodes have the same."""

    STRICT_SIGN = "strict-sign"
    """Every message is signed by its author."""
    STRICT_NO_SIGN = "strict-no-sign"
    """No message names its author; ids come from the content."""


Authenticate = Callable[[RpcMessage], str | None]
"""Check MAC and signature: None when they hold, else one of :mod:`dep2p.gossipsub.reasons`. Pure."""

Compose = Callable[[str, bytes, bytes], RpcMessage]
"""Makes the outgoing message from topic, data and seqno (8 bytes), with id and signature as the network wants them."""

ComposeWithHeaders = Callable[[str, bytes, bytes, MessageHeaders], RpcMessage]
"""The same for a message with headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSigning:
    """How a network's messages are made and checked.

    - ``compose``: makes messages of own publishes, from a codec.
    - ``seqno_start``: see `Seqnos`.
    - ``authenticate``: checks MAC and signature inside the router; with ``is_external`` every message becomes a
      `Validate` effect instead, and ``authenticate`` is not called.
    - ``compose_with_headers``: None on a wire whose messages have no place for headers.
    """

    compose: Compose
    seqno_start: int
    policy: SigningPolicy = SigningPolicy.STRICT_SIGN
    authenticate: Authenticate | None = None
    is_external: bool = False
    compose_with_headers: ComposeWithHeaders | None = None


def policy_violation(policy: SigningPolicy, message: RpcMessage) -> str | None:
    """Return how a message breaks the policy, before any signature is verified; None when it does not."""
    if policy is SigningPolicy.STRICT_SIGN:
        if not message.signature or not message.author or not message.seqno:
            return reasons.MISSING_SIGNATURE
        return None
    if message.signature:
        return reasons.UNEXPECTED_SIGNATURE
    if message.author or message.seqno or message.key:
        return reasons.UNEXPECTED_AUTH_INFO
    return None


class Seqnos:
    """Sequence numbers of this node: 8 bytes big-endian, growing.

    ``start`` must be above everything that earlier runs used: wall clock nanoseconds serve, since no node publishes
    a billion messages a second; a node that does not trust its clock keeps the last one on disk and takes the larger.
    """

    __slots__ = ("first", "last")

    def __init__(self, start: int) -> None:
        if not 0 <= start < 1 << 63:
            raise ValueError(f"a first sequence number is between 0 and 2**63, not {start}")
        self.first: int = start + 1
        """The first sequence number of this run: lower ones belong to earlier runs."""
        self.last: int = start
        """The last sequence number that was given out."""

    def next(self) -> bytes:
        """Give out the next sequence number."""
        self.last += 1
        return self.last.to_bytes(8, "big")
