"""`make demo`: three daemons in one realm that talk; shows each command and what it printed; ends by itself.

Everything lives in a temporary directory and on loopback; exit status 1 when any step did not do what it should.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

DEP2P = [sys.executable, "-m", "dep2p.cli.main"]
STEP_TIMEOUT_S = 60.0


class Person:
    """One daemon in a directory of its own, and the command line that talks to it."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.directory = root / name
        self.directory.mkdir(mode=0o700)
        self._environment = {**os.environ, "DEP2P_DATA_DIR": str(self.directory), "NO_COLOR": "1"}
        self._log = (self.directory / "daemon.log").open("wb")
        self._children: list[subprocess.Popen[str]] = []
        self.daemon = subprocess.Popen(
            [*DEP2P, "daemon", "--listen", "/ip4/127.0.0.1/tcp/0"],
            env=self._environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.terminate()
            child.wait(STEP_TIMEOUT_S)
        self.daemon.terminate()
        self.daemon.wait(STEP_TIMEOUT_S)
        self._log.close()
        if error is not None:
            print(f"--- {self.name}'s daemon log ---\n{(self.directory / 'daemon.log').read_text()}", file=sys.stderr)

    def wait_until_ready(self) -> None:
        """Until the daemon answers, or fail with its log."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while True:
            done = subprocess.run([*DEP2P, "status", "--json"], env=self._environment, capture_output=True, text=True)
            if done.returncode == 0:
                self.peer_id = str(json.loads(done.stdout)["peer_id"])
                return
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name}'s daemon did not start: {done.stderr}")

    def run(self, *words: str, data: str | None = None) -> str:
        """Run one command, show it and its output; its standard output is the result."""
        print(f"\n{self.name}$ dep2p {shlex.join(words)}")
        done = subprocess.run(
            [*DEP2P, *words], env=self._environment, capture_output=True, text=True, input=data, timeout=STEP_TIMEOUT_S
        )
        sys.stdout.write(done.stdout + done.stderr)
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: dep2p {shlex.join(words)} ended with {done.returncode}")
        return done.stdout

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start a command that waits for others and ends by itself."""
        print(f"\n{self.name}$ dep2p {shlex.join(words)} &")
        child = subprocess.Popen(
            [*DEP2P, *words], env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stderr is not None
        child.stderr.readline()  # "waiting for …": from here on it is registered
        self._children.append(child)
        return child


def finish(person: Person, child: "subprocess.Popen[str]") -> str:
    """The output of a command started before."""
    out, err = child.communicate(timeout=STEP_TIMEOUT_S)
    print(f"\n{person.name}: the waiting command printed\n{out}{err}", end="")
    if child.returncode != 0:
        raise SystemExit(f"{person.name}: a waiting command ended with {child.returncode}")
    return out


def expect(wanted: str, found: str) -> None:
    """End with a clear word when a step printed something else."""
    if wanted not in found:
        raise SystemExit(f"the demo expected {wanted!r} in {found!r}")


def main() -> None:
    """The story."""
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="dep2p-demo-") as root,
        Person("ann", Path(root)) as ann,
        Person("bob", Path(root)) as bob,
        Person("cat", Path(root)) as cat,
    ):
        for person in (ann, bob, cat):
            person.wait_until_ready()
        print("Three daemons run. ann makes a realm and invites the others.")
        ann.run("realm", "new", "team")
        invite = ann.run("realm", "invite", "team").strip().splitlines()[-1]
        bob.run("realm", "join", invite)
        cat.run("realm", "join", invite)

        answers = bob.start("reply", "greet", "--command", "printf 'hello %s' \"$(cat)\"", "--count", "2")
        expect("hello ann", ann.run("request", bob.peer_id, "greet", "ann"))
        # cat never dialled bob: the member records that travel in the realm said where bob is.
        expect("hello cat", cat.run("request", bob.peer_id, "greet", "cat"))
        finish(bob, answers)

        listening = cat.start("listen", "news", "--count", "1", "--raw")
        bob.run("notify", cat.peer_id, "news", "lunch is ready")
        expect("lunch is ready", finish(cat, listening))

        subscribed = cat.start("subscribe", "chat", "--count", "1", "--raw")
        # Queued: should the subscription still be on its way to bob, the message waits for it.
        bob.run("publish", "chat", "hello everyone", "--on-no-peers", "queue")
        expect("hello everyone", finish(cat, subscribed))

        source = Path(root) / "photo.bin"
        source.write_bytes(os.urandom(4_000_000))
        inbox = Path(root) / "inbox"
        receiving = ann.start("stream", "receive", str(inbox), "--count", "1")
        bob.run("stream", "send", ann.peer_id, str(source))
        finish(ann, receiving)
        if (inbox / source.name).read_bytes() != source.read_bytes():
            raise SystemExit("the file arrived changed")

        ann.run("realm", "members")
        ann.run("status")
    print(f"\nThe demo is over: everything worked, in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
