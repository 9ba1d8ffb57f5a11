"""dep2p: a peer-to-peer messaging node. Public names load on first use, so that the CLI starts fast."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dep2p.errors import Dep2pError

__all__ = ["Dep2pError", "__version__"]
__version__ = "0.1.0"

_HOMES = {"Dep2pError": "dep2p.errors"}

if not TYPE_CHECKING:  # else checkers would accept any name at all

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
