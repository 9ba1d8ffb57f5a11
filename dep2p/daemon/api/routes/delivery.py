"""Reliable messages: send one, look at the outbox, wait for it, drop from it, follow it."""

import trio
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import DropFromOutbox, FlushOutbox, PublishCall, ReplayLost, SendReliably
from dep2p.control_api.encoding import encode_line
from dep2p.control_api.replies import (
    DeliveryLine,
    DeliveryReceipt,
    OutboxDropped,
    OutboxLeft,
    OutboxList,
    OutboxMessage,
    OutboxReplayed,
    ReliablePublishReply,
)
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import (
    as_peer,
    checked_name,
    headers_of,
    payload_of,
    query_fields,
    read_call,
    within,
    wrong_field,
)
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import route
from dep2p.daemon.problems import json_response
from dep2p.delivery.receipts import StatusesMissed
from dep2p.delivery.service import TTL_MAX_S, ReliableDelivery
from dep2p.delivery.types import OutboxItem
from dep2p.types import PeerId


def _wait_s(control: Control, wait_s: float | None) -> float:
    return within("wait_s", wait_s, default=0.0, high=control.bounds.timeout_max_s, may_be_zero=True)


async def send(control: Control, request: Request) -> ASGIApp:
    """Accept one message. With ``wait_s`` also wait so long for its end, and fail unless it is acknowledged."""
    call = await read_call(request, control.bounds, SendReliably)
    peer, name, headers = PeerId(as_peer(call.peer)), checked_name(call.name), headers_of(call.headers)
    data = payload_of(call, control.config.limits.message_bytes_max)
    wait_s = _wait_s(control, call.wait_s)
    ttl_s = None if call.ttl_s is None else within("ttl_s", call.ttl_s, default=0.0, high=TTL_MAX_S)
    delivery = control.node.delivery(call.realm)
    with control.lifecycle.work():
        receipt = await delivery.send(peer, name, data, headers=headers, wait=call.when_full == "wait", ttl_s=ttl_s)
        with trio.move_on_after(wait_s):
            await receipt.wait()
    return json_response(
        DeliveryReceipt(
            id=receipt.id, peer=receipt.peer, state=receipt.state.value, tries=receipt.tries, reason=receipt.reason
        ),
        202,
    )


async def publish_reliably(control: Control, topic: str, data: bytes, call: PublishCall) -> ReliablePublishReply:
    """Publish reliably."""
    critical = [PeerId(as_peer(text)) for text in call.critical_peers or ()]
    wait_s = _wait_s(control, call.wait_s)
    with control.lifecycle.work():
        published = await control.node.publish_reliably(
            topic, data, critical or None, call.wait_for or "all", call.realm
        )
        with trio.move_on_after(wait_s):
            await published.wait()
    result = published.result
    return ReliablePublishReply(
        id=result.id.hex(),
        sent_to=tuple(result.sent_to),
        queued=result.queued,
        dropped=tuple(result.dropped),
        local_subscriptions=result.local_subscriptions,
        acknowledged_by=tuple(published.acknowledged_by),
        missing=dict(published.missing),
    )


def _summary(item: OutboxItem, realm: str) -> OutboxMessage:
    return OutboxMessage(
        id=item.id,
        realm=realm,
        peer=item.peer,
        name=item.name,
        topic=item.topic or None,
        state=item.state.value,
        size_bytes=item.size_bytes,
        tries=item.tries,
        age_s=round(item.age_s, 3),
        last_error=item.last_error,
    )


def _deliveries(control: Control, realm: str | None) -> list[tuple[str, ReliableDelivery]]:
    """Return the reliable delivery of one realm, or of all."""
    if realm is not None:
        return [(control.node.realm(realm).name, control.node.delivery(realm))]
    return [(each.name, control.node.delivery(each.realm_id)) for each in control.node.realms()]


