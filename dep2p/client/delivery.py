"""Reliable messages through the daemon: receipts, and the outbox that keeps those that wait."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import anyio

from dep2p.arguments import checks_arguments
from dep2p.client.models import NoticingEventStream, line_or_lag, realm_text
from dep2p.client.reconnection.feeds import FeedCall, opened_feed
from dep2p.client.transport import Transport
from dep2p.control_api.calls import DropFromOutbox, FlushOutbox, ReplayLost
from dep2p.control_api.replies import (
    DeliveryLine,
    DeliveryReceipt,
    OutboxDropped,
    OutboxLeft,
    OutboxList,
    OutboxReplayed,
)
from dep2p.errors import DeliveryFailedError
from dep2p.gossipsub.topic_types import Lagged, PublishResult, WaitFor
from dep2p.protocols.delivery.states import (
    ENDS,
    DeliveryState,
    DeliveryStatus,
    acknowledged_by,
    missing,
    raise_unless_acknowledged,
)
from dep2p.types import PeerId

if TYPE_CHECKING:
    from dep2p.realm.credentials import RealmChoice

_LOOK_TIMEOUT_S: Final = 10.0
FULL_TIMEOUT_S: Final = 600.0
"""Seconds for a send, which waits while the outbox is full."""
_WAIT_S: Final = 20.0
"""Seconds of one call that waits for the end of a message."""


class ClientReceipt:
    """A message that was accepted for one receiver. `wait` for its end, or look at `state`."""

    def __init__(self, transport: Transport, accepted: DeliveryReceipt, name: str, topic: str = "") -> None:
        self._transport = transport
        self._known = accepted
        self.peer: PeerId = accepted.peer
        self.name: str = name
        self.topic: str = topic
        """The topic of the message; empty for a direct one."""

    def __repr__(self) -> str:
        return f"<receipt {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """The message's name in `dep2p outbox ls`: the receiver's id and the message's number for it."""
        return self._known.id

    @property
    def state(self) -> DeliveryState:
        """Its state, by the daemon's last answer."""
        return DeliveryState(self._known.state)

    @property
    def tries(self) -> int:
        """How often it was sent."""
        return self._known.tries

    @property
    def reason(self) -> str:
        """Why it failed or expired."""
        return self._known.reason

    @property
    def may_have_been_taken(self) -> bool:
        """Whether it failed or expired, and the receiver's handler may have taken it all the same: it was sent, and no
        word came back. A program that sends it again may cause its effect twice."""
        return self._known.may_have_been_taken

    @property
    def has_ended(self) -> bool:
        """Whether it is acknowledged, failed or expired."""
        return self.state in ENDS

    async def until_ended(self) -> DeliveryState:
        """Wait for the end and return the state; never raises for a message that failed.

        Raises DeliveryUnknownError when the daemon was restarted or has forgotten how the message ended.
        """
        path = f"/v1/deliveries/{quote(self.id, safe='')}"
        while not self.has_ended:
            params, timeout_s = {"wait_s": f"{_WAIT_S:g}"}, _WAIT_S + _LOOK_TIMEOUT_S
            self._known = await self._transport.ask("GET", path, DeliveryReceipt, params=params, timeout_s=timeout_s)
        return self.state

    async def wait(self) -> None:
        """Return when the receiver's handler took the message.

        Raises DeliveryFailedError (rejected, tries used up, dropped), DeliveryExpiredError, and what `until_ended`
        raises. Giving up the wait does not give up the message.
        """
        state = await self.until_ended()
        raise_unless_acknowledged(state, self.peer, self.reason, may_have_been_taken=self.may_have_been_taken)


class ClientTopicPublish:
    """A reliable publish: the result of pub/sub, and the receipt of each critical peer."""

    def __init__(self, result: PublishResult, receipts: Sequence[ClientReceipt], wait_for: WaitFor) -> None:
        self.result = result
        self.receipts: tuple[ClientReceipt, ...] = tuple(receipts)
        self.wait_for: WaitFor = wait_for

    @property
    def acknowledged_by(self) -> tuple[PeerId, ...]:
        """The critical peers whose app has handled it so far."""
        return acknowledged_by(self.receipts)

    @property
    def missing(self) -> dict[PeerId, str]:
        """The critical peers that have not handled it, each with its state or the reason of its failure."""
        return missing(self.receipts)

    async def wait(self) -> None:
        """Wait until all (or any) critical peers have handled it. Raises DeliveryFailedError when that is not possible
        any more.

        With "all", the first one that fails ends the wait; the others are still tried.
        """
        failed: list[ClientReceipt] = []
        errors: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def one(receipt: ClientReceipt) -> None:
                try:
                    is_acknowledged = await receipt.until_ended() is DeliveryState.ACKNOWLEDGED
                except Exception as error:
                    errors.append(error)
                    group.cancel_scope.cancel()
                    return
                if not is_acknowledged:
                    failed.append(receipt)
                if is_acknowledged is (self.wait_for == "any"):
                    group.cancel_scope.cancel()

            for receipt in self.receipts:
                group.start_soon(one, receipt)
        if errors:
            raise errors[0]
        if self.wait_for == "any" and not self.acknowledged_by:
            reasons = "; ".join(f"{peer}: {why}" for peer, why in self.missing.items())
            raise DeliveryFailedError(f"none of the critical peers has acknowledged the message: {reasons}")
        if self.wait_for == "all" and failed:
            first = failed[0]
            raise_unless_acknowledged(
                first.state, first.peer, first.reason, may_have_been_taken=first.may_have_been_taken
            )


