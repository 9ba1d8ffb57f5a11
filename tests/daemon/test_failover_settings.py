"""[queues] standby: what it needs, and what it makes."""

from pathlib import Path

import pytest

from dep2p.config.loader import load_config
from dep2p.daemon.queue_settings import queue_settings
from dep2p.errors import ConfigError
from dep2p.storage.postgres.shared_store import PostgresStores


def _file(folder: Path, store: str) -> Path:
    path = folder / "config.toml"
    path.write_text(f'[queues]\nstandby = true\nstore = "{store}"\n')
    return path


@pytest.mark.parametrize("store", ["auto", "memory", "/var/lib/queues.sqlite", "redis://localhost/0"])
def test_only_a_store_in_postgresql_can_be_shared(tmp_path: Path, store: str) -> None:
    with pytest.raises(ConfigError, match=r'\[queues\] standby: .*Set store = "postgresql://') as raised:
        load_config(config_file=_file(tmp_path, store))
    assert raised.value.code == "D1003"


def test_with_one_the_nodes_share_it(tmp_path: Path) -> None:
    config = load_config(config_file=_file(tmp_path, "postgresql://me:hush@db/queues"))
    settings = queue_settings(config)
    assert settings.standby
    stores = settings.shared_stores("a")
    assert isinstance(stores, PostgresStores)
    assert stores.location == "postgresql://db/queues"
