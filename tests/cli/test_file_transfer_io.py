"""Files between the two commands' own code over an in-memory stream: resume, refusals, disk full, hostile senders."""

import errno
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import cbor2
import pytest

from dep2p.cli.commands.stream import partial_file as partial
from dep2p.cli.commands.stream import receive
from dep2p.cli.commands.stream import send as transfer
from dep2p.cli.framework.command import Invocation
from dep2p.cli.framework.errors import CliError
from dep2p.protocols.messaging.file_transfer import DATA_ITEM_BYTES_MAX
from dep2p.types import PeerId

ANN = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"
BOB = "12D3KooWLbtq3zyR1sr5LJrvc5rVBsqXLSRPVG3tMQ8g4PPcNaM8"
CONTENT = os.urandom(5 * DATA_ITEM_BYTES_MAX + 12_345)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class World:
    """Ann's files and Bob's directory; each transfer gets a fresh stream."""

    def __init__(self, root: Path, pair: Callable[..., tuple[Any, Any]]) -> None:
        self.pair = pair
        self.source = root / "ann" / "video.mkv"
        self.source.parent.mkdir()
        self.source.write_bytes(CONTENT)
        self.inbox = root / "bob"
        self.inbox.mkdir()
        self.run = Invocation(quiet=True)

    @property
    def target(self) -> Path:
        return self.inbox / "video.mkv"

    @property
    def parts(self) -> list[Path]:
        return sorted(self.inbox.glob(".dep2p-*.part"))

    def _inbox(self, **options: Any) -> Any:
        chosen: dict[str, Any] = {"force": False, "only": None, "wanted": None} | options
        return receive.Inbox(self.run, self.inbox, **chosen)

    async def transfer(
        self, *, break_after: int | None = None, path: Path | None = None, attempts: int = 2, **options: Any
    ) -> transfer.SentFile:
        """Send the file once; ``break_after`` items of the sender, the stream breaks."""
        inbox = self._inbox(**options)
        ends = [self.pair(ANN, BOB, "dep2p.file") for _ in range(attempts)]
        mine = [mine for mine, _ in ends]
        mine[0].break_after = break_after

        class Client:
            def stream(self, peer: str, name: str, *, realm: str | None) -> Any:
                assert (peer, name, realm) == (BOB, "dep2p.file", None)
                return mine.pop(0)

        sent: list[transfer.SentFile] = []
        error: list[Exception] = []
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _, theirs in ends:
                    tasks.start_soon(inbox.take, theirs)
                try:
                    client: Any = Client()
                    bob = transfer.FileDestination(client, PeerId(BOB), "dep2p.file", timeout_s=10, realm=None)
                    sent.append(await transfer.send_file(self.run, bob, path or self.source))
                except Exception as raised:
                    error.append(raised)
                for unused in mine:
                    unused.reset()
        if error:
            raise error[0]
        return sent[0]

    async def receive_items(self, *items: bytes, answers: int = 0, **options: Any) -> list[Any]:
        """A hand-made sender: sends the items, after each of the first ``answers`` it waits for an item."""
        mine, theirs = self.pair(ANN, BOB, "dep2p.file")
        got: list[Any] = []
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._inbox(**options).take, theirs)
                for number, item in enumerate(items):
                    await mine.send(item)
                    if number < answers:
                        got.append(cbor2.loads(await anext(mine)))
                await mine.send_eof()
                try:
                    async for item in mine:
                        got.append(cbor2.loads(item))
                except Exception as error:
                    got.append(error)
        return got


@pytest.fixture
def world(tmp_path: Path, pair: Callable[..., tuple[Any, Any]]) -> World:
    return World(tmp_path, pair)


def go(body: Callable[[], Awaitable[Any]]) -> Any:
    return anyio.run(body)


