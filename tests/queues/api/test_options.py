"""Options by name: a misspelt one is a type error, and at run time a TypeError before anything happens.

mypy is strict in these files: an ``ignore`` that hides no error is one itself.
"""

import pytest
import trio.testing

from tests.queues.nodes import queue_sides


async def test_a_misspelt_option_of_a_publish_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(1) as [broker]:
        queue = await broker.queues.create("jobs")
        with pytest.raises(TypeError, match="ordr_key"):
            await queue.publish(b"x", ordr_key="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="header"):
            await queue.publish_many([b"x"], header={})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="delay"):
            await broker.queues.publish("jobs", b"x", delay=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        async with queue.producer() as producer:
            with pytest.raises(TypeError, match="order_key"):
                await producer.publish(b"x", order_key="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        assert (await queue.info()).messages == 0


async def test_a_misspelt_option_of_a_consumer_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async def handle(message: object) -> None: ...

    async with queue_sides(1) as [broker]:
        queue = await broker.queues.create("jobs")
        with pytest.raises(TypeError, match="max_inflight"):
            queue.consume("w", max_inflight=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="concurency"):
            queue.consumer("w", handle, concurency=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="retrys"):
            queue.producer(retrys=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        assert (await queue.info()).channels == ()
