"""``dep2p reply``: answer requests with a program, a file, a Python function, or the request itself."""

import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from traceback import print_exception
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import RealmOption, check_name, read_payload
from dep2p.cli.framework.render import byte_count, payload, short_peer
from dep2p.control_api.errors import code_of
from dep2p.error_codes import EXIT_NOT_FOUND
from dep2p.errors import Dep2pError, HandlerError, MessageTooLargeError
from dep2p.outside_text import environment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import ByteReceiveStream, Process

    from dep2p.client import Client
    from dep2p.gossipsub.topic_types import TopicMessage
    from dep2p.protocols.messaging.incoming import IncomingRequest
    from dep2p.protocols.services.options import ServiceOptions

Answerer = Callable[["IncomingRequest"], Awaitable[bytes]]

ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
_ERROR_TEXT_BYTES_MAX: Final = 800
_FAILED: Final = "the handler failed"  # the only text that a caller gets for an exception here
_TOPIC_ANSWER_S: Final = 30.0
"""Seconds for an answer to a topic: its messages do not say how long their author waits. 2 by default."""


class _AnswerNotTakenError(Dep2pError):
    """The author of a message to a topic did not take the answer."""


def reply(
    run: Invocation,
    name: Annotated[
        str | None,
        typer.Argument(help="The name under which requests are answered; left out with --topic.", metavar="[NAME]"),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            "--command", "-c", help="Run this shell command for each request: payload on stdin, answer on stdout."
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Answer with this file's content.")] = None,
    script: Annotated[
        str | None,
        typer.Option("--script", help="Call this Python function.", metavar="MODULE.py:function"),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Answer with the request's payload.")] = False,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many answers.", min=1)] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests at work at once.", min=1, max=1024)] = 8,
    topic: Annotated[
        str | None,
        typer.Option("--topic", help="Answer what asks the subscribers of this topic; then there is no NAME."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            help="Offer NAME to all members, and share it with programs of this group; with --topic one of the group "
            "answers each message.",
        ),
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="The version of the service.")] = None,
    schema: Annotated[str | None, typer.Option("--schema", help="The form of requests and answers.")] = None,
    realm: RealmOption = None,
) -> None:
    """Answer the requests that members send under a name, or to the subscribers of a topic."""
    if (name is None) == (topic is None):
        raise CliError("give either the NAME of requests or the --topic whose messages to answer", "D1001")
    answer = _answerer(program, file, script, echo)
    if name is None:
        assert topic is not None
        if version is not None or schema is not None:
            raise CliError("--version and --schema describe a service: --topic goes without them", "D1001")
        _reply_to_topic(run, topic, answer, count=count, concurrency=concurrency, group=group, realm=realm)
        return
    check_name(name)
    service: ServiceOptions = {}
    if group is not None:
        service["group"] = group
    elif version is not None or schema is not None:
        raise CliError("--version and --schema describe a service: give its --group, too", "D1001")
    if version is not None:
        service["version"] = version
    if schema is not None:
        service["schema"] = schema

    async def body(client: "Client") -> None:
        incoming = requests_of(client)
        await _serve(run, f"requests {name!r}", answer, count=count, concurrency=concurrency, incoming=incoming)

    def requests_of(client: "Client") -> "AbstractAsyncContextManager[AsyncIterator[IncomingRequest]]":
        return client.reply(name, realm=realm, concurrency=concurrency, **service)

    run.with_client(body)


def _reply_to_topic(
    run: Invocation,
    topic: str,
    answer: Answerer,
    *,
    count: int | None,
    concurrency: int,
    group: str | None,
    realm: str | None,
) -> None:
    async def body(client: "Client") -> None:
        incoming = _questions(run, client, topic, group, realm)
        await _serve(run, f"questions in {topic!r}", answer, count=count, concurrency=concurrency, incoming=incoming)

    run.with_client(body)


@asynccontextmanager
async def _questions(
    run: Invocation, client: "Client", topic: str, group: str | None, realm: str | None
) -> "AsyncGenerator[AsyncIterator[IncomingRequest], None]":
    """The messages of a topic whose authors wait for answers, as requests of them."""
    from dep2p.gossipsub.topic_types import TopicMessage

    async with client.subscribe(topic, group=group, realm=realm) as messages:

        async def questions() -> "AsyncGenerator[IncomingRequest, None]":
            async for message in messages:
                if isinstance(message, TopicMessage):
                    if message.wants_answer:
                        yield _as_request(message)
                elif message.count:  # a restart of the daemon counts nothing, and `run` reports it
                    run.warn(f"{message.count} messages were dropped unanswered: this command was too slow")

        yield questions()


def _as_request(message: "TopicMessage") -> "IncomingRequest":
    import anyio

    from dep2p.protocols.messaging.incoming import IncomingRequest, Request
    from dep2p.types import PeerId, RealmId

    async def respond(body: bytes, error: str | None) -> None:
        outcome = await (message.reply(body) if error is None else message.fail(error))
        if outcome != "taken":
            raise _AnswerNotTakenError(f"not taken by its author: {outcome}")

    deadline_s = anyio.current_time() + _TOPIC_ANSWER_S
    author = message.sender or PeerId("")
    request = Request(author, message.topic, message.body, dict(message.headers), deadline_s, False, RealmId(""))
    return IncomingRequest(request, respond)


def _answerer(program: str | None, file: Path | None, script: str | None, echo: bool) -> Answerer:
    if sum((program is not None, file is not None, script is not None, echo)) != 1:
        raise CliError("say how to answer: exactly one of --command, --file, --script and --echo", "D1001")
    if program is not None:
        return lambda request: _run_program(program, request)
    if script is not None:
        return _script_answerer(script)
    if file is not None:
        read_payload(None, file)  # a wrong path is an error now, not at the first request

        async def from_file(request: "IncomingRequest") -> bytes:
            return read_payload(None, file)  # read for each request: the file may change

        return from_file

    async def same(request: "IncomingRequest") -> bytes:
        return bytes(request.body)

    return same


async def _serve(
    run: Invocation,
    what: str,
    answer: Answerer,
    *,
    count: int | None,
    concurrency: int,
    incoming: "AbstractAsyncContextManager[AsyncIterator[IncomingRequest]]",
) -> None:
    import anyio

    answered = taken = 0
    slots = anyio.Semaphore(concurrency)

    async def one(request: "IncomingRequest") -> None:
        nonlocal answered
        try:
            outcome = await _answer_one(request, answer)
        finally:
            slots.release()
        answered += 1
        _report(run, request, answered, outcome)

    async with incoming as requests, anyio.create_task_group() as tasks:
        run.say(f"waiting for {what}; Ctrl-C ends")
        async for request in requests:
            await slots.acquire()
            tasks.start_soon(one, request)
            taken += 1
            if taken == count:
                break


async def _answer_one(request: "IncomingRequest", answer: Answerer) -> bytes | str:
    """Answer a request; return the answer that was sent, or the text of the failure."""
    try:
        data = await answer(request)
    except HandlerError as error:
        outcome: bytes | str = str(error)
    except Exception as error:
        # The caller learns only that it failed; this side sees the traceback.
        print_exception(error, file=sys.stderr)
        outcome = _FAILED
    else:
        outcome = data
    try:
        if isinstance(outcome, bytes):
            await request.respond(outcome)
        else:
            await request.fail(outcome)
    except Dep2pError as error:  # too late, or too large an answer
        if isinstance(error, MessageTooLargeError) and isinstance(outcome, bytes):
            text = f"the answer is too large for a message: {byte_count(len(outcome))}"
            with suppress(Dep2pError):
                await request.fail(text)
            return text
        return "too late: the caller no longer waits" if code_of(error) == "D5011" else str(error)
    return outcome


def _report(run: Invocation, request: "IncomingRequest", number: int, outcome: bytes | str) -> None:
    ok = isinstance(outcome, bytes)
    if run.json:
        fields: dict[str, object] = {"peer": str(request.peer), "name": str(request.name), "ok": ok}
        fields["request"] = payload(bytes(request.body))
        if isinstance(outcome, bytes):
            fields["answer"] = payload(outcome)
        else:
            fields["error"] = outcome
        run.emit(fields)
        return
    sent = f"answered {byte_count(len(outcome))}" if isinstance(outcome, bytes) else f"failed: {outcome}"
    run.say(f"[#{number}] {short_peer(str(request.peer))}  {byte_count(len(request.body))}  {sent}")


async def _run_program(program: str, request: "IncomingRequest") -> bytes:
    """Run a shell command; return its stdout. Raises HandlerError for a non-zero exit, with the end of its stderr."""
    import json
    import os

    import anyio

    variables = {
        "DEP2P_PEER": str(request.peer),
        "DEP2P_NAME": str(request.name),
        "DEP2P_HEADERS": json.dumps(request.headers or {}, default=str),
    }
    process = await anyio.open_process(
        ["/bin/sh", "-c", program], env=environment(os.environ, variables), start_new_session=True
    )
    try:
        with anyio.fail_after(max(0.001, request.deadline_s - anyio.current_time())):
            out, err = await _talk(process, bytes(request.body))
            code = await process.wait()
    except TimeoutError:
        raise HandlerError("the command did not finish before the deadline") from None
    finally:
        await _end(process)
    if code:
        text = err[-_ERROR_TEXT_BYTES_MAX:].decode("utf-8", "replace").strip()
        raise HandlerError(f"the command ended with status {code}" + (f": {text}" if text else ""))
    return out


async def _talk(process: "Process", data: bytes) -> tuple[bytes, bytes]:
    """Feed stdin and read both outputs at once, so that neither side waits for the other."""
    import anyio

    stdin, out, err = process.stdin, process.stdout, process.stderr
    assert stdin is not None and out is not None and err is not None
    parts: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}

    async def feed() -> None:
        try:
            async with stdin:
                await stdin.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            return  # the command need not read its input

    async def read(pipe: "ByteReceiveStream", into: str, most: int) -> None:
        async for chunk in pipe:
            parts[into] += chunk
            if into == "err":
                del parts["err"][:-most]
            elif len(parts["out"]) > most:
                raise HandlerError(f"the command's answer is over {byte_count(most)}")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed)
            tasks.start_soon(read, out, "out", ANSWER_BYTES_MAX)
            tasks.start_soon(read, err, "err", _ERROR_TEXT_BYTES_MAX)
    except* HandlerError as group:
        raise group.exceptions[0] from None
    return bytes(parts["out"]), bytes(parts["err"])


