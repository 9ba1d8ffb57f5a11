"""A realm's membership as messaging sees it; implemented by `Membership` and by fakes in tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dep2p.host.interface import Connection
from dep2p.types import PeerId, RealmId


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A member joined, came up, went down, left, its record expired, or it changed what it says about itself."""

    kind: Literal["joined", "up", "down", "left", "expired", "changed"]
    peer: PeerId


class RealmGate(Protocol):
    """The peers that may talk in a realm at this moment."""

    @property
    def realm_id(self) -> RealmId: ...

    def is_verified(self, connection: Connection) -> bool:
        """Whether the peer has proved itself on this very connection and is still a member. Cheap: asked per frame."""
        ...

    def features(self, connection: Connection) -> frozenset[str]:
        """Return the features that the peer offered in its handshake, for example "zstd"; empty when not verified."""
        ...

    def verified_connection(self, peer: PeerId) -> Connection | None:
        """Return the live verified connection to the peer that is to be used, or None."""
        ...

    async def connect(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        """Return a verified connection: an existing one, or one made by dialing and the handshake.

        Raises PeerNotFoundError, NotMemberError or RequestTimeoutError.
        """
        ...

    def subscribe_unverified(self, on_lost: Callable[[Connection], None]) -> Callable[[], None]:
        """Call ``on_lost`` when a live connection stops being verified (member left, record expired).

        Returns a function that ends it.
        """
        ...

    def subscribe_verified(self, on_verified: Callable[[Connection], None]) -> Callable[[], None]:
        """Call ``on_verified`` for each connection on which a peer proves itself, and when one is preferred to others.

        Returns a function that ends it.
        """
        ...
