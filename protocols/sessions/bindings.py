"""Pushes bound to requests: those in front of a response, those behind it, and the time for which they are kept."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from dep2p.errors import AlreadyRespondedError, SessionFullError
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.wire import AFTER, BEFORE, REQUEST_MAX

_BOUND_BYTES: Final = 64
"""Bytes that one bound push counts for besides its data."""


@dataclass(slots=True)
class _Bound:
    before: list[bytes] = field(default_factory=list[bytes])
    after: list[bytes] = field(default_factory=list[bytes])
    size_bytes: int = 0

    @property
    def items(self) -> int:
        return len(self.before) + len(self.after)


class Bindings:
    """The bindings by request id, before the request has come or after.

    Request ids of a session are 1, 2, 3 and so on, taken in order: one that is not open and not above the highest is
    answered.
    """

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._bound: dict[int, _Bound] = {}
        self._due: deque[tuple[float, int]] = deque()  # for ids whose requests have not come; by time
        self._open: dict[int, None] = {}
        self.taken: int = 0
        """The highest request id taken."""
        self.items: int = 0
        self.size_bytes: int = 0
        self.expired: int = 0

    @property
    def open_requests(self) -> int:
        """The number of requests that were taken and not answered."""
        return len(self._open)

    def open_ids(self) -> list[int]:
        """The ids of these requests, in order."""
        return list(self._open)

    def is_open(self, request_id: int) -> bool:
        """Whether the request was taken and not answered."""
        return request_id in self._open

    def open(self, request_id: int) -> None:
        """Take the next request."""
        self.taken = request_id
        self._open[request_id] = None

    def skip_to(self, request_id: int) -> None:
        """Skip requests up to this one, which do not come any more."""
        self.taken = max(self.taken, request_id)

    def bind(self, kind: int, request_id: int, data: bytes, now: float) -> bool:
        """Keep one push for a request. Returns False for an AFTER of an answered one, which can be sent at once.

        Raises AlreadyRespondedError for a BEFORE of an answered one, SessionFullError over the bounds, ``ValueError``
        for an id that no request can have.
        """
        if not 1 <= request_id <= REQUEST_MAX:
            raise ValueError(f"request id {request_id}: ids go from 1 to {REQUEST_MAX}")
        if request_id <= self.taken and request_id not in self._open:
            if kind == BEFORE:
                raise AlreadyRespondedError(f"request {request_id} was answered: nothing can go in front of it now")
            return False
        size = len(data) + _BOUND_BYTES
        options = self._options
        if self.items >= options.bound_items_max or (self.items and self.size_bytes + size > options.bound_bytes_max):
            raise SessionFullError(
                f"{self.items} pushes of {self.size_bytes} bytes are bound to requests of this session that are not "
                "answered: answer them first, or raise bound_items_max or bound_bytes_max"
            )
        bound = self._bound.get(request_id)
        if bound is None:
            bound = self._bound[request_id] = _Bound()
            if request_id > self.taken:
                self._due.append((now + options.binding_timeout_s, request_id))
        (bound.before if kind == BEFORE else bound.after).append(data)
        bound.size_bytes += size
        self.items += 1
        self.size_bytes += size
        return True

    def of(self, request_id: int) -> tuple[list[bytes], list[bytes]]:
        """Return the pushes bound to a request, in order: those before its response, and those after it."""
        bound = self._bound.get(request_id)
        return (bound.before, bound.after) if bound is not None else ([], [])

    def close(self, request_id: int) -> None:
        """Close an answered request, whose bound pushes are on their way."""
        self._open.pop(request_id, None)
        self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        bound = self._bound.pop(request_id, None)
        if bound is not None:
            self.items -= bound.items
            self.size_bytes -= bound.size_bytes

    def next_deadline(self) -> float | None:
        """Return when the oldest binding is given up whose request has not come."""
        return self._due[0][0] if self._due else None

    def expire(self, now: float) -> list[tuple[int, int, bytes]]:
        """Give up bindings whose time is over; return kind, request id and data of each."""
        given_up: list[tuple[int, int, bytes]] = []
        while self._due and self._due[0][0] <= now:
            _due, request_id = self._due.popleft()
            bound = self._bound.get(request_id)
            if bound is None or request_id in self._open:
                continue
            given_up += [(BEFORE, request_id, data) for data in bound.before]
            given_up += [(AFTER, request_id, data) for data in bound.after]
            self.expired += bound.items
            self._forget(request_id)
        return given_up
