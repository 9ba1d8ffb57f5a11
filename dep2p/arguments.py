"""Checks the arguments of public methods where a caller gives them, by the types that their parameters declare.

A wrong value fails in its caller's own call, before a task that others share has it::

    @checks_arguments
    class Node:
        async def request(self, peer: PeerId, name: str, body: bytes) -> bytes: ...

    await node.request(peer, "greet", "hello")
    # TypeError: Node.request(): body must be bytes, not str: encode text first, as in text.encode()
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, is_typeddict

C = TypeVar("C")
Check = Callable[[object], object]
"""Returns the value as the method takes it. Raises `_WrongArgument`."""

_INT_MIN: Final = -(1 << 63)
_INT_END: Final = 1 << 64
_ITEMS_CHECKED: Final = (Sequence, Collection, list, tuple, set, frozenset)
_ITERABLES: Final = (Iterable, *_ITEMS_CHECKED)
_NONE: Final[tuple[tuple[type, ...], list[int]]] = ((), [])
"""No argument: the types of none, and different from those of some."""


class WrongTypeError(TypeError, ValueError):
    """A value of a type that a parameter does not take. Both a ``TypeError`` and a ``ValueError``: methods document
    ``ValueError`` for every malformed argument."""


class _WrongArgument(Exception):
    """A value that its parameter does not take; the text follows the parameter's name."""

    def __init__(self, text: str, kind: type[Exception] = WrongTypeError) -> None:
        super().__init__(text)
        self.kind = kind


def as_bytes(value: object, what: str) -> bytes:
    """A payload as bytes of its own, so that a caller that changes its buffer later changes nothing here.

    ``what`` names the value in the error. Raises `WrongTypeError` for anything but bytes, bytearray and memoryview.
    """
    try:
        return _bytes(value)
    except _WrongArgument as error:
        raise WrongTypeError(f"{what} {error}") from None


def check_text(value: object, what: str) -> None:
    """Raises `WrongTypeError` for anything but text, ``ValueError`` for text that UTF-8 cannot encode."""
    try:
        _text(value)
    except _WrongArgument as error:
        raise error.kind(f"{what} {error}") from None


def check_number(value: object, what: str) -> None:
    """Raises `WrongTypeError` for anything but a number, ``ValueError`` for NaN."""
    try:
        _float(value)
    except _WrongArgument as error:
        raise error.kind(f"{what} {error}") from None


def check_decorated(name: object) -> None:
    """Raises ``TypeError`` for a decorator that was written without its name: the function would be lost in silence."""
    if callable(name):
        raise TypeError("the decorator needs a name, like @node.on_request('greet')")


def check_handler(function: object) -> None:
    """Raises ``TypeError`` for what cannot be called, and for a plain def. Other callables and wrapped functions may
    well give an awaitable."""
    if not callable(function):
        raise TypeError(f"the handler must be an async def, not {type(function).__name__} {str(function)[:80]!r}")
    if (
        inspect.isfunction(function)
        and not inspect.iscoroutinefunction(function)
        and not hasattr(function, "__wrapped__")
    ):
        raise TypeError(f"the handler {function.__name__}() must be an async def")


def checks_arguments(cls: type[C]) -> type[C]:
    """Class decorator: every public method of ``cls`` checks its arguments by their annotations.

    A method with the decorator `unchecked`, an abstract method or a property is left as it is. A wrong type raises
    `WrongTypeError`; text that UTF-8 cannot encode, a number that is not one (NaN) or over 64 bits, and a text that a
    Literal does not list raise ``ValueError``.
    """
    for name, member in list(vars(cls).items()):
        if name.startswith("_"):
            continue
        function: object = getattr(member, "__func__", member)
        if not inspect.isfunction(function) or hasattr(function, "_unchecked_arguments"):
            continue
        if getattr(function, "__isabstractmethod__", False):
            continue
        checked = _checked(function, f"{cls.__name__}.{name}")
        setattr(cls, name, classmethod(checked) if isinstance(member, classmethod) else checked)
    return cls


F = TypeVar("F", bound=Callable[..., object])


