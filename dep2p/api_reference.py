"""Writes docs/reference/python/ from the docstrings: ``python -m dep2p.api_reference docs/reference/python``.

A page has an entry for each public name of its part: the signature with its types, the docstring, the attributes and
the public methods. The examples are the programs in docs/reference/python/examples/, which the tests run.
"""

import ast
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

from dep2p.control_api.errors import code_of
from dep2p.error_codes import ERRORS
from dep2p.host.interface import ByteStream, Connection, Host

MODULES: Final = ("dep2p", "dep2p.client", "dep2p.testing")
"""The modules from which apps import."""

PAGES: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "errors": (
        "Errors",
        "Every exception that a call of a node or a client raises on purpose. Each can be imported from `dep2p`, those "
        "that a client meets also from `dep2p.client`. `dep2p errors show CODE` prints the same advice, and "
        "`dep2p.client.code_of(error)` returns the D-code of an exception.",
        ("errors", "control_api.errors", "arguments"),
    ),
    "testing": (
        "Testing",
        "A network in memory for tests of apps, a TCP proxy with faults, and a simulator of whole networks. How to use "
        "them: [testing-an-app.md](../../howto/testing-an-app.md), [simulate.md](../../howto/simulate.md).",
        ("testing",),
    ),
    "queues": (
        "Queues",
        "Durable queues: `node.queues` and `client.queues`. How to use them: [queues.md](../../howto/queues.md), "
        "[consumers.md](../../howto/consumers.md).",
        (
            "queues",
            "storage.app_outbox",
            "node.queues_api",
            "client.queue_consumer",
            "client.queues",
            "control_api.queues",
            "protocols.queues",
        ),
    ),
    "sessions": (
        "Sessions",
        "Pushes to a client in strict order: `node.sessions` and `client.sessions`. How to use them: "
        "[sessions.md](../../howto/sessions.md).",
        ("sessions", "node.sessions", "client.sessions", "protocols.sessions"),
    ),
    "streams": (
        "Streams",
        "Two-way streams of items, from `stream`, `accept` and `on_stream`.",
        ("messaging.message_stream", "client.streams"),
    ),
    "delivery": (
        "Reliable delivery",
        "Receipts of reliable messages, and the outbox: `node.outbox` and `client.outbox`. How to use them: "
        "[delivery.md](../../howto/delivery.md).",
        ("delivery", "node.outbox", "client.delivery", "protocols.delivery"),
    ),
    "topics": (
        "Topics",
        "Publish and subscribe: handles of topics, subscriptions, messages and gathers. How to use them: "
        "[pubsub.md](../../howto/pubsub.md).",
        ("pubsub", "gossipsub", "client.topics", "client.gathers", "services.gathers", "protocols.messaging.answers"),
    ),
    "services": (
        "Services",
        "Requests that any member of a group answers. How to use them: [services.md](../../howto/services.md).",
        ("services", "protocols.services"),
    ),
    "realms": (
        "Realms and members",
        "The secret of a realm, its invites, and what members say about themselves.",
        ("realm", "protocols.realm"),
    ),
    "messages": (
        "Messages and results",
        "The arguments of handlers, and the results of calls about messages.",
        ("protocols.messaging", "messaging"),
    ),
    "client": (
        "Client",
        "Calls to a running daemon, from asyncio or trio: `dep2p.client.Client`, and what it returns.",
        ("client", "control_api"),
    ),
    "node": (
        "Node",
        "A node of the app's own, in trio: `dep2p.Node`, and what it takes and returns.",
        ("node", "identity", "types", "limits", "tracing", "protocols.timing", "protocols.fairness", "_version"),
    ),
}
"""Each page: its title, its first sentences, and the modules below ``dep2p`` whose names it has. A longer name of a
module goes before a shorter one."""

OTHER_PAGES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ServiceOffer", "ServiceMember", "ServiceMemberInfo"), "services"),
    **dict.fromkeys(("RealmSummary", "MemberSummary", "MemberOffer"), "realms"),
    **dict.fromkeys(("PeerSummary", "ConnectedPeer", "ConnectionSummary"), "node"),
    **dict.fromkeys(("TopicPeers", "TopicSummary"), "topics"),
    **dict.fromkeys(("OutboxList", "OutboxMessage"), "delivery"),
    **dict.fromkeys(("ServiceSummary", "ServiceDetails", "ServiceAnswer"), "services"),
    **dict.fromkeys(("RealmId",), "realms"),
    "Lagged": "messages",
    "code_of": "errors",
}
"""Names whose page is not that of their module."""

