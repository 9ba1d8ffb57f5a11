"""nsqd's HTTP API: its texts and statuses, and what it must not do."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from dep2p.config.loader import load_config
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.server import HttpServer
from dep2p.daemon.nsq.http import NsqHttp
from dep2p.errors import ConfigError
from tests.daemon.nsq.world import NsqWorld, nsq_world


class Http:
    def __init__(self, client: httpx.AsyncClient, world: NsqWorld) -> None:
        self.client = client
        self.world = world

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(path)

    async def post(self, path: str, body: bytes = b"") -> tuple[int, str]:
        """Status, and the text or the message of the error."""
        answer = await self.client.post(path, content=body)
        assert answer.headers["x-nsq-content-type"] == "nsq; version=1.0"
        return answer.status_code, answer.json()["message"] if answer.status_code != 200 else answer.text

    async def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.get("/stats?format=json")).json()
        return answer


@asynccontextmanager
async def serving(**options: Any) -> AsyncGenerator[Http]:
    async with nsq_world(**options) as world:
        transport = httpx.ASGITransport(NsqHttp(world.server))  # pyright: ignore[reportArgumentType]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:4151") as client:
            yield Http(client, world)


async def bodies(world: NsqWorld) -> list[bytes]:
    return [each.body for each in await world.engine.inspector.peek("", "t", items_max=100)]


async def test_ping_and_info() -> None:
    async with serving() as http:
        answer = await http.get("/ping")
        assert (answer.status_code, answer.text) == (200, "OK")
        info = (await http.get("/info")).json()
        assert (info["version"], info["tcp_port"]) == ("1.3.0+dep2p", -1)


async def test_pub_and_mpub() -> None:
    async with serving() as http:
        assert await http.post("/pub?topic=t", b"one") == (200, "OK")
        assert await http.post("/mpub?topic=t", b"two\n\nthree\n") == (200, "OK")
        binary = b"\0\0\0\2\0\0\0\4a\nb!\0\0\0\1c"
        assert await http.post("/mpub?topic=t&binary=true", binary) == (200, "OK")
        assert await bodies(http.world) == [b"one", b"two", b"three", b"a\nb!", b"c"]
        assert await http.post("/pub?topic=t&defer=60000", b"late") == (200, "OK")
        stored = await http.world.engine.inspector.peek("", "t", items_max=9)
        (late,) = [each for each in stored if each.body == b"late"]
        assert late.due_us - late.published_us == 60_000_000


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/pub", b"x", (400, "MISSING_ARG_TOPIC")),
        ("/pub?topic=a!", b"x", (400, "INVALID_TOPIC")),
        ("/pub?topic=t", b"", (400, "MSG_EMPTY")),
        ("/pub?topic=t", b"x" * 1_048_577, (413, "MSG_TOO_BIG")),
        ("/pub?topic=t&defer=-1", b"x", (400, "INVALID_DEFER")),
        ("/pub?topic=t&defer=soon", b"x", (400, "INVALID_DEFER")),
        ("/pub?topic=t&defer=2592000001", b"x", (400, "INVALID_DEFER")),
        ("/mpub?topic=t", b"x" * 5_242_881, (413, "BODY_TOO_BIG")),
        ("/mpub?topic=t", b"x" * 1_048_577, (413, "MSG_TOO_BIG")),
        ("/mpub?topic=t&binary=true", b"\0\0", (413, "BAD_BODY")),
        ("/mpub?topic=t&binary=true", b"\0\0\0\1\0\0\0\0", (413, "BAD_MESSAGE")),
        ("/topic/delete", b"", (400, "MISSING_ARG_TOPIC")),
        ("/topic/delete?topic=none", b"", (404, "TOPIC_NOT_FOUND")),
        ("/topic/pause?topic=none", b"", (404, "TOPIC_NOT_FOUND")),
        ("/topic/empty?topic=none", b"", (404, "TOPIC_NOT_FOUND")),
        ("/channel/create?topic=none&channel=c", b"", (404, "TOPIC_NOT_FOUND")),
        ("/channel/pause?topic=here", b"", (400, "MISSING_ARG_CHANNEL")),
        ("/channel/pause?topic=here&channel=!", b"", (400, "INVALID_ARG_CHANNEL")),
        ("/channel/pause?topic=!&channel=c", b"", (400, "INVALID_ARG_TOPIC")),
        ("/channel/pause?topic=here&channel=c", b"", (404, "CHANNEL_NOT_FOUND")),
        ("/channel/delete?topic=here&channel=c", b"", (404, "CHANNEL_NOT_FOUND")),
        ("/channel/empty?topic=here&channel=c", b"", (404, "CHANNEL_NOT_FOUND")),
        ("/pub?topic=%ff", b"x", (400, "INVALID_REQUEST")),
        ("/nowhere", b"", (404, "NOT_FOUND")),
        ("/ping", b"", (405, "METHOD_NOT_ALLOWED")),
    ],
)
async def test_what_is_wrong_is_reported_as_nsqd_does(path: str, body: bytes, answer: tuple[int, str]) -> None:
    async with serving() as http:
        await http.post("/topic/create?topic=here")
        assert await http.post(path, body) == answer


async def test_topics_and_channels() -> None:
    async with serving() as http:
        for path in (
            "/topic/create?topic=t",
            "/channel/create?topic=t&channel=c",
            "/channel/pause?topic=t&channel=c",
            "/topic/pause?topic=t",
        ):
            assert await http.post(path) == (200, "")
        await http.post("/mpub?topic=t", b"1\n2")
        (topic,) = (await http.stats())["topics"]
        (channel,) = topic["channels"]
        assert (topic["topic_name"], topic["paused"], topic["depth"]) == ("t", True, 0)
        assert (channel["channel_name"], channel["paused"], channel["depth"]) == ("c", True, 2)
        for path in (
            "/topic/unpause?topic=t",
            "/channel/unpause?topic=t&channel=c",
            "/channel/empty?topic=t&channel=c",
        ):
            assert await http.post(path) == (200, "")
        (topic,) = (await http.stats())["topics"]
        assert (topic["paused"], topic["channels"][0]["paused"], topic["channels"][0]["depth"]) == (False, False, 0)
        assert await http.post("/channel/delete?topic=t&channel=c") == (200, "")
        assert await http.post("/topic/delete?topic=t") == (200, "")
        assert (await http.stats())["topics"] == []


async def test_emptying_a_topic_leaves_what_channels_have() -> None:
    async with serving() as http:
        await http.post("/mpub?topic=t", b"1\n2")
        assert await http.post("/topic/empty?topic=t") == (200, "")
        assert await bodies(http.world) == []
        await http.post("/channel/create?topic=t&channel=c")
        await http.post("/pub?topic=t", b"3")
        assert await http.post("/topic/empty?topic=t") == (200, "")
        assert (await http.stats())["topics"][0]["channels"][0]["depth"] == 1


async def test_statistics_of_clients() -> None:
    async with serving() as http:
        consumer, producer = await http.world.client(), await http.world.client()
        await consumer.identify(client_id="worker", user_agent="test/1")
        await producer.ask("PUB t", b"x")
        await producer.ask("PUB t", b"y")
        await consumer.subscribe(ready=1)
        message = await consumer.message()
        await consumer.finish(message)
        await consumer.message()
        (topic,) = (await http.stats())["topics"]
        (channel,) = topic["channels"]
        (client,) = channel["clients"]
        assert (topic["message_count"], channel["in_flight_count"], channel["client_count"]) == (2, 1, 1)
        assert (client["client_id"], client["ready_count"], client["finish_count"]) == ("worker", 1, 1)
        (made,) = (await http.stats())["producers"]
        assert made["pub_counts"] == [{"topic": "t", "count": 2}]
        text = (await http.get("/stats")).text
        assert "[t              ] depth: 0" in text
        assert "[V2 worker" in text
        few = (await http.get("/stats?format=json&include_clients=false&topic=t&channel=none")).json()
        assert few["topics"] == []


async def test_a_channel_counts_each_message_once_whatever_becomes_of_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """nsqd counts what came into the channel: no requeue, timeout or end of a client changes that."""
    async with serving(max_attempts=3) as http:

        async def counted() -> int:
            count: int = (await http.stats())["topics"][0]["channels"][0]["message_count"]
            return count

        await http.post("/topic/create?topic=t")
        await http.post("/channel/create?topic=t&channel=c")
        for number in range(6):
            await http.post("/pub?topic=t", b"%d" % number)
        assert await counted() == 6
        consumer = await http.world.client()
        await consumer.identify(msg_timeout=1_000)
        await consumer.subscribe(ready=1)
        await consumer.finish(await consumer.message())
        await consumer.send(f"REQ {(await consumer.message()).message_id.decode()} 0")
        assert await counted() == 6
        await consumer.send(f"REQ {(await consumer.message()).message_id.decode()} 60000")  # deferred
        await consumer.message()
        await trio.sleep(1.5)  # times out
        assert await counted() == 6
        await consumer.message()
        await consumer.stream.aclose()  # holds one
        await trio.sleep(0.5)
        assert await counted() == 6
        another = await http.world.client()
        await another.subscribe(ready=6)
        for _ in range(8):
            with trio.move_on_after(5):
                await another.send(f"REQ {(await another.message()).message_id.decode()} 0")  # until all are dead
        assert await counted() == 6
        await http.post("/pub?topic=t", b"last")
        await http.post("/channel/empty?topic=t&channel=c")
        assert await counted() == 7


async def test_a_full_topic_is_reported(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(items_max=1) as http:
        await http.post("/pub?topic=t", b"x")
        assert await http.post("/pub?topic=t", b"y") == (503, "TOPIC_FULL")


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"host": "evil.example"}, {"host": "evil.example:4151"}]
)
async def test_web_pages_are_refused(headers: dict[str, str]) -> None:
    async with serving() as http:
        answer = await http.client.post("/pub?topic=t", content=b"x", headers=headers)
        assert (answer.status_code, answer.json()) == (403, {"message": "LOOPBACK_ONLY"})
        assert http.world.engine.queue_names("") == []


@pytest.mark.parametrize("host", ["localhost:4151", "localhost", "[::1]:4151", "127.0.0.2"])
async def test_loopback_by_any_name(host: str) -> None:
    async with serving() as http:
        assert (await http.client.get("/ping", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("behind", [b"\r\n", b"\n", b"\0nonsense"])
async def test_bytes_behind_a_closing_publish_are_no_error(behind: bytes) -> None:
    """An error would have the client publish again."""
    async with nsq_world() as world:
        client, server = (trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in socket.socketpair())
        async with trio.open_nursery() as nursery, client:
            nursery.start_soon(HttpServer(ControlBounds()).handle, NsqHttp(world.server), server)
            head = b"POST /pub?topic=t HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 1\r\n\r\n"
            await client.send_all(head + b"x" + behind)
            with trio.fail_after(5):
                answer = b"".join([piece async for piece in client])
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1") == 1
        assert await bodies(world) == [b"x"]


@pytest.mark.parametrize("key", ["nsq.listen", "nsq.http"])
def test_it_never_listens_on_a_network(key: str) -> None:
    with pytest.raises(ConfigError, match="not a loopback address, and NSQ's protocol"):
        load_config(flags={key: "0.0.0.0:4150"})
