"""mDNS on the local network by https://github.com/libp2p/specs/blob/master/discovery/mdns.md, with zeroconf."""

import logging
import secrets
import socket
from collections.abc import Callable, Iterable
from functools import partial

import trio
from zeroconf import ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from dep2p.host.addresses import parse_address
from dep2p.host.discovery.interface import Emit, HostView
from dep2p.protocols.addresses.dialable import addrs_for_others
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

SERVICE = "_p2p._udp.local."
_TXT_BYTES_MAX = 255
_ADDRS_MAX = 16
_FOUND_QUEUE_MAX = 256
_QUERY_TIMEOUT_MS = 3_000
_REFRESH_S = 5.0
_REPEAT_S = 1_200.0
"""Seconds between two reports of a service that is there: names and addresses that no source repeats expire."""
_SERVICES_MAX = 1_024
"""Services whose reports are repeated; the one heard of first gives way."""


class MdnsDiscovery:
    """Announces this host on the local network and finds others. zeroconf runs in threads of its own."""

    name = "mdns"

    async def run(self, host: HostView, emit: Emit) -> None:
        found, incoming = trio.open_memory_channel[tuple[str, list[str]]](_FOUND_QUEUE_MAX)
        token = trio.lowlevel.current_trio_token()
        zeroconf = await trio.to_thread.run_sync(Zeroconf)
        try:
            listener = _Listener(token, found)
            await trio.to_thread.run_sync(partial(ServiceBrowser, zeroconf, SERVICE, listener=listener))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._announce, zeroconf, host)
                services = MdnsServices(partial(_report, host, emit))
                nursery.start_soon(services.repeat)
                async for name, texts in incoming:
                    services.heard(name, texts)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(zeroconf.close)

    async def _announce(self, zeroconf: Zeroconf, host: HostView) -> None:
        """Keep the announced addresses equal to those that the host listens on."""
        name = secrets.token_hex(16)
        announced: list[str] = []
        info: ServiceInfo | None = None
        while True:
            addrs = [text for text in addrs_for_others(host.listen_addrs()) if _suits(text)][:_ADDRS_MAX]
            if addrs != announced:
                fresh = _service_info(name, addrs)
                change = zeroconf.register_service if info is None else zeroconf.update_service
                await trio.to_thread.run_sync(change, fresh)
                announced, info = addrs, fresh
            await trio.sleep(_REFRESH_S)


def _report(host: HostView, emit: Emit, texts: list[str]) -> None:
    for peer, addrs in _by_peer(texts).items():
        if peer != host.peer_id:
            emit(peer, addrs)


class MdnsServices:
    """The services that are there, of which zeroconf tells once: each is reported again until it is gone."""

    def __init__(self, report: Callable[[list[str]], None]) -> None:
        self._report = report
        self._services: dict[str, list[str]] = {}

    def heard(self, name: str, texts: list[str]) -> None:
        """Report a service with its addresses, which is new or changed; without any it is gone."""
        self._services.pop(name, None)
        if texts:
            if len(self._services) >= _SERVICES_MAX:
                del self._services[next(iter(self._services))]
            self._services[name] = texts
            self._report(texts)

    async def repeat(self) -> None:
        while True:
            await trio.sleep(_REPEAT_S)
            for texts in list(self._services.values()):
                self._report(texts)


class _Listener(ServiceListener):
    """Called in zeroconf's thread."""

    def __init__(self, token: trio.lowlevel.TrioToken, found: trio.MemorySendChannel[tuple[str, list[str]]]) -> None:
        self._token = token
        self._found = found

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        info = zc.get_service_info(type_, name, timeout=_QUERY_TIMEOUT_MS)
        if info is None:
            return
        texts = [
            value.decode("ascii", "replace")
            for key, value in list(info.properties.items())[:_ADDRS_MAX]
            if key.startswith(b"dnsaddr") and value
        ]
        self._pass_on(name, texts)

    def _pass_on(self, name: str, texts: list[str]) -> None:
        try:
            self._token.run_sync_soon(self._report, name, texts)
        except trio.RunFinishedError:
            logger.debug("mDNS heard of %r after the end", name)

    def _report(self, name: str, texts: list[str]) -> None:
        try:
            self._found.send_nowait((name, texts))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            logger.debug("an mDNS answer is dropped: too many at a time")

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Its addresses are not repeated, and expire."""
        self._pass_on(name, [])


def _suits(text: str) -> bool:
    address = parse_address(text)
    return address.transport in ("tcp", "quic") and address.family != "dns" and len(text) + 8 <= _TXT_BYTES_MAX


def _service_info(name: str, addrs: list[str]) -> ServiceInfo:
    ips = dict.fromkeys((parse_address(text).family, parse_address(text).host) for text in addrs)
    ports = [parse_address(text).port for text in addrs] or [4001]
    return ServiceInfo(
        type_=SERVICE,
        name=f"{name}.{SERVICE}",
        port=ports[0],
        properties={f"dnsaddr{index or ''}": text for index, text in enumerate(addrs)},
        server=f"{name}.local.",
        addresses=[socket.inet_pton(socket.AF_INET if kind == "ip4" else socket.AF_INET6, ip) for kind, ip in ips],
    )


def _by_peer(texts: Iterable[str]) -> dict[PeerId, list[str]]:
    found: dict[PeerId, list[str]] = {}
    for text in texts:
        try:
            address = parse_address(text)
        except ValueError as error:
            logger.debug("address heard by mDNS not used: %s", error)
            continue
        if address.peer is not None and address.transport != "circuit":
            found.setdefault(address.peer, []).append(address.text)
    return found
