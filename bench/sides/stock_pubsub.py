"""py-libp2p's own GossipSub on its default host."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import trio
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12, GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from bench.sides.pubsub import Received

_TOPIC = "bench"


class StockSubscriber:
    """A host with GossipSub."""

    def __init__(self, host: IHost, router: GossipSub, pubsub: Pubsub) -> None:
        self._host = host
        self._router = router
        self._pubsub = pubsub
        self.address = str(host.get_addrs()[0])
        self.received = Received()

    @property
    def mesh(self) -> Sequence[object]:
        return list(self._router.mesh.get(_TOPIC, ()))

    async def connect(self, address: str) -> None:
        """Until the host is connected; the mesh comes later."""
        await self._host.connect(info_from_p2p_addr(Multiaddr(address)))

    async def publish(self, data: bytes) -> None:
        """It never waits: what a full queue does not take is lost."""
        await self._pubsub.publish(_TOPIC, data)


class StockPubSubSide:
    """Signed messages and this project's degrees; a heartbeat of one second, and no limit of 10 messages a second."""

    @asynccontextmanager
    async def subscribe(self, secret: str, *, is_limited: bool) -> AsyncGenerator[StockSubscriber, None]:
        """A host with both services running and one subscription that is read all the time."""
        host = new_host()
        router = GossipSub(
            protocols=[PROTOCOL_ID_V12, PROTOCOL_ID_V11],
            degree=6,
            degree_low=4,
            degree_high=12,
            heartbeat_interval=1,
            spam_protection_enabled=False,
        )
        pubsub = Pubsub(host, router, strict_signing=True)
        async with (
            host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]),
            background_trio_service(pubsub),
            background_trio_service(router),
            trio.open_nursery() as nursery,
        ):
            await pubsub.wait_until_ready()
            subscriber = StockSubscriber(host, router, pubsub)
            subscription = await pubsub.subscribe(_TOPIC)
            own = host.get_id().to_bytes()

            async def read() -> None:
                while True:
                    message = await subscription.get()
                    if message.from_id != own:
                        subscriber.received.add(message.data)

            nursery.start_soon(read)
            yield subscriber
            nursery.cancel_scope.cancel()
