"""The software bill of materials of a release, as CycloneDX 1.5 in JSON: ``python packaging/sbom.py``.

It names every package that an installation of dep2p brings, with the version and the hashes of requirements.lock.
Nothing is fetched. Format: https://cyclonedx.org/docs/1.5/json/.
"""

import json
import re
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def locked() -> dict[str, tuple[str, list[str]]]:
    """Version and SHA-256 sums of each package in requirements.lock, by its normal name."""
    found: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if start := re.match(r"([\w.-]+)(?:\[[^]]*\])?==([^\s;\\]+)", line):
            name = normal(start[1])
            found[name] = (start[2], [])
        elif digest := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            found[name][1].append(digest[1])
    return found


def normal(name: str) -> str:
    """The name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """The direct requirements of an installed package that hold here, with their extras."""
    environments = [{"extra": extra} for extra in ("", *extras)]
    wanted = [Requirement(text) for text in distribution(name).requires or ()]
    return [
        (normal(each.name), frozenset(each.extras))
        for each in wanted
        if each.marker is None or any(each.marker.evaluate(environment) for environment in environments)
    ]


def bill() -> dict[str, object]:
    """The document."""
    versions = locked()
    depends: dict[str, dict[str, None]] = {}
    waiting = [("dep2p", frozenset[str]())]
    while waiting:
        name, extras = waiting.pop()
        known = depends.setdefault(name, {})
        for each, each_extras in requirements(name, extras):
            if each not in known:
                known[each] = None
                waiting.append((each, each_extras))
    components = [
        {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "version": versions[name][0],
            "purl": f"pkg:pypi/{name}@{versions[name][0]}",
            # Each file of a release has its own sum, and one component may carry several.
            "properties": [{"name": "dep2p:sha256", "value": digest} for digest in versions[name][1]],
        }
        for name in sorted(depends)
        if name != "dep2p"
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "dep2p",
                "name": "dep2p",
                "version": distribution("dep2p").version,
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": name, "dependsOn": sorted(depends[name])} for name in sorted(depends)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(bill(), indent=1) + "\n")
