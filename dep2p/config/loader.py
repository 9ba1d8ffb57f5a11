"""The daemon's configuration: flags, `DEP2P_*` variables, the file, defaults; each value knows its origin.

The file is TOML, by default ``<data_dir>/config.toml``. Keys are the fields of the dataclasses below; the texts under
them are the documentation that `dep2p config example` and docs/reference/config.md print. Nothing here reads the
process's environment: it comes in as a mapping.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from dep2p.config import environment
from dep2p.config.nsq import NsqConfig
from dep2p.config.pubsub import check_router_keys
from dep2p.config.sections import QueuesConfig, check_standby
from dep2p.config.trace import TraceConfig, check_trace_keys
from dep2p.config.validation import check
from dep2p.config.values import ConfigKey, as_toml, from_text, from_toml, keys_of, nearest
from dep2p.encoding.shapes import is_sequence, is_text_map
from dep2p.errors import ConfigError
from dep2p.limits import Limits

SOCKET_PATH_BYTES_MAX: Final = 107
"""The longest path of a Unix socket on Linux (sun_path less its end mark)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """[node]: who this node is and how it meets others."""

    data_dir: Path = Path("~/.local/share/dep2p")
    """Directory of the key, realms, peer store, lock and control socket; mode 0700. The default is
    $XDG_DATA_HOME/dep2p, or ~/.local/share/dep2p. Change it to run several daemons on one machine."""
    key_file: str = "auto"
    """File with the node's private key; made on the first start. "auto" is <data_dir>/node.key."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/4001",)
    """Addresses to listen on. Port 0 takes any free port; then addresses change with every start. [] only dials."""
    advertise: tuple[str, ...] = ()
    """Addresses to announce to peers besides those listened on: set it behind a forwarded port or a public name."""
    bootstrap: tuple[str, ...] = ()
    """Peers to dial at start, each address ending in /p2p/PEER. A realm's own addresses need not be here."""
    mdns: bool = False
    """Find peers on the local network by multicast, and be found."""
    dht: bool = False
    """Find peers through the Kademlia DHT; needs bootstrap peers."""
    rendezvous: tuple[str, ...] = ()
    """Rendezvous servers to register with and ask, each address ending in /p2p/PEER."""
    relay: Literal["off", "client", "server"] = "off"
    """"client" lets peers reach this node through relays; "server" also carries traffic for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """[control]: where programs and the command line reach the daemon."""

    socket: str = "auto"
    """Path of the Unix socket (mode 0600). "auto" is <data_dir>/control.sock, or a name below $XDG_RUNTIME_DIR/dep2p
    when that path is longer than the 107 bytes that a socket may have."""
    tcp: str = ""
    """Also listen on this loopback HOST:PORT, for programs that cannot use the socket; "" does not. Needs the token."""
    tls: str = ""
    """Also listen on this HOST:PORT with TLS 1.3, for programs on other machines; "" does not. HOST is an address of
    this machine, or 0.0.0.0 or [::] for all. Needs the token, whose owner commands the whole node."""
    tls_cert_file: str = "auto"
    """PEM file with the certificate for tls, and those of its authorities. "auto" is <data_dir>/control.crt, made at
    the first start; programs then know it by its fingerprint."""
    tls_key_file: str = "auto"
    """PEM file with the certificate's private key (mode 0600). "auto" is <data_dir>/control.key."""
    token_file: str = "auto"
    """File with the bearer token for tcp and tls (mode 0600); made when missing. "auto" is <data_dir>/control.token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """[log]: the daemon's log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is written. "debug" may be much."""
    format: Literal["text", "json"] = "text"
    """"json" writes one object on each line."""
    file: str = ""
    """File to append to; it may be moved away at any time and is then made anew. "" writes to stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PubSubConfig:
    """[pubsub]: publish/subscribe. Every joined realm has it; its bounds are in [limits]."""

    public: bool = False
    """Also speak libp2p's GossipSub (/meshsub/1.1.0 and 1.2.0) with every peer that is connected, member or not, as
    go-libp2p and js-libp2p do. Topics there are reached with --public."""
    public_signing: Literal["strict_sign", "strict_no_sign"] = "strict_sign"
    """On that public network: sign, and take signed messages only; or neither sign nor take signed ones. All nodes of
    a network must agree."""
    public_message_ids: Literal["auto", "go", "js", "rust", "sha256"] = "auto"
    """How messages are named on that public network: all nodes of a network must agree. "auto" is go's way, or
    "sha256" of the content where nothing is signed. Take "js" among nodes with js-libp2p's defaults."""
    d: int = 6
    """Neighbours with which each message of a topic is exchanged. More: fewer hops, more copies."""
    d_lo: int = 4
    """With fewer than these, further ones are taken in at the next heartbeat."""
    d_hi: int = 12
    """From this number on, some are left out at the next heartbeat."""
    d_lazy: int = 6
    """Further neighbours that hear at each heartbeat which messages there were."""
    heartbeat_s: float = 1.0
    """Time between two rounds of upkeep and gossip. Shorter repairs sooner and costs CPU on each node."""
    fanout_ttl_s: float = 60.0
    """Neighbours for a topic that is published to but not joined are kept for so long after the last publish."""
    history_length: int = 5
    """Heartbeats for which a message can be asked for."""
    history_gossip: int = 3
    """Heartbeats for which it is announced to neighbours."""
    flood_publish: bool = False
    """Send own publishes to every subscribed neighbour, not just to d of them: faster, and more upload."""
    trace_json: str = ""
    """File to which the router's trace events are appended, as NDJSON in the form of libp2p's JSON tracer. It grows
    with each message. "" writes none."""


