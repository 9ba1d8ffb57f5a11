"""The client's calls about reliable messages."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypedDict, Unpack

from dep2p.arguments import checks_arguments
from dep2p.client.models import EventStream, FeedLagged, line_or_lag
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.control_api.calls import DropFromOutbox, FlushOutbox, ReplayLost, SendReliably, base64_text
from dep2p.control_api.encoding import encode_headers
from dep2p.control_api.replies import (
    DeliveryLine,
    DeliveryReceipt,
    OutboxDropped,
    OutboxLeft,
    OutboxList,
    OutboxReplayed,
)
from dep2p.types import Headers, PeerId

_LOOK_TIMEOUT_S: Final = 10.0
_FULL_TIMEOUT_S: Final = 600.0
"""Seconds for a send, which waits while the outbox is full."""


class ReliableOptions(TypedDict, total=False):
    """The options of a reliable message, as keyword arguments."""

    headers: Headers | None
    """The app's headers, for the handler."""
    ttl_s: float | None
    """Seconds until it expires, at most 30 days; the daemon's ``delivery_age_max_s`` by default."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A reliable message at the end of the call that sent it."""

    id: str
    peer: PeerId
    state: str
    """``created``, ``sending``, ``delivered``, ``retrying``, or an end: ``acknowledged``, ``failed``, ``expired``."""
    tries: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReliablyPublished:
    """A reliable publish at the end of its call."""

    id: str
    """The message id in hex."""
    sent_to: tuple[PeerId, ...]
    """The neighbours that took it by pub/sub."""
    acknowledged_by: tuple[PeerId, ...]
    missing: dict[PeerId, str]
    """Critical peers that have not acknowledged it, each with its state or the reason of its failure."""


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """A change of a reliable message's state."""

    id: str
    realm: str
    peer: PeerId
    name: str
    state: str
    tries: int
    reason: str


@checks_arguments
class DeliveryClientApi:
    """The part of :class:`dep2p.client.Client` about reliable messages."""

    _transport: Transport

    async def send(
        self,
        peer: PeerId | str,
        name: str,
        body: bytes,
        *,
        realm: str | None = None,
        wait_s: float = 0.0,
        when_full: Literal["wait", "error"] = "wait",
        **options: Unpack[ReliableOptions],
    ) -> Sent:
        """Accept a message for the peer's handler of notifies ``name``. The peer handles it once, or its state says why
        not.

        Returns when it is in the daemon's outbox, on disk by default; with ``wait_s`` also waits so long for its end.
        Raises DeliveryFailedError, DeliveryExpiredError (it ended so within ``wait_s``), DeliveryQueueFullError (only
        ``when_full="error"``), MessageTooLargeError, NotInRealmError, StoreError.
        """
        if unknown := options.keys() - ReliableOptions.__annotations__.keys():
            raise TypeError(f"send takes no {', '.join(sorted(unknown))}: its options are headers and ttl_s")
        headers = options.get("headers")
        call = SendReliably(
            peer=peer,
            name=name,
            data=base64_text(body),
            headers=encode_headers(headers) if headers else None,
            realm=realm,
            wait_s=wait_s,
            when_full=when_full,
            ttl_s=options.get("ttl_s"),
        )
        timeout_s = wait_s + _FULL_TIMEOUT_S
        sent = await self._transport.ask("POST", "/v1/deliveries", DeliveryReceipt, call, timeout_s=timeout_s)
        return Sent(sent.id, sent.peer, sent.state, sent.tries, sent.reason)

    async def outbox(self, *, failed: bool = False, realm: str | None = None) -> OutboxList:
        """The messages that wait, or with ``failed`` those that were lost, and whether the outbox is on disk."""
        params = {} if realm is None else {"realm": realm}
        if failed:
            params["failed"] = "1"
        return await self._transport.ask("GET", "/v1/outbox", OutboxList, params=params, timeout_s=_LOOK_TIMEOUT_S)

    async def flush_outbox(self, *, wait_s: float, realm: str | None = None) -> int:
        """Try every receiver again, and wait until the outbox is empty, at most ``wait_s``. Returns how many messages
        remain."""
        call, timeout_s = FlushOutbox(wait_s=wait_s, realm=realm), wait_s + _LOOK_TIMEOUT_S
        return (await self._transport.ask("POST", "/v1/outbox/flush", OutboxLeft, call, timeout_s=timeout_s)).left

    async def drop_from_outbox(
        self,
        *,
        message_id: str | None = None,
        peer: PeerId | str | None = None,
        everything: bool = False,
        failed: bool = False,
        realm: str | None = None,
    ) -> int:
        """Give up one message, all for a peer, or all; with ``failed`` forget lost ones instead. Returns how many."""
        call = DropFromOutbox(id=message_id, peer=peer, all=everything, failed=failed, realm=realm)
        answer = await self._transport.ask("POST", "/v1/outbox/drop", OutboxDropped, call, timeout_s=_LOOK_TIMEOUT_S)
        return answer.dropped

    async def replay_lost(
        self,
        *,
        message_id: str | None = None,
        peer: PeerId | str | None = None,
        everything: bool = False,
        realm: str | None = None,
    ) -> int:
        """Send one lost message again, all for a peer, or all, each as a new message. Returns how many.

        Waits while the outbox is full. Raises StoreError.
        """
        call = ReplayLost(id=message_id, peer=peer, all=everything, realm=realm)
        path, timeout_s = "/v1/outbox/replay", _FULL_TIMEOUT_S
        return (await self._transport.ask("POST", path, OutboxReplayed, call, timeout_s=timeout_s)).replayed

    @asynccontextmanager
    async def deliveries(
        self, *, realm: str | None = None
    ) -> AsyncGenerator[AsyncIterator[DeliveryStatus | FeedLagged], None]:
        """Yield every change of a reliable message's state from now on, in order."""
        params = {} if realm is None else {"realm": realm}
        async with self._transport.opened("GET", "/v1/deliveries", params=params) as answer:
            yield EventStream(NdjsonLines(answer), _status)


def _status(line: dict[str, object]) -> DeliveryStatus | FeedLagged:
    status = line_or_lag(line, DeliveryLine)
    if isinstance(status, FeedLagged):
        return status
    return DeliveryStatus(status.id, status.realm, status.peer, status.name, status.state, status.tries, status.reason)
