"""The discovery sources that a node's settings ask for. Each is imported only when it is."""

from collections.abc import Sequence

from dep2p.host.discovery.interface import Discovery


def discovery_sources(
    *, mdns: bool = False, dht: bool = False, bootstrap: Sequence[str] = (), rendezvous: Sequence[str] = ()
) -> list[Discovery]:
    """Build them. ``bootstrap`` and ``rendezvous`` are addresses that end in ``/p2p/<peer>``.

    Raises ``ValueError`` for an address that cannot be used.
    """
    sources: list[Discovery] = []
    if bootstrap:
        from dep2p.host.discovery.bootstrap import BootstrapDiscovery

        sources.append(BootstrapDiscovery(bootstrap))
    if mdns:
        from dep2p.host.discovery.mdns import MdnsDiscovery

        sources.append(MdnsDiscovery())
    if rendezvous:
        from dep2p.host.discovery.rendezvous import RendezvousDiscovery

        sources.append(RendezvousDiscovery(rendezvous))
    if dht:
        from dep2p.host.discovery.dht import DhtDiscovery

        sources.append(DhtDiscovery())
    return sources
