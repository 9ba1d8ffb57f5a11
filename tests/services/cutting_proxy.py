"""A proxy on loopback in front of a server, which cuts its connections where a test wants it."""

import contextlib
import socket
import threading
from urllib.parse import urlsplit, urlunsplit

_CHUNK_BYTES = 1 << 16


class CuttingProxy:
    """One connection at a time, as a store has. Runs in a thread of its own until `close`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 0)
        self._server = socket.create_server(("127.0.0.1", 0))
        port = int(self._server.getsockname()[1])
        user = f"{parts.username}@" if parts.username else ""
        self.url = urlunsplit((parts.scheme, f"{user}127.0.0.1:{port}", parts.path, parts.query, ""))
        self.cuts = 0
        self.is_refusing = False
        """New connections are closed at once."""
        self._before = b""
        self._after = b""
        self._is_armed = False
        self._refuses_then = False
        threading.Thread(target=self._serve, daemon=True).start()

    def cut_before(self, marker: bytes, *, refuse: bool = False) -> None:
        """Cut when the client sends it, which does not reach the server."""
        self._before, self._after, self._is_armed, self._refuses_then = marker, b"", False, refuse

    def cut_after(self, marker: bytes, answer: bytes, *, refuse: bool = False) -> None:
        """Let what the client sends through, and cut when the server answers it with ``answer``, which does not reach
        the client. ``refuse``: then `is_refusing`."""
        self._before, self._after, self._is_armed, self._refuses_then = marker, answer or b"?", False, refuse
        self._any_answer = not answer

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self.is_refusing:
                    client.close()
                    continue
                threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()
        self._pass(client, server, True)

    def _pass(self, source: socket.socket, target: socket.socket, is_from_client: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                if self._is_to_cut(chunk, is_from_client):
                    self.cuts += 1
                    self.is_refusing = self._refuses_then
                    self._before = self._after = b""
                    break
                target.sendall(chunk)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _is_to_cut(self, chunk: bytes, is_from_client: bool) -> bool:
        if is_from_client:
            if not self._before or self._before not in chunk:
                return False
            if not self._after:
                return True
            self._is_armed = True
            return False
        return self._is_armed and bool(self._after) and (self._any_answer or self._after in chunk)
