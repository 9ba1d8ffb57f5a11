"""``dep2p stream send``: files to a peer, resumed where an earlier attempt stopped, verified at the end."""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar, TypeVarTuple

import typer

from dep2p.cli.commands.stream import receive
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError, describe, show
from dep2p.cli.framework.payloads import RealmOption
from dep2p.cli.framework.progress import Progress
from dep2p.cli.framework.render import byte_count, duration, short_peer
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.concurrency.exception_groups import first_error
from dep2p.error_codes import EXIT_OK, EXIT_REFUSED, EXIT_TIMEOUT
from dep2p.errors import NoHandlerError, StreamClosedError
from dep2p.outside_text import printable
from dep2p.types import PeerId

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

if TYPE_CHECKING:
    from dep2p.cli.commands.stream.partial_file import SourceFile
    from dep2p.client import Client, ClientStream
    from dep2p.protocols.messaging.file_transfer import FileOffer, FileOfferAnswer, FileSender, FileVerdict

_END_S: Final = 5.0
_HASH_BYTES_PER_S_MIN: Final = 20_000_000
_IN_FLIGHT_BYTES: Final = 2_097_152
"""Bytes that the daemon and the transport hold at most when the last one was given to them,"""
_FLIGHT_BYTES_PER_S_MIN: Final = 4_096
"""and the slowest rate at which they arrive."""
"""A slow disk's rate, in bytes per second: it bounds how long the other side reads back its earlier bytes."""


@dataclass(frozen=True, slots=True)
class FileDestination:
    """The peer that files go to.

    ``name``: the stream's. ``timeout_s``: seconds without progress until an attempt ends. ``realm``: None for the
    daemon's only one.
    """

    client: "Client"
    peer: PeerId
    name: str
    timeout_s: float
    realm: str | None


@dataclass(frozen=True, slots=True)
class SentFile:
    """The outcome of one file. ``started_at`` is the offset from which it was sent."""

    path: Path
    size: int
    sha256: str
    started_at: int
    seconds: float

    def json(self, peer: str) -> dict[str, object]:
        """The JSON object of a finished file."""
        return {
            "file": str(self.path),
            "name": self.path.name,
            "peer": peer,
            "ok": True,
            "size_bytes": self.size,
            "sha256": self.sha256,
            "started_at_bytes": self.started_at,
            "seconds": round(self.seconds, 3),
            "bytes_per_s": round((self.size - self.started_at) / max(self.seconds, 1e-6)),
        }

    def text(self) -> str:
        """The human-readable line."""
        rate = byte_count((self.size - self.started_at) / max(self.seconds, 1e-6))
        line = (
            f"{self.sha256}  {printable(self.path.name)}  {byte_count(self.size)} in {duration(self.seconds)}, {rate}/s"
        )
        return line + (f", resumed at {byte_count(self.started_at)}" if self.started_at else "")


def send(
    run: Invocation,
    peer_text: Annotated[str, typer.Argument(help="Peer id, or an abbreviation of a known one.", metavar="PEER")],
    files: Annotated[list[Path], typer.Argument(help="The files to send.", metavar="FILE...")],
    name: Annotated[
        str | None, typer.Option("--name", help="Stream name, when the receiver uses another than the default.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", "-t", help="Give up after so many seconds without progress.", min=0.1)
    ] = 60.0,
    realm: RealmOption = None,
) -> int:
    """Send files to a peer that runs `dep2p stream receive`."""
    from dep2p.protocols.messaging.file_transfer import PROTOCOL_NAME, check_file_name

    for path in files:
        try:
            check_file_name(path.name)
        except ValueError as error:
            raise CliError(f"{path}: {error}", "D1001", tries=("rename or copy the file first",)) from None

    async def body(client: "Client") -> int:
        peer = await resolve_peer(client, peer_text)
        destination = FileDestination(client, peer, name or PROTOCOL_NAME, timeout, realm)
        worst = EXIT_OK
        for path in files:
            try:
                sent = await send_file(run, destination, path)
            except Exception as error:
                if len(files) == 1:
                    raise
                failure = describe(error)
                show(failure, json=run.json)
                worst = worst or failure.exit_code
                continue
            if run.json:
                run.emit(sent.json(peer))
            else:
                run.print(sent.text())
        return worst

    return run.with_client(body)


