"""A coverage-guided fuzzer: inputs that reach new lines of the code under test are kept, and changed further.

Its corpus and its findings are files of base64 lines, a file for each target, so that git keeps them. With atheris
installed (`pip install atheris`), `tests/fuzz/with_atheris.py` runs the same targets under libFuzzer.
"""

import base64
import dis
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CORPUS_ITEMS_MAX = 64
"""Inputs kept for one target: the corpus is replayed in each run of the tests."""
INPUT_BYTES_MAX = 4_096
CORPUS = Path(__file__).parent / "corpus"
FINDINGS = Path(__file__).parent / "findings"
_INTERESTING = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x9b" + b"\xff" * 8)

Line = tuple[CodeType, int]


@dataclass(frozen=True)
class Target:
    """One reader of foreign bytes. ``run`` raises only for a fault: it takes the errors that the reader promises.

    ``modules`` are the files whose lines count as coverage.
    """

    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    modules: Sequence[str]


class FuzzFindingError(AssertionError):
    """An input that the target does not stand. ``data`` is kept in the findings."""

    def __init__(self, name: str, data: bytes, cause: BaseException) -> None:
        super().__init__(f"{name}: {type(cause).__name__}: {cause}\n  input: {base64.b64encode(data).decode()}")
        self.data = data


@dataclass
class Report:
    """A run of one target."""

    name: str
    executions: int = 0
    seconds: float = 0.0
    lines: int = 0
    lines_all: int = 0
    corpus: list[bytes] = field(default_factory=list[bytes])

    def __str__(self) -> str:
        share = 100 * self.lines / max(1, self.lines_all)
        return (
            f"{self.name:18} {self.executions:9,} executions in {self.seconds:7.1f} s, "
            f"{self.lines:4} of {self.lines_all:4} lines ({share:3.0f} %), {len(self.corpus):2} inputs kept"
        )


class LineCoverage:
    """The lines of some files that run while the block does."""

    def __init__(self, modules: Sequence[str]) -> None:
        root = Path(__file__).parents[2]
        self._files = {str((root / module).resolve()) for module in modules}
        self._wanted: dict[CodeType, bool] = {}
        self.lines: set[Line] = set()

    @property
    def lines_all(self) -> int:
        """The lines of all functions of the files."""
        found: set[tuple[str, int]] = set()
        for file in self._files:
            waiting = [compile(Path(file).read_text(), file, "exec")]
            while waiting:
                code = waiting.pop()
                waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
                if code.co_flags & 0x02:  # optimized: a function, not a module or a class
                    found |= {(file, line) for _, line in dis.findlinestarts(code) if line}
        return len(found)

    @property
    def lines_seen(self) -> int:
        """The lines of functions that have run."""
        return len({(code.co_filename, line) for code, line in self.lines})

    def __enter__(self) -> "LineCoverage":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        wanted = self._wanted.get(code)
        if wanted is None:
            wanted = self._wanted[code] = str(Path(code.co_filename).resolve()) in self._files
        return self._line if wanted else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code, frame.f_lineno))
        return self._line


def load(folder: Path, name: str) -> list[bytes]:
    """The kept inputs of a target."""
    path = folder / f"{name}.txt"
    if not path.exists():
        return []
    lines = [line.partition("#")[0].strip() for line in path.read_text("ascii").splitlines()]
    return [base64.b64decode(line) for line in lines if line]


def save(folder: Path, name: str, inputs: Sequence[bytes]) -> None:
    """Keep these inputs of a target."""
    folder.mkdir(exist_ok=True)
    text = "".join(base64.b64encode(data).decode("ascii") + "\n" for data in inputs)
    (folder / f"{name}.txt").write_text(text, "ascii")


def replay(name: str, target: Target, inputs: Sequence[bytes]) -> None:
    """Run the target with each input. Raises FuzzFindingError."""
    for data in inputs:
        try:
            target.run(data)
        except Exception as error:
            raise FuzzFindingError(name, data, error) from error


def fuzz(name: str, target: Target, seconds: float, rng: random.Random) -> Report:
    """Run the target for so long. Raises FuzzFindingError at the first input that it does not stand."""
    report, coverage = Report(name), LineCoverage(target.modules)
    began_s = time.monotonic()
    kept: list[bytes] = []
    waiting = iter([*load(CORPUS, name), *target.seeds])
    while time.monotonic() < began_s + seconds or (not kept and report.executions < 1_000):
        data = next(waiting, None)
        if data is None:
            data = mutated(rng, kept or [b""])
        before = len(coverage.lines)
        try:
            with coverage:
                target.run(data)
        except Exception as error:
            raise FuzzFindingError(name, data, error) from error
        report.executions += 1
        if len(coverage.lines) > before:
            kept.append(data)
    report.seconds = time.monotonic() - began_s
    report.corpus = kept[-CORPUS_ITEMS_MAX:]
    report.lines, report.lines_all = coverage.lines_seen, coverage.lines_all
    return report


def mutated(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One of the inputs with some bytes changed, cut, repeated or taken from another one."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 64)))
        match rng.randrange(8):
            case 0:
                data[at:end] = rng.randbytes(end - at)
            case 1:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
            case 2:
                del data[at:end]
            case 3:
                data[at:end] = rng.choice(_INTERESTING)
            case 4:
                data[at:at] = bytes(data[at:end]) * rng.choice((1, 2, 40))
            case 5:
                other = rng.choice(corpus)
                begin = rng.randrange(len(other) + 1)
                data[at:end] = other[begin : begin + rng.choice((1, 4, 32, 4_096))]
            case 6:
                if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
            case _:
                if at < len(data):
                    data[at] = (data[at] + rng.choice((1, -1, 16, -16))) % 256
    return bytes(data[:INPUT_BYTES_MAX])


def split(data: bytes) -> Iterator[bytes]:
    """The input in pieces, whose sizes follow from it: readers must not care."""
    step = 1 + sum(data[:4]) % 37
    for at in range(0, len(data), step):
        yield data[at : at + step]
