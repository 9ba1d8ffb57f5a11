"""The programs of docs/reference/python/examples/ run, print what their comments say, and call what they show."""

import contextlib
import functools
import inspect
import io
import runpy
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest
import trio
import trio.testing

from dep2p import api_reference
from tests.docs.programs import daemon_in_a_realm, wanted_lines

FOLDER = Path(__file__).resolve().parents[2] / "docs/reference/python/examples"
EXAMPLES = {example.path: example for example in api_reference.read_examples(FOLDER)}
WITH_SOCKETS = ["testing_proxy.py"]
IN_MEMORY = [path for path in EXAMPLES if path.startswith(("node_", "testing_")) and path not in WITH_SOCKETS]
OF_DAEMON = [path for path in EXAMPLES if path.startswith("client_")]


@contextlib.contextmanager
def codes_called() -> Generator[dict[CodeType, None]]:
    """The code of every function that runs inside, in this thread."""
    called: dict[CodeType, None] = {}

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called[frame.f_code] = None

    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)


def with_subclasses(cls: type[object]) -> Iterator[type[object]]:
    """The class, and those that are made in its place."""
    yield cls
    for each in cls.__subclasses__():
        yield from with_subclasses(each)


def codes_of(name: str) -> list[CodeType]:
    """The codes that stand for a member: a getter, a setter, or the function; none for an attribute."""
    cls, _, member = name.partition(".")
    found = api_reference.value_of(cls)
    assert inspect.isclass(found)
    functions: list[object] = []
    for each in with_subclasses(found):
        value = inspect.getattr_static(each, member, None)
        functions += [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
    return [inspect.unwrap(each).__code__ for each in functions if inspect.isfunction(each)]


def check(path: str) -> None:
    """Run a program, and compare what it prints and calls with what it says."""
    example = EXAMPLES[path]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), codes_called() as called:
        runpy.run_path(str(FOLDER / path), run_name="__main__")
    wanted = wanted_lines(example.program)
    assert wanted and sorted(printed.getvalue().splitlines()) == sorted(wanted)
    members = [name for name in example.names if "." in name and codes_of(name)]
    assert not [name for name in members if not any(code in called for code in codes_of(name))], "not called"


@pytest.mark.parametrize("path", IN_MEMORY)
def test_a_program_of_nodes_runs_as_written(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    monkeypatch.setattr(trio, "run", functools.partial(trio.run, clock=clock))
    check(path)


@pytest.mark.real
@pytest.mark.parametrize("path", WITH_SOCKETS)
def test_a_program_with_sockets_runs_as_written(path: str) -> None:
    check(path)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data directory of a daemon that is in one realm."""
    with daemon_in_a_realm(tmp_path_factory.mktemp("daemon")) as folder:
        yield folder


@pytest.mark.real
@pytest.mark.parametrize("path", [path for path in OF_DAEMON if path != "client_shutdown.py"])
def test_a_program_of_a_client_runs_as_written(path: str, daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEP2P_DATA_DIR", str(daemon))
    check(path)


@pytest.mark.real
def test_the_program_that_stops_its_daemon_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon_in_a_realm(tmp_path) as folder:
        monkeypatch.setenv("DEP2P_DATA_DIR", str(folder))
        check("client_shutdown.py")


@pytest.mark.parametrize("path", EXAMPLES)
def test_a_program_has_a_title_and_shows_names_that_exist(path: str) -> None:
    example = EXAMPLES[path]
    assert example.title and example.names and len(example.program.splitlines()) <= 50
    assert {*IN_MEMORY, *WITH_SOCKETS, *OF_DAEMON} == {*EXAMPLES}, "begin its name with node_, testing_ or client_"
    for name in example.names:
        cls, _, member = name.partition(".")
        value = api_reference.value_of(cls)
        attributes = [each[0] for each in api_reference.attributes(value)] if inspect.isclass(value) else []
        assert not member or hasattr(value, member) or member in attributes, name


NOT_SHOWN = {
    "a byte stream or connection below the node, for tests of dep2p": ("MemoryConnection", "MemoryStream"),
    "a part of a result that another program shows": ("ChannelLocks", "MemberOffer", "PendingDeletion"),
    "the numbers of errors on the wire; programs catch classes": ("ErrorCode",),
    "options of the daemon's [trace], which `TraceSettings` shows for a node": ("TraceOptions",),
}
"""By reason: the public classes that no program shows."""


def test_every_call_of_a_node_and_a_client_has_a_program() -> None:
    shown = {name for example in EXAMPLES.values() for name in example.names}
    calls: list[str] = []
    for cls in ("Node", "Client"):
        value = api_reference.value_of(cls)
        assert inspect.isclass(value)
        calls += [f"{cls}.{member}" for member in api_reference.public_members(value)]
    assert len(calls) > 90
    assert not [call for call in calls if call not in shown], "write a program, or add the call to one that has it"


def test_every_public_class_has_a_program() -> None:
    shown = {name.partition(".")[0] for example in EXAMPLES.values() for name in example.names}
    classes = {name: api_reference.value_of(name) for name in api_reference.public_names()}
    wanted = [
        name for name, value in classes.items() if inspect.isclass(value) and not issubclass(value, BaseException)
    ]
    left = [name for names in NOT_SHOWN.values() for name in names]
    assert sorted(name for name in wanted if name not in shown) == sorted(left)
