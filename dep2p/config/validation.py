"""Checks of configuration values beyond their types: ranges, addresses, files, loopback."""

import ipaddress
from collections.abc import Callable
from typing import Final

from dep2p.config.sections import QUEUE_CHECKS, check_size
from dep2p.config.trace import TRACE_CHECKS
from dep2p.config.values import ConfigKey, nearest
from dep2p.encoding.shapes import is_sequence
from dep2p.errors import ConfigError

_ADDRESS_STARTS: Final = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_MAY_BE_ZERO: Final = (
    "compress_bytes_min",
    "requests_per_peer_per_s",
    "notifies_per_peer_per_s",
    "liveness_interval_s",
    "link_idle_timeout_s",
    "pubsub_publish_per_s",
    "queue_changes_per_peer_per_s",
    "queue_messages_per_peer_per_s",
)


def check(key: ConfigKey, value: object, where: str) -> None:
    """Check a value of the right type. Raises :class:`ConfigError` that starts with ``where``."""
    if key.section == "limits":
        assert isinstance(value, int | float)
        _check_limit(key, value, where)
    specific = _CHECKS.get(key.path)
    if specific is not None:
        specific(value, where)


def _check_limit(key: ConfigKey, value: float, where: str) -> None:
    if value < 0 or (value == 0 and key.name not in _MAY_BE_ZERO):
        least = "0 or more" if key.name in _MAY_BE_ZERO else "greater than 0"
        raise ConfigError(f"{where}: {value} is out of range: it must be {least}. The default is {key.default}.")


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if is_sequence(value) else []


def _check_addresses(value: object, where: str) -> None:
    for addr in _texts(value):
        _check_address(addr, where)


def _check_peers(value: object, where: str) -> None:
    for addr in _texts(value):
        _check_address(addr, where)
        if "/p2p/" not in addr:
            raise ConfigError(
                f'{where}: "{addr}" does not say which peer is there. It must end in /p2p/PEER: copy it whole from '
                "`dep2p id` on that node."
            )


def _check_address(addr: str, where: str) -> None:
    parts = addr.split("/")
    if len(parts) < 3 or parts[0] != "":
        raise ConfigError(f'{where}: "{addr}" is not an address. Write it like "/ip4/0.0.0.0/tcp/4001".')
    if parts[1] not in _ADDRESS_STARTS:
        raise ConfigError(f'{where}: "{addr}": an address cannot start with /{parts[1]}; {_near(parts[1])}')
    if parts[1] in ("ip4", "ip6"):
        try:
            (ipaddress.IPv4Address if parts[1] == "ip4" else ipaddress.IPv6Address)(parts[2])
        except ValueError as error:
            raise ConfigError(f'{where}: "{addr}": {error}. Write it like "/ip4/0.0.0.0/tcp/4001".') from None
    if len(parts) >= 4 and parts[3] in ("tcp", "udp"):
        port = parts[4] if len(parts) > 4 else ""
        if not port.isdecimal() or int(port) > 65_535:
            raise ConfigError(f'{where}: "{addr}": {port or "nothing"} is not a port. Write 0 to 65535.')
    elif parts[1] != "dnsaddr":
        raise ConfigError(f'{where}: "{addr}" names no port. Write it like "/ip4/0.0.0.0/tcp/4001".')


def _near(start: str) -> str:
    return nearest(start, _ADDRESS_STARTS)


def _check_filled(value: object, where: str) -> None:
    if not value:
        raise ConfigError(f'{where}: the text is empty. Write a path, or "auto".')


def _check_tcp(value: object, where: str) -> None:
    if value:
        split_loopback(str(value), where, instead="or set [control] tls to be reached from other machines")


def _check_tls(value: object, where: str) -> None:
    if value:
        host, _ = split_address(str(value), where)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(
                f'{where}: "{host}" is no address of this machine in digits. Write it like "0.0.0.0:4781".'
            ) from None


def _check_nsq(value: object, where: str) -> None:
    if value:
        split_loopback(str(value), where, what="NSQ's protocol, which asks for no password,", port=4150)


def split_address(text: str, where: str, *, port: int = 4781) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; ``port`` is for the example in the error. Raises :class:`ConfigError`."""
    host, _, given = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_text = host.isascii() and host.isprintable() and not set(host) & set(" /@[]?#")
    if not host or not is_text or not (given.isascii() and given.isdecimal()) or int(given[:6]) > 65_535:
        raise ConfigError(f'{where}: "{text[:200]}" is not HOST:PORT. Write it like "127.0.0.1:{port}".')
    return host, int(given)


_BY_PROXY: Final = "and reach it from other machines through ssh or a reverse proxy of yours"
_API: Final = "the control API without TLS"


def split_loopback(
    text: str, where: str, *, what: str = _API, port: int = 4780, instead: str = _BY_PROXY
) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, where HOST is a loopback address. ``what`` listens there; ``port`` and
    ``instead`` are for the error.

    Raises :class:`ConfigError` for any other host: a program that reaches the control API commands the whole node.
    """
    host, number = split_address(text, where, port=port)
    host = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"{where}: {host} is not a loopback address, and {what} is never on a network. Write "
            f'"127.0.0.1:{port}", {instead}.'
        )
    return host, number


def _check_rate(value: object, where: str) -> None:
    if not 0 <= float(str(value)) < float("inf"):
        raise ConfigError(f"{where}: {value} is out of range: a rate is 0, for no limit, or more.")


_NSQ_SIZES: Final = ("connections_max", "memory_bytes_max", "publishes_pending_max", "topics_max")
_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "node.key_file": _check_filled,
    "node.listen": _check_addresses,
    "node.advertise": _check_addresses,
    "node.bootstrap": _check_peers,
    "node.rendezvous": _check_peers,
    "control.socket": _check_filled,
    "control.token_file": _check_filled,
    "control.tcp": _check_tcp,
    "control.tls": _check_tls,
    "control.tls_cert_file": _check_filled,
    "control.tls_key_file": _check_filled,
    "nsq.listen": _check_nsq,
    "nsq.http": _check_nsq,
    **{f"nsq.{name}": check_size for name in _NSQ_SIZES},
    **{f"nsq.{name}": _check_rate for name in ("topics_per_s", "messages_per_s")},
    **QUEUE_CHECKS,
    **TRACE_CHECKS,
}