PARTS: Final[Mapping[str, str]] = {
    "Client": "over",
    "ClientOutboxRelay": "working",
    "ClientPendingSend": "failed message send taken",
    "ClientProducer": "working",
    "ClientPushConsumer": "working",
    "ClientPushedMessage": "move_deadline",
    "ClientQueueMessage": "move_deadline",
    "ClientServedSession": "close take_request",
    "ClientStream": "is_closed",
    "ClientTopic": "join",
    "Gathering": "answer_came published_to",
    "MessageStream": (
        "abort accept error finish is_on is_over is_unwanted lose_membership next_deadline on_deadline open "
        "opened_by_peer raise_unreported receive reset start wait_left"
    ),
    "Node": "all_apps all_pubsubs all_services handle services",
    "NodeQueues": (
        "ask ask_broker destinations distributed_values flows is_off_partition open_consumer open_subscription "
        "ownership publish_batch publish_sequenced publish_sequenced_to_broker publish_to_broker"
    ),
    "OpenSession": (
        "failed_internally finished is_left leave link next_deadline on_deadline opened run scope stop trace"
    ),
    "OutboxRelay": "working",
    "PendingSend": "failed message send taken",
    "Producer": "flow_counts flow_values working",
    "PushConsumer": "flow_counts flow_values working",
    "QueueMessage": "attributes move_deadline",
    "Queues": "ask destinations flows is_off_partition open_consumer publish_batch publish_sequenced",
    "Realm": "keys",
    "Receipt": "body_of_try ended flags head is_whole left sent_s waiting",
    "Session": "attach close collect detach handle link next_deadline on_deadline over scope trace",
    "Subscription": "put put_local put_topics_full",
    "Tracer": "__init__ attach counters is_on log run",
}
"""Public members that the parts of a node use on each other, by class. Apps do not use them."""

SEAMS: Final[Mapping[str, type]] = {"MemoryHost": Host, "MemoryConnection": Connection, "MemoryStream": ByteStream}
"""Classes that implement a seam of the node, whose docstrings stand for theirs."""
FIRST: Final = ("Node", "Client", "Topic", "ClientTopic", "Realm", "MemoryNetwork")
"""Names that come first on their pages."""
EXAMPLES: Final = "examples"
"""The folder of the programs, beside the pages."""
EXAMPLES_MAX: Final = 3
"""Programs that an entry links."""


@dataclass(frozen=True)
class Example:
    """A program that shows some names."""

    title: str
    names: tuple[str, ...]
    """Names that it shows: ``Node.request``, ``Request``."""
    program: str
    path: str


def read_examples(folder: Path) -> list[Example]:
    """Read the programs of a folder. The docstring of each is its title, then the names that it shows."""
    found: list[Example] = []
    for path in sorted(folder.glob("*.py")):
        text = path.read_text("utf-8")
        title, _, names = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")
        program = text.partition('"""\n')[2].strip()
        found.append(
            Example(title.rstrip("."), tuple(re.findall(r"[\w.]+\w", names.partition("Shows:")[2])), program, path.name)
        )
    return found


@cache
def public_names() -> dict[str, list[str]]:
    """Each public name, and the modules from which it can be imported."""
    found: dict[str, list[str]] = {}
    for module in MODULES:
        for name in import_module(module).__all__:
            found.setdefault(name, []).append(module)
    return dict(sorted(found.items(), key=lambda each: (each[0] not in FIRST, each[0].lower())))


@cache
def value_of(name: str) -> object:
    """Return what a public name stands for."""
    return getattr(import_module(public_names()[name][0]), name)


def page_of(name: str) -> str:
    """Return the page that has the entry of a public name. Raises ``LookupError`` when no page takes its module."""
    if name in OTHER_PAGES:
        return OTHER_PAGES[name]
    module = (home_of(name) + ".").removeprefix("dep2p.")
    places = [(len(start), page) for page, (_, _, starts) in PAGES.items() for start in starts if fits(module, start)]
    if not places:
        raise LookupError(
            f"no page takes {name} of dep2p.{module}: add it to PAGES or OTHER_PAGES in dep2p.api_reference"
        )
    return max(places)[1]


