"""A store's address: what is malformed is refused before a driver can quote it, with its password, in an error."""

import pytest

from dep2p.storage.factory import open_url

_RAW = ["hush#x", "hu/sh", "hush?x", "hu@sh", "hu:sh", "hu%sh", "hu sh", "hu[sh", "hu]sh", "hush%", "hush%2"]


@pytest.mark.parametrize("scheme", ["redis", "rediss", "postgresql", "postgres"])
@pytest.mark.parametrize("password", _RAW)
def test_a_raw_character_in_a_password_is_refused_and_not_shown(scheme: str, password: str) -> None:
    with pytest.raises(ValueError, match=r"malformed.*%40") as raised:
        open_url(f"{scheme}://me:{password}@127.0.0.1:1/0", "always")
    assert "hu" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("where", ["127.0.0.1:port/0", "127.0.0.1:99999/0", "127.0.0.1:0/0"])
@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_a_wrong_port_is_refused_and_the_password_not_shown(scheme: str, where: str) -> None:
    with pytest.raises(ValueError, match="malformed") as raised:
        open_url(f"{scheme}://me:hush@{where}", "always")
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("driver", "url"),
    [
        ("psycopg", "postgresql://me:p%40ss%2Fw%3A@127.0.0.1:5432/x"),
        ("psycopg", "postgresql:///x?host=/run/postgresql"),
        ("redis", "redis://:p%23ss@[::1]:6379/0"),
        ("redis", "redis://127.0.0.1/0"),
    ],
)
def test_a_right_address_is_taken(driver: str, url: str) -> None:
    pytest.importorskip(driver)
    open_url(url, "always")
