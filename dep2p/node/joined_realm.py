"""The parts of a node for one joined realm."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from dep2p.host.interface import Host
from dep2p.messaging.service import Messaging
from dep2p.node.services import RealmServices
from dep2p.pubsub.service import PubSub
from dep2p.realm.credentials import Realm
from dep2p.realm.membership import Membership
from dep2p.types import RealmId


@dataclass(slots=True)
class Joined:
    realm: Realm
    membership: Membership
    messaging: Messaging
    pubsub: PubSub
    services: RealmServices
    scope: trio.CancelScope
    ended: trio.Event


@dataclass(slots=True, eq=False)
class Registration:
    """A handler that applies to every realm joined now or later, or to one of them."""

    realm_id: RealmId | None
    register: Callable[[Messaging], Callable[[], None]]
    undo: dict[RealmId, Callable[[], None]]


def counters_of(host: Host, realms: Iterable[Joined]) -> dict[str, int]:
    """Sum the counters of the host, and of each part of the realms over all of them."""
    total = {f"host_{name}": count for name, count in host.counters().items()}
    for joined in realms:
        for prefix, counts in (
            ("realm", joined.membership.counters()),
            ("messaging", joined.messaging.counters()),
            ("pubsub", joined.pubsub.counters()),
            *((name, service.counters()) for name, service in joined.services.each()),
        ):
            for name, count in counts.items():
                key = f"{prefix}_{name}"
                total[key] = total.get(key, 0) + count
    return total
