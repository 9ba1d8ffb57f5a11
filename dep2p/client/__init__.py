"""A thin client of a running daemon. Names load on first use: the command line's help loads no anyio."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dep2p.client.client import *  # noqa: F403


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        from dep2p.client import client

        return getattr(client, name)
