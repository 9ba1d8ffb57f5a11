"""Simulate an attack of your own.

Shows: Attack, Stage, Sybil, simulate, Scenario, Report
"""

from dep2p import PeerId
from dep2p.gossipsub.effects import Effect, Lane, Send
from dep2p.gossipsub.rpc import Rpc
from dep2p.testing import Attack, Scenario, Stage, Sybil, simulate


class Echo(Sybil):
    """Sends every message back to its sender."""

    def meet(self, peer: PeerId, now: float) -> list[Effect]:
        return [Send((peer,), Rpc(graft=(self.stage.topic,)), Lane.CONTROL)]

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        return [Send((peer,), Rpc(rpc.messages), Lane.MESSAGE)] if rpc.messages else []


def make(stage: Stage, _make_router: object) -> Echo:
    return Echo(stage)


report = simulate(Scenario(nodes=30, publishers=3, messages=9, attack=Attack(summary="echoes", make=make)))
print(report.deliveries.ratio)  # 1.0
