"""The error codes and the public exceptions map one to one."""

import pytest

from dep2p import errors
from dep2p.errors import ErrorCode, ProtocolError, RateLimitedError, RemoteError, WireError, error_from_wire


@pytest.mark.parametrize("code", list(ErrorCode))
def test_each_code_becomes_its_exception_and_back(code: ErrorCode) -> None:
    error = error_from_wire(code, "why", 250)
    assert error.code is code
    assert str(error) == "why"
    if isinstance(error, RateLimitedError):
        assert error.retry_after_ms == 250


def test_an_unknown_code_is_a_remote_error() -> None:
    assert type(error_from_wire(4711, "new")) is RemoteError


def test_every_wire_exception_is_reached_by_a_code() -> None:
    reached = {type(error_from_wire(code, "")) for code in ErrorCode}
    defined = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, WireError)
        # The caller raises these two itself: no peer sends them.
        and kind not in (WireError, errors.HeadersTooLargeError, errors.ServiceNotFoundError)
    }
    assert reached == defined
    assert error_from_wire(ErrorCode.UNSUPPORTED_VERSION, "").code is ErrorCode.UNSUPPORTED_VERSION
    assert type(error_from_wire(ErrorCode.UNSUPPORTED_VERSION, "")) is ProtocolError
