"""The discovery sources that a node's settings ask for."""

from collections.abc import Sequence

from dep2p.host.discovery import Discovery
from dep2p.host.discovery_bootstrap import BootstrapDiscovery


def discovery_sources(
    *, mdns: bool = False, dht: bool = False, bootstrap: Sequence[str] = (), rendezvous: Sequence[str] = ()
) -> list[Discovery]:
    """Build them. Raises ``ValueError`` for an address that cannot be used."""
    sources: list[Discovery] = []
    if bootstrap:
        sources.append(BootstrapDiscovery(bootstrap))
    return sources
