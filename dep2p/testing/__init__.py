"""Public test tools: a network in memory, a TCP proxy with faults, a simulator of whole pub/sub networks.

Names load on first use, so that the simulator needs no I/O library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dep2p.testing.memory import MemoryConnection, MemoryHost, MemoryNetwork
    from dep2p.testing.memory_stream import MemoryStream
    from dep2p.testing.proxy import FaultProxy
    from dep2p.testing.simulator import Report, Scenario, simulate
    from dep2p.testing.simulator_faults import Churn, Partition
    from dep2p.testing.simulator_links import Latency

__all__ = [
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
    "simulate",
]

_HOMES = {
    "MemoryConnection": "memory",
    "MemoryHost": "memory",
    "MemoryNetwork": "memory",
    "MemoryStream": "memory_stream",
    "FaultProxy": "proxy",
    "Report": "simulator",
    "Scenario": "simulator",
    "simulate": "simulator",
    "Churn": "simulator_faults",
    "Partition": "simulator_faults",
    "Latency": "simulator_links",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"dep2p.testing.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
