"""What newcomers get wrong when they call a :class:`dep2p.node.Node`, told before anything is opened or sent."""

from collections.abc import Iterable
from inspect import iscoroutinefunction, isfunction

import trio

from dep2p.realm.secret import Realm


def check_arguments(realm: object, realms: Iterable[object], **addrs: object) -> None:
    """Raises ``RuntimeError`` outside trio, ``TypeError`` for a realm that is none or addresses that are no list."""
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError("a Node runs in trio: trio.run(main). From asyncio, use dep2p.client.Client with a daemon.")
    for each in [*([] if realm is None else [realm]), *realms]:
        if not isinstance(each, Realm):
            raise TypeError(f"a realm must be a dep2p.Realm, not {type(each).__name__}; several go into realms=[…]")
    for name, value in addrs.items():
        if isinstance(value, str):
            raise TypeError(f"{name} takes a list of addresses: [{value!r}]")


def check_decorated(name: object) -> None:
    """Raises ``TypeError`` for a decorator that was written without its name: the function would be lost in silence."""
    if callable(name):
        raise TypeError("the decorator needs a name, like @node.on_request('greet')")


def check_handler(function: object) -> None:
    """Raises ``TypeError`` for a plain def; other callables, and what wraps a function, may well give an awaitable."""
    if isfunction(function) and not iscoroutinefunction(function) and not hasattr(function, "__wrapped__"):
        raise TypeError(f"the handler {function.__name__}() must be an async def")
