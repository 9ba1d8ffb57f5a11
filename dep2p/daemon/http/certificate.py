"""The certificate of the control API over TLS: made at the first start, or the one that the configuration names."""

import datetime
import os
import ssl
import stat
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dep2p.daemon.problems import Problem

_VALID_DAYS: Final = 36_500
"""Programs know the certificate by its fingerprint, which has no end of its own."""
_CLOCK_MARGIN: Final = datetime.timedelta(days=1)


def make_certificate(cert_file: Path, key_file: Path) -> None:
    """Make a key (mode 0600) and a certificate signed by it, unless there is a certificate.

    Raises :class:`Problem` D3005.
    """
    if cert_file.exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dep2p control API")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_MARGIN)
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        _write(key_file, secret)  # first: a certificate without its key would stop every later start
        _write(cert_file, certificate.public_bytes(Encoding.PEM))
    except OSError as error:
        raise Problem("D3005", f"cannot make the certificate {cert_file}: {error.strerror or error}") from None


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_tls_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return a context for servers, TLS 1.3 only. Raises :class:`Problem` D3005."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a ticket behind the handshake would make an idle connection look as if an answer came
    context.set_alpn_protocols(["http/1.1"])
    try:
        if stat.S_IMODE(key_file.stat().st_mode) & 0o077:
            raise Problem("D3005", f"others may read the private key {key_file}: chmod 600 it")
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise Problem("D3005", f"cannot use the certificate {cert_file} with {key_file}: {error}") from None
    return context


def _no_password() -> bytes:
    raise ValueError("the key has a password; store it without one, mode 0600")
