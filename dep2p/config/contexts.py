"""Contexts: named daemons, on this machine and on others. The file holds tokens, so only its user may read it."""

import contextlib
import fcntl
import hashlib
import os
import re
import ssl
import stat
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dep2p.config.validation import split_address
from dep2p.errors import ConfigError

DEFAULT: Final = "default"
"""The name that stands for the daemon of the default data directory; no context can have it."""
CONTEXTS_MAX: Final = 1_024
FILE_BYTES_MAX: Final = 4_194_304
SYSTEM_CA: Final = "system"
"""In place of a CA file: the certificate authorities that the machine trusts."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Context(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One daemon: exactly one of ``data_dir``, ``socket`` and ``addr`` is set."""

    data_dir: str = ""
    """A node here: its data directory, absolute."""
    socket: str = ""
    """A node here: its control socket, absolute."""
    addr: str = ""
    """A control API over TLS, as HOST:PORT."""
    token: str = ""
    """The bearer token for ``addr``."""
    fingerprint: str = ""
    """SHA-256 of the certificate in 64 hex digits."""
    ca_file: str = ""
    """PEM file of the authority that signed the certificate, or "system"."""

    @property
    def is_remote(self) -> bool:
        """Whether the daemon is reached over the network."""
        return bool(self.addr)


class _Stored(Struct, forbid_unknown_fields=True):
    version: int = 1
    selected: str = ""
    contexts: dict[str, Context] = msgspec.field(default_factory=dict[str, Context])


def fingerprint_of(text: str, where: str) -> str:
    """A fingerprint in 64 lower-case hex digits; colons and ``sha256:`` in front may be there.

    Raises :class:`ConfigError` that starts with ``where``.
    """
    plain = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if not _FINGERPRINT.fullmatch(plain):
        raise ConfigError(f"{where}: a fingerprint has 64 hex digits; `dep2p token show` on that node prints it.")
    return plain


def certificate_fingerprint(cert_file: Path) -> str:
    """SHA-256 of the first certificate in a PEM file, in hex. Raises :class:`ConfigError`."""
    start, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = cert_file.read_text("ascii")
        certificate = text[text.index(start) : text.index(end) + len(end)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the certificate {cert_file}: {error}", "D1004") from None


def check_token(text: str, where: str) -> str:
    """Raises :class:`ConfigError` for a text that no header can carry, or that is too short to be a token."""
    token = text.strip()
    if not 16 <= len(token) <= 4_096 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where}: a token has 16 or more ASCII characters without spaces; `dep2p token show` on that node prints "
            "it."
        )
    return token


def check_context(name: str, context: Context, where: str) -> None:
    """Raises :class:`ConfigError` that starts with ``where`` for a name or a content that cannot be used."""
    if not _NAME.fullmatch(name) or name == DEFAULT:
        raise ConfigError(
            f"{where}: {name[:80]!r} cannot name a context: take letters, digits, dots, dashes and underlines, at most "
            f'64; "{DEFAULT}" stands for the default data directory.'
        )
    if sum(map(bool, (context.data_dir, context.socket, context.addr))) != 1:
        raise ConfigError(f"{where}: context {name} must have one of data_dir, socket and addr.")
    for path in (context.data_dir, context.socket):
        if path and not path.startswith("/"):
            raise ConfigError(f"{where}: context {name}: the path {path} is not absolute.")
    if not context.addr:
        if context.token or context.fingerprint or context.ca_file:
            raise ConfigError(f"{where}: context {name}: token, fingerprint and CA go with an address only.")
        return
    check_remote(context.addr, context.token, context.fingerprint, context.ca_file, f"{where}: context {name}")


def check_remote(addr: str, token: str, fingerprint: str, ca_file: str, where: str) -> None:
    """Raises :class:`ConfigError` for an address without a token or without a way to check its certificate."""
    check_certificate_rule(addr, fingerprint, ca_file, where)
    if not token:
        raise ConfigError(f"{where}: {addr} needs the token of its daemon; `dep2p token show` there prints it.")
    check_token(token, where)


