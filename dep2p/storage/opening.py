"""A queue store by its address; the drivers of servers are imported only when they are asked for."""

from dep2p.errors import StoreError
from dep2p.storage.interface import QueueStore
from dep2p.storage.sqlite import Sync


def open_url(url: str, sync: Sync) -> QueueStore:
    """A store on a server, not opened. Raises ``ValueError`` for an unknown scheme, StoreError without its driver."""
    scheme = url.partition("://")[0]
    is_synced = sync == "always"
    if scheme in ("postgresql", "postgres"):
        try:
            from dep2p.storage.postgres import PostgresStore
        except ImportError:
            raise _no_driver("PostgreSQL", "postgres") from None
        return PostgresStore(url, is_synced=is_synced)
    if scheme in ("redis", "rediss"):
        try:
            from dep2p.storage.redis import RedisStore
        except ImportError:
            raise _no_driver("Redis", "redis") from None
        return RedisStore(url, is_synced=is_synced)
    raise ValueError(f"{scheme}:// is no store: use memory, a path, postgresql://… or redis://…")


def _no_driver(name: str, extra: str) -> StoreError:
    return StoreError(f"queues in {name} need its driver: pip install 'dep2p[{extra}]'")
