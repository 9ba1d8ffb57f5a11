"""Public pub/sub against js-libp2p's GossipSub."""

import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from dep2p import Node, PublicPubSub, Subscription, Topic, TopicMessage
from dep2p.gossipsub.signing.policy import SigningPolicy
from dep2p.pubsub.wire_formats import MESHSUB_1_1, MESHSUB_1_2
from dep2p.types import PeerId
from tests.interop.conftest import FOLDER, JsPeer, run_js

pytestmark = [pytest.mark.interop, pytest.mark.real, pytest.mark.timeout(120)]

KEY = "07" * 32


@asynccontextmanager
async def js_pubsub(*options: str) -> AsyncGenerator[JsPeer, None]:
    """A js node; skips where it is not installed."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules/@libp2p/gossipsub").is_dir():
        pytest.skip("the js-libp2p peer is not installed: run `make interop-peer`")
    async with run_js("pubsub_peer.mjs", *options) as peer:
        yield peer


def our_node(**options: Any) -> AbstractAsyncContextManager[Node]:
    """A node that speaks public pub/sub with js's message ids, unless told otherwise."""
    return Node.open(public_pubsub=replace(PublicPubSub(message_ids="js"), **options))


async def until(is_true: Callable[[], bool]) -> None:
    """Look until it is so; the test's own limit bounds it."""
    while not is_true():  # noqa: ASYNC110 - another process does it, and nothing here is told
        await trio.sleep(0.01)


async def until_js(js: JsPeer, is_true: Callable[[dict[str, Any]], bool]) -> None:
    """The same for the state of the js node."""
    while not is_true(await js.call("state", "chat")):  # noqa: ASYNC110
        await trio.sleep(0.05)


async def meshed(ours: Topic, js: JsPeer) -> None:
    """Both sides have each other in the mesh."""
    await until(lambda: js.peer in ours.mesh())
    await until_js(js, lambda state: bool(state["mesh"]))


async def next_text(messages: Subscription) -> tuple[str, TopicMessage]:
    message = await anext(messages)
    assert isinstance(message, TopicMessage)
    return message.body.decode(), message


async def exchange(ours: Topic, messages: Subscription, js: JsPeer, number: int = 0) -> None:
    """One message each way."""
    result = await ours.publish(f"to js {number}".encode())
    assert (await js.line(event="message", text=f"to js {number}"))["id"] == result.id.hex()
    await js.call("publish", "chat", f"to us {number}")
    text, message = await next_text(messages)
    assert text == f"to us {number}"
    assert message.received_from == js.peer


@pytest.mark.parametrize("who_dials", ["js", "we"])
@pytest.mark.parametrize("version", ["1.1.0", "1.2.0"])
async def test_signed_messages_both_ways(version: str, who_dials: str) -> None:
    with trio.fail_after(60):
        async with our_node() as node, js_pubsub(f"--version={version}") as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            if who_dials == "js":
                await js.call("dial", node.listen_addrs()[0])
            else:
                await node.host.dial(PeerId(js.peer), [js.addr])
            await meshed(ours, js)
            state = await js.call("state", "chat")
            assert state["protocols"] == [[node.peer_id, f"/meshsub/{version}"]]
            assert state["subscribers"] == [node.peer_id]
            async with ours.subscribe() as messages:
                for number in range(20):
                    await exchange(ours, messages, js, number)
                await js.call("publish", "chat", "signed")
                _, message = await next_text(messages)
                assert message.sender == js.peer


async def test_a_node_of_ours_that_speaks_1_1_only() -> None:
    with trio.fail_after(60):
        async with our_node(protocols=(MESHSUB_1_1,)) as node, js_pubsub() as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            await js.call("dial", node.listen_addrs()[0])
            await meshed(ours, js)
            assert (await js.call("state", "chat"))["protocols"] == [[node.peer_id, MESHSUB_1_1]]
            async with ours.subscribe() as messages:
                await exchange(ours, messages, js)


@pytest.mark.parametrize("protocol", [MESHSUB_1_1, MESHSUB_1_2])
async def test_unsigned_messages_both_ways(protocol: str) -> None:
    options = {"policy": SigningPolicy.STRICT_NO_SIGN, "message_ids": None, "protocols": (protocol,)}
    with trio.fail_after(60):
        async with our_node(**options) as node, js_pubsub("--sign=none") as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            await node.host.dial(PeerId(js.peer), [js.addr])
            await meshed(ours, js)
            async with ours.subscribe() as messages:
                for number in range(20):
                    await exchange(ours, messages, js, number)
                await js.call("publish", "chat", "anonymous")
                _, message = await next_text(messages)
                assert (message.sender, message.seqno) == (None, None)


