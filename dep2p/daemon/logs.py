"""The daemon's log: records are formatted where they arise and written by a thread of their own, so that neither a slow
nor a full disk holds up or ends the daemon. Lines that cannot be kept are dropped and counted."""

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dep2p.config.loader import LogConfig
from dep2p.outside_text import one_line

_LINES_MAX: Final = 10_000
_LINE_BYTES_MAX: Final = 16_384
_BATCH_LINES: Final = 500
_RETRY_S: Final = 1.0
_CLOSE_TIMEOUT_S: Final = 2.0
_RECORD: Final = logging.LogRecord("", 0, "", 0, "", (), None)
_STANDARD: Final = frozenset(_RECORD.__dict__) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """``2030-01-02T03:04:05.678Z info  dep2p.daemon  ready  peer_id=… listen=…``: one line for each record."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f"  {name}={_text(value)}" for name, value in extra_of(record).items())
        head = f"{_stamp(record.created)} {record.levelname.lower():<7} {record.name}"
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        # Indented, so that the text of an exception cannot pass for a line of its own.
        return "\n".join([f"{head}  {one_line(record.getMessage())}{fields}", *(f"  {one_line(x)}" for x in trace)])


class JsonFormatter(logging.Formatter):
    """One JSON object for each record: time, level, logger, event, the fields, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **extra_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, separators=(",", ":"))


def extra_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Return the fields that the caller gave with ``extra``."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _stamp(created_s: float) -> str:
    seconds = int(created_s)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int((created_s - seconds) * 1000):03d}Z"


def _text(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value, default=str, separators=(",", ":"))
    return json.dumps(value) if " " in value or not value.isprintable() or not value else value


class LogSink(logging.Handler):
    """Takes records, never blocks, and writes them from its own thread to a file (made anew when it was moved away) or
    to stderr."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.lines_dropped: int = 0
        self._path = path
        self._descriptor = -1
        self._lines: deque[bytes] = deque()
        self._wake = threading.Condition()
        self._closing = False
        if path is not None:
            self._descriptor = self._open()  # opened here, so that a bad path is an error at the start
        self._thread = threading.Thread(target=self._write_all, name="dep2p-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "backslashreplace")[:_LINE_BYTES_MAX] + b"\n"
        except Exception as error:  # a value whose repr fails must not reach the caller of the log
            line = f"a record of {record.name} could not be formatted: {type(error).__name__}\n".encode()
        with self._wake:
            if len(self._lines) >= _LINES_MAX:
                self.lines_dropped += 1
            else:
                self._lines.append(line)
                self._wake.notify()

    def close(self) -> None:
        """Write the waiting lines, for at most 2 s."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)
        super().close()

    def _write_all(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closing:
                    self._wake.wait()
                if not self._lines:
                    return
                batch = [self._lines.popleft() for _ in range(min(len(self._lines), _BATCH_LINES))]
            try:
                self._write(b"".join(batch))
            except OSError:
                # Disk full, no right, pipe closed: these lines are lost. Wait a little, the rest may get through.
                self.lines_dropped += len(batch)
                with self._wake:
                    if not self._closing:
                        self._wake.wait(_RETRY_S)

    def _write(self, data: bytes) -> None:
        if self._path is None:
            descriptor = 2
        else:
            if self._descriptor < 0 or self._was_moved():
                self._reopen()
            descriptor = self._descriptor
        while data:
            data = data[os.write(descriptor, data) :]

    def _open(self) -> int:
        assert self._path is not None
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _was_moved(self) -> bool:
        assert self._path is not None
        try:
            there, mine = os.stat(self._path), os.fstat(self._descriptor)
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def _reopen(self) -> None:
        descriptor = self._open()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor


def open_log(config: LogConfig) -> LogSink:
    """Start the log of the process: everything below the logger "dep2p", and warnings of the libraries.

    Raises OSError when the file cannot be opened.
    """
    sink = LogSink(Path(config.file).expanduser() if config.file else None)
    sink.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.addHandler(sink)
    root.setLevel(logging.ERROR)
    logging.getLogger("dep2p").setLevel(config.level.upper())
    logging.captureWarnings(True)
    return sink


def close_log(sink: LogSink) -> None:
    """Flush, and restore the logging of the process: without handlers."""
    logging.getLogger().removeHandler(sink)
    logging.captureWarnings(False)
    sink.close()
    sys.stderr.flush()
