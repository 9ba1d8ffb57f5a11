"""Every reader of bytes that a stranger, a member, a file or a local program can choose."""

import hashlib
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import cbor2
import h11
import zstandard

from dep2p.config.loader import load_config
from dep2p.daemon.http.connection import RefusedRequestError, scope_of
from dep2p.encoding.length_prefixed import LengthPrefixedDecoder
from dep2p.errors import (
    ConfigError,
    ProtocolError,
    RealmFileError,
    SessionTokenError,
)
from dep2p.gossipsub.codecs.interface import Codec
from dep2p.gossipsub.codecs.libp2p import Libp2pCodec
from dep2p.gossipsub.codecs.realm import RealmCodec
from dep2p.gossipsub.headers import message_headers
from dep2p.gossipsub.messages.message_id import MessageIds
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, SubscriptionChange
from dep2p.host.addresses import parse_address
from dep2p.host.connections.signed_records import open_signed_record
from dep2p.host.transports.quic_certificate import verify_certificate
from dep2p.identity import Identity
from dep2p.protocols.nsq.commands import CommandParser
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.protocols.nsq.session import NsqSession
from dep2p.protocols.queues.wire import admin
from dep2p.protocols.queues.wire import frames as queue_wire
from dep2p.protocols.realm.keys import derive_keys, keyed_mac, length_prefixed
from dep2p.protocols.realm.member_record import MemberRecord, check_signature, check_times, open_envelope, seal_record
from dep2p.protocols.realm.messages import decode_members, encode_digest, encode_records, encode_summary, encode_want
from dep2p.protocols.sessions import wire as session_wire
from dep2p.protocols.sessions.resume_token import decode_token
from dep2p.protocols.wire.frame import FrameDecoder, encode_frame
from dep2p.protocols.wire.headers import HeaderReader, decode_headers, encode_headers
from dep2p.public_keys import parse_public_key
from dep2p.realm.credentials import INVITE_PREFIX, Realm
from dep2p.traces.files import read_events
from dep2p.traces.libp2p import TraceFormatError, import_files
from dep2p.types import parse_peer_id, peer_id_bytes, with_base58_peers
from tests.fuzz.engine import Target, split
from tests.fuzz.test_fuzz_yamux import Side
from tests.host.certificates import NOW, Recipe

_OWN = Identity(bytes(range(32)))
_PSK = bytes(range(32, 64))
_REALM = Realm.from_psk(_PSK, "fuzz")
_KEYS = derive_keys(_PSK)
_PARAMS = GossipParams()
_CODECS: dict[str, Codec] = {
    "realm": RealmCodec(peer_id_bytes(_OWN.peer_id), _OWN.sign, bytes(32), _PARAMS),
    "public": Libp2pCodec(peer_id_bytes(_OWN.peer_id), _OWN.sign, MessageIds("go"), _PARAMS),
}
_DIRECTORY = Path(tempfile.mkdtemp(prefix="dep2p-fuzz-"))
_NSQ = NsqLimits(line_bytes_max=200, message_bytes_max=1_000, body_bytes_max=2_000)
_RECIPE = Recipe(identity=_OWN)


def _members(data: bytes) -> None:
    decoder = FrameDecoder(8_192)
    for piece in split(data):
        for frame in decoder.feed(piece):
            with suppress(ProtocolError):
                decode_members(frame)
        if decoder.error is not None:
            return


def _member_record(data: bytes) -> None:
    """The body of a record with a right MAC: a member of the realm can make any."""
    signature = data[:64].ljust(64, b"\0")
    mac = keyed_mac(_KEYS.member_key, b"dep2p-member-mac-v1" + length_prefixed(data) + signature)
    for envelope in (data, cbor2.dumps([data, signature, mac], canonical=True)):
        with suppress(ProtocolError):
            sealed, signed = open_envelope(envelope, _KEYS)
            check_times(sealed.record, 1_700_000_000_000)
            check_signature(sealed, signed, _KEYS.realm_id)


def _rpc(codec: Codec) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with suppress(ProtocolError):
            rpc = codec.decode(data)
            for message in rpc.messages:
                codec.authenticate(message)
            for payload in codec.encode(rpc):
                codec.decode(payload)

    return run


