"""Bodies of the control API that come slowly: a client on a slow link is heard, one that dribbles is not."""

import pytest
import trio
from starlette.requests import Request
from starlette.types import Message

from dep2p.daemon.api.fields import read_body
from dep2p.daemon.problems import Problem


def request_of(pieces: int, piece_bytes: int, every_s: float) -> Request:
    left = pieces

    async def receive() -> Message:
        nonlocal left
        await trio.sleep(every_s)
        left -= 1
        return {"type": "http.request", "body": bytes(piece_bytes), "more_body": left > 0}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


async def test_a_body_that_flows_for_minutes_is_taken(autojump_clock: trio.abc.Clock) -> None:
    body = await read_body(request_of(150, 10_000, 1.0), 2_000_000, 30.0)
    assert len(body) == 1_500_000


async def test_a_body_that_dribbles_is_refused(autojump_clock: trio.abc.Clock) -> None:
    with pytest.raises(Problem, match="the body did not arrive within"):
        await read_body(request_of(1_000_000, 1, 1.0), 2_000_000, 30.0)
    assert trio.current_time() < 32
