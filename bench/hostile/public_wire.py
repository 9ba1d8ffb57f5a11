"""Attacks on libp2p's public pub/sub wire: control floods, forged copies, offers, GRAFT without a subscription."""

from collections.abc import Callable

import trio

from bench.hostile.raw_client import RawConnection, RawStream
from bench.hostile.stage import Stage, in_parallel, repeat
from dep2p.encoding.length_prefixed import LengthPrefixedDecoder, encode_length_prefixed
from dep2p.gossipsub.codecs.libp2p import Libp2pCodec
from dep2p.gossipsub.messages.message_id import MessageIds
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.identity import Identity
from dep2p.pubsub.wire_formats import MESHSUB_1_1, MESHSUB_1_2
from dep2p.types import peer_id_bytes

TOPIC = "bench"
_RPC_BYTES_MAX = 8_388_608
_GOSSIPERS = 20
_PARAMS = GossipParams()
_SUBSCRIBE = Rpc(subscriptions=(SubscriptionChange(TOPIC, True),))


class _Neighbour:
    """A raw peer on the public wire: what it sends goes out as it is, what it gets is decoded for ``on_rpc``."""

    def __init__(self, connection: RawConnection, stream: RawStream, identity: Identity) -> None:
        self.connection = connection
        self._stream = stream
        self.codec = Libp2pCodec(peer_id_bytes(identity.peer_id), identity.sign, MessageIds("go"), _PARAMS)

    @classmethod
    async def dial(
        cls, nursery: trio.Nursery, address: str, on_rpc: Callable[[Rpc], None] | None = None
    ) -> "_Neighbour":
        identity = Identity.generate()
        connection = await RawConnection.dial(nursery, address, identity=identity)
        reader = Libp2pCodec(peer_id_bytes(identity.peer_id), identity.sign, MessageIds("go"), _PARAMS)

        def serve(stream: RawStream) -> None:
            decoder = LengthPrefixedDecoder(_RPC_BYTES_MAX)

            def take(data: bytes) -> None:
                for payload in decoder.feed(data):
                    if on_rpc is not None:
                        on_rpc(reader.decode(payload))

            stream.on_data = take

        connection.accepts = {MESHSUB_1_2: serve, MESHSUB_1_1: serve}
        stream = await connection.open_stream(MESHSUB_1_2)
        stream.is_kept = False
        return cls(connection, stream, identity)

    @property
    def is_over(self) -> bool:
        return self._stream.is_ended or self.connection.is_closed

    async def say(self, *rpcs: Rpc) -> None:
        """Send RPCs. Raises RefusedError."""
        payloads = [payload for rpc in rpcs for payload in self.codec.encode(rpc)]
        await self._stream.send(b"".join(map(encode_length_prefixed, payloads)))


async def _flood(stage: Stage, make: Callable[[int], tuple[Rpc, ...]]) -> None:
    async def once() -> None:
        async with trio.open_nursery() as nursery:
            neighbour = await _Neighbour.dial(nursery, stage.address)
            await neighbour.say(_SUBSCRIBE)
            number = 0
            while not neighbour.is_over:
                number += 1
                await neighbour.say(*make(number))
                stage.counts["rpcs"] += 1
            nursery.cancel_scope.cancel()

    await in_parallel(stage, 3, once)


async def subscribe_flood(stage: Stage) -> None:
    """Subscriptions to new topics, a hundred in an RPC."""
    await _flood(
        stage,
        lambda number: (
            Rpc(subscriptions=tuple(SubscriptionChange(f"t{number}-{index}", True) for index in range(100))),
            Rpc(subscriptions=tuple(SubscriptionChange(f"t{number}-{index}", False) for index in range(100))),
        ),
    )


async def graft_flood(stage: Stage) -> None:
    """GRAFT and PRUNE of one topic, fifty in an RPC, in turn."""
    rpcs = Rpc(graft=(TOPIC,) * 50), Rpc(prune=(Prune(TOPIC, 1),) * 50)
    await _flood(stage, lambda _: rpcs)


async def graft_unsubscribed(stage: Stage) -> None:
    """Peers that GRAFT a topic to which they never subscribed. The victim says how many it took into its mesh."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            neighbour = await _Neighbour.dial(nursery, stage.address)
            stage.counts["connections"] += 1
            while not neighbour.is_over:
                await neighbour.say(Rpc(graft=(TOPIC,)))
                await trio.sleep(1.0)
            nursery.cancel_scope.cancel()

    await in_parallel(stage, 8, once)


async def ihave_parallel(stage: Stage) -> None:
    """Twenty peers offer one message at the same time, and count how often each is asked for it."""
    round_number = 0

    def on_rpc(rpc: Rpc) -> None:
        stage.counts["iwants"] += len(rpc.iwant)

    async with trio.open_nursery() as nursery:
        neighbours = [await _Neighbour.dial(nursery, stage.address, on_rpc) for _ in range(_GOSSIPERS)]
        for neighbour in neighbours:
            await neighbour.say(_SUBSCRIBE)
        while True:
            round_number += 1
            offer = Rpc(ihave=(IHave(TOPIC, (b"message %d" % round_number,)),))
            stage.counts["messages_offered"] += 1
            for neighbour in neighbours:
                if not neighbour.is_over:
                    await neighbour.say(offer)
            await trio.sleep(1.0)


async def forged_copy(stage: Stage) -> None:
    """Take each message from its author first, and give the node a copy with other data and a junk signature."""
    send, receive = trio.open_memory_channel[RpcMessage](64)

    def on_rpc(rpc: Rpc) -> None:
        for message in rpc.messages:
            try:
                send.send_nowait(message)
            except trio.WouldBlock:
                stage.counts["too_slow"] += 1

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            towards_author = await _Neighbour.dial(nursery, stage.others[0], on_rpc)
            towards_node = await _Neighbour.dial(nursery, stage.address)
            await towards_author.say(_SUBSCRIBE, Rpc(graft=(TOPIC,)))
            await towards_node.say(_SUBSCRIBE, Rpc(graft=(TOPIC,)))
            while not towards_node.is_over and not towards_author.is_over:
                with trio.move_on_after(0.5):
                    message = await receive.receive()
                    await towards_node.say(Rpc(messages=(_forged(message),)))
                    stage.counts["forged"] += 1
            nursery.cancel_scope.cancel()

    await repeat(stage, once)


def _forged(message: RpcMessage) -> RpcMessage:
    """The same author and number, so the same id; other data."""
    wire = bytearray(message.wire)
    at = wire.find(message.data)
    wire[at + len(message.data) - 1] ^= 1
    message.wire = bytes(wire)
    return message