def _rpcs(codec: Codec) -> list[bytes]:
    ids = (b"x" * 16, b"y" * 46)
    rng = random.Random(1)
    message = codec.compose("topic", b"data", bytes(8))
    with_headers: list[Rpc] = []
    if isinstance(codec, RealmCodec):
        headers = message_headers({"text": "value", "raw": b"\x00\xff", "count": -3, "many": ["a", True]})
        with_headers = [Rpc(messages=(codec.compose_with_headers("topic", b"data", bytes(8), headers), message))]
    parts = (
        Rpc(messages=(message,)),
        *with_headers,
        Rpc(subscriptions=(SubscriptionChange("topic", True), SubscriptionChange("topic", False))),
        Rpc(ihave=(IHave("topic", ids),), iwant=ids, idontwant=ids),
        Rpc(graft=("topic",), prune=(Prune("topic", 60, (PeerInfo(rng.randbytes(38), b"record"),)),)),
    )
    return [payload for part in parts for payload in codec.encode(part)]


def _file(name: str, data: bytes) -> Path:
    path = _DIRECTORY / name
    path.write_bytes(data)
    return path


def _libp2p_trace(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=_DIRECTORY) as out, suppress(TraceFormatError):
        import_files([_file("trace.json", data)], Path(out))


def _trace(data: bytes) -> None:
    with suppress(ProtocolError):
        for event in read_events(_file("n-1-0.ndjson.zst", data)):
            assert isinstance(event, dict)


def _config(data: bytes) -> None:
    with suppress(ConfigError):
        load_config(config_file=_file("config.toml", data))
    text = data.decode("utf-8", "surrogateescape")
    with suppress(ConfigError):
        load_config(environ={"DEP2P_LISTEN": text, "DEP2P_LIMITS_CONNECTIONS_MAX": text, "DEP2P_DATA_DIR": text})
    with suppress(ConfigError):
        load_config(
            flags={"node.bootstrap": text, "queues.create": text, "control.tcp": text, "limits.drain_timeout_s": text}
        )


def _invite(data: bytes) -> None:
    import base64

    checksum = hashlib.sha256(INVITE_PREFIX.encode() + data).digest()[:8]
    whole = INVITE_PREFIX + base64.urlsafe_b64encode(data + checksum).decode().rstrip("=")
    for text in (whole, data.decode("utf-8", "replace"), INVITE_PREFIX + data.decode("latin-1")):
        with suppress(RealmFileError):
            Realm.from_invite(text)
    with suppress(RealmFileError):
        Realm.from_file_bytes(data)


_QUEUE_DECODERS: tuple[Callable[[bytes], object], ...] = (
    queue_wire.decode_publish,
    queue_wire.decode_published,
    queue_wire.decode_ready,
    queue_wire.decode_deliver,
    queue_wire.decode_settle,
    queue_wire.decode_settled,
    queue_wire.decode_refused,
    lambda payload: admin.parse_request(admin.decode_admin(payload)),
)


def _queue(data: bytes) -> None:
    if data:
        with suppress(ProtocolError, ValueError):
            _QUEUE_DECODERS[data[0] % len(_QUEUE_DECODERS)](data[1:])


def _queue_seeds() -> list[bytes]:
    message = queue_wire.WireMessage(b"", b"body")
    delivered = queue_wire.Delivered(1, 1, 1, 1, 1, b"", b"body")
    result = queue_wire.DeliveryResult(queue_wire.Settle.REQUEUE, 1, 1, 5, "why")
    frames = (
        queue_wire.encode_publish(1, "jobs", bytes(16), 3, [message, message]),
        queue_wire.encode_published(1, [queue_wire.Point(1, 1)]),
        queue_wire.encode_ready(1, 2, 3),
        queue_wire.encode_deliver(1, [delivered, delivered]),
        queue_wire.encode_settle(1, 1, [result]),
        queue_wire.encode_settled(1, queue_wire.Settled(1, [(1, 1, 7)], [(1, 2, 3)])),
        queue_wire.encode_refused(queue_wire.REFUSED, 1, 6, "full", 5),
    )
    seeds = [bytes([number]) + frame[12:] for number, frame in enumerate(frames)]
    return [*seeds, b'\x07{"op":"peek","queue":"jobs","count":3}', b'\x07{"op":"create","queue":"jobs","options":{}}']


_SESSION_DECODERS: tuple[Callable[[bytes], object], ...] = (
    session_wire.decode_resume,
    session_wire.decode_session_answer,
    session_wire.decode_ack,
    session_wire.decode_taken,
    session_wire.decode_request,
    session_wire.decode_failure,
    lambda payload: session_wire.read_items(payload, session_wire.first_seq_of(payload), 0, 1_000),
    lambda payload: decode_token(payload.decode("latin-1")),
)


def _session(data: bytes) -> None:
    if data:
        with suppress(ProtocolError, SessionTokenError):
            _SESSION_DECODERS[data[0] % len(_SESSION_DECODERS)](data[1:])


