"""Handlers that a client adds by decorators: they run in its block, and each error ends the right thing."""

from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from dep2p.client import Client, ClientStream, ControlError, Notification, Request
from dep2p.client.delivery import ClientReceipt, ClientTopicPublish
from dep2p.control_api.replies import DeliveryReceipt
from dep2p.errors import DeliveryFailedError, HandlerError
from dep2p.gossipsub.topic_types import PublishResult
from dep2p.messaging.handlers import HandlerAwayError
from dep2p.protocols.delivery.states import DeliveryState
from dep2p.types import PeerId
from tests.daemon.api.fake_node import ANN, BOB, FakeStream, Message
from tests.daemon.api.harness import Served, serving

Main = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as started:
        yield started


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Main:
    """Runs an async function in an event loop of each kind, within a bound."""

    def runner(body: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            with anyio.fail_after(20):
                await body()

        anyio.run(main, backend=request.param)

    return runner


async def ask(served: Served, name: str, body: bytes) -> bytes:
    """A member's request, as the node gets it."""
    handler = served.node.messaging().requests[name]
    return await anyio.to_thread.run_sync(served.call, handler, Message(name, body, deadline_s=1e18))


def test_a_request_handler_answers_until_its_block_ends(served: Served, run: Main) -> None:
    async def body() -> None:
        async with Client.open(served.socket) as client:

            @client.on_request("greet")
            async def greet(request: Request) -> bytes:
                if request.body == b"?":
                    raise HandlerError("not you")
                return b"hello " + request.body

            await client.handlers_ready()
            assert await ask(served, "greet", b"ann") == b"hello ann"
            with pytest.raises(HandlerError, match="not you"):
                await ask(served, "greet", b"?")
            assert await ask(served, "greet", b"bob") == b"hello bob", "one error does not end the handler"
            assert greet is not None
        await anyio.to_thread.run_sync(
            served.wait_until, lambda: "greet" not in served.node.messaging().requests, "the name is free again"
        )

    run(body)


def test_a_notify_handler_takes_notifies_in_order(served: Served, run: Main) -> None:
    async def body() -> None:
        got: list[bytes] = []
        done = anyio.Event()
        async with Client.open(served.socket) as client:

            @client.on_notify("seen", concurrency=1)
            async def seen(notification: Notification) -> None:
                got.append(notification.body)
                if len(got) == 5:
                    done.set()
                if notification.body == b"1":
                    raise ValueError("a bug of the app")

            await client.handlers_ready()
            handler = served.node.messaging().notifies["seen"]
            for number in range(5):
                await anyio.to_thread.run_sync(served.call, handler, Message("seen", b"%d" % number, BOB))
            await done.wait()
            assert seen is not None
        assert got == [b"0", b"1", b"2", b"3", b"4"]

    run(body)


async def deliver(served: Served, body: bytes) -> str:
    """A member's reliable message, as the node gets it; returns what becomes of it."""
    handler = served.node.messaging().notifies["orders"]

    def call() -> str:
        try:
            served.call(handler, Message("orders", body, BOB, is_reliable=True))
        except HandlerAwayError:
            return "waits for a program"
        except HandlerError as error:
            return str(error)
        return "taken"

    return await anyio.to_thread.run_sync(call)


def test_a_reliable_message_is_taken_when_its_handler_has_returned(served: Served, run: Main) -> None:
    async def body() -> None:
        begun, may_end = anyio.Event(), anyio.Event()
        ends: dict[bytes, str] = {}

        async def send(text: bytes) -> None:
            ends[text] = await deliver(served, text)

        async with anyio.create_task_group() as senders:
            async with Client.open(served.socket) as client:

                @client.on_notify("orders")
                async def orders(notification: Notification) -> None:
                    assert notification.is_reliable
                    if notification.body == b"no room":
                        raise HandlerError("no room here")
                    if notification.body == b"bug":
                        raise ValueError("a bug of the app")
                    begun.set()
                    await may_end.wait()

                await client.handlers_ready()
                assert orders is not None
                assert await deliver(served, b"no room") == "no room here"
                assert await deliver(served, b"bug") == "the handler failed"
                senders.start_soon(send, b"slow")
                await begun.wait()
                assert not ends
                may_end.set()
                while not ends:  # noqa: ASYNC110 - a thread sets it
                    await anyio.sleep(0.01)
                assert ends == {b"slow": "taken"}
                begun, may_end = anyio.Event(), anyio.Event()
                senders.start_soon(send, b"in hand")
                await begun.wait()
            # the program has ended with the message in hand
        assert ends[b"in hand"] == "waits for a program"

    run(body)


def test_a_reliable_message_of_a_loop_is_taken_when_the_loop_asks_for_the_next_or_ends_well(
    served: Served, run: Main
) -> None:
    async def body() -> None:
        ends: dict[bytes, str] = {}

        async def send(text: bytes) -> None:
            ends[text] = await deliver(served, text)

        async def taken(text: bytes) -> None:
            while text not in ends:  # noqa: ASYNC110 - a thread sets it
                await anyio.sleep(0.01)
            assert ends[text] == "taken"

        async with anyio.create_task_group() as senders, Client.open(served.socket) as client:
            async with client.listen("orders") as orders:
                senders.start_soon(send, b"one")
                one = await anext(orders)
                assert isinstance(one, Notification) and one.is_reliable and not ends
                with anyio.move_on_after(0.2):
                    await anext(orders)
                await taken(b"one")
                senders.start_soon(send, b"two")
                await anext(orders)
            await taken(b"two")
            with pytest.raises(RuntimeError, match="a bug"):
                async with client.listen("orders") as orders:
                    senders.start_soon(send, b"three")
                    await anext(orders)
                    raise RuntimeError("a bug")
        assert ends[b"three"] == "waits for a program"

    run(body)


def test_a_stream_handler_serves_a_stream(served: Served, run: Main) -> None:
    async def body() -> None:
        async with Client.open(served.socket) as client:

            @client.on_stream("sync")
            async def sync(stream: ClientStream) -> None:
                async for item in stream:
                    await stream.send(item.upper())
                await stream.send_eof()

            await client.handlers_ready()
            far = FakeStream("sync", b"first", BOB)
            handler = served.node.messaging().streams["sync"]
            await anyio.to_thread.run_sync(lambda: served.do(served.control.nursery.start_soon, handler, far))
            await anyio.to_thread.run_sync(served.call, far.from_far.send, b"question")
            assert await anyio.to_thread.run_sync(served.call, far.sent.receive) == b"QUESTION"
            await anyio.to_thread.run_sync(lambda: served.do(far.from_far.close))
            await anyio.to_thread.run_sync(served.wait_until, lambda: len(served.control.streams) == 0, "done")
            assert not far.was_reset and sync is not None

    run(body)


@pytest.mark.parametrize("kind", ["request", "stream"])
def test_a_name_that_another_program_has_ends_the_block_with_the_reason(served: Served, run: Main, kind: str) -> None:
    async def body() -> None:
        async with Client.open(served.socket) as first:
            reserved = first.reply("greet") if kind == "request" else first.accept("greet")
            async with reserved:
                with pytest.raises(ControlError) as refused:
                    async with Client.open(served.socket) as second:
                        if kind == "request":
                            second.on_request("greet")(_never_asked)
                        else:
                            second.on_stream("greet")(_never_served)
                        await second.handlers_ready()
                        await anyio.sleep_forever()
                assert refused.value.code == "D5012"

    run(body)


async def _never_asked(request: Request) -> bytes:
    raise AssertionError(request)


async def _never_served(stream: ClientStream) -> None:
    raise AssertionError(stream)


def test_what_is_no_handler_is_refused_where_it_is_added(served: Served, run: Main) -> None:
    async def body() -> None:
        async with Client.open(served.socket) as client:
            for add in (client.on_request, client.on_notify, client.on_stream):
                with pytest.raises(TypeError, match="handler"):
                    add("greet")(3)  # type: ignore[arg-type]  # pyright: ignore
                with pytest.raises(TypeError, match="async def"):
                    add("greet")(_plain)  # type: ignore[arg-type]  # pyright: ignore
                with pytest.raises(TypeError, match="on_"):
                    add(_never_asked)  # type: ignore[arg-type]  # pyright: ignore

    run(body)


def _plain(request: Request) -> bytes:
    return request.body


# Reliable publishes


def receipt(served: Served, client: Client, peer: str, state: DeliveryState, reason: str = "") -> ClientReceipt:
    accepted = DeliveryReceipt(id=f"{peer}:1", peer=PeerId(peer), state=state.value, tries=1, reason=reason)
    return ClientReceipt(client._transport, accepted, "t", "t")  # pyright: ignore[reportPrivateUsage]


def test_a_reliable_publish_waits_for_all_or_any_of_its_receivers(served: Served, run: Main) -> None:
    async def body() -> None:
        async with Client.open(served.socket) as client:
            taken = receipt(served, client, ANN, DeliveryState.ACKNOWLEDGED)
            lost = receipt(served, client, BOB, DeliveryState.FAILED, "no room")
            result = PublishResult(b"id", (), False, ())
            of_all = ClientTopicPublish(result, [taken, lost], "all")
            assert of_all.acknowledged_by == (ANN,) and of_all.missing == {BOB: "no room"}
            with pytest.raises(DeliveryFailedError, match="no room"):
                await of_all.wait()
            await ClientTopicPublish(result, [taken, lost], "any").wait()
            await ClientTopicPublish(result, [taken], "all").wait()
            with pytest.raises(DeliveryFailedError, match="no room"):
                await ClientTopicPublish(result, [lost], "any").wait()

    run(body)
