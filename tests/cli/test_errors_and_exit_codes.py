"""Every failure: four lines on stderr, a JSON problem with --json, the exit code of its kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dep2p.cli.framework import errors as failure
from dep2p.control_api.errors import ControlError, DaemonUnreachableError, error_from_problem
from dep2p.errors import (
    ConfigError,
    HandlerError,
    HeadersTooLargeError,
    MessageTooLargeError,
    NoHandlerError,
    NotMemberError,
    PeerNotFoundError,
    RequestTimeoutError,
)

OWN = "12D3KooWGjMCwWMRvRNTxVVjyPGHTBm7bNJYGVfBWvmm6e3BHown"
"""The node of the fake client."""
PEER = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"


def test_no_daemon_is_reported_in_four_lines_with_exit_3(cli: Callable[..., Any], home: Path) -> None:
    done = cli("status")
    assert done.code == 3 and done.out == ""
    assert done.err == (
        f"error: cannot reach the daemon at {home}/control.sock (environment DEP2P_DATA_DIR)\n"
        "  cause: no such socket; no daemon runs for that data directory\n"
        "  try:   Start it with `dep2p daemon`, or name another one with --data-dir or --socket.\n"
        "  code:  D3001 (dep2p errors show D3001)\n"
    )


def test_with_json_the_failure_is_a_problem_on_stderr(cli: Callable[..., Any]) -> None:
    for words in (("status", "--json"), ("--json", "status")):
        done = cli(*words)
        assert done.code == 3 and done.out == ""
        assert done.problem["code"] == "D3001" and done.problem["status"] == 503 and done.problem["exit_code"] == 3
        assert done.problem["type"] == "urn:dep2p:error:D3001" and done.problem["try"]


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["statsu"], "no such command 'statsu'", "dep2p status "),
        (["peer", "pong"], "no such command 'pong'", "dep2p peer ping "),
        (["listen", "x", "--jsno"], "no such option: --jsno", "dep2p listen --json "),
        (["listen"], "missing argument 'NAME'", "dep2p listen --help"),
        (["listen", "x", "--count", "many"], "invalid value for '--count' / '-n'", "dep2p listen --help"),
        (["request", "self"], "NAME is missing: give PEER NAME [BODY|-]", "with --all"),
        (["request", "self", "greet", "two", "words"], "too many words for PEER NAME [BODY|-]", "quote"),
        (["request", "self", ""], "'' is no name", "--help"),
        (["reply", "x"], "exactly one of --command, --file, --script and --echo", "--help"),
        (["help", "realm", "jion"], "there is no command 'dep2p realm jion'", "dep2p help realm join"),
        (["daemon", "--set", "nonsense"], "--set 'nonsense' is not SECTION.KEY=VALUE", "dep2p config example"),
    ],
)
def test_wrong_use_is_exit_2_and_names_the_nearest(
    cli: Callable[..., Any], words: list[str], says: str, hint: str
) -> None:
    done = cli(*words)
    assert done.code == 2 and done.out == ""
    error, *rest = done.err.splitlines()
    assert error.startswith("error: ") and says in error
    assert any(line.startswith("  try:   ") and hint in line for line in rest)
    assert rest[-1] == "  code:  D1001 (dep2p errors show D1001)"


def test_a_usage_error_is_json_too(cli: Callable[..., Any]) -> None:
    done = cli("statsu", "--json")
    assert done.code == 2 and done.problem["code"] == "D1001" and "statsu" in done.problem["detail"]


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (RequestTimeoutError("late"), "D5001", 5),
        (HandlerError("broken"), "D5002", 1),
        (NoHandlerError("none"), "D5003", 4),
        (NotMemberError("no"), "D4002", 6),
        (PeerNotFoundError("gone"), "D4001", 4),
        (MessageTooLargeError("big"), "D5004", 6),
        (HeadersTooLargeError("many"), "D5016", 6),
        (ConfigError("wrong", "D1002"), "D1002", 2),
        (DaemonUnreachableError("no one"), "D3001", 3),
        (ControlError({"code": "D5012", "status": 409, "detail": "taken"}), "D5012", 6),
        (ControlError({"code": "D7777", "status": 500, "detail": "from a later version"}), "D7777", 1),
        (FileNotFoundError(2, "No such file or directory", "x"), "D6006", 4),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [RequestTimeoutError("late")])]), "D5001", 5),
        (KeyError("bug"), "D9001", 1),
    ],
)
def test_each_error_has_its_code_and_exit_code(error: Exception, code: str, exit_code: int) -> None:
    shown = failure.describe(error)
    assert (shown.code, shown.exit_code) == (code, exit_code)
    assert shown.text().splitlines()[-1] == f"  code:  {code} (dep2p errors show {code})"


def test_what_the_client_raises_becomes_the_exit_code(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["request"] = RequestTimeoutError("no answer in 0.5 s")
    done = cli("request", PEER, "greet", "x", "--timeout", "0.5")
    assert done.code == 5 and "error: no answer in 0.5 s" in done.err


def test_texts_of_the_peer_in_an_error_cannot_steer_the_terminal(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["request"] = HandlerError("\x1b[2Jgone")
    done = cli("request", PEER, "greet")
    assert done.code == 1 and "error: \\x1b[2Jgone\n" in done.err


def test_self_means_the_node_itself_where_that_makes_sense(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["request"] = b"hello"
    for text in ("self", OWN, OWN[-10:]):
        assert cli("request", text, "greet").code == 0
    assert [call[0] for verb, call in fake.calls if verb == "request"] == [OWN, OWN, OWN]
    done = cli("peer", "connect", "self")
    assert done.code == 2 and "is this node itself" in done.err


def test_unknown_and_ambiguous_peers_are_distinguished(cli: Callable[..., Any], fake: Any) -> None:
    done = cli("request", "zzz", "greet")
    assert done.code == 4 and "no known peer fits 'zzz'" in done.err
    done = cli("request", "12D3KooW", "greet")
    assert done.code == 2 and "fits 3 peers" in done.err and PEER in done.err
    assert "request" not in [verb for verb, _ in fake.calls]


def test_a_bug_is_reported_without_a_traceback_unless_asked(
    cli: Callable[..., Any], fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers["status"] = ZeroDivisionError("oops")
    done = cli("status")
    assert done.code == 1 and "internal error: ZeroDivisionError: oops" in done.err and "Traceback" not in done.err
    monkeypatch.setenv("DEP2P_TRACEBACK", "1")
    assert "Traceback" in cli("status").err


def test_ctrl_c_is_exit_130_without_a_traceback(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["status"] = KeyboardInterrupt()
    done = cli("status")
    assert done.code == 130 and "Traceback" not in done.err


def test_errors_show_and_ls(cli: Callable[..., Any]) -> None:
    done = cli("errors", "show", "d3001")
    assert done.code == 0 and done.out.startswith("D3001  cannot reach the daemon\n") and "Exit code 3" in done.out
    assert cli("errors", "show", "D3001", "--json").json["exit_code"] == 3
    done = cli("errors", "show", "D0000")
    assert done.code == 4 and "no error code 'D0000'" in done.err
    assert cli("errors", "ls").out.splitlines()[0].split() == ["CODE", "EXIT", "TITLE"]
    assert len(cli("errors", "ls", "--json").json["errors"]) > 20


def test_every_code_that_the_command_line_gives_is_in_the_table() -> None:
    import re

    from dep2p.error_codes import ERRORS

    source = "".join(path.read_text() for path in Path(failure.__file__).parents[1].rglob("*.py"))
    assert set(re.findall(r'"(D\d{4})"', source)) <= set(ERRORS)


def test_the_nearest_option_is_named_only_when_it_is_near(cli: Callable[..., Any]) -> None:
    assert "did you mean" in cli("request", "p", "x", "--timout", "1").err
    assert "did you mean" not in cli("listen", "x", "--timeout", "1").err


@pytest.mark.parametrize("error", [MessageTooLargeError("big"), HeadersTooLargeError("many")])
def test_a_setting_is_named_only_where_it_helps(error: MessageTooLargeError) -> None:
    """Headers, key and tags have bounds of their own: raising the one of bodies changes nothing for them."""
    advice = " ".join(failure.describe(error).tries)
    assert ("message_bytes_max" in advice) is not isinstance(error, HeadersTooLargeError)
    back = error_from_problem({"code": failure.describe(error).code, "detail": "x"})
    assert type(back) is type(error)
