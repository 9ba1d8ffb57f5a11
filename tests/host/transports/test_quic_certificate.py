"""A peer on QUIC is who its certificate proves, in and out: every wrong certificate is refused."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest
import trio
from aioquic import tls
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from libp2p.crypto.ed25519 import Ed25519PrivateKey, create_new_key_pair
from libp2p.peer.id import ID
from libp2p.transport.quic.security import CertificateGenerator

from dep2p.errors import Dep2pError, ProtocolError
from dep2p.host.transports.quic_certificate import verify_certificate
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.types import peer_id_from_bytes
from tests.host.certificates import NOW, RawQuic, Recipe, forgeries

VICTIM, OWN = Identity.generate(), Identity.generate()
FORGERIES = forgeries(VICTIM, OWN)
NOT_FOR_TLS = ("a curve that is not taken",)
"""Cases in which aioquic itself cannot sign a handshake."""
QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"


@pytest.mark.parametrize("how", FORGERIES)
def test_a_wrong_certificate_is_refused(how: str) -> None:
    with pytest.raises(ProtocolError):
        verify_certificate(FORGERIES[how].make(), (), NOW)


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP384R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["P-256", "P-384", "Ed25519", "RSA"],
)
def test_a_right_certificate_proves_its_identity(key: Any) -> None:
    recipe = Recipe(identity=VICTIM, key=key)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        recipe = replace(recipe, hashed=None)
    proved = verify_certificate(recipe.make(), (), NOW)
    assert peer_id_from_bytes(proved.peer_id_bytes) == VICTIM.peer_id


def test_a_second_certificate_is_refused() -> None:
    with pytest.raises(ProtocolError, match="alone"):
        verify_certificate(Recipe().make(), [Recipe().make()], NOW)


def test_understood_critical_extensions_are_taken() -> None:
    more = ((x509.BasicConstraints(ca=True, path_length=None), True),)
    assert verify_certificate(Recipe(identity=VICTIM, more=more).make(), (), NOW)


def test_what_the_library_makes_is_taken() -> None:
    keys = create_new_key_pair()
    assert isinstance(keys.private_key, Ed25519PrivateKey)
    made = CertificateGenerator().generate_certificate(keys.private_key, ID.from_pubkey(keys.public_key))
    proved = verify_certificate(made.certificate, (), datetime.now(UTC))
    assert proved.peer_id_bytes == ID.from_pubkey(keys.public_key).to_bytes()


def test_every_byte_of_a_certificate_counts() -> None:
    """One changed bit anywhere: refused, or no certificate at all.

    The count of unused bits in front of the signature is left out: it changes nothing when so many bits are zero.
    """
    certificate = Recipe(identity=VICTIM).make()
    encoded = certificate.public_bytes(Encoding.DER)
    unused_bits_at = len(encoded) - len(certificate.signature) - 1
    for at in range(len(encoded)):
        if at == unused_bits_at:
            continue
        changed = encoded[:at] + bytes((encoded[at] ^ 0x04,)) + encoded[at + 1 :]
        with pytest.raises((ProtocolError, ValueError, x509.InvalidVersion)):
            verify_certificate(x509.load_der_x509_certificate(changed), (), NOW)


@pytest.mark.real
async def test_an_unknown_peer_with_a_wrong_certificate_reaches_nothing(open_host: Any) -> None:
    """All at once, since silence is what each must meet; then an honest one, which is answered."""
    answered: dict[str, int] = {}
    async with open_host(listen=[QUIC]) as host:
        port = int(host.listen_addrs()[0].split("/")[4])

        async def stranger(how: str, recipe: Recipe | None) -> None:
            raw = RawQuic(recipe.make(), recipe.key) if recipe else RawQuic(None, None)
            answered[how] = await raw.ask_identify(port, 2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stranger, "no certificate", None)
            for how, recipe in FORGERIES.items():
                if how not in NOT_FOR_TLS:
                    nursery.start_soon(stranger, how, recipe)
        assert set(answered.values()) == {0}, answered
        assert not host.connections()
        honest = Recipe(identity=OWN)
        assert await RawQuic(honest.make(), honest.key).ask_identify(port, 5) > 100


@pytest.mark.real
async def test_a_node_with_a_wrong_certificate_is_not_taken_for_the_peer(open_host: Any) -> None:
    async with open_host(OWN, listen=[QUIC]) as imposter, open_host(listen=[]) as host:
        address = imposter.listen_addrs()[0].rpartition("/p2p/")[0]

        def present(recipe: Recipe) -> None:
            shown = imposter._transports._quic.transport.get_security_manager().tls_config
            shown.certificate, shown.private_key = recipe.make(), recipe.key

        for how, recipe in FORGERIES.items():
            if how in NOT_FOR_TLS:
                continue
            present(recipe)
            with pytest.raises(Dep2pError, match=r"certificate|extension|public key") as refused:
                await host.dial(VICTIM.peer_id, [address])
            assert not host.connections(), (how, refused)
        present(Recipe(identity=VICTIM))
        connection = await host.dial(VICTIM.peer_id, [address])
        assert connection.peer == VICTIM.peer_id


class _OtherVersion:
    """A right certificate that says it has an X.509 version which does not exist."""

    def public_bytes(self, encoding: Encoding) -> bytes:
        encoded = Recipe(identity=VICTIM).make().public_bytes(encoding)
        right = bytes.fromhex("a003020102")
        assert right in encoded
        return encoded.replace(right, bytes.fromhex("a003020104"), 1)


@pytest.mark.real
async def test_a_certificate_of_an_unknown_version_harms_no_other_connection(
    open_host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises where aioquic expects nothing: the listener, what is connected, and what comes next go on."""
    key = ec.generate_private_key(ec.SECP256R1())
    async with open_host(listen=[QUIC]) as host, open_host(listen=[]) as friend:
        port = int(host.listen_addrs()[0].split("/")[4])
        connection = await friend.dial(host.peer_id, host.listen_addrs())
        for _ in range(3):
            raw = RawQuic(cast(x509.Certificate, _OtherVersion()), key)
            assert await raw.ask_identify(port, 3) == 0
            assert raw.is_over  # told at once, not kept
        assert host.counters()["inbound_quic_malformed"] == 3
        assert not [record for record in caplog.records if record.exc_info]
        stream = await connection.open_stream("/echo/1")
        await stream.write(b"still here")
        assert await stream.read() == b"still here"
        await stream.close()
        honest = Recipe(identity=OWN)
        assert await RawQuic(honest.make(), honest.key).ask_identify(port, 5) > 100
        assert [one.peer for one in host.connections(friend.peer_id)] == [friend.peer_id]


@pytest.mark.real
async def test_dialling_a_node_whose_certificate_has_an_unknown_version_is_an_error(
    open_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tls.Certificate] = []
    push = tls.push_certificate

    def push_other_version(buf: Any, certificate: tls.Certificate) -> None:
        if not sent:  # the listener sends its certificate first
            certificate.certificates = [(_OtherVersion().public_bytes(Encoding.DER), b"")]
        sent.append(certificate)
        push(buf, certificate)

    monkeypatch.setattr(tls, "push_certificate", push_other_version)
    async with (
        open_host(OWN, listen=[QUIC]) as imposter,
        open_host(listen=[], limits=Limits(handshake_timeout_s=2.0)) as host,
        open_host(listen=[QUIC]) as good,
    ):
        with pytest.raises(Dep2pError):
            await host.dial(OWN.peer_id, imposter.listen_addrs())
        assert len(sent) == 1
        assert (await host.dial(good.peer_id, good.listen_addrs())).peer == good.peer_id
