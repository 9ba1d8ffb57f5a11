"""The libp2p host of a node."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dep2p.host.interface import Host
from dep2p.identity import Identity
from dep2p.limits import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkOptions:
    """How a node is reached and finds peers; see `Node.open`."""

    listen: Sequence[str]
    advertise: Sequence[str]
    bootstrap: Sequence[str]
    mdns: bool
    dht: bool
    rendezvous: Sequence[str]
    relay: Literal["off", "client", "server"]


def libp2p_host(
    identity: Identity, limits: Limits, data_dir: Path | None, network: NetworkOptions
) -> AbstractAsyncContextManager[Host]:
    """Make a host that runs while its block does. Raises ListenError on entry."""
    # Here, so that a MemoryHost needs no libp2p.
    from dep2p.host.libp2p_import import import_libp2p

    import_libp2p()
    from dep2p.host.discovery.sources import discovery_sources
    from dep2p.host.host import HostOptions, LibP2PHost

    return LibP2PHost.open(
        identity,
        listen=network.listen,
        options=HostOptions(
            advertise=network.advertise,
            limits=limits,
            peerstore_path=None if data_dir is None else data_dir / "peers.sqlite",
            discovery=discovery_sources(
                mdns=network.mdns, dht=network.dht, bootstrap=network.bootstrap, rendezvous=network.rendezvous
            ),
            relay=network.relay,
        ),
    )