def unchecked(function: F) -> F:
    """Marks a method that checks its arguments itself: one that is called for every message."""
    function._unchecked_arguments = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return function


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    checks: tuple[list[tuple[str, Check | None]], dict[str, Check | None], Check | None] | None = None
    usual: dict[int, tuple[tuple[type, ...], list[int]]] = {}

    @wraps(function)
    def check_and_call(owner: object, /, *args: object, **kwargs: object) -> Any:
        nonlocal checks
        if checks is None:  # at the first call: names of later modules are known by then
            checks = _checks_of(function)
            usual.update(_usual_of(checks[0]))
        if not kwargs:  # half of the time, for methods that are called for every message
            types_, texts = usual.get(len(args), _NONE)
            if types_ == tuple(map(type, args)):
                for index in texts:
                    if not isinstance(text := args[index], str) or not text.isascii():
                        break
                else:
                    return function(owner, *args)
        positional, by_name, of_rest = checks
        parameter = ""
        try:
            given = list(args)
            for index, value in enumerate(args):
                parameter, check = positional[index] if index < len(positional) else ("an argument", of_rest)
                if check is not None:
                    given[index] = check(value)
            for parameter, value in kwargs.items():
                check = by_name.get(parameter)
                if check is not None:
                    kwargs[parameter] = check(value)
        except _WrongArgument as error:
            raise error.kind(f"{name}(): {parameter} {error}") from None
        return function(owner, *given, **kwargs)

    return check_and_call


def _checks_of(
    function: Callable[..., Any],
) -> tuple[list[tuple[str, Check | None]], dict[str, Check | None], Check | None]:
    """Checks by place, by name, and of further arguments by place."""
    plain = cast(types.FunctionType, inspect.unwrap(function))
    positional: list[tuple[str, Check | None]] = []
    by_name: dict[str, Check | None] = {}
    of_rest: Check | None = None
    for index, parameter in enumerate(inspect.signature(plain).parameters.values()):
        if index == 0:
            continue  # self or cls
        hint = _evaluated(parameter.annotation, plain)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (options,) = get_args(hint) or (None,)
            if is_typeddict(options):
                by_name.update({name: _check_of(each) for name, each in typing.get_type_hints(options).items()})
            continue
        check = _check_of(hint)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            of_rest = check
            continue
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            positional.append((parameter.name, check))
        by_name[parameter.name] = check
    return positional, by_name, of_rest


def _usual_of(positional: Sequence[tuple[str, Check | None]]) -> dict[int, tuple[tuple[type, ...], list[int]]]:
    """By the number of arguments: the types of bytes and texts that pass `positional` when the texts, at these
    indexes, are ASCII."""
    types_: list[type] = []
    usual: dict[int, tuple[tuple[type, ...], list[int]]] = {}
    for _name, check in positional:
        if check is not _bytes and check is not _text:
            break
        types_.append(bytes if check is _bytes else str)
        usual[len(types_)] = (tuple(types_), [index for index, each in enumerate(types_) if each is str])
    return usual


def _evaluated(annotation: object, function: types.FunctionType) -> object:
    """An annotation that is written as text is a name of the function's module, if that has it when it runs."""
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        return typing.get_type_hints(holder, function.__globals__)["it"]
    except NameError:
        return Any


def _type_of(value: object) -> str:
    return type(value).__name__


# The checks of types


def _bytes(value: object) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if type(value) is memoryview:
        return value.tobytes()
    advice = ": encode text first, as in text.encode()" if isinstance(value, str) else ""
    raise _WrongArgument(f"must be bytes, not {_type_of(value)}{advice}")


def _text(value: object) -> object:
    if not isinstance(value, str):
        advice = ": decode bytes first, as in data.decode()" if isinstance(value, bytes) else ""
        raise _WrongArgument(f"must be text (str), not {_type_of(value)}{advice}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise _WrongArgument(
                "must be text that UTF-8 can encode: it holds half of a surrogate pair; "
                "decode it with errors='replace' where it comes from",
                ValueError,
            ) from None
    return value


