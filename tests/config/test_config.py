"""Configuration: which source wins, where each value comes from, and what is said about a wrong one."""

import dataclasses
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dep2p.config.environment import RESERVED, RESERVED_STARTS
from dep2p.config.loader import (
    KEYS,
    ControlConfig,
    LogConfig,
    NodeConfig,
    control_socket_path,
    default_data_dir,
    env_name,
    example_toml,
    load_config,
    setting_variables,
)
from dep2p.config.values import as_toml, field_docs
from dep2p.errors import ConfigError
from dep2p.limits import Limits


def test_flags_come_before_the_environment_before_the_file_before_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[log]\nlevel = "error"\nformat = "json"\nfile = "a"\n[limits]\nconnections_max = 5\n'
    )
    config = load_config(
        flags={"node.data_dir": str(tmp_path), "log.level": "debug"},
        environ={"DEP2P_LOG_LEVEL": "warning", "DEP2P_LOG_FORMAT": "text", "HOME": "/nowhere"},
    )
    assert (config.log.level, config.log.format, config.log.file) == ("debug", "text", "a")
    assert config.limits.connections_max == 5
    assert config.origins["log.level"] == "flag"
    assert config.origins["log.format"] == "environment DEP2P_LOG_FORMAT"
    assert config.origins["log.file"] == f"file {tmp_path}/config.toml"
    assert config.origins["limits.realms_max"] == "default"
    assert config.file == tmp_path / "config.toml"


def test_every_key_has_an_origin_and_a_documentation() -> None:
    config = load_config()
    for section, keys in KEYS.items():
        for name, key in keys.items():
            assert config.origins[f"{section}.{name}"] == "default"
            assert key.doc, f"{key.path} is not documented"


def test_the_example_is_the_defaults(tmp_path: Path) -> None:
    lines = example_toml().splitlines()
    uncommented = [line.removeprefix("# ") if " = " in line else line for line in lines]
    parsed = tomllib.loads("\n".join(uncommented))
    assert {section: set(table) for section, table in parsed.items()} == {
        name: set(keys) for name, keys in KEYS.items()
    }
    del parsed["node"]["data_dir"]
    file = tmp_path / "example.toml"
    file.write_text("\n".join(line for line in uncommented if not line.startswith("data_dir")))
    config = load_config(flags={"node.data_dir": str(tmp_path)}, config_file=file)
    assert config.limits == Limits()
    assert config.control == ControlConfig()
    assert config.log == LogConfig()
    assert config.node.listen == NodeConfig().listen


def test_what_is_shown_can_be_read_back(tmp_path: Path) -> None:
    config = load_config(flags={"node.data_dir": str(tmp_path), "node.bootstrap": ["/dns4/x/tcp/1/p2p/12D3"]})
    file = tmp_path / "shown.toml"
    file.write_text(config.to_toml(origin=True))
    again = load_config(config_file=file)
    assert again.as_dict() == config.as_dict()
    assert "# flag" in config.to_toml(origin=True)
    assert "#" not in config.to_toml()


@pytest.mark.parametrize("password", ["hush", "hu/sh", "hu@sh", "hu%23sh"])
def test_a_password_in_a_url_is_not_shown(tmp_path: Path, password: str) -> None:
    store = f"postgresql://me:{password}@host:5432/x"
    config = load_config(flags={"node.data_dir": str(tmp_path), "queues.store": store})
    assert config.queues.store == store
    assert config.as_dict()["queues"]["store"] == "postgresql://me:***@host:5432/x"
    assert 'store = "postgresql://me:***@host:5432/x"' in config.to_toml()
    assert "sh@" not in config.to_toml()


def test_the_data_directory() -> None:
    assert default_data_dir({"XDG_DATA_HOME": "/x"}) == Path("/x/dep2p")
    assert default_data_dir({"XDG_DATA_HOME": "relative"}) == Path("~/.local/share/dep2p").expanduser()
    config = load_config(environ={"DEP2P_DATA_DIR": "~/d"})
    assert config.data_dir == Path("~/d").expanduser()
    assert config.key_file == config.data_dir / "node.key"
    assert config.token_file == config.data_dir / "control.token"
    assert config.socket_path == config.data_dir / "control.sock"


