"""Import py-libp2p without the HTTP clients that only its AutoTLS and UPnP code use: 11 MB and 0.1 s less per node.

Upstream behaviour: ``import libp2p`` (0.8.1) loads every transport, and with AutoTLS ``httpx`` (which loads ``rich``),
and ``requests``. Nothing here calls them. While libp2p is imported they are placeholders; afterwards an app that
imports them gets the real ones. An app that loaded them before is left alone.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

UNUSED = ("httpx", "requests")


class _Placeholder(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _PlaceholderFinder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def covers(self, name: str) -> bool:
        return name.partition(".")[0] in self._packages

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self.covers(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a placeholder has no code."""


def import_libp2p() -> None:
    """Import libp2p lean, unless it is imported already."""
    if "libp2p" in sys.modules:
        _quiet()
        return
    finder = _PlaceholderFinder([name for name in UNUSED if name not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("libp2p")
    finally:
        sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if finder.covers(name):
                del sys.modules[name]
    _quiet()


def _quiet() -> None:
    """Upstream cuts its logger off from the root's handlers, so Python's last resort prints a line to stderr for every
    connection that a stranger breaks off. What concerns us is counted and logged here; an app may add a handler."""
    logger = logging.getLogger("libp2p")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
