"""The README's examples run as written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_real_daemons import Person, see_each_other

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_two_commands_are_make_targets() -> None:
    first_block = re.search(r"```\n(.*?)```", README, re.DOTALL)
    assert first_block is not None
    commands = [line.split("#")[0].split() for line in first_block[1].splitlines()]
    assert commands == [["make", "run"], ["make", "test"]]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"run", "test"} <= set(targets)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.real
def test_the_node_example_prints_its_answers() -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "Node.open" in block]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", example], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["b'hello bob'", "b'abab'"]


def commands(block: str) -> list[list[str]]:
    """The words of each line, without its comment."""
    return [shlex.split(re.split(r"\s{2,}#", line)[0]) for line in block.splitlines()]


@pytest.mark.real
@pytest.mark.timeout(300)
def test_the_commands_of_two_people_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a comment names in back-quotes is there before the command of its line."""
    anns, bobs = re.findall(r"^```\n(dep2p daemon &\n.*?)```", README, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("inbox").mkdir()
    Path("video.mkv").write_bytes(os.urandom(100_000))
    Path("work.sh").write_text("#!/bin/sh\ncat >worked.txt\n")
    Path("work.sh").chmod(0o755)
    with Person(tmp_path, "ann") as ann, Person(tmp_path, "bob") as bob:
        ann.start()
        bob.start()
        start, new, invite, reply = commands(anns)
        assert start == ["dep2p", "daemon", "&"]
        ann.run(*new[1:])
        secret = ann.run(*invite[1:]).stdout
        ann.background(*reply[1:])
        printed: dict[str, str] = {}
        for words in commands(bobs)[1:]:
            words = [ann.peer_id[-4:] if word == "f3Qa" else word for word in words]
            if words[:3] == ["tail", "-f", "prices.log"]:
                bob.background(*words[5:])
                continue
            if words[1:3] == ["realm", "join"]:
                bob.run(*words[1:], data=secret)
                see_each_other(ann, bob)
                readers = [line for line in re.findall(r"`dep2p (.*?)`", bobs) if line.startswith(("l", "su", "st"))]
                assert len(readers) == 4
                for line in readers:
                    ann.background(*shlex.split(line))
                continue
            printed[" ".join(words[1:3])] = bob.run(*words[1:]).stdout
        assert printed[f"request {ann.peer_id[-4:]}"] == "hello bob\n"
        (consume,) = re.findall(r"`dep2p (queue consume .*?)`", bobs)
        bob.run(*shlex.split(consume), "--count", "1")
        assert Path("worked.txt").read_text() == "resize a.jpg"
        assert Path("inbox/video.mkv").read_bytes() == Path("video.mkv").read_bytes()
