"""Memberships find each other, stay in step, and end."""

from pathlib import Path

import pytest
import trio
import trio.testing

from dep2p.errors import NotInRealmError, NotMemberError, PeerNotFoundError, RequestTimeoutError
from dep2p.host.interface import Connection
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.realm.member_record import LIFE_MS, SKEW_MS
from dep2p.protocols.realm.peer_selection import PROBES_MAX
from dep2p.realm.credentials import Realm
from dep2p.realm.interface import MemberEvent, RealmGate
from tests.realm.realm_nodes import OTHER, TEAM, WALL_S, Node, Nodes, realm_nodes, until

Clock = trio.testing.MockClock
FAST = 1000


def fast_clock_s() -> float:
    """A day of wall clock in 86 s."""
    return WALL_S + FAST * trio.current_time()


async def pair(nodes: Nodes) -> tuple[Node, Node]:
    a, b = await nodes.add(), await nodes.add()
    await a.connect(b)
    await until(lambda: b.membership.verified_connection(a.host.peer_id) is not None)
    return a, b


async def test_two_nodes_verify_each_other_and_report_features(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        connection = await a.connect(b)
        gate: RealmGate = a.membership
        assert gate.is_verified(connection) and gate.features(connection) == {"zstd"}
        assert gate.verified_connection(b.host.peer_id) is connection and gate.realm_id == TEAM.realm_id
        (inbound,) = b.host.connections()
        assert b.membership.is_verified(inbound) and b.membership.features(inbound) == {"zstd"}
        assert a.kinds(b) == b.kinds(a) == ["joined", "up"]
        await until(lambda: a.membership.members()[0].addrs == (b.host.addr,))
        await until(lambda: b.membership.members()[0].addrs == (a.host.addr,))


async def test_the_responder_is_verified_no_later_than_the_initiator(autojump_clock: Clock) -> None:
    """So that the first message of a member is never taken for a stranger's."""
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        await a.connect(b)
        assert b.membership.verified_connection(a.host.peer_id) is not None


async def test_dialing_verifies_in_four_trips(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        nodes.network.latency_s = 0.01
        a, b = await nodes.add(), await nodes.add()
        started = trio.current_time()
        await a.connect(b)
        # connection 2 × latency, stream 2, proofs 4
        assert trio.current_time() - started == pytest.approx(0.08)


async def test_connect_gives_the_connection_that_there_is(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await pair(nodes)
        assert await a.connect(b) is a.host.connections()[0]
        assert await b.membership.connect(a.host.peer_id) is b.host.connections()[0]
        assert a.counts["handshake_ok"] == 1


async def test_both_sides_may_connect_at_once(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        async with trio.open_nursery() as nursery:
            for one, other in ((a, b), (b, a), (a, b), (b, a)):
                nursery.start_soon(one.connect, other)
        await trio.sleep(5)
        for one, other in ((a, b), (b, a)):
            assert all(one.membership.is_verified(connection) for connection in one.host.connections())
            assert one.kinds(other) == ["joined", "up"]


async def test_another_secret_is_not_admitted(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, stranger = await nodes.add(), await nodes.add(OTHER)
        with pytest.raises(NotMemberError, match="not in the realm 'team'"):
            await a.connect(stranger)
        await trio.sleep(30)
        (connection,) = a.host.connections()
        assert not a.membership.is_verified(connection) and a.membership.features(connection) == frozenset()
        assert a.membership.verified_connection(stranger.host.peer_id) is None
        assert a.membership.members() == stranger.membership.members() == []
        assert a.counts["not_in_realm"] == 3  # at once, after 2 s, after 10 s, never again


async def test_nodes_prove_themselves_in_each_realm_that_they_share_and_in_no_other(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        shared = [Realm.from_psk(bytes([number]) * 32, f"shared {number}") for number in range(12)]
        of_a, of_b = [Realm.from_psk(bytes([100 + n]) * 32, f"own {n}") for n in range(2)]
        first = await nodes.add(of_a)
        at_a = [first, *[await nodes.add(realm, host=first.host) for realm in shared]]
        second = await nodes.add(of_b)
        at_b = [second, *[await nodes.add(realm, host=second.host) for realm in shared]]
        await first.host.dial(second.host.peer_id, [second.host.addr])
        both = list(zip(at_a[1:], at_b[1:], strict=True))
        await until(lambda: all(a.state(b) == b.state(a) == "up" for a, b in both), timeout_s=1.0)
        assert first.membership.members() == second.membership.members() == []
        failed = [one.counts.get("handshake_failed", 0) for one in (*at_a, *at_b)]
        assert failed == [0] * 26, "to be in another realm is no offence"
        assert sum(one.counts.get("handshake_no_common_realm", 0) for one in at_b) == 1
        await at_b[1].membership.leave()
        await until(lambda: at_a[1].state(at_b[1]) == "left")
        assert all(a.state(b) == "up" for a, b in both[1:])


async def test_errors_of_connect_say_what_is_wrong(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        with pytest.raises(PeerNotFoundError):
            await a.membership.connect(b.host.peer_id)
        nodes.network.partition(a.host.peer_id, b.host.peer_id)
        with pytest.raises(RequestTimeoutError, match="within 3 s"):
            await a.membership.connect(b.host.peer_id, [b.host.addr], timeout_s=3.0)
        nodes.network.heal()
        await a.membership.leave()
        with pytest.raises(NotInRealmError, match="team"):
            await a.connect(b)
        with pytest.raises(NotInRealmError, match="once"):
            await a.membership.run()


async def test_a_realm_joined_later_uses_the_connections_that_there_are(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(OTHER), await nodes.add(OTHER)
        await a.connect(b)
        await trio.sleep(60)
        second_b = await nodes.add(TEAM, host=b.host)
        await trio.sleep(60)
        second_a = await nodes.add(TEAM, host=a.host)
        await until(lambda: second_a.state(second_b) == "up" and second_b.state(second_a) == "up")
        assert len(a.host.connections()) == 1 and a.state(b) == b.state(a) == "up"
        await second_a.membership.leave()
        await until(lambda: second_b.state(second_a) == "left")
        assert a.state(b) == b.state(a) == "up", "the other realm on that connection goes on"


async def test_a_peer_that_joins_a_moment_later_is_found(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        network = nodes.network
        a = await nodes.add()
        host = network.host()
        with pytest.raises(NotMemberError):
            await a.membership.connect(host.peer_id, [host.addr])
        late = await nodes.add(host=host)
        await until(lambda: late.state(a) == "up" and a.state(late) == "up", timeout_s=3.0)


async def test_three_nodes_learn_of_each_other_and_connect(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b, c = [await nodes.add() for _ in range(3)]
        await a.connect(b)
        await c.connect(b)
        await until(lambda: a.state(c) == "up" and c.state(a) == "up", timeout_s=5.0)
        assert a.kinds(c) == ["joined", "up"]


async def test_leaving_is_seen_by_all_and_ends_everything(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b, c = [await nodes.add() for _ in range(3)]
        await a.connect(b)
        await c.connect(b)
        await until(lambda: a.state(c) == "up" and c.state(a) == "up")
        lost: list[Connection] = []
        a.membership.subscribe_unverified(lost.append)
        (connection,) = a.host.connections(b.host.peer_id)
        with trio.fail_after(1):
            await b.membership.leave()
        assert a.state(b) == c.state(b) == "left"
        assert not a.membership.is_verified(connection) and lost == [connection] and not connection.is_closed
        assert a.kinds(b) == c.kinds(b) == ["joined", "up", "left"]
        assert [protocol for protocol in b.host.handlers if "/realm/" in protocol] == []
        await trio.sleep(60)
        assert a.state(b) == "left" and a.membership.verified_connection(b.host.peer_id) is None
        assert a.state(c) == "up"
        await b.membership.leave()  # again: nothing


async def test_leaving_does_not_wait_long_for_a_dead_peer(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await pair(nodes)
        await trio.sleep(1)
        nodes.network.partition(a.host.peer_id, b.host.peer_id)
        with trio.fail_after(2.1):
            await b.membership.leave()


async def test_who_left_can_come_back_with_the_same_identity(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await pair(nodes)
        c = await nodes.add()
        await c.connect(a)
        await until(lambda: c.state(b) == "up")
        await b.membership.leave()
        again = await nodes.add(host=b.host)
        await until(lambda: a.state(again) == c.state(again) == "up", timeout_s=10.0)
        await trio.sleep(120)
        assert a.state(again) == c.state(again) == "up"
        assert a.kinds(again) == ["joined", "up", "left", "joined", "up"]
        member = a.membership.member(again.host.peer_id)
        assert member is not None and member.addrs == (again.host.addr,)


async def test_a_clock_that_went_back_does_not_keep_a_node_out(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        identity = Identity.generate()
        a = await nodes.add()
        ahead = await nodes.add(identity=identity)
        await ahead.connect(a)
        await until(lambda: a.state(ahead) == "up" and a.membership.members()[0].seq > 0)
        seq = a.membership.members()[0].seq
        ahead.host.kill()
        host = nodes.network.host(identity)
        behind = await nodes.add(host=host, clock=lambda: 1_700_000_000.0 - 60 + trio.current_time())
        await behind.connect(a)
        await until(lambda: a.membership.members()[0].addrs == (host.addr,), timeout_s=30.0)
        assert a.membership.members()[0].seq == seq + 1


async def test_a_killed_member_is_down_after_the_grace_period_and_up_when_it_is_back(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        identity = Identity.generate()
        a, b = await nodes.add(), await nodes.add(identity=identity)
        await a.connect(b)
        await until(lambda: a.membership.members()[0].addrs != ())
        killed_at = trio.current_time()
        b.host.kill()
        await until(lambda: a.state(b) == "down")
        assert trio.current_time() - killed_at == pytest.approx(15.0, abs=0.1)
        again = await nodes.add(identity=identity)
        await again.connect(a)
        await until(lambda: a.state(again) == "up")
        assert a.kinds(again) == ["joined", "up", "down", "up"]


async def test_a_flapping_member_is_not_reported_of(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await pair(nodes)
        b.host.forget(a.host.peer_id)
        a.host.forget(b.host.peer_id)
        for _ in range(5):
            await trio.sleep(1)
            await b.host.disconnect(a.host.peer_id)
            await trio.sleep(16)
            await b.connect(a)
        told = a.kinds(b)
        assert told.count("down") <= 3
        await trio.sleep(310)
        assert len(a.kinds(b)) - len(told) <= 1 and a.state(b) == "up" and a.kinds(b)[-1] == "up"


async def test_a_record_that_expires_ends_a_live_member_until_it_proves_itself_again(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        # b's clock stands still, so that it never issues another record.
        a, b = await nodes.add(clock=fast_clock_s), await nodes.add(clock=lambda: WALL_S)
        await a.connect(b)
        await until(lambda: a.membership.members()[0].seq > 0)
        lost: list[Connection] = []
        a.membership.subscribe_unverified(lost.append)
        await trio.sleep((LIFE_MS + SKEW_MS) / 1000 / FAST + 16)
        assert "expired" in a.kinds(b) and len(lost) == 1
        await until(lambda: a.membership.verified_connection(b.host.peer_id) is not None)


async def test_records_are_refreshed_before_they_expire(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(clock=fast_clock_s), await nodes.add(clock=fast_clock_s)
        await a.connect(b)
        await trio.sleep(3 * LIFE_MS / 1000 / FAST)
        assert a.kinds(b) == b.kinds(a) == ["joined", "up"] and a.state(b) == "up"


async def test_cancelling_connect_at_every_moment_leaves_the_realm_usable(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a = await nodes.add()
        for step in range(14):
            b = await nodes.add()
            with trio.move_on_after(step * 0.001):
                await a.connect(b)
            connection = await a.connect(b)
            assert a.membership.is_verified(connection)
            await until(lambda b=b: b.state(a) == "up")  # type: ignore[misc]
            await b.membership.leave()
        assert a.membership._handshakes.at_work == 0  # pyright: ignore[reportPrivateUsage]


async def test_one_of_many_who_wait_may_give_up(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        await a.host.dial(b.host.peer_id, [b.host.addr])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.connect, b)
            with trio.move_on_after(0.003):
                await a.connect(b)
        assert a.counts["handshake_ok"] == 1


async def test_discovered_peers_are_dialed_but_unknown_peers_not_again_and_again(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        stranger = nodes.network.host()
        for _ in range(3):
            a.host.discover(b.host.peer_id, [b.host.addr])
            a.host.discover(stranger.peer_id, [stranger.addr])
            a.host.discover(a.host.peer_id, [a.host.addr])
            await trio.sleep(30)
        assert a.state(b) == "up"
        assert a.counts["discovered_paused"] == 2
        for number in range(200):
            a.host.discover(Identity(number.to_bytes(32, "big")).peer_id, ["/ip4/192.0.2.1/tcp/1"])
        assert a.counts["discovered_dropped"] >= 100


async def test_bootstrap_members_are_dialed(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a = await nodes.add()
        b = await nodes.add(TEAM.with_bootstrap([a.host.addr, "/ip4/192.0.2.1/tcp/1"]))
        await until(lambda: b.state(a) == a.state(b) == "up")


async def test_members_are_remembered_on_disk(autojump_clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "members.cbor"
    identity, peer_identity = Identity.generate(), Identity.generate()
    async with realm_nodes() as nodes:
        a, b = await nodes.add(identity=identity, records_path=path), await nodes.add(identity=peer_identity)
        await b.connect(a)
        await until(lambda: a.membership.members()[0].seq > 0)
        expected = b.host.addr
    assert path.stat().st_mode & 0o777 == 0o600
    async with realm_nodes() as nodes:
        nodes.network.host()
        b = await nodes.add(identity=peer_identity)
        assert b.host.addr == expected
        a = await nodes.add(identity=identity, records_path=path)
        await until(lambda: a.state(b) == "up")
        await a.membership.leave()
        assert not path.exists()


async def test_a_damaged_file_of_members_is_moved_aside(autojump_clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "members.cbor"
    path.write_bytes(b"dep2p-members-v1\n" + bytes(50))
    async with realm_nodes() as nodes:
        a = await nodes.add(records_path=path)
        assert a.membership.members() == [] and (tmp_path / "members.cbor.corrupt").exists() and not path.exists()


async def test_a_disk_that_fails_is_counted_and_stops_nothing(autojump_clock: Clock, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    async with realm_nodes() as nodes:
        a = await nodes.add(records_path=blocked / "members.cbor")
        b = await nodes.add()
        await b.connect(a)
        await until(lambda: a.counts.get("save_failures", 0) >= 2)
        assert a.state(b) == "up"


async def test_a_subscribers_mistake_is_counted_and_stops_nothing(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()

        def fail(_event: MemberEvent) -> None:
            raise RuntimeError("app")

        end = a.membership.subscribe(fail)
        await a.connect(b)
        assert a.counts["subscriber_failures"] == 2 and a.kinds(b) == ["joined", "up"]
        end()
        await b.membership.leave()
        assert a.counts["subscriber_failures"] == 2


async def test_five_hundred_members_are_synced(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        for envelope in _envelopes(500):
            a.membership._table._store.offer(envelope, 1_700_000_000_000, 0.0)  # pyright: ignore
        await b.connect(a)
        await until(lambda: len(b.membership.members()) == 501, timeout_s=10.0)
        assert b.counts["record_applied"] == 501
        kept = b.host._targets  # pyright: ignore[reportPrivateUsage]
        assert list(kept) == [a.host.peer_id], "none of the others ever proved itself"
        assert b.counts["probes"] <= PROBES_MAX
        await trio.sleep(120)
        assert b.counts["probes"] <= 5 * PROBES_MAX and b.counts["probes_failed"] > 0


def _envelopes(count: int) -> list[bytes]:
    from dep2p.protocols.realm.member_record import MemberRecord, seal_record

    made: list[bytes] = []
    for number in range(count):
        identity = Identity((number + 1000).to_bytes(32, "big"))
        addrs = (f"/ip4/192.0.2.1/tcp/{number + 1}",)
        now_ms = 1_700_000_000_000
        record = MemberRecord(identity.peer_id, addrs, 1, now_ms, now_ms + LIFE_MS)
        made.append(seal_record(record, TEAM.keys, identity.sign).envelope)
    return made


async def test_a_full_table_does_not_lock_members_out(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a = await nodes.add(limits=Limits(members_per_realm_max=2))
        for _ in range(4):
            b = await nodes.add()
            assert b.membership.is_verified(await b.connect(a))
        assert len(a.membership.members()) == 2 and a.counts["member_full"] == 2


async def test_a_membership_that_ends_without_leaving_is_noticed(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a = await nodes.add()
        host = nodes.network.host()
        async with trio.open_nursery() as nursery:
            b = await Nodes(nodes.network, nursery).add(host=host)
            await a.connect(b)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        (connection,) = a.host.connections()
        await until(lambda: not a.membership.is_verified(connection), timeout_s=5.0)
        assert not connection.is_closed


async def test_a_dialer_whose_membership_ends_without_leaving_is_noticed(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a = await nodes.add()
        host = nodes.network.host()
        async with trio.open_nursery() as nursery:
            b = await Nodes(nodes.network, nursery).add(host=host)
            await b.connect(a)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        a.host.forget(host.peer_id)
        (connection,) = a.host.connections()
        assert a.membership.is_verified(connection)
        await until(lambda: not a.membership.is_verified(connection), timeout_s=60.0)
        assert not connection.is_closed


async def test_the_network_may_be_slow(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        nodes.network.latency_s = 1.0
        a, b = await nodes.add(), await nodes.add()
        await a.connect(b)
        await until(lambda: a.membership.members() != [] and a.membership.members()[0].seq > 0)
