"""Summaries of a node's peers, realms, members and topics: the structs of the control API."""

from collections.abc import Iterable, Sequence

import trio

from dep2p.control_api.replies import (
    CircuitSummary,
    ConnectedPeer,
    ConnectionSummary,
    MemberOffer,
    MemberSummary,
    PeerSummary,
    RealmSummary,
    TopicPeers,
    TopicSummary,
)
from dep2p.errors import TopicNotFoundError
from dep2p.host.interface import CircuitUse, Connection, Host
from dep2p.node.joined_realm import Joined
from dep2p.protocols.realm.statement import ServiceOffer
from dep2p.pubsub.service import PubSub
from dep2p.types import PeerId


def realm_summary(joined: Joined) -> RealmSummary:
    """Summarize a joined realm."""
    members = joined.membership.members()
    return RealmSummary(
        name=joined.realm.name,
        realm_id=joined.realm.realm_id,
        members_known=len(members),
        members_up=sum(member.state == "up" for member in members),
        problems=(*joined.membership.problems(), *joined.pubsub.problems()),
    )


def offered(services: Sequence[ServiceOffer]) -> tuple[MemberOffer, ...]:
    """Return the services of a member for the control API."""
    return tuple(
        MemberOffer(name=each.name, group=each.group, version=each.version, schema=each.schema) for each in services
    )


def member_summaries(joined: Joined) -> list[MemberSummary]:
    """Summarize the members that this node knows."""
    return [
        MemberSummary(
            peer=member.peer,
            addrs=tuple(member.addrs),
            state=member.state,
            seq=member.seq,
            issued_s=member.issued_s,
            expires_s=member.expires_s,
            last_seen_s=member.last_seen_s,
            fields=dict(member.fields),
            services=offered(member.services),
        )
        for member in joined.membership.members()
    ]


def peer_summaries(host: Host, realms: Iterable[Joined]) -> list[PeerSummary]:
    """Summarize the connected peers."""
    now = trio.current_time()
    joined = list(realms)
    by_peer: dict[PeerId, list[Connection]] = {}
    for connection in host.connections():
        by_peer.setdefault(connection.peer, []).append(connection)
    return [
        PeerSummary(
            peer=peer,
            connections=tuple(connection_summary(connection, now) for connection in connections),
            addrs=tuple(host.addrs(peer)),
            realms=tuple(each.realm.name for each in joined if any(map(each.membership.is_verified, connections))),
        )
        for peer, connections in by_peer.items()
    ]


def connection_summary(connection: Connection, now: float) -> ConnectionSummary:
    """Summarize a connection at a time on trio's clock."""
    return ConnectionSummary(
        id=connection.id,
        direction=connection.direction,
        addr=connection.remote_addr,
        age_s=round(now - connection.opened_at_s, 3),
        rtt_ms=None if connection.rtt_s is None else round(connection.rtt_s * 1000, 3),
        circuit=None if connection.circuit is None else circuit_summary(connection.circuit),
    )


def circuit_summary(use: CircuitUse) -> CircuitSummary:
    """Summarize the use of a relay."""
    return CircuitSummary(
        relay=use.relay,
        limited=use.is_limited,
        data_left_bytes=use.data_left_bytes,
        time_left_s=None if use.time_left_s is None else round(use.time_left_s, 1),
    )


def connected_peer(connection: Connection, realms: Sequence[str]) -> ConnectedPeer:
    """Summarize a connection that was made."""
    return ConnectedPeer(
        peer=connection.peer, addr=connection.remote_addr, direction=connection.direction, realms=tuple(realms)
    )


def topic_summaries(pubsub: PubSub, realm: str | None) -> list[TopicSummary]:
    """Summarize the joined topics of a realm, or of the public network."""
    return [
        TopicSummary(
            topic=status.name,
            realm=realm,
            realm_id=status.realm_id,
            peers=status.peers,
            mesh=status.mesh,
            subscriptions=status.subscriptions,
            buffered_items=status.buffered_items,
            by_pattern=status.by_pattern,
        )
        for status in pubsub.topics()
    ]


def topic_peers(pubsub: PubSub, topic: str) -> TopicPeers:
    """Describe a topic, joined or not. Raises TopicNotFoundError."""
    peers, mesh, scores = pubsub.peers(topic), pubsub.mesh(topic), pubsub.scores()
    joined = pubsub.has_joined(topic)
    if not joined and not peers:
        raise TopicNotFoundError(f"neither this node nor a neighbour is in the topic {topic[:80]!r}")
    return TopicPeers(
        topic=topic,
        realm_id=pubsub.realm_id,
        joined=joined,
        peers=tuple(peers),
        mesh=tuple(mesh),
        scores={peer: round(scores[peer], 3) for peer in peers if peer in scores},
    )
