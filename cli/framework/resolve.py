"""Peers and realms as people write them: whole ids, abbreviations, names."""

from typing import TYPE_CHECKING, Any

from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import peer_matches, printable
from dep2p.error_codes import EXIT_USAGE
from dep2p.types import parse_peer_id

if TYPE_CHECKING:
    from dep2p.client.client import Client


def whole_peer_id(text: str) -> str | None:
    """The text when it is a whole peer id."""
    try:
        return parse_peer_id(text)
    except ValueError:
        return None


def _self_error(text: str) -> CliError:
    return CliError(
        f"{text} is this node itself: it neither dials nor sends to itself",
        "D4004",
        tries=("name another peer: dep2p realm members",),
    )


async def refuse_self(client: "Client", peer: str) -> None:
    """Raises :class:`CliError` when the peer is the daemon's own node."""
    if peer == str((await client.status())["peer_id"]):
        raise _self_error(peer)


async def resolve_peer(client: "Client", text: str) -> str:
    """The peer that ``text`` means: a whole id, or an abbreviation that fits exactly one peer that the node knows.

    Raises :class:`CliError`: ``self``, no fit (exit 4), several fits (exit 2).
    """
    if text == "self":
        raise _self_error("self")
    whole = whole_peer_id(text)
    if whole is not None:
        return whole
    known = await known_peers(client)
    fitting = [peer for peer in known if peer_matches(peer, text)]
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


async def known_peers(client: "Client") -> list[str]:
    """Ids of connected peers and of realm members, each once, this node's own left out."""
    own = str((await client.status())["peer_id"])
    found: dict[str, None] = {str(peer["peer"]): None for peer in await client.peers()}
    for realm in await client.realms():
        for member in await client.realm_members(str(realm["realm_id"])):
            found[str(member["peer"])] = None
    found.pop(own, None)
    return list(found)


def field(value: dict[str, Any], *names: str, default: Any = None) -> Any:
    """The first of the named fields that is there."""
    for name in names:
        if value.get(name) is not None:
            return value[name]
    return default
