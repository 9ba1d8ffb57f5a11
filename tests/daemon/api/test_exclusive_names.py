"""A name that one program at a time may have is free for the next program as soon as the last one leaves."""

from contextlib import AbstractContextManager

import httpx
import pytest
import trio
import trio.testing

from dep2p.daemon.api.resources.exclusive_names import RELEASE_WAIT_S, ExclusiveNames
from dep2p.daemon.problems import Problem
from tests.daemon.api.harness import Served

CLAIMS = {
    "streams": ("GET", "/v1/streams", {"accept": "jobs"}),
    "sessions": ("GET", "/v1/sessions", {"serve": "jobs"}),
    "replies": ("POST", "/v1/replies", None),
}


def _claim(served: Served, kind: str) -> AbstractContextManager[httpx.Response]:
    method, path, params = CLAIMS[kind]
    return served.http.stream(method, path, params=params, json={"name": "jobs"} if method == "POST" else None)


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_program_that_leaves_and_comes_back_at_once_gets_its_name(served: Served, kind: str) -> None:
    for _ in range(30):
        with _claim(served, kind) as answer:
            assert answer.status_code == 200, answer.read()


async def test_a_claim_waits_for_the_last_program_to_leave(autojump_clock: trio.testing.MockClock) -> None:
    names = ExclusiveNames("answers requests")
    free = await names.claim("jobs")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(names.claim, "jobs")
        await trio.sleep(RELEASE_WAIT_S / 2)
        assert free()
    assert trio.current_time() == pytest.approx(RELEASE_WAIT_S / 2)
    assert "jobs" in names and len(names) == 1


async def test_a_name_that_stays_taken_is_refused_and_stays_with_its_program(
    autojump_clock: trio.testing.MockClock,
) -> None:
    names = ExclusiveNames("answers requests")
    free = await names.claim("jobs")
    with pytest.raises(Problem, match="a program answers requests 'jobs' already"):
        await names.claim("jobs")
    assert trio.current_time() == pytest.approx(RELEASE_WAIT_S)
    assert free() and len(names) == 0


async def test_freeing_twice_takes_the_name_from_nobody(autojump_clock: trio.testing.MockClock) -> None:
    names = ExclusiveNames("answers requests")
    first = await names.claim("jobs")
    assert first()
    await names.claim("jobs")
    assert not first() and "jobs" in names
