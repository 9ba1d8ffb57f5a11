"""The same targets under libFuzzer: ``python -m tests.fuzz.with_atheris TARGET [libFuzzer's options]``.

Needs ``pip install atheris``, which `make fuzz` does not: its wheels lag behind Python's versions. Executions and
coverage are in libFuzzer's own lines; an input that it finds is added to ``tests/fuzz/findings``.
"""

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer ends, as by ``-max_total_time=3600``."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["dep2p"]):
        from tests.fuzz.engine import CORPUS, FINDINGS, load, save
        from tests.fuzz.targets import TARGETS
    name, *options = arguments
    target = TARGETS[name]

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except Exception:
            save(FINDINGS, name, [*load(FINDINGS, name), data])
            raise

    with tempfile.TemporaryDirectory() as directory:
        for number, data in enumerate([*load(CORPUS, name), *target.seeds]):
            (Path(directory) / str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], directory, *options], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
