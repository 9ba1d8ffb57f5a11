"""[nsq]: NSQ clients on the node's queues."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqConfig:
    """[nsq]: let NSQ clients use the queues; a queue is a topic. Every program of this machine can then use them.

    Clients have no names that could be believed, so bounds are for one connection and for all of them. One connection
    gets at most 7 of 8 parts of what all share.
    """

    listen: str = ""
    """Loopback HOST:PORT for NSQ's TCP protocol, as "127.0.0.1:4150"; "" does not listen."""
    http: str = ""
    """Loopback HOST:PORT for nsqd's HTTP API, as "127.0.0.1:4151"; "" does not listen."""
    realm: str = ""
    """Name of a joined realm whose queues on this node they use; "" uses those of this machine's programs."""
    connections_max: int = 1_024
    """Connections to each of both; above it the oldest one that has not sent a command yet makes room."""
    memory_bytes_max: int = 268_435_456
    """Memory of all clients: publishes that are not durable yet, incomplete commands, and what clients have not read. A
    connection whose share is used up waits."""
    publishes_pending_max: int = 32_768
    """Messages of all clients that are not durable yet. A connection whose share is used up waits."""
    topics_max: int = 10_000
    """Topics that there may be before a client makes another one; it then gets an error."""
    topics_per_s: float = 20.0
    """Topics that one connection may make a second, after 200 at once; further ones wait. 0 means no limit."""
    messages_per_s: float = 0.0
    """Messages that one connection may publish a second, after those of ten seconds at once; it waits then. 0 means no
    limit."""
