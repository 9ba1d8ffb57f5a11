"""Connection traps of py-libp2p, against real hosts: leaks, lock-outs, limits, ends."""

import os
import signal
import socket
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
import trio

from dep2p.errors import PeerNotFoundError, StreamClosedError
from dep2p.host.addresses import parse_address
from dep2p.host.connections import swarm
from dep2p.host.connections.upgrade import UpgradeError
from dep2p.host.interface import ByteStream, PeerConnected, PeerDisconnected
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.testing import FaultProxy

pytestmark = pytest.mark.real


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def port_of(host: Any) -> int:
    return int(host.listen_addrs()[0].split("/")[4])


async def test_300_connections_in_a_row_leave_no_task_slot_or_file(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (one, other):
        await one.dial(other.peer_id, other.listen_addrs())
        await one.disconnect(other.peer_id)
        await eventually(lambda: not other.connections())
        tasks_before, files_before = tasks(), len(os.listdir("/proc/self/fd"))
        for _ in range(300):  # upstream: none is accepted after the 250th
            await one.dial(other.peer_id, other.listen_addrs())
            await one.disconnect(other.peer_id)
        await eventually(lambda: not other.connections() and tasks() <= tasks_before)
        assert len(os.listdir("/proc/self/fd")) <= files_before
        assert other.counters()["inbound_connections"] == 301


async def test_silent_connections_do_not_lock_out_an_honest_peer(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        with ExitStack() as stack:
            for _ in range(150):
                stack.enter_context(socket.create_connection(("127.0.0.1", port_of(other))))
            with trio.fail_after(3):
                await one.dial(other.peer_id, other.listen_addrs())
            counts = other.counters()
        assert counts["inbound_dropped_pending_max"] >= 150 - 128
        assert counts["inbound_pending"] <= 128


async def test_silent_connection_is_closed_after_the_handshake_time(open_host: Any) -> None:
    async with open_host(limits=Limits(handshake_timeout_s=0.3)) as host:
        stream = await trio.open_tcp_stream("127.0.0.1", port_of(host))
        async with stream:
            with trio.fail_after(5):
                while await stream.receive_some():
                    pass
        counts = host.counters()
        assert counts["inbound_pending"] == 0
        assert counts.get("upgrade_security_timeout", 0) + counts.get("inbound_handshake_timeout", 0) == 1


JUNK = [
    b"",
    b"\x00" * 64,
    os.urandom(512),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 32,
    b"\x13/multistream/1.0.0\n",
    b"\x13/multistream/1.0.0\n" + os.urandom(200),
    b"\x13/multistream/1.0.0\n\x07/noise\n",
    b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\xff\xff" + os.urandom(1000),
    b"\x13/multistream/1.0.0\n\x05\xff\xfe\xfd\xfc\n",
]


async def test_junk_connections_leave_the_host_as_it_was(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts(Limits(handshake_timeout_s=1.0)) as (one, other):
        before = tasks()
        for junk in JUNK * 3:
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(other))
            async with stream:
                await stream.send_all(junk) if junk else None
        await eventually(lambda: other.counters()["inbound_pending"] == 0 and tasks() <= before)
        await one.dial(other.peer_id, other.listen_addrs())
        assert other.counters()["inbound_handshake_failed"] >= 27


async def test_limit_of_connections_refuses_and_counts(open_host: Any, eventually: Any) -> None:
    async with open_host(limits=Limits(connections_max=2)) as host:
        async with open_host() as one, open_host() as two, open_host() as three:
            await one.dial(host.peer_id, host.listen_addrs())
            await two.dial(host.peer_id, host.listen_addrs())
            await eventually(lambda: len(host.connections()) == 2)
            with pytest.raises(PeerNotFoundError):
                await three.dial(host.peer_id, host.listen_addrs(), timeout_s=2)
            assert host.counters()["inbound_refused_connections_max"] == 1
            with pytest.raises(PeerNotFoundError, match="connections_max"):
                await host.dial(three.peer_id, three.listen_addrs())
            await two.disconnect(host.peer_id)
            await eventually(lambda: len(host.connections()) == 1)
            await three.dial(host.peer_id, host.listen_addrs())  # the slot came back


async def test_inbound_connections_leave_space_for_our_own_dials(open_host: Any, eventually: Any) -> None:
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(limits=Limits(connections_max=8)))
        others = [await stack.enter_async_context(open_host()) for _ in range(9)]
        for other in others[:7]:
            await other.dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: len(host.connections()) == 7)
        with pytest.raises(PeerNotFoundError):
            await others[7].dial(host.peer_id, host.listen_addrs(), timeout_s=2)
        await host.dial(others[8].peer_id, others[8].listen_addrs())


