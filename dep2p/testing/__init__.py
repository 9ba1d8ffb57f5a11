"""Public test tools: nodes on a network in memory, a TCP proxy with faults, a simulator of whole pub/sub networks.

Names load on first use, so that the simulator needs no I/O library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dep2p.testing.memory import MemoryConnection, MemoryHost, MemoryNetwork, MemoryStream
    from dep2p.testing.nodes import open_nodes
    from dep2p.testing.proxy import FaultProxy
    from dep2p.testing.simulator.attacks import Attack, Stage, Sybil
    from dep2p.testing.simulator.faults import Churn, Partition
    from dep2p.testing.simulator.simulator import Report, Scenario, simulate
    from dep2p.testing.simulator.topology import Latency

__all__ = [
    "Attack",
    "Churn",
    "FaultProxy",
    "Latency",
    "MemoryConnection",
    "MemoryHost",
    "MemoryNetwork",
    "MemoryStream",
    "Partition",
    "Report",
    "Scenario",
    "Stage",
    "Sybil",
    "open_nodes",
    "simulate",
]

_HOMES = {
    "MemoryConnection": "memory",
    "MemoryHost": "memory",
    "MemoryNetwork": "memory",
    "MemoryStream": "memory",
    "FaultProxy": "proxy",
    "open_nodes": "nodes",
    "Report": "simulator.simulator",
    "Scenario": "simulator.simulator",
    "simulate": "simulator.simulator",
    "Attack": "simulator.attacks",
    "Stage": "simulator.attacks",
    "Sybil": "simulator.attacks",
    "Churn": "simulator.faults",
    "Partition": "simulator.faults",
    "Latency": "simulator.topology",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"dep2p.testing.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
