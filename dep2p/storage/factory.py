"""Makes a queue store from its address. It imports the drivers of servers only when they are needed."""

import re
from typing import Final
from urllib.parse import urlsplit

from dep2p.errors import StoreError
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.shared_store import SharedStores
from dep2p.storage.sqlite.store import Sync

_RAW: Final = re.compile(r"[/?#\[\]\s@]|:.*:|%(?![0-9a-fA-F]{2})")
"""Characters that must be encoded in a user's name or password."""


def open_url(url: str, sync: Sync) -> QueueStore:
    """Make a store on a server, which is not opened.

    Raises ``ValueError`` for an unknown scheme or a malformed address (whose text may hold a password and is never
    shown), StoreError without its driver.
    """
    scheme = url.partition("://")[0]
    is_synced = sync == "always"
    if scheme in ("postgresql", "postgres", "redis", "rediss"):
        _check_address(scheme, url)
    if scheme in ("postgresql", "postgres"):
        try:
            from dep2p.storage.postgres.store import PostgresStore
        except ImportError:
            raise _no_driver("PostgreSQL", "postgres") from None
        return PostgresStore(url, is_synced=is_synced)
    if scheme in ("redis", "rediss"):
        try:
            from dep2p.storage.redis.store import RedisStore
        except ImportError:
            raise _no_driver("Redis", "redis") from None
        return RedisStore(url, is_synced=is_synced)
    raise ValueError(f"{scheme}:// is no store: use memory, a path, postgresql://… or redis://…")


def open_shared(url: str, sync: Sync, peer: str) -> SharedStores:
    """Make the same store, shared by several nodes, as the node ``peer`` sees it; not connected.

    Raises ``ValueError`` for any other kind of store, or a malformed address; StoreError without its driver.
    """
    scheme = url.partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        raise ValueError(
            'nodes that stand by for each other share a store in PostgreSQL: set store = "postgresql://…" in '
            "[queues] on each of them, or standby = false"
        )
    _check_address(scheme, url)
    try:
        from dep2p.storage.postgres.shared_store import PostgresStores
    except ImportError:
        raise _no_driver("PostgreSQL", "postgres") from None
    return PostgresStores(url, peer, is_synced=sync == "always")


def _check_address(scheme: str, url: str) -> None:
    """Refuse addresses that a driver would quote in its errors, with the password in them."""
    rest = url.partition("://")[2]
    who, at, where = rest.rpartition("@")
    try:
        is_right = not (at and _RAW.search(who)) and urlsplit(f"{scheme}://{where}").port != 0
    except ValueError:  # reading the port checks it
        is_right = False
    if not is_right:
        raise ValueError(
            f"the address of the store, {scheme}://…, is malformed (it is not shown: it may hold a password). Write "
            f"{scheme}://USER:PASSWORD@HOST:PORT/NAME, and @ : / ? # % and spaces in a password as %40 %3A %2F %3F %23 "
            "%25 %20"
        )


def _no_driver(name: str, extra: str) -> StoreError:
    return StoreError(f"queues in {name} need its driver: pip install 'dep2p[{extra}]'")
