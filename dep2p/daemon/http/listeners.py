"""The sockets of the control API: a private Unix socket, loopback TCP with its token, and TCP for TLS."""

import os
import secrets
import socket
import stat
from pathlib import Path

import trio

from dep2p.config.validation import split_address, split_loopback
from dep2p.daemon.problems import Problem

_BACKLOG = 128


def open_unix(path: Path) -> trio.SocketListener:
    """Listen at ``path``, mode 0600. It replaces a socket that a dead daemon left, never one of a live daemon.

    Raises :class:`Problem` D3005.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_stale(path)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)  # from its first moment, the socket is for its owner alone
            try:
                opened.bind(str(path))
            finally:
                os.umask(before)
            opened.listen(_BACKLOG)
        except BaseException:
            opened.close()
            raise
    except OSError as error:
        raise Problem("D3005", f"cannot listen on the control socket {path}: {error.strerror or error}") from None
    return trio.SocketListener(trio.socket.from_stdlib_socket(opened))


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Problem("D3005", f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # a daemon listens there, and is busy
    raise Problem("D3005", f"another program listens on {path}: give each daemon a [control] socket of its own")


def open_tcp(text: str) -> trio.SocketListener:
    """Listen at loopback ``HOST:PORT``. Raises ConfigError, :class:`Problem` D3005."""
    host, port = split_loopback(text, "[control] tcp")
    return _open(host, port, text)


def open_tls(text: str) -> trio.SocketListener:
    """Listen at ``HOST:PORT`` of any network, for TLS. Raises ConfigError, :class:`Problem` D3005."""
    host, port = split_address(text, "[control] tls")
    return _open(host, port, text)


def _open(host: str, port: int, text: str) -> trio.SocketListener:
    try:
        opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.bind((host, port))
            opened.listen(_BACKLOG)
        except BaseException:
            opened.close()
            raise
    except OSError as error:
        raise Problem("D3005", f"cannot listen on {text} for the control API: {error.strerror or error}") from None
    return trio.SocketListener(trio.socket.from_stdlib_socket(opened))


def load_token(path: Path) -> str:
    """Return the bearer token; made (mode 0600) when the file is missing. Raises :class:`Problem` D3005."""
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            token = path.read_text("ascii").strip()
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise Problem("D3005", f"others may read the token file {path}: chmod 600 it") from None
            if len(token) < 16 or not token.isprintable() or " " in token:
                raise Problem("D3005", f"{path} holds no token (16 characters or more): delete it") from None
            return token
        token = secrets.token_urlsafe(32)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Problem("D3005", f"cannot use the token file {path}: {error}") from None
    return token
