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
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import json_response
from dep2p.delivery.receipts import Receipt
from dep2p.delivery.service import TTL_MAX_S
from dep2p.gossipsub.topic_types import Acknowledgement, Lagged
from dep2p.types import PeerId


def _wait_s(control: Control, wait_s: float | None) -> float:
    return within("wait_s", wait_s, default=0.0, high=control.bounds.timeout_max_s, may_be_zero=True)


def _ttl_s(ttl_s: float | None) -> float | None:
    return None if ttl_s is None else within("ttl_s", ttl_s, default=0.0, high=TTL_MAX_S)


async def send(control: Control, request: Request) -> ASGIApp:
    """Accept one message. With ``wait_s`` also wait so long for its end, and fail unless it is acknowledged."""
    call = await read_call(request, control.bounds, SendReliably)
    peer, name, headers = PeerId(as_peer(call.peer)), checked_name(call.name), headers_of(call.headers)
    data = payload_of(call, control.config.limits.message_bytes_max)
    wait_s = _wait_s(control, call.wait_s)
    ttl_s = _ttl_s(call.ttl_s)
    delivery = control.node.delivery(call.realm)
    with control.lifecycle.work():
        receipt = await delivery.send(peer, name, data, headers=headers, wait=call.when_full == "wait", ttl_s=ttl_s)
        control.receipts.add(receipt)
        with trio.move_on_after(wait_s):
            await receipt.wait()
    return json_response(_receipt(receipt), 202)


def _receipt(receipt: Receipt) -> DeliveryReceipt:
    return DeliveryReceipt(
        id=receipt.id,
        peer=receipt.peer,
        state=receipt.state.value,
        tries=receipt.tries,
        reason=receipt.reason,
        may_have_been_taken=receipt.may_have_been_taken,
    )


async def look(control: Control, request: Request) -> ASGIApp:
    """Return the state of one message that a call has accepted, or at its end if that is within ``wait_s``."""
    query = query_fields(request)
    try:
        wait_s = float(query.text("wait_s", "0"))
    except ValueError:
        raise query.wrong("wait_s", "is not a number") from None
    wait_s = _wait_s(control, wait_s)
    query.finish()
    receipt = control.receipts.find(path_text(request, "id"))
    with trio.move_on_after(wait_s):
        await receipt.until_ended()
    return json_response(_receipt(receipt))


async def publish_reliably(control: Control, topic: str, data: bytes, call: PublishCall) -> ReliablePublishReply:
    """Publish reliably."""
    critical = [PeerId(as_peer(text)) for text in call.critical_peers or ()]
    wait_s = _wait_s(control, call.wait_s)
    topics = control.node.delivery(call.realm).topics
    assert topics is not None  # every realm has pub/sub
    headers, origin = headers_of(call.headers), control.topics.handle(call.handle)
    by = Acknowledgement(critical or None, call.wait_for or "all", _ttl_s(call.ttl_s))
    with control.lifecycle.work():
        published = await topics.publish(topic, data, by, call.wait, origin=origin, headers=headers)
        for receipt in published.receipts:
            control.receipts.add(receipt)
        with trio.move_on_after(wait_s):
            await published.wait()
    result = published.result
    return ReliablePublishReply(
        id=result.id.hex(),
        sent_to=tuple(result.sent_to),
        queued=result.queued,
        dropped=tuple(result.dropped),
        local_subscriptions=result.local_subscriptions,
        seqno=result.seqno,
        acknowledged_by=tuple(published.acknowledged_by),
        missing=dict(published.missing),
        receipts=tuple(map(_receipt, published.receipts)),
    )


async def outbox(control: Control, request: Request) -> ASGIApp:
    """List the messages that wait in the outbox, or with ``failed`` those that were lost."""
    query = query_fields(request)
    realm, failed = query.optional_text("realm"), query.choice("failed", ("0", "1")) == "1"
    query.finish()
    return json_response(control.node.outbox.listing(failed=failed, realm=realm))


async def flush(control: Control, request: Request) -> ASGIApp:
    """Try every receiver again at once. Wait until all messages have ended, or the time is over."""
    call = await read_call(request, control.bounds, FlushOutbox)
    wait_s = _wait_s(control, call.wait_s)
    return json_response(OutboxLeft(left=await control.node.outbox.flush(timeout_s=wait_s, realm=call.realm)))


async def drop(control: Control, request: Request) -> ASGIApp:
    """Give up messages: one by its id, those for a peer, or all; or forget lost ones."""
    call = await read_call(request, control.bounds, DropFromOutbox)
    outbox, peer = control.node.outbox, _chosen_peer(call)
    give_up = outbox.forget_lost if call.failed else outbox.drop
    return json_response(OutboxDropped(dropped=give_up(call.id, peer=peer, realm=call.realm)))


async def replay(control: Control, request: Request) -> ASGIApp:
    """Send lost messages again: one by its id, those for a peer, or all."""
    call = await read_call(request, control.bounds, ReplayLost)
    peer = _chosen_peer(call)
    with control.lifecycle.work():
        replayed = await control.node.outbox.replay(call.id, peer=peer, realm=call.realm)
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
    names = {each.realm_id: each.name for each in control.node.realms()}
    queue = control.subscriptions.open("deliveries")
    scope = trio.CancelScope()

    async def feed(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with scope:
            async with control.node.outbox.statuses(realm=realm) as statuses:
                task_status.started()
                async for status in statuses:
                    if isinstance(status, Lagged):
                        queue.put(encode_line({"lagged": status.count}))
                        continue
                    line = DeliveryLine(
                        id=status.id,
                        realm=names[status.realm],
                        realm_id=status.realm,
                        peer=status.peer,
                        name=status.name,
                        state=status.state.value,
                        tries=status.tries,
                        reason=status.reason,
                        may_have_been_taken=status.may_have_been_taken,
                    )
                    queue.put(encode_line(line))

    def end() -> None:
        scope.cancel()
        control.subscriptions.forget(queue)

    try:
        await control.nursery.start(feed)
    except BaseException:
        end()
        raise
    return LinesResponse(queue, end)


ROUTES: list[Route] = [
    route("POST", "/v1/deliveries", send),
    route("GET", "/v1/deliveries", follow),
    route("GET", "/v1/deliveries/{id}", look),
    route("GET", "/v1/outbox", outbox),
    route("POST", "/v1/outbox/flush", flush),
    route("POST", "/v1/outbox/drop", drop),
    route("POST", "/v1/outbox/replay", replay),
]