async def send_file(run: Invocation, destination: FileDestination, path: Path) -> SentFile:
    """Send one file. Raises :class:`CliError` and what the client raises."""
    from dep2p.cli.commands.stream.partial_file import SourceFile
    from dep2p.protocols.messaging.file_transfer import FileOffer, FileVerdict, FileVerdictCode

    source = SourceFile(path)
    try:
        offer = FileOffer(path.name, source.size, source.mtime_ns)
        outcome = await _attempt(run, destination, source, offer)
        if isinstance(outcome, FileVerdict) and outcome.code is FileVerdictCode.EXISTS:
            # It may be this same file, from a transfer whose end we did not see: send the digest and ask again.
            digest = await _in_thread(source.seek_hashed, source.size)
            offer = FileOffer(path.name, source.size, source.mtime_ns, digest)
            outcome = await _attempt(run, destination, source, offer)
        if isinstance(outcome, FileVerdict):
            raise _refusal(path, destination.peer, outcome)
        return outcome
    finally:
        source.close()


async def _attempt(
    run: Invocation, destination: FileDestination, source: "SourceFile", offer: "FileOffer"
) -> "SentFile | FileVerdict":
    from dep2p.protocols.messaging.file_transfer import PROTOCOL_NAME, FileSender

    progress = Progress(printable(offer.name), offer.size, shown=not run.quiet and not run.json)
    sending = _Sending(source, FileSender(offer), destination.timeout_s, progress)
    name = destination.name
    try:
        async with destination.client.stream(destination.peer, name, realm=destination.realm) as stream:
            return await sending.run(stream)
    except NoHandlerError:
        receiving = "dep2p stream receive DIR" + ("" if name == PROTOCOL_NAME else f" --name {shlex.quote(name)}")
        raise CliError(
            f"{short_peer(destination.peer)} does not receive files now"
            + ("" if name == PROTOCOL_NAME else f" under the name {name!r}"),
            "D5003",
            tries=(f"start this on the peer: {receiving}",),
        ) from None
    except (StreamClosedError, TimeoutError) as error:
        what = "made no progress" if isinstance(error, TimeoutError) else "ended before it was confirmed"
        raise CliError(
            f"sending {offer.name} {what} (after {byte_count(sending.sent_up_to)} of {byte_count(offer.size)})",
            "D6001",
            exit_code=EXIT_TIMEOUT,
            cause=str(error) or f"nothing moved for {destination.timeout_s:g} s",
            tries=("the same command again: it goes on where it stopped",),
        ) from None
    finally:
        progress.clear()


