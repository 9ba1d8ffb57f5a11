"""The client's calls about reliable messages."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from dep2p.client.models import Lagged, Subscription
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.control_api.encoding import encode_headers, encode_payload
from dep2p.types import Headers, PeerId

_LOOK_TIMEOUT_S: Final = 10.0
_FULL_TIMEOUT_S: Final = 600.0
"""A send waits while the outbox is full."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A reliable message at the end of a call."""

    id: str
    peer: PeerId
    state: str
    """``created``, ``sending``, ``delivered``, ``retrying``, or an end: ``acknowledged``, ``failed``, ``expired``."""
    tries: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReliablyPublished:
    """A reliable publish at the end of a call."""

    id: str
    """In hex."""
    sent_to: tuple[PeerId, ...]
    """The neighbours that took it by pub/sub."""
    acknowledged_by: tuple[PeerId, ...]
    missing: dict[PeerId, str]
    """Critical peers that have not acknowledged it, each with its state or the reason of its failure."""


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """A reliable message changed its state."""

    id: str
    realm: str
    peer: PeerId
    name: str
    state: str
    tries: int
    reason: str


class DeliveryCalls:
    """The part of :class:`dep2p.client.Client` about reliable messages."""

    _transport: Transport

    async def send(
        self,
        peer: PeerId | str,
        name: str,
        data: bytes,
        *,
        headers: Headers | None = None,
        realm: str | None = None,
        wait_s: float = 0.0,
        when_full: Literal["wait", "error"] = "wait",
    ) -> Sent:
        """Accept a message for the peer's handler of notifies ``name``: taken once, or its state says why not.

        Returns when it is in the daemon's outbox, on disk by default; with ``wait_s`` also waits so long for its end.
        Raises DeliveryFailedError, DeliveryExpiredError (it ended so within ``wait_s``), DeliveryQueueFullError (only
        ``when_full="error"``), MessageTooLargeError, NotInRealmError, StoreError.
        """
        body: dict[str, Any] = {"peer": peer, "name": name, "wait_s": wait_s, "when_full": when_full}
        body |= encode_payload(data)
        if headers:
            body["headers"] = encode_headers(headers)
        if realm is not None:
            body["realm"] = realm
        answer = await self._transport.call("POST", "/v1/deliveries", body, timeout_s=wait_s + _FULL_TIMEOUT_S)
        return Sent(
            str(answer["id"]),
            PeerId(str(answer["peer"])),
            str(answer["state"]),
            int(answer["tries"]),
            str(answer["reason"]),
        )

    async def outbox(self, *, realm: str | None = None) -> dict[str, Any]:
        """What waits: ``items`` (see the control API's reference), and whether the outbox is on disk."""
        params = {} if realm is None else {"realm": realm}
        return await self._transport.call("GET", "/v1/outbox", params=params, timeout_s=_LOOK_TIMEOUT_S)

    async def flush_outbox(self, *, wait_s: float, realm: str | None = None) -> int:
        """Try every receiver again, and wait until nothing is left, at most ``wait_s``. Returns how many are left."""
        body: dict[str, Any] = {"wait_s": wait_s}
        if realm is not None:
            body["realm"] = realm
        answer = await self._transport.call("POST", "/v1/outbox/flush", body, timeout_s=wait_s + _LOOK_TIMEOUT_S)
        return int(answer["left"])

    async def drop_from_outbox(
        self,
        *,
        message_id: str | None = None,
        peer: PeerId | str | None = None,
        everything: bool = False,
        realm: str | None = None,
    ) -> int:
        """Give up one message, all for a peer, or all. Returns how many."""
        body: dict[str, Any] = {}
        if message_id is not None:
            body["id"] = message_id
        if peer is not None:
            body["peer"] = peer
        if everything:
            body["all"] = True
        if realm is not None:
            body["realm"] = realm
        answer = await self._transport.call("POST", "/v1/outbox/drop", body, timeout_s=_LOOK_TIMEOUT_S)
        return int(answer["dropped"])

    @asynccontextmanager
    async def deliveries(
        self, *, realm: str | None = None
    ) -> AsyncGenerator[AsyncIterator[DeliveryStatus | Lagged], None]:
        """Every change of a reliable message's state from now on, in order."""
        params = {} if realm is None else {"realm": realm}
        async with self._transport.opened("GET", "/v1/deliveries", params=params) as answer:
            yield Subscription(NdjsonLines(answer), _status)


def _status(line: dict[str, object]) -> DeliveryStatus | Lagged:
    if "lagged" in line:
        return Lagged(int(str(line["lagged"])))
    return DeliveryStatus(
        str(line["id"]),
        str(line["realm"]),
        PeerId(str(line["peer"])),
        str(line["name"]),
        str(line["state"]),
        int(str(line["tries"])),
        str(line["reason"]),
    )


def reliable_body(critical_peers: Sequence[PeerId | str], wait_for: str, wait_s: float) -> dict[str, Any]:
    """What a reliable publish says besides."""
    return {"reliable": True, "critical_peers": list(critical_peers), "wait_for": wait_for, "wait_s": wait_s}


def reliably_published(answer: dict[str, Any]) -> ReliablyPublished:
    """The answer to a reliable publish."""
    return ReliablyPublished(
        str(answer["id"]),
        tuple(PeerId(str(peer)) for peer in answer["sent_to"]),
        tuple(PeerId(str(peer)) for peer in answer["acknowledged_by"]),
        {PeerId(str(peer)): str(why) for peer, why in answer["missing"].items()},
    )
