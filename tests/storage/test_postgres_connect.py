"""A PostgreSQL server that does not answer holds up no program for longer than its address says."""

from collections.abc import Callable

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from dep2p.storage.app_outbox import OutboxDatabase
from dep2p.storage.postgres.connect import ServerPatience, connect
from dep2p.storage.postgres.store import PostgresStore

BOUNDS = ("connect_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Notes how the driver was asked to connect, which fails."""
    found: list[dict[str, str]] = []

    def refuse(address: str, *, autocommit: bool) -> None:
        assert autocommit
        found.append({name: str(value) for name, value in conninfo_to_dict(address).items()})
        raise psycopg.OperationalError("not here")

    monkeypatch.setattr(psycopg, "connect", refuse)
    return found


def _outbox(address: str) -> None:
    OutboxDatabase(address, "dep2p_outbox").open()


def _store(address: str) -> None:
    PostgresStore(address).open()


@pytest.mark.parametrize("open_it", [_outbox, _store])
def test_each_connection_has_bounds(asked: list[dict[str, str]], open_it: Callable[[str], None]) -> None:
    with pytest.raises(Exception, match="not here"):
        open_it("postgresql://u:p@localhost/d")
    (one,) = asked
    assert all(int(one[name]) > 0 for name in BOUNDS)
    assert one["dbname"] == "d" and one["application_name"].startswith("dep2p")


def test_the_bounds_of_the_address_come_first(asked: list[dict[str, str]]) -> None:
    with pytest.raises(psycopg.OperationalError):
        connect(
            "postgresql://localhost/d?connect_timeout=77&keepalives_idle=78",
            application_name="x",
            patience=ServerPatience(connect_timeout=1, keepalives_idle=2, tcp_user_timeout=3),
        )
    (one,) = asked
    assert [one[name] for name in ("connect_timeout", "keepalives_idle", "tcp_user_timeout")] == ["77", "78", "3"]
