"""The laboratory itself: routers behave as their kind, links have the weather that was set, and nothing is left."""

import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.network.daemons import wait_for
from tests.network.lab import Host, Lab
from tests.network.translation import Kind

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("network-lab"), pytest.mark.timeout(60)]


@contextmanager
def frames(host: Host, count: int) -> Generator[None]:
    """Leave the block when so many more frames have come to the host's cable."""
    wanted = host.weather.frames + count
    yield
    wait_for("the coming of the frames", lambda: host.weather.frames >= wanted)


def sent(source: socket.socket, destination: socket.socket) -> tuple[str, int]:
    """Send a datagram that arrives; return the sender that the receiver sees."""
    name = destination.getsockname()
    source.sendto(b"x", (name[0], name[1]))
    seen: tuple[str, int] = destination.recvfrom(100)[1][:2]
    return seen


@pytest.mark.parametrize("kind", ["cone", "restricted", "symmetric"])
@pytest.mark.parametrize("family", [4, 6])
def test_a_router_behaves_as_its_kind(lab: Lab, kind: Kind, family: int) -> None:
    outer = lab.switch("outer")
    v4 = family == 4
    router = lab.router(
        "r",
        kind,
        outer,
        outside=["203.0.113.9/24"] if v4 else ["2001:db8::9/64"],
        inside=["192.168.1.1/24"] if v4 else ["fd00:1::1/64"],
    )
    addresses = [f"203.0.113.{n}" if v4 else f"2001:db8::{n}" for n in (1, 2)]
    bits = 24 if v4 else 64
    hosts = [lab.host(f"p{n}", [f"{address}/{bits}"], outer) for n, address in enumerate(addresses, 1)]
    inner = "192.168.1.10" if v4 else "fd00:1::10"
    home = lab.host("home", [f"{inner}/{bits}"], router.inside, gateways=["192.168.1.1" if v4 else "fd00:1::1"])
    one, other_port = (hosts[0].socket(addresses[0]) for _ in range(2))
    two = hosts[1].socket(addresses[1])
    mine = home.socket(inner, 4001)
    with one, other_port, two, mine:
        seen = sent(mine, one)
        assert seen[0] == router.translator.public[0]
        expected = {
            "cone": [b"stranger", b"other port", b"answer"],
            "restricted": [b"other port", b"answer"],
            "symmetric": [b"answer"],
        }[kind]
        for sender, body in ((two, b"stranger"), (other_port, b"other port"), (one, b"answer")):
            sender.sendto(body, seen)
        assert sorted(mine.recv(100) for _ in expected) == sorted(expected)
        wait_for("the drops", lambda: router.translator.dropped == 3 - len(expected))
        assert (sent(mine, two) == seen) is (kind != "symmetric")


def test_a_router_without_translation_routes(lab: Lab) -> None:
    outer = lab.switch("outer")
    router = lab.router("r", "none", outer, outside=["203.0.113.9/24"], inside=["198.51.100.1/24"])
    public = lab.host("p", ["203.0.113.1/24"], outer, gateways=["203.0.113.9"])
    home = lab.host("home", ["198.51.100.10/24"], router.inside, gateways=["198.51.100.1"])
    with public.socket("203.0.113.1") as one, home.socket("198.51.100.10", 4001) as mine:
        assert sent(mine, one) == ("198.51.100.10", 4001)
        assert sent(one, mine)[0] == "203.0.113.1"


def test_weather_can_change_at_any_time(lab: Lab) -> None:
    switch = lab.switch("s")
    a, b = lab.host("a", ["192.0.2.1/24"], switch), lab.host("b", ["192.0.2.2/24"], switch)
    with a.socket("192.0.2.1") as one, b.socket("192.0.2.2") as two:
        sent(one, two)
        sent(two, one)
        a.weather.delay_s = 0.05
        began = time.monotonic()
        sent(one, two)
        sent(two, one)
        assert time.monotonic() - began >= 0.1
        a.weather.delay_s = 0.0

        a.weather.loss = 0.5
        with frames(a, 200):
            for _ in range(200):
                one.sendto(b"maybe", two.getsockname())
        a.weather.loss = 0.0
        one.sendto(b"last", two.getsockname())
        arrived = 0
        while two.recv(100) != b"last":
            arrived += 1
        assert 50 < arrived < 150  # more than seven standard deviations on each side

        a.weather.is_cut = True
        with frames(a, 1):
            one.sendto(b"cut", two.getsockname())
        a.weather.is_cut = False
        one.sendto(b"healed", two.getsockname())
        assert two.recv(100) == b"healed"

        a.weather.bytes_per_s = 50_000
        began = time.monotonic()
        for _ in range(20):
            one.sendto(bytes(1_000), two.getsockname())
        for _ in range(20):
            two.recv(2_000)
        assert time.monotonic() - began >= 0.3


def test_nothing_is_left_of_a_laboratory() -> None:
    with Lab() as lab:
        switch = lab.switch("s")
        host = lab.host("a", ["192.0.2.1/24"], switch)
        process = subprocess.Popen(host.command("sleep", "600"))
        names = [host.namespace, switch.namespace]
    assert process.wait(10) == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in names)
