"""The control API over TLS, for an attacker on the network, and for a client that must not trust the wrong node."""

import contextlib
import datetime
import ipaddress
import logging
import ssl
import stat
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from starlette.types import Receive, Scope, Send

from dep2p.client.tls import TlsTrust
from dep2p.client.transport import Transport
from dep2p.config.contexts import certificate_fingerprint
from dep2p.control_api.errors import ControlError, DaemonUnreachableError
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.certificate import load_tls_context, make_certificate
from dep2p.daemon.http.listeners import open_tls
from dep2p.daemon.http.remote import RemoteControl
from dep2p.daemon.http.server import HttpServer
from dep2p.daemon.problems import Problem

pytestmark = pytest.mark.real
TOKEN = "t" * 43
BOUNDS = ControlBounds(wrong_token_delay_s=0.01)


@dataclass
class World:
    """A control API over TLS whose app only counts what reaches it."""

    port: int
    fingerprint: str
    remote: RemoteControl
    counts: Counter[str]
    requests: list[str] = field(default_factory=list[str])
    opened: list[trio.SocketStream | Transport] = field(default_factory=list["trio.SocketStream | Transport"])

    def transport(self, token: str = TOKEN, trust: TlsTrust | None = None, host: str = "127.0.0.1") -> Transport:
        transport = Transport(None, f"{host}:{self.port}", token, trust or TlsTrust(self.fingerprint))
        self.opened.append(transport)
        return transport

    async def without_unproven(self) -> None:
        while self.remote.unproven_count:  # noqa: ASYNC110 - the count has no event
            await trio.sleep(0.01)

    async def tcp(self) -> trio.SocketStream:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self.opened.append(stream)
        return stream

    async def tls(self, *, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> "trio.SSLStream[trio.SocketStream]":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        stream = trio.SSLStream(await self.tcp(), context, https_compatible=True)
        await stream.do_handshake()
        return stream


@asynccontextmanager
async def world(directory: Path, bounds: ControlBounds = BOUNDS, *, made: bool = True) -> AsyncGenerator[World, None]:
    cert, key = directory / "control.crt", directory / "control.key"
    if made:
        make_certificate(cert, key)
    counts: Counter[str] = Counter()
    remote = RemoteControl(HttpServer(bounds), load_tls_context(cert, key), TOKEN, bounds, counts)
    listener = open_tls("127.0.0.1:0")
    found = World(int(listener.socket.getsockname()[1]), certificate_fingerprint(cert), remote, counts)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.requests.append(scope["path"])
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"ok": true}'})

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(remote.serve, app, listener)
            try:
                yield found
            finally:
                for each in found.opened:
                    await each.aclose()
            nursery.cancel_scope.cancel()


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    """All bytes until the other side closes or cuts the connection."""
    received = b""
    with contextlib.suppress(trio.BrokenResourceError):
        while piece := await stream.receive_some(65_536):
            received += piece
    return received


async def read_answer(stream: trio.abc.ReceiveStream) -> bytes:
    """A whole answer of the app."""
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += await stream.receive_some(65_536)
    return received


