"""TLS to the control API of another machine: the certificate is known before a token is sent."""

import hashlib
import hmac
import ssl
from dataclasses import dataclass
from functools import cache

import anyio
import anyio.abc
from anyio.streams.tls import TLSAttribute, TLSStream

from dep2p.config.contexts import SYSTEM_CA
from dep2p.control_api.errors import ControlError
from dep2p.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsTrust:
    """By what the daemon's certificate is known: its fingerprint, or the authority that signed it."""

    fingerprint: str = ""
    """SHA-256 of the certificate in 64 lower-case hex digits."""
    ca_file: str = ""
    """PEM file of the authority, or "system"."""

    async def secure(self, stream: anyio.abc.ByteStream, host: str) -> anyio.abc.ByteStream:
        """Return the encrypted stream. Raises ControlError D1011 for another certificate, OSError."""
        try:
            secured = await TLSStream.wrap(
                stream, hostname=host, ssl_context=_context(self.ca_file), standard_compatible=False
            )
        except ssl.SSLCertVerificationError as error:
            await anyio.aclose_forcefully(stream)
            raise _wrong(f"the certificate of {host} is not trusted: {error.verify_message}") from None
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise
        if self.fingerprint:
            certificate = secured.extra(TLSAttribute.peer_certificate_binary) or b""
            found = hashlib.sha256(certificate).hexdigest()
            if not hmac.compare_digest(found, self.fingerprint):
                await anyio.aclose_forcefully(secured)
                raise _wrong(f"the certificate of {host} has the fingerprint {found}, not {self.fingerprint}")
        return secured


def _wrong(detail: str) -> ControlError:
    return ControlError({"code": "D1011", "status": 495, "detail": detail})


@cache
def _context(ca_file: str) -> ssl.SSLContext:
    """A context that checks by this authority. Without one it checks nothing: the caller checks the fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not ca_file:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca_file == SYSTEM_CA:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot use the CA file {ca_file}: {error.strerror or error}", "D1004") from None
    return context
