"""The arguments of an attack, and the pieces that several attacks share."""

import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from bench.hostile.raw_client import RawConnection, RefusedError
from bench.sides.node import realm_of
from dep2p.protocols.realm.handshake import AUTH_PROTOCOL
from dep2p.protocols.wire.frame import FrameType, encode_frame
from dep2p.realm.credentials import Realm

RETRY_S = 0.05
"""Between the tries of an attacker that was refused."""


@dataclass(slots=True)
class Stage:
    """One attack on one node."""

    address: str
    """The address of the node under attack, with its peer id; of the relay in attacks on one."""
    secret: str
    connections: int
    others: list[str] = field(default_factory=list[str])
    """Further addresses, by attack: the QUIC address, the relayed address, the author of a topic."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """The work of the attacker, for the report."""

    @property
    def realm(self) -> Realm:
        """The realm whose secret a hostile member has."""
        return realm_of(self.secret)

    @property
    def peer(self) -> str:
        """The id in the address."""
        return self.address.rpartition("/p2p/")[2]


Attack = Callable[[Stage], Awaitable[None]]
"""Attacks until it is cancelled."""


async def repeat(stage: Stage, once: Callable[[], Awaitable[None]]) -> None:
    """Call ``once`` again and again; a refusal is counted, and the next try comes after RETRY_S."""
    while True:
        try:
            await once()
        except* RefusedError:
            stage.counts["refused"] += 1
            await trio.sleep(RETRY_S)


async def in_parallel(stage: Stage, tasks: int, once: Callable[[], Awaitable[None]]) -> None:
    """`repeat` in so many tasks."""
    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(repeat, stage, once)


async def send_wrong_proofs(stage: Stage, connection: RawConnection, count: int) -> None:
    """Begin ``count`` handshakes of a realm with random tags and proofs, one after the other."""
    for _ in range(count):
        stream = await connection.open_stream(
            AUTH_PROTOCOL,
            encode_frame(FrameType.REQUEST, os.urandom(64), req_id=1),
            encode_frame(FrameType.REQUEST, os.urandom(32), req_id=2),
        )
        stage.counts["proofs"] += 1
        while await stream.receive_some():
            pass
