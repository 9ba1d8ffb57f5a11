"""The client's calls about topics, under asyncio and trio, against a control API over a fake node."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing

import anyio
import pytest
import trio

from dep2p.client import Client, DaemonUnreachableError, FeedLagged, Published, PublishedMany, TopicMessage
from dep2p.errors import (
    MessageTooLargeError,
    NoPeersSubscribedError,
    NotInRealmError,
    RateLimitedError,
    TooManyTopicsError,
    TopicNotFoundError,
)
from tests.daemon.api.fake_node import ANN, BOB
from tests.daemon.api.fake_pubsub import FakePubSub
from tests.daemon.api.harness import Served, serving

Run = Callable[[Callable[[Client], Awaitable[None]]], None]


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as started:
        yield started


@pytest.fixture
def pubsub(served: Served) -> FakePubSub:
    return served.node.pubsub()


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest, served: Served) -> Run:
    """Runs a test's body with a client, in an event loop of each kind."""

    def runner(body: Callable[[Client], Awaitable[None]]) -> None:
        async def main() -> None:
            with anyio.fail_after(20):
                async with Client.open(served.socket) as client:
                    await body(client)

        anyio.run(main, backend=request.param)

    return runner


async def in_api(served: Served, function: Callable[..., object], *args: object) -> None:
    """Call something in the API's thread without blocking this loop."""
    await anyio.to_thread.run_sync(lambda: served.do(function, *args))


async def some(*messages: bytes | Exception) -> AsyncGenerator[bytes, None]:
    for message in messages:
        if isinstance(message, Exception):
            raise message
        yield message


def test_publish(pubsub: FakePubSub, run: Run) -> None:
    async def body(client: Client) -> None:
        assert await client.publish("a/b", b"\xff") == Published("0001", (ANN, BOB), False, ())
        queued = await client.publish("empty", b"", realm="team", on_no_peers="queue")
        assert queued == Published("0002", (), True, ())
        assert pubsub.published == [("a/b", b"\xff", "error"), ("empty", b"", "queue")]
        with pytest.raises(NoPeersSubscribedError, match="no peer is subscribed"):
            await client.publish("empty", b"x")
        with pytest.raises(MessageTooLargeError):
            await client.publish("chat", bytes(1_048_577))
        with pytest.raises(NotInRealmError):
            await client.publish("chat", b"x", public=True)
        with pytest.raises(RateLimitedError) as limited:
            await client.publish("chat", b"too much")
        assert limited.value.retry_after_ms == 250

    run(body)


def test_publish_many_keeps_the_order(pubsub: FakePubSub, run: Run) -> None:
    messages = [b"%d" % number * 50 for number in range(5_000)]

    async def body(client: Client) -> None:
        result = await client.publish_many("chat", some(*messages))
        assert result == PublishedMany(5_000, sum(map(len, messages)), 0, 0, 2)
        assert [data for _, data, _ in pubsub.published] == messages
        assert (await client.publish_many("chat", some())).messages == 0
        assert (await client.publish_many("empty", some(b"x"), on_no_peers="queue", realm="team")).queued == 1

    run(body)


def test_publish_many_sends_each_message_when_it_comes(served: Served, pubsub: FakePubSub, run: Run) -> None:
    async def body(client: Client) -> None:
        async def one_by_one() -> AsyncGenerator[bytes, None]:
            for number in range(3):
                yield b"%d" % number
                arrived = lambda: len(pubsub.published) == number + 1  # noqa: B023, E731
                await anyio.to_thread.run_sync(served.wait_until, arrived, "the message is published")

        assert (await client.publish_many("chat", one_by_one())).messages == 3

    run(body)


def test_publish_many_is_held_back_as_the_node_is(served: Served, pubsub: FakePubSub, run: Run) -> None:
    made = 0

    async def body(client: Client) -> None:
        async def large() -> AsyncGenerator[bytes, None]:
            nonlocal made
            for _ in range(64):
                made += 1
                yield bytes(1_000_000)

        def hold() -> None:
            pubsub.let_go = trio.Event()

        await in_api(served, hold)
        async with aclosing(large()) as messages:
            with anyio.move_on_after(0.5):
                await client.publish_many("chat", messages)
        assert made < 60

    run(body)
    served.do(pubsub.let_go.set)


def test_publish_many_ends_by_what_goes_wrong(pubsub: FakePubSub, run: Run) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(RateLimitedError, match="1 messages before it were published"):
            await client.publish_many("chat", some(b"a", b"too much", b"b"))
        with pytest.raises(NoPeersSubscribedError):
            await client.publish_many("empty", some(b"a"))

        async def endless() -> AsyncGenerator[bytes, None]:
            while True:
                yield bytes(1_000)

        async with aclosing(endless()) as messages:
            with pytest.raises(NoPeersSubscribedError):
                await client.publish_many("empty", messages)
        with pytest.raises(ZeroDivisionError, match="mine"):
            await client.publish_many("chat", some(b"last", ZeroDivisionError("mine")))
        assert (await client.status()).state == "running"

    run(body)


def test_subscribe(served: Served, pubsub: FakePubSub, run: Run) -> None:
    def flood() -> None:
        for number in range(1, 101):
            pubsub.deliver(b"%d" % number, number)

    async def body(client: Client) -> None:
        async with client.subscribe("chat", buffer_items=10) as messages:
            await in_api(served, pubsub.deliver, b"\xff", 7)
            assert await anext(messages) == TopicMessage("chat", b"\xff", ANN, 7, "0007", BOB)
            await in_api(served, flood)
            assert await anext(messages) == FeedLagged(90)
            assert [await _data(messages) for _ in range(10)] == [b"%d" % number for number in range(91, 101)]
        async with client.subscribe("chat", realm="team", buffer_items=10, on_full="pause") as messages:
            await in_api(served, flood)
            assert [await _data(messages) for _ in range(100)] == [b"%d" % number for number in range(1, 101)]

    run(body)
    served.wait_until(lambda: not pubsub.subscriptions, "the subscriptions are over")


async def _data(messages: AsyncIterator[TopicMessage | FeedLagged]) -> bytes:
    message = await anext(messages)
    assert isinstance(message, TopicMessage)
    return message.body


def test_a_subscription_ends_with_its_reason(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        served.node.topics_max = 0
        with pytest.raises(TooManyTopicsError):
            async with client.subscribe("chat"):
                pass
        served.node.topics_max = 1
        async with client.subscribe("chat") as messages:
            await client.realm_leave("team")
            with pytest.raises(NotInRealmError):
                await anext(messages)

    run(body)


def test_topics(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        assert await client.topics() == []
        async with client.subscribe("a/b"):
            (row,) = await client.topics()
            assert (row.topic, row.realm, row.subscriptions) == ("a/b", "team", 1)
            found = await client.topic("a/b", realm="team")
            assert (found.joined, found.peers, found.mesh, found.scores) == (
                True,
                (ANN, BOB),
                (ANN,),
                {ANN: 1.25},
            )
        with pytest.raises(TopicNotFoundError):
            await client.topic("empty")
        with pytest.raises(NotInRealmError):
            await client.topic("chat", public=True)

    run(body)


def test_without_a_daemon(run: Run, served: Served) -> None:
    async def body(_client: Client) -> None:
        async with Client.open(served.socket.with_name("none")) as lost:
            with pytest.raises(DaemonUnreachableError):
                await lost.publish_many("chat", some(b"x"))
            with pytest.raises(DaemonUnreachableError):
                async with lost.subscribe("chat"):
                    pass

    run(body)
