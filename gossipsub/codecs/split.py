"""Splitting of RPCs, so that none is above what the strictest peers read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.signing.merkle_batch import PROOF_BYTES_MAX

ITEM_OVERHEAD_BYTES: Final = 16
"""Bytes that either codec adds to an item at most: tags, lengths, numbers."""
SIGNING_BYTES_MAX: Final = 64 + 16 + PROOF_BYTES_MAX
"""Bytes of signature, MAC and proof at most, for a message that has none yet."""
RPC_BYTES: Final = 64
"""Bytes that either codec adds to an RPC at most."""


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """The sizes that a peer reads."""

    rpc_bytes_max: int
    control_bytes_max: int
    messages_max: int

    @classmethod
    def of(cls, params: GossipParams) -> Self:
        """Take the sizes from the parameters."""
        return cls(params.rpc_bytes_max, params.rpc_control_bytes_max, params.rpc_messages_max)


def split_rpc(rpc: Rpc, limits: SplitLimits) -> list[Rpc]:
    """Split an RPC into as few as keep the limits; an empty RPC gives none. Order within each kind is kept.

    A single item that is over the limit stays alone in its RPC: its encoder reports it.
    """
    has_control = rpc.subscriptions or rpc.graft or rpc.prune or rpc.idontwant or rpc.iwant or rpc.ihave
    if not has_control and len(rpc.messages) <= 1:
        return [rpc] if rpc.messages else []
    groups = _message_groups(rpc.messages, limits)
    control = _ControlParts(limits).split(rpc) if has_control else []
    if len(groups) <= 1 and len(control) <= 1:
        size = sum(map(message_bytes, rpc.messages)) + limits.control_bytes_max + RPC_BYTES
        if not groups or not control or size <= limits.rpc_bytes_max:
            return [rpc]
    # Control first: it is small, and what it says may be about the messages.
    return [*control, *(Rpc(messages=tuple(group)) for group in groups)]


def message_bytes(message: RpcMessage) -> int:
    """Return the bytes of an encoded message at most."""
    if message.wire:
        return len(message.wire) + ITEM_OVERHEAD_BYTES
    fixed = len(message.author) + len(message.seqno) + len(message.key) + SIGNING_BYTES_MAX
    fixed += message.headers.size_bytes
    return len(message.data) + 4 * len(message.topic) + fixed + 8 * ITEM_OVERHEAD_BYTES


def _message_groups(messages: tuple[RpcMessage, ...], limits: SplitLimits) -> list[list[RpcMessage]]:
    groups: list[list[RpcMessage]] = []
    room = 0
    for message in messages:
        cost = message_bytes(message)
        if not groups or cost > room or len(groups[-1]) >= limits.messages_max:
            groups.append([])
            room = limits.rpc_bytes_max - RPC_BYTES
        groups[-1].append(message)
        room -= cost
    return groups


def _id_cost(message_id: bytes) -> int:
    return len(message_id) + 6


def _topic_cost(topic: str) -> int:
    return len(topic.encode("utf-8")) + ITEM_OVERHEAD_BYTES


def _prune_cost(prune: Prune) -> int:
    return _topic_cost(prune.topic) + sum(
        len(info.peer) + len(info.record) + ITEM_OVERHEAD_BYTES for info in prune.peers
    )


class _ControlParts:
    """Fills one part after the other."""

    __slots__ = ("_graft", "_idontwant", "_ihave", "_iwant", "_limit", "_parts", "_prune", "_room", "_subscriptions")

    def __init__(self, limits: SplitLimits) -> None:
        self._limit = min(limits.control_bytes_max, limits.rpc_bytes_max) - RPC_BYTES
        self._parts: list[Rpc] = []
        self._start()

    def _start(self) -> None:
        self._room = self._limit
        self._subscriptions: list[SubscriptionChange] = []
        self._graft: list[str] = []
        self._prune: list[Prune] = []
        self._idontwant: list[bytes] = []
        self._iwant: list[bytes] = []
        self._ihave: list[IHave] = []

    def _end(self) -> None:
        self._parts.append(
            Rpc(
                subscriptions=tuple(self._subscriptions),
                graft=tuple(self._graft),
                prune=tuple(self._prune),
                idontwant=tuple(self._idontwant),
                iwant=tuple(self._iwant),
                ihave=tuple(self._ihave),
            )
        )
        self._start()

    def _reserve(self, cost: int) -> None:
        if cost > self._room and self._room < self._limit:
            self._end()
        self._room -= cost

    def split(self, rpc: Rpc) -> list[Rpc]:
        for subscription in rpc.subscriptions:
            self._reserve(_topic_cost(subscription.topic))
            self._subscriptions.append(subscription)
        for topic in rpc.graft:
            self._reserve(_topic_cost(topic))
            self._graft.append(topic)
        for prune in rpc.prune:
            self._reserve(_prune_cost(prune))
            self._prune.append(prune)
        for message_id in rpc.idontwant:
            self._reserve(_id_cost(message_id))
            self._idontwant.append(message_id)
        for message_id in rpc.iwant:
            self._reserve(_id_cost(message_id))
            self._iwant.append(message_id)
        for item in rpc.ihave:
            for ids in self._id_groups(item):
                self._ihave.append(IHave(item.topic, tuple(ids)))
        self._end()
        return self._parts

    def _id_groups(self, item: IHave) -> Iterator[list[bytes]]:
        """Each group is taken into the part that is being filled when it is yielded."""
        topic_cost = _topic_cost(item.topic)
        rest = list(item.ids)
        rest.reverse()
        while True:
            self._reserve(topic_cost + (_id_cost(rest[-1]) if rest else 0))
            group = [rest.pop()] if rest else []
            while rest and _id_cost(rest[-1]) <= self._room:
                self._room -= _id_cost(rest[-1])
                group.append(rest.pop())
            yield group
            if not rest:
                return
