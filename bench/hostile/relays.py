"""Attacks of a stranger on a relay and on the members that are reached through it."""

import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage

from bench.hostile.raw_client import RawConnection, RawStream, RefusedError
from bench.hostile.stage import Stage, in_parallel, repeat, send_wrong_proofs
from dep2p.encoding.length_prefixed import LengthPrefixedDecoder, encode_length_prefixed
from dep2p.types import PeerId, peer_id_bytes

_HOP = "/libp2p/circuit/relay/0.2.0/hop"
_CIRCUITS = 20
_PROOFS = 12
_MESSAGE_BYTES_MAX = 65_536


async def _ask(connection: RawConnection, message: HopMessage) -> tuple[RawStream, HopMessage]:
    stream = await connection.open_stream(_HOP, encode_length_prefixed(message.SerializeToString()))
    decoder, answers = LengthPrefixedDecoder(_MESSAGE_BYTES_MAX), list[bytes]()
    while not answers:
        data = await stream.receive_some()
        if not data:
            raise RefusedError("the relay ended the stream")
        answers = decoder.feed(data)
    return stream, HopMessage.FromString(answers[0])


def _connect_message(stage: Stage) -> HopMessage:
    message = HopMessage(type=HopMessage.CONNECT)
    message.peer.id = peer_id_bytes(PeerId(stage.others[0].rpartition("/p2p/")[2]))
    return message


async def silent_circuits(stage: Stage) -> None:
    """One stranger opens more circuits to a member than it may have, and sends nothing in them."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            for _ in range(_CIRCUITS):
                _, answer = await _ask(connection, _connect_message(stage))
                stage.counts["circuits" if answer.status == circuit_pb2.OK else "circuits_refused"] += 1
            while not connection.is_closed:
                await trio.sleep(1.0)
                _, answer = await _ask(connection, _connect_message(stage))
                stage.counts["circuits" if answer.status == circuit_pb2.OK else "circuits_refused"] += 1
            nursery.cancel_scope.cancel()

    await repeat(stage, once)


async def reservations(stage: Stage) -> None:
    """Strangers reserve at the relay, each with an identity of its own, until it has no reservation left."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            _, answer = await _ask(connection, HopMessage(type=HopMessage.RESERVE))
            stage.counts["reserved" if answer.status == circuit_pb2.OK else "reservations_refused"] += 1
            await connection.wait_closed()
            nursery.cancel_scope.cancel()

    await in_parallel(stage, stage.connections, once)


async def failed_proofs(stage: Stage) -> None:
    """Failed proofs through the relay, whose address honest members use, too."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            circuit, answer = await _ask(connection, _connect_message(stage))
            if answer.status != circuit_pb2.OK:
                raise RefusedError("the relay refuses the circuit")
            inner = await RawConnection.over(nursery, circuit)
            await send_wrong_proofs(stage, inner, _PROOFS)
            nursery.cancel_scope.cancel()

    await repeat(stage, once)
