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

from dep2p import Identity, Node, Realm, Topic, TopicMessage
from dep2p.host.interface import PeerConnected
from dep2p.testing import FaultProxy
from tests.pubsub.nodes import until

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
    """Processes that are in the node's realm and topic. They start together, and learn of each other from the node."""
    processes: list[trio.Process] = []
    outputs: list[Lines] = []
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                command = ["-W", "ignore", "-m", "tests.pubsub.subscriber_process"]
                arguments = [node.realm().psk.hex(), "burst", str(messages), *node.listen_addrs()]
                process = await trio.lowlevel.open_process(
                    [sys.executable, *command, *arguments], stdout=subprocess.PIPE, cwd=ROOT
                )
                processes.append(process)
                output = Lines()
                outputs.append(output)
                assert process.stdout is not None
                nursery.start_soon(output.read, process.stdout)
            for output in outputs:
                await output.line(0)
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


async def test_a_restart_over_a_half_open_link_has_pubsub_both_ways_within_a_second() -> None:
    realm, identity = Realm.generate("team"), Identity.generate()
    with trio.fail_after(60):
        async with FaultProxy.open() as proxy, Node.open(realm) as a:
            port = await proxy.forward("127.0.0.1", int(a.listen_addrs()[0].split("/")[4]))
            ta = await a.join("chat")
            through = f"/ip4/127.0.0.1/tcp/{port}/p2p/{a.peer_id}"
            async with Node.open(realm, identity=identity, bootstrap=[through]) as b:
                tb = await b.join("chat")
                await until(lambda: ta.mesh() == [b.peer_id] and tb.mesh() == [a.peer_id])
                proxy.hold()  # what b says when it ends does not arrive
            assert ta.mesh() == [identity.peer_id]
            connected = trio.Event()
            a.host.subscribe(lambda event: connected.set() if isinstance(event, PeerConnected) else None)
            async with Node.open(realm, identity=identity, bootstrap=a.listen_addrs()) as b:
                tb = await b.join("chat")
                async with ta.subscribe() as at_a, tb.subscribe() as at_b, trio.open_nursery() as nursery:

                    async def publish(topic: Topic, data: bytes) -> None:
                        while True:
                            await topic.publish(data, on_no_peers="ok")
                            await trio.sleep(0.02)

                    nursery.start_soon(publish, ta, b"from a")
                    nursery.start_soon(publish, tb, b"from b")
                    await connected.wait()
                    started = trio.current_time()
                    for messages, wanted in ((at_a, b"from b"), (at_b, b"from a")):
                        async for message in messages:
                            if isinstance(message, TopicMessage) and message.body == wanted:
                                break
                    assert trio.current_time() - started < 1.0
                    nursery.cancel_scope.cancel()
                await until(lambda: len(a.host.connections(identity.peer_id)) == 1)
