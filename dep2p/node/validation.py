"""Checks of arguments of a :class:`dep2p.node.node.Node`, before it opens or sends anything."""

from collections.abc import Iterable

import trio

from dep2p.realm.credentials import Realm
from dep2p.types import PeerId, parse_peer_id, with_base58_peers


def check_arguments(realm: object, realms: Iterable[object], **addrs: object) -> None:
    """Raises ``RuntimeError`` outside trio, ``TypeError`` for a realm that is none or addresses that are no list."""
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError("a Node runs in trio: trio.run(main). From asyncio, use dep2p.client.Client with a daemon.")
    for each in [*([] if realm is None else [realm]), *realms]:
        if not isinstance(each, Realm):
            raise TypeError(f"a realm must be a dep2p.Realm, not {type(each).__name__}; several go into realms=[…]")
    for name, value in addrs.items():
        if isinstance(value, str):
            raise TypeError(f"{name} takes a list of addresses: [{value!r}]")


def split_addr(addr: str) -> tuple[PeerId, str]:
    """Peer id and whole address of a multiaddr that ends in ``/p2p/PEER``. Raises ``ValueError``."""
    _head, separator, peer = addr.rpartition("/p2p/")
    if not separator or not addr.startswith("/"):
        raise ValueError(f"{addr!r} is not a full address: it must look like /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…")
    return parse_peer_id(peer), with_base58_peers(addr)
