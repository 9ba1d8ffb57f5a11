"""``dep2p stream receive``: files from members into a directory."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar, TypeVarTuple

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import RealmOption
from dep2p.cli.framework.progress import Progress
from dep2p.cli.framework.quantities import parse_bytes
from dep2p.cli.framework.render import byte_count, duration, short_peer
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.errors import Dep2pError, StreamClosedError
from dep2p.outside_text import printable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

if TYPE_CHECKING:
    from dep2p.cli.commands.stream.partial_file import PartialFile
    from dep2p.client import Client, ClientStream
    from dep2p.protocols.messaging.file_transfer import FileOffer, FileReceiver, FileVerdict

TRANSFERS_MAX: Final = 16
_END_S: Final = 5.0
TRANSFERS_PER_PEER_MAX: Final = 4
_OFFER_S: Final = 30.0
_IDLE_S: Final = 120.0
"""A sender that sends nothing for so long is given up. Before START it has to read back its earlier bytes."""
_HASH_BYTES_PER_S_MIN: Final = 20_000_000


def receive(
    run: Invocation,
    directory: Annotated[Path, typer.Argument(help="Where files are put; made when it does not exist.", metavar="DIR")],
    name: Annotated[
        str | None, typer.Option("--name", help="Stream name, when the sender uses another than the default.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End after one file.")] = False,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many files.", min=1)] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of the same name.")] = False,
    sender: Annotated[str | None, typer.Option("--from", help="Take files of this peer only.", metavar="PEER")] = None,
    max_size: Annotated[
        str, typer.Option("--max-size", help="Refuse files that are larger, like 500M.", metavar="SIZE")
    ] = "64G",
    keep_free: Annotated[
        str, typer.Option("--keep-free", help="Take nothing more when so little is left on the disk.", metavar="SIZE")
    ] = "256M",
    realm: RealmOption = None,
) -> None:
    """Receive the files that members send, each verified by its SHA-256."""
    from dep2p.protocols.messaging.file_transfer import PROTOCOL_NAME

    if once and count is not None:
        raise CliError("--once and --count exclude each other", "D1001")
    wanted = 1 if once else count
    bounds = ReceiveBounds(parse_bytes(max_size, "--max-size"), parse_bytes(keep_free, "--keep-free"))
    _prepare(run, directory)

    async def body(client: "Client") -> None:
        import anyio

        only = None if sender is None else await resolve_peer(client, sender)
        inbox = Inbox(run, directory, force=force, only=only, wanted=wanted, bounds=bounds)
        async with client.accept(name or PROTOCOL_NAME, realm=realm) as streams, anyio.create_task_group() as tasks:
            run.say(f"waiting for files into {directory}; Ctrl-C ends")

            async def one(stream: "ClientStream") -> None:
                await inbox.take(stream)
                if inbox.complete:
                    tasks.cancel_scope.cancel()

            async for stream in streams:
                tasks.start_soon(one, stream)  # the daemon bounds how many of them there are

    run.with_client(body)


def _prepare(run: Invocation, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot make {directory}: {error.strerror}", "D6006") from None
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise CliError(f"{directory} is not a directory that can be written", "D6006")
    for peer, file_name, have, size in unfinished(directory):
        share = have / size if size else 1.0
        run.say(f"unfinished: {printable(file_name)} from {short_peer(peer)}, {share:.0%} of {byte_count(size)}")


def unfinished(directory: Path) -> list[tuple[str, str, int, int]]:
    """List the transfers that can be resumed there: (peer, name, bytes held, bytes in all)."""
    found: list[tuple[str, str, int, int]] = []
    for state in sorted(directory.glob(".dep2p-*.json")):
        try:
            fields = json.loads(state.read_text("utf-8"))
            have = (directory / str(fields["part"])).stat().st_size
            found.append((str(fields["peer"]), str(fields["name"]), have, int(fields["size_bytes"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # a state without its part, or a foreign file: nothing to resume
    return found


@dataclass(frozen=True, slots=True)
class ReceiveBounds:
    """How much a receiver takes. Members choose what they send, so that one could fill the disk."""

    file_bytes_max: int = 64 << 30
    free_bytes_min: int = 256 << 20
    """Bytes that stay free on the disk, for other programs that write there."""


class Inbox:
    """Takes transfers into one directory."""

    def __init__(
        self,
        run: Invocation,
        directory: Path,
        *,
        force: bool,
        only: str | None,
        wanted: int | None,
        bounds: ReceiveBounds | None = None,
    ) -> None:
        import anyio

        self._run = run
        self._directory = directory
        self._force = force
        self._only = only
        self._wanted = wanted
        self._bounds = bounds or ReceiveBounds()
        self._done = 0
        self._running: Counter[str] = Counter()
        self._slots = anyio.Semaphore(TRANSFERS_MAX)

    @property
    def complete(self) -> bool:
        """Whether as many files as wanted are there."""
        return self._wanted is not None and self._done >= self._wanted

    async def take(self, stream: "ClientStream") -> None:
        """Receive one file. Its errors are reported, and end only this transfer."""
        from dep2p.cli.commands.stream.partial_file import Declined
        from dep2p.protocols.messaging.file_transfer import FileReceiver, FileVerdict, FileVerdictCode

        peer = str(stream.peer)
        core = FileReceiver()
        self._running[peer] += 1
        try:
            try:
                # Both checks come before the slot: a refused peer must not keep slots from others.
                if self._only is not None and peer != self._only:
                    raise Declined(FileVerdictCode.REFUSED, "files of this peer are not taken here")
                if self._running[peer] > TRANSFERS_PER_PEER_MAX:
                    raise Declined(
                        FileVerdictCode.BUSY, f"{TRANSFERS_PER_PEER_MAX} of your transfers are running already"
                    )
                async with self._slots:
                    await self._receive(stream, core, peer)
            except Declined as reason:
                asks_again = (
                    reason.code is FileVerdictCode.EXISTS and core.offer is not None and core.offer.sha256 is None
                )
                if not asks_again:  # a sender without checksum asks again with it, since this may be the same file
                    self._report(peer, core.offer, reason.code.value, str(reason))
                await _conclude(stream, core, FileVerdict(reason.code, str(reason)))
            except OSError as error:
                text = f"cannot write: {error.strerror or error}"
                self._report(peer, core.offer, FileVerdictCode.FAILED.value, text)
                await _conclude(stream, core, FileVerdict(FileVerdictCode.FAILED, text))
        except Dep2pError as error:
            interrupted = isinstance(error, StreamClosedError)
            self._report(peer, core.offer, "interrupted" if interrupted else "failed", str(error))
        finally:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
            with suppress(Dep2pError):
                await stream.aclose()

    async def _receive(self, stream: "ClientStream", core: "FileReceiver", peer: str) -> None:
        from dep2p.cli.commands.stream.partial_file import Declined, already_there
        from dep2p.protocols.messaging.file_transfer import FileOffer, FileVerdictCode

        offer = core.on_item(await _next(stream, _OFFER_S))
        assert isinstance(offer, FileOffer)  # the core accepts only an offer first
        if not self._force and await _in_thread(already_there, self._directory, offer):
            await self._confirm_present(stream, core, peer, offer)
            return
        if offer.size > self._bounds.file_bytes_max:
            raise Declined(
                FileVerdictCode.REFUSED,
                f"{byte_count(offer.size)} are over the limit of {byte_count(self._bounds.file_bytes_max)}",
            )
        started_s = time.monotonic()
        partial = await _in_thread(_open, self._directory, peer, offer, self._force, self._bounds.free_bytes_min)
        try:
            started_at = await self._fill(stream, core, offer, partial)
            await _finish(stream, core, partial, force=self._force)
        finally:
            partial.close()
        self._done_with(peer, offer, partial.digest().hex(), started_at, time.monotonic() - started_s)

    async def _fill(
        self, stream: "ClientStream", core: "FileReceiver", offer: "FileOffer", partial: "PartialFile"
    ) -> int:
        """Receive everything from ANSWER to END; return the offset at which the data began. Raises Declined for a wrong
        checksum."""
        from dep2p.cli.commands.stream.partial_file import BATCH_ITEMS, Declined
        from dep2p.protocols.messaging.file_transfer import FileData, FileEnd, FileStart, FileVerdictCode

        await stream.send(core.answer_item(partial.received, partial.digest()))
        progress = Progress(printable(offer.name), offer.size, shown=not self._run.quiet and not self._run.json)
        started_at = 0
        idle_s = _IDLE_S + offer.size / _HASH_BYTES_PER_S_MIN
        batch: list[bytes] = []
        try:
            while True:
                try:
                    event = core.on_item(await _next(stream, idle_s))
                except Dep2pError:
                    await _in_thread(partial.write, batch)  # keep the bytes that came before the interruption
                    raise
                if isinstance(event, FileData):
                    batch.append(event.data)
                if batch and (len(batch) >= BATCH_ITEMS or isinstance(event, FileEnd)):
                    await _in_thread(partial.write, batch)
                    progress.add(sum(map(len, batch)))
                    batch = []
                if isinstance(event, FileStart):
                    idle_s = _IDLE_S
                    started_at = event.offset
                    if started_at != partial.received:
                        await _in_thread(partial.restart)
                    progress.restart(started_at)
                elif isinstance(event, FileEnd):
                    if event.sha256 != partial.digest():
                        raise Declined(FileVerdictCode.CHECKSUM, "what arrived is not what was sent")
                    return started_at
        finally:
            progress.clear()

    async def _confirm_present(
        self, stream: "ClientStream", core: "FileReceiver", peer: str, offer: "FileOffer"
    ) -> None:
        """Report that the file is there, with the digest that the sender named, without any data."""
        from dep2p.cli.commands.stream.partial_file import Declined
        from dep2p.protocols.messaging.file_transfer import FileEnd, FileStart, FileVerdict, FileVerdictCode

        assert offer.sha256 is not None
        await stream.send(core.answer_item(offer.size, offer.sha256))
        start = core.on_item(await _next(stream))
        if not isinstance(start, FileStart) or start.offset != offer.size:
            raise Declined(FileVerdictCode.EXISTS, f"{offer.name} exists already")
        end = core.on_item(await _next(stream))
        if not isinstance(end, FileEnd) or end.sha256 != offer.sha256:
            raise Declined(FileVerdictCode.CHECKSUM, "the file changed while it was sent")
        await _conclude(stream, core, FileVerdict(FileVerdictCode.OK, "it was there already", offer.sha256))
        self._done_with(peer, offer, offer.sha256.hex(), offer.size, 0.0)

    def _done_with(self, peer: str, offer: "FileOffer", sha256: str, started_at: int, seconds: float) -> None:
        self._done += 1
        path = self._directory / offer.name
        moved = offer.size - started_at
        if self._run.json:
            self._run.emit(
                {
                    "file": str(path),
                    "name": offer.name,
                    "peer": peer,
                    "ok": True,
                    "size_bytes": offer.size,
                    "sha256": sha256,
                    "started_at_bytes": started_at,
                    "seconds": round(seconds, 3),
                    "bytes_per_s": round(moved / max(seconds, 1e-6)),
                }
            )
            return
        if not seconds:
            self._run.print(
                f"{sha256}  {printable(str(path))}  {byte_count(offer.size)}, was there already, "
                f"from {short_peer(peer)}"
            )
            return
        rate = byte_count(moved / max(seconds, 1e-6))
        resumed = f", resumed at {byte_count(started_at)}" if started_at else ""
        self._run.print(
            f"{sha256}  {printable(str(path))}  {byte_count(offer.size)} in {duration(seconds)}, {rate}/s, "
            f"from {short_peer(peer)}{resumed}"
        )

    def _report(self, peer: str, offer: "FileOffer | None", code: str, text: str) -> None:
        name = None if offer is None else offer.name
        if self._run.json:
            self._run.emit({"name": name, "peer": peer, "ok": False, "reason": code, "detail": text})
            return
        what = printable(name) if name else "a transfer"
        kept = "; what arrived is kept and the sender can go on" if code in ("interrupted", "no_space") else ""
        self._run.warn(f"{what} from {short_peer(peer)}: {code}: {printable(text)}{kept}")


def _open(directory: Path, peer: str, offer: "FileOffer", force: bool, free_bytes_min: int) -> "PartialFile":
    from dep2p.cli.commands.stream.partial_file import PartialFile

    return PartialFile.open(directory, peer, offer, force=force, free_bytes_min=free_bytes_min)


async def _finish(stream: "ClientStream", core: "FileReceiver", partial: "PartialFile", *, force: bool) -> None:
    from dep2p.protocols.messaging.file_transfer import FileVerdict, FileVerdictCode

    await _in_thread(lambda: partial.finish(force=force))
    await _conclude(stream, core, FileVerdict(FileVerdictCode.OK, "", partial.digest()))


async def _conclude(stream: "ClientStream", core: "FileReceiver", verdict: "FileVerdict") -> None:
    """Send the verdict and read to the sender's end: closing earlier would abort the stream and could lose it."""
    import anyio

    await stream.send(core.verdict_item(verdict))
    await stream.send_eof()
    with anyio.move_on_after(_END_S), suppress(Dep2pError):
        async for _ in stream:
            pass


async def _next(stream: "ClientStream", idle_s: float = _IDLE_S) -> bytes:
    import anyio

    with anyio.move_on_after(idle_s):
        async for item in stream:
            return item
        raise StreamClosedError("the sender ended the stream")
    raise StreamClosedError(f"the sender sent nothing for {idle_s:g} s")


async def _in_thread(function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    import anyio.to_thread

    return await anyio.to_thread.run_sync(function, *arguments)


def register(sub: typer.Typer) -> None:
    """Add ``stream receive``."""
    command(
        sub,
        "receive",
        waits=True,
        examples=[
            ("dep2p stream receive ./inbox", "until Ctrl-C"),
            ("dep2p stream receive ./inbox --once --from f3Qa", "one file, of one peer"),
            ("dep2p stream receive ./inbox --max-size 100M", "no file over 100 MB"),
        ],
        notes="A file appears under its name when it is complete, verified and on the disk; until then it is a hidden "
        ".dep2p-….part file, from which a new attempt goes on. Senders choose plain file names only, never a path, and "
        "never overwrite anything without --force.",
    )(receive)
