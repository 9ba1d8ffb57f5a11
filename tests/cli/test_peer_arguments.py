"""Every command that takes a peer resolves it: a whole id, the end of one, or ``self``."""

from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest.mock import MagicMock

import pytest
import typer

from dep2p.cli.main import app
from tests.cli.conftest import FakeClient

EXTRA: Final = {
    "publish --critical": ["--reliable", "x"],
    "queue put --peer": ["hello"],
    "queue dlq replay --peer": ["1"],
    "queue dlq rm --peer": ["1"],
    "queue pause --peer": ["--all-channels"],
    "queue resume --peer": ["--all-channels"],
    "queue create --node": ["--realm", "team"],
    "queue expand --node": ["--realm", "team"],
    "queue empty --peer": ["--all-channels", "--yes"],
    "queue rm --peer": ["--yes"],
    "queue rm-channel --peer": ["--yes"],
}


def taking_a_peer(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """(command and parameter, words that give it an unknown peer) of each place for a peer."""
    for name, command in getattr(group, "commands", {}).items():
        yield from taking_a_peer(command, (*path, name))
    arguments = [each for each in group.params if each.param_type_name == "argument"]
    for each in group.params:
        if not str(each.metavar or "").startswith(("PEER", "[PEER", "WHO")):
            continue
        words = [*path]
        if each.param_type_name == "option":
            words += [each.opts[0], "nosuchpeer"]
        for argument in arguments:
            if argument is each:
                words += ["nosuchpeer", "x"] if argument.nargs == -1 else ["nosuchpeer"]
            elif argument.required:
                words.append("7")
        key = f"{' '.join(path)} {each.opts[0] if each.param_type_name == 'option' else 'PEER'}"
        yield key, words + EXTRA.get(key, [])


PLACES: Final = dict(taking_a_peer(typer.main.get_command(app)))


def test_the_places_for_a_peer_are_found() -> None:
    assert len(PLACES) > 30 and EXTRA.keys() <= PLACES.keys()


@pytest.mark.parametrize("place", PLACES)
def test_a_peer_that_no_known_one_fits_is_refused_by_that_name(
    cli: Callable[..., Any], fake: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("queues", "outbox"):  # no command gets so far as to call them
        monkeypatch.setattr(FakeClient, part, MagicMock(), raising=False)
    done = cli(*PLACES[place])
    assert done.code == 4 and "no known peer fits 'nosuchpeer'" in done.err, (PLACES[place], done.err)
