"""The members that offer a service or read in a group of a topic, by the records that count. Pure.

It holds no more than the records do: an entry for each service and group of each.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dep2p.protocols.realm.statement import MemberStatement, ServiceOffer, TopicGroup
from dep2p.types import PeerId

_NO_OFFERS: Final[Mapping[PeerId, ServiceOffer]] = MappingProxyType({})
_NO_PEERS: Final[Mapping[PeerId, None]] = MappingProxyType({})


class OfferIndex:
    """Offers by the name of the service, and readers by topic and group."""

    def __init__(self) -> None:
        self._services: dict[str, dict[PeerId, ServiceOffer]] = {}
        self._groups: dict[TopicGroup, dict[PeerId, None]] = {}
        self.version: int = 0
        """Rises with each change."""

    def replace(self, peer: PeerId, before: MemberStatement, after: MemberStatement) -> None:
        """Take a member's statement in place of its earlier one."""
        if before.services != after.services:
            self.version += 1
            for offer in before.services:
                offers = self._services[offer.name]
                del offers[peer]
                if not offers:
                    del self._services[offer.name]
            for offer in after.services:
                self._services.setdefault(offer.name, {})[peer] = offer
        if before.groups != after.groups:
            self.version += 1
            for group in before.groups:
                readers = self._groups[group]
                del readers[peer]
                if not readers:
                    del self._groups[group]
            for group in after.groups:
                self._groups.setdefault(group, {})[peer] = None

    def offers(self, name: str) -> Mapping[PeerId, ServiceOffer]:
        """The offers of one service, by member."""
        return self._services.get(name, _NO_OFFERS)

    def services(self) -> Mapping[str, Mapping[PeerId, ServiceOffer]]:
        """All offers, by name and member."""
        return self._services

    def readers(self, group: TopicGroup) -> Mapping[PeerId, None]:
        """The members that read in a group."""
        return self._groups.get(group, _NO_PEERS)