def _session_seeds() -> list[bytes]:
    items = session_wire.encode_item(0, 0, b"push") + session_wire.encode_item(1, 2, b"answer")
    frames = (
        session_wire.encode_resume(session_wire.Resume(b"i" * 16, 1, 2, 3, 4, 5, 6, "name", b"data")),
        session_wire.encode_session_answer(session_wire.SessionAnswer(1, 2, 3, 4)),
        session_wire.encode_ack(1, 2),
        session_wire.encode_taken(1),
        session_wire.encode_request(1, b"data", 1_000),
        b"\0" * 12 + session_wire.encode_failure(1, "why"),
        session_wire.push_header(1, len(items)) + items,
    )
    return [bytes([number]) + frame[12:] for number, frame in enumerate(frames)]


def _http(data: bytes) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=16_384)
    try:
        for piece in split(data):
            connection.receive_data(piece)
            while True:
                event = connection.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    break
                if isinstance(event, h11.Request):
                    scope_of(event)
    except (h11.RemoteProtocolError, RefusedRequestError):
        return


def _nsq(data: bytes) -> None:
    parser, session = CommandParser(_NSQ), NsqSession(_NSQ)
    for piece in split(data):
        for command in parser.feed(piece):
            with suppress(NsqError):
                session.accept(command)


def _certificate(data: bytes) -> None:
    """The extension of a certificate that is right in all else."""

    def extension(_: bytes) -> bytes:
        return data

    certificate = replace(_RECIPE, extension=extension).make()
    with suppress(ProtocolError):
        key = verify_certificate(certificate, [], NOW)
        assert key.peer_id_bytes == peer_id_bytes(_OWN.peer_id), "another peer than the one who signed"


def _certificate_seeds() -> list[bytes]:
    made: list[bytes] = []

    def note(extension: bytes) -> bytes:
        made.append(extension)
        return extension

    replace(_RECIPE, extension=note).make()
    return made


def _yamux(data: bytes) -> None:
    side = Side(is_initiator=data[:1] < b"\x80")
    side.attack(data[1:], iter(lambda: 1 + len(data) % 31, 0))
    side.outcome()


def _keys(data: bytes) -> None:
    with suppress(ProtocolError):
        key = parse_public_key(data)
        key.verify(b"signed", data[-64:])
        assert len(key.peer_id_bytes) in range(34, 45)


def _signed_record(data: bytes) -> None:
    with suppress(ProtocolError):
        open_signed_record(data, _OWN.peer_id)


def _headers(data: bytes) -> None:
    with suppress(ProtocolError):
        decode_headers(data)
    with suppress(ProtocolError):
        HeaderReader(200).split(data)


