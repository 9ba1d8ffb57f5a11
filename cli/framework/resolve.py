"""Peers and realms as people write them: whole ids, abbreviations, names."""

from typing import TYPE_CHECKING

from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import peer_matches
from dep2p.error_codes import EXIT_USAGE
from dep2p.outside_text import printable
from dep2p.types import PeerId, parse_peer_id

if TYPE_CHECKING:
    from dep2p.client import Client


def whole_peer_id(text: str) -> PeerId | None:
    """The text when it is a whole peer id."""
    try:
        return parse_peer_id(text)
    except ValueError:
        return None


async def refuse_self(client: "Client", peer: str) -> None:
    """Raises :class:`CliError` when the peer is the daemon's own node, where only another peer makes sense."""
    if peer == (await client.status()).peer_id:
        raise CliError(
            f"{peer} is this node itself: it does not dial itself",
            "D4004",
            tries=("name another peer: dep2p realm members",),
        )


async def resolve_peer(client: "Client", text: str) -> PeerId:
    """Return the peer for a text: a whole id, or an abbreviation that fits exactly one peer that the node knows.

    ``self`` and an abbreviation of its own id mean the node itself, whose programs reach each other as peers do.
    Raises :class:`CliError`: no fit (exit 4), several fits (exit 2).
    """
    whole = whole_peer_id(text)
    if whole is not None:
        return whole
    own = (await client.status()).peer_id
    if text == "self":
        return own
    known = await known_peers(client)
    fitting = [peer for peer in [own, *known] if peer_matches(peer, text)]
    if len(fitting) == 1:
        return fitting[0]
    shown = printable(text)
    if not fitting:
        raise CliError(
            f"no known peer fits {shown!r}",
            "D4001",
            cause=f"{len(known)} peers are known" if known else "no peer is known yet",
            tries=("dep2p peer ls", "write the whole peer id"),
        )
    raise CliError(
        f"{shown!r} fits {len(fitting)} peers",
        "D4004",
        exit_code=EXIT_USAGE,
        cause=", ".join(fitting[:4]) + (" …" if len(fitting) > 4 else ""),
        tries=("write more of the id",),
    )


async def known_peers(client: "Client") -> list[PeerId]:
    """List the ids of connected peers and of realm members, each once, without this node's own."""
    own = (await client.status()).peer_id
    found: dict[PeerId, None] = {peer.peer: None for peer in await client.peers()}
    for realm in await client.realms():
        for member in await client.members(realm.realm_id):
            found[member.peer] = None
    found.pop(own, None)
    return list(found)