async def outbox(control: Control, request: Request) -> ASGIApp:
    """List the messages that wait in the outbox, or with ``failed`` those that were lost."""
    query = query_fields(request)
    realm, failed = query.optional_text("realm"), query.choice("failed", ("0", "1")) == "1"
    query.finish()
    items: list[OutboxMessage] = []
    is_durable, lost = False, 0
    for name, delivery in _deliveries(control, realm):
        items += [_summary(item, name) for item in (delivery.lost() if failed else delivery.outbox())]
        stats = delivery.stats()
        is_durable, lost = stats.is_durable, lost + stats.lost_items
    return json_response(OutboxList(items=tuple(items), is_durable=is_durable, lost=lost))


async def flush(control: Control, request: Request) -> ASGIApp:
    """Try every receiver again at once. Wait until all messages have ended, or the time is over."""
    call = await read_call(request, control.bounds, FlushOutbox)
    wait_s = _wait_s(control, call.wait_s)
    chosen = [delivery for _name, delivery in _deliveries(control, call.realm)]
    with trio.move_on_after(wait_s):
        for delivery in chosen:
            delivery.retry_now()
        for delivery in chosen:
            await delivery.flush()
    return json_response(OutboxLeft(left=sum(len(delivery.outbox()) for delivery in chosen)))


async def drop(control: Control, request: Request) -> ASGIApp:
    """Give up messages: one by its id, those for a peer, or all; or forget lost ones."""
    call = await read_call(request, control.bounds, DropFromOutbox)
    chosen = _chosen_peer(call)
    dropped = 0
    for _name, delivery in _deliveries(control, call.realm):
        dropped += (delivery.forget_lost if call.failed else delivery.drop)(call.id, peer=chosen)
    return json_response(OutboxDropped(dropped=dropped))


async def replay(control: Control, request: Request) -> ASGIApp:
    """Send lost messages again: one by its id, those for a peer, or all."""
    call = await read_call(request, control.bounds, ReplayLost)
    chosen = _chosen_peer(call)
    replayed = 0
    with control.lifecycle.work():
        for _name, delivery in _deliveries(control, call.realm):
            replayed += await delivery.replay(call.id, peer=chosen)
    return json_response(OutboxReplayed(replayed=replayed))


def _chosen_peer(call: DropFromOutbox | ReplayLost) -> PeerId | None:
    """Return the peer that a call chooses messages by. Raises :class:`Problem` unless it chooses in one way."""
    if sum((call.id is not None, call.peer is not None, call.all)) != 1:
        raise wrong_field("id", "must be the only one given of id, peer and all")
    return None if call.peer is None else PeerId(as_peer(call.peer))


async def follow(control: Control, request: Request) -> ASGIApp:
    """Send changes of state, from now on."""
    query = query_fields(request)
    realm = query.optional_text("realm")
    query.finish()
    chosen = _deliveries(control, realm)
    queue = control.subscriptions.open("deliveries")
    scopes = [trio.CancelScope() for _ in chosen]

    async def feed(
        name: str,
        delivery: ReliableDelivery,
        scope: trio.CancelScope,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with scope:
            async with delivery.statuses() as statuses:
                task_status.started()
                async for status in statuses:
                    if isinstance(status, StatusesMissed):
                        queue.put(encode_line({"lagged": status.count}))
                        continue
                    line = DeliveryLine(
                        id=status.id,
                        realm=name,
                        peer=status.peer,
                        name=status.name,
                        state=status.state.value,
                        tries=status.tries,
                        reason=status.reason,
                    )
                    queue.put(encode_line(line))

    def end() -> None:
        for scope in scopes:
            scope.cancel()
        control.subscriptions.forget(queue)

    try:
        for (name, delivery), scope in zip(chosen, scopes, strict=True):
            await control.nursery.start(feed, name, delivery, scope)
    except BaseException:
        end()
        raise
    return LinesResponse(queue, end)


ROUTES: list[Route] = [
    route("POST", "/v1/deliveries", send),
    route("GET", "/v1/deliveries", follow),
    route("GET", "/v1/outbox", outbox),
    route("POST", "/v1/outbox/flush", flush),
    route("POST", "/v1/outbox/drop", drop),
    route("POST", "/v1/outbox/replay", replay),
]
