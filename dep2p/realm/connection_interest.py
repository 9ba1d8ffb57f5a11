"""Which realms want a host to stay connected to whom: a peer is let go only when no realm wants it any more."""

import weakref

from dep2p.host.interface import Host
from dep2p.types import PeerId, RealmId

_wanted_by_host: "weakref.WeakKeyDictionary[Host, dict[PeerId, dict[RealmId, None]]]" = weakref.WeakKeyDictionary()


def want(host: Host, realm_id: RealmId, peer: PeerId) -> None:
    """The realm wants the host to stay connected to the peer."""
    realms = _wanted_by_host.setdefault(host, {}).setdefault(peer, {})
    realms[realm_id] = None
    host.keep_connected(peer)


def unwant(host: Host, realm_id: RealmId, peer: PeerId) -> None:
    """The realm does not need the connection any more."""
    wanted = _wanted_by_host.get(host)
    if wanted is None or peer not in wanted or realm_id not in wanted[peer]:
        return
    del wanted[peer][realm_id]
    if not wanted[peer]:
        del wanted[peer]
        host.forget(peer)


def unwant_all(host: Host, realm_id: RealmId) -> None:
    """The realm needs no connection any more."""
    for peer in list(_wanted_by_host.get(host, {})):
        unwant(host, realm_id, peer)
