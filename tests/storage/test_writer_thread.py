"""The thread of commits: what is done while it waits, and how it tells of errors and its end."""

import threading
from collections.abc import Callable

import pytest
import trio

from dep2p.storage import writer_thread
from dep2p.storage.writer_thread import WriterThread


class Steps:
    """The steps that have happened, in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.may_end = threading.Event()

    def work(self, thread: WriterThread, *, tells: bool) -> Callable[[], None]:
        def work() -> None:
            self.seen.append("work")
            if tells:
                thread.notify_waiting()
                thread.notify_waiting()  # once more is nothing new
            assert self.may_end.wait(30)
            self.seen.append("end")

        return work

    def meanwhile(self) -> None:
        self.seen.append("meanwhile")
        self.may_end.set()


async def test_what_is_left_to_do_is_done_when_the_thread_says_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_thread, "_MEANWHILE_S", 60.0)
    thread, steps = WriterThread("test"), Steps()
    with trio.fail_after(30):
        for _ in range(3):
            steps.may_end.clear()
            await thread.run(steps.work(thread, tells=True), steps.meanwhile)
    assert steps.seen == ["work", "meanwhile", "end"] * 3
    thread.close()


async def test_what_is_left_to_do_is_done_also_when_the_thread_does_not_say_that_it_waits() -> None:
    """It may not even have begun by then."""
    thread, steps = WriterThread("test"), Steps()
    with trio.fail_after(30):
        for _ in range(3):
            steps.may_end.clear()
            await thread.run(steps.work(thread, tells=False), steps.meanwhile)
    turns = [steps.seen[at : at + 3] for at in range(0, 9, 3)]
    assert [sorted(turn[:2]) for turn in turns] == [["meanwhile", "work"]] * 3
    assert [turn[2] for turn in turns] == ["end"] * 3
    thread.close()


async def test_what_is_left_to_do_is_done_once_however_soon_the_thread_ends() -> None:
    thread, steps = WriterThread("test"), Steps()
    for _ in range(200):
        await thread.run(thread.notify_waiting, steps.meanwhile)
        await thread.run(lambda: None, steps.meanwhile)
        await thread.run(thread.notify_waiting)
    assert steps.seen == ["meanwhile"] * 400
    thread.close()


async def test_an_error_of_the_work_is_raised_and_the_next_one_works() -> None:
    thread, steps = WriterThread("test"), Steps()

    def fail() -> None:
        raise OSError("the disk is ill")

    for meanwhile in (None, steps.meanwhile):
        with pytest.raises(OSError, match="ill"):
            await thread.run(fail, meanwhile)
        await thread.run(lambda: steps.seen.append("well"), meanwhile)
    assert (steps.seen.count("well"), steps.seen.count("meanwhile")) == (2, 2)
    thread.close()


@pytest.mark.parametrize("tells", [True, False])
async def test_an_error_of_what_is_done_meanwhile_is_raised_when_the_work_has_ended(tells: bool) -> None:
    """Else the next commit would begin beside it."""
    thread, steps = WriterThread("test"), Steps()

    def fail() -> None:
        steps.meanwhile()
        raise KeyError("meanwhile")

    with trio.fail_after(30):
        with pytest.raises(KeyError, match="meanwhile"):
            await thread.run(steps.work(thread, tells=tells), fail)
        assert steps.seen[-1] == "end"
        assert sorted(steps.seen) == ["end", "meanwhile", "work"]
        await thread.run(lambda: steps.seen.append("next"))
    assert steps.seen[3:] == ["next"]
    thread.close()


async def test_closing_ends_the_thread_and_is_idempotent() -> None:
    thread = WriterThread("a thread to be closed")
    thread.close()
    names: list[str] = []
    await thread.run(lambda: names.append(threading.current_thread().name))
    assert names == ["a thread to be closed"]
    thread.close()
    thread.close()
    assert names[0] not in [each.name for each in threading.enumerate()]
    await thread.run(lambda: names.append("again"))
    assert names[1:] == ["again"]
    thread.close()
