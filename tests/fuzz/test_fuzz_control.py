"""The control API under random and mutated requests: nothing but 2xx and 4xx problems, and it goes on serving."""

import base64
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from dep2p.daemon.api.routes import messages as routes_messages
from dep2p.daemon.api.routes import peers as routes_peers
from dep2p.daemon.api.routes import process as routes_process
from dep2p.daemon.api.routes import realms as routes_realms
from dep2p.daemon.api.routes import streams as routes_streams
from dep2p.realm.credentials import Realm
from tests.daemon.api.fake_node import ADDR, ANN, STRANGER
from tests.daemon.api.harness import Served, serving

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]
ROUTES: list[tuple[str, str]] = [
    (str(route.name).split(" ")[0], str(route.path))
    for module in (routes_process, routes_peers, routes_realms, routes_messages, routes_streams)
    for route in module.ROUTES
    # These two end the API, or change what all others answer.
    if route.path not in ("/v1/drain", "/v1/shutdown")
]
INVITE = Realm.from_psk(bytes([7]) * 32, "fuzz").invite([ADDR])
SEEDS: list[dict[str, Any]] = [
    {"peer": ANN, "name": "x", "data": "aGk=", "encoding": "base64", "headers": {"a": 1}, "timeout_s": 1},
    {"peer": "*", "name": "x", "data": "hi", "encoding": "utf-8", "idempotent": True, "realm": "team"},
    {"addr": ADDR, "timeout_s": 0.5},
    {"peer": STRANGER},
    {"count": 2, "timeout_s": 0.1},
    {"invite": INVITE},
    {"realm": base64.b64encode(Realm.from_psk(bytes([8]) * 32, "other").to_file_bytes()).decode()},
    {"name": "greet", "concurrency": 3},
    {"error": "no"},
    {"addrs": [ADDR]},
]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1e308,
    2**64,
    "",
    "x",
    "\ud800",
    "\x00",
    "../..",
    "*",
    ANN,
    [],
    [[]],
    {},
    {"data": "!", "encoding": "base64"},
    "A" * 300,
    [ADDR] * 20,
]


def mutated_body(rng: random.Random) -> bytes:
    body = dict(rng.choice(SEEDS))
    for _ in range(rng.randrange(4)):
        choice = rng.randrange(4)
        if choice == 0 and body:
            body[rng.choice(list(body))] = rng.choice(VALUES)
        elif choice == 1 and body:
            del body[rng.choice(list(body))]
        elif choice == 2:
            body[rng.choice(list(rng.choice(SEEDS)))] = rng.choice(VALUES)
        else:
            body |= rng.choice(SEEDS)
    raw = bytearray(json.dumps(body).encode())
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    if rng.random() < 0.1:
        del raw[rng.randrange(len(raw)) :]
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    return bytes(raw)


def random_path(rng: random.Random, template: str) -> str:
    parts = [ANN, STRANGER, "team", "nobody", "%00", "%2e%2e", "%ff", "*", "x" * 300, "0" * 16]
    path = template
    for name in ("{peer}", "{realm}", "{id}"):
        path = path.replace(name, rng.choice(parts))
    if rng.random() < 0.3:
        names = ["name", "realm", "types", "accept", "eof", "x"]
        values = ["x", "team", "", "peer_connected", "1", "%f0%28", "%00", "a&a=b"]
        path += "?" + "&".join(f"{rng.choice(names)}={rng.choice(values)}" for _ in range(rng.randrange(1, 4)))
    return path


def check(answer: httpx.Response, what: str) -> None:
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json", what
        problem = json.loads(answer.read())
        assert problem["status"] == answer.status_code and problem["code"].startswith("D"), what
        # 5xx stands for what a peer did; no name in use here makes the fake peers fail.
        assert answer.status_code < 500, (what, problem)


def test_any_request_gets_an_answer_that_is_no_fault_of_the_daemon(fuzz_rounds: FuzzRounds) -> None:
    with serving() as served:
        count = 0
        for rng in fuzz_rounds():
            count += 1
            method, template = rng.choice(ROUTES)
            if rng.random() < 0.1:
                method = rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
            path, body = random_path(rng, template), mutated_body(rng)
            with served.http.stream(method, path, content=body if method != "GET" else b"") as answer:
                if method != "HEAD":
                    check(answer, f"{method} {path} {body!r}")
        assert count > 10
        assert served.http.get("/healthz").status_code == 200
        assert served.http.get("/v1/status").status_code == 200


def exchange(served: Served, pieces: list[bytes]) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        client.connect(str(served.socket))
        received = b""
        try:
            for piece in pieces:
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65_536):
                received += piece
        except (BrokenPipeError, ConnectionResetError):
            return received
        except TimeoutError:
            # Right only where bytes follow the request of an endless subscription: nothing reads them.
            client.setblocking(False)
            try:
                received += client.recv(65_536)
            except ConnectionResetError:
                return received  # the close came just now
            except BlockingIOError:
                pass
            assert b"HTTP/1.1 200" in received and b"application/x-ndjson" in received, (pieces, received)
        return received


def test_any_bytes_end_in_an_answer_or_a_close(fuzz_rounds: FuzzRounds) -> None:
    with serving() as served:
        for rng in fuzz_rounds():
            body = mutated_body(rng)
            method, template = rng.choice(ROUTES)
            path = random_path(rng, template)
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            raw = bytearray(head.encode() + body)
            for _ in range(rng.randrange(4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            if rng.random() < 0.3:
                at = rng.randrange(len(raw))
                raw[at:at] = rng.choice([b"\r\n", b"\x00", b"transfer-encoding: chunked\r\n", b" ", bytes(raw[:50])])
            data = bytes(raw)
            pieces = [data] if rng.random() < 0.7 else [data[i : i + 1] for i in range(len(data))]
            answer = exchange(served, pieces)
            # 501 is HTTP's own answer to a transfer encoding that nobody knows.
            assert b"HTTP/1.1 5" not in answer.replace(b"HTTP/1.1 501", b""), (data, answer)
        served.wait_until(lambda: served.server.connection_count == 0, "no connection is left behind")
        started_s = time.monotonic()
        assert served.http.get("/healthz").status_code == 200
        assert time.monotonic() - started_s < 8, "what the fuzzer left still holds others up"
