"""The NSQ server, as its HTTP API and statistics use it."""

from collections.abc import Mapping
from typing import Protocol

from dep2p.daemon.nsq.connection import NsqConnection, NsqQueues


class NsqContext(NsqQueues, Protocol):
    """The server: its queues, its clients, and its address."""

    started_unix_s: float
    tcp_address: str
    http_address: str
    """``HOST:PORT`` in use; empty when it does not listen."""

    @property
    def connections(self) -> Mapping[NsqConnection, None]:
        """The clients of the TCP protocol."""
        ...
