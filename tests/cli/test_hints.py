"""Hints for unknown options: none makes a command do more than was typed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from dep2p.cli.framework.usage import nearest_option, widens
from dep2p.cli.main import root_command


def commands(command: Any, path: str = "dep2p") -> Iterator[tuple[str, list[Any]]]:
    """Path and parameters of each command."""
    context = typer.Context(command, info_name=path)
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")
    else:
        yield path, command.get_params(context)


ALL = dict(commands(root_command()))


def likely_mistakes(parameters: list[Any]) -> Iterator[str]:
    """Names that a user may type: of arguments, in the plural, a letter missing, a word too many or too few."""
    for parameter in parameters:
        for name in {parameter.name, *(option.removeprefix("--") for option in parameter.opts)}:
            for near in (name, name + "s", name[:-1], name.rpartition("-")[2], f"the-{name}"):
                for at in range(len(near)):
                    yield "--" + near[:at] + near[at + 1 :]
                yield "--" + near


@pytest.mark.parametrize("path", list(ALL))
def test_no_hint_widens_a_command(path: str) -> None:
    parameters = ALL[path]
    known = {option for each in parameters for option in each.opts}
    for wrong in likely_mistakes(parameters):
        found = nearest_option(wrong, parameters)
        if wrong in known or found is None or not widens(found):
            continue
        same_word = wrong.removeprefix("--").split("-")[0] == found.removeprefix("--").split("-")[0]
        assert same_word or abs(len(wrong) - len(found)) <= 2, f"{path} {wrong}: a hint to {found}"


@pytest.mark.parametrize("verb", ["empty", "pause", "resume"])
def test_a_misspelt_channel_is_an_argument_and_not_all_channels(cli: Callable[..., Any], verb: str) -> None:
    for wrong in ("--chanel", "--channel", "--channels"):
        done = cli("queue", verb, "jobs", wrong, "b")
        assert done.code == 2 and "--all-channels" not in done.err, done.err
        assert f"dep2p queue {verb} … [CHANNEL] …" in done.err


def test_a_misspelling_of_the_option_itself_is_still_named(cli: Callable[..., Any]) -> None:
    done = cli("queue", "empty", "jobs", "--all-chanels")
    assert done.code == 2 and "dep2p queue empty --all-channels" in done.err
