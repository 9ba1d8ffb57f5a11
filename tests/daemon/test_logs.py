"""The log: what a line looks like, and that nothing about writing it can hurt the daemon."""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dep2p.config.loader import LogConfig
from dep2p.daemon import logs
from dep2p.daemon.logs import JsonFormatter, LogSink, TextFormatter, close_log, open_log


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("dep2p.test", logging.INFO, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    made.created = 1_700_000_000.25
    return made


def test_a_text_line_has_time_level_event_and_fields() -> None:
    line = TextFormatter().format(record("peer %s", "connected", peer="12D3", reason="a b", addrs=["x", "y"]))
    assert (
        line == '2023-11-14T22:13:20.250Z info    dep2p.test  peer connected  peer=12D3  reason="a b"  addrs=["x","y"]'
    )


def test_a_json_line_is_one_object() -> None:
    line = JsonFormatter().format(record("ready", peer="12D3", pid=7, odd=Path("/x")))
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "dep2p.test",
        "event": "ready",
        "peer": "12D3",
        "pid": 7,
        "odd": "/x",
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_text_from_peers_cannot_forge_lines_or_drive_a_terminal(formatter: logging.Formatter) -> None:
    line = formatter.format(record("said %s", "a\nb\x1b[31m", reason="c\nd\x1b[0m"))
    assert "\n" not in line and "\x1b" not in line


def test_an_exceptions_text_cannot_forge_lines_or_drive_a_terminal() -> None:
    made = record("the handler failed")
    try:
        raise ValueError("bad\n2023-11-14T22:13:20.250Z info    dep2p.daemon  all is well\x1b[2J")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    first, *rest = TextFormatter().format(made).split("\n")
    assert first.endswith("the handler failed") and len(rest) >= 4
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("dep2p.test")
    before = logging.getLogger().handlers[:]
    levels = {name: logging.getLogger(name).level for name in ("", "dep2p")}
    yield found
    for handler in before:
        logging.getLogger().addHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_levels_and_the_file(tmp_path: Path, logger: logging.Logger) -> None:
    sink = open_log(LogConfig(level="warning", file=str(tmp_path / "log")))
    logger.info("too quiet")
    logger.warning("heard")
    logging.getLogger("some.library").warning("a library's warning is not ours")
    logging.getLogger("some.library").error("a library's error is told")
    close_log(sink)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.rsplit("  ", 1)[1] for line in lines] == ["heard", "a library's error is told"]


def test_a_failing_disk_costs_lines_and_they_are_counted(
    tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    write = os.write

    def write_unless_full(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    monkeypatch.setattr(logs, "_RETRY_S", 0.01)
    sink = open_log(LogConfig(file=str(tmp_path / "log")))
    for number in range(50):
        logger.info("line %d", number)
    end_s = time.monotonic() + 5
    while sink.lines_dropped < 50 and time.monotonic() < end_s:
        pass
    assert sink.lines_dropped == 50
    full = False
    logger.info("there is room again")
    close_log(sink)
    assert "there is room again" in (tmp_path / "log").read_text()


def test_a_writer_that_stands_still_holds_up_no_one(
    tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()

    def write_when_free(_sink: LogSink, _data: bytes) -> None:
        stuck.wait(20)

    monkeypatch.setattr(LogSink, "_write", write_when_free)
    monkeypatch.setattr(logs, "_LINES_MAX", 100)
    sink = open_log(LogConfig(file=str(tmp_path / "log")))
    started_s = time.monotonic()
    for number in range(1000):
        logger.info("line %d", number)
    assert time.monotonic() - started_s < 15, "the writer stands still for 20 s"
    assert sink.lines_dropped >= 1000 - 100 - 500  # one batch is with the writer, 100 lines wait
    stuck.set()
    close_log(sink)


def test_a_record_that_cannot_be_formatted_is_reported_and_hurts_no_one(tmp_path: Path, logger: logging.Logger) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ZeroDivisionError

    sink = open_log(LogConfig(file=str(tmp_path / "log")))
    logger.info("it is %s", Odd())
    close_log(sink)
    assert "could not be formatted: ZeroDivisionError" in (tmp_path / "log").read_text()


def test_a_file_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        open_log(LogConfig(file=str(tmp_path / "nothing" / "log")))
