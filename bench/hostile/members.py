"""Attacks of a member: floods of requests, unread answers, queues, invented members, sequence numbers."""

import socket
import time

import trio

from bench.hostile.raw_client import RawConnection, RefusedError, dial_member
from bench.hostile.stage import Stage, in_parallel, repeat
from bench.sides.node import realm_of
from dep2p.errors import Dep2pError
from dep2p.identity import Identity
from dep2p.messaging.service import message_protocol
from dep2p.node.node import Node
from dep2p.protocols.realm.member_record import SEQ_MAX, MemberRecord, seal_record
from dep2p.protocols.realm.messages import encode_digest, encode_records, members_protocol
from dep2p.protocols.wire.frame import HEADERS, FrameType, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, encode_headers
from dep2p.types import PeerId

REQUEST = "bench/request"
_BATCH = 200
_HOLD_BATCH = 60
_LINKS = 4
_LIFE_MS = 7 * 86_400_000
_PAUSE_S = 0.01


async def _requests(
    stage: Stage, *, batch: int, body: bytes, timeout_ms: int, is_reading: bool, requests_max: int
) -> None:
    head = encode_headers({HeaderKey.NAME: REQUEST, HeaderKey.TIMEOUT_MS: timeout_ms})

    async def send_all(connection: RawConnection) -> None:
        stream = await connection.open_stream(message_protocol(stage.realm.realm_id))
        stream.is_kept, stream.is_crediting = False, is_reading
        for first in range(1, requests_max, batch):
            frames = [
                encode_frame(FrameType.REQUEST, head + body, flags=HEADERS, req_id=number % 2**31 + 1)
                for number in range(first, first + batch)
            ]
            await stream.send(b"".join(frames))
            stage.counts["requests"] += batch
        await stream.wait_ended()

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await dial_member(nursery, stage.address, stage.realm)
            try:
                async with trio.open_nursery() as links:
                    for _ in range(_LINKS):
                        links.start_soon(send_all, connection)
            except* RefusedError as group:
                raise RefusedError("the node refuses the flood") from group
            nursery.cancel_scope.cancel()

    await in_parallel(stage, 2, once)


async def request_flood(stage: Stage) -> None:
    """As many requests as the connection takes; answers are read."""
    await _requests(stage, batch=_BATCH, body=bytes(16), timeout_ms=10_000, is_reading=True, requests_max=2**40)


async def request_unread(stage: Stage) -> None:
    """The same, and no answer is read."""
    await _requests(stage, batch=_BATCH, body=bytes(16), timeout_ms=10_000, is_reading=False, requests_max=2**40)


async def request_hold(stage: Stage) -> None:
    """Requests with a deadline of 49 days, whose answers of 1 KB it does not read: each holds its place."""
    await _requests(
        stage, batch=_HOLD_BATCH, body=bytes(1_000), timeout_ms=2**32 - 1, is_reading=False, requests_max=20_000
    )


async def queue_flood(stage: Stage) -> None:
    """Queues without end on the node's disk, and a message of 64 KB in each."""
    peer = PeerId(stage.peer)
    async with Node.open(realm_of(stage.secret), listen=()) as node:
        await node.connect(stage.address)
        queues = node.queues.at(peer)

        async def make(number: int) -> None:
            while True:
                name = f"flood-{number}-{stage.counts[f'made by {number}']}"
                stage.counts[f"made by {number}"] += 1
                try:
                    await queues.create(name)
                    stage.counts["queues"] += 1
                    await queues.publish(name, bytes(65_536), timeout_s=5.0)
                    stage.counts["messages"] += 1
                except Dep2pError:
                    stage.counts["refused"] += 1
                    await trio.sleep(_PAUSE_S)

        try:
            async with trio.open_nursery() as nursery:
                for number in range(16):
                    nursery.start_soon(make, number)
        finally:
            for name in [name for name in stage.counts if name.startswith("made by")]:
                del stage.counts[name]


async def invented_members(stage: Stage) -> None:
    """Records of members that do not exist, all at an address that counts who dials it."""
    realm, now_ms = stage.realm, int(time.time() * 1_000)
    with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trap:
        await trap.bind(("127.0.0.1", 0))
        trap.listen(200)
        port = trap.getsockname()[1]
        envelopes: list[bytes] = []
        for _ in range(stage.connections):
            made = Identity.generate()
            record = MemberRecord(
                made.peer_id, (f"/ip4/127.0.0.1/tcp/{port}",), 1, now_ms - 1_000, now_ms + _LIFE_MS - 1_000
            )
            envelopes.append(seal_record(record, realm.keys, made.sign).envelope)
            await trio.lowlevel.checkpoint()

        async def count_dials() -> None:
            while True:
                taken, _ = await trap.accept()
                taken.close()
                stage.counts["dials_of_the_named_address"] += 1

        async def once() -> None:
            async with trio.open_nursery() as nursery:
                connection = await dial_member(nursery, stage.address, realm)
                stream = await connection.open_stream(members_protocol(realm.realm_id))
                stream.is_kept = False
                for frame in encode_records(envelopes):
                    await stream.send(frame)
                stage.counts["records"] += len(envelopes)
                await stream.wait_ended()
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_dials)
            nursery.start_soon(repeat, stage, once)


async def high_numbers(stage: Stage) -> None:
    """Digests that name the other members with the highest numbers, and no record of them."""
    realm = stage.realm
    frames = b"".join(encode_digest([(PeerId(peer), SEQ_MAX) for peer in stage.others]))

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await dial_member(nursery, stage.address, realm)
            stream = await connection.open_stream(members_protocol(realm.realm_id))
            stream.is_kept = False
            while not stream.is_ended and not connection.is_closed:
                await stream.send(frames)
                stage.counts["digests"] += 1
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()

    await repeat(stage, once)