async def _end(process: "Process") -> None:
    """Kill the command and its children, if they still run, and wait for it."""
    import os
    import signal

    import anyio

    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        await process.wait()
        await process.aclose()


def _script_answerer(text: str) -> Answerer:
    path_text, colon, function_name = text.rpartition(":")
    if not colon or not path_text or not function_name:
        raise CliError(f"--script {text!r} is not MODULE.py:function", "D1001")
    function = _load(Path(path_text), function_name)

    async def call(request: "IncomingRequest") -> bytes:
        import anyio.to_thread

        try:
            if inspect.iscoroutinefunction(function):
                result = await function(request)
            else:
                result = await anyio.to_thread.run_sync(function, request)
        except HandlerError:
            raise
        except Exception as error:
            print_exception(type(error), error, _from_file(error.__traceback__, path_text), file=sys.stderr)
            raise HandlerError(_FAILED) from None
        if isinstance(result, str):
            return result.encode("utf-8")
        if isinstance(result, bytes | bytearray):
            return bytes(result)
        print(f"{function_name} returned {type(result).__name__}, not bytes or str", file=sys.stderr, flush=True)
        raise HandlerError(_FAILED)

    return call


def _from_file(trace: TracebackType | None, path: str) -> TracebackType | None:
    """Return the part of a traceback that begins in the script: our own frames do not help its author."""
    while trace is not None and trace.tb_frame.f_code.co_filename != os.path.abspath(path):
        trace = trace.tb_next
    return trace


