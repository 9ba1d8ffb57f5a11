"""Who waits for which answer of a session."""

from collections.abc import Callable
from typing import Final, cast

import trio
from outcome import Error, Value

from dep2p.errors import Dep2pError, ProtocolError, error_from_wire
from dep2p.protocols.sessions.wire import FAILURE, RESPONSE, Push, decode_failure

ANSWERS: Final = (RESPONSE, FAILURE)


class Answers:
    """The tasks that wait, by request id. ``on_cancel`` is called for one that does not wait any more."""

    def __init__(self, on_cancel: Callable[[int], None]) -> None:
        self._on_cancel = on_cancel
        self._waiting: dict[int, trio.lowlevel.Task] = {}
        self._hasty: dict[int, None] = {}  # need not wait for the pushes in front

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request_id: int, in_order: bool) -> bytes:
        """The answer. Raises what the server answers, or what `fail` is given."""
        self._waiting[request_id] = trio.lowlevel.current_task()
        if not in_order:
            self._hasty[request_id] = None

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._pop(request_id)
            self._on_cancel(request_id)
            return trio.lowlevel.Abort.SUCCEEDED

        return cast(bytes, await trio.lowlevel.wait_task_rescheduled(abort))

    def _pop(self, request_id: int) -> trio.lowlevel.Task | None:
        self._hasty.pop(request_id, None)
        return self._waiting.pop(request_id, None)

    def is_urgent(self, request_id: int, consumer: trio.lowlevel.Task | None) -> bool:
        """Whether its answer is wanted at once: nobody takes the pushes in front, or its asker does."""
        task = self._waiting.get(request_id)
        return task is not None and (consumer in (None, task) or request_id in self._hasty)

    def give(self, push: Push) -> None:
        """Wake who waits for this response, if somebody does."""
        task = self._pop(push.request_id)
        if task is None:
            return
        if push.kind == RESPONSE:
            trio.lowlevel.reschedule(task, Value(push.data))
            return
        try:
            code, text = decode_failure(push.data)
            error: Dep2pError = error_from_wire(code, text)
        except ProtocolError as bad:
            error = bad
        trio.lowlevel.reschedule(task, Error(error))

    def fail(self, request_id: int, error: Dep2pError) -> None:
        """There will be no answer to this one."""
        task = self._pop(request_id)
        if task is not None:
            trio.lowlevel.reschedule(task, Error(error))

    def fail_all(self, error: Callable[[], Dep2pError]) -> None:
        """There will be no answers; an error of its own for each."""
        for request_id in list(self._waiting):
            self.fail(request_id, error())
