"""``dep2p topic``: the topics that this node is in, and their other peers."""

from typing import TYPE_CHECKING, Literal

import typer

from dep2p.cli.commands.publish import PublicOption, TopicArgument
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.payloads import RealmOption
from dep2p.cli.framework.render import table
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.control_api.replies import TopicPeers


def list_topics(run: Invocation) -> None:
    """List the topics that this node is in."""
    topics = run.with_client(lambda client: client.topics())
    if run.json:
        run.emit({"topics": topics})
    elif not topics:
        run.say("in no topic; `dep2p subscribe TOPIC` joins one")
    else:
        rows = [
            [
                printable(topic.topic),
                "(public)" if topic.realm is None else printable(topic.realm),
                *map(str, (topic.peers, topic.mesh, topic.subscriptions, topic.buffered_items)),
            ]
            for topic in topics
        ]
        run.print(table(["TOPIC", "REALM", "PEERS", "MESH", "READERS", "WAITING"], rows, right=[2, 3, 4, 5]))


def _look(run: Invocation, topic: str, realm: str | None, public: bool) -> "TopicPeers":
    return run.with_client(lambda client: client.topic_peers(topic, realm=realm, public=public))


def _print_peers(run: Invocation, found: "TopicPeers", name: Literal["peers", "mesh"], none: str) -> None:
    peers = found.peers if name == "peers" else found.mesh
    if run.json:
        run.emit({"topic": found.topic, "joined": found.joined, name: peers})
    elif peers:
        run.print("\n".join(peers))
    else:
        run.say(none)


def peers(run: Invocation, topic: TopicArgument, realm: RealmOption = None, public: PublicOption = False) -> None:
    """Print the connected peers that are subscribed to a topic."""
    _print_peers(run, _look(run, topic, realm, public), "peers", "no connected peer is subscribed")


def mesh(run: Invocation, topic: TopicArgument, realm: RealmOption = None, public: PublicOption = False) -> None:
    """Print the peers with which this node exchanges every message of a topic."""
    _print_peers(run, _look(run, topic, realm, public), "mesh", "no peer is in the mesh")


def scores(run: Invocation, topic: TopicArgument, realm: RealmOption = None, public: PublicOption = False) -> None:
    """Print the router's opinion of the subscribed peers, the best first."""
    found = _look(run, topic, realm, public)
    known = sorted(found.scores.items(), key=lambda item: (-item[1], item[0]))
    if run.json:
        run.emit({"topic": found.topic, "joined": found.joined, "scores": dict(known)})
    elif known:
        in_mesh = set(found.mesh)
        rows = [[peer, f"{score:.3f}", "yes" if peer in in_mesh else "no"] for peer, score in known]
        run.print(table(["PEER", "SCORE", "MESH"], rows, right=[1]))
    else:
        run.say("no connected peer is subscribed")


def register(app: typer.Typer) -> None:
    """Add the ``topic`` group."""
    topic = group(app, "topic", "Look at the topics of publish/subscribe.")
    command(topic, "ls", examples=[("dep2p topic ls", "with counts of peers, mesh and readers")])(list_topics)
    command(
        topic,
        "peers",
        examples=[("dep2p topic peers chat", "whole peer ids, one a line")],
        notes="Works for a topic that this node is not in, too. Only direct neighbours are known: others in the realm "
        "may be subscribed as well, and get the messages through them.",
    )(peers)
    command(topic, "mesh", examples=[("dep2p topic mesh chat", "whole peer ids, one a line")])(mesh)
    command(
        topic,
        "scores",
        examples=[("dep2p topic scores chat", "a peer below 0 leaves the mesh")],
        notes="docs/explanation/gossipsub.md explains how scores rise and fall.",
    )(scores)
