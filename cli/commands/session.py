"""``dep2p session``: serve, open and describe ordered sessions."""

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.commands.publish import stdin_lines
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import RealmOption, check_name, show_payload
from dep2p.cli.framework.render import payload, short_peer, table
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.control_api.errors import DaemonUnreachableError
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from dep2p.client import Client
    from dep2p.client.sessions.served import ClientServedSession
    from dep2p.client.sessions.sessions import ClientOpenSession
    from dep2p.protocols.sessions.wire import Push

_PAUSE_AWAY_S = 0.2
PeerArgument = Annotated[str, typer.Argument(help="A member's peer id, or the end of it.", metavar="PEER")]
NameArgument = Annotated[str, typer.Argument(help="The name of the sessions.", metavar="NAME")]


def open_(
    run: Invocation,
    peer: PeerArgument,
    name: NameArgument,
    data: Annotated[str, typer.Argument(help="Data for the server at opening.", metavar="[BODY]")] = "",
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Keep the place here after each push, and go on from it.", metavar="FILE"),
    ] = None,
    ask: Annotated[str | None, typer.Option("--ask", help="Ask the server this first.", metavar="TEXT")] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many.", min=1)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the pushes' bytes and nothing else.")] = False,
    nul: Annotated[bool, typer.Option("-0", "--null", help="End each push with a NUL byte.")] = False,
    realm: RealmOption = None,
) -> None:
    """Open a session with a member and print its pushes in order."""
    if raw and nul:
        raise CliError("--raw and -0 exclude each other", "D1001")
    check_name(name)
    token = _read_token(token_file)

    async def body(client: "Client") -> None:
        server = await resolve_peer(client, peer)
        opening = client.sessions.open(server, name, os.fsencode(data), token=token, realm=realm)
        async with opening as session:
            run.say(f"{'resumed' if token else 'opened'} session {session.id}; Ctrl-C ends")
            try:
                if ask is not None:
                    show_payload(run, await session.request(os.fsencode(ask)), raw=raw, nul=nul)
                await _print_pushes(run, session, count, token_file, raw=raw, nul=nul)
            finally:
                await _leave(session, keep=token_file is not None)

    run.with_client(body)


async def _leave(session: "ClientOpenSession", *, keep: bool) -> None:
    """Leave the session, also when this command is interrupted."""
    from anyio import CancelScope

    from dep2p.errors import Dep2pError

    with CancelScope(shield=True), contextlib.suppress(Dep2pError):  # the session, or the daemon, may be gone
        await (session.detach() if keep else session.aclose())


async def _print_pushes(
    run: Invocation, session: "ClientOpenSession", count: int | None, token_file: Path | None, *, raw: bool, nul: bool
) -> None:
    seen = 0
    async with aclosing(_pushes(run, session)) as pushes:
        async for push in pushes:
            if run.json:
                bound = {"request_id": push.request_id, "place": push.place} if push.request_id else {}
                run.emit({"seq": push.seq, **payload(push.body), **bound})
            else:
                show_payload(run, push.body, raw=raw, nul=nul)
            if token_file is not None:
                _write_token(token_file, session.token_behind(push.seq))
            seen += 1
            if seen == count:
                return
    if token_file is not None:
        _forget_token(token_file)


async def _pushes(run: Invocation, session: "ClientOpenSession") -> "AsyncGenerator[Push, None]":
    """Yield the pushes; report gaps between them and go on."""
    from dep2p.errors import SessionGapError, SessionResetError

    while True:
        try:
            yield await anext(session)
        except StopAsyncIteration:
            return
        except (SessionGapError, SessionResetError) as error:
            kind = "gap" if isinstance(error, SessionGapError) else "reset"
            if run.json:
                run.emit({kind: str(error)})
            else:
                run.warn(f"{kind}: {error}")


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}", "D6006") from None