_SECTIONS: Final[dict[str, type]] = {
    "node": NodeConfig,
    "limits": Limits,
    "control": ControlConfig,
    "pubsub": PubSubConfig,
    "queues": QueuesConfig,
    "nsq": NsqConfig,
    "trace": TraceConfig,
    "log": LogConfig,
}
KEYS: Final[dict[str, dict[str, ConfigKey]]] = {name: keys_of(name, cls) for name, cls in _SECTIONS.items()}
"""Every key, by section and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A complete, checked configuration. Made by :func:`load_config`."""

    node: NodeConfig = field(default_factory=NodeConfig)
    limits: Limits = field(default_factory=Limits)
    control: ControlConfig = field(default_factory=ControlConfig)
    pubsub: PubSubConfig = field(default_factory=PubSubConfig)
    queues: QueuesConfig = field(default_factory=QueuesConfig)
    nsq: NsqConfig = field(default_factory=NsqConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where the value of ``section.key`` comes from: "flag", "environment NAME", "file PATH" or "default"."""
    file: Path | None = None
    """The file that was read, if any."""
    runtime_dir: Path | None = None
    """$XDG_RUNTIME_DIR."""
    notify_socket: str = ""
    """$NOTIFY_SOCKET: where a service manager wants to hear that the daemon is ready."""

    @property
    def data_dir(self) -> Path:
        """The data directory, absolute."""
        return self.node.data_dir

    @property
    def key_file(self) -> Path:
        """The node's private key."""
        return self.data_dir / "node.key" if self.node.key_file == "auto" else Path(self.node.key_file).expanduser()

    @property
    def token_file(self) -> Path:
        """The bearer token of the control API on TCP."""
        chosen = self.control.token_file
        return self.data_dir / "control.token" if chosen == "auto" else Path(chosen).expanduser()

    @property
    def tls_files(self) -> tuple[Path, Path]:
        """Certificate and private key of the control API over TLS."""
        cert, key = self.control.tls_cert_file, self.control.tls_key_file
        return (
            self.data_dir / "control.crt" if cert == "auto" else Path(cert).expanduser(),
            self.data_dir / "control.key" if key == "auto" else Path(key).expanduser(),
        )

    @property
    def trace_dir(self) -> Path:
        """The default directory of traces."""
        return self.data_dir / "trace" if self.trace.dir == "auto" else Path(self.trace.dir).expanduser()

    @property
    def lock_file(self) -> Path:
        """Held by the daemon of this data directory."""
        return self.data_dir / "daemon.lock"

    @property
    def realms_dir(self) -> Path:
        """One ``<name>.realm`` for each joined realm."""
        return self.data_dir / "realms"

    @property
    def socket_path(self) -> Path:
        """The control socket. Raises :class:`ConfigError` when no path is short enough."""
        if self.control.socket == "auto":
            return control_socket_path(self.data_dir, self.runtime_dir)
        return Path(self.control.socket).expanduser()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by section and key, ready for JSON; a password in a URL is shown as ``***``."""
        return {
            section: {name: _plain(_shown(getattr(getattr(self, section), name))) for name in keys}
            for section, keys in KEYS.items()
        }

    def to_toml(self, *, origin: bool = False) -> str:
        """The effective configuration as TOML; with ``origin``, a comment after each value tells its origin.

        A password in a URL is shown as ``***``.
        """
        lines: list[str] = []
        for section, keys in KEYS.items():
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
            for name, key in keys.items():
                line = f"{name} = {as_toml(_shown(getattr(getattr(self, section), name)))}"
                lines.append(f"{line}  # {self.origins.get(key.path, 'default')}" if origin else line)
        return "\n".join(lines) + "\n"


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_DATA_HOME/dep2p, or ~/.local/share/dep2p."""
    base = environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path("~/.local/share").expanduser()) / "dep2p"


