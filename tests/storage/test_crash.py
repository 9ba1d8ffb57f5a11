"""kill -9 at random moments during publish and consume. DEP2P_CRASH_ROUNDS: how often, 3 in the suite."""

import os

import pytest
import trio

from bench.harness.servers import NotInstalledError
from bench.queues.crash import STORES, Crashes, crash_rounds, store_address
from tests.services import servers

pytestmark = [pytest.mark.real, pytest.mark.timeout(3_600)]
ROUNDS = int(os.environ.get("DEP2P_CRASH_ROUNDS", "3"))


@pytest.mark.parametrize("name", STORES)
def test_nothing_acknowledged_is_lost_and_no_id_is_given_twice(name: str) -> None:
    """nsqio/nsq#1386, #755: kill -9 lost what was queued or in flight."""

    async def run() -> Crashes:
        try:
            with store_address(name) as address:
                return await crash_rounds(address, ROUNDS, seed=5)
        except NotInstalledError as error:
            servers.missing(str(error))

    crashes = trio.run(run)
    assert (crashes.lost, crashes.given_twice, crashes.came_back) == ([], [], [])
    assert crashes.in_flight_back
    assert crashes.done
    assert len(crashes.acked) > len(crashes.done)


def test_the_count_itself_notices_what_it_is_for() -> None:
    crashes = Crashes()
    for line in ("acked 1 1", "acked 1 2", "got 1 1", "done 1 1"):
        crashes.hear(line, before={})
    assert crashes.is_healthy
    crashes.hear("acked 1 2", before={})
    crashes.hear("got 1 1", before={"1 1": None})
    assert (crashes.given_twice, crashes.came_back, crashes.in_flight_back) == (["1 2"], ["1 1"], 1)
    assert not crashes.is_healthy
    crashes = Crashes(lost=["1 3"])
    assert not crashes.is_healthy