def fits(module: str, start: str) -> bool:
    """Whether a module is the one that is named, or below it."""
    return module.startswith(f"{start}.")


def documentation(cls: type, name: str, member: object) -> str:
    """Return the docstring of a member; of a class that implements a seam of the node, else that of the seam."""
    own = member.__doc__
    seam = SEAMS.get(cls.__name__)
    return as_markdown(own or (getattr(getattr(seam, name, None), "__doc__", None) if seam else None))


def home_of(name: str) -> str:
    """Return the module that defines a public name."""
    value = value_of(name)
    if isinstance(value, str):
        return "dep2p._version"
    return "dep2p.gossipsub.topic_types" if typing.get_origin(value) else str(value.__module__)


# Classes and functions, as entries read them


@cache
def definitions(module: str) -> tuple[dict[str, ast.ClassDef], dict[int, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The classes of a module by name, and its functions by their first lines. Each file is parsed once."""
    tree = ast.parse(Path(inspect.getfile(import_module(module))).read_text("utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return classes, {min(each.lineno for each in (node, *node.decorator_list)): node for node in functions}


def definition_of(function: Callable[..., object]) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The source of a function, without what decorators put around it."""
    plain = inspect.unwrap(function)
    assert inspect.isfunction(plain)
    return definitions(plain.__module__)[1][plain.__code__.co_firstlineno]


def class_body(cls: type) -> list[ast.stmt]:
    """The statements of a class, of its source."""
    return definitions(cls.__module__)[0][cls.__name__].body


@cache
def public_classes() -> tuple[type, ...]:
    """The classes that have an entry."""
    return tuple(value for value in map(value_of, public_names()) if inspect.isclass(value))


def own_bases(cls: type) -> list[type]:
    """The class and its bases of this package that have no entry of their own, the class first."""
    public = public_classes()
    bases = [base for base in cls.__mro__ if base.__module__.startswith("dep2p.")]
    with_entry = [each for base in bases[1:] if base in public for each in base.__mro__]
    return [base for base in bases if base not in with_entry]


def parts_of(cls: type) -> list[str]:
    """The public members of a class that are not for apps."""
    return [each for base in own_bases(cls) for each in PARTS.get(base.__name__, "").split()]


def public_members(cls: type) -> dict[str, object]:
    """The public methods and properties of a class that are for apps."""
    parts = parts_of(cls)
    found: dict[str, object] = {}
    for base in own_bases(cls):
        for name, member in vars(base).items():
            plain: object = getattr(member, "__func__", member)
            if name.startswith("_") or name in parts or name in found:
                continue
            if isinstance(plain, property) or inspect.isfunction(plain):
                found[name] = plain
    return found


def attributes(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """The public attributes: name, type, default, docstring. Those of the class, then those that ``__init__`` sets."""
    seen: dict[str, None] = dict.fromkeys(parts_of(cls))
    for base in own_bases(cls):
        if issubclass(cls, BaseException) and base is not cls:
            continue
        body = class_body(base)
        starts = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        for statement, following in pairs_of(body) + [pair for start in starts for pair in pairs_of(start.body)]:
            named = attribute_of(statement, is_enum=issubclass(cls, Enum)) or given_attribute(statement, starts)
            if named is None or named[0].startswith("_") or named[0] in seen:
                continue
            seen[named[0]] = None
            yield *named, text_of(following)


def pairs_of(body: list[ast.stmt]) -> list[tuple[ast.stmt, ast.stmt | None]]:
    """Each statement with the one that follows, which may be its docstring."""
    return list(zip(body, [*body[1:], None], strict=True))


def text_of(statement: ast.stmt | None) -> str:
    """Return the text of a statement that is a docstring, else an empty text."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return inspect.cleandoc(str(statement.value.value)) if isinstance(statement.value.value, str) else ""
    return ""


def attribute_of(statement: ast.stmt, *, is_enum: bool) -> tuple[str, str, str] | None:
    """Return name, type and default of a statement that declares an attribute."""
    target: ast.expr
    if isinstance(statement, ast.AnnAssign):
        target, annotation = statement.target, annotation_text(statement.annotation)
    elif isinstance(statement, ast.Assign) and is_enum:
        target, annotation = statement.targets[0], ""
    else:
        return None
    is_of_self = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    if not is_of_self and not isinstance(target, ast.Name):
        return None
    name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
    default = "" if is_of_self or statement.value is None else ast.unparse(statement.value)
    return name, annotation, default


def given_attribute(statement: ast.stmt, starts: list[ast.FunctionDef]) -> tuple[str, str, str] | None:
    """Return name and type of an attribute that is a parameter of ``__init__``: ``self.name = name``."""
    match statement:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Name(id=given)):
            parameters = [each for start in starts for each in (*start.args.args, *start.args.kwonlyargs)]
            types = [annotation_text(each.annotation) for each in parameters if each.arg == given]
            return (name, types[0], "") if types else None
        case _:
            return None


def annotation_text(annotation: ast.expr | None) -> str:
    """Return an annotation as it is written, without the quotes around names of later classes."""
    if annotation is None:
        return ""
    return (
        re.sub(r"'([\w.\[\], |]+)'", r"\1", ast.unparse(annotation))
        if "Literal" not in ast.unparse(annotation)
        else ast.unparse(annotation)
    )


def signature(name: str, function: Callable[..., object]) -> str:
    """Return a call as it is written: ``await``, ``async with``, parameters with types and defaults, the result."""
    plain = inspect.unwrap(function)
    node = definition_of(function)
    result = annotation_text(node.returns)
    manager = re.fullmatch(r"(?:AbstractAsyncContextManager|AsyncGenerator)\[(.*?)(?:, None)?\]", result)
    is_manager = manager is not None and (
        result.startswith("Abstract") or any("contextmanager" in ast.unparse(each) for each in node.decorator_list)
    )
    if manager is not None and is_manager:
        verb, after = "async with ", f" as {manager[1]}"
    elif re.match(r"Awaitable\[", result):
        verb, after = "await ", f" -> {result[10:-1]}"
    else:
        verb, after = ("await " if isinstance(node, ast.AsyncFunctionDef) else ""), f" -> {result}" if result else ""
    parameters = list(parameter_texts(node, plain))
    line = f"{verb}{name}({', '.join(parameters)}){after}"
    if len(line) <= 100:
        return line
    rows = "".join(f"    {each},\n" for each in parameters)
    return f"{verb}{name}(\n{rows}){after}"


_STARS: Final[Mapping[object, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def parameter_texts(node: ast.FunctionDef | ast.AsyncFunctionDef, function: Callable[..., object]) -> Iterator[str]:
    """The parameters of a function, ``self`` and ``cls`` left out, with the values of their defaults."""
    annotations = {
        each.arg: annotation_text(each.annotation)
        for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        if each is not None
    }
    is_star_written = node.args.vararg is not None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_star_written:
            is_star_written = True
            yield "*"
        stars = _STARS.get(parameter.kind, "")
        annotation = annotations[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            annotation = re.sub(r"Unpack\[(.*)\]", r"\1", annotation)
        default = "" if parameter.default is parameter.empty else f" = {default_text(parameter.default)}"
        yield f"{stars}{parameter.name}: {annotation}{default}" if annotation else f"{stars}{parameter.name}{default}"


def default_text(value: object) -> str:
    """Return a default as a reader writes it; an object without such a form is an ellipsis."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    return "…" if text.startswith("<") else text


# Markdown


def as_markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: roles and double back-quotes become single ones, literal blocks are fenced."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r":\w+:`~?(?:dep2p\.)?(?:\w+\.)*?((?:[A-Z]\w*\.)?\w+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    parts: list[str] = []
    for paragraph in re.split(r"\n{2,}(?! )", re.sub(r"::\n\n(?= )", ":\n\n", text)):
        before, _, code = paragraph.partition("\n\n")
        parts.append(before if not code else f"{before}\n\n```\n{textwrap.dedent(code)}\n```")
    return "\n\n".join(parts)


def anchor(title: str) -> str:
    """Return the anchor that readers of Markdown give a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def rows_of(cls: type) -> list[str]:
    """Return the table of the attributes of a class; nothing without any."""
    rows = list(attributes(cls))
    if not rows:
        return []
    lines = ["", "| Attribute | Type | Default | |", "|---|---|---|---|"]
    for name, annotation, default, text in rows:
        cells = [f"`{each}`" if each else "" for each in (name, annotation, default)]
        cells.append(" ".join(as_markdown(text).split()))
        lines.append("| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |")
    return lines


def makes_itself(cls: type) -> bool:
    """Whether apps call the class: a dataclass, a struct, or a class of which the docstring of ``__init__`` says so."""
    start = vars(cls).get("__init__")
    is_for_apps = "__init__" not in parts_of(cls) and "__dataclass_fields__" not in vars(cls)
    return inspect.isfunction(start) and bool(start.__doc__) and is_for_apps


class Pages:
    """The pages, made from the names and the examples."""

    def __init__(self, examples: list[Example]) -> None:
        self._examples = examples
        self._page_of_example = {
            each.path: page_of(each.names[0].partition(".")[0]) if each.names else "node" for each in examples
        }

    def shown_by(self, name: str, page: str) -> list[str]:
        """Return the line that links the examples of a name."""
        found = [each for each in self._examples if name in each.names]
        found = sorted(found, key=lambda each: each.names.index(name))[:EXAMPLES_MAX]
        links = [f"[{each.title}]({self._link(each, page)})" for each in found]
        return ["", f"Example: {', '.join(links)}."] if links else []

    def _link(self, example: Example, page: str) -> str:
        place = self._page_of_example[example.path]
        return f"{'' if place == page else place + '.md'}#{anchor(example.title)}"

    def _place(self, name: str, page: str) -> str:
        home = page_of(name)
        return f"{'' if home == page else home + '.md'}#{anchor(name)}"

    def entry(self, name: str, page: str) -> list[str]:
        """Return the entry of a public name."""
        value = value_of(name)
        lines = ["", f"## {name}", ""]
        lines.append(" ".join(f"`from {module} import {name}`" for module in public_names()[name]))
        if inspect.isclass(value):
            lines += self._class(name, value, page)
        elif inspect.isfunction(value):
            lines += ["", "```", signature(name, value), "```", "", as_markdown(value.__doc__)]
            lines += self.shown_by(name, page)
        elif isinstance(value, str):
            lines += ["", "The version of dep2p, a text."]
        elif typing.get_origin(value):
            lines += ["", f"One of {', '.join(f'`{each!r}`' for each in typing.get_args(value))}."]
        else:
            lines += ["", as_markdown(value.__doc__)]
        return lines

    def _class(self, name: str, cls: type, page: str) -> list[str]:
        lines = ["", as_markdown(cls.__doc__)]
        bases = [
            f"[{base.__name__}]({self._place(base.__name__, page)})"
            for base in cls.__mro__[1:]
            if base.__name__ in public_names() and base.__module__.startswith("dep2p.")
        ][:1]
        if bases:
            lines += ["", f"{'An' if bases[0][1] in 'AEIO' else 'A'} {', '.join(bases)}, with all that it has."]
        if makes_itself(cls):
            start = vars(cls)["__init__"]
            lines += ["", "```", signature(name, start), "```", "", as_markdown(start.__doc__)]
        lines += rows_of(cls)
        lines += self.shown_by(name, page)
        for member, value in public_members(cls).items():
            full = f"{name}.{member}"
            lines += ["", f"### {full}", ""]
            if isinstance(value, property):
                result = signature(member, value.fget).partition(" -> ")[2] if value.fget else ""
                lines += ["```", f"{member}: {result}", "```", "", documentation(cls, member, value)]
            elif inspect.isfunction(value):
                lines += ["```", signature(member, value), "```", "", documentation(cls, member, value)]
            lines += self.shown_by(full, page)
        return lines

    def page(self, page: str) -> str:
        """Return a whole page."""
        title, start, _ = PAGES[page]
        names = [name for name in public_names() if page_of(name) == page]
        lines = [f"# {title}", "", _GENERATED, "", start]
        if page == "errors":
            lines += error_rows(names)
        else:
            lines += ["", " · ".join(f"[{name}](#{anchor(name)})" for name in names)]
            examples = [each for each in self._examples if self._page_of_example[each.path] == page]
            if examples:
                lines += ["", "Examples: " + " · ".join(f"[{each.title}](#{anchor(each.title)})" for each in examples)]
        for name in names:
            lines += self.entry(name, page)
        lines = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).splitlines()
        for example in self._examples:
            if self._page_of_example[example.path] == page:
                lines += ["", f"## {example.title}", "", f"`{EXAMPLES}/{example.path}`", ""]
                lines += ["```python", example.program, "```"]
        return "\n".join(lines).rstrip() + "\n"

    def index(self) -> str:
        """Return the page with all names."""
        lines = ["# Reference of the Python API", "", _GENERATED, "", _INDEX, "", "| Page | Names |", "|---|---|"]
        for page, (title, _, _) in sorted(PAGES.items(), key=lambda each: each[1][0]):
            names = [f"[{name}]({page}.md#{anchor(name)})" for name in public_names() if page_of(name) == page]
            lines.append(f"| [{title}]({page}.md) | {', '.join(names)} |")
        return "\n".join(lines) + "\n"


_GENERATED: Final = (
    "Generated by `python -m dep2p.api_reference docs/reference/python`; a test fails when it is not up to date."
)
_INDEX: Final = """\
Names come from `dep2p` (a node of the app's own, in trio), `dep2p.client` (calls to a running daemon, from asyncio or
trio) and `dep2p.testing`. Times are seconds (`_s`), sizes are bytes (`_bytes`), bodies are `bytes`. In signatures
`async with … as X` is a context manager that yields an X, and `**options: Options` are the keys of a `TypedDict` as
keyword arguments. Some names in signatures stand for longer types:

| Name | Type |
|---|---|
| `PeerId`, `RealmId` | texts, each a type of its own |
| `RealmChoice` | a `Realm`, its name, its id, or None for the only realm |
| `Headers` | a mapping of names to texts, bytes, 64-bit integers, booleans or flat lists of these |
| `RequestHandler` | an `async def` from a `Request` to bytes |
| `NotifyHandler`, `StreamHandler` | an `async def` that takes a `Notification` or a `MessageStream` |
| `SessionHandler`, `SessionRequestHandler` | an `async def` that takes a `Session`; from a `SessionRequest` to bytes |
| `Handler`, `PushHandler` | an `async def` that takes a `PushedMessage`, a `ClientPushedMessage` |

Where to begin: [ten lines each](../../howto/ten-lines.md), [dep2p inside a program](../../howto/embedding.md),
[the verbs beside those of others](../verbs.md)."""


UNKNOWN_CODE: Final = "D9001"
_OWN_CODES: Final = {
    "ConfigError": "D1003",
    "ControlError": UNKNOWN_CODE,
    "DaemonUnreachableError": "D3001",
    "FeedEndedError": "D3009",
}
"""The errors that have their code as an attribute, with the usual one."""


def error_rows(names: list[str]) -> list[str]:
    """Return the table of the errors: each with its D-code, its meaning, and the next step."""
    lines = ["", "| Error | Import from | Code | What to do |", "|---|---|---|---|"]
    for name in names:
        value = value_of(name)
        if not (inspect.isclass(value) and issubclass(value, BaseException)):
            continue
        code = _OWN_CODES[name] if name in _OWN_CODES else code_of(value.__new__(value))
        code = "" if code == UNKNOWN_CODE else code
        what = ERRORS[code].what_to_try if code else ""
        modules = ", ".join(f"`{module}`" for module in public_names()[name])
        lines.append(f"| [{name}](#{anchor(name)}) | {modules} | {code} | {what.replace('|', chr(92) + '|')} |")
    return lines


def reference(folder: Path) -> dict[str, str]:
    """Return the text of each page, by the name of its file; ``folder`` has the examples."""
    pages = Pages(read_examples(folder / EXAMPLES))
    return {"README.md": pages.index(), **{f"{page}.md": pages.page(page) for page in PAGES}}


def main() -> None:
    """Write the pages into the folder that is named."""
    folder = Path(sys.argv[1])
    for name, text in reference(folder).items():
        folder.joinpath(name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
