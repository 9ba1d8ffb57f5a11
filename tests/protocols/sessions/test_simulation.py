"""Ordered sessions on a bad network, thousands of times; the number of seeds comes from the environment:

DEP2P_SESSION_SEEDS=10000 .venv/bin/python -m pytest -q tests/protocols/sessions/test_simulation.py
"""

import os

import pytest

from dep2p.protocols.sessions.options import SessionOptions
from tests.protocols.sessions.world import Faults, World

_SEEDS = int(os.environ.get("DEP2P_SESSION_SEEDS", "50"))
_BATCH = 10
_STEPS = 400
_PATIENT = SessionOptions(items_max=40, bytes_max=2_000, retries_max=40, ack_timeout_s=3.0, requests_max=50)
_SEED_VALUES = SessionOptions(items_max=40, bytes_max=2_000, requests_max=50)
_ONE_BYTE = SessionOptions(items_max=40, bytes_max=1, retries_max=40, ack_timeout_s=3.0)

_KINDS = {
    "everything": (Faults(), _PATIENT),
    "the-seeds-timeouts": (Faults(), _SEED_VALUES),  # three retries are few at such a loss: some sessions fail
    "only-cuts-and-restarts": (Faults(0.0, 0.0, cut=0.1, client_restart=0.02, server_restart=0.01), _PATIENT),
    "places-kept-seldom": (Faults(token_every=7, client_restart=0.01), _PATIENT),
    "window-of-one-byte": (Faults(), _ONE_BYTE),
}
_BATCHES = [
    (kind, first) for kind in _KINDS for first in range(0, _SEEDS if kind == "everything" else _SEEDS // 5, _BATCH)
]


@pytest.mark.timeout(0 if _SEEDS > 1_000 else 120)
@pytest.mark.parametrize(("kind", "first"), _BATCHES)
def test_strict_order_once_and_nothing_lost_in_silence(kind: str, first: int) -> None:
    faults, options = _KINDS[kind]
    for seed in range(first, first + _BATCH):
        world = World(seed, faults, options)
        try:
            world.run(_STEPS)
        except AssertionError as error:
            error.add_note(f"seed {seed} of {kind}")
            raise
        if kind != "the-seeds-timeouts":
            assert not world.failures, f"seed {seed}: a session failed although it had patience"


def test_the_simulation_has_all_that_it_is_about() -> None:
    worlds = [World(seed, *_KINDS["everything"]) for seed in range(20)]
    for world in worlds:
        world.run(_STEPS)
    events = [kind for world in worlds for kind, _epoch, _seq in world.seen.events]
    assert events.count("push") > 2_000
    assert events.count("reset") > 5
    assert events.count("restart") > 10
    assert sum(world.cuts for world in worlds) > 100
    assert sum(world.answers for world in worlds) > 100
    assert sum(world.client.receiver.duplicates for world in worlds) > 100
    impatient = [World(seed, *_KINDS["the-seeds-timeouts"]) for seed in range(100)]
    for world in impatient:
        world.run(_STEPS)
    assert sum(world.failures for world in impatient) > 0


@pytest.mark.parametrize("end", ["link", "client", "server"])
def test_the_link_is_cut_or_an_end_restarts_at_every_single_step(end: str) -> None:
    for step in range(120):
        world = World(7, Faults(0.0, 0.0, 0.0, 0.0, 0.0), _PATIENT)
        world.stop_at(step, end)
        world.run(120)
        resets = [each for each in world.seen.events if each[0] == "reset"]
        assert len(resets) <= (end == "server"), f"a reset after step {step}"
