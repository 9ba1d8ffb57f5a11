"""Pure text forms."""

import io

import pytest

from dep2p.cli.framework.progress import Progress
from dep2p.cli.framework.render import byte_count, duration, peer_matches, short_peer, table
from dep2p.outside_text import printable

PEER = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (0.0, "0 ms"), (0.0125, "12.5 ms"), (41, "41s"), (60, "1m"), (8_040, "2h 14m"), (273_600, "3d 4h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB")])
def test_byte_count(count: int, text: str) -> None:
    assert byte_count(count) == text


@pytest.mark.parametrize("text", [PEER, "12D3KooWHdi", "Hdi", "RMuD", "12D3KooW…RMuD", "12D3KooW...RMuD", "12D3…uD"])
def test_abbreviations_that_fit(text: str) -> None:
    assert peer_matches(PEER, text)


@pytest.mark.parametrize("text", ["RMu", "diAx", "12D3KooW…xxxx", "12D3KooWX"])
def test_abbreviations_that_do_not_fit(text: str) -> None:
    assert not peer_matches(PEER, text)


def test_what_is_printed_of_a_peer_is_taken_back() -> None:
    assert peer_matches(PEER, short_peer(PEER))


def test_table_has_no_trailing_spaces() -> None:
    assert table(["A", "LONG"], [["xyz", "1"], ["", ""]], right=(1,)) == "A    LONG\nxyz     1\n"


def test_printable_keeps_lines_and_escapes_the_rest() -> None:
    assert printable("é\n\tb") == "é\n\tb"
    assert printable("\x1b[2J\r\u202e") == "\\x1b[2J\\r\\u202e"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress("photo.raw", 1000)
    progress.add(500)
    progress.add(1)  # too soon to draw again
    assert terminal.getvalue().count("\r") == 1 and "photo.raw" in terminal.getvalue()
    progress.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")
    hidden = FakeTerminal()
    monkeypatch.setattr("sys.stderr", hidden)
    Progress("photo.raw", 1000, shown=False).add(500)
    assert hidden.getvalue() == ""


def test_progress_line_and_silence_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("x" * 50, 1000)
    progress.restart(100)
    progress.add(400)
    progress.clear()
    assert capsys.readouterr().err == ""
    line = progress.line(progress.started_s + 2.0)
    assert " 50%  500 B of 1000 B  200 B/s  2s left" in line and "[############            ]" in line


def test_columns_stand_straight_below_wide_characters() -> None:
    shown = table(["NAME", "ID"], [["团队", "1"], ["e\u0301té", "2"]])
    assert shown == "NAME  ID\n团队  1\ne\u0301té   2"
