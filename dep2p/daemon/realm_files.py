"""The realms that the daemon joins at start: one ``<name>.realm`` for each in ``<data_dir>/realms``."""

import logging
from pathlib import Path

import trio

from dep2p.daemon.problems import Problem
from dep2p.errors import RealmFileError
from dep2p.outside_text import file_name
from dep2p.realm.credentials import LEFTOVER_S, Realm, remove_leftovers

_logger = logging.getLogger("dep2p.daemon")


class RealmFiles:
    """Reads, adds and removes realm files. File access is in threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path_of(self, name: str) -> Path:
        """Return the file of a realm. A name that is no plain ASCII word becomes a digest, so that no file is outside
        the directory."""
        return self._directory / f"{file_name(name)}.realm"

    def load_all(self) -> tuple[list[Realm], list[str]]:
        """Return the realms that can be read, and a sentence for each other file: one bad file stops no other realm."""
        realms: dict[str, Realm] = {}
        problems: list[str] = []
        try:
            remove_leftovers(self._directory, older_than_s=LEFTOVER_S)
        except OSError as error:
            problems.append(f"a temporary file with a realm's secret cannot be deleted: {error}")
            _logger.error("a temporary file with a realm's secret stays", extra={"reason": str(error)})
        for path in sorted(self._directory.glob("*.realm")):
            try:
                realm = Realm.from_psk_file(path)
            except RealmFileError as error:
                problems.append(f"a realm is not joined: {error}")
                _logger.error("a realm is not joined", extra={"reason": str(error)})
            else:
                realms.setdefault(realm.realm_id, realm)
        return list(realms.values()), problems

    async def add(self, realm: Realm) -> None:
        """Write the file of a realm. Raises RealmFileError; :class:`Problem` D2003 when another realm has that name."""
        path = self.path_of(realm.name)
        await trio.to_thread.run_sync(self._add, realm, path)

    def _add(self, realm: Realm, path: Path) -> None:
        if path.exists():
            try:
                present = Realm.from_psk_file(path)
            except RealmFileError:
                present = None
            if present is None or present.realm_id != realm.realm_id:
                raise Problem("D2003", f"{path} holds another realm named {realm.name!r}")
        realm.save(path)

    async def remove(self, realm: Realm) -> None:
        """Delete every file that holds this realm."""
        await trio.to_thread.run_sync(self._remove, realm)

    def _remove(self, realm: Realm) -> None:
        for path in sorted(self._directory.glob("*.realm")):
            try:
                if Realm.from_psk_file(path).realm_id == realm.realm_id:
                    path.unlink(missing_ok=True)
                    remove_leftovers(self._directory, path.name)
            except RealmFileError:
                continue  # a damaged file may not be this realm's, and stays for its owner
            except OSError as error:
                raise RealmFileError(f"cannot delete {path}: {error.strerror or error}") from None
