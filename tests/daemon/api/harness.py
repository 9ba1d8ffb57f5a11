"""A control API on a real Unix socket, in a trio thread of its own, so that tests of any kind can talk to it."""

import contextlib
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import trio

from dep2p.config.loader import Config, load_config
from dep2p.daemon.api.app import ControlApp, build_app
from dep2p.daemon.api.context import Control, open_control
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.listeners import open_tcp, open_unix
from dep2p.daemon.http.server import HttpServer
from tests.daemon.api.fake_node import FakeNode, as_node_api

T = TypeVar("T")
TOKEN = "t" * 32


@dataclass
class Served:
    """A control API at work."""

    config: Config
    socket: Path
    node: FakeNode
    control: Control
    server: HttpServer
    http: httpx.Client
    tcp_port: int
    _token: trio.lowlevel.TrioToken
    stop: trio.Event

    def call(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run an async function in the API's thread."""
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def do(self, function: Callable[..., T], *args: object) -> T:
        """Run a plain function in the API's thread."""
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until it is so in the API's thread, for 5 s at most."""

        async def wait() -> None:
            with trio.fail_after(5):
                while not condition():  # noqa: ASYNC110 - the conditions have no event to wait for
                    await trio.sleep(0.005)

        try:
            self.call(wait)
        except trio.TooSlowError:
            raise AssertionError(f"not so within 5 s: {what}") from None

    def raw(self, data: bytes, *, timeout_s: float = 5.0, half_close: bool = False) -> bytes:
        """Send bytes on a new connection and return all that comes until the server closes it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_s)
            client.connect(str(self.socket))
            received = b""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # answered and closed already
                client.sendall(data)
                if half_close:
                    client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65_536):
                received += piece
            return received


@contextmanager
def serving(
    bounds: ControlBounds | None = None, settings: dict[str, object] | None = None
) -> Generator[Served, None, None]:
    """Serve a :class:`FakeNode` until the block is left."""
    with tempfile.TemporaryDirectory(prefix="dep2p-") as directory:
        flags: dict[str, object] = {"node.data_dir": directory, "limits.drain_timeout_s": 2.0, **(settings or {})}
        config = load_config(flags=flags)
        started: list[Served] = []
        failed: list[BaseException] = []
        ready = threading.Event()

        async def run() -> None:
            node = FakeNode()
            async with open_control(as_node_api(node), config, bounds=bounds) as control:
                server = HttpServer(control.bounds)
                control.connections = lambda: server.connection_count
                app = build_app(control)
                tcp = open_tcp("127.0.0.1:0")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(server.serve, ControlApp(app, control), [open_unix(config.socket_path)])
                    nursery.start_soon(server.serve, ControlApp(app, control, TOKEN), [tcp])
                    http = httpx.Client(
                        transport=httpx.HTTPTransport(uds=str(config.socket_path)), base_url="http://dep2p", timeout=10
                    )
                    stop = trio.Event()
                    port = int(tcp.socket.getsockname()[1])
                    token = trio.lowlevel.current_trio_token()
                    started.append(Served(config, config.socket_path, node, control, server, http, port, token, stop))
                    ready.set()
                    await stop.wait()
                    nursery.cancel_scope.cancel()

        def thread() -> None:
            try:
                trio.run(run)
            except BaseException as error:
                failed.append(error)
            finally:
                ready.set()

        worker = threading.Thread(target=thread, name="control-api")
        worker.start()
        ready.wait(10)
        try:
            if started:
                yield started[0]
        finally:
            if started:
                started[0].http.close()
                with contextlib.suppress(trio.RunFinishedError):
                    started[0].do(started[0].stop.set)
            worker.join(10)
            if failed:
                raise failed[0]  # also when the test failed: its failure may be no more than the echo
        assert not worker.is_alive(), "the control API did not stop"
