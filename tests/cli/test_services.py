"""``dep2p service``, ``request --any``, ``reply --group`` and ``realm set``: wrong words are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

WRONG_WORDS = [
    (["request", "--any"], "NAME is missing: give NAME [BODY|-]"),
    (["request", "--any", "--all", "x"], "--all and --any exclude each other"),
    (["request", "--any", "a", "b", "c"], "too many words for NAME [BODY|-]"),
    (["request", "self", "x", "--group", "g"], "add --any"),
    (["request", "self", "x", "--group", ""], "add --any"),
    (["request", "--any", "x", "--versoin", "1"], "no such option: --versoin"),
    (["reply", "x", "--echo", "--version", "1"], "give its --group, too"),
    (["reply", "x", "--echo", "--group"], "requires an argument"),
    (["service", "inof", "x"], "no such command 'inof'"),
    (["service", "info"], "missing argument 'NAME'"),
    (["service", "ping"], "missing argument 'NAME'"),
    (["service", "ls", "--relam", "x"], "no such option: --relam"),
    (["realm", "set"], "missing argument 'KEY=VALUE"),
    (["realm", "set", "status"], "is not KEY=VALUE"),
    (["realm", "members", "--wacth"], "no such option: --wacth"),
]


@pytest.mark.parametrize(("words", "says"), WRONG_WORDS)
def test_wrong_words_are_refused_by_name(cli: Callable[..., Any], fake: Any, words: list[str], says: str) -> None:
    done = cli(*words)
    assert done.code == 2 and done.out == "" and says in done.err, done.err
    assert fake.calls == []
