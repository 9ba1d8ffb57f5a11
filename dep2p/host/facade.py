"""This host as py-libp2p's protocols want it: DHT, rendezvous and relay run over our streams through these adapters."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dep2p.host.host import LibP2PHost


class FacadeHost:
    """py-libp2p's ``IHost`` over a `LibP2PHost`."""

    def __init__(self, host: "LibP2PHost") -> None:
        self._host = host