class _Sending:
    """One attempt to send one file over one stream."""

    def __init__(self, source: "SourceFile", core: "FileSender", timeout_s: float, progress: Progress) -> None:
        self._source = source
        self._core = core
        self._timeout_s = timeout_s
        self._progress = progress
        self._early: FileVerdict | None = None
        self.sent_up_to = 0

    async def run(self, stream: "ClientStream") -> "SentFile | FileVerdict":
        """Run the whole exchange. Raises TimeoutError, StreamClosedError, CliError, ProtocolError."""
        import anyio

        from dep2p.protocols.messaging.file_transfer import FileVerdict

        started_s = time.monotonic()
        offer = self._core.offer
        await stream.send(self._core.first_item())
        answer = await self._next(stream)
        if isinstance(answer, FileVerdict):
            return answer
        mine = await _in_thread(self._source.seek_hashed, answer.offset)
        start = answer.offset if mine == answer.sha256 else 0
        if start != answer.offset:
            await _in_thread(self._source.seek_hashed, 0)
        self.sent_up_to = start
        self._progress.restart(start)
        await stream.send(self._core.start_item(start))
        verdict = await self._send_data(stream)
        if not verdict.ok:
            return verdict
        with anyio.move_on_after(_END_S):
            async for _ in stream:
                pass  # the receiver's end, so that leaving the block is no abort
        digest = self._source.digest()
        if verdict.sha256 != digest:
            raise CliError(f"{offer.name}: the receiver confirmed another checksum than was sent", "D6007")
        return SentFile(self._source.path, offer.size, digest.hex(), start, time.monotonic() - started_s)

    async def _send_data(self, stream: "ClientStream") -> "FileVerdict":
        """Send the data and then END, while listening for a refusal; return the verdict."""
        import anyio

        verdicts: list[FileVerdict] = []
        try:
            async with anyio.create_task_group() as tasks:

                async def listen() -> None:
                    verdicts.append(await self._verdict(stream))
                    tasks.cancel_scope.cancel()

                tasks.start_soon(listen)
                async with anyio.create_task_group() as watched:
                    watched.start_soon(self._watch, stream)
                    await self._send_all(stream)
                    watched.cancel_scope.cancel()
                hash_s = self._core.offer.size / _HASH_BYTES_PER_S_MIN
                await anyio.sleep(self._timeout_s + hash_s + _IN_FLIGHT_BYTES / _FLIGHT_BYTES_PER_S_MIN)
                raise TimeoutError("the receiver did not confirm")
        except ExceptionGroup as group:
            raise first_error(group) from None
        return verdicts[0]

    async def _watch(self, stream: "ClientStream") -> None:
        """Raise TimeoutError when the daemon takes nothing for ``timeout_s``."""
        import anyio

        while True:
            seen = stream.sent_bytes
            await anyio.sleep(self._timeout_s)
            if stream.sent_bytes == seen:
                raise TimeoutError

    async def _send_all(self, stream: "ClientStream") -> None:
        left: int = self._core.offer.size - self.sent_up_to
        while left:
            batch: list[bytes] = await _in_thread(self._source.read_batch, left)
            for data in batch:
                await stream.send(self._core.data_item(data))
            count: int = sum(map(len, batch))
            left -= count
            self.sent_up_to += count
            self._progress.add(count)
        await _in_thread(self._source.check_unchanged)
        await stream.send(self._core.end_item(self._source.digest()))
        await stream.send_eof()

    async def _verdict(self, stream: "ClientStream") -> "FileVerdict":
        from dep2p.errors import ProtocolError
        from dep2p.protocols.messaging.file_transfer import FileVerdict

        async for item in stream:
            event = self._core.on_item(item)
            if isinstance(event, FileVerdict):
                return event
            raise ProtocolError("file transfer: a second answer")
        raise StreamClosedError("the receiver ended the stream")

    async def _next(self, stream: "ClientStream") -> "FileOfferAnswer | FileVerdict":
        import anyio

        with anyio.fail_after(self._timeout_s + self._core.offer.size / _HASH_BYTES_PER_S_MIN):
            async for item in stream:
                return self._core.on_item(item)
        raise StreamClosedError("the receiver ended the stream before it answered")


async def _in_thread(function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    import anyio.to_thread

    return await anyio.to_thread.run_sync(function, *arguments)


def _refusal(path: Path, peer: str, verdict: "FileVerdict") -> CliError:
    from dep2p.protocols.messaging.file_transfer import FileVerdictCode

    tries: tuple[str, ...]
    code = "D6009"
    if verdict.code is FileVerdictCode.CHECKSUM:
        code, tries = "D6007", ("send it again",)
    elif verdict.code is FileVerdictCode.NO_SPACE:
        tries = ("the same command again when there is room: it goes on where it stopped",)
    elif verdict.code is FileVerdictCode.EXISTS:
        tries = ("rename the file", "the receiver may use --force")
    elif verdict.code is FileVerdictCode.BUSY:
        tries = ("wait for the other transfer to end",)
    else:
        tries = ("look at what the receiver printed",)
    return CliError(
        f"{short_peer(peer)} did not take {path.name}",
        code,
        exit_code=None if code == "D6007" else EXIT_REFUSED,
        cause=printable(verdict.text) or verdict.code.value,
        tries=tries,
    )


def register(app: typer.Typer) -> None:
    """Add the group ``stream``."""
    sub = group(app, "stream", "Send and receive files of any size.")
    command(
        sub,
        "send",
        examples=[
            ("dep2p stream send f3Qa video.mkv", "prints the SHA-256 when the receiver has verified and stored it"),
            ("dep2p stream send f3Qa *.csv --json", "one JSON object per file"),
        ],
        notes="When a transfer is cut off, by either side, run the same command again: the receiver keeps what "
        "arrived, both sides compare the checksum of that part, and only the rest is sent.",
    )(send)
    receive.register(sub)