def _load(path: Path, function_name: str) -> Callable[..., object]:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        if not path.exists():
            raise CliError(f"cannot load {path}: there is no such file", "D6006", exit_code=EXIT_NOT_FOUND)
        raise CliError(f"cannot load {path}: it is no Python file", "D6006")
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickling in the script look there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CliError(f"{path} fails when it is loaded: {type(error).__name__}: {error}", "D6006") from error
    function: object = getattr(module, function_name, None)
    if not callable(function):
        raise CliError(f"{path} has no function {function_name!r}", "D1001")
    return function


def register(app: typer.Typer) -> None:
    """Add ``reply``."""
    command(
        app,
        "reply",
        waits=True,
        examples=[
            ('dep2p reply greet --command \'printf "hello %s" "$(cat)"\'', "a shell command per request"),
            ("dep2p reply config --file settings.json", "always the file's present content"),
            ("dep2p reply resize --script images.py:resize", "a Python function"),
            ("dep2p reply ping --echo --count 1", "one answer, then the command ends"),
            ("dep2p reply --topic inventory --script stock.py:count", "what `request --topic inventory` asks"),
        ],
        notes="""
        A command gets the payload on its standard input and finds DEP2P_PEER, DEP2P_NAME and DEP2P_HEADERS (JSON) in
        its environment. When it ends with another status than 0 the caller gets HANDLER_FAILED with the end of its
        standard error; when the request's deadline passes it is killed.

        A function is called with one argument that has body (bytes), peer, name and headers, and returns bytes or str;
        it may be async. The text of a dep2p.errors.HandlerError reaches the caller, that of other exceptions does not.
        """,
    )(reply)
