"""Admission of QUIC handshakes: which Initial packets begin one, which have to prove their address, which are dropped.

A handshake costs milliseconds and tens of kilobytes before any proof, and the source address of a packet can be forged.
So while some handshakes are under way a new one needs a token that was sent to its address (Retry, RFC 9000 section
8.1.2), which costs this node no memory.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from aioquic.quic.retry import QuicRetryTokenHandler

from dep2p.host.addresses import socket_address
from dep2p.host.resources.control_allowance import ControlRate
from dep2p.host.resources.ledger import address_block

DATAGRAM_BYTES_MIN = 1_200
"""A client pads the datagram of its Initial packet to this size (RFC 9000 section 14.1)."""
PENDING_WITHOUT_TOKEN_MAX = 8
"""Handshakes under way from which on a new one needs a token."""
PENDING_MAX = 64
"""Handshakes under way; above it the oldest of the address block that has most ends."""
STARTS_PER_BLOCK_PER_S = 8.0
"""Handshakes that one address block may begin, after a burst of 64."""
_STARTS_BURST_S = 8.0
_BLOCKS_MAX = 4_096

SocketAddress = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Start:
    """A handshake begins. The connection ids are those of the transport parameters (RFC 9000 section 7.3)."""

    original_destination_cid: bytes
    retry_source_cid: bytes | None


Decision = Start | Literal["retry", "token", "rate"]
"""Answer with `QuicAdmission.token` ("retry"), or drop the packet: a wrong token ("token"), over the rate ("rate")."""


@dataclass(frozen=True, slots=True)
class _Pending:
    block: str
    since_s: float


class QuicAdmission:
    """The handshakes under way on one listener, by a key of the caller."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._rates: dict[str, ControlRate] = {}
        self._tokens = QuicRetryTokenHandler()

    def __len__(self) -> int:
        return len(self._pending)

    def decide(self, addr: SocketAddress, destination_cid: bytes, token: bytes, now_s: float) -> Decision:
        """Decide about an Initial packet that belongs to no handshake yet."""
        if token:
            try:
                original = self._tokens.validate_token(
                    address=addr, destination_cid=destination_cid, token=token, now=now_s
                )
            except ValueError:
                return "token"
            return Start(original, destination_cid) if self._may_start(addr, now_s) else "rate"
        if len(self._pending) >= PENDING_WITHOUT_TOKEN_MAX or not self._may_start(addr, now_s):
            return "retry"
        return Start(destination_cid, None)

    def token(self, addr: SocketAddress, destination_cid: bytes, retry_source_cid: bytes, now_s: float) -> bytes:
        """A token that proves the address, for a Retry packet with ``retry_source_cid``."""
        return self._tokens.create_token(
            address=addr,
            original_destination_connection_id=destination_cid,
            retry_source_connection_id=retry_source_cid,
            now=now_s,
        )

    def _may_start(self, addr: SocketAddress, now_s: float) -> bool:
        block = _block(addr)
        rate = self._rates.get(block)
        if rate is None:
            if len(self._rates) >= _BLOCKS_MAX:
                self._rates.clear()  # at worst some blocks get another burst
            rate = self._rates[block] = ControlRate(STARTS_PER_BLOCK_PER_S, _STARTS_BURST_S, now_s)
        if rate.take(1) or rate.refill(now_s, 0):
            return True
        rate.give_back(1)
        return False

    def begin(self, key: int, addr: SocketAddress, now_s: float) -> int | None:
        """A handshake has begun; returns the key of the one that has to end for it, if any."""
        ended: int | None = None
        if len(self._pending) >= PENDING_MAX:
            largest = Counter(each.block for each in self._pending.values()).most_common(1)[0][0]
            ended = next(one for one, each in self._pending.items() if each.block == largest)
            del self._pending[ended]
        self._pending[key] = _Pending(_block(addr), now_s)
        return ended

    def end(self, key: int) -> None:
        """The handshake is over. Idempotent."""
        self._pending.pop(key, None)

    def keys(self) -> list[int]:
        """All handshakes under way, the oldest first."""
        return list(self._pending)

    def is_late(self, key: int, now_s: float, timeout_s: float) -> bool:
        """Whether the handshake has been under way for ``timeout_s``."""
        return now_s - self._pending[key].since_s >= timeout_s


def _block(addr: SocketAddress) -> str:
    return address_block(socket_address(addr[0], addr[1], "udp/quic-v1"))
