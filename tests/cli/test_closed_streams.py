"""Commands without standard input or output, on a full disk, or stopped while a pipe blocks them: no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

DEP2P = f"{sys.executable} -m dep2p.cli.main"
_TIMEOUT_S = 60


def shell(line: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEP2P_DATA_DIR": str(home)}
    return subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help >&-", 1),
        ("errors ls >&-", 1),
        ("config show >&-", 1),
        ("errors ls >/dev/full", 1),
        ("--help >/dev/full", 1),
        ("status >&- 2>&-", 3),
        ("status <&- >&- 2>&-", 3),
        ("realm join - <&-", 1),
        ("realm new team --passphrase <&-", 1),
        ("realm new team <&-", 0),
    ],
)
def test_a_closed_or_full_stream_is_an_error_without_a_traceback(words: str, code: int, tmp_path: Path) -> None:
    done = shell(f"{DEP2P} {words}", tmp_path)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr
    if code == 1:
        assert done.stderr.startswith("error: "), done.stderr


def test_no_file_that_is_opened_later_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Else what a program prints would go into its own key or socket."""
    code = (
        "import os, sys\n"
        "from dep2p.standard_streams import fill_standard_streams\n"
        "fill_standard_streams()\n"
        "found = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "assert found > 2, found\n"
        "print('lost', file=sys.stderr)\n"
    )
    done = shell(f'{sys.executable} -c "{code}" {tmp_path}/file <&- >&- 2>&-', tmp_path)
    assert done.returncode == 0 and (tmp_path / "file").read_bytes() == b""


def _open_for_writing(pipe: Path) -> int:
    """Open a pipe as soon as a process reads it: before that the system refuses (ENXIO)."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline_s, "the command has not opened the pipe"
            time.sleep(0.05)


@pytest.mark.parametrize("words", ["realm join --file {pipe}", "request self greet --file {pipe}"])
def test_a_command_that_a_pipe_blocks_ends_on_a_signal(words: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "dep2p.cli.main", *words.format(pipe=pipe).split()]
    environment = os.environ | {"DEP2P_DATA_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        writer = _open_for_writing(pipe)  # the command reads it from now on, and nothing comes
        try:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) in (-signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            os.close(writer)


def test_a_blocked_command_of_the_daemon_ends_after_its_time(tmp_path: Path) -> None:
    """The loop's own thread waits in a system call, and takes no cancellation."""
    os.mkfifo(tmp_path / "pipe")
    code = (
        "import sys, dep2p.cli.framework.command as command\n"
        "command.TERMINATE_S = 0.2\n"
        "async def main():\n"
        "    print('blocks', flush=True)\n"
        "    open(sys.argv[1])\n"
        "command.run_async(main)\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "pipe")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "blocks\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
