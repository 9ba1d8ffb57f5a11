"""[nsq]: NSQ clients on the node's queues."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqConfig:
    """[nsq]: let NSQ clients use the queues; a queue is a topic. Every program of this machine can then use them."""

    listen: str = ""
    """Loopback HOST:PORT for NSQ's TCP protocol, as "127.0.0.1:4150"; "" does not listen."""
    http: str = ""
    """Loopback HOST:PORT for nsqd's HTTP API, as "127.0.0.1:4151"; "" does not listen."""
    realm: str = ""
    """Name of a joined realm whose queues on this node they use; "" uses those of this machine's programs."""
