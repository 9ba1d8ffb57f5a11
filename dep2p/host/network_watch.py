"""Notices when this machine's network changes: addresses, routes, interfaces, and a sleep.

Linux tells of each change by rtnetlink (https://man7.org/linux/man-pages/man7/rtnetlink.7.html); elsewhere, and where
that is forbidden, this module looks every few seconds.
"""

import logging
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import ifaddr
import trio

from dep2p.host.counters import Counters
from dep2p.host.scopes import new_scope

logger: logging.Logger = logging.getLogger("dep2p.host")

LOOK_S = 5.0
"""Seconds between two looks without a cause."""
SETTLE_S = 0.3
"""Seconds from the first news of a change to the look: several come together."""
PAUSE_S = 2.0
"""Least seconds between two reports: a host of containers changes its interfaces all the time."""
SLEPT_S = 5.0
"""Seconds from which on a machine, or this process, counts as having slept."""
_GROUPS: Final = 0x1 | 0x10 | 0x40 | 0x100 | 0x400  # RTMGRP_: LINK, IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE
_ROUTES_MAX: Final = 1_024
_NEWS_BYTES: Final = 65_536
_NEWS_MAX: Final = 1_000

OnChange = Callable[[str], None]
"""Takes what has changed, in words."""
State = frozenset[str]


def _routes(path: str, columns: tuple[int, ...]) -> set[str]:
    found: set[str] = set()
    with suppress(OSError), Path(path).open() as file:
        for number, line in enumerate(file):
            fields = line.split()
            if number < _ROUTES_MAX and len(fields) > max(columns):
                found.add(" ".join(fields[column] for column in columns))
    return found


def network_state() -> State:
    """Return the addresses of this machine that others may use, and its routes, in words."""
    found: set[str] = set()
    with suppress(OSError):
        for adapter in ifaddr.get_adapters():
            for ip in adapter.ips:
                address = ip_address(ip.ip if isinstance(ip.ip, str) else ip.ip[0])
                if not address.is_loopback and not address.is_link_local:
                    found.add(f"address {address}")
    # Columns by proc(5): interface, destination, gateway, mask; of IPv6 destination, its length, next hop, device.
    found |= {f"route {route}" for route in _routes("/proc/net/route", (0, 1, 2, 7)) if not route.startswith("Iface")}
    found |= {
        f"route {route}" for route in _routes("/proc/net/ipv6_route", (0, 1, 4, 9)) if not route.startswith("fe80")
    }
    return frozenset(found)


def difference(before: State, after: State) -> str:
    """Return what has changed, in words for the log; "" for nothing."""
    parts: list[str] = []
    for verb, some in (("gone", before - after), ("new", after - before)):
        addresses = sorted(text.removeprefix("address ") for text in some if text.startswith("address "))
        if addresses:
            parts.append(f"{verb}: {', '.join(addresses[:4])}{' …' if len(addresses) > 4 else ''}")
    if not parts and before != after:
        parts.append("routes")
    return "; ".join(parts)


def _news() -> socket.socket | None:
    """Return a socket that becomes readable when something changes; None where there is none."""
    if sys.platform != "linux":
        return None
    sock: socket.socket | None = None
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        sock.setblocking(False)
        sock.bind((0, _GROUPS))
    except OSError as error:
        logger.debug("no news of the network (%s): it is looked at every %g s", error, LOOK_S)
        if sock is not None:
            sock.close()
        return None
    return sock


def _drop(news: socket.socket) -> None:
    """Read what has come: the state says what there is now."""
    for _ in range(_NEWS_MAX):
        try:
            news.recv(_NEWS_BYTES)
        except BlockingIOError:
            return
        except OSError:
            continue  # more came than the kernel keeps


def _asleep_s() -> float:
    """Seconds that this machine has slept since its start; 0.0 where that is not known."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class NetworkWatch:
    """Calls ``on_change`` in the watch's own task.

    Example::

        watch = NetworkWatch(lambda what: print("changed:", what), counters)
        nursery.start_soon(watch.run)
    """

    def __init__(self, on_change: OnChange, counters: Counters, look: Callable[[], State] = network_state) -> None:
        self._on_change = on_change
        self._counters = counters
        self._look = look
        self._state: State = frozenset()

    async def run(self) -> None:
        """Watch until cancelled."""
        news = _news()
        self._state = self._look()
        try:
            while True:
                slept_s, due_s = _asleep_s(), trio.current_time() + LOOK_S
                has_news = news is None
                with new_scope(due_s):
                    has_news = await self._wait(news)
                late_s = max(trio.current_time() - due_s, _asleep_s() - slept_s)
                what = self._changed() if has_news or late_s >= SLEPT_S else ""
                if late_s >= SLEPT_S:
                    what = f"a pause of {late_s:.0f} s{'; ' if what else ''}{what}"
                if what:
                    self._counters.add("network_changes")
                    logger.info("the network has changed (%s): connections are tried, lost peers dialed", what)
                    self._on_change(what)
                    await trio.sleep(PAUSE_S)
        finally:
            if news is not None:
                news.close()

    async def _wait(self, news: socket.socket | None) -> bool:
        """Return True once the kernel has sent news; without a socket for them, do not return."""
        if news is None:
            await trio.sleep_forever()
        else:
            await trio.lowlevel.wait_readable(news)
            with new_scope(trio.current_time() + SETTLE_S):
                await trio.sleep_forever()
            _drop(news)
        return True

    def _changed(self) -> str:
        before = self._state
        self._state = self._look()
        return difference(before, self._state)
