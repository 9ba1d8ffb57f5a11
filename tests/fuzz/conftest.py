"""How long each fuzz target runs: DEP2P_FUZZ_S seconds, 2 by default."""

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest

FuzzRounds = Callable[[], Iterator[random.Random]]


@pytest.fixture
def fuzz_rounds() -> Iterator[FuzzRounds]:
    """Random sources, one a round, until the time is over. A failure's report names the seed of its round."""
    seconds = float(os.environ.get("DEP2P_FUZZ_S", "2"))
    seed = random.SystemRandom().getrandbits(48)

    def rounds() -> Iterator[random.Random]:
        nonlocal seed
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            seed += 1
            yield random.Random(seed)

    yield rounds
    print(f"the last round was random.Random({seed})")
