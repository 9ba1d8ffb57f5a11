"""``dep2p completion``: the script that makes the shell complete commands and options."""

import os
from importlib import import_module
from typing import Annotated, Any

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError

_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
VARIABLE = "_DEP2P_COMPLETE"

ShellArgument = Annotated[
    str | None, typer.Argument(help=f"{', '.join(_SHELLS)}; by default the shell in use.", metavar="[SHELL]")
]


def _shell(given: str | None) -> str:
    shell = given or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in _SHELLS:
        found = f"{shell!r} is not one of" if shell else "no shell was found; name one of"
        raise CliError(f"{found} {', '.join(_SHELLS)}", "D1001", tries=("dep2p completion show bash",))
    return shell


def _typer_completion() -> Any:
    # By name, since Typer does not export these two for type checkers.
    return import_module("typer.completion")


def prepare() -> None:
    """Make Typer know its shells; needed when the shell asks for completions."""
    _typer_completion().completion_init()


def show_completion(run: Invocation, shell: ShellArgument = None) -> None:
    """Print the completion script, to be put where the shell finds it."""
    name = _shell(shell)
    script = str(_typer_completion().get_completion_script(prog_name="dep2p", complete_var=VARIABLE, shell=name))
    if run.json:
        run.emit({"shell": name, "script": script})
    else:
        run.print(script)


def install_completion(run: Invocation, shell: ShellArgument = None) -> None:
    """Install the completion script for the current user."""
    name, path = _typer_completion().install(shell=_shell(shell), prog_name="dep2p", complete_var=VARIABLE)
    if run.json:
        run.emit({"shell": name, "path": str(path)})
    else:
        run.say(f"installed for {name} in {path}; it takes effect in a new terminal")


def register(app: typer.Typer) -> None:
    """Add the group ``completion``."""
    sub = group(app, "completion", "Complete commands and options in the shell.")
    command(sub, "show", examples=[("dep2p completion show bash", "prints the script")])(show_completion)
    command(sub, "install", examples=[("dep2p completion install", "for the shell in use")])(install_completion)
