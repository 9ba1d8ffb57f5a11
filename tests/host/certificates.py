"""Certificates for QUIC, right and wrong in each way, and raw QUIC peers that use them."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import trio
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from dep2p.host.transports.quic_certificate import LIBP2P_EXTENSION, SIGNED_PREFIX
from dep2p.identity import Identity

NOW = datetime.now(UTC)
_KEY_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])


def der(tag: int, content: bytes) -> bytes:
    """One DER element."""
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    width = (size.bit_length() + 7) // 8
    return bytes((tag, 0x80 | width)) + size.to_bytes(width, "big") + content


def encoded_key(identity: Identity) -> bytes:
    """The protobuf PublicKey of an identity."""
    return _KEY_PREFIX + identity.public_key


@dataclass(frozen=True)
class Recipe:
    """How a certificate is made. The defaults make a right one."""

    identity: Identity = field(default_factory=Identity.generate)
    public_key: bytes | None = None
    sign: Callable[[bytes], bytes] | None = None
    signed_prefix: bytes = SIGNED_PREFIX
    signed_spki: bytes | None = None
    extension: Callable[[bytes], bytes] = lambda encoded: encoded
    has_extension: bool = True
    key: Any = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    issuer_key: Any = None
    issuer: str = "peer"
    hashed: Any = field(default_factory=hashes.SHA256)
    starts: timedelta = timedelta(hours=-1)
    ends: timedelta = timedelta(days=30)
    more: tuple[tuple[x509.ExtensionType, bool], ...] = ()

    def make(self) -> x509.Certificate:
        """The certificate."""
        spki = self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        sign = self.sign or self.identity.sign
        public_key = encoded_key(self.identity) if self.public_key is None else self.public_key
        signature = sign(self.signed_prefix + (self.signed_spki or spki))
        signed_key = self.extension(der(0x30, der(0x04, public_key) + der(0x04, signature)))
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer")]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.issuer)]))
            .public_key(self.key.public_key())
            .serial_number(7)
            .not_valid_before(NOW + self.starts)
            .not_valid_after(NOW + self.ends)
        )
        if self.has_extension:
            builder = builder.add_extension(x509.UnrecognizedExtension(LIBP2P_EXTENSION, signed_key), critical=False)
        for extension, is_critical in self.more:
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(self.issuer_key or self.key, self.hashed)


def forgeries(victim: Identity, own: Identity) -> dict[str, Recipe]:
    """Every way in which a certificate can be wrong. None may pass for ``victim``, nor for anybody else."""
    right = Recipe(identity=victim)

    def signed(sign: Callable[[bytes], bytes]) -> Recipe:
        return replace(right, sign=sign)

    def extended(extension: Callable[[bytes], bytes]) -> Recipe:
        return replace(right, extension=extension)

    odd = ec.generate_private_key(ec.SECP256R1())
    odd_spki = odd.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4.5"), b"x")
    usage = x509.KeyUsage(False, False, True, False, False, False, False, False, False)
    return {
        "junk for a signature": signed(lambda _: bytes(range(64))),
        "an empty signature": signed(lambda _: b""),
        "a signature by another identity": signed(own.sign),
        "a signature over another certificate's key": replace(right, signed_spki=odd_spki),
        "a signature without the prefix": replace(right, signed_prefix=b""),
        "a signature with the prefix of Noise": replace(right, signed_prefix=b"noise-libp2p-static-key:"),
        "no libp2p extension": replace(right, has_extension=False),
        "an empty extension": extended(lambda _: b""),
        "bytes behind the extension": extended(lambda encoded: encoded + b"\0"),
        "an extension that is cut": extended(lambda encoded: encoded[:-1]),
        "a signature that is no octet string": extended(lambda encoded: encoded[:-66] + b"\x03" + encoded[-65:]),
        "a length in the long form": extended(lambda encoded: b"\x30\x81" + encoded[1:]),
        "no public key": replace(right, public_key=b""),
        "a public key that is not canonical": replace(right, public_key=b"\x12\x20" + victim.public_key + b"\x08\x01"),
        "an unknown type of key": replace(right, public_key=b"\x08\x04" + encoded_key(victim)[2:]),
        "expired": replace(right, starts=timedelta(days=-3), ends=timedelta(days=-1)),
        "not valid yet": replace(right, starts=timedelta(days=1)),
        "signed by another key": replace(right, issuer_key=ec.generate_private_key(ec.SECP256R1())),
        "issued by another name": replace(right, issuer="somebody"),
        "an unknown critical extension": replace(right, more=((unknown, True),)),
        "a key that must not sign": replace(right, more=((usage, True),)),
        "a weak RSA key": replace(right, key=rsa.generate_private_key(65537, 1024)),
        "a curve that is not taken": replace(right, key=ec.generate_private_key(ec.SECP256K1())),
    }


class RawQuic:
    """One QUIC connection over a UDP socket, with a certificate of our choice or none."""

    def __init__(self, certificate: x509.Certificate | None, key: Any) -> None:
        config = QuicConfiguration(is_client=True, alpn_protocols=["libp2p"], verify_mode=ssl.CERT_NONE)
        config.certificate, config.private_key = certificate, key
        self.config = config
        self.received = b""
        self.is_over = False

    async def ask_identify(self, port: int, seconds: float = 4) -> int:
        """Dial a node and ask for identify; how many bytes it answered."""
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
            await udp.connect(("127.0.0.1", port))
            quic = QuicConnection(configuration=self.config)
            quic.connect(("127.0.0.1", port), now=trio.current_time())
            with trio.move_on_after(seconds):
                while not self.is_over and len(self.received) < 200:
                    await self._step(quic, udp, port)
        return len(self.received)

    async def _step(self, quic: QuicConnection, udp: Any, port: int) -> None:
        for datagram, _ in quic.datagrams_to_send(trio.current_time()):
            await udp.send(datagram)
        timer = quic.get_timer()
        with trio.move_on_at(timer if timer is not None else trio.current_time() + 1) as waiting:
            quic.receive_datagram(await udp.recv(65536), ("127.0.0.1", port), trio.current_time())
        if waiting.cancelled_caught:
            quic.handle_timer(trio.current_time())
        while (event := quic.next_event()) is not None:
            if isinstance(event, events.StreamDataReceived):
                self.received += event.data
            elif isinstance(event, events.HandshakeCompleted):
                stream = quic.get_next_available_stream_id()
                quic.send_stream_data(stream, b"\x13/multistream/1.0.0\n\x0f/ipfs/id/1.0.0\n")
            elif isinstance(event, events.ConnectionTerminated):
                self.is_over = True
