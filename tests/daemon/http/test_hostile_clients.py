"""Hostile clients of the control API: each gets a clear answer or a closed connection."""

import contextlib
import json
import socket
import subprocess
import sys
import time

import pytest
import trio

from dep2p.daemon.bounds import ControlBounds
from tests.daemon.api.fake_node import ANN
from tests.daemon.api.harness import Served, serving
from tests.daemon.api.test_routes import DATA, problem

GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
# Long for a busy machine, short beside what would have to end before (a body has 30 s).
WAIT_S = 8.0


def connected(served: Served) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(5)
    client.connect(str(served.socket))
    return client


def test_a_body_that_says_it_is_huge(served: Served) -> None:
    answer = served.raw(b"POST /v1/requests HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"D1007" in answer


def test_a_body_that_turns_out_huge_is_answered_while_the_client_still_sends(served: Served) -> None:
    size = 8 * 1024 * 1024

    def chunks() -> object:
        for _ in range(size // 65_536):
            yield b"x" * 65_536

    problem(served.http.post("/v1/requests", content=chunks()), 413, "D1007")  # type: ignore[arg-type]
    problem(served.http.post("/nowhere", content=b"x" * size), 404, "D1006")
    served.wait_until(lambda: served.server.connection_count <= 1, "the connections are closed")


def test_a_head_byte_by_byte_is_cut_off() -> None:
    with serving(ControlBounds(head_timeout_s=0.3)) as served, connected(served) as client:
        client.settimeout(0.01)
        until_s = time.monotonic() + WAIT_S
        is_cut = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not is_cut and time.monotonic() < until_s:
                client.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    is_cut = client.recv(1) == b""
        assert time.monotonic() < until_s, "each byte gave the head more time"


def test_silent_and_idle_connections_are_closed() -> None:
    with serving(ControlBounds(head_timeout_s=0.2, keep_alive_timeout_s=0.2)) as served:
        with connected(served) as silent, connected(served) as idle:
            idle.sendall(GET)
            answer = b""
            while piece := idle.recv(65_536):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
            assert silent.recv(10) == b""


def test_a_body_byte_by_byte_is_cut_off() -> None:
    with serving(ControlBounds(body_timeout_s=0.3)) as served:
        answer = served.raw(b'POST /v1/requests HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"a":')
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"D1009" in answer


def test_connections_are_bounded_and_the_next_is_reported() -> None:
    with serving(ControlBounds(connections_max=3)) as served:
        held = [connected(served) for _ in range(3)]
        served.wait_until(lambda: served.server.connection_count == 3, "three are open")
        assert served.raw(b"").startswith(b"HTTP/1.1 503")
        for client in held:
            client.close()
        served.wait_until(lambda: served.server.connection_count == 0, "all are closed")
        assert served.http.get("/healthz").status_code == 200
        assert served.server.refused == 1


OF_ANOTHER_PROGRAM = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
    client.settimeout(5)
    client.connect(sys.argv[1])
    client.sendall(b"GET /healthz HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n")
    print(client.recv(4_096)[:12].decode())
"""


def test_one_program_leaves_connections_to_others() -> None:
    with serving(ControlBounds(connections_max=16)) as served, contextlib.ExitStack() as stack:
        for _ in range(14):
            stack.enter_context(connected(served))
        served.wait_until(lambda: served.server.connection_count == 14, "fourteen are open")
        assert served.raw(b"").startswith(b"HTTP/1.1 503")
        command = [sys.executable, "-c", OF_ANOTHER_PROGRAM, str(served.socket)]
        other = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert other.stdout == "HTTP/1.1 200\n", other.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/requests HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/requests HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/requests HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_ends_in_a_4xx_or_a_close(served: Served, data: bytes) -> None:
    answer = served.raw(data, half_close=True)
    status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
    # 501 is HTTP's answer to an unknown transfer encoding, 505 to another major version.
    assert status < 500 or status in (501, 505), answer
    assert status != 200
    assert served.http.get("/healthz").status_code == 200


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    with connected(served) as client:
        client.sendall(GET * 3)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 3:
            answer += client.recv(65_536)


def test_a_client_that_hangs_up_cancels_its_request(served: Served) -> None:
    body = json.dumps({"peer": ANN, "name": "hang", "timeout_s": 60, **DATA}).encode()
    head = f"POST /v1/requests HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with connected(served) as client:
        client.sendall(head + body)
        served.call(served.node.hanging.wait)
    served.wait_until(served.node.hang_cancelled.is_set, "the request is cancelled")
    served.wait_until(lambda: served.control.lifecycle.in_flight == 0, "nothing is in flight")


def test_clients_that_never_read_cost_bounded_memory_and_do_not_stop_the_end() -> None:
    with contextlib.ExitStack() as stack:
        with serving() as served:
            never_read(served, stack)
            started_s = time.monotonic()
        assert time.monotonic() - started_s < WAIT_S, "the server ended while its client still did not read"


def never_read(served: Served, stack: contextlib.ExitStack) -> None:
    stream_id = served.http.post("/v1/streams", json={"peer": ANN, "name": "x"}).json()["id"]
    far = served.node.opened[-1]
    client = stack.enter_context(connected(served))
    client.sendall(f"GET /v1/streams/{stream_id}/items HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    taken = 0

    async def flood() -> None:
        nonlocal taken
        with contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            while True:
                await far.from_far.send(b"x" * 1_000_000)
                taken += 1

    served.do(served.control.nursery.start_soon, flood)
    served.wait_until(lambda: taken >= 4, "some items are taken")
    before = taken
    assert served.http.get("/healthz").status_code == 200
    assert taken <= before + 4, "the peer is held back"


def test_other_clients_are_served_while_one_floods(served: Served) -> None:
    clients = [connected(served) for _ in range(20)]
    for client in clients:
        client.sendall(b"POST /v1/requests HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 50_000)
    started_s = time.monotonic()
    assert served.http.get("/v1/status").status_code == 200
    assert time.monotonic() - started_s < WAIT_S, "nobody waits for the body of another one"
    for client in clients:
        client.close()
    served.wait_until(lambda: served.server.connection_count <= 1, "the flooders are forgotten")
