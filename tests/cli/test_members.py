"""``dep2p realm members`` and ``dep2p realm set``: what members say about themselves, harmless on a terminal."""

from collections.abc import Callable
from typing import Any

from dep2p.client import Lagged, MemberUpdate
from dep2p.types import PeerId
from tests.cli.conftest import ANN, REALM_ID

HOSTILE = "\u202egnp.exe\u200b"
Cli = Callable[..., Any]


def test_members_show_what_they_say(cli: Cli, fake: Any) -> None:
    fake.answers["fields"] = {"app": "mailer", "version": "1.4"}
    fake.answers["members"][1]["fields"] = {"status": HOSTILE}
    done = cli("realm", "members")
    assert "app=mailer version=1.4" in done.out.splitlines()[1]
    assert "status=\\u202egnp.exe\\u200b" in done.out and "\u202e" not in done.out
    shown = cli("realm", "members", "--json").json
    assert shown["fields"] == {"app": "mailer", "version": "1.4"}
    assert shown["members"][1]["fields"] == {"status": HOSTILE}


def test_fields_are_set_and_taken_back(cli: Cli, fake: Any) -> None:
    def stored(fields: dict[str, str | None], _realm: str | None) -> dict[str, str]:
        return {key: value for key, value in fields.items() if value}

    fake.answers["set_fields"] = stored
    done = cli("realm", "set", "status=at = lunch", "load=", "--realm", "team")
    assert (done.code, done.out) == (0, "status=at = lunch\n")
    assert fake.calls[-1] == ("set_fields", ({"status": "at = lunch", "load": None}, "team"))
    assert cli("realm", "set", "status=x", "--json").json == {"fields": {"status": "x"}}
    for wrong in ("status", "=x"):
        refused = cli("realm", "set", wrong)
        assert refused.code == 2 and "is not KEY=VALUE" in refused.err


def test_members_are_watched(cli: Cli, fake: Any) -> None:
    changed = MemberUpdate(
        kind="changed", peer=PeerId(ANN), realm=REALM_ID, state="up", fields={"status": HOSTILE, "load": "1"}
    )
    fake.incoming = [changed, Lagged(3), MemberUpdate(kind="left", peer=PeerId(ANN), realm=REALM_ID)]
    done = cli("realm", "members", "--watch")
    assert done.out.splitlines()[-2:] == [
        "changed  12D3KooW…RMuD  load=1 status=\\u202egnp.exe\\u200b",
        "left     12D3KooW…RMuD",
    ]
    assert "3 changes were dropped" in done.err
    names = [call[0] for call in fake.calls]
    assert names.index("watch_members") < names.index("members"), "a change in between would be lost"
    lines = cli("realm", "members", "--watch", "--json").lines
    assert [line.get("kind") for line in lines] == [None, "changed", None, "left"]
    assert lines[2] == {"lagged": 3}
    assert lines[1]["fields"] == {"status": HOSTILE, "load": "1"}