@checks_arguments
class ClientOutbox:
    """The reliable messages that wait in the daemon, and those that were lost: ``client.outbox``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def listing(self, *, failed: bool = False, realm: "RealmChoice" = None) -> OutboxList:
        """The messages that wait, or with ``failed`` those that were lost, and whether the outbox is on disk; of one
        realm, or of all."""
        params = _params(realm) | ({"failed": "1"} if failed else {})
        return await self._transport.ask("GET", "/v1/outbox", OutboxList, params=params, timeout_s=_LOOK_TIMEOUT_S)

    async def flush(self, *, timeout_s: float | None = None, realm: "RealmChoice" = None) -> int:
        """Try every receiver again, and wait until no message waits, at most ``timeout_s``. Returns how many messages
        remain."""
        until = None if timeout_s is None else anyio.current_time() + timeout_s
        while True:
            wait_s = _WAIT_S if until is None else max(0.0, min(_WAIT_S, until - anyio.current_time()))
            call = FlushOutbox(wait_s=wait_s, realm=realm_text(realm))
            timeout_of_call_s = wait_s + _LOOK_TIMEOUT_S
            left = await self._transport.ask("POST", "/v1/outbox/flush", OutboxLeft, call, timeout_s=timeout_of_call_s)
            if not left.left or (until is not None and anyio.current_time() >= until):
                return left.left

    async def drop(
        self, message_id: str | None = None, *, peer: PeerId | None = None, realm: "RealmChoice" = None
    ) -> int:
        """Give up one message, all for a peer, or all; they end as failed. Returns how many."""
        return await self._drop(message_id, peer, realm, failed=False)

    async def forget_lost(
        self, message_id: str | None = None, *, peer: PeerId | None = None, realm: "RealmChoice" = None
    ) -> int:
        """Forget a lost message, all for a peer, or all. Returns how many."""
        return await self._drop(message_id, peer, realm, failed=True)

    async def _drop(self, message_id: str | None, peer: PeerId | None, realm: "RealmChoice", *, failed: bool) -> int:
        everything = message_id is None and peer is None
        call = DropFromOutbox(id=message_id, peer=peer, all=everything, failed=failed, realm=realm_text(realm))
        answer = await self._transport.ask("POST", "/v1/outbox/drop", OutboxDropped, call, timeout_s=_LOOK_TIMEOUT_S)
        return answer.dropped

    async def replay(
        self, message_id: str | None = None, *, peer: PeerId | None = None, realm: "RealmChoice" = None
    ) -> int:
        """Send a lost message again, all for a peer, or all: each as a new message, with its time to live anew. Returns
        how many. Waits while the outbox is full. Raises StoreError."""
        everything = message_id is None and peer is None
        call = ReplayLost(id=message_id, peer=peer, all=everything, realm=realm_text(realm))
        path = "/v1/outbox/replay"
        return (await self._transport.ask("POST", path, OutboxReplayed, call, timeout_s=FULL_TIMEOUT_S)).replayed

    @asynccontextmanager
    async def statuses(
        self, *, realm: "RealmChoice" = None
    ) -> AsyncGenerator[AsyncIterator[DeliveryStatus | Lagged], None]:
        """Yield every change of a reliable message's state from now on, in order; of one realm, or of all.

        Changes while the daemon is away are missing, with a :class:`FeedInterrupted` and a :class:`FeedResumed`; the
        messages themselves are not lost.
        """
        feed = FeedCall("GET", "/v1/deliveries", "states of reliable messages", loses=True, params=_params(realm))
        async with opened_feed(self._transport, feed) as lines:
            yield NoticingEventStream(lines, _status)


def _params(realm: "RealmChoice") -> dict[str, str]:
    text = realm_text(realm)
    return {} if text is None else {"realm": text}


def _status(line: dict[str, object]) -> DeliveryStatus | Lagged:
    status = line_or_lag(line, DeliveryLine)
    if isinstance(status, Lagged):
        return status
    state = DeliveryState(status.state)
    return DeliveryStatus(
        status.id,
        status.peer,
        status.name,
        state,
        status.tries,
        status.reason,
        status.realm_id,
        status.may_have_been_taken,
    )
