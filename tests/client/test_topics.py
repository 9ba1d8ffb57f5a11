"""The client's calls about topics, under asyncio and trio, against a control API over a fake node."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing

import anyio
import pytest
import trio

from dep2p.client import (
    Client,
    DaemonUnreachableError,
    FeedEndedError,
    Lagged,
    MatchedTopicsFull,
    PublishedMany,
    PublishResult,
    TopicMessage,
)
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


def test_headers_of_published_messages_and_of_those_that_come(served: Served, pubsub: FakePubSub, run: Run) -> None:
    headers: dict[str, object] = {"trace": "42", "raw": b"\xff", "many": ["a", 3]}

    async def body(client: Client) -> None:
        await client.publish("chat", b"x", headers=headers)
        await client.publish_from("chat", some(b"a", b"b"), headers=headers)
        await client.publish("chat", b"y")
        assert pubsub.published_headers == [headers, headers, headers, {}]
        with pytest.raises(ValueError, match="8 KiB"):
            await client.publish_from("chat", some(b"a"), headers={"a": "x" * 9_000})
        async with client.subscribe("chat") as messages:
            await in_api(served, pubsub.deliver, b"x", 1, "chat", headers)
            message = await anext(messages)
            assert isinstance(message, TopicMessage)
            assert (dict(message.headers), message.received_at_s) == (headers, 1_700_000_000.5)

    run(body)


def test_a_pattern_s_messages_name_their_topics(served: Served, pubsub: FakePubSub, run: Run) -> None:
    async def body(client: Client) -> None:
        async with client.subscribe("sensors.>") as messages:
            await in_api(served, pubsub.deliver, b"x", 1, "sensors.hall")
            message = await anext(messages)
            assert isinstance(message, TopicMessage) and message.topic == "sensors.hall"
            for subscription in list(pubsub.subscriptions):
                await in_api(served, subscription.put_topics_full, 7, 128)
            assert await anext(messages) == MatchedTopicsFull(0, 7, 128)

    run(body)


def test_publish(pubsub: FakePubSub, run: Run) -> None:
    async def body(client: Client) -> None:
        assert await client.publish("a/b", b"\xff") == PublishResult(b"\0\1", (ANN, BOB), False, ())
        queued = await client.publish("empty", b"", realm="team", on_no_peers="queue")
        assert queued == PublishResult(b"\0\2", (), True, ())
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


def test_publish_from_keeps_the_order(pubsub: FakePubSub, run: Run) -> None:
    messages = [b"%d" % number * 50 for number in range(5_000)]

    async def body(client: Client) -> None:
        result = await client.publish_from("chat", some(*messages))
        assert result == PublishedMany(5_000, sum(map(len, messages)), 0, 0, 2)
        assert [data for _, data, _ in pubsub.published] == messages
        assert (await client.publish_from("chat", some())).messages == 0
        assert (await client.publish_from("empty", some(b"x"), on_no_peers="queue", realm="team")).queued == 1

    run(body)


def test_publish_from_sends_each_message_when_it_comes(served: Served, pubsub: FakePubSub, run: Run) -> None:
    async def body(client: Client) -> None:
        async def one_by_one() -> AsyncGenerator[bytes, None]:
            for number in range(3):
                yield b"%d" % number
                arrived = lambda: len(pubsub.published) == number + 1  # noqa: B023, E731
                await anyio.to_thread.run_sync(served.wait_until, arrived, "the message is published")

        assert (await client.publish_from("chat", one_by_one())).messages == 3

    run(body)


def test_publish_from_is_held_back_as_the_node_is(served: Served, pubsub: FakePubSub, run: Run) -> None:
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
                await client.publish_from("chat", messages)
        assert made < 60

    run(body)
    served.do(pubsub.let_go.set)


def test_publish_from_ends_by_what_goes_wrong(pubsub: FakePubSub, run: Run) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(RateLimitedError, match="1 messages before it were published"):
            await client.publish_from("chat", some(b"a", b"too much", b"b"))
        with pytest.raises(NoPeersSubscribedError):
            await client.publish_from("empty", some(b"a"))

        async def endless() -> AsyncGenerator[bytes, None]:
            while True:
                yield bytes(1_000)

        async with aclosing(endless()) as messages:
            with pytest.raises(NoPeersSubscribedError):
                await client.publish_from("empty", messages)
        with pytest.raises(ZeroDivisionError, match="mine"):
            await client.publish_from("chat", some(b"last", ZeroDivisionError("mine")))
        assert (await client.status()).state == "running"

    run(body)


def test_subscribe(served: Served, pubsub: FakePubSub, run: Run) -> None:
    def flood() -> None:
        for number in range(1, 101):
            pubsub.deliver(b"%d" % number, number)

    async def body(client: Client) -> None:
        async with client.subscribe("chat", buffer_items=10) as messages:
            await in_api(served, pubsub.deliver, b"\xff", 7)
            assert await anext(messages) == TopicMessage("chat", b"\xff", ANN, 7, b"\0\7", BOB)
            await in_api(served, flood)
            assert await anext(messages) == Lagged(90)
            assert [await _data(messages) for _ in range(10)] == [b"%d" % number for number in range(91, 101)]
        async with client.subscribe("chat", realm="team", buffer_items=10, on_full="pause") as messages:
            await in_api(served, flood)
            assert [await _data(messages) for _ in range(100)] == [b"%d" % number for number in range(1, 101)]

    run(body)
    served.wait_until(lambda: not pubsub.subscriptions, "the subscriptions are over")


async def _data(messages: AsyncIterator[TopicMessage | Lagged]) -> bytes:
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
            await client.leave_realm("team")
            with pytest.raises(FeedEndedError) as ended:
                await anext(messages)
            assert isinstance(ended.value.reason, NotInRealmError)

    run(body)


def test_topics(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        assert await client.topics() == []
        async with client.subscribe("a/b"):
            (row,) = await client.topics()
            assert (row.topic, row.realm, row.subscriptions) == ("a/b", "team", 1)
            found = await client.topic_peers("a/b", realm="team")
            assert (found.joined, found.peers, found.mesh, found.scores) == (
                True,
                (ANN, BOB),
                (ANN,),
                {ANN: 1.25},
            )
        with pytest.raises(TopicNotFoundError):
            await client.topic_peers("empty")
        with pytest.raises(NotInRealmError):
            await client.topic_peers("chat", public=True)

    run(body)


def test_without_a_daemon(run: Run, served: Served) -> None:
    async def body(_client: Client) -> None:
        async with Client.open(served.socket.with_name("none")) as lost:
            with pytest.raises(DaemonUnreachableError):
                await lost.publish_from("chat", some(b"x"))
            with pytest.raises(DaemonUnreachableError):
                async with lost.subscribe("chat"):
                    pass

    run(body)
