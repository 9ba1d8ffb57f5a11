"""Which daemon a program means: its arguments, else the environment, else the selected context, else the default."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dep2p.config import environment
from dep2p.config.contexts import DEFAULT, Context, ContextsFile, check_remote, contexts_path, fingerprint_of
from dep2p.config.loader import Config, load_config, setting_variables
from dep2p.config.validation import split_loopback
from dep2p.errors import ConfigError

_OF_A_DAEMON: Final = (
    environment.SOCKET,
    environment.DATA_DIR,
    environment.CONTROL_SOCKET,
    environment.CONFIG,
    "DEP2P_CONTROL_TCP",
)
"""Variables that say which daemon here is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetArguments:
    """The arguments of a program that say which daemon it means; None where it gives none."""

    socket: Path | str | None = None
    data_dir: Path | str | None = None
    tcp: str | None = None
    token: str | None = None
    fingerprint: str | None = None
    ca_file: Path | str | None = None
    context: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonTarget:
    """Where a daemon is, and who said so."""

    origin: str
    """Such as ``argument data_dir``, ``environment DEP2P_SOCKET``, ``context home`` or ``default``."""
    socket: Path | None = None
    """The Unix socket of a daemon here; None for ``tcp``."""
    tcp: str = ""
    """HOST:PORT of a control API over TCP; with TLS where there is a fingerprint or a CA."""
    token: str = ""
    fingerprint: str = ""
    ca_file: str = ""
    config: Config | None = None
    """The configuration of a daemon here."""

    @property
    def is_tls(self) -> bool:
        """Whether the control API is reached over TLS."""
        return bool(self.fingerprint or self.ca_file)


def find_daemon(
    given: TargetArguments,
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, object] | None = None,
    config_file: Path | None = None,
) -> DaemonTarget:
    """Return the daemon that is meant. ``flags`` and ``config_file`` are further ones of `load_config`.

    Raises :class:`ConfigError` for values that contradict each other or cannot be used; it names where each is from.
    """
    _check_arguments(given)
    if given.tcp is not None:
        return _over_tcp(given)
    if given.socket is None and given.data_dir is None:
        name, origin = _context_of(given, environ)
        if name:
            context = Context() if name == DEFAULT else ContextsFile(contexts_path(environ)).get(name, origin)
            rest = {key: text for key, text in environ.items() if key not in _OF_A_DAEMON}
            return _in_context(context, f"context {name} ({origin})", rest, flags, config_file)
    origin = (
        "argument socket" if given.socket is not None else "argument data_dir" if given.data_dir is not None else ""
    )
    return _here(origin, given.socket, given.data_dir, environ, flags, config_file)


def _check_arguments(given: TargetArguments) -> None:
    for name in ("socket", "data_dir", "tcp", "token", "fingerprint", "ca_file", "context"):
        value = getattr(given, name)
        if value is not None and not str(value):
            raise ConfigError(f"argument {name}: the text is empty. Leave it out, or give it a value.")
    choices = [name for name in ("socket", "tcp", "context") if getattr(given, name) is not None]
    if given.data_dir is not None and ("tcp" in choices or "context" in choices):
        choices.insert(0, "data_dir")
    if len(choices) > 1:
        texts = " and ".join(f"argument {name} ({getattr(given, name)})" for name in choices)
        raise ConfigError(f"{texts} each say which daemon is meant: give one of them.")
    extra = [name for name in ("token", "fingerprint", "ca_file") if getattr(given, name) is not None]
    if extra and given.tcp is None:
        raise ConfigError(f"argument {extra[0]} goes with tcp, which says HOST:PORT.")


def _over_tcp(given: TargetArguments) -> DaemonTarget:
    tcp, token = given.tcp or "", given.token or ""
    fingerprint = "" if given.fingerprint is None else fingerprint_of(given.fingerprint, "argument fingerprint")
    ca_file = "" if given.ca_file is None else str(given.ca_file)
    if fingerprint or ca_file:
        ca_file = ca_file if ca_file in ("", "system") else str(Path(ca_file).expanduser().absolute())
        check_remote(tcp, token, fingerprint, ca_file, "argument tcp")
    else:
        split_loopback(tcp, "argument tcp", instead="or give fingerprint or ca_file for a node on another machine")
    return DaemonTarget(origin="argument tcp", tcp=tcp, token=token, fingerprint=fingerprint, ca_file=ca_file)


def _context_of(given: TargetArguments, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the context's name and who said it; "" when none is meant."""
    if given.context is not None:
        return given.context, "argument context"
    environment.check_environment(environ, setting_variables())
    here = [name for name in _OF_A_DAEMON if name in environ]
    name = environ.get(environment.CONTEXT)
    if name is not None:
        if here:
            raise ConfigError(
                f"environment {environment.CONTEXT} is {name}, and environment {here[0]} is {environ[here[0]]}: each "
                "says which daemon is meant. Unset one of them."
            )
        return name, f"environment {environment.CONTEXT}"
    if here:
        return "", ""
    return ContextsFile(contexts_path(environ)).selected(), "selected"


def _in_context(
    context: Context,
    origin: str,
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None,
    config_file: Path | None,
) -> DaemonTarget:
    if context.is_remote:
        return DaemonTarget(
            origin=origin,
            tcp=context.addr,
            token=context.token,
            fingerprint=context.fingerprint,
            ca_file=context.ca_file,
        )
    return _here(origin, context.socket or None, context.data_dir or None, environ, flags, config_file)


def _here(
    origin: str,
    socket: Path | str | None,
    data_dir: Path | str | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None,
    config_file: Path | None,
) -> DaemonTarget:
    """The daemon that `dep2p daemon` would start with the same flags and environment."""
    said = {"control.socket": socket, "node.data_dir": data_dir}
    chosen = {path: str(value) for path, value in said.items() if value is not None}
    config = load_config(flags={**(flags or {}), **chosen}, environ=environ, config_file=config_file)
    config = replace(config, origins={**config.origins, **dict.fromkeys(chosen, origin)})
    if not origin:
        paths = ("control.socket", "node.data_dir")
        origin = next((config.origins[path] for path in paths if config.origins[path] != "default"), "default")
    return DaemonTarget(origin=origin, socket=config.socket_path, config=config)
