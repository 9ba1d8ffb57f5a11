"""The change of a member as its watchers get it: one type in Python, in the control API and in its client. Pure."""

from typing import Literal

from msgspec import Struct, field

from dep2p.protocols.realm.statement import ServiceOffer
from dep2p.types import PeerId, RealmId

MemberChange = Literal["joined", "up", "down", "left", "expired", "changed"]
"""The change of a member: a record of it is known; it is connected; it is not; it left; its record is too old; it says
other things about itself."""


class MemberUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of one member, and what it says about itself now.

    All texts but ``kind`` and ``state`` are the member's own: show them through `dep2p.outside_text`.
    """

    kind: MemberChange
    peer: PeerId
    realm: RealmId
    state: Literal["up", "down", "left"] = "left"
    """The member's state after the change."""
    fields: dict[str, str] = field(default_factory=dict[str, str])
    """Its fields, by key."""
    services: tuple[ServiceOffer, ...] = ()
    """The services that it offers."""