def _int(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _WrongArgument(f"must be a whole number (int), not {_type_of(value)}")
    if not _INT_MIN <= value < _INT_END:
        raise _WrongArgument("must be a whole number that 64 bits hold", ValueError)
    return value


def _float(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _WrongArgument(f"must be a number, not {_type_of(value)}")
    try:
        is_nan = math.isnan(value)
    except OverflowError:
        raise _WrongArgument("must be a number that a float holds", ValueError) from None
    if is_nan:
        raise _WrongArgument("must be a number, not NaN", ValueError)
    return value


def _bool(value: object) -> object:
    if not isinstance(value, bool):
        raise _WrongArgument(f"must be True or False, not {_type_of(value)}")
    return value


def _none(value: object) -> object:
    if value is not None:
        raise _WrongArgument(f"must be None, not {_type_of(value)}")
    return value


_SIMPLE: Final[dict[object, Check]] = {
    bytes: _bytes,
    str: _text,
    int: _int,
    float: _float,
    bool: _bool,
    type(None): _none,
    None: _none,
}


def _check_of(hint: object) -> Check | None:
    """The check of a type; None: anything passes."""
    if hint is Any or hint is object:
        return None
    simple = _SIMPLE.get(hint) if isinstance(hint, typing.Hashable) else None
    if simple is not None:
        return simple
    supertype = getattr(hint, "__supertype__", None)
    if supertype is not None:  # a NewType
        return _check_of(supertype)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin in _ITERABLES:
        return _items(origin, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments)
    if origin is Callable or hint is Callable:
        return _callable
    if isinstance(origin, type):
        return _instance(origin)
    if is_typeddict(hint):
        return _instance(Mapping)
    return _instance(hint) if isinstance(hint, type) else None


def _union(hints: Sequence[object]) -> Check | None:
    checks = [_check_of(each) for each in hints]
    if any(check is None for check in checks):
        return None
    found = cast(list[Check], checks)
    is_optional = _none in found
    found = [check for check in found if check is not _none]

    def check_union(value: object) -> object:
        if value is None and is_optional:
            return value
        errors: list[_WrongArgument] = []
        for check in found:
            try:
                return check(value)
            except _WrongArgument as error:
                if error.kind is ValueError:  # the right type, and a value that it does not take
                    raise
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        wanted = " or ".join(str(error).removeprefix("must be ").split(", not ")[0] for error in errors)
        raise _WrongArgument(f"must be {wanted}, not {_type_of(value)}")

    return check_union


def _literal(choices: Sequence[object]) -> Check:
    listed = ", ".join(map(repr, choices))

    def check_literal(value: object) -> object:
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        raise _WrongArgument(f"must be one of {listed}", ValueError if isinstance(value, str) else WrongTypeError)

    return check_literal


def _items(origin: object, arguments: Sequence[object]) -> Check:
    of_item = _check_of(arguments[0]) if arguments else None

    def check_items(value: object) -> object:
        if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
            advice = ": put it into a list, as in [value]" if isinstance(value, str | bytes) else ""
            kind = _type_of(value)  # pyright: ignore[reportUnknownArgumentType]
            raise _WrongArgument(f"must be a list, not {kind}{advice}")
        if origin is Iterable and not isinstance(value, Collection):
            return cast(object, value)  # it may come item by item
        items = cast(Iterable[object], value)
        kept = items if isinstance(items, list | tuple | set | frozenset | Sequence) else list(items)
        if of_item is None:
            return kept
        checked: list[object] = []
        for each in kept:
            try:
                checked.append(of_item(each))
            except _WrongArgument as error:
                raise _WrongArgument(f"must be a list of the right types: an item {error}", error.kind) from None
        return checked if type(kept) is list else tuple(checked)

    return check_items


def _mapping(arguments: Sequence[object]) -> Check:
    of_key, of_value = (_check_of(each) for each in arguments) if len(arguments) == 2 else (None, None)

    def check_mapping(value: object) -> object:
        if not isinstance(value, Mapping):
            raise _WrongArgument(f"must be a dict, not {_type_of(value)}")
        for key, each in cast(Mapping[object, object], value).items():
            try:
                if of_key is not None:
                    of_key(key)
                if of_value is not None:
                    of_value(each)
            except _WrongArgument as error:
                raise _WrongArgument(f"must be a dict of the right types: a key or value {error}", error.kind) from None
        return cast(object, value)

    return check_mapping


def _callable(value: object) -> object:
    if not callable(value):
        raise _WrongArgument(f"must be a function, not {_type_of(value)}")
    return value


def _instance(cls: type[Any]) -> Check | None:
    if getattr(cls, "_is_protocol", False):
        return None
    if cls is Path:
        name = "a path"
    elif cls is Mapping:
        name = "a dict"
    else:
        name = f"a {cls.__name__}"

    def check_instance(value: object) -> object:
        if not isinstance(value, cls):
            raise _WrongArgument(f"must be {name}, not {_type_of(value)}")
        return value

    return check_instance