async def test_connections_of_no_use_make_space_and_those_in_use_do_not(
    open_host: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else idle strangers, or strangers that a discovery source names, lock every member out forever."""
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(limits=Limits(connections_max=4)))
        member, wanted, *strangers = [await stack.enter_async_context(open_host()) for _ in range(6)]
        await member.dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: len(host.connections()) == 1)
        (needed,) = host.connections()
        host.protect(needed, "realm")
        host.keep_connected(wanted.peer_id, "test")
        await host.dial(wanted.peer_id, wanted.listen_addrs())
        for count, stranger in enumerate(strangers[:2]):
            await stranger.dial(host.peer_id, host.listen_addrs())
            await eventually(lambda: len(host.connections()) == 3 + count)  # noqa: B023 - waited for at once
        with pytest.raises(PeerNotFoundError):  # all are young or of use
            await strangers[2].dial(host.peer_id, host.listen_addrs(), timeout_s=2)
        monkeypatch.setattr(swarm, "UNPROTECTED_S", 0.0)
        await strangers[2].dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: bool(host.connections(strangers[2].peer_id)))
        await host.dial(strangers[3].peer_id, strangers[3].listen_addrs())
        assert host.counters()["connections_replaced"] == 2
        assert not any(host.connections(stranger.peer_id) for stranger in strangers[:2])
        assert host.connections(member.peer_id) == [needed] and host.connections(wanted.peer_id)
        host.unprotect(needed, "realm")
        await eventually(lambda: strangers[1].connections() == [])
        await strangers[1].dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: host.connections(member.peer_id) == [])


async def test_a_client_of_a_relay_makes_space_after_those_of_no_use(
    open_host: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "UNPROTECTED_S", 0.0)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(relay="server", limits=Limits(connections_max=3)))
        client = await stack.enter_async_context(open_host(relay="client", listen=[]))
        await client.dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: bool(client.listen_addrs()))
        for _ in range(4):
            stranger = await stack.enter_async_context(open_host())
            await stranger.dial(host.peer_id, host.listen_addrs())
            await eventually(lambda: bool(host.connections(stranger.peer_id)))  # noqa: B023 - waited for at once
        assert host.counters()["connections_replaced"] == 2
        assert host.connections(client.peer_id) and client.counters().get("relay_reservation_lost", 0) == 0


async def test_at_the_limit_per_peer_the_newest_connection_replaces_the_oldest(open_host: Any, eventually: Any) -> None:
    """The older ones may be dead without a word: a peer that restarts is never locked out by itself."""
    identity = Identity.generate()
    async with open_host(limits=Limits(connections_per_peer_max=1)) as host:
        # Two hosts with one identity are one peer.
        async with open_host(identity) as first, open_host(identity) as second:
            old = await first.dial(host.peer_id, host.listen_addrs())
            await eventually(lambda: len(host.connections()) == 1)
            new = await second.dial(host.peer_id, host.listen_addrs())
            await eventually(lambda: old.is_closed)
            assert host.counters()["connections_replaced_per_peer_max"] == 1
            assert len(host.connections(identity.peer_id)) == 1 and not new.is_closed


async def test_nodes_that_dial_each_other_at_once_settle_on_one_connection(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (one, other):
        for host, peer in ((one, other), (other, one)):
            host.add_addrs(peer.peer_id, peer.listen_addrs(), ttl_s=60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.dial, other.peer_id)
            nursery.start_soon(other.dial, one.peer_id)
        await trio.sleep(0.1)
        await eventually(lambda: len(one.connections()) == len(other.connections()) == 1)
        (left,), (right,) = one.connections(), other.connections()
        assert left.channel_binding == right.channel_binding
        assert left.direction == ("outbound" if one.peer_id < other.peer_id else "inbound")
        assert not left.is_superseded and not right.is_superseded


async def test_a_silent_connection_ends_within_seconds_of_a_newer_one(open_host: Any, eventually: Any) -> None:
    identity = Identity.generate()
    async with FaultProxy.open() as proxy, open_host() as host, open_host(identity) as first:
        port = await proxy.forward("127.0.0.1", port_of(host))
        old = await first.dial(host.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
        await eventually(lambda: len(host.connections()) == 1)
        proxy.hold()  # nothing passes any more, and neither end hears of it
        async with open_host(identity) as second:
            started = trio.current_time()
            await second.dial(host.peer_id, host.listen_addrs())
            await eventually(lambda: host.counters().get("connections_replaced_silent") == 1)
            assert trio.current_time() - started < 3.0
            assert len(host.connections(identity.peer_id)) == 1
        assert not old.is_closed  # the far end of it noticed nothing either


async def test_both_sides_learn_of_an_end_once_and_at_once(two_hosts: Any, event_log: Any) -> None:
    async with two_hosts() as (one, other):
        log_one, log_other = event_log(one), event_log(other)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        await log_other.wait(PeerConnected)
        with trio.fail_after(1):
            assert await one.disconnect(other.peer_id)
            ended = await log_other.wait(PeerDisconnected)
        assert ended.last and ended.reason
        assert connection.is_closed
        await connection.close()
        assert not await one.disconnect(other.peer_id)
        assert len(log_one.of(PeerDisconnected)) == len(log_other.of(PeerDisconnected)) == 1


async def test_remote_id_is_the_authenticated_one(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        seen: list[str] = []

        async def handler(stream: ByteStream) -> None:
            seen.append(stream.connection.peer)
            assert stream.connection.direction == "inbound"
            assert stream.connection.remote_addr.startswith("/ip4/127.0.0.1/tcp/")
            await stream.close()

        other.set_stream_handler("/who/1", handler)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        stream = await connection.open_stream("/who/1")
        assert await stream.read() == b""
        assert seen == [one.peer_id]


async def test_handlers_of_a_departed_peer_end(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (one, other):
        waiting = 0

        async def handler(stream: ByteStream) -> None:
            nonlocal waiting
            waiting += 1
            try:
                await trio.sleep_forever()
            finally:
                waiting -= 1

        other.set_stream_handler("/wait/1", handler)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        for _ in range(50):
            await connection.open_stream("/wait/1")
        await eventually(lambda: waiting == 50)
        await one.disconnect(other.peer_id)
        await eventually(lambda: waiting == 0)


async def test_cancelled_close_still_closes(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts(Limits(connections_per_peer_max=1)) as (one, other):
        for _ in range(10):
            connection = await one.dial(other.peer_id, other.listen_addrs())
            with trio.move_on_after(0):
                await connection.close()
            assert connection.is_closed
            await eventually(lambda: not other.connections() and not one.connections())


async def test_connection_closed_by_its_own_handler(two_hosts: Any, event_log: Any) -> None:
    async with two_hosts() as (one, other):

        async def handler(stream: ByteStream) -> None:
            await stream.connection.close()

        other.set_stream_handler("/bye/1", handler)
        log = event_log(one)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        try:
            await connection.open_stream("/bye/1")
        except StreamClosedError:
            pass  # the end can overtake the agreement on the protocol
        await log.wait(PeerDisconnected, timeout_s=2)


async def test_killed_peer_is_noticed(open_host: Any, event_log: Any, peer_process: Any) -> None:
    remote = peer_process()
    async with open_host() as host:
        log = event_log(host)
        connection = await host.dial(remote.peer, [remote.addr])
        stream = await connection.open_stream("/echo/1")
        remote.signal(signal.SIGKILL)
        await log.wait(PeerDisconnected, timeout_s=5)
        with pytest.raises(StreamClosedError):
            await stream.read()


async def test_stopped_peer_is_noticed_within_the_liveness_limits(
    open_host: Any, event_log: Any, peer_process: Any
) -> None:
    remote = peer_process()
    async with open_host(limits=Limits(liveness_interval_s=0.5, liveness_timeout_s=1.0)) as host:
        log = event_log(host)
        connection = await host.dial(remote.peer, [remote.addr])
        stream = await connection.open_stream("/echo/1")
        remote.signal(signal.SIGSTOP)
        try:
            async with trio.open_nursery() as nursery:

                async def write_without_end() -> None:
                    with pytest.raises(StreamClosedError):
                        while True:
                            await stream.write(bytes(65_536))

                nursery.start_soon(write_without_end)  # upstream: blocks forever
                ended = await log.wait(PeerDisconnected, timeout_s=4)
            assert ended.last
        finally:
            remote.signal(signal.SIGCONT)


async def test_restart_with_the_same_identity_is_reachable_at_once(open_host: Any, peer_process: Any) -> None:
    seed = os.urandom(32)
    identity = Identity(seed)
    async with open_host() as host:
        remote = peer_process(seed.hex())
        await host.dial(identity.peer_id, [remote.addr])
        port = remote.addr.split("/")[4]
        remote.kill()
        again = peer_process(seed.hex(), f"/ip4/127.0.0.1/tcp/{port}")
        assert again.peer == identity.peer_id
        with trio.fail_after(10):
            while True:
                try:
                    await (await host.dial(identity.peer_id, [again.addr])).open_stream("/echo/1")
                    break
                except (StreamClosedError, PeerNotFoundError):
                    await trio.sleep(0.05)


async def test_peer_with_our_own_identity_is_refused_and_reported_to_the_operator(
    open_host: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A copied key file: everything above takes a connection's peer for somebody else."""
    identity = Identity.generate()
    async with open_host(identity) as one, open_host(identity, listen=[]) as copy:
        connect_once = copy._transports.connect_once
        for _ in range(2):
            with pytest.raises((StreamClosedError, UpgradeError)):
                await connect_once(parse_address(one.listen_addrs()[0]), identity.peer_id)
        await eventually(lambda: one.counters().get("inbound_refused_own_identity") == 2)
        assert one.connections() == [] == copy.connections()
        assert sum("own identity" in record.message for record in caplog.records) == 2  # one line of each host
