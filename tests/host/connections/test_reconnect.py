"""Peers that are kept connected: when they are dialed again, and what the log says of those that the user named."""

import logging
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import trio
from trio.abc import Clock

from dep2p.errors import PeerNotFoundError
from dep2p.host.connections.reconnect import Reconnector
from dep2p.host.counters import Counters
from dep2p.host.interface import PeerConnected
from dep2p.protocols.timing.reconnect import ReconnectPolicy
from dep2p.types import PeerId

ANN, BOB = PeerId("ann"), PeerId("bob")


async def test_a_bootstrap_peer_that_is_down_is_logged_once_and_tried_each_minute(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dep2p.host")
    dials: list[float] = []
    is_up = False

    async def dial(peer: PeerId) -> None:
        if peer == ANN:
            dials.append(trio.current_time())
        if not is_up:
            raise PeerNotFoundError(f"{peer} does not answer")

    counters = Counters()
    reconnector = Reconnector(ReconnectPolicy(Random(1), max_s=60.0), dial, lambda _peer: is_up, counters)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reconnector.run)
        reconnector.keep_connected(ANN, is_bootstrap=True)
        reconnector.keep_connected(BOB)
        await trio.sleep(3_600)
        lines = [record.message for record in caplog.records]
        assert len(lines) == 1
        assert "the bootstrap peer ann cannot be reached: ann does not answer" in lines[0]
        assert max(later - earlier for earlier, later in pairwise(dials)) <= 60
        assert dials[1] - dials[0] <= 1
        assert reconnector.failure(ANN) == "ann does not answer"

        is_up = True
        await trio.sleep(61)
        connection: Any = type("Connection", (), {"peer": ANN})()
        reconnector.on_event(PeerConnected(connection))
        assert caplog.records[-1].message == "the bootstrap peer ann is connected"
        assert reconnector.failure(ANN) is None
        nursery.cancel_scope.cancel()