async def test_the_token_opens_the_api_and_nothing_else_does(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        transport = here.transport()
        assert await transport.call("GET", "/a") == {"ok": True}
        assert await transport.call("GET", "/b") == {"ok": True}
        for wrong in ("x" * 43, TOKEN[:-1], TOKEN + "t", TOKEN.upper()):
            with pytest.raises(ControlError) as refused:
                await here.transport(wrong).call("POST", "/c", {"x": 1})
            assert refused.value.code == "D1008"
        stream = await here.tls()
        await stream.send_all(
            b"GET /d HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + TOKEN.encode() + b"\r\nauthorization: x\r\n\r\n"
        )
        assert (await stream.receive_some(4_096)).startswith(b"HTTP/1.1 401")
        await stream.send_all(b"GET /e HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"HTTP/1.1 401" in await read_all(stream)
        assert here.requests == ["/a", "/b"]
        assert here.counts["tls_token_wrong"] == 6


async def test_a_large_body_without_the_token_is_not_read_into_memory(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        stream = await here.tls()
        await stream.send_all(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 1_000_000)
        assert (await stream.receive_some(4_096)).startswith(b"HTTP/1.1 401")
        assert here.requests == []


async def test_plain_http_old_tls_and_garbage_end_at_the_handshake(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for data in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 70_000, b"\0"):
            stream = await here.tcp()
            await stream.send_all(data)
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_eof()
            assert b"HTTP" not in await read_all(stream)
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError)):
            await here.tls(version=ssl.TLSVersion.TLSv1_2)
        assert here.requests == []
        while here.counts["tls_handshake_failed"] < 4:  # noqa: ASYNC110 - the counter has no event
            await trio.sleep(0.01)
        assert await here.transport().call("GET", "/a") == {"ok": True}


async def test_a_handshake_and_a_head_that_come_byte_by_byte_are_cut_off(tmp_path: Path) -> None:
    bounds = replace(BOUNDS, tls_handshake_timeout_s=0.2, head_timeout_s=0.2)
    async with world(tmp_path, bounds) as here:
        silent = await here.tcp()
        assert await read_all(silent) == b""
        slow = await here.tls()
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await slow.send_all(b"G")
                await trio.sleep(0.02)
                with trio.move_on_after(0.001):
                    if not await slow.receive_some(1):
                        break
        await here.without_unproven()
        assert here.requests == []


async def test_a_connection_that_never_brings_the_token_ends(tmp_path: Path) -> None:
    """Though it goes on asking."""
    async with world(tmp_path, replace(BOUNDS, token_timeout_s=0.3)) as here:
        stream = await here.tls()
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
                if not await stream.receive_some(4_096):
                    break
        await here.without_unproven()
        assert here.requests == []


async def test_a_thousand_connections_keep_no_program_with_the_token_out(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        proven = await here.tls()
        ask = b"GET /first HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
        await proven.send_all(ask)
        assert b" 200 " in await read_answer(proven)
        for number in range(1_000):
            await here.tcp()
            if number % 200 == 199:
                assert await here.transport().call("GET", f"/{number}") == {"ok": True}
        assert here.remote.unproven_count <= BOUNDS.connections_unproven_per_block_max
        assert here.counts["tls_connection_replaced"] >= 900
        await proven.send_all(ask)
        assert b" 200 " in await read_answer(proven), "one that has brought the token is not replaced"
        assert len(here.requests) == 7


async def test_wrong_tokens_are_one_line_of_the_log_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dep2p.daemon.http"):
        async with world(tmp_path) as here:
            for _ in range(20):
                with pytest.raises(ControlError):
                    await here.transport("x" * 43).call("GET", "/a")
    assert [record.getMessage() for record in caplog.records] == [
        "a program on the network brought a wrong token to the control API"
    ]
    assert "x" * 43 not in caplog.text


async def test_a_client_sends_no_token_to_another_certificate(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for trust in (
            TlsTrust("00" * 32),
            TlsTrust(ca_file="system"),
            TlsTrust(ca_file=str(authority(tmp_path / "o"))),
        ):
            with pytest.raises(ControlError) as refused:
                await here.transport(trust=trust).call("GET", "/a")
            assert refused.value.code == "D1011", trust
        assert here.requests == [] and here.counts["tls_token_wrong"] == 0


async def test_a_certificate_of_an_authority_is_taken_for_its_name_only(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    async with world(tmp_path, made=False) as here:
        trust = TlsTrust(ca_file=str(ca))
        assert await here.transport(trust=trust).call("GET", "/a") == {"ok": True}
        with pytest.raises(ControlError) as refused:
            await here.transport(trust=trust, host="localhost").call("GET", "/a")
        assert refused.value.code == "D1011"


async def test_a_client_of_tls_finds_plain_http_or_nothing_unreachable(tmp_path: Path) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, answer, 0)
        port = listeners[0].socket.getsockname()[1]
        for other in (port, 1):
            with pytest.raises(DaemonUnreachableError):
                await Transport(None, f"127.0.0.1:{other}", TOKEN, TlsTrust("00" * 32)).call("GET", "/a")
        nursery.cancel_scope.cancel()


def test_the_certificate_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    cert, key = tmp_path / "control.crt", tmp_path / "control.key"
    make_certificate(cert, key)
    first = certificate_fingerprint(cert)
    make_certificate(cert, key)
    assert certificate_fingerprint(cert) == first
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control.crt", "control.key"]
    key.chmod(0o640)
    with pytest.raises(Problem, match="others may read the private key"):
        load_tls_context(cert, key)
    key.chmod(0o600)
    key.write_bytes(b"x")
    with pytest.raises(Problem, match="cannot use the certificate"):
        load_tls_context(cert, key)


def authority(directory: Path) -> Path:
    """Make an authority, and control.crt signed by it for 127.0.0.1; returns the authority's file."""
    directory.mkdir(exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)

    def signed(
        name: x509.Name, public: ec.EllipticCurvePublicKey, *extensions: tuple[x509.ExtensionType, bool]
    ) -> bytes:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(ca_name).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day)
        builder = builder.not_valid_after(now + day)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "control")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (directory / "ca.pem").write_bytes(signed(ca_name, ca_key.public_key(), (x509.BasicConstraints(True, None), True)))
    (directory / "control.crt").write_bytes(signed(own, key.public_key(), (names, False)))
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "control.key").touch(0o600)
    (directory / "control.key").write_bytes(secret)
    return directory / "ca.pem"
