"""Bursts between processes over real sockets: with the default options nothing is lost."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dep2p import Node, Realm

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]


class Lines:
    """The JSON lines that a process prints."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.arrived = trio.Event()

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        rest = b""
        async for data in stream:
            *whole, rest = (rest + data).split(b"\n")
            self.lines += [json.loads(line) for line in whole]
            self.arrived.set()
            self.arrived = trio.Event()

    async def line(self, number: int) -> dict[str, Any]:
        while len(self.lines) <= number:
            await self.arrived.wait()
        return self.lines[number]


@asynccontextmanager
async def subscribers(count: int, node: Node, messages: int) -> AsyncGenerator[list[Lines], None]:
    """Processes that are in the node's realm and topic, each knowing all before it."""
    processes: list[trio.Process] = []
    outputs: list[Lines] = []
    addrs = node.listen_addrs()
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                command = ["-W", "ignore", "-m", "tests.io.pubsub_process"]
                arguments = [node.realm().psk.hex(), "burst", str(messages), *addrs]
                process = await trio.lowlevel.open_process(
                    [sys.executable, *command, *arguments], stdout=subprocess.PIPE, cwd=ROOT
                )
                processes.append(process)
                output = Lines()
                outputs.append(output)
                assert process.stdout is not None
                nursery.start_soon(output.read, process.stdout)
                addrs = [*addrs, (await output.line(0))["addr"]]
            yield outputs
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            for process in processes:
                process.kill()
                await process.wait()
                if process.stdout is not None:
                    await process.stdout.aclose()


@pytest.mark.parametrize(("processes", "messages"), [(1, 10_000), (9, 10_000)])
async def test_a_burst_of_one_kibibyte_messages_between_processes_loses_nothing(processes: int, messages: int) -> None:
    realm = Realm.from_psk(os.urandom(32), "burst")
    with trio.fail_after(110):
        async with (
            Node.open(realm) as node,
            subscribers(processes, node, messages) as outputs,
        ):
            topic = await node.join("burst")
            while len(topic.peers()) < processes:  # noqa: ASYNC110 - other processes do it
                await trio.sleep(0.05)
            await trio.sleep(1.5)  # a heartbeat, so that all meshes have formed
            for number in range(messages):
                result = await topic.publish(number.to_bytes(4, "big") + bytes(1_020))
                assert result.dropped == ()
            for output in outputs:
                assert await output.line(1) == {"received": messages, "different": messages, "lagged": 0}


async def test_a_killed_subscriber_does_not_stop_the_others(tmp_path: Path) -> None:
    realm = Realm.from_psk(os.urandom(32), "burst")
    with trio.fail_after(60):
        async with Node.open(realm) as node, subscribers(1, node, 2_000) as outputs:
            topic = await node.join("burst")
            async with subscribers(1, node, 2_000) as doomed:
                while len(topic.peers()) < 2:  # noqa: ASYNC110 - other processes do it
                    await trio.sleep(0.05)
                assert doomed[0].lines
                for number in range(1_000):
                    await topic.publish(number.to_bytes(4, "big") + bytes(1_020))
            for number in range(1_000, 2_000):
                await topic.publish(number.to_bytes(4, "big") + bytes(1_020))
            assert (await outputs[0].line(1))["different"] == 2_000
