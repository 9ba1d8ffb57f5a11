"""Calls methods with one wrong argument at a time: every parameter of every public method of an object."""

import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, get_args, is_typeddict

import anyio
from hypothesis import strategies as st

from dep2p.errors import Dep2pError

_recursive: list[object] = []
_recursive.append(_recursive)

EXTREME: Final[tuple[object, ...]] = (
    None,
    True,
    -1,
    2**31,
    2**63,
    2**64,
    -(2**70),
    10**400,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    "",
    "\0",
    "\x1b[2J",
    "\ud800",
    "../../x",
    "x" * 300,
    "x" * 100_000,
    b"",
    b"x" * 70_000,
    b"x" * 3_000_000,
    bytearray(b"x"),
    memoryview(b"xy")[::2],
    [],
    [None],
    ["x" * 100_000],
    [b"x", "y"],
    ("\ud800",),
    {},
    {"a": object()},
    {1: 2},
    {"\ud800": "\ud800"},
    {"a": 2**80},
    {"a": "x" * 100_000},
    _recursive,
    object(),
    int,
)


class Wrong:
    """A wrong value; shown in short."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} {self.value!r:.60}"


_values: Final = st.one_of(
    st.sampled_from(EXTREME),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=20),
    st.binary(max_size=20),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
)
wrong_values: Final = _values.map(Wrong)


class WrongCall(NamedTuple):
    """A method, and the parameter that gets the wrong value."""

    method: str
    parameter: str


def calls_of(cls: type[Any], *, but: tuple[str, ...] = ()) -> Iterator[WrongCall]:
    """Every parameter of every public method of a class."""
    for name in dir(cls):
        if name.startswith("_") or name in but or not callable(getattr(cls, name)):
            continue
        function = inspect.unwrap(getattr(cls, name))
        if inspect.isfunction(function):
            for parameter in parameters_of(function):
                yield WrongCall(name, parameter)


def parameters_of(function: Any) -> dict[str, bool]:
    """The names of the parameters, and whether one must be given."""
    found: dict[str, bool] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 or parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (options,) = get_args(parameter.annotation) or (None,)
            if is_typeddict(options):
                found |= dict.fromkeys(typing.get_type_hints(options), False)
            continue
        found[parameter.name] = parameter.default is inspect.Parameter.empty
    return found


async def call_wrongly(owner: object, call: WrongCall, wrong: Wrong, right: Mapping[str, object]) -> None:
    """Asserts that the error, if there is one, is for people: a ``ValueError`` of ours or a `Dep2pError`."""
    method = getattr(owner, call.method)
    value = wrong.value
    required = [name for name, must in parameters_of(inspect.unwrap(getattr(type(owner), call.method))).items() if must]
    arguments = {name: right[name] for name in required if name != call.parameter} | {call.parameter: value}
    try:
        with anyio.move_on_after(0.2):
            await _finish(method(**arguments))
    except Dep2pError:
        pass
    except ValueError as error:  # `WrongTypeError` is one, too
        assert not isinstance(error, UnicodeError), f"{call}: {error!r}"
    except Exception as error:
        raise AssertionError(f"{call} with {wrong!r}: {error!r:.300} is no error for its caller") from error


async def _finish(result: Any) -> None:
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aenter__"):
        async with result:
            pass
    elif inspect.isasyncgen(result):
        async for _ in result:
            break
        await result.aclose()
