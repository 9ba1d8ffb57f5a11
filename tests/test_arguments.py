"""`dep2p.arguments`: a value of a wrong type fails in its caller's call, and the error says what to give."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import pytest

from dep2p.arguments import WrongTypeError, as_bytes, check_text, checks_arguments, unchecked
from dep2p.types import Headers, PeerId

if TYPE_CHECKING:
    from dep2p.node.node import Node as Missing


class Options(TypedDict, total=False):
    size: int


@checks_arguments
class Service:
    def __init__(self) -> None:
        self.calls = 0

    async def send(  # noqa: PLR0913  (a parameter of each type)
        self,
        peer: PeerId,
        data: bytes = b"",
        *,
        tags: Sequence[str] = (),
        headers: Headers | None = None,
        timeout_s: float | None = None,
        count: int = 0,
        durable: bool = False,
        mode: Literal["all", "any"] = "all",
        path: Path | str = "",
        bodies: Sequence[bytes] = (),
        names: Iterable[str] = (),
        limits: Mapping[str, int] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> tuple[object, ...]:
        self.calls += 1
        return peer, data, tuple(tags), tuple(bodies)

    @asynccontextmanager
    async def opened(self, name: str) -> AsyncGenerator[str, None]:
        yield name

    @classmethod
    def of(cls, name: str) -> str:
        return name

    def several(self, *names: str, **options: Unpack[Options]) -> None: ...

    def later(self, thing: "Missing") -> None: ...

    @unchecked
    def quick(self, name: str) -> str:
        return name


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"peer": 5}, WrongTypeError, r"Service\.send\(\): peer must be text \(str\), not int"),
    ({"peer": "\ud800"}, ValueError, "peer must be text that UTF-8 can encode"),
    ({"data": "text"}, WrongTypeError, r"data must be bytes, not str: encode text first, as in text\.encode\(\)"),
    ({"data": 10**12}, WrongTypeError, "data must be bytes, not int"),
    ({"data": None}, WrongTypeError, "data must be bytes, not NoneType"),
    ({"tags": "abc"}, WrongTypeError, r"tags must be a list, not str: put it into a list, as in \[value\]"),
    ({"tags": [1]}, WrongTypeError, "tags must be a list of the right types: an item must be text"),
    ({"tags": {"a": 1}}, WrongTypeError, "tags must be a list, not dict"),
    ({"headers": [1]}, WrongTypeError, "headers must be a dict, not list"),
    ({"headers": {1: 2}}, WrongTypeError, "headers must be a dict of the right types"),
    ({"timeout_s": "5"}, WrongTypeError, "timeout_s must be a number, not str"),
    ({"timeout_s": float("nan")}, ValueError, "timeout_s must be a number, not NaN"),
    ({"timeout_s": 10**400}, ValueError, "timeout_s must be a number that a float holds"),
    ({"timeout_s": True}, WrongTypeError, "timeout_s must be a number, not bool"),
    ({"count": 1.5}, WrongTypeError, "count must be a whole number"),
    ({"count": True}, WrongTypeError, "count must be a whole number"),
    ({"count": 1 << 64}, ValueError, "count must be a whole number that 64 bits hold"),
    ({"durable": 1}, WrongTypeError, "durable must be True or False, not int"),
    ({"mode": "some"}, ValueError, "mode must be one of 'all', 'any'"),
    ({"mode": []}, WrongTypeError, "mode must be one of 'all', 'any'"),
    ({"path": 5}, WrongTypeError, "path must be a path or text"),
    ({"path": "\ud800"}, ValueError, "path must be text that UTF-8 can encode"),
    ({"bodies": [b"a", None]}, WrongTypeError, "bodies must be a list of the right types: an item must be bytes"),
    ({"bodies": b"abc"}, WrongTypeError, "bodies must be a list, not bytes"),
    ({"names": "abc"}, WrongTypeError, "names must be a list, not str"),
    ({"limits": {"a": "b"}}, WrongTypeError, "limits must be a dict of the right types"),
    ({"on_end": 5}, WrongTypeError, "on_end must be a function, not int"),
]


@pytest.mark.parametrize(("arguments", "kind", "says"), WRONG, ids=lambda each: str(each)[:40])
async def test_a_wrong_argument_fails_in_the_call_and_says_what_to_give(
    arguments: dict[str, Any], kind: type[Exception], says: str
) -> None:
    service = Service()
    with pytest.raises(kind, match=says) as caught:
        given: dict[str, Any] = {"peer": PeerId("a"), **arguments}
        await service.send(**given)
    assert type(caught.value) is kind
    assert service.calls == 0


BY_PLACE: list[tuple[tuple[Any, ...], str]] = [
    ((None,), "peer must be text"),
    ((b"a",), "peer must be text"),
    (("\ud800",), "peer must be text that UTF-8 can encode"),
    (("a", "text"), "data must be bytes, not str"),
    ((b"a", "text"), "peer must be text"),
    (("\ud800", b"a"), "peer must be text that UTF-8 can encode"),
]


@pytest.mark.parametrize(("arguments", "says"), BY_PLACE, ids=lambda each: repr(each)[:40])
async def test_a_wrong_argument_by_place_fails_like_one_by_name(arguments: tuple[Any, ...], says: str) -> None:
    service = Service()
    with pytest.raises(ValueError, match=says):
        await service.send(*arguments)
    assert service.calls == 0


async def test_arguments_of_the_usual_types_reach_the_method_with_and_without_text_beyond_ascii() -> None:
    service = Service()
    assert await service.send(PeerId("a")) == ("a", b"", (), ())
    assert await service.send(PeerId("a"), b"one") == ("a", b"one", (), ())
    assert await service.send(PeerId("ä"), b"one") == ("ä", b"one", (), ())
    service.several()


async def test_right_arguments_reach_the_method_and_buffers_become_bytes_of_their_own() -> None:
    buffer: Any = bytearray(b"one")
    two: Any = memoryview(b"two")
    repeated: Any = ("x" for _ in range(2))
    peer, data, tags, bodies = await Service().send(
        PeerId("a"),
        buffer,
        tags=repeated,
        bodies=[two, buffer],
        headers={"a": object()},
        timeout_s=1,
        names=iter(["n"]),
    )
    buffer[:] = b"xxx"
    assert (peer, data, tags, bodies) == ("a", b"one", ("x", "x"), (b"two", b"one"))


async def test_context_managers_class_methods_and_rest_arguments_are_checked() -> None:
    wrong: Any = 5
    text: Any = "1"
    service = Service()
    async with service.opened("a") as name:
        assert name == "a"
    assert Service.of("a") == "a"
    service.several("a", "b", size=1)
    service.later(wrong)  # its type is not known when the program runs
    assert service.quick(wrong) is wrong
    with pytest.raises(TypeError, match="name must be text"):
        service.opened(wrong)
    with pytest.raises(TypeError, match="name must be text"):
        Service.of(wrong)
    with pytest.raises(TypeError, match="an argument must be text"):
        service.several("a", wrong)
    with pytest.raises(TypeError, match="size must be a whole number"):
        service.several(size=text)


def test_what_hot_methods_call_themselves() -> None:
    assert as_bytes(memoryview(b"abc")[::2], "it") == b"ac"
    with pytest.raises(TypeError, match="a push must be bytes, not str"):
        as_bytes("a", "a push")
    check_text("a", "it")
    with pytest.raises(TypeError, match="the peer must be text"):
        check_text(b"a", "the peer")
