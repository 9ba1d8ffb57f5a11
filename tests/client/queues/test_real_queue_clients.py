"""A push consumer and producers of a program go on while their daemon is killed and started again."""

import signal
from collections import defaultdict
from collections.abc import Iterator

import anyio
import pytest

from dep2p.client import Client, ClientPushedMessage
from tests.cli.test_real_daemons import Person
from tests.cli.test_real_restarts import restart

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(300)]

KEYS = 5


@pytest.fixture(scope="module")
def ann(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    with Person(tmp_path_factory.mktemp("queue-clients"), "ann") as person:
        person.start()
        yield person


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_strict_producer_and_a_fifo_consumer_lose_and_reorder_nothing_over_restarts(
    ann: Person, backend: str
) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    published = 0

    async def main() -> None:
        nonlocal published
        async with Client.open(ann.directory / "control.sock") as client:
            queue = await client.queues.create(
                f"jobs-{backend}", {"partitions": 2, "max_attempts": 0, "order": "strict"}
            )
            changed = anyio.Event()

            async def handle(message: ClientPushedMessage) -> None:
                nonlocal changed
                await anyio.sleep(0.01)
                seen[message.key].append(int(message.body))
                changed.set()
                changed = anyio.Event()

            async def until(count: int) -> None:
                with anyio.fail_after(60):
                    while sum(len(set(each)) for each in seen.values()) < count:
                        await changed.wait()

            is_over, all_published = False, anyio.Event()

            async with (
                queue.consumer("work", handle, mode="fifo", concurrency=4),
                queue.producer(order="strict", close_timeout_s=30.0) as producer,
                anyio.create_task_group() as tasks,
            ):

                async def publish() -> None:
                    nonlocal published
                    while not is_over:
                        await producer.send(b"%d" % published, key=f"k{published % KEYS}")
                        published += 1
                        await anyio.sleep(0.005)
                    all_published.set()

                tasks.start_soon(publish)
                for number in (signal.SIGKILL, signal.SIGTERM):
                    await until(sum(len(set(each)) for each in seen.values()) + 30)
                    await anyio.to_thread.run_sync(restart, ann, number)
                await until(sum(len(set(each)) for each in seen.values()) + 30)
                is_over = True
                await all_published.wait()
                await until(published)

    anyio.run(main, backend=backend)
    assert sorted(number for each in seen.values() for number in set(each)) == list(range(published))
    for key, numbers in seen.items():
        first_times = list(dict.fromkeys(numbers))
        assert first_times == sorted(first_times), key
