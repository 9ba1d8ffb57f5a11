"""Reliable messages: send one, look at the outbox, wait for it, drop from it, follow it."""

from typing import Literal

import trio
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.encoding import encode_line
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import Fields, as_peer, query_fields, read_json
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import route
from dep2p.daemon.problems import json_response
from dep2p.delivery.receipts import Receipt, StatusesMissed
from dep2p.delivery.service import Delivery
from dep2p.delivery.topic_delivery import TopicPublish
from dep2p.delivery.types import OutboxItem
from dep2p.pubsub.types import WaitFor
from dep2p.types import PeerId

_WAIT_FOR: tuple[WaitFor, ...] = ("all", "any")
_WHEN_FULL: tuple[Literal["wait", "error"], ...] = ("wait", "error")
_CRITICAL_MAX = 256


def _wait_s(control: Control, fields: Fields) -> float:
    return fields.number("wait_s", 0.0, high=control.bounds.timeout_max_s, may_be_low=True)


def receipt_fields(receipt: Receipt) -> dict[str, object]:
    """A receipt in JSON."""
    return {
        "id": receipt.id,
        "peer": receipt.peer,
        "state": receipt.state.value,
        "tries": receipt.tries,
        "reason": receipt.reason,
    }


async def send(control: Control, request: Request) -> ASGIApp:
    """Accept one message; with ``wait_s`` also wait so long for its end, and fail when that is not the good one."""
    fields = await read_json(request, control.bounds)
    peer = PeerId(as_peer(fields.text("peer")))
    data = fields.payload(control.config.limits.message_bytes_max)
    name, headers, realm = fields.name(), fields.headers(), fields.optional_text("realm")
    wait_s = _wait_s(control, fields)
    when_full = fields.choice("when_full", _WHEN_FULL)
    fields.finish()
    delivery = control.node.delivery(realm)
    with control.lifecycle.work():
        receipt = await delivery.send(peer, name, data, headers=headers, wait=when_full == "wait")
        with trio.move_on_after(wait_s):
            await receipt.wait()
    return json_response(receipt_fields(receipt), 202)


async def publish_reliably(
    control: Control, topic: str, data: bytes, fields: Fields, realm: str | None
) -> dict[str, object]:
    """A reliable publish; ``fields`` are what is left of the call's body."""
    critical = [PeerId(as_peer(text)) for text in fields.texts("critical_peers", items_max=_CRITICAL_MAX)]
    wait_for: WaitFor = fields.choice("wait_for", _WAIT_FOR)
    wait_s = _wait_s(control, fields)
    fields.finish()
    with control.lifecycle.work():
        published = await control.node.publish_reliably(topic, data, critical or None, wait_for, realm)
        with trio.move_on_after(wait_s):
            await published.wait()
    return publish_fields(published)


def publish_fields(published: TopicPublish) -> dict[str, object]:
    """A reliable publish in JSON."""
    result = published.result
    return {
        "id": result.id.hex(),
        "sent_to": list(result.sent_to),
        "queued": result.queued,
        "dropped": list(result.dropped),
        "acknowledged_by": list(published.acknowledged_by),
        "missing": published.missing,
    }


def _item_fields(item: OutboxItem, realm: str) -> dict[str, object]:
    return {
        "id": item.id,
        "realm": realm,
        "peer": item.peer,
        "name": item.name,
        "topic": item.topic or None,
        "state": item.state.value,
        "size_bytes": item.size_bytes,
        "tries": item.tries,
        "age_s": round(item.age_s, 3),
        "last_error": item.last_error,
    }


def _deliveries(control: Control, realm: str | None) -> list[tuple[str, Delivery]]:
    """Those of one realm, or of all."""
    if realm is not None:
        return [(control.node.realm(realm).name, control.node.delivery(realm))]
    return [(each.name, control.node.delivery(each.realm_id)) for each in control.node.realms()]


async def outbox(control: Control, request: Request) -> ASGIApp:
    """What waits, and the bounds."""
    query = query_fields(request)
    realm = query.optional_text("realm")
    query.finish()
    items: list[dict[str, object]] = []
    is_durable = False
    for name, delivery in _deliveries(control, realm):
        items += [_item_fields(item, name) for item in delivery.outbox()]
        is_durable = delivery.stats().is_durable
    return json_response({"items": items, "is_durable": is_durable})


async def flush(control: Control, request: Request) -> ASGIApp:
    """Try every receiver again at once, and wait until all has ended, or the time is over."""
    fields = await read_json(request, control.bounds)
    realm, wait_s = fields.optional_text("realm"), _wait_s(control, fields)
    fields.finish()
    chosen = [delivery for _name, delivery in _deliveries(control, realm)]
    with trio.move_on_after(wait_s):
        for delivery in chosen:
            delivery.retry_now()
        for delivery in chosen:
            await delivery.flush()
    return json_response({"left": sum(len(delivery.outbox()) for delivery in chosen)})


async def drop(control: Control, request: Request) -> ASGIApp:
    """Give up messages: one by its id, those for a peer, or all."""
    fields = await read_json(request, control.bounds)
    realm, message_id = fields.optional_text("realm"), fields.optional_text("id")
    peer = fields.optional_text("peer")
    everything = fields.boolean("all", False)
    fields.finish()
    if sum((message_id is not None, peer is not None, everything)) != 1:
        raise fields.wrong("id", "must be the only one given of id, peer and all")
    chosen = None if peer is None else PeerId(as_peer(peer))
    dropped = sum(delivery.drop(message_id, peer=chosen) for _name, delivery in _deliveries(control, realm))
    return json_response({"dropped": dropped})


async def follow(control: Control, request: Request) -> ASGIApp:
    """Changes of state, from now on."""
    query = query_fields(request)
    realm = query.optional_text("realm")
    query.finish()
    chosen = _deliveries(control, realm)
    queue = control.subscriptions.open("deliveries")
    scopes = [trio.CancelScope() for _ in chosen]

    async def feed(
        name: str,
        delivery: Delivery,
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
                    line: dict[str, object] = {
                        "id": status.id,
                        "realm": name,
                        "peer": status.peer,
                        "name": status.name,
                        "state": status.state.value,
                        "tries": status.tries,
                        "reason": status.reason,
                    }
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
]
