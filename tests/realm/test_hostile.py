"""Strangers, liars and noise: each gets a clear answer or a closed stream, and everybody else is served as before."""

from collections import Counter

import pytest
import trio
import trio.testing

from dep2p.errors import ErrorCode, NotMemberError, StreamClosedError
from dep2p.host.interface import ByteStream, Connection
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.realm.anti_entropy import SendFrames
from dep2p.protocols.realm.handshake import AUTH_PROTOCOL
from dep2p.protocols.realm.member_record import LIFE_MS, MemberRecord, seal_record
from dep2p.protocols.realm.messages import (
    RECORDS_PER_TURN,
    MembersMessage,
    Records,
    encode_digest,
    encode_records,
    encode_summary,
    members_protocol,
)
from dep2p.protocols.wire.frame import ENCRYPTED, HEADERS, FrameType, decode_error, encode_error, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, encode_headers, headers_end
from dep2p.realm.handshake_responder import RESPONDING_MAX, RESPONDING_PER_CONNECTION_MAX
from dep2p.realm.handshake_scheduler import AGAIN_PER_CONNECTION_MAX, AGAIN_WINDOW_S, RETRY_AFTER_MAX_S
from dep2p.realm.member_links import GOSSIP_UNSENT_BYTES_MAX, LINKS_PER_CONNECTION_MAX
from dep2p.realm.membership import Membership
from dep2p.testing import MemoryHost
from tests.realm.realm_nodes import OTHER, TEAM, WALL_S, Node, Nodes, read_frames, realm_nodes, until

Clock = trio.testing.MockClock
AUTH = AUTH_PROTOCOL
MEMBERS = members_protocol(TEAM.realm_id)
NOW_MS = int(WALL_S * 1000)


async def stranger_at(nodes: Nodes, node: Node) -> tuple[MemoryHost, Connection]:
    host = nodes.network.host()
    return host, await host.dial(node.host.peer_id, [node.host.addr])


async def answers(stream: ByteStream) -> list[tuple[int, str]]:
    errors = [frame for frame in await read_frames(stream) if frame.type == FrameType.ERROR]
    starts = [headers_end(frame.payload, 0, 1024) if frame.flags & HEADERS else 0 for frame in errors]
    return [decode_error(frame.payload[start:]) for frame, start in zip(errors, starts, strict=True)]


async def pair(nodes: Nodes, *, limits: Limits | None = None) -> tuple[Node, Node, Connection]:
    """A node, a member that dialed it, and the member's end of the connection."""
    node, member = await nodes.add(limits=limits), await nodes.add()
    connection = await member.connect(node)
    await until(lambda: node.membership.members()[0].seq > 0)
    return node, member, connection