def check_certificate_rule(addr: str, fingerprint: str, ca_file: str, where: str) -> None:
    """Raises :class:`ConfigError` for an address without exactly one way to check its certificate."""
    split_address(addr, where)
    if bool(fingerprint) == bool(ca_file):
        raise ConfigError(
            f"{where}: {addr} needs the fingerprint of its certificate, or the CA that signed it (one of the two); "
            "`dep2p token show` there prints the fingerprint. Without it, any node in between could act as that daemon."
        )
    if fingerprint and fingerprint != fingerprint_of(fingerprint, where):
        raise ConfigError(f"{where}: write the fingerprint as 64 lower-case hex digits.")
    if ca_file and ca_file != SYSTEM_CA and not ca_file.startswith("/"):
        raise ConfigError(f"{where}: the path {ca_file} of the CA is not absolute.")


def contexts_path(environ: Mapping[str, str]) -> Path:
    """$XDG_CONFIG_HOME/dep2p/contexts.json, or ~/.config/dep2p/contexts.json."""
    base = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME", "")
    config = Path(base) if base.startswith("/") else Path(home or os.path.expanduser("~")) / ".config"
    return config / "dep2p" / "contexts.json"


class ContextsFile:
    """The contexts of a user. Each change is written whole or not at all, one at a time. Methods raise ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def contexts(self) -> dict[str, Context]:
        """All contexts by name."""
        return dict(self._load().contexts)

    def selected(self) -> str:
        """The selected name; "" when none is."""
        return self._load().selected

    def get(self, name: str, origin: str) -> Context:
        """The context of that name. ``origin`` says in the error who named it."""
        found = self._load().contexts.get(name)
        if found is None:
            known = ", ".join([DEFAULT, *self._load().contexts])
            raise ConfigError(
                f"{origin}: there is no context {name[:80]!r} in {self.path}; there is: {known}. Choose one "
                "of these, or add it: `dep2p context add`."
            )
        return found

    def add(self, name: str, context: Context, *, replace: bool = False) -> None:
        """Add a context. An existing one is replaced only when asked."""
        check_context(name, context, "context add")
        with self._changed() as stored:
            if name in stored.contexts and not replace:
                raise ConfigError(f"there is a context {name} already: take another name, or --replace.")
            if len(stored.contexts) >= CONTEXTS_MAX:
                raise ConfigError(f"{self.path} holds {CONTEXTS_MAX} contexts, as many as it may: remove some.")
            stored.contexts[name] = context

    def remove(self, name: str) -> None:
        """Remove a context; a selected one is no longer selected."""
        self.get(name, "context rm")
        with self._changed() as stored:
            stored.contexts.pop(name, None)
            if stored.selected == name:
                stored.selected = ""

    def select(self, name: str) -> None:
        """Select a context; "default" selects none."""
        if name != DEFAULT:
            self.get(name, "context select")
        with self._changed() as stored:
            stored.selected = "" if name == DEFAULT else name

    def _load(self) -> _Stored:
        try:
            found = self.path.stat()
            if found.st_size > FILE_BYTES_MAX:
                raise ConfigError(f"{self.path}: {found.st_size} bytes are no list of contexts: move the file away.")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(f"{self.path}: others may read it, and it holds tokens: chmod 600 it.")
            content = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return _Stored()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot read the contexts: {error.strerror or error}", "D1004") from None
        try:
            stored = msgspec.json.decode(content, type=_Stored)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path}: not a list of contexts: {error}. Move it away.", "D1004") from None
        if stored.version != 1:
            raise ConfigError(f"{self.path}: version {stored.version} is of a later dep2p.", "D1004")
        for name, context in stored.contexts.items():
            check_context(name, context, str(self.path))
        return stored

    @contextlib.contextmanager
    def _changed(self) -> Generator[_Stored, None, None]:
        temporary = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX)
                stored = self._load()
                yield stored
                descriptor, temporary = tempfile.mkstemp(prefix=".contexts.", suffix=".tmp", dir=self.path.parent)
                with os.fdopen(descriptor, "wb") as file:  # mkstemp makes it with mode 0600
                    file.write(msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
                temporary = ""
            finally:
                os.close(directory)
                if temporary:
                    Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot write the contexts: {error.strerror or error}", "D1004") from None