def test_a_named_file_may_name_the_directory_but_a_found_one_may_not_point_away(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[node]\ndata_dir = "/elsewhere"\n')
    assert load_config(config_file=file).data_dir == Path("/elsewhere")
    assert load_config(environ={"DEP2P_CONFIG": str(file)}).data_dir == Path("/elsewhere")
    with pytest.raises(ConfigError, match="not the directory in which this file was found"):
        load_config(flags={"node.data_dir": str(tmp_path)})


def test_the_socket_moves_when_its_path_is_too_long(tmp_path: Path) -> None:
    deep = Path("/d" * 60)
    short = control_socket_path(deep, Path("/run/user/1"))
    assert short.parent == Path("/run/user/1/dep2p")
    assert short == control_socket_path(deep, Path("/run/user/1"))
    assert short != control_socket_path(deep / "e", Path("/run/user/1"))
    with pytest.raises(ConfigError, match="107 bytes"):
        control_socket_path(deep)
    assert control_socket_path(Path("/d")) == Path("/d/control.sock")
    with pytest.raises(ConfigError, match=r"\[control\] socket"):
        load_config(flags={"control.socket": "/x" * 60})


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("[nod]\n", "D1002", ["[nod]", 'did you mean "node"?']),
        ("[node]\nlisen = []\n", "D1002", ["[node] lisen", 'did you mean "listen"?']),
        ("[node]\nconnections_max = 3\n", "D1002", ["it belongs into [limits]"]),
        ("node = 3\n", "D1003", ["is a section"]),
        ("[node]\nlisten = 3\n", "D1003", ["[node] listen", "3 is not a list of texts"]),
        ("[node]\nlisten = [3]\n", "D1003", ["a list is not a list of texts"]),
        ('[node]\nmdns = "maybe"\n', "D1003", ["true or false", "`mdns = false`"]),
        ('[node]\nrelay = "on"\n', "D1003", ['"on" is not one of "off", "client", "server"']),
        ('[node]\nlisten = ["127.0.0.1:4001"]\n', "D1003", ["is not an address", "/ip4/0.0.0.0/tcp/4001"]),
        ('[node]\nlisten = ["/ip4/300.0.0.1/tcp/1"]\n', "D1003", ["300.0.0.1"]),
        ('[node]\nlisten = ["/ip4/127.0.0.1/tcp/99999"]\n', "D1003", ["99999 is not a port"]),
        ('[node]\nlisten = ["/ip4/127.0.0.1"]\n', "D1003", ["names no port"]),
        ('[node]\nbootstrap = ["/ip4/127.0.0.1/tcp/1"]\n', "D1003", ["must end in /p2p/PEER"]),
        ("[node]\ndht = true\n", "D1003", ["[node] dht", "bootstrap"]),
        ("[limits]\nconnections_max = 0\n", "D1003", ["greater than 0", "default is 512"]),
        ("[limits]\nconnections_max = 1.5\n", "D1003", ["1.5 is not a whole number"]),
        ("[limits]\nconnections_max = true\n", "D1003", ["true is not a whole number"]),
        ("[limits]\nrequest_timeout_s = inf\n", "D1003", ["not a number"]),
        ("[limits]\nmessage_bytes_max = 99_000_000\n", "D1003", ["smaller than message_bytes_max"]),
        ('[control]\ntcp = "0.0.0.0:80"\n', "D1003", ["not a loopback address", "never on a network"]),
        ('[control]\ntcp = "localhost"\n', "D1003", ["not HOST:PORT"]),
        ('[control]\nsocket = ""\n', "D1003", ["empty"]),
        ("[log\n", "D1004", ["not TOML", "line 1"]),
    ],
)
def test_each_mistake_is_reported_with_file_key_and_what_to_do(
    tmp_path: Path, text: str, code: str, parts: list[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        load_config(config_file=file)
    assert wrong.value.code == code
    if code != "D1003" or "node.dht" not in str(wrong.value):
        assert str(wrong.value).startswith(str(file)) or str(wrong.value).startswith(f"file {file}")
    for part in parts:
        assert part in str(wrong.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as missing:
        load_config(config_file=tmp_path / "nothing.toml")
    assert missing.value.code == "D1004"
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(config_file=tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("DEP2P_LISTEN", "/ip4/1.2.3.4/tcp/5, /ip4/1.2.3.4/tcp/6", ("/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/6")),
        ("DEP2P_MDNS", "yes", True),
        ("DEP2P_MDNS", "0", False),
        ("DEP2P_LIMITS_CONNECTIONS_MAX", "1_000", 1000),
        ("DEP2P_LIMITS_DIAL_TIMEOUT_S", "2", 2.0),
    ],
)
def test_texts_of_variables(name: str, text: str, expected: object) -> None:
    config = load_config(environ={name: text})
    key = next(key for keys in KEYS.values() for key in keys.values() if env_name(key) == name)
    value: Any = getattr(getattr(config, key.section), key.name)
    assert value == expected and type(value) is type(expected)


def test_wrong_variables_and_flags_are_named() -> None:
    with pytest.raises(ConfigError, match=r"environment DEP2P_LOG_LEVL.*DEP2P_LOG_LEVEL") as wrong:
        load_config(environ={"DEP2P_LOG_LEVL": "info"})
    assert wrong.value.code == "D1002"
    with pytest.raises(ConfigError, match=r"environment DEP2P_MDNS: \"maybe\" is not true or false"):
        load_config(environ={"DEP2P_MDNS": "maybe"})
    with pytest.raises(ConfigError, match=r'log\.levl.*did you mean "log\.level"'):
        load_config(flags={"log.levl": "info"})
    with pytest.raises(ConfigError, match=r"environment DEP2P_FOREIGN: there is no such setting") as foreign:
        load_config(environ={"DEP2P_FOREIGN": "x"})
    assert foreign.value.code == "D1002"
    with pytest.raises(ConfigError, match=r'DEP2P_SOKET.*did you mean "DEP2P_SOCKET"'):
        load_config(environ={"DEP2P_SOKET": "x"})


@pytest.mark.parametrize("name", ["DEP2P_DATA_DIR", "DEP2P_SOCKET", "DEP2P_CONFIG", "DEP2P_LISTEN", "DEP2P_LOG_FILE"])
def test_an_empty_variable_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment {name}: the variable is empty"):
        load_config(environ={name: ""})


def test_variables_of_commands_tests_and_child_programs_are_no_settings() -> None:
    environ = {
        "DEP2P_KEY": "",
        "DEP2P_HEADERS": "{}",
        "DEP2P_FUZZ_S": "2",
        "DEP2P_TEST_ROUTES": "x",
        "DEP2P_SEEDS": "4",
    }
    assert set(load_config(environ=environ).origins.values()) == {"default"}


def test_every_variable_that_the_tree_uses_is_known() -> None:
    """A variable that code or scripts set, and that the daemon refuses, would stop a daemon started below them."""
    root = Path(__file__).resolve().parents[2]
    files = [
        path
        for folder in ("cli", "spark_analytics", "bench", "examples", "tests", "packaging", "dep2p")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".service") and "node_modules" not in path.parts
    ]
    known = {*setting_variables(), *RESERVED, "DEP2P_FOREIGN", "DEP2P_SOKET", "DEP2P_LOG_LEVL", "DEP2P_PUBSUB_PUBLICK"}
    used = {
        name
        for path in [*files, root / "Makefile"]
        for name in re.findall(r"(?<![A-Z_])DEP2P_[A-Z0-9]+(?:_[A-Z0-9]+)*(?![A-Z0-9_*])", path.read_text("utf-8"))
        if not name.startswith(RESERVED_STARTS)
    }
    assert used - known == set()


def test_a_data_directory_among_the_flags_comes_before_the_socket_of_the_environment(tmp_path: Path) -> None:
    environ = {"DEP2P_SOCKET": "/tmp/other.sock"}
    assert load_config(environ=environ).socket_path == Path("/tmp/other.sock")
    assert load_config(environ=environ).origins["control.socket"] == "environment DEP2P_SOCKET"
    chosen = load_config(flags={"node.data_dir": str(tmp_path)}, environ=environ)
    assert chosen.socket_path == tmp_path / "control.sock"
    with pytest.raises(ConfigError, match=r"DEP2P_SOCKET is /tmp/other.*DEP2P_CONTROL_SOCKET is /x"):
        load_config(environ=environ | {"DEP2P_CONTROL_SOCKET": "/x"})


def test_certificate_and_key_are_named_together() -> None:
    with pytest.raises(ConfigError, match="tls_cert_file: certificate and key belong together"):
        load_config(flags={"control.tls_cert_file": "/c.pem"})
    with pytest.raises(ConfigError, match=r"tls: .*is not HOST:PORT"):
        load_config(flags={"control.tls": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"not a loopback address.*set .control. tls"):
        load_config(flags={"control.tcp": "0.0.0.0:4780"})


def test_toml_values() -> None:
    assert as_toml('a"b\\c') == '"a\\"b\\\\c"'
    assert [as_toml(value) for value in (True, 12_345, 1.5, ("a",), Path("/x"))] == [
        "true",
        "12_345",
        "1.5",
        '["a"]',
        '"/x"',
    ]
    assert field_docs(int) == {}


@pytest.mark.parametrize("field", dataclasses.fields(Limits), ids=lambda field: field.name)
@pytest.mark.parametrize("value", [-1, float("nan"), 0])
def test_no_limit_of_the_python_api_lets_callers_wait_forever(field: dataclasses.Field[object], value: float) -> None:
    if value == 0 and not field.name.endswith("_max"):
        Limits(**{field.name: 0})
    else:
        with pytest.raises(ValueError, match=field.name):
            Limits(**{field.name: value})  # type: ignore[arg-type]


ODD_TEXTS = [
    "\0",
    "\ud800",
    "~no such user",
    "",
    "é" * 300,
    "9" * 5_000,
    "1e999",
    "nan",
    "١٢",
    "²",
    "a\nb",
    "127.0.0.1:²",
    "/" * 5_000,
    "[",
    "/ip4/1.2.3.4/tcp/²",
]
ODD_VALUES = [
    "1" * 400,
    "0x" + "f" * 4_000,
    "1e400",
    "nan",
    "[[[1]]]",
    "{a=1}",
    "1979-05-27",
    '["\\u0000"]',
    "[" * 3_000,
]


@pytest.mark.parametrize("section", list(KEYS))
def test_no_value_ends_in_another_error_than_a_configurations(section: str, tmp_path: Path) -> None:
    """Values of any type and size, for every key, as a flag and in the file."""
    file = tmp_path / "config.toml"
    for name in KEYS[section]:
        for text in ODD_TEXTS:
            with suppress(ConfigError):
                load_config(flags={f"{section}.{name}": text})
        for value in ODD_VALUES:
            file.write_text(f"[{section}]\n{name} = {value}\n")
            with suppress(ConfigError):
                load_config(config_file=file)