def test_a_file_arrives_with_content_time_and_mode_and_leaves_nothing_behind(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(world.source, ns=(0, 1_700_000_000_123_456_789))
    sent = go(world.transfer)
    assert world.target.read_bytes() == CONTENT
    assert (sent.sha256, sent.size, sent.started_at) == (DIGEST, len(CONTENT), 0)
    assert world.target.stat().st_mtime_ns == 1_700_000_000_123_456_789
    mask = os.umask(0)
    os.umask(mask)
    assert world.target.stat().st_mode & 0o777 == 0o666 & ~mask
    assert [path.name for path in world.inbox.iterdir()] == ["video.mkv"]
    assert capsys.readouterr().out.startswith(f"{DIGEST}  {world.target}  1.3 MiB in ")


@pytest.mark.parametrize("size", [0, 1, DATA_ITEM_BYTES_MAX, 3 * DATA_ITEM_BYTES_MAX])
def test_edge_sizes(world: World, size: int) -> None:
    world.source.write_bytes(CONTENT[:size])
    assert go(world.transfer).sha256 == hashlib.sha256(CONTENT[:size]).hexdigest()
    assert world.target.read_bytes() == CONTENT[:size] and not world.parts


@pytest.mark.parametrize("items", [2, 3, 5, 7])
def test_a_cut_off_transfer_goes_on_from_what_arrived(
    world: World, items: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CliError) as raised:
        go(lambda: world.transfer(break_after=items))
    assert raised.value.code == "D6001" and raised.value.exit_code == 5
    held = (items - 2) * DATA_ITEM_BYTES_MAX
    assert sum(part.stat().st_size for part in world.parts) == held and not world.target.exists()
    assert "interrupted" in capsys.readouterr().err
    assert [entry[2] for entry in receive.unfinished(world.inbox)] == ([held] if held else [])
    sent = go(world.transfer)
    assert (sent.started_at, sent.sha256) == (held, DIGEST)
    assert world.target.read_bytes() == CONTENT and len(list(world.inbox.iterdir())) == 1


def test_a_part_of_another_content_is_thrown_away(world: World) -> None:
    with pytest.raises(CliError):
        go(lambda: world.transfer(break_after=4))
    world.source.write_bytes(CONTENT[::-1])
    sent = go(world.transfer)
    assert sent.started_at == 0 and world.target.read_bytes() == CONTENT[::-1]


def test_a_part_that_was_damaged_on_disk_is_not_trusted(world: World) -> None:
    with pytest.raises(CliError):
        go(lambda: world.transfer(break_after=4))
    with world.parts[0].open("r+b") as file:
        file.write(b"damaged")
    assert go(world.transfer).started_at == 0 and world.target.read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_not_trusted(world: World) -> None:
    with pytest.raises(CliError):
        go(lambda: world.transfer(break_after=4))
    with world.parts[0].open("ab") as file:
        file.truncate(len(CONTENT) + 1)
    assert go(world.transfer).started_at == 0 and world.target.read_bytes() == CONTENT


def test_an_existing_file_is_not_overwritten_without_force(world: World) -> None:
    world.target.write_bytes(b"mine")
    with pytest.raises(CliError, match="did not take") as raised:
        go(world.transfer)
    assert (raised.value.code, raised.value.exit_code) == ("D6009", 6) and "exists already" in raised.value.cause
    assert world.target.read_bytes() == b"mine" and not world.parts
    go(lambda: world.transfer(force=True))
    assert world.target.read_bytes() == CONTENT


def test_sending_a_file_that_is_there_already_succeeds_without_data(world: World) -> None:
    go(world.transfer)
    before = world.target.stat().st_mtime_ns
    sent = go(world.transfer)
    assert (sent.started_at, sent.sha256) == (len(CONTENT), DIGEST)
    assert world.target.stat().st_mtime_ns == before


@pytest.mark.parametrize("kind", ["symlink", "directory"])
def test_a_name_taken_by_something_else_is_refused(world: World, kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    if kind == "symlink":
        world.target.symlink_to(outside)
    else:
        world.target.mkdir()
    with pytest.raises(CliError, match="did not take"):
        go(world.transfer)
    assert outside.read_bytes() == b"secret"


def test_force_replaces_a_link_and_not_what_it_points_to(world: World, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    world.target.symlink_to(outside)
    go(lambda: world.transfer(force=True))
    assert outside.read_bytes() == b"secret"
    assert not world.target.is_symlink() and world.target.read_bytes() == CONTENT


def test_a_full_disk_is_reported_to_both_and_the_part_stays_resumable(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = 2 * DATA_ITEM_BYTES_MAX + 777
    real_write = os.write
    written = 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal written
        if written >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real_write(descriptor, bytes(data)[: room - written])
        written += count
        return count

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(CliError, match="did not take") as raised:
        go(world.transfer)
    monkeypatch.undo()
    assert raised.value.exit_code == 6 and "the disk is full" in raised.value.cause
    assert "goes on where it stopped" in raised.value.tries[0]
    assert "no_space" in capsys.readouterr().err and world.parts[0].stat().st_size == room
    assert go(world.transfer).started_at == room
    assert world.target.read_bytes() == CONTENT


def test_a_file_larger_than_the_free_space_is_refused_before_any_data(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(_path: Path) -> Any:
        return SimpleNamespace(total=10**9, used=10**9 - 1_000, free=1_000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(CliError) as raised:
        go(lambda: world.transfer(bounds=receive.ReceiveBounds(free_bytes_min=0)))
    assert "are missing and 1000 B are free" in raised.value.cause and list(world.inbox.iterdir()) == []


def test_another_write_error_is_reported_and_names_no_path_of_the_receiver(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error", "/home/bob/secret")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(CliError) as raised:
        go(world.transfer)
    assert raised.value.cause == "cannot write: Input/output error"


def test_a_file_that_changes_while_it_is_sent_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = partial.SourceFile.read_batch

    def read_and_grow(self: Any, left: int) -> list[bytes]:
        with world.source.open("ab") as file:
            file.write(b"more")
        return real(self, left)

    monkeypatch.setattr(partial.SourceFile, "read_batch", read_and_grow)
    with pytest.raises(CliError, match="changed while it was sent"):
        go(world.transfer)
    assert not world.target.exists()


def test_a_file_that_shrinks_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = partial.SourceFile.read_batch

    def read_and_shrink(self: Any, left: int) -> list[bytes]:
        os.truncate(world.source, 10)
        return real(self, left)

    monkeypatch.setattr(partial.SourceFile, "read_batch", read_and_shrink)
    with pytest.raises(CliError, match="changed while it was sent"):
        go(world.transfer)
    assert not world.target.exists()


def test_files_of_others_are_refused_with_from(world: World) -> None:
    with pytest.raises(CliError) as raised:
        go(lambda: world.transfer(only=BOB))
    assert "not taken here" in raised.value.cause and list(world.inbox.iterdir()) == []


def test_a_peer_has_only_so_many_transfers_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "TRANSFERS_PER_PEER_MAX", 0)
    with pytest.raises(CliError) as raised:
        go(world.transfer)
    assert "running already" in raised.value.cause


def test_only_so_many_unfinished_files_are_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PARTS_MAX", 1)
    with pytest.raises(CliError):
        go(lambda: world.transfer(break_after=4))
    other = world.source.with_name("other.mkv")
    other.write_bytes(CONTENT)
    with pytest.raises(CliError) as raised:
        go(lambda: world.transfer(path=other))
    assert "unfinished files are here already" in raised.value.cause
    assert go(world.transfer).started_at > 0


def test_the_same_file_twice_at_once_is_refused(world: World) -> None:
    from dep2p.protocols.messaging.file_transfer import FileOffer

    offer = FileOffer("video.mkv", len(CONTENT), world.source.stat().st_mtime_ns)
    held = partial.PartialFile.open(world.inbox, ANN, offer, force=False)
    try:
        with pytest.raises(CliError) as raised:
            go(world.transfer)
        assert "being received already" in raised.value.cause
    finally:
        held.close()
    go(world.transfer)


def test_a_name_taken_during_the_transfer_is_not_overwritten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = partial.PartialFile.finish

    def finish(self: Any, *, force: bool) -> None:
        world.target.write_bytes(b"was quicker")
        real(self, force=force)

    monkeypatch.setattr(partial.PartialFile, "finish", finish)
    with pytest.raises(CliError, match="did not take"):
        go(world.transfer)
    assert world.target.read_bytes() == b"was quicker"


@pytest.mark.parametrize("path", ["/dev/null", ".", "/nonexistent"])
def test_what_is_no_regular_file_is_not_sent(world: World, path: str) -> None:
    with pytest.raises(CliError) as raised:
        go(lambda: world.transfer(path=Path(path)))
    assert raised.value.code == "D6006"


def item(**fields: Any) -> bytes:
    return cbor2.dumps(fields)


OFFER = {"v": 1, "kind": "offer", "name": "a", "size": 4}


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", ".bashrc", "a\x1b[2Jb", ""])
def test_hostile_names_end_the_transfer_and_touch_nothing(
    world: World, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    got = go(lambda: world.receive_items(item(**OFFER | {"name": name})))
    assert all(isinstance(each, Exception) for each in got)
    assert list(world.inbox.iterdir()) == [] and not (world.inbox.parent / "a").exists()
    err = capsys.readouterr().err
    assert "failed" in err and "\x1b" not in err


def test_a_wrong_checksum_is_never_given_the_name(world: World) -> None:
    items = [item(**OFFER), item(kind="start", offset=0), b"data", item(kind="end", sha256=bytes(32))]
    got = go(lambda: world.receive_items(*items, answers=1))
    assert got[0]["kind"] == "answer" and got[1]["code"] == "checksum"
    assert not (world.inbox / "a").exists()


def test_data_beyond_the_offered_size_ends_the_transfer(world: World) -> None:
    got = go(lambda: world.receive_items(item(**OFFER), item(kind="start", offset=0), b"too much", answers=1))
    assert isinstance(got[-1], Exception) and not (world.inbox / "a").exists()


def test_the_digest_of_a_file_that_the_sender_does_not_have_is_not_reported(world: World) -> None:
    (world.inbox / "a").write_bytes(b"mine")
    got = go(lambda: world.receive_items(item(**OFFER)))
    assert got == [{"kind": "verdict", "code": "exists", "text": "a exists already"}]
    guess = item(**OFFER | {"sha256": bytes(32)})
    assert go(lambda: world.receive_items(guess)) == got


def test_a_receiver_that_confirms_another_checksum_is_not_believed(
    world: World, pair: Callable[..., tuple[Any, Any]]
) -> None:
    mine, theirs = pair(ANN, BOB, "dep2p.file")

    async def liar() -> None:
        await anext(theirs)
        await theirs.send(item(kind="answer", offset=0, sha256=hashlib.sha256().digest()))
        async for _ in theirs:
            pass
        await theirs.send(item(kind="verdict", code="ok", sha256=bytes(32)))
        await theirs.send_eof()

    class Client:
        def stream(self, *_: Any, **__: Any) -> Any:
            return mine

    async def body() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(liar)
            client: Any = Client()
            bob = transfer.FileDestination(client, PeerId(BOB), "dep2p.file", timeout_s=10, realm=None)
            with pytest.raises(CliError, match="another checksum"):
                await transfer.send_file(world.run, bob, world.source)
            tasks.cancel_scope.cancel()

    go(body)


def test_a_fifo_is_refused_at_once(world: World, tmp_path: Path) -> None:
    """Opening one waits for a writer, and no signal ends that."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CliError, match="not a regular file"):
        go(lambda: world.transfer(path=tmp_path / "pipe"))


@pytest.mark.parametrize("suffix", [".part", ".json"])
@pytest.mark.parametrize("kind", ["hard link", "symlink", "fifo"])
def test_what_another_user_planted_under_our_names_is_not_written_to(
    world: World, tmp_path: Path, suffix: str, kind: str
) -> None:
    """In a shared inbox the names of part files can be known before they are made."""
    key = hashlib.sha256(f"{ANN}\0video.mkv\0{len(CONTENT)}".encode()).hexdigest()[:16]
    planted, outside = world.inbox / f".dep2p-{key}{suffix}", tmp_path / "outside"
    outside.write_bytes(b"precious")
    if kind == "hard link":
        os.link(outside, planted)
    elif kind == "symlink":
        planted.symlink_to(outside)
    else:
        os.mkfifo(planted)
    if suffix == ".part":
        with pytest.raises(CliError):
            go(world.transfer)
        assert not world.target.exists()
    else:
        go(world.transfer)
        assert world.target.read_bytes() == CONTENT
    assert outside.read_bytes() == b"precious"


def test_a_file_over_the_limit_is_refused_before_any_data(world: World) -> None:
    bounds = receive.ReceiveBounds(file_bytes_max=len(CONTENT) - 1)
    with pytest.raises(CliError) as raised:
        go(lambda: world.transfer(bounds=bounds))
    assert "over the limit" in raised.value.cause and list(world.inbox.iterdir()) == []


def test_a_transfer_stops_before_the_disk_is_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space was there at the offer, and other programs took it."""
    free = [10**9]

    def usage(_path: Path) -> Any:
        return SimpleNamespace(total=10**10, used=0, free=free[0])

    monkeypatch.setattr(shutil, "disk_usage", usage)
    first = receive._open  # pyright: ignore[reportPrivateUsage]

    def opened(*arguments: Any) -> Any:
        made = first(*arguments)
        free[0] = 1_000_100
        return made

    monkeypatch.setattr(receive, "_open", opened)
    with pytest.raises(CliError) as raised:
        go(lambda: world.transfer(bounds=receive.ReceiveBounds(free_bytes_min=1_000_000)))
    assert "the disk is full but for" in raised.value.cause and not world.target.exists()
