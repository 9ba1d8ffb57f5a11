"""``dep2p doctor``: checks of this installation, and what to do about each problem."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import typer

from dep2p.cli.commands.doctor.checks import LOCAL_CHECKS, Check, CheckResult, daemon_checks
from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import describe
from dep2p.error_codes import EXIT_FAILED, EXIT_OK

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(run: Invocation) -> int:
    """Check the installation, the data directory and the daemon. Exit status 1 when something fails."""
    findings = [finding for check in LOCAL_CHECKS for finding in _carefully(check, run)]
    findings += _carefully(daemon_checks, run)
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    if run.json:
        run.emit({"ok": not failed, "failed": failed, "warned": warned, "checks": [f.json() for f in findings]})
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            run.print(
                f"{run.paint(f'{finding.state:4}', _STYLES[finding.state])}  {finding.check:{width}}  {finding.text}"
            )
            if finding.todo:
                run.print(f"      {'':{width}}  → {finding.todo}")
        run.say(_summary(failed, warned, len(findings)))
    return EXIT_FAILED if failed else EXIT_OK


def _carefully(check: Callable[[Invocation], Sequence[CheckResult]], run: Invocation) -> Sequence[CheckResult]:
    try:
        return check(run)
    except typer.Exit:  # SIGTERM
        raise
    except Exception as error:  # a check that breaks is a finding, and the other checks still run
        failure = describe(error)
        name = getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")
        return [CheckResult("fail", name, failure.message, " or ".join(failure.tries))]


def _summary(failed: int, warned: int, total: int) -> str:
    if not failed and not warned:
        return f"all {total} checks passed"
    parts: list[Any] = [f"{failed} failed"] if failed else []
    parts += [f"{warned} with a warning"] if warned else []
    return f"{total} checks, " + ", ".join(parts)


__all__ = ["Check", "CheckResult", "doctor", "register"]


def register(app: typer.Typer) -> None:
    """Add ``doctor``."""
    command(
        app,
        "doctor",
        examples=[("dep2p doctor", "a line per check, with what to do"), ("dep2p doctor --json", "for monitoring")],
    )(doctor)
