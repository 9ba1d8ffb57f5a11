"""A process that attacks, driven by JSON lines as :mod:`bench.messaging.worker` is."""

from contextlib import AsyncExitStack

import trio

from bench.hostile import members, public_wire, relays, stranger
from bench.hostile.stage import Attack, Stage
from bench.messaging.worker import run_worker

ATTACKS: dict[str, Attack] = {
    "rsa-keys": stranger.rsa_keys,
    "half-open": stranger.half_open,
    "idle-connections": stranger.idle_connections,
    "yamux-resets": stranger.yamux_resets,
    "yamux-empty": stranger.yamux_empty,
    "yamux-dribble": stranger.yamux_dribble,
    "failed-proofs": stranger.failed_proofs,
    "identify": stranger.identify,
    "quic-initials": stranger.quic_initials,
    "request-flood": members.request_flood,
    "request-unread": members.request_unread,
    "request-hold": members.request_hold,
    "queue-flood": members.queue_flood,
    "invented-members": members.invented_members,
    "high-numbers": members.high_numbers,
    "forged-copy": public_wire.forged_copy,
    "ihave-parallel": public_wire.ihave_parallel,
    "graft-unsubscribed": public_wire.graft_unsubscribed,
    "subscribe-flood": public_wire.subscribe_flood,
    "graft-flood": public_wire.graft_flood,
    "relay-circuits": relays.silent_circuits,
    "relay-reservations": relays.reservations,
    "open-relay-reservations": relays.reservations,
    "relay-proofs": relays.failed_proofs,
}
"""By the name in the result, ``hostile/<name>``."""


class AttackerCommands:
    """The commands of an attacker's process."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._stage: Stage | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def hello(self) -> dict[str, object]:
        """The process is ready."""
        return {}

    async def begin(
        self, attack: str, address: str, secret: str, connections: int, others: list[str]
    ) -> dict[str, object]:
        """Attack until `end`."""
        self._stage = Stage(address, secret, connections, others)
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(self._attack, ATTACKS[attack], self._stage)
        return {}

    async def _attack(self, attack: Attack, stage: Stage) -> None:
        with self._scope:
            await attack(stage)
        self._ended.set()

    async def progress(self) -> dict[str, object]:
        """The counts so far."""
        assert self._stage is not None
        return dict(self._stage.counts)

    async def end(self) -> dict[str, object]:
        """Stop, close all connections; answers with what was counted."""
        assert self._stage is not None
        self._scope.cancel()
        await self._ended.wait()
        return dict(self._stage.counts)


if __name__ == "__main__":
    run_worker("bench.hostile.attacker", lambda _, stack: AttackerCommands(stack))
