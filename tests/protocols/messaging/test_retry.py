"""Which errors are tried again, and after how long."""

from random import Random

import pytest

from dep2p.errors import (
    Dep2pError,
    HandlerError,
    MessageTooLargeError,
    NoHandlerError,
    NotMemberError,
    OverloadedError,
    PeerNotFoundError,
    ProtocolError,
    RateLimitedError,
    RemoteError,
    RequestTimeoutError,
    StreamClosedError,
    TopicNotFoundError,
)
from dep2p.limits import Limits
from dep2p.protocols.messaging.retry import RetryPolicy


def policy(limits: Limits | None = None, seed: int = 1) -> RetryPolicy:
    return RetryPolicy(limits or Limits(), Random(seed))


@pytest.mark.parametrize("error", [RequestTimeoutError("x"), OverloadedError("x"), StreamClosedError("x")])
def test_errors_that_may_heal_are_tried_again_five_times_at_most(error: Dep2pError) -> None:
    delays = [policy().delay_s(error, tries) for tries in range(1, 6)]
    assert all(delay is not None for delay in delays[:4])
    assert delays[4] is None


@pytest.mark.parametrize(
    "error",
    [
        RemoteError("x"),
        ProtocolError("x"),
        HandlerError("x"),
        NotMemberError("x"),
        NoHandlerError("x"),
        MessageTooLargeError("x"),
        TopicNotFoundError("x"),
        PeerNotFoundError("x"),
    ],
)
def test_errors_that_stay_are_not_tried_again(error: Dep2pError) -> None:
    assert policy().delay_s(error, 1) is None


def test_delays_double_from_100_ms_up_to_30_s_with_jitter_in_the_upper_half() -> None:
    limits = Limits(request_tries_max=100)
    for tries in range(1, 20):
        full = min(30.0, 0.1 * 2 ** (tries - 1))
        delays = [policy(limits, seed).delay_s(OverloadedError("x"), tries) for seed in range(200)]
        assert all(delay is not None and full / 2 <= delay <= full for delay in delays)
        assert len({round(delay or 0, 6) for delay in delays}) > 100


def test_rate_limited_waits_at_least_the_time_named() -> None:
    delay_s = policy().delay_s(RateLimitedError("x", retry_after_ms=1_500), 1)
    assert delay_s is not None
    assert 1.5 < delay_s <= 1.6
