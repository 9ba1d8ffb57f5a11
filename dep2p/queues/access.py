"""Access to the queues of a realm: which peers may do which operations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast

from msgspec import UNSET, convert

from dep2p.errors import QueueAccessError
from dep2p.protocols.queues.admin import AccessChange, QueueAccess
from dep2p.protocols.wire.cbor import decode_bounded
from dep2p.types import PeerId, RealmId, parse_peer_id

_PREFIX: Final = "access/"
_PEERS_MAX: Final = 1_000

Who = str | tuple[PeerId, ...]
"""``members``, ``owner`` (this node alone), or peers besides this node."""


class Right(Enum):
    """A right that an operation on a queue needs."""

    DESCRIBE = "describe"
    """Any member: names, counts, options."""
    CREATE = "create"
    PUBLISH = "publish"
    CONSUME = "consume"
    ADMINISTER = "administer"


@dataclass(frozen=True, slots=True)
class Access:
    """The peers that have each right on one queue."""

    publish: Who = "members"
    consume: Who = "members"
    administer: Who = "members"

    def as_reply(self) -> QueueAccess:
        """The access as a reply has it."""
        return QueueAccess(publish=self.publish, consume=self.consume, administer=self.administer)

    def as_dict(self) -> dict[str, object]:
        """The access as plain values."""
        return {
            name: who if isinstance(who, str) else list(who)
            for name, who in (("publish", self.publish), ("consume", self.consume), ("administer", self.administer))
        }


def parse_access(change: AccessChange, before: Access) -> Access:
    """The access ``before`` after the change. Raises ``ValueError``."""

    def who(value: object, default: Who) -> Who:
        return default if value is UNSET else parse_who(value)

    return Access(
        who(change.publish, before.publish),
        who(change.consume, before.consume),
        who(change.administer, before.administer),
    )


def parse_who(value: object) -> Who:
    """Parse a value of a right. Raises ``ValueError``."""
    if isinstance(value, str):
        if value in ("members", "owner"):
            return value
        value = [part.strip() for part in value.split(",")]
    if isinstance(value, list | tuple):
        peers = cast(list[object], value)
        if 1 <= len(peers) <= _PEERS_MAX and all(isinstance(peer, str) for peer in peers):
            return tuple(parse_peer_id(cast(str, peer)) for peer in peers)
    raise ValueError('who may do it is "members", "owner" or a list of 1 to 1,000 peer ids')


class Rights:
    """The access of every queue of this node's realms. Kept in the store's definitions beside the queues."""

    def __init__(self, default: Access, create: Who) -> None:
        self.default = default
        self.create = create
        """The peers that may make queues here."""
        self._by_queue: dict[tuple[str, str], Access] = {}
        self.save: Callable[[str, object | None], None] = lambda _key, _value: None
        """Stores a changed definition with the next batch; the engine sets it."""

    def restore(self, definitions: Mapping[str, bytes]) -> None:
        """Replace all known rules by the stored ones. Raises ``ValueError``, ProtocolError for a damaged definition."""
        self._by_queue.clear()
        for key, raw in definitions.items():
            if key.startswith(_PREFIX):
                namespace, _, name = key[len(_PREFIX) :].partition("/")
                value = decode_bounded(raw, f"the definition {key}", depth_max=3, entries_max=_PEERS_MAX)
                try:
                    self._by_queue[namespace, name] = parse_access(convert(value, AccessChange), self.default)
                except ValueError as error:
                    raise ValueError(f"the store's definition {key[:120]!r} is damaged ({error})") from None

    def of(self, namespace: str, name: str) -> Access:
        """The access of a queue."""
        return self._by_queue.get((namespace, name), self.default)

    def set(self, namespace: str, name: str, access: Access) -> None:
        """Change the access of a queue."""
        self._by_queue[namespace, name] = access
        self.save(f"{_PREFIX}{namespace}/{name}", access.as_dict())

    def forget(self, namespace: str, name: str) -> None:
        """Forget the access of a deleted queue."""
        if self._by_queue.pop((namespace, name), None) is not None:
            self.save(f"{_PREFIX}{namespace}/{name}", None)

    def require(self, realm_id: RealmId, name: str, peer: PeerId, right: Right) -> None:
        """Raises QueueAccessError unless the member may do that."""
        who = cast(Who, getattr(self.of(realm_id, name), right.value))
        if who != "members" and (isinstance(who, str) or peer not in who):
            raise QueueAccessError(f"the owner of the queue {name!r} does not let {peer} {right.value} there")

    def require_create(self, peer: PeerId) -> None:
        """Raises QueueAccessError unless the member may make queues here."""
        if self.create != "members" and (isinstance(self.create, str) or peer not in self.create):
            raise QueueAccessError(f"this node does not let {peer} make queues: its owner makes them")