def _names(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with suppress(ValueError):
        assert parse_peer_id(parse_peer_id(text)) == parse_peer_id(text)
    with_base58_peers(text)
    with suppress(ValueError):
        parse_address(text)


def _delimited(data: bytes) -> None:
    decoder = LengthPrefixedDecoder(1_000)
    for piece in split(data):
        for message in decoder.feed(piece):
            assert len(message) <= 1_000
        if decoder.error is not None:
            return


def _member_seeds() -> list[bytes]:
    record = MemberRecord(_OWN.peer_id, ("/ip4/127.0.0.1/tcp/1",), 1, 1_700_000_000_000, 1_700_000_900_000)
    sealed = seal_record(record, _KEYS, _OWN.sign)
    body = cbor2.loads(sealed.envelope)[0]
    return [sealed.envelope, body]


_EVENT = (
    b'{"type":0,"peerID":"ACQIARIg","timestamp":1700000000000000000,'
    b'"publishMessage":{"messageID":"eA==","topic":"t"}}\n'
)
_RPC_EVENT = (
    b'{"type":6,"peerID":"ACQIARIg","timestamp":1,"recvRPC":{"receivedFrom":"ACQIARIg","meta":{"messages":'
    b'[{"messageID":"eA==","topic":"t"}],"control":{"ihave":[{"topic":"t","messageIDs":["eA=="]}]}}}}\n'
)
_FRAME = zstandard.ZstdCompressor().compress(b'{"v":1,"n":"n","s":1,"t":1,"k":"join","topic":"t"}\n')
_TOML = (
    b'[node]\nlisten = ["/ip4/0.0.0.0/tcp/4001"]\nbootstrap = []\nmdns = true\nrelay = "client"\n'
    b"[limits]\nconnections_max = 5\n"
    b'[control]\ntcp = "127.0.0.1:1"\n[queues]\ncreate = "members"\n[trace]\nenabled = true\n[log]\nlevel = "info"\n'
)

TARGETS: dict[str, Target] = {
    "member-messages": Target(
        _members,
        [
            *encode_records([b"record"]),
            *encode_digest([(_OWN.peer_id, 7)]),
            *encode_want([_OWN.peer_id]),
            encode_summary(bytes(32)),
        ],
        ["protocols/realm/messages.py", "protocols/wire/frame.py", "dep2p/encoding/cbor.py"],
    ),
    "member-records": Target(_member_record, _member_seeds(), ["protocols/realm/member_record.py"]),
    "realm-rpcs": Target(
        _rpc(_CODECS["realm"]),
        _rpcs(_CODECS["realm"]),
        ["gossipsub/codecs/realm.py", "gossipsub/signing/merkle_batch.py"],
    ),
    "public-rpcs": Target(
        _rpc(_CODECS["public"]), _rpcs(_CODECS["public"]), ["gossipsub/codecs/libp2p.py", "dep2p/encoding/protobuf.py"]
    ),
    "length-prefixes": Target(
        _delimited,
        [b"\x03abc\x00\x80\x01" + bytes(128)],
        ["dep2p/encoding/length_prefixed.py", "dep2p/encoding/varint.py"],
    ),
    "libp2p-traces": Target(
        _libp2p_trace, [_EVENT, _RPC_EVENT, b"\x12\x08\x00\x12\x02ab\x18\x01"], ["dep2p/traces/libp2p.py"]
    ),
    "traces": Target(_trace, [_FRAME, b'{"v":1}\n'], ["dep2p/traces/files.py"]),
    "config": Target(
        _config,
        [_TOML, b"/ip4/1.2.3.4/tcp/1", b"127.0.0.1:80", b"1.5", _OWN.peer_id.encode()],
        ["dep2p/config/loader.py", "dep2p/config/values.py", "dep2p/config/validation.py"],
    ),
    "invites": Target(
        _invite,
        [
            cbor2.dumps({1: "fuzz", 2: _PSK, 3: ["/ip4/1.2.3.4/tcp/1"]}),
            _REALM.to_file_bytes(),
            _REALM.invite().encode(),
        ],
        ["dep2p/realm/credentials.py"],
    ),
    "queue-wire": Target(_queue, _queue_seeds(), ["protocols/queues/wire/frames.py", "protocols/queues/wire/admin.py"]),
    "session-wire": Target(
        _session, _session_seeds(), ["protocols/sessions/wire.py", "protocols/sessions/resume_token.py"]
    ),
    "http-requests": Target(
        _http,
        [
            b"GET /v1/status?x=1 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST http://x/y HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab",
            b"OPTIONS * HTTP/1.0\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        ],
        ["dep2p/daemon/http/connection.py"],
    ),
    "nsq-commands": Target(
        _nsq,
        [
            b"  V2PUB t\n\0\0\0\1x",
            b"  V2IDENTIFY\n\0\0\0\2{}SUB t c\nRDY 1\nFIN 0123456789abcdef\nCLS\n",
            b"  V2MPUB t\n\0\0\0\x0d\0\0\0\1\0\0\0\5helloDPUB t 5\n\0\0\0\1x",
            b"  V2REQ 0123456789abcdef 5\nTOUCH 0123456789abcdef\nAUTH\n\0\0\0\1x",
        ],
        ["protocols/nsq/commands.py", "protocols/nsq/session.py", "protocols/nsq/identify.py"],
    ),
    "quic-certificates": Target(_certificate, _certificate_seeds(), ["dep2p/host/transports/quic_certificate.py"]),
    "yamux-frames": Target(
        _yamux,
        [
            b"\0" + bytes([0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1]) + b"x",
            b"\xff" + bytes([0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7]),
        ],
        ["dep2p/host/yamux/session.py", "dep2p/host/yamux/stream_state.py"],
    ),
    "public-keys": Target(
        _keys,
        [b"\x08\x01\x12\x20" + _OWN.public_key, b"\x08\x02\x12\x21\x02" + bytes(31) + b"\1"],
        ["dep2p/public_keys.py"],
    ),
    "signed-records": Target(
        _signed_record,
        [b"\x0a\x24\x08\x01\x12\x20" + _OWN.public_key + b"\x12\x02\x03\x01"],
        ["dep2p/host/connections/signed_records.py"],
    ),
    "headers": Target(
        _headers,
        [encode_headers({1: "name", 2: 5, 5: ["zstd"]}, {"a": [1, b"x", True]}), encode_frame(1, b"")],
        ["protocols/wire/headers.py", "dep2p/encoding/cbor.py"],
    ),
    "names": Target(
        _names,
        [
            _OWN.peer_id.encode(),
            f"/ip4/1.2.3.4/tcp/1/p2p/{_OWN.peer_id}".encode(),
            b"bafzaajaiaejca6dimbz6iibkdd6nesvtzk2hv4fzqvdl4ab5zcb2uhvwqqqehwq6",
        ],
        ["dep2p/types.py", "dep2p/host/addresses.py"],
    ),
}
