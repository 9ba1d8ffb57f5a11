"""The messages between routers, free of any encoding. Ids, authors and keys are bytes everywhere."""

from dataclasses import dataclass, field

from dep2p.gossipsub.headers import NO_HEADERS, MessageHeaders


@dataclass(slots=True)
class RpcMessage:
    """A published message. Only its codec may change it, and only before it is encoded.

    ``author`` is the publisher's peer id as multihash bytes and ``seqno`` 8 bytes big-endian; both are empty when the
    network does not sign. The codec fills in ``id`` by the topic's profile, and keeps in ``wire`` the bytes as they
    came (or as they go out), so that forwarding encodes nothing; the part of them that signature and MAC cover is
    ``wire[signed_start:signed_end]``. ``wire`` is empty while an own message waits for its signature: see
    :meth:`~dep2p.gossipsub.codecs.interface.Codec.compose`. ``proof`` shows that the signature of a batch covers it.

    Neither this nor `Rpc` is frozen: making a frozen object costs several times as much, and they are made per message.
    """

    id: bytes
    author: bytes
    seqno: bytes
    topic: str
    data: bytes
    signature: bytes = b""
    key: bytes = b""
    mac: bytes = b""
    proof: bytes = b""
    wire: bytes = field(default=b"", compare=False, repr=False)
    signed_start: int = field(default=0, compare=False, repr=False)
    signed_end: int = field(default=0, compare=False, repr=False)
    headers: MessageHeaders = NO_HEADERS


@dataclass(frozen=True, slots=True)
class SubscriptionChange:
    """A peer's subscription to a topic, or the end of it."""

    topic: str
    subscribe: bool


@dataclass(frozen=True, slots=True)
class IHave:
    """Announces ids of messages that the sender can give in a topic."""

    topic: str
    ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer named in a PRUNE: multihash bytes, and its signed record when known."""

    peer: bytes
    record: bytes = b""


@dataclass(frozen=True, slots=True)
class Prune:
    """The end of a mesh link. ``backoff_s`` in whole seconds; 0 means that the peer gave none."""

    topic: str
    backoff_s: int = 0
    peers: tuple[PeerInfo, ...] = ()


_EMPTY_WORK = 4


@dataclass(slots=True)
class Rpc:
    """One message between neighbours; every part may be empty. Graft holds topics; iwant and idontwant hold ids.

    Shared by all that send it: never changed.
    """

    messages: tuple[RpcMessage, ...] = ()
    subscriptions: tuple[SubscriptionChange, ...] = ()
    ihave: tuple[IHave, ...] = ()
    iwant: tuple[bytes, ...] = ()
    graft: tuple[str, ...] = ()
    prune: tuple[Prune, ...] = ()
    idontwant: tuple[bytes, ...] = ()

    def work(self, per_message: int) -> int:
        """Return about what taking it costs, in subscriptions: one is some 4 µs, as are a graft, a prune and two ids.

        ``per_message``: what a message costs, without its signature.
        """
        work = per_message * len(self.messages) + len(self.subscriptions) + len(self.graft)
        if not (self.prune or self.iwant or self.idontwant or self.ihave):
            return work or _EMPTY_WORK
        if self.prune:
            work += sum(1 + len(prune.peers) for prune in self.prune)
        ids = len(self.iwant) + len(self.idontwant)
        if self.ihave:
            work += len(self.ihave)
            ids += sum(len(ihave.ids) for ihave in self.ihave)
        return (work + ids // 2) or _EMPTY_WORK
