"""A node connects to the other readers of its groups, so that they agree on who gets a message."""

from collections.abc import Callable, Sequence
from typing import cast

import trio
import trio.testing

from dep2p.errors import PeerNotFoundError
from dep2p.host.interface import Host
from dep2p.protocols.realm.offer_index import OfferIndex
from dep2p.protocols.realm.statement import MemberStatement, TopicGroup
from dep2p.pubsub.service import PubSub
from dep2p.realm.membership import Membership
from dep2p.services.topic_groups import CONNECTED_READERS_MAX, REACH_OUT_INTERVAL_S, TopicGroups
from dep2p.types import PeerId

Clock = trio.testing.MockClock
JOBS = TopicGroup("jobs", "workers")


class Members:
    """A host and a membership that know of readers and dial them when asked."""

    peer_id = PeerId("own")

    def __init__(self, readers: Sequence[str]) -> None:
        self.offers = OfferIndex()
        for reader in ("own", *readers):
            self.offers.replace(PeerId(reader), MemberStatement(), MemberStatement(groups=(JOBS,)))
        self.dialed: list[PeerId] = []
        self.connected: set[PeerId] = set()
        self.unreachable: set[str] = set()
        self.announced: tuple[TopicGroup, ...] = ()

    def subscribe(self, _on_event: object) -> Callable[[], None]:
        return lambda: None

    subscribe_verified = subscribe_unverified = subscribe

    def verified_connection(self, peer: PeerId) -> object | None:
        return peer if peer in self.connected else None

    async def connect(self, peer: PeerId, *, timeout_s: float) -> None:
        assert timeout_s > 0
        await trio.lowlevel.checkpoint()
        self.dialed.append(peer)
        if peer in self.unreachable:
            raise PeerNotFoundError(f"no way to {peer}")
        self.connected.add(peer)

    def set_groups(self, groups: Sequence[TopicGroup]) -> None:
        self.announced = tuple(groups)


class Topics:
    """The part of pub/sub that groups set themselves on."""

    groups: object = None


def groups_of(members: Members) -> TopicGroups:
    return TopicGroups(cast("Host", members), cast("PubSub", Topics()), cast("Membership", members))


async def test_readers_that_are_not_connected_are_dialed_and_tried_again(autojump_clock: Clock) -> None:
    members = Members(["ann", "bob", "eve"])
    members.connected.add(PeerId("ann"))
    members.unreachable.add("eve")
    groups = groups_of(members)
    groups.join(JOBS)
    async with trio.open_nursery() as nursery:
        await nursery.start(groups.run)
        await trio.sleep(REACH_OUT_INTERVAL_S / 2)
        assert members.dialed == ["bob", "eve"]
        assert groups.counters()["group_readers_not_reached"] == 1
        members.unreachable.clear()
        await trio.sleep(REACH_OUT_INTERVAL_S)
        assert members.dialed == ["bob", "eve", "eve"]
        await trio.sleep(REACH_OUT_INTERVAL_S * 3)
        assert len(members.dialed) == 3, "all are connected"
        nursery.cancel_scope.cancel()


async def test_a_node_connects_to_no_more_readers_than_its_bound(autojump_clock: Clock) -> None:
    members = Members([f"peer{number:03}" for number in range(200)])
    groups = groups_of(members)
    groups.join(JOBS)
    async with trio.open_nursery() as nursery:
        await nursery.start(groups.run)
        await trio.sleep(REACH_OUT_INTERVAL_S * 3)
        assert len(members.dialed) == CONNECTED_READERS_MAX
        nursery.cancel_scope.cancel()


async def test_a_node_that_reads_in_no_group_dials_nobody(autojump_clock: Clock) -> None:
    members = Members(["ann", "bob"])
    async with trio.open_nursery() as nursery:
        await nursery.start(groups_of(members).run)
        await trio.sleep(REACH_OUT_INTERVAL_S * 3)
        assert members.dialed == []
        nursery.cancel_scope.cancel()


async def test_a_reader_that_stops_says_so_and_goes_on_for_a_moment(autojump_clock: Clock) -> None:
    members = Members([])
    groups = groups_of(members)
    groups.join(JOBS)
    assert members.announced == (JOBS,)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(groups.drain)
        await trio.testing.wait_all_tasks_blocked()
        assert not members.announced and groups.is_ours(JOBS, b"1")
        await trio.sleep(1)
        assert not groups.is_ours(JOBS, b"2")
    assert groups.counters() == {"group_messages_taken": 1, "group_messages_left_to_others": 1}
