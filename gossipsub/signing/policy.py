"""Signing policies: which of author, seqno, signature and key a message must or must not have."""

from collections.abc import Callable
from enum import Enum

from dep2p.gossipsub import reasons
from dep2p.gossipsub.rpc import Message


class SigningPolicy(Enum):
    """A network's rule; all of its nodes have the same."""

    STRICT_SIGN = "strict-sign"
    """Every message is signed by its author."""
    STRICT_NO_SIGN = "strict-no-sign"
    """No message names its author; ids come from the content."""


Authenticate = Callable[[Message], str | None]
"""Check MAC and signature: None when they hold, else one of :mod:`dep2p.gossipsub.reasons`. Pure."""

Compose = Callable[[str, bytes, bytes], Message]
"""topic, data, seqno (8 bytes) → a message as it goes out, with id and signature as the network wants them."""


def policy_violation(policy: SigningPolicy, message: Message) -> str | None:
    """Why a message breaks the policy, before any signature is verified; None when it does not."""
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
    a billion messages a second; who does not trust the clock keeps the last one on disk and takes the larger.
    """

    __slots__ = ("first", "last")

    def __init__(self, start: int) -> None:
        if not 0 <= start < 1 << 63:
            raise ValueError(f"a first sequence number is between 0 and 2**63, not {start}")
        self.first = start + 1
        """The first one of this run: what is below was published by an earlier one."""
        self.last = start
        """The last one that was given out."""

    def next(self) -> bytes:
        """The next one."""
        self.last += 1
        return self.last.to_bytes(8, "big")
