"""Values that the shell completes: peers, realms, topics, queues and what else the daemon knows."""

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import typer

from dep2p.cli.framework.resolve import known_peers, whole_peer_id
from dep2p.encoding.shapes import is_sequence

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.client.queues.queues import ClientQueues

Complete = Callable[[typer.Context, str], list[str]]
_TIMEOUT_S: Final = 2.0
"""Seconds after which the shell gets no values: a key that hangs is worse."""
_VALUES_MAX: Final = 1_000


def complete_with(values: "Callable[[Client, typer.Context], Awaitable[Iterable[str]]]") -> Complete:
    """Return a completion that asks the daemon of the command line. Without a daemon it has no values."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return _fitting(_asked(ctx, values), incomplete)

    return complete


def complete_from(values: Callable[[], Iterable[str]]) -> Complete:
    """Return a completion of values that need no daemon."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        del ctx
        try:
            return _fitting(values(), incomplete)
        except Exception:
            return []

    return complete


def _fitting(values: Iterable[str], incomplete: str) -> list[str]:
    shown = (value for value in values if value.startswith(incomplete) and value.isprintable())
    return sorted(set(shown))[:_VALUES_MAX]


def _asked(ctx: typer.Context, values: "Callable[[Client, typer.Context], Awaitable[Iterable[str]]]") -> Iterable[str]:
    import anyio

    from dep2p.client import Client
    from dep2p.client.opening import transport_for
    from dep2p.client.reconnection.outages import ReconnectBounds
    from dep2p.config.target import TargetArguments, find_daemon

    async def ask() -> Iterable[str]:
        given = TargetArguments(
            socket=_shared(ctx, "shared_socket"),
            data_dir=_shared(ctx, "shared_data_dir"),
            context=_shared(ctx, "shared_context"),
        )
        target = find_daemon(given, os.environ)
        with anyio.fail_after(_TIMEOUT_S):
            async with Client.over(transport_for(target, ReconnectBounds(0.0, 0.0))) as client:
                return await values(client, ctx)

    try:
        return anyio.run(ask)
    except Exception:  # whatever is wrong, the command itself says it; here it would break the user's line
        return ()


def _shared(ctx: typer.Context, name: str) -> str | None:
    """The option, given before or after the command."""
    for each in (ctx, ctx.find_root()):
        value = each.params.get(name)
        if isinstance(value, str) and value.strip():
            return os.path.expanduser(value)
    return None


def _texts(ctx: typer.Context, name: str) -> Sequence[str]:
    """The values of a parameter that the line has already."""
    value: object = ctx.params.get(name)
    if isinstance(value, str):
        return (value,)
    return [each for each in value if isinstance(each, str)] if is_sequence(value) else ()


async def _peers(client: "Client", ctx: typer.Context) -> Iterable[str]:
    del ctx
    return ("self", *await known_peers(client))


async def _first_word_peer(client: "Client", ctx: typer.Context) -> Iterable[str]:
    """PEER of ``PEER NAME BODY``; the others are the caller's own words."""
    return () if _texts(ctx, "words") else await _peers(client, ctx)


async def _realms(client: "Client", ctx: typer.Context) -> Iterable[str]:
    del ctx
    return [each.name for each in await client.realms()]


async def _topics(client: "Client", ctx: typer.Context) -> Iterable[str]:
    del ctx
    return [each.topic for each in await client.topics()]


async def _queues(client: "Client", ctx: typer.Context) -> Iterable[str]:
    return [each.name for each in await _broker(client, ctx).listing()]


async def _channels(client: "Client", ctx: typer.Context) -> Iterable[str]:
    for queue in _texts(ctx, "queue"):
        return [each.name for each in (await _broker(client, ctx).info(queue)).channels]
    return ()


def _broker(client: "Client", ctx: typer.Context) -> "ClientQueues":
    realm = next(iter(_texts(ctx, "realm")), None)
    return client.queues.select(realm, *(peer for text in _texts(ctx, "peer") if (peer := whole_peer_id(text))))


async def _services(client: "Client", ctx: typer.Context) -> Iterable[str]:
    del ctx
    return tuple(await client.offered_services())


async def _sessions(client: "Client", ctx: typer.Context) -> Iterable[str]:
    del ctx
    return [str(each["id"]) for each in await client.sessions.stats() if "id" in each]


def _contexts() -> Iterable[str]:
    from dep2p.config.contexts import DEFAULT, ContextsFile, contexts_path

    return (DEFAULT, *ContextsFile(contexts_path(os.environ)).contexts())


def _error_codes() -> Iterable[str]:
    from dep2p.error_codes import ERRORS

    return ERRORS


contexts: Final = complete_from(_contexts)
realms: Final = complete_with(_realms)
services: Final = complete_with(_services)
BY_PARAMETER: Final[dict[str, Complete]] = {
    "realm": realms,
    "peer": complete_with(_peers),
    "peer_text": complete_with(_peers),
    "critical": complete_with(_peers),
    "sender": complete_with(_peers),
    "words": complete_with(_first_word_peer),
    "topic": complete_with(_topics),
    "queue": complete_with(_queues),
    "channel": complete_with(_channels),
    "session": complete_with(_sessions),
    "shared_context": contexts,
    "code": complete_from(_error_codes),
    "on_full": complete_from(lambda: ("drop-oldest", "drop-newest", "pause")),
    "on_no_peers": complete_from(lambda: ("error", "queue", "ok")),
    "order": complete_from(lambda: ("strict", "best_effort")),
    "log_level": complete_from(lambda: ("debug", "info", "warning", "error")),
    "log_format": complete_from(lambda: ("text", "json")),
    "shell": complete_from(lambda: ("bash", "zsh", "fish", "powershell", "pwsh")),
}
"""By the name of a parameter, which means the same in every command. A command may give its own instead."""