async def test_an_unknown_peer_on_the_members_protocol_is_reported_and_turned_away(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add()
        _, connection = await stranger_at(nodes, node)
        stream = await connection.open_stream(MEMBERS)
        stream.write_nowait(encode_summary(bytes(32)))
        assert await answers(stream) == [(ErrorCode.NOT_MEMBER, "prove first that you are in this realm")]
        assert node.counts["stranger_refused"] == 1 and node.membership.members() == []


async def test_a_wrong_proof_is_refused_and_reported(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add()
        _, connection = await stranger_at(nodes, node)
        stream = await connection.open_stream(AUTH)
        stream.write_nowait(encode_frame(FrameType.REQUEST, bytes(64), req_id=1))
        stream.write_nowait(encode_frame(FrameType.REQUEST, bytes(32), req_id=2))
        assert [code for code, _ in await answers(stream)] == [ErrorCode.NOT_MEMBER]
        assert node.counts["handshake_failed"] == 1
        (inbound,) = node.host.connections()
        assert not node.membership.is_verified(inbound)


async def test_a_responder_with_another_secret_is_refused(autojump_clock: Clock) -> None:
    """It speaks the protocol of all realms, and answers with a decoy."""
    async with realm_nodes() as nodes:
        node = await nodes.add()
        liar = nodes.network.host()
        fake = Membership(OTHER, liar, liar.identity, Limits())
        fake._responder.add(fake._handshakes)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(NotMemberError, match="is not in the realm"):
            await node.membership.connect(liar.peer_id, [liar.addr])
        assert node.membership.members() == []
        assert node.membership._handshakes.at_work == 0  # pyright: ignore[reportPrivateUsage]


async def test_a_node_in_the_middle_cannot_use_the_proofs_of_two_members(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        middle = nodes.network.host()
        onward = await middle.dial(b.host.peer_id, [b.host.addr])

        async def relay(stream: ByteStream) -> None:
            other = await onward.open_stream(AUTH)

            async def pass_on(source: ByteStream, sink: ByteStream) -> None:
                while data := await source.read():
                    await sink.write(data)
                await sink.close_write()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_on, stream, other)
                nursery.start_soon(pass_on, other, stream)

        middle.set_stream_handler(AUTH, relay)
        with pytest.raises(NotMemberError):
            await a.membership.connect(middle.peer_id, [middle.addr])
        await trio.sleep(10)
        assert a.membership.members() == b.membership.members() == []
        assert not any(b.membership.is_verified(connection) for connection in b.host.connections())


async def fail_proofs(connection: Connection, times: int) -> list[int]:
    """So many handshakes of noise; the codes of the answers."""
    codes: list[int] = []
    for _ in range(times):
        stream = await connection.open_stream(AUTH)
        stream.write_nowait(b"\xff" * 12)
        codes += [code for code, _ in await answers(stream)]
    return codes


async def test_a_peer_that_failed_too_often_is_refused_before_any_crypto(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add(limits=Limits(handshake_failures_per_peer_per_min=3))
        host, connection = await stranger_at(nodes, node)
        await fail_proofs(connection, 3)
        again = await host.dial(node.host.peer_id, [node.host.addr])
        assert await fail_proofs(again, 2) == [ErrorCode.RATE_LIMITED] * 2, "on another connection, too"
        assert node.counts["handshake_refused_rate"] == 2 and node.counts["handshake_failed"] == 3
        await trio.sleep(60)
        assert await fail_proofs(again, 1) != [ErrorCode.RATE_LIMITED]


@pytest.mark.parametrize("addr", ["/ip4/192.0.2.9/tcp/4001", "/ip4/192.0.2.9/tcp/4001/p2p/QmRelay/p2p-circuit", ""])
async def test_failed_proofs_shut_out_no_honest_peer_behind_the_same_address(addr: str, autojump_clock: Clock) -> None:
    """A router, a relay or a machine is shared: what one peer behind it does is not the others' fault."""
    async with realm_nodes() as nodes:
        node = await nodes.add(limits=Limits(handshake_failures_per_peer_per_min=3))
        for _ in range(20):
            _, connection = await stranger_at(nodes, node)
            node.host.connections()[-1].remote_addr = addr
            await fail_proofs(connection, 5)
        assert node.counts["handshake_failed"] == 60
        member = await nodes.add()
        await member.host.dial(node.host.peer_id, [node.host.addr])
        node.host.connections()[-1].remote_addr = addr
        await until(lambda: node.state(member) == "up" and member.state(node) == "up", timeout_s=1.0)


async def test_a_refused_peer_is_told_why_and_tries_again_when_the_refusal_ends(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add(limits=Limits(handshake_failures_per_peer_per_min=3))
        host, connection = await stranger_at(nodes, node)
        await fail_proofs(connection, 3)
        member = await nodes.add(host=host)
        await until(lambda: bool(member.membership.problems()))
        (problem,) = member.membership.problems()
        assert node.host.peer_id in problem and "after failed ones" in problem and "tried again in" in problem
        await until(lambda: node.state(member) == "up" and member.state(node) == "up", timeout_s=70.0)
        assert trio.current_time() > 55.0, "not before the minute was over"
        assert member.counts["handshake_retries"] <= 2 and member.membership.problems() == ()


@pytest.mark.parametrize("failure", ["overloaded", "silent", "reset", "broken"])
async def test_no_failure_that_passes_keeps_a_member_out_for_good(failure: str, autojump_clock: Clock) -> None:
    """The peer misbehaves for two minutes, longer than three tries take, and is then itself again."""
    async with realm_nodes() as nodes:
        node, member = await nodes.add(), await nodes.add()
        serve = node.host.handlers[AUTH]

        async def misbehave(stream: ByteStream) -> None:
            match failure:
                case "overloaded":
                    stream.write_nowait(encode_error(ErrorCode.OVERLOADED, "busy"))
                    await stream.close()
                case "silent":
                    await trio.sleep(30)
                case "reset":
                    stream.reset()
                case _:
                    stream.write_nowait(b"\xff" * 40)
                    await stream.close()

        node.host.set_stream_handler(AUTH, misbehave)
        await member.host.dial(node.host.peer_id, [node.host.addr])
        await trio.sleep(120)
        assert member.membership.problems() and node.state(member) is None
        assert member.counts["handshake_retries"] < 20
        node.host.set_stream_handler(AUTH, serve)
        await until(lambda: node.state(member) == "up" and member.state(node) == "up", timeout_s=300.0)
        assert len(member.host.connections()) == 1 and member.membership.problems() == ()


async def test_a_peer_cannot_ask_for_a_wait_without_end(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, member = await nodes.add(), await nodes.add()
        serve = node.host.handlers[AUTH]

        async def put_off(stream: ByteStream) -> None:
            headers = encode_headers({HeaderKey.RETRY_AFTER_MS: 2**50})
            stream.write_nowait(encode_error(ErrorCode.RATE_LIMITED, "later", headers=headers))
            await stream.close()

        node.host.set_stream_handler(AUTH, put_off)
        await member.host.dial(node.host.peer_id, [node.host.addr])
        await trio.sleep(5)
        node.host.set_stream_handler(AUTH, serve)
        await until(lambda: node.state(member) == "up", timeout_s=1.2 * RETRY_AFTER_MAX_S)


async def test_waiting_for_the_next_try_ends_with_the_connection(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add(limits=Limits(handshake_failures_per_peer_per_min=1))
        host, connection = await stranger_at(nodes, node)
        await fail_proofs(connection, 1)
        member = await nodes.add(host=host)
        await until(lambda: bool(member.membership.problems()))
        await host.disconnect(node.host.peer_id)
        await trio.sleep(0.1)
        scheduler = member.membership._handshake_scheduler  # pyright: ignore[reportPrivateUsage]
        assert not scheduler._in_handshake and member.membership.problems() == ()  # pyright: ignore[reportPrivateUsage]


async def test_a_refused_peer_does_not_harm_who_is_verified(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, member, _ = await pair(nodes, limits=Limits(handshake_failures_per_peer_per_min=1))
        _, connection = await stranger_at(nodes, node)
        await fail_proofs(connection, 5)
        await trio.sleep(1)
        assert node.state(member) == member.state(node) == "up"
        assert node.counts["handshake_refused_rate"] == 4


async def test_a_peer_that_does_not_count_us_is_asked_again_after_the_hour_of_many_tries(
    autojump_clock: Clock,
) -> None:
    async with realm_nodes() as nodes:
        node, member, connection = await pair(nodes)
        (inbound,) = node.host.connections()
        scheduler = member.membership._handshake_scheduler  # pyright: ignore[reportPrivateUsage]
        for _ in range(AGAIN_PER_CONNECTION_MAX):
            scheduler.reauthenticate(connection)
            await trio.sleep(2)
        node.membership._unverify(inbound)  # pyright: ignore[reportPrivateUsage]
        await trio.sleep(120)
        assert not node.membership.is_verified(inbound)
        await trio.sleep(AGAIN_WINDOW_S)
        assert node.membership.is_verified(inbound)


async def test_hundreds_of_hostile_handshakes_leave_bounded_state(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add(limits=Limits(handshake_failures_per_peer_per_min=0))
        _, connection = await stranger_at(nodes, node)
        handshakes = node.membership._handshakes  # pyright: ignore[reportPrivateUsage]
        most = 0

        async def attack(number: int) -> None:
            nonlocal most
            stream = await connection.open_stream(AUTH)
            most = max(most, handshakes.at_work)
            match number % 4:
                case 0:
                    stream.write_nowait(bytes([number % 256]) * 40)
                case 1:
                    stream.write_nowait(encode_frame(FrameType.REQUEST, bytes(64), req_id=1, flags=ENCRYPTED))
                case 2:
                    stream.reset()
                case _:
                    stream.write_nowait(encode_frame(FrameType.REQUEST, bytes(64), req_id=1))
            try:
                await read_frames(stream)
            except StreamClosedError:
                return

        async with trio.open_nursery() as nursery:
            for number in range(400):
                nursery.start_soon(attack, number)
        # The attacker has its answer, or hung up, before the node's task for it has ended.
        with trio.fail_after(30):
            await handshakes.all_over()
        assert 0 < most <= RESPONDING_PER_CONNECTION_MAX and handshakes.verified == {}
        member = await nodes.add()
        assert member.membership.is_verified(await member.connect(node))


async def test_silent_handshakes_end_in_time_and_are_few_per_connection(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add()
        _, connection = await stranger_at(nodes, node)
        streams = [await connection.open_stream(AUTH) for _ in range(RESPONDING_PER_CONNECTION_MAX + 3)]
        late: list[float] = []
        for stream in streams[-3:]:
            assert [code for code, _ in await answers(stream)] == [ErrorCode.OVERLOADED]
        assert trio.current_time() < 1.0
        for stream in streams[:-3]:
            await read_frames(stream)
            late.append(trio.current_time())
        assert (
            late == pytest.approx([5.0] * RESPONDING_PER_CONNECTION_MAX, abs=0.2)
            and node.counts["handshake_refused_busy"] == 3
        )


async def test_silent_handshakes_of_many_connections_do_not_lock_out_a_member(autojump_clock: Clock) -> None:
    """Strangers that hang up just before the deadline, so that no failure is counted, and come again at once."""
    async with realm_nodes() as nodes:
        node, member = await nodes.add(), await nodes.add()

        async def hold(host: MemoryHost) -> None:
            while True:
                connection = await host.dial(node.host.peer_id, [node.host.addr])
                for _ in range(RESPONDING_PER_CONNECTION_MAX):
                    await connection.open_stream(AUTH)
                await trio.sleep(4.9)
                await connection.close()

        async with trio.open_nursery() as nursery:
            for _ in range(RESPONDING_MAX // RESPONDING_PER_CONNECTION_MAX + 2):
                nursery.start_soon(hold, nodes.network.host())
            await trio.sleep(10)
            with trio.fail_after(2):
                await member.connect(node)
            assert node.state(member) == "up" and node.counts["handshake_dropped_busy"] > 0
            handshakes = node.membership._handshakes  # pyright: ignore[reportPrivateUsage]
            assert handshakes.at_work <= RESPONDING_MAX
            nursery.cancel_scope.cancel()


async def test_handshakes_held_open_at_one_address_make_space_for_others_and_not_the_other_way(
    autojump_clock: Clock,
) -> None:
    async with realm_nodes() as nodes:
        node = await nodes.add()
        _, honest = await stranger_at(nodes, node)
        (inbound,) = node.host.connections()
        inbound.remote_addr = "/ip4/192.0.2.7/tcp/1"
        slow = await honest.open_stream(AUTH)
        busy = [await (await stranger_at(nodes, node))[1].open_stream(AUTH) for _ in range(RESPONDING_MAX + 3)]
        for stream in busy[:4]:
            assert [code for code, _ in await answers(stream)] == [ErrorCode.OVERLOADED]
        assert node.counts["handshake_dropped_busy"] == 4 and trio.current_time() < 2.0
        slow.write_nowait(encode_frame(FrameType.REQUEST, bytes(64), req_id=1))
        assert len(await slow.read()) > 64  # it is still served


async def test_noise_from_a_member_ends_its_members_stream_only(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, member, connection = await pair(nodes)
        for noise in (
            b"\xff" * 12,
            encode_frame(FrameType.GOSSIP, b"\xff"),
            encode_frame(FrameType.NOTIFY, b""),
            encode_frame(FrameType.GOSSIP, bytes(20), flags=ENCRYPTED),
            b"\x01\x20\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff",
        ):
            stream = await connection.open_stream(MEMBERS)
            stream.write_nowait(noise)
            ((code, _),) = await answers(stream)
            assert code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED_VERSION, ErrorCode.MESSAGE_TOO_LARGE)
        assert node.state(member) == member.state(node) == "up" and node.counts["link_refused"] == 5


async def test_a_connection_gets_a_bounded_number_of_members_streams(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, _, connection = await pair(nodes)
        streams = [await connection.open_stream(MEMBERS) for _ in range(LINKS_PER_CONNECTION_MAX)]
        assert [code for code, _ in await answers(streams[-1])] == [ErrorCode.INVALID_REQUEST]
        assert node.counts["link_surplus"] == 1


async def test_bad_records_are_dropped_and_then_the_stream_is(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, member, connection = await pair(nodes)
        victim = Identity.generate()
        record = MemberRecord(victim.peer_id, (), 1, NOW_MS, NOW_MS + LIFE_MS, "left")
        forged = seal_record(record, TEAM.keys, member.host.identity.sign).envelope
        foreign = seal_record(record, OTHER.keys, victim.sign).envelope
        stream = await connection.open_stream(MEMBERS)
        for envelope in (forged, foreign):
            stream.write_nowait(encode_records([envelope])[0])
        await until(lambda: node.counts.get("record_invalid") == 2)
        assert len(node.membership.members()) == 1
        for part in encode_records([forged] * 40):
            stream.write_nowait(part)
        assert [text for _, text in await answers(stream)] == ["too many invalid member records"]
        assert node.state(member) == "up"


async def test_a_member_cannot_make_another_one_leave(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, member, connection = await pair(nodes)
        other = await nodes.add()
        await other.connect(node)
        await until(lambda: len([one for one in node.membership.members() if one.seq]) == 2)
        record = MemberRecord(other.host.peer_id, (), NOW_MS + 10**6, NOW_MS, NOW_MS + LIFE_MS, "left")
        stream = await connection.open_stream(MEMBERS)
        stream.write_nowait(encode_records([seal_record(record, TEAM.keys, member.host.identity.sign).envelope])[0])
        await until(lambda: node.counts.get("record_invalid") == 1)
        await trio.sleep(1)
        assert node.state(other) == "up" and "left" not in node.kinds(other)


async def test_an_expired_record_is_dropped(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, _, connection = await pair(nodes)
        old = Identity.generate()
        record = MemberRecord(old.peer_id, (), 1, NOW_MS - 2 * LIFE_MS, NOW_MS - LIFE_MS)
        stream = await connection.open_stream(MEMBERS)
        stream.write_nowait(encode_records([seal_record(record, TEAM.keys, old.sign).envelope])[0])
        await until(lambda: node.counts.get("record_times") == 1)
        assert len(node.membership.members()) == 1


async def test_a_member_that_does_not_read_costs_bounded_memory(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        node, _, connection = await pair(nodes)
        stream = await connection.open_stream(MEMBERS)
        invented = [Identity(n.to_bytes(32, "big")).peer_id for n in range(512)]
        (digest,) = encode_digest([(peer, 1) for peer in invented])
        with trio.move_on_after(30):
            for _ in range(200):
                await stream.write(digest)
                await trio.sleep(11)  # so that each list is asked for again
        (inbound,) = node.host.connections()
        unsent = [one.unsent_bytes for one in inbound.streams]
        assert max(unsent) <= GOSSIP_UNSENT_BYTES_MAX + 300_000


async def test_frames_are_not_taken_from_who_is_not_verified_any_more(autojump_clock: Clock) -> None:
    """The check is per frame, not per stream."""
    async with realm_nodes() as nodes:
        node, _, connection = await pair(nodes)
        (inbound,) = node.host.connections()
        stream = await connection.open_stream(MEMBERS)
        stream.write_nowait(encode_summary(bytes(32)))
        await trio.sleep(0.1)
        del node.membership._verified[inbound.id]  # pyright: ignore[reportPrivateUsage]
        fresh = Identity.generate()
        record = MemberRecord(fresh.peer_id, (), 1, NOW_MS, NOW_MS + LIFE_MS)
        stream.write_nowait(encode_records([seal_record(record, TEAM.keys, fresh.sign).envelope])[0])
        assert [code for code, _ in await answers(stream)] == [ErrorCode.NOT_MEMBER]
        assert node.membership.member(fresh.peer_id) is None


@pytest.mark.parametrize("links", [1, 3])
async def test_members_that_send_without_end_get_a_quarter_of_our_time_in_turns(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, links: int
) -> None:
    """A megabyte a second of outdated records is all that it would take."""
    async with realm_nodes() as nodes:
        node, member, connection = await pair(nodes)
        others = [await nodes.add() for _ in range(links - 1)]
        connections = [connection, *[await other.connect(node) for other in others]]
        sealed = member.membership._table.own_envelope  # pyright: ignore[reportPrivateUsage]
        act, turns, sizes = node.membership.link_message, list[int](), list[int]()

        def act_slowly(link: int, message: MembersMessage, *, has_more: bool) -> list[SendFrames]:
            autojump_clock.jump(0.1)
            if isinstance(message, Records):
                turns.append(link)
                sizes.append(len(message.envelopes))
            return act(link, message, has_more=has_more)

        streams = [await one.open_stream(MEMBERS) for one in connections]
        await trio.sleep(5)
        monkeypatch.setattr(node.membership, "link_message", act_slowly)
        for stream in streams:
            for frame in encode_records([sealed] * 64 * 10):
                stream.write_nowait(frame)
        started = trio.current_time()
        await until(lambda: len(turns) >= 80 * links, timeout_s=600)
        assert 0.1 * len(turns) <= 0.26 * (trio.current_time() - started)
        assert set(sizes) == {RECORDS_PER_TURN}
        by_link = Counter(turns[: 60 * links]).values()
        assert len(by_link) == links and max(by_link) - min(by_link) <= 2
        assert node.state(member) == "up"


class Passes(trio.abc.Instrument):
    """Counts the passes of the event loop."""

    count = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_other_tasks_go_on_between_the_parts_of_a_message(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with realm_nodes() as nodes:
        node, _, connection = await pair(nodes)
        envelopes: list[bytes] = []
        for number in range(64):
            made = Identity((number + 1).to_bytes(32, "big"))
            record = MemberRecord(made.peer_id, (), 1, NOW_MS, NOW_MS + LIFE_MS)
            envelopes.append(seal_record(record, TEAM.keys, made.sign).envelope)
        stream = await connection.open_stream(MEMBERS)
        await trio.sleep(1)
        act, passes, at = node.membership.link_message, Passes(), list[int]()

        def act_and_note(link: int, message: MembersMessage, *, has_more: bool) -> list[SendFrames]:
            at.append(passes.count)
            return act(link, message, has_more=has_more)

        monkeypatch.setattr(node.membership, "link_message", act_and_note)
        trio.lowlevel.add_instrument(passes)
        before = node.counts["record_applied"]
        stream.write_nowait(encode_records(envelopes)[0])
        await until(lambda: node.counts["record_applied"] == before + 64)
        trio.lowlevel.remove_instrument(passes)
        assert len(at) == len(set(at)) == 64 // RECORDS_PER_TURN