def control_socket_path(data_dir: Path, runtime_dir: Path | None = None) -> Path:
    """Where the daemon of a data directory has its control socket by default.

    Raises :class:`ConfigError` when the path is over 107 bytes and there is no ``runtime_dir``.
    """
    directory = data_dir.expanduser().absolute()
    path = directory / "control.sock"
    if len(bytes(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    digest = hashlib.sha256(bytes(directory)).hexdigest()[:24]
    if runtime_dir is not None:
        short = runtime_dir / "dep2p" / f"{digest}.sock"
        if len(bytes(short)) <= SOCKET_PATH_BYTES_MAX:
            return short
    raise ConfigError(
        f"[control] socket: {path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes of a Unix socket's path, and "
        "XDG_RUNTIME_DIR is not set. Set it, name a short path in [control] socket, or choose a shorter data_dir."
    )


def env_name(key: ConfigKey) -> str:
    """The variable of a key: ``DEP2P_LISTEN`` for [node] listen, ``DEP2P_LOG_LEVEL`` for [log] level."""
    return f"DEP2P_{key.name}".upper() if key.section == "node" else f"DEP2P_{key.section}_{key.name}".upper()


def load_config(
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Config:
    """Put the configuration together.

    ``flags`` are values by ``section.key``, typed or as text; ``environ`` is the environment (os.environ);
    ``config_file`` must exist when given, as must the file in ``DEP2P_CONFIG``.

    Raises :class:`ConfigError` that names the place, the key, what is wrong and what to write instead.
    """
    environ = environ or {}
    given = {path: value for path, value in (flags or {}).items() if value is not None}
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    environment.check_environment(environ, setting_variables())
    if config_file is None and environment.CONFIG in environ:
        config_file = Path(environ[environment.CONFIG])
    outer = _read_flags(given), _read_environment(environ)
    file, found = _find_file(config_file, outer, environ)
    file_values = {} if file is None else _read_file(file)
    inside = file_values.get("node.data_dir")
    if found is not None and isinstance(inside, Path) and inside.absolute() != found:
        raise ConfigError(
            f"{file}: [node] data_dir: {inside} is not the directory in which this file was found. "
            "Remove the key, or name the file with --config."
        )
    layers: list[tuple[dict[str, object], dict[str, str]]] = [
        (file_values, dict.fromkeys(file_values, f"file {file}")),
        (outer[1], {path: f"environment {env_name(_key(path))}" for path in outer[1]}),
        (outer[0], dict.fromkeys(outer[0], "flag")),
    ]
    for layer, names in layers:
        values |= layer
        origins |= names
    if (chosen_socket := _socket_of(environ, given)) is not None:
        values["control.socket"] = chosen_socket
        origins["control.socket"] = f"environment {environment.SOCKET}"
    data_dir = values.get("node.data_dir")
    chosen = data_dir if isinstance(data_dir, Path) else default_data_dir(environ)
    values["node.data_dir"] = chosen.expanduser().absolute()
    for section, keys in KEYS.items():
        for name in keys:
            origins.setdefault(f"{section}.{name}", "default")
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return _build(values, origins, file, Path(runtime) if runtime else None, environ.get("NOTIFY_SOCKET", ""))


def example_toml() -> str:
    """A file with every key at its default, commented out, each under its documentation."""
    lines = [
        "# dep2p daemon configuration. Put it at <data_dir>/config.toml, or name it with `dep2p daemon --config FILE`.",
        "# Flags come before DEP2P_* variables, these before this file, this before the defaults shown here.",
        "# Times are seconds (_s), sizes bytes (_bytes). An unknown key is an error.",
    ]
    for section, keys in KEYS.items():
        lines += ["", f"[{section}]"]
        for name, key in keys.items():
            lines += [f"# {line.strip()}" for line in key.doc.splitlines()]
            lines.append(f"# {name} = {as_toml(key.default)}")
            lines.append("")
        lines.pop()
    return "\n".join(lines) + "\n"


def _key(path: str) -> ConfigKey:
    section, _, name = path.partition(".")
    return KEYS[section][name]


def _read_flags(flags: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for path, value in flags.items():
        section, _, name = path.partition(".")
        if section not in KEYS or name not in KEYS[section]:
            known = [key.path for keys in KEYS.values() for key in keys.values()]
            raise ConfigError(f"{path}: there is no such setting; {nearest(path, known)}", "D1002")
        key = KEYS[section][name]
        where = f"flag {path}"
        values[path] = from_text(key, value, where) if isinstance(value, str) else from_toml(key, value, where)
    return values


def setting_variables() -> dict[str, ConfigKey]:
    """The variable of every setting."""
    return {env_name(key): key for keys in KEYS.values() for key in keys.values()}


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    names = setting_variables()
    return {
        names[name].path: from_text(names[name], text, f"environment {name}")
        for name, text in environ.items()
        if name in names
    }


def _socket_of(environ: Mapping[str, str], given: Mapping[str, object]) -> str | None:
    """DEP2P_SOCKET. It says which daemon is meant, so that a data directory or socket among the flags comes before it.

    Raises :class:`ConfigError` when DEP2P_CONTROL_SOCKET says something else.
    """
    text = environ.get(environment.SOCKET)
    if text is None or "control.socket" in given or "node.data_dir" in given:
        return None
    name = f"environment {environment.SOCKET}"
    other = environ.get(environment.CONTROL_SOCKET, text)
    if other != text:
        raise ConfigError(
            f"{name} is {text}, and environment {environment.CONTROL_SOCKET} is {other}: unset one of them."
        )
    return str(from_text(KEYS["control"]["socket"], text, name))


def _find_file(
    config_file: Path | None, outer: tuple[dict[str, object], dict[str, object]], environ: Mapping[str, str]
) -> tuple[Path | None, Path | None]:
    """The file to read, and the data directory in which it was found (None when it was named)."""
    if config_file is not None:
        return config_file.expanduser(), None
    given = outer[0].get("node.data_dir") or outer[1].get("node.data_dir")
    directory = given if isinstance(given, Path) else default_data_dir(environ)
    found = directory.expanduser().absolute()
    path = found / "config.toml"
    try:
        return (path, found) if path.is_file() else (None, None)
    except OSError as error:  # a path that is too long, a directory that may not be entered
        raise ConfigError(f"{path}: cannot look for the configuration: {error.strerror or error}", "D1004") from None


def _read_file(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as opened:
            document = tomllib.load(opened)
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not TOML: the file is not UTF-8 text", "D1004") from None
    except ValueError as error:  # tomllib's own, or one for a number of thousands of digits
        raise ConfigError(f"{file}: not TOML: {error}", "D1004") from None
    except RecursionError:
        raise ConfigError(f"{file}: not TOML that can be used: it is nested too deeply", "D1004") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the configuration: {error.strerror or error}", "D1004") from None
    values: dict[str, object] = {}
    for section, table in document.items():
        if section not in KEYS:
            raise ConfigError(f"{file}: [{section}]: there is no such section; {nearest(section, KEYS)}", "D1002")
        if not is_text_map(table):
            raise ConfigError(f"{file}: {section}: is a section, not a key. Write [{section}] on a line of its own.")
        for name, value in table.items():
            key = KEYS[section].get(name)
            where = f"{file}: [{section}] {name}"
            if key is None:
                raise ConfigError(f"{where}: there is no such key; {_nearest_key(section, name)}", "D1002")
            values[key.path] = from_toml(key, value, where)
    return values


def _nearest_key(section: str, name: str) -> str:
    for other, keys in KEYS.items():
        if other != section and name in keys:
            return f"it belongs into [{other}]"
    return nearest(name, KEYS[section])


def _build(
    values: Mapping[str, object], origins: dict[str, str], file: Path | None, runtime: Path | None, notify: str
) -> Config:
    parts: dict[str, Any] = {section: {} for section in KEYS}
    for path, value in values.items():
        key = _key(path)
        check(key, value, f"{origins[path].removeprefix('file ')}: [{key.section}] {key.name}")
        parts[key.section][key.name] = value
    config = Config(
        **{section: cls(**parts[section]) for section, cls in _SECTIONS.items()},
        origins=origins,
        file=file,
        runtime_dir=runtime,
        notify_socket=notify,
    )
    _check_relations(config)
    return config


def _check_relations(config: Config) -> None:
    limits, origins = config.limits, config.origins
    for name in ("link_out_bytes_max", "link_in_bytes_max", "stream_item_bytes_max"):
        if getattr(limits, name) < limits.message_bytes_max:
            which = name if origins[f"limits.{name}"] != "default" else "message_bytes_max"
            raise ConfigError(
                f"{origins[f'limits.{which}']}: [limits] {which}: {name} ({getattr(limits, name)}) is smaller than "
                f"message_bytes_max ({limits.message_bytes_max}), so that no such message could pass. Raise {name}, "
                "or lower message_bytes_max."
            )
    if config.node.dht and not config.node.bootstrap:
        raise ConfigError(
            f"{origins['node.dht']}: [node] dht: the DHT needs someone to ask first. Name a peer in [node] bootstrap, "
            "or set dht = false."
        )
    own_files = {config.control.tls_cert_file == "auto", config.control.tls_key_file == "auto"}
    if len(own_files) == 2:
        name = "tls_cert_file" if config.control.tls_cert_file != "auto" else "tls_key_file"
        raise ConfigError(
            f"{origins[f'control.{name}']}: [control] {name}: certificate and key belong together. Name both files, or "
            'leave both at "auto".'
        )
    check_standby(config.queues, origins)
    if config.pubsub.public_signing != "strict_sign" and not config.pubsub.public:
        raise ConfigError(
            f"{origins['pubsub.public_signing']}: [pubsub] public_signing: there is no public network to sign on. Set "
            "public = true, or remove the key."
        )
    if config.pubsub.public_message_ids != "auto" and not config.pubsub.public:
        raise ConfigError(
            f"{origins['pubsub.public_message_ids']}: [pubsub] public_message_ids: there is no public network. Set "
            "public = true, or remove the key."
        )
    check_router_keys(config.pubsub, origins)
    check_trace_keys(config.trace, origins)
    socket = config.socket_path
    if len(bytes(socket)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{origins['control.socket']}: [control] socket: {socket} is longer than the {SOCKET_PATH_BYTES_MAX} bytes "
            "of a Unix socket's path. Choose a shorter one."
        )


def _shown(value: object) -> object:
    return re.sub(r"^(\w+://[^:@/]*):.*@", r"\1:***@", value) if isinstance(value, str) else value


def _plain(value: object) -> object:
    if is_sequence(value):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def section_docs() -> dict[str, str]:
    """Return the description of each section, by name."""
    return {name: (cls.__doc__ or "").strip() for name, cls in _SECTIONS.items()}
