"""Decisions of an AutoNAT server: whom it serves, which address it dials, and the price of that. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.protocols.addresses.dialable import AddressScope, address_scope, dial_target
from dep2p.protocols.reachability.observed import transport_of
from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId, Rng

DIAL_DATA_MIN_BYTES: Final = 30_000
DIAL_DATA_MAX_BYTES: Final = 100_000
"""Dial data that a server asks for, by the specification: several times the bytes of a handshake."""
_BUCKETS_MAX: Final = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBackRates:
    """Rates of the requests that a server serves. A member may test its few addresses at once."""

    member_per_s: float = 0.1
    member_burst: int = 12
    block_per_s: float = 1 / 60
    """The same of the strangers of one address block together."""
    block_burst: int = 2
    unproven_per_s: float = 0.2
    """The same of all strangers together."""
    unproven_burst: int = 12
    at_once_max: int = 16
    """Requests under way."""
    unproven_at_once_max: int = 8


@dataclass(slots=True)
class DialBackAdmission:
    """Decides whom a server serves. Each `admit` that returned True is followed by one `release`.

    Example::

        admission = DialBackAdmission()
        if admission.admit(peer, "192.0.2.0/24", is_member=False, now_s=0.0):
            ...
            admission.release(is_member=False)
    """

    rates: DialBackRates = field(default_factory=DialBackRates)
    _buckets: dict[str, TokenBucket] = field(default_factory=dict[str, TokenBucket])
    _unproven: TokenBucket = field(init=False)
    _at_once: int = 0
    _unproven_at_once: int = 0

    def __post_init__(self) -> None:
        self._unproven = TokenBucket(self.rates.unproven_per_s, self.rates.unproven_burst)

    def admit(self, peer: PeerId, block: str, *, is_member: bool, now_s: float) -> bool:
        """Whether the request is served now."""
        rates = self.rates
        if self._at_once >= rates.at_once_max:
            return False
        if is_member:
            if self._bucket(peer, rates.member_per_s, rates.member_burst).take(now_s):
                return False
        else:
            own = self._bucket(f"block {block}", rates.block_per_s, rates.block_burst)
            if self._unproven_at_once >= rates.unproven_at_once_max or own.wait_s(now_s):
                return False
            if self._unproven.take(now_s):
                return False
            own.spend()
            self._unproven_at_once += 1
        self._at_once += 1
        return True

    def release(self, *, is_member: bool) -> None:
        """The request has ended; ``is_member`` as in its `admit`."""
        self._at_once -= 1
        if not is_member:
            self._unproven_at_once -= 1

    def _bucket(self, key: str, per_s: float, burst: int) -> TokenBucket:
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            if len(self._buckets) >= _BUCKETS_MAX:  # the one unused for longest begins anew with a full bucket
                del self._buckets[next(iter(self._buckets))]
            bucket = TokenBucket(per_s, burst)
        self._buckets[key] = bucket
        return bucket


def is_testable(addr: str, transports: Collection[str]) -> bool:
    """Whether a server dials an address: a socket of a public IP address, over one of the transports, directly.

    assert is_testable("/ip4/192.0.2.1/tcp/4001", ["tcp"])
    """
    return transport_of(addr) in transports and address_scope(addr) is AddressScope.PUBLIC


def choose_address(addrs: Sequence[str], own_hosts: Collection[str], transports: Collection[str]) -> int | None:
    """Return the index of the address that a server dials: the first that is testable and none of its own machine."""
    for index, addr in enumerate(addrs):
        target = dial_target(addr)
        if target is not None and target.host not in own_hosts and is_testable(addr, transports):
            return index
    return None


def dial_data_bytes(addr: str, asked_from: str, rng: Rng) -> int:
    """Return how many bytes of dial data the server asks for; 0 when the address has the IP address that asks.

    ``asked_from``: the multiaddr at the asker's end of its connection.
    """
    target, asker = dial_target(addr), dial_target(asked_from)
    if target is not None and asker is not None and target.host == asker.host:
        return 0
    return DIAL_DATA_MIN_BYTES + int(rng.random() * (DIAL_DATA_MAX_BYTES - DIAL_DATA_MIN_BYTES))
