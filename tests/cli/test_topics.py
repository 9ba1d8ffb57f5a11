"""``dep2p publish``, ``subscribe`` and ``topic``: what they ask the daemon for and what they print."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dep2p.cli.commands.publish import fill
from dep2p.cli.commands.subscribe import write_new
from dep2p.client import Lagged, MatchedTopicsFull, PublishedMany, PublishResult, TopicMessage
from dep2p.errors import NoPeersSubscribedError
from dep2p.gossipsub.headers import message_headers
from dep2p.types import PeerId

ANN = PeerId("12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD")
BOB = PeerId("12D3KooWLbtq3zyR1sr5LJrvc5rVBsqXLSRPVG3tMQ8g4PPcNaM8")
DEFAULTS = {"realm": None, "public": False, "on_no_peers": "error", "headers": None}

Cli = Callable[..., Any]


def _published(_topic: str, messages: list[bytes], _options: object) -> PublishedMany:
    return PublishedMany(len(messages), sum(map(len, messages)), 0, 0, 2)


@pytest.fixture(autouse=True)
def answers(fake: Any) -> None:
    fake.answers |= {
        "publish": PublishResult(b"\n\x0b", (ANN, BOB), False, ()),
        "publish_from": _published,
    }


def sent(fake: Any) -> list[bytes]:
    ((_, (_, messages, _)),) = [call for call in fake.calls if call[0] == "publish_from"]
    return list(messages)


def test_one_message(cli: Cli, fake: Any, tmp_path: Path) -> None:
    done = cli("publish", "chat", "hello")
    assert (done.code, done.out, done.err) == (0, "", "published 5 B to 2 neighbours\n")
    assert cli("publish", "chat", "-", stdin=b"a\nb\n").code == 0
    (tmp_path / "x").write_bytes(b"\xff")
    assert cli("publish", "chat", "-f", str(tmp_path / "x"), "--realm", "team", "--on-no-peers", "queue").code == 0
    assert [call[1] for call in fake.calls] == [
        ("chat", b"hello", DEFAULTS),
        ("chat", b"a\nb\n", DEFAULTS),
        ("chat", b"\xff", DEFAULTS | {"realm": "team", "on_no_peers": "queue"}),
    ]
    assert cli("publish", "chat", "hello", "--json").json == {
        "topic": "chat",
        "id": "0a0b",
        "sent_to": [ANN, BOB],
        "queued": False,
        "dropped": [],
        "local_subscriptions": 0,
    }


def test_what_happened_to_it_is_reported(cli: Cli, fake: Any) -> None:
    fake.answers["publish"] = PublishResult(b"\n\x0b", (), True, ())
    assert cli("publish", "chat", "hi", "--on-no-peers", "queue").err == (
        "queued 2 B: no peer is subscribed to chat yet\n"
    )
    fake.answers["publish"] = PublishResult(b"\n\x0b", (), False, (ANN,))
    lost = cli("publish", "chat", "hi")
    assert lost.code == 1 and "dropped 1 times" in lost.err
    fake.answers["publish"] = NoPeersSubscribedError("no peer is subscribed to 'chat'")
    alone = cli("publish", "chat", "hi")
    assert alone.code == 4 and "code:  D5013" in alone.err and "--on-no-peers" in alone.err


def test_each_line_is_a_message(cli: Cli, fake: Any) -> None:
    done = cli("publish", "chat", "--lines", stdin=b"one\n\ntwo \xff\r\nthree")
    assert done.code == 0 and sent(fake) == [b"one", b"", b"two \xff\r", b"three"]
    assert re.fullmatch(r"published 4 messages \(14 B\) in .*, each to 2 neighbours at least\n", done.err)
    fake.calls.clear()
    assert cli("publish", "chat", "--lines", "-", "--json", stdin=b"").json["messages"] == 0


def test_files_are_one_message_each(cli: Cli, fake: Any, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(path.name.encode() * 3 + b"\n")
    assert cli("publish", "chat", "--file", str(paths[0]), "--file", str(paths[1])).code == 0
    assert sent(fake) == [b"aaa\n", b"bbb\n"]
    missing = cli("publish", "chat", "--file", str(paths[0]), "--file", str(tmp_path / "none"))
    assert "cannot read" in missing.err and missing.code in (1, 4)


def test_a_pipe_without_lines_is_not_an_empty_message(cli: Cli, fake: Any) -> None:
    done = cli("publish", "chat", stdin=b"one\ntwo\n")
    assert done.code == 2 and "nothing to publish" in done.err and "--lines" in done.err
    assert cli("publish", "chat", "").code == 0


def test_a_template_is_filled_for_each_message(cli: Cli, fake: Any) -> None:
    assert cli("publish", "chat", "{{n}} {{random}} {{time}} {{other}}", "--count", "3", "-i", "0.01").code == 0
    messages = [message.decode() for message in sent(fake)]
    pattern = r"[123] [0-9a-f]{16} \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \{\{other\}\}"
    assert all(re.fullmatch(pattern, message) for message in messages), messages
    assert [message[0] for message in messages] == ["1", "2", "3"]
    assert len({message.split()[1] for message in messages}) == 3
    assert fill("{{random}}{{random}}", 1)[:16] != fill("{{random}}{{random}}", 1)[16:]


def test_without_count_braces_are_sent_as_they_are(cli: Cli, fake: Any) -> None:
    cli("publish", "chat", "{{n}}")
    assert fake.calls[0][1][1] == b"{{n}}"


@pytest.mark.parametrize(
    "words",
    [
        ("chat", "hi", "--lines"),
        ("chat", "hi", "--file", "x"),
        ("chat", "--lines", "--file", "x"),
        ("chat", "--count", "3"),
        ("chat", "-", "--count", "3"),
        ("chat", "hi", "--count", "0"),
        ("chat", "hi", "--on-no-peers", "wait"),
    ],
)
def test_contradictions_are_wrong_use(cli: Cli, fake: Any, words: tuple[str, ...]) -> None:
    done = cli("publish", *words)
    assert done.code == 2 and "D1001" in done.err and fake.calls == []


@pytest.fixture
def messages(fake: Any) -> None:
    fake.incoming = [
        TopicMessage("chat", b"lunch is ready", ANN, 7, b"\n" * 20, BOB),
        Lagged(17),
        TopicMessage("chat", b"\xff\x00", None, None, b"\x0b", BOB),
    ]


@pytest.mark.usefixtures("messages")
def test_messages_are_printed_each_on_a_line(cli: Cli, fake: Any) -> None:
    done = cli("subscribe", "chat", "--buffer", "9", "--on-full", "pause")
    assert done.out_bytes == b"lunch is ready\n\xff\x00"
    assert "[#1] chat from 12D3KooW…RMuD  14 B" in done.err and "[#2] chat  2 B" in done.err
    assert "lagged: 17 messages" in done.err
    options = {"on_full": "pause", "group": None, "realm": None, "public": False, "buffer_items": 9}
    assert fake.calls == [("subscribe", ("chat", options))]
    assert cli("subscribe", "chat", "--raw", "-q").out_bytes == b"lunch is ready\xff\x00"
    assert cli("subscribe", "chat", "-0").out_bytes == b"lunch is ready\0\xff\x00\0"
    assert cli("subscribe", "chat", "-n", "1").out == "lunch is ready\n"


def test_headers_are_published_and_shown_escaped(cli: Cli, fake: Any) -> None:
    assert cli("publish", "chat", "hello", "--header", "trace=42", "-H", "kind=a=b").code == 0
    assert fake.calls[-1][1][2]["headers"] == {"trace": "42", "kind": "a=b"}
    assert cli("publish", "chat", "hello", "--header", "trace").code == 2
    hostile = message_headers({"k\x1b[2J": "v\n", "raw": b"\xff"})
    fake.incoming = [TopicMessage("chat", b"hi", None, 1, b"\n", None, hostile, 1_700_000_000.25)]
    shown = cli("subscribe", "chat").err
    assert "\x1b" not in shown and "k\\x1b[2J=v\\n raw=1 B" in shown
    line = cli("subscribe", "chat", "--json").lines[0]
    assert line["headers"]["raw"]["data"] == "/w==" and line["received_at_s"] == 1_700_000_000.25


def test_topics_that_a_pattern_cannot_join_are_said(cli: Cli, fake: Any) -> None:
    fake.incoming = [MatchedTopicsFull(0, 7, 128)]
    assert "7 more topics match and are not joined: the node is in at most 128" in cli("subscribe", "a.>").err
    assert cli("subscribe", "a.>", "--json").lines == [{"topics_not_joined": 7, "topics_max": 128}]


@pytest.mark.usefixtures("messages")
def test_messages_as_json(cli: Cli) -> None:
    first, lagged, last = cli("subscribe", "chat", "--json").lines
    assert first == {
        "topic": "chat",
        "sender": ANN,
        "seqno": 7,
        "id": "0a" * 20,
        "received_from": BOB,
        "received_at_s": 0.0,
        "data": "bHVuY2ggaXMgcmVhZHk=",
        "encoding": "base64",
        "text": "lunch is ready",
    }
    assert lagged == {"lagged": 17}
    assert last["sender"] is None and "text" not in last


@pytest.mark.usefixtures("messages")
def test_each_message_becomes_a_new_file(cli: Cli, tmp_path: Path) -> None:
    inbox = tmp_path / "in" / "box"
    names = cli("subscribe", "chat", "--dump", str(inbox)).out.splitlines()
    assert names == [str(inbox / f"000001-{'0a' * 16}.msg"), str(inbox / "000002-0b.msg")]
    assert [Path(name).read_bytes() for name in names] == [b"lunch is ready", b"\xff\x00"]
    again = cli("subscribe", "chat", "--dump", str(inbox), "--json", "-n", "1").lines[0]
    assert again["file"] == str(inbox / f"000001-{'0a' * 16}-1.msg") and again["bytes"] == 14 and "data" not in again
    assert len(list(inbox.iterdir())) == 3, "no partial files are left"


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "1.msg").symlink_to(tmp_path / "elsewhere")
    assert write_new(tmp_path, "1", b"x").name == "1-1.msg"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("words", [("--raw", "-0"), ("--raw", "--dump", "x"), ("--on-full", "explode"), ("-n", "0")])
def test_contradictions_of_subscribe_are_wrong_use(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli("subscribe", "chat", *words)
    assert done.code == 2 and "D1001" in done.err


def test_topics(cli: Cli, fake: Any) -> None:
    row = {"topic": "chat", "realm": "team", "realm_id": "3f", "peers": 2, "mesh": 1}
    row |= {"subscriptions": 1, "buffered_items": 0, "by_pattern": False}
    fake.answers["topics"] = [row, row | {"topic": "no\x1bews", "realm": None, "realm_id": None}]
    assert cli("topic", "ls").out == (
        "TOPIC      REALM     PEERS  MESH  READERS  WAITING\n"
        "chat       team          2     1        1        0\n"
        "no\\x1bews  (public)      2     1        1        0\n"
    )
    assert cli("topic", "ls", "--json").json["topics"][0] == row
    fake.answers["topics"] = []
    assert "in no topic" in cli("topic", "ls").err


def test_who_is_in_a_topic(cli: Cli, fake: Any) -> None:
    found = {"topic": "chat", "realm_id": "3f", "joined": True, "peers": [ANN, BOB], "mesh": [BOB]}
    fake.answers["topic_peers"] = found | {"scores": {ANN: -1.5, BOB: 3.25}}
    assert cli("topic", "peers", "chat").out == f"{ANN}\n{BOB}\n"
    assert cli("topic", "mesh", "chat", "--realm", "team").out == f"{BOB}\n"
    assert fake.calls[-1] == ("topic_peers", ("chat", {"realm": "team", "public": False}))
    assert [line.split() for line in cli("topic", "scores", "chat").out.splitlines()] == [
        ["PEER", "SCORE", "MESH"],
        [BOB, "3.250", "yes"],
        [ANN, "-1.500", "no"],
    ]
    assert cli("topic", "scores", "chat", "--json").json["scores"] == {BOB: 3.25, ANN: -1.5}
    fake.answers["topic_peers"] |= {"peers": [], "mesh": [], "scores": {}}
    for word in ("peers", "mesh", "scores"):
        empty = cli("topic", word, "chat")
        assert (empty.code, empty.out) == (0, "") and empty.err.startswith("no ")
