"""Connects to a PostgreSQL server that may be slow, silent or gone."""

from dataclasses import dataclass

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow


@dataclass(frozen=True, slots=True)
class ServerPatience:
    """How long a connection waits for a server's machine that does not answer. The address can say otherwise."""

    connect_timeout: int = 10
    """Seconds until a new connection is ready, for each host."""
    keepalives_idle: int = 10
    """Seconds without traffic before the system asks whether the machine is there."""
    keepalives_interval: int = 5
    """Seconds between two such questions."""
    keepalives_count: int = 3
    """Unanswered questions that end the connection."""
    tcp_user_timeout: int = 20_000
    """Milliseconds for which sent bytes may stay without acknowledgement. Otherwise the system waits a quarter of an
    hour."""


def connect(
    address: str, *, application_name: str, patience: ServerPatience | None = None
) -> psycopg.Connection[TupleRow]:
    """Connect, with commits of single statements. Blocks. What the address names goes before ``patience``.

    Raises ``psycopg.Error``.
    """
    named = conninfo_to_dict(address)
    asked = patience or ServerPatience()
    values: dict[str, int | str] = {
        "connect_timeout": asked.connect_timeout,
        "keepalives_idle": asked.keepalives_idle,
        "keepalives_interval": asked.keepalives_interval,
        "keepalives_count": asked.keepalives_count,
        "tcp_user_timeout": asked.tcp_user_timeout,
        "application_name": application_name,
    }
    missing = {name: value for name, value in values.items() if name not in named}
    return psycopg.connect(make_conninfo(address, **missing), autocommit=True)