@pytest.mark.parametrize("ids", ["go", "sha256"])
async def test_the_message_id_profile_of_a_topic_is_the_networks(ids: str) -> None:
    with trio.fail_after(60):
        async with our_node(message_ids_by_topic={"chat": ids}) as node, js_pubsub(f"--ids={ids}") as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            await node.host.dial(PeerId(js.peer), [js.addr])
            await meshed(ours, js)
            async with ours.subscribe() as messages:
                await exchange(ours, messages, js)


async def test_a_lost_connection_made_again_carries_messages_both_ways() -> None:
    with trio.fail_after(90):
        async with our_node() as node, js_pubsub() as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            async with ours.subscribe() as messages:
                for number in range(3):
                    await node.host.dial(PeerId(js.peer), [js.addr])
                    await meshed(ours, js)
                    await exchange(ours, messages, js, number)
                    await js.call("hangup", node.peer_id)
                    await until(lambda: not ours.peers())


async def test_js_restarted_with_the_same_identity_is_heard_again() -> None:
    with trio.fail_after(90):
        async with our_node() as node:
            ours = await node.join("chat", public=True)
            async with ours.subscribe() as messages:
                peers: list[str] = []
                for number in range(2):
                    async with js_pubsub(f"--key={KEY}") as js:
                        peers.append(js.peer)
                        await js.call("subscribe", "chat")
                        await js.call("dial", node.listen_addrs()[0])
                        await meshed(ours, js)
                        await exchange(ours, messages, js, number)
                    await until(lambda: not ours.peers())
                assert peers[0] == peers[1]


async def test_what_only_gossip_reports_is_asked_for_and_comes_once() -> None:
    with trio.fail_after(60):
        async with our_node() as node, js_pubsub("--no-mesh") as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            await node.host.dial(PeerId(js.peer), [js.addr])
            await until(lambda: js.peer in ours.peers())
            await until_js(js, lambda state: state["subscribers"] == [node.peer_id])
            async with ours.subscribe() as messages:
                await js.call("publish", "chat", "by gossip")
                text, _ = await next_text(messages)
                assert text == "by gossip"
                await trio.sleep(2.5)  # what heartbeats of js may still send
                assert len(messages) == 0
            counters = node.counters()
            assert counters["public_pubsub_router_duplicates"] == 0
            assert counters["public_pubsub_messages_delivered"] == 1


async def test_js_asks_for_what_only_our_gossip_reports_and_gets_one_copy() -> None:
    """A publisher, a node of ours between, and js outside of that node's mesh: what it forwards never goes to js."""
    with trio.fail_after(60):
        async with our_node() as publisher, our_node() as node, js_pubsub("--no-mesh") as js:
            theirs, ours = await publisher.join("chat", public=True), await node.join("chat", public=True)
            await node.host.dial(publisher.peer_id, publisher.listen_addrs())
            await until(lambda: bool(theirs.mesh() and ours.mesh()))
            await js.call("subscribe", "chat")
            await node.host.dial(PeerId(js.peer), [js.addr])
            await until(lambda: js.peer in ours.peers())
            await until(lambda: ours.mesh() == [publisher.peer_id])  # js refuses to be grafted
            assert (await theirs.publish(b"by our gossip")).sent_to == (node.peer_id,)
            await js.line(event="message", text="by our gossip")
            await trio.sleep(3.5)  # the heartbeats that tell of it, and one more
            state = await js.call("state", "chat")
            assert (state["count"], state["copies"]) == (1, 1)


async def test_unsubscribing_and_subscribing_again_finds_the_mesh_again() -> None:
    with trio.fail_after(90):
        async with our_node() as node, js_pubsub() as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            await node.host.dial(PeerId(js.peer), [js.addr])
            await meshed(ours, js)
            await js.call("unsubscribe", "chat")
            await until(lambda: not ours.peers())
            await js.call("subscribe", "chat")
            await until(lambda: js.peer in ours.peers())
            await ours.leave()
            await until_js(js, lambda state: not state["subscribers"])
            ours = await node.join("chat", public=True)
            await meshed(ours, js)  # after the ten seconds of back-off at most
            async with ours.subscribe() as messages:
                await exchange(ours, messages, js)


async def test_bursts_of_two_thousand_both_ways_lose_nothing() -> None:
    count, size = 2_000, 1_024
    with trio.fail_after(90):
        async with our_node() as node, js_pubsub() as js:
            ours = await node.join("chat", public=True)
            await js.call("subscribe", "chat")
            await node.host.dial(PeerId(js.peer), [js.addr])
            await meshed(ours, js)
            await js.call("quiet")
            for number in range(count):
                assert (await ours.publish(number.to_bytes(4, "big") + bytes(size - 4))).dropped == ()
            await until_js(js, lambda state: state["count"] == count)
            async with ours.subscribe() as messages:
                await js.call("burst", "chat", count, size)
                seen: dict[bytes, None] = {}
                while len(seen) < count:
                    message = await anext(messages)
                    assert isinstance(message, TopicMessage)
                    seen[message.body[:4]] = None