def _write_token(path: Path, token: str) -> None:
    """Write the token, so that a crash leaves the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(token + "\n")
        part.replace(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", "D6006") from None


def _forget_token(path: Path) -> None:
    """Remove the token of a session that has ended."""
    with contextlib.suppress(OSError):
        path.unlink()


def serve(
    run: Invocation,
    name: NameArgument,
    clients: Annotated[
        int, typer.Option("--clients", help="Wait for so many sessions before the first line.", min=0)
    ] = 1,
    answer: Annotated[
        str | None, typer.Option("--answer", help="Answer each request of a client with this.", metavar="TEXT")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Go on serving when the input has ended.")] = False,
    realm: RealmOption = None,
) -> None:
    """Push each line of standard input to every client of a name, in order."""
    check_name(name)

    async def body(client: "Client") -> None:
        from anyio import create_task_group

        async with client.sessions.accept(name, realm=realm) as sessions, create_task_group() as tasks:
            run.say(f"serving sessions {name!r}; Ctrl-C ends")
            server = _Server(run, client, name, answer, tasks)
            server.clients = clients
            tasks.start_soon(server.watch, sessions)
            await server.wait_for_clients()
            async with aclosing(stdin_lines()) as lines:
                async for line in lines:
                    await server.push(line)
            if stay:
                await server.wait_for(1 << 60)
            await server.end_all()
            tasks.cancel_scope.cancel()

    run.with_client(body)


class _Server:
    """The sessions that this command serves."""

    def __init__(self, run: Invocation, client: "Client", name: str, answer: str | None, tasks: "TaskGroup") -> None:
        import anyio

        self._run = run
        self._client = client
        self._name = name
        self._answer = None if answer is None else os.fsencode(answer)
        self._tasks = tasks
        self._live: dict[str, ClientServedSession] = {}
        self._changed = anyio.Event()
        self.clients = 1
        """Sessions to wait for before the first line."""
        self.pushed = 0

    async def watch(self, sessions: "AsyncIterator[ClientServedSession]") -> None:
        """Follow the sessions."""
        async for session in sessions:
            self._live[session.id] = session
            opened = f"session {session.id} of {short_peer(str(session.peer))}"
            self._report("opened", session, opened, session.body)
            self._change()
            self._tasks.start_soon(self._follow, session)

    async def _follow(self, session: "ClientServedSession") -> None:
        """Answer the requests of one session until it is over."""
        async for request in session:
            if self._answer is not None:
                await _ignoring_the_end(partial(request.respond, self._answer))
            else:
                await _ignoring_the_end(partial(request.fail, "this server answers no requests"))
            asked = f"request {request.request_id} of session {session.id}"
            self._report("request", session, asked, request.body)
        self._live.pop(session.id, None)
        self._report("closed", session, f"session {session.id} is over: {printable(session.close_reason or '')}")
        self._change()

    def _change(self) -> None:
        import anyio

        self._changed.set()
        self._changed = anyio.Event()

    def _report(self, event: str, session: "ClientServedSession", text: str, body: bytes = b"") -> None:
        if self._run.json:
            reason = session.close_reason or ""
            fields = {"event": event, "session": session.id, "peer": str(session.peer), "reason": reason}
            self._run.emit(fields | (payload(body) if body else {}))
        else:
            self._run.say(text)

    async def wait_for_clients(self) -> None:
        """Wait until as many sessions are open as the command line says."""
        await self.wait_for(self.clients)

    async def wait_for(self, count: int) -> None:
        """Wait until so many sessions are open."""
        while len(self._live) < count:
            await self._changed.wait()

    async def push(self, data: bytes) -> None:
        """Push to every session. Waits for one that is full, so that its order holds, and for a daemon that is away."""
        while True:
            try:
                _pushed, full = await self._client.sessions.push_all(self._name, data)
                break
            except DaemonUnreachableError:  # its sessions have ended; with --no-reconnect `watch` raises it
                await _pause()
                await self.wait_for_clients()
        self.pushed += 1
        for session in [self._live[each] for each in full if each in self._live]:
            await _ignoring_the_end(partial(session.push, data))

    async def end_all(self) -> None:
        """End each session in order, and wait until its client has everything."""
        while self._live:
            for session in list(self._live.values()):
                await _ignoring_the_end(session.end)
            if self._live:
                await self._changed.wait()
        self._run.say(f"pushed {self.pushed} lines")


async def _pause() -> None:
    from anyio import sleep

    await sleep(_PAUSE_AWAY_S)


async def _ignoring_the_end(call: Callable[[], Awaitable[object]]) -> None:
    """Ignore the error of a session that is over by now, or gone with its daemon."""
    from dep2p.errors import AlreadyRespondedError, SessionClosedError, SessionNotFoundError

    ends = (SessionClosedError, SessionNotFoundError, AlreadyRespondedError, DaemonUnreachableError)
    with contextlib.suppress(*ends):
        await call()


def _rows(sessions: list[dict[str, object]]) -> list[list[str]]:
    return [
        [
            str(each["session_id"])[:12],
            printable(str(each["name"])),
            str(each["role"]),
            short_peer(str(each["peer"])),
            "over" if each["is_over"] else "connected" if each["is_attached"] else "away",
            str(each["last_seq"] if each["role"] == "server" else each["received_seq"]),
            str(each["last_acked_seq"] if each["role"] == "server" else each["handled_seq"]),
            str(each["resumes"]),
        ]
        for each in sessions
    ]


def list_sessions(
    run: Invocation,
    everything: Annotated[bool, typer.Option("--all", help="Those that were over lately, too.")] = False,
) -> None:
    """List the ordered sessions of this node, served and opened."""
    found = run.with_client(lambda client: client.sessions.stats())
    sessions = [each for each in found if everything or not each["is_over"]]
    if run.json:
        run.emit({"sessions": sessions})
    elif not sessions:
        run.say("no sessions; `dep2p session open PEER NAME` opens one")
    else:
        head = ["ID", "NAME", "ROLE", "PEER", "STATE", "PUSHED", "HANDLED", "RESUMES"]
        run.print(table(head, _rows(sessions), right=[5, 6, 7]))


def stats(
    run: Invocation,
    session: Annotated[
        str | None, typer.Argument(help="The id, or its start; all when left out.", metavar="[ID]")
    ] = None,
) -> None:
    """Show everything that is known of sessions: numbers, windows, retransmissions, resumes."""
    found = run.with_client(lambda client: client.sessions.stats())
    sessions = [each for each in found if session is None or str(each["session_id"]).startswith(session)]
    if session is not None and not sessions:
        raise CliError(f"there is no session {session!r}", "D5105")
    if run.json:
        run.emit({"sessions": sessions})
        return
    for index, each in enumerate(sessions):
        if index:
            run.print("")
        run.print("\n".join(f"{name.replace('_', ' '):22} {printable(str(value))}" for name, value in each.items()))
    if not sessions:
        run.say("no sessions")


def register(app: typer.Typer) -> None:
    """Add the ``session`` group."""
    session = group(app, "session", "Ordered sessions: pushes in strict order, across reconnects and restarts.")
    command(
        session,
        "serve",
        waits=True,
        examples=[
            ("tail -f prices.log | dep2p session serve prices", "each line to every client, in order"),
            ("dep2p session serve jobs --clients 3 < jobs.txt", "starts when three clients are there"),
            ("dep2p session serve clock --stay --answer ok < /dev/null", "answers requests until Ctrl-C"),
        ],
        notes="A client that is away gets what it missed when it comes back, within 5 minutes. A client that does not "
        "take its pushes holds this command back after 4096 of them. When the input ends, every client gets what is "
        "under way and then the end. When this command or its daemon dies, its sessions end with an error. Behind a "
        "restart of the daemon, the command waits for as many clients as at its start before it goes on.",
    )(serve)
    command(
        session,
        "open",
        waits=True,
        examples=[
            ("dep2p session open bob prices", "each push on a line of its own"),
            ("dep2p session open bob prices --token-file prices.token", "goes on where it was, after a restart too"),
            ("dep2p session open bob prices --json | jq -r .text", "one JSON object per line"),
            ("dep2p session open bob clock --ask now --count 1", "asks, then waits for one push"),
        ],
        notes="Connections that are lost are found again; nothing is missed and nothing comes twice. With --token-file "
        "the place is written after each push that was printed: after a kill -9 at most the push that was being "
        "printed comes again. Where the server has lost the session, the command says so (`reset`) and goes on.",
    )(open_)
    command(session, "ls", examples=[("dep2p session ls --all", "with those that were over lately")])(list_sessions)
    command(session, "stats", examples=[("dep2p session stats 4f1a", "one session, by the start of its id")])(stats)
