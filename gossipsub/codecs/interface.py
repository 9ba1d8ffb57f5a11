"""The interface between the router and a wire, and the caps that both codecs put on a decoded RPC."""

from dataclasses import dataclass
from typing import Protocol

from dep2p.gossipsub.rpc import Rpc, RpcMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """More of anything is a protocol error: one RPC must not cost more than its size suggests."""

    subscriptions_max: int = 5_000
    messages_max: int = 5_000
    ids_max: int = 25_000
    """Message ids over all IHAVE, IWANT and IDONTWANT of one RPC. A full IHAVE RPC of go with 46-byte ids has some
    22,000."""
    grafts_max: int = 5_000
    prunes_max: int = 5_000
    px_peers_max: int = 5_000
    """Peers named over all PRUNE of one RPC."""
    topic_bytes_max: int = 1_024
    id_bytes_max: int = 4_096
    record_bytes_max: int = 16_384
    author_bytes_max: int = 128
    key_bytes_max: int = 4_096
    signature_bytes_max: int = 2_048


class Codec(Protocol):
    """Translates between RPCs and payload bytes. The router itself calls `compose` and `authenticate` only."""

    def encode(self, rpc: Rpc) -> list[bytes]:
        """Encode the RPC as payloads, none longer than the network's limit; an empty RPC gives none."""
        ...

    def decode(self, payload: bytes) -> Rpc:
        """Decode one payload. Raises :class:`~dep2p.errors.ProtocolError` only."""
        ...

    def compose(self, topic: str, data: bytes, seqno: bytes) -> RpcMessage:
        """Make a message of this node, signed as the network wants it."""
        ...

    def authenticate(self, message: RpcMessage) -> str | None:
        """Return why a message is not its author's; None when it is."""
        ...
