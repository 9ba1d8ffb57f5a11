"""A network laboratory: hosts, switches and home routers in network namespaces of this machine. Linux and root only."""

import ctypes
import ipaddress
import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from tests.network.translation import Kind, Translator
from tests.network.wire import Weather, Wire

_numbers = itertools.count(1)
_CLONE_NEWNET: Final = 0x40000000
T = TypeVar("T")


def run_in(namespace: str, make: Callable[[], T]) -> T:
    """Return what ``make`` returns in a thread that is in the namespace: sockets that it makes belong there."""
    made: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with Path(f"/run/netns/{namespace}").open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
            made.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def _bound(address: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(5)
    made.bind((address, port))
    return made


def _setting(name: str, value: int) -> tuple[str, ...]:
    """The command that writes a setting of the kernel's network."""
    return "sh", "-c", f"echo {value} > /proc/sys/net/{name.replace('.', '/')}"


def why_not() -> str | None:
    """Return why no laboratory can be made here; None when one can."""
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun here"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip (Debian: iproute2) is not installed"
    name = f"dep2p-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@dataclass
class Switch:
    """A network segment."""

    namespace: str


@dataclass
class Host:
    """A machine in a namespace of its own, with one interface."""

    name: str
    namespace: str
    weather: Weather
    """That of its cable."""

    def command(self, *argv: str) -> list[str]:
        """The command line that runs ``argv`` on this machine."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def run(self, *argv: str, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine to its end."""
        return subprocess.run(self.command(*argv), capture_output=True, text=True, check=is_checked, timeout=30)

    def socket(self, address: str, port: int = 0) -> socket.socket:
        """Return a UDP socket of this machine, bound to one of its addresses, for use in this process."""
        return run_in(self.namespace, lambda: _bound(address, port))


@dataclass
class Router:
    """A home router: its inner network is a switch."""

    translator: Translator
    inside: Switch
    weather: Weather
    """That of its cable to the outer network."""


@dataclass
class Lab:
    """A laboratory. Everything that it has made ends with its block, also after a failure."""

    wire: Wire = field(default_factory=Wire)
    _prefix: str = field(default_factory=lambda: f"dl{os.getpid() % 100_000:x}{next(_numbers):x}")
    _namespaces: list[str] = field(default_factory=list[str])
    _devices: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes in the namespaces, and delete these with all devices. Idempotent."""
        for name in self._namespaces:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
        self.wire.close()
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._namespaces.clear()

    # What there is

    def switch(self, name: str) -> Switch:
        """Make a network segment."""
        made = Switch(self._namespace(name))
        self._in(made.namespace, "ip", "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        self._in(made.namespace, "ip", "link", "set", "br0", "up")
        return made

    def host(self, name: str, addresses: Sequence[str], switch: Switch, *, gateways: Sequence[str] = ()) -> Host:
        """Make a machine with these addresses (``192.0.2.1/24``); without gateways all others are on its segment."""
        namespace = self._namespace(name)
        weather = self._plug(namespace, "eth0", switch)
        self._assign(namespace, "eth0", addresses)
        for gateway in gateways:
            self._in(namespace, "ip", "route", "add", "default", "via", gateway)
        return Host(name, namespace, weather)

    def router(self, name: str, kind: Kind, outer: Switch, *, outside: Sequence[str], inside: Sequence[str]) -> Router:
        """Make a home router.

        ``outside``: its own addresses on the outer network, with their prefixes, and ``inside`` those on the inner one,
        which the machines there have as gateways. Of a kind other than none the first are the public ones.
        """
        namespace, lan = self._namespace(name), self.switch(f"{name}-lan")
        weather = self._plug(namespace, "wan", outer)
        self._plug(namespace, "lan", lan)
        self._assign(namespace, "lan", inside)
        for setting in ("ipv4.ip_forward", "ipv6.conf.all.forwarding"):
            self._in(namespace, *_setting(setting, 1))
        public = [each.partition("/")[0] for each in outside]
        translator = Translator(kind, public)
        if kind == "none":
            self._assign(namespace, "wan", outside)
            self._in(namespace, *_setting("ipv4.conf.wan.proxy_arp", 1))
            return Router(translator, lan, weather)
        # The kernel does ARP and routing; all that goes in or out passes the translation on its way. The public
        # addresses belong to no interface, or the kernel would answer by itself.
        device = self._device()
        self.wire.translation(device, translator.translate)
        self._run("ip", "link", "set", device, "netns", namespace, "name", "nat")
        self._in(namespace, "ip", "link", "set", "nat", "up")
        for interface in ("all", "nat", "wan"):
            self._in(namespace, *_setting(f"ipv4.conf.{interface}.rp_filter", 0))
        self._in(namespace, *_setting("ipv4.conf.wan.proxy_arp", 1))
        for each in outside:
            address, _, bits = each.partition("/")
            family = "-6" if ":" in address else "-4"
            network = f"{address}/{bits}"
            self._in(namespace, "ip", family, "route", "add", address, "dev", "nat")
            self._in(namespace, "ip", family, "route", "add", self._network(network), "dev", "wan")
            self._in(namespace, "ip", family, "rule", "add", "iif", "lan", "lookup", "100")
            self._in(namespace, "ip", family, "route", "add", "default", "dev", "nat", "table", "100")
            if family == "-6":
                self._in(namespace, *_setting("ipv6.conf.wan.proxy_ndp", 1))
                self._in(namespace, "ip", "-6", "neigh", "add", "proxy", address, "dev", "wan")
        return Router(translator, lan, weather)

    # How it is made

    @staticmethod
    def _network(address: str) -> str:
        return str(ipaddress.ip_interface(address).network)

    def _namespace(self, name: str) -> str:
        full = f"{self._prefix}-{name}"
        self._run("ip", "netns", "add", full)
        self._namespaces.append(full)
        self._in(full, "ip", "link", "set", "lo", "up")
        for scope in ("all", "default"):
            self._in(full, *_setting(f"ipv6.conf.{scope}.accept_dad", 0))
        return full

    def _device(self) -> str:
        self._devices += 1
        return f"{self._prefix}x{self._devices:x}"

    def _plug(self, namespace: str, interface: str, switch: Switch) -> Weather:
        """Lay a cable from a new interface to the switch."""
        near, far = self._device(), self._device()
        weather = self.wire.cable(near, far)
        self._run("ip", "link", "set", near, "netns", namespace, "name", interface)
        self._run("ip", "link", "set", far, "netns", switch.namespace)
        self._in(switch.namespace, "ip", "link", "set", far, "master", "br0", "up")
        self._in(namespace, "ip", "link", "set", interface, "up")
        return weather

    def _assign(self, namespace: str, interface: str, addresses: Sequence[str]) -> None:
        for address in addresses:
            no_dad = ["nodad"] if ":" in address else []
            self._in(namespace, "ip", "addr", "add", address, "dev", interface, *no_dad)

    def _in(self, namespace: str, *argv: str) -> None:
        self._run("ip", "netns", "exec", namespace, *argv)

    def _run(self, *argv: str) -> None:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stdout}{done.stderr}")
