"""A receiver among peers that it does not want, and in a directory that others may write to."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import cbor2
import pytest

from dep2p.cli.commands.stream import receive
from dep2p.cli.framework.command import Invocation
from tests.cli.test_file_transfer_io import ANN, BOB, CONTENT, World

EVE = "12D3KooWRBhwfeP2Y4TCx1SM6s9rUoHhR5STiGwxBhgFRcw3UERE"


def test_a_link_in_place_of_the_state_file_is_not_followed(
    tmp_path: Path, pair: Callable[..., tuple[Any, Any]]
) -> None:
    world = World(tmp_path, pair)
    outside = tmp_path / "outside"
    outside.write_text("precious")
    key = hashlib.sha256(f"{ANN}\0{world.source.name}\0{len(CONTENT)}".encode()).hexdigest()[:16]
    (world.inbox / f".dep2p-{key}.json").symlink_to(outside)
    anyio.run(world.transfer)
    assert world.target.read_bytes() == CONTENT
    assert outside.read_text() == "precious"


@pytest.mark.parametrize("options", [{"only": ANN}, {"only": None}])
def test_peers_that_are_refused_hold_up_no_one(
    tmp_path: Path,
    pair: Callable[..., tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr(receive, "TRANSFERS_MAX", 2)
    monkeypatch.setattr(receive, "TRANSFERS_PER_PEER_MAX", 1)
    world = World(tmp_path, pair)

    async def body() -> None:
        inbox = receive.Inbox(Invocation(quiet=True), world.inbox, force=False, wanted=None, **options)
        async with anyio.create_task_group() as tasks:
            silent = [pair(EVE, BOB, "dep2p.file") for _ in range(5)]
            for _, theirs in silent:
                tasks.start_soon(inbox.take, theirs)
            await anyio.sleep(0.05)
            mine, theirs = pair(ANN, BOB, "dep2p.file")
            tasks.start_soon(inbox.take, theirs)
            with anyio.fail_after(3):
                await mine.send(cbor2.dumps({"v": 1, "kind": "offer", "name": "small", "size": 3}))
                assert cbor2.loads(await anext(mine))["kind"] == "answer"
            tasks.cancel_scope.cancel()

    anyio.run(body)
