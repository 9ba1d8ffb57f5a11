"""Fixed addresses to begin with: each peer is dialled at once, and again with back-off for as long as it is away."""

from collections.abc import Sequence

import trio

from dep2p.host.addresses import parse_address
from dep2p.host.discovery.interface import Emit, HostView
from dep2p.types import PeerId

_TTL_S = 30 * 86_400.0


class BootstrapDiscovery:
    """Peers from the configuration."""

    name = "bootstrap"

    def __init__(self, addrs: Sequence[str]) -> None:
        """``addrs``: multiaddrs that end in ``/p2p/<peer>``. Raises ``ValueError`` for any other."""
        self._addrs: dict[PeerId, list[str]] = {}
        for text in addrs:
            address = parse_address(text)
            if address.peer is None:
                raise ValueError(f"{text} does not say whose address it is: end it with /p2p/<peer id>")
            self._addrs.setdefault(address.peer, []).append(address.text)

    async def run(self, host: HostView, emit: Emit) -> None:
        for peer, addrs in self._addrs.items():
            if peer != host.peer_id:
                emit(peer, addrs)
                host.add_addrs(peer, addrs, ttl_s=_TTL_S)
                host.keep_connected(peer, self.name)
        await trio.sleep_forever()
