"""Every place where a stranger may put a key: an RSA private key there costs this host nothing."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from Crypto.PublicKey import RSA
from google.protobuf.descriptor import Descriptor
from libp2p.discovery.rendezvous.pb.rendezvous_pb2 import Message as RendezvousMessage
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message as DhtMessage
from libp2p.relay.circuit_v2.pb import circuit_pb2
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import ProtocolError, StreamClosedError
from dep2p.host.connections.identify import IDENTIFY, IDENTIFY_PUSH
from dep2p.host.connections.signed_records import open_signed_record
from dep2p.host.discovery.dht import DhtDiscovery
from dep2p.host.discovery.dht_stream import admitted
from dep2p.host.interface import ByteStream
from dep2p.host.transports.relay.messages import HOP
from dep2p.types import peer_id_bytes
from tests.host.hostile_keys import ENCODED, private_key_envelope

KAD = str(PROTOCOL_ID)


@pytest.fixture(autouse=True)
def keys_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Keys that py-libp2p's RSA reader was given; a test fails when there is one."""
    imported: list[bytes] = []

    def import_key(data: bytes, *_: object) -> object:
        imported.append(data)
        raise ValueError("no key should come here")

    monkeypatch.setattr(RSA, "import_key", import_key)
    yield imported
    assert imported == []


def hostile_dht_messages() -> list[DhtMessage]:
    """One for each type of message and each field that may hold a key."""
    by_sender = DhtMessage(type=DhtMessage.FIND_NODE, key=b"\x12\x20" + bytes(32), senderRecord=private_key_envelope())
    provider = DhtMessage(type=DhtMessage.ADD_PROVIDER, key=b"\x12\x20" + bytes(32))
    provider.providerPeers.add(id=b"\x12\x20" + bytes(32), signedRecord=private_key_envelope())
    value = DhtMessage(type=DhtMessage.PUT_VALUE, key=b"/pk/" + b"1220" + b"00" * 32)
    value.record.key, value.record.value = value.key, ENCODED
    value.record.author, value.record.signature = ENCODED, bytes(64)
    return [by_sender, provider, value]


@pytest.mark.parametrize("number", range(3))
def test_a_dht_message_loses_what_py_libp2p_would_parse(number: int) -> None:
    message = hostile_dht_messages()[number]
    message.closerPeers.add(id=b"near", signedRecord=b"record")
    seen = DhtMessage.FromString(admitted(message.SerializeToString()))
    assert (seen.type, seen.key) == (message.type, message.key)
    assert not seen.HasField("senderRecord") and not seen.HasField("record")
    assert [one.id for one in seen.closerPeers] == [b"near"]
    assert not any(one.HasField("signedRecord") for one in (*seen.closerPeers, *seen.providerPeers))


def test_what_is_no_dht_message_is_refused() -> None:
    with pytest.raises(ProtocolError):
        admitted(b"\xff\xff")


@pytest.mark.real
async def test_the_dht_server_parses_no_key_of_a_message(open_host: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "libp2p")
    async with open_host(discovery=[DhtDiscovery()]) as host, open_host(listen=[]) as stranger:
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        for message in hostile_dht_messages():
            stream = await connection.open_stream(KAD)
            await stream.write(encode_length_prefixed(message.SerializeToString()))
            await stream.close_write()
            with trio.move_on_after(1):
                try:
                    while await stream.read():
                        pass
                except StreamClosedError:
                    assert message.type != DhtMessage.FIND_NODE
        stream = await connection.open_stream(KAD)
        ask = DhtMessage(type=DhtMessage.FIND_NODE, key=peer_id_bytes(host.peer_id))
        await stream.write(encode_length_prefixed(ask.SerializeToString()))
        with trio.fail_after(5):
            answer = DhtMessage.FromString(await read_length_prefixed(stream, 65_536))
        assert answer.type == DhtMessage.FIND_NODE


@pytest.mark.real
async def test_the_dht_client_parses_no_key_of_an_answer(open_host: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "libp2p")
    asked = trio.Event()

    async def answer(stream: ByteStream) -> None:
        while True:
            asking = DhtMessage.FromString(await read_length_prefixed(stream, 65_536))
            reply = DhtMessage(type=asking.type, key=asking.key, senderRecord=private_key_envelope())
            reply.closerPeers.add(id=peer_id_bytes(stream.connection.peer), signedRecord=private_key_envelope())
            reply.providerPeers.add(id=b"\x12\x20" + bytes(32), signedRecord=private_key_envelope())
            await stream.write(encode_length_prefixed(reply.SerializeToString()))
            asked.set()

    async with open_host() as stranger, open_host(discovery=[DhtDiscovery()]) as host:
        stranger.set_stream_handler(KAD, answer)
        await host.dial(stranger.peer_id, stranger.listen_addrs())
        with trio.fail_after(20):
            await asked.wait()
        await trio.sleep(1)


@pytest.mark.real
async def test_identify_and_its_pushes_parse_no_key(open_host: Any, eventually: Any) -> None:
    async with open_host() as host, open_host(listen=[]) as stranger:

        def message() -> bytes:
            body = Identify(
                public_key=ENCODED, signedPeerRecord=private_key_envelope(stranger.peer_id), protocols=["/x/1"]
            )
            return encode_length_prefixed(body.SerializeToString())

        async def tell(stream: ByteStream) -> None:
            await stream.write(message())
            await stream.close()

        stranger.set_stream_handler(IDENTIFY, tell)
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: host.counters().get("identify_signed_record_refused") == 1)
        stream = await connection.open_stream(IDENTIFY_PUSH)
        await stream.write(message())
        await stream.close()
        await eventually(lambda: host.counters().get("identify_signed_record_refused") == 2)
        assert host.peer_protocols(stranger.peer_id) == ("/x/1",)
        assert host.signed_record(stranger.peer_id) == b""


@pytest.mark.real
async def test_identify_keeps_the_record_that_a_peer_signed(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (host, other):
        await host.dial(other.peer_id, other.listen_addrs())
        await eventually(lambda: bool(host.signed_record(other.peer_id)))
        record = open_signed_record(host.signed_record(other.peer_id), other.peer_id)
        assert [f"{addr}/p2p/{other.peer_id}" for addr in record.addrs] == other.listen_addrs()
        await host.disconnect(other.peer_id)
        await eventually(lambda: not host.signed_record(other.peer_id))


@pytest.mark.real
async def test_a_voucher_of_a_relay_is_not_parsed(open_host: Any, eventually: Any) -> None:
    async def reserve(stream: ByteStream) -> None:
        await read_length_prefixed(stream, 4_096)
        answer = HopMessage(type=HopMessage.STATUS, status=circuit_pb2.OK, senderRecord=private_key_envelope())
        answer.reservation.voucher = private_key_envelope()
        await stream.write(encode_length_prefixed(answer.SerializeToString()))
        await stream.close()

    async with open_host() as stranger, open_host(relay="client") as host:
        stranger.set_stream_handler(HOP, reserve)
        await host.dial(stranger.peer_id, stranger.listen_addrs())
        await eventually(lambda: host.counters().get("relay_reserved") == 1)


def test_rendezvous_messages_have_no_place_for_a_key() -> None:
    """Sentinel: a version of py-libp2p that adds signed records to them needs a gate here."""

    def names(descriptor: Descriptor) -> set[str]:
        found: set[str] = set()
        for one in descriptor.fields:
            found |= {one.name} | (names(one.message_type) if one.message_type is not None else set())
        return found

    assert not [name for name in names(RendezvousMessage.DESCRIPTOR) if "ecord" in name or "key" in name.lower()]
