"""Public test tools: an in-memory network and fault injection."""

from dep2p.testing.memory import MemoryConnection, MemoryHost, MemoryNetwork
from dep2p.testing.memory_stream import MemoryStream

__all__ = ["MemoryConnection", "MemoryHost", "MemoryNetwork", "MemoryStream"]
