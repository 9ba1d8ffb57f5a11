"""The client's calls about partitions of queues, and about who holds them."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from dep2p.client.transport import Transport


class QueueOrderCalls:
    """The part of :class:`dep2p.client.Client` about partitions and exclusive channels."""

    _transport: Transport

    async def queue_expand(
        self,
        name: str,
        partitions: int,
        *,
        realm: str | None = None,
        peer: str | None = None,
        nodes: Sequence[str] = (),
    ) -> dict[str, Any]:
        """So many partitions in all; gives the route table with the ``added`` ones. The order of each key holds.

        ``nodes``: for a queue on several nodes, where the new ones are; by default on those that it has.
        Raises QueueNotFoundError, QueueAccessError, ``ControlError`` D1005 for fewer than there are.
        """
        body: dict[str, object] = {"partitions": partitions}
        if nodes:
            body["nodes"] = list(nodes)
        return await self._transport.call("POST", f"{_path(name)}/expand", body, params=_params(realm, peer))

    async def queue_route(self, name: str, *, realm: str | None = None, peer: str | None = None) -> dict[str, Any]:
        """The route table: ``version``, ``routes`` (``low``, ``high``, ``partition``, ``after``) and ``partitions``.

        Of a queue on several nodes, each with its ``node``, the name of the ``share`` there, and whether it ``is_up``.
        """
        return await self._transport.call("GET", f"{_path(name)}/route", params=_params(realm, peer))

    async def queue_consumers(
        self, name: str, channel: str, *, realm: str | None = None, peer: str | None = None
    ) -> dict[str, Any]:
        """The ``consumers`` of a channel: ``consumer``, ``partitions``, ``in_flight``, and ``lease_left_s`` in an
        ``exclusive`` one."""
        path = f"{_path(name)}/channels/{quote(channel, safe='')}/consumers"
        return await self._transport.call("GET", path, params=_params(realm, peer))

    async def queue_locks(
        self, name: str, channel: str, *, realm: str | None = None, peer: str | None = None
    ) -> dict[str, Any]:
        """The ``locks`` of an ``exclusive`` channel: ``partition``, ``consumer``, ``epoch``, ``since_s`` (Unix)."""
        path = f"{_path(name)}/channels/{quote(channel, safe='')}/locks"
        return await self._transport.call("GET", path, params=_params(realm, peer))


def _path(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


def _params(realm: str | None, peer: str | None) -> dict[str, str]:
    return {name: value for name, value in (("realm", realm), ("peer", peer)) if value is not None}
